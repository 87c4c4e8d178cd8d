"""The command ``python -m pspo.train`` around the training loop: what it prints, and how it ends."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import PreTrainedModel

from pspo import distributed as dist
from pspo.cli.escape import printable
from pspo.cli.files import Settings, changed_code, read_jsonl, reading
from pspo.cli.parse import memory_errors, parse, user_errors
from pspo.cli.python import config_from_python
from pspo.cli.signals import EXIT_INTERRUPTED, EXIT_STOPPED, Stopped
from pspo.cli.user_code import UserCodeFailed
from pspo.config import LORA_LR, PAPER_LR, DefaultRate, TrainConfig
from pspo.evaluate.results import ESTIMATES, MEANS, changes, from_record, label, table
from pspo.losses import SurrogateError
from pspo.model import casts_to_bf16, has_adapters, is_out_of_memory
from pspo.rollout import Experience, Prompts
from pspo.run.card import evaluate_command
from pspo.run.folders import RunFailed, newest_checkpoint
from pspo.run.prepare import prepare
from pspo.run.resume import finished_summary
from pspo.run.run import Run
from pspo.run.switches import NO_SETTING
from pspo.tasks.failures import user_frames, user_traceback

IN_METHOD = {"surrogate", "epochs", "minibatches", "beta", "prompts", "group_size", "lag"}  # the header's line


@memory_errors(
    "pspo.train",
    "In training: lower --optimizer.microbatch_tokens, or set --model.gradient_checkpointing true or "
    "--distributed.gather microbatch; the same command resumes from the last checkpoint. In rollouts or validation: "
    "lower --rollout.max_rows or --run.validation_limit, in a new --run.output_dir",
)
def train_command(train: Callable[[Run], dict[str, Any]], args: Sequence[str] | None = None) -> None:
    """Parse the switches, prepare the run, train, and print the result.

    Exit codes: 1 for a run that failed, 2 for an error of the user's, 75 for a run stopped by a signal and saved, 130
    for one interrupted at once.
    """
    config, settings = parse(TrainConfig, "pspo.train", args)
    with user_errors("pspo.train", once=True):
        dist.init(config.distributed.strategy, config.distributed.timeout)
    try:
        with user_errors("pspo.train"):
            run = None if print_if_finished(config, settings) else prepare(config, settings)
        if run:
            run_training(train, config, run)
    except (Stopped, KeyboardInterrupt) as stopped:
        raise SystemExit(EXIT_STOPPED if isinstance(stopped, Stopped) else EXIT_INTERRUPTED) from None
    except RunFailed as error:
        if dist.is_main():
            print(f"\npspo.train: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def print_if_finished(config: TrainConfig, settings: Settings) -> dict[str, Any]:
    """Print the summary of a run that is finished, and return it; {} of any other."""
    if summary := dist.run_on_main(lambda: finished_summary(config.run, settings)):
        file = Path(str(summary.get("best_model"))).with_name("summary.json")
        print(f"already finished: {file}\n")
        if changed := changed_code(file.parent, settings):
            advice = "another --run.output_dir trains with it"
            print(f"WARNING: {', '.join(changed)} has changed since this run: {advice}", file=sys.stderr)
        with reading(file):
            print_summary(config, summary)
    return summary


def run_training(train: Callable[[Run], dict[str, Any]], config: TrainConfig, run: Run) -> dict[str, Any]:
    """Train, and print the result; returns the summary."""
    if not config.run.quiet:
        print_header(run)
    for doubt in doubts(run) if dist.is_main() else ():
        print(f"WARNING: {doubt}", file=sys.stderr)
    try:
        with run.resources, run.signals:
            summary = train(run)
    except (Stopped, KeyboardInterrupt):
        if dist.is_main():
            print(f"\nstopped; the same command with --run.output_dir {run.output} resumes", file=sys.stderr)
        raise
    except Exception as error:  # a surrogate of the user's may raise anything
        is_users = user_frames(error) or type(error) is SurrogateError
        if isinstance(error, RunFailed) or is_out_of_memory(error) or not is_users:
            raise
        saved = f"last checkpoint: {newest_checkpoint(run.output)}"
        raise UserCodeFailed(f"{user_traceback(error)}\n\n{saved}") from error
    print_summary(config, summary)
    return summary


def print_header(run: Run) -> None:
    config, policy = run.config, run.learner.policy
    algorithm, rollout = config.algorithm, config.rollout
    prompts = run.validator.prompts
    sizes = ", ".join(f"{len(its):,} {split}{describe_duplicates(split, prompts)}" for split, its in prompts.items())
    tokenizer, sampling = run.sampler.tokenizer, run.sampler.sampling
    stops = [*tokenizer.convert_ids_to_tokens(sampling.stop_ids), *map(repr, sampling.stop_strings)]
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    rank = f" of rank {config.model.lora.rank}" * (config.model.lora.rank > 0)
    adapters = f", {trained / 1e6:.1f}M of them trained (LoRA{rank})" if has_adapters(policy) else ""
    dtypes = " and ".join(dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in policy.parameters()))
    dtypes += " under bf16 autocast" * casts_to_bf16(config.model.autocast, policy.device)
    strategy, shard = config.distributed.strategy, config.distributed.shard
    sharded = f"{strategy}, shard {shard}" if shard else strategy
    ranks = f" x {dist.world_size()} ranks ({sharded})" if dist.world_size() > 1 else ""
    size = f"{policy.num_parameters() / 1e6:.1f}M parameters{adapters} in {dtypes}"
    print(f"model   {config.model.name_or_path}: {size} on {policy.device}{ranks}")
    end = " or ".join(stops) or "their limit alone"
    print(f"data    {config.data.name}: {sizes} problems; completions end at {end}")
    lag = f", trained {rollout.lag} rollouts late" if rollout.lag else ""
    penalty = f", KL penalty {algorithm.beta:g}" if algorithm.beta else ""
    print(f"method  {algorithm.surrogate}, {algorithm.epochs} epochs x {algorithm.minibatches} minibatches per rollout "
          f"of {rollout.prompts} x {rollout.group_size}{lag}{penalty}")  # fmt: skip
    if others := ", ".join(other_settings(config)):
        print(f"        {others}")
    optimizer = config.optimizer
    warm = f" after {optimizer.warmup_steps} steps of warm-up" if optimizer.warmup_steps else ""
    print(f"rate    {optimizer.lr:g} ({describe_rate(config, policy)}), {optimizer.schedule}{warm}; {optimizer.name}")


def other_settings(config: TrainConfig) -> Iterator[str]:
    """What the method's line leaves out of algorithm, rollouts and rewards, where it is not the default."""
    for section in (config.algorithm, config.rollout, config.reward):
        defaults = type(section)()
        for part in fields(section):
            value, default = getattr(section, part.name), getattr(defaults, part.name)
            is_shown = part.name not in IN_METHOD and f"{section.section}.{part.name}" not in NO_SETTING
            if is_shown and value not in (default, "none"):  # to which a correction's default is resolved
                items = value if isinstance(value, list) else [value]
                yield f"{part.name} {' + '.join(getattr(item, '__name__', str(item)) for item in items)}"


def describe_rate(config: TrainConfig, policy: PreTrainedModel) -> str:
    """Where --optimizer.lr comes from."""
    rate, lora = config.optimizer.lr, has_adapters(policy)
    if not isinstance(rate, DefaultRate):
        return "set"
    of = "ten times " * lora
    if rate != (LORA_LR[PAPER_LR] if lora else PAPER_LR):
        return f"{of}the default for tiny models"
    nearest = "" if 0.4e9 < policy.num_parameters() < 1.6e9 else ", the nearest in size"
    return f"{of}the paper's for models of 0.5B and 1.5B{nearest}"


def doubts(run: Run) -> Iterator[str]:
    """Settings that run, but hardly do what was meant."""
    config, problems = run.config, len(run.stream.prompts)
    rollout, rank, modules = config.rollout, config.model.lora.rank, run.learner.policy.modules()
    rollouts = -(-config.run.max_steps // (config.algorithm.epochs * config.algorithm.minibatches))
    widths = [min(m.in_features, m.out_features) for m in modules if hasattr(m, "lora_A") and hasattr(m, "in_features")]
    if rank > max(widths, default=rank):
        yield f"--model.lora.rank {rank} is above that of every layer it adapts, {max(widths)} at most"
    if rollout.lag and rollout.lag >= rollouts - 1:
        yield f"--rollout.lag {rollout.lag}: the untrained model draws all that this run trains on, {rollouts} rollouts"
    if config.optimizer.warmup_steps >= config.run.max_steps:
        yield f"--optimizer.warmup_steps {config.optimizer.warmup_steps}: the rate is never --optimizer.lr in this run"
    if config.algorithm.ratio_to == "proximal" and not rollout.lag:
        yield "--algorithm.ratio_to proximal changes nothing without --rollout.lag"
    if rollout.prompts > problems:
        yield f"--rollout.prompts {rollout.prompts}: a rollout repeats problems, of which there are {problems}"


def describe_duplicates(split: str, prompts: dict[str, Prompts]) -> str:
    """Such as " (41 repeated, 3 also in validation or test)", of the training problems; "" if there are none."""
    if split != "train":
        return ""
    train, *others = ({repr(problem.prompt) for problem in its.problems} for its in prompts.values())
    repeated, leaked = len(prompts["train"]) - len(train), len(train & set().union(*others))
    counts = {"repeated": repeated, "also in validation or test": leaked}
    parts = [f"{n:,} {what}" for what, n in counts.items() if n]
    return f" ({', '.join(parts)})" if parts else ""


def print_summary(config: TrainConfig, summary: dict[str, Any]) -> None:
    if summary["after"]:
        names = [name for name in ("accuracy", "mean_reward", *MEANS) if name in summary["after"]]
        rows = [("greedy, held-out", *(label(name) + " [95%]" * (name in ESTIMATES) for name in names))]
        steps = {"before": 0, "after": summary["best_step"], "final": summary["optimizer_steps"]}
        for when in ("before", "after", "final") if steps["after"] != steps["final"] else ("before", "after"):
            if summary[when]:  # a fork's untrained model was tested on its parent's problems
                rows.append((f"{when}, step {steps[when]}", *(from_record(summary[when], name) for name in names)))
        print(table(rows))
        pair = ("before", "after" if summary["best_step"] else "final")  # step 0's model is the one before
        tests = [read_jsonl(Path(summary["best_model"]).parent / f"test-{when}.jsonl") for when in pair]
        if summary["before"] and all(tests):
            print(f"\n{changes(*tests, 3, pair)}\n")
    if line := describe_validations(summary.get("validation", {})):
        print(line)
    cost = f"{summary['tokens']:,} tokens, {summary['seconds']:.0f} s, peak memory {summary['peak_memory_gb']:.1f} GiB"
    print(f"{summary['optimizer_steps']} steps, {cost}; step {summary['best_step']}'s model: {summary['best_model']}")
    print(f"look inside: pspo view {Path(summary['best_model']).parent}")
    command, tested = evaluate_command(config, summary["best_model"]), summary["after"] or config.data.name != "file"
    if tested and "__main__." not in command:  # which is a notebook's
        print(f"evaluate it: {printable(command)}")


def describe_validations(validations: dict[str, dict[str, Any]]) -> str:
    """Such as "validation reward 0.412 at step 0, 0.905 at step 80 (best), 0.890 at step 100 (final)"; "" of none."""
    names: dict[tuple[int, float], list[str]] = {}  # by step and reward
    for name, validation in validations.items():
        if validation and (name != "best_trained" or validation != validations["best"]):
            names.setdefault((validation["step"], validation["validation_reward"]), []).append(name.replace("_", " "))
    if not names:
        return ""
    parts = [f"{reward:.3f} at step {step} ({', '.join(names[step, reward])})" for step, reward in sorted(names)]
    untrained = ". No trained step was better than the untrained model, which is returned"
    return f"validation reward {', '.join(parts)}{untrained * (validations['best'].get('step') == 0)}"


class CallableModule(ModuleType):
    """Makes the module of ``train`` callable: ``pspo.train("tiny-base", data=problems, reward=my_reward)``."""

    def __call__(
        self,
        model: str | dict[str, Any] | None = None,
        data: Any = None,
        reward: Any = None,
        algorithm: Any = None,
        rollout: dict[str, Any] | None = None,
        optimizer: dict[str, Any] | None = None,
        run: dict[str, Any] | None = None,
        distributed: dict[str, Any] | None = None,
        config: str | Path | None = None,
        on_rollout: Callable[[Experience, list[dict[str, float]]], None] | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        """Train as ``python -m pspo.train`` does; returns the summary, as in ``summary.json``.

        Such as ``pspo.train("tiny-base", data=problems, reward=my_reward, run={"max_steps": 50})``. An argument is a
        section of the configuration: a dict of its switches, or its main one alone. ``--rollout.top_p 0.9`` of the
        command and of messages is ``rollout={"top_p": 0.9}`` here; `pspo.config.TrainConfig` has them all, with their
        defaults. A name that is unknown raises, with the one that may have been meant.

        Args:
            model: an embedded model ("tiny-base" unless given), a local folder or a hub id;
                {"name_or_path", "dtype", "lora": {"rank", ...}, ...}.
            data: a data set's name ("arithmetic" unless given); or problems: dicts with ``prompt``, ``answer`` and
                fields of your own, `Problem`, or a `datasets.Dataset`. Of 50 or more a fifth is held out, and tested
                before and after. {"train": problems, "validation", "test", "limit", "holdout", "system_prompt", ...}.
            reward: a reward function, a `Reward` or a name, or a list of them; {"functions", "weights", ...}.
            algorithm: a surrogate, by name or as an instance; {"surrogate", "epochs", "aggregation", "beta", ...}.
            rollout: {"prompts", "group_size", "max_completion_tokens", "temperature", "top_p", ...}.
            optimizer: {"lr", "schedule", "max_grad_norm", "microbatch_tokens", ...}.
            run: {"max_steps", "seed", "name", "output_dir", "validate_every", "test_limit", "tracker", ...}.
            distributed: {"strategy", ...}, under torchrun.
            config: a YAML file, or a method that is a loss with other settings: "grpo", "ppo", "dr-grpo", "dapo" or
                "rloo". The other arguments override it.
            on_rollout: called after each rollout with its `Experience` and the metrics of its optimizer steps. It only
                reads: the run ends with the same bits without it.

        Raises ValueError for a wrong setting, RunFailed for a run that cannot continue, Stopped for one that Ctrl-C has
        ended. The same call with the same ``run={"output_dir": ...}`` resumes.
        """
        sections = {"model": model, "data": data, "reward": reward, "algorithm": algorithm, "rollout": rollout,
                    "optimizer": optimizer, "run": run, "distributed": distributed} | others  # fmt: skip
        given = {name: section for name, section in sections.items() if section is not None}
        try:
            train_config, settings = config_from_python(config, **given)
            if summary := print_if_finished(train_config, settings):
                return summary
            prepared = prepare(train_config, settings)
        except (ValueError, OSError, Stopped, RunFailed) as error:  # our frames say nothing, and fill a notebook
            raise error.with_traceback(None) from None
        prepared.on_rollout = on_rollout
        try:
            return run_training(self.train, train_config, prepared)
        except (Stopped, RunFailed) as error:
            raise error.with_traceback(None) from None
