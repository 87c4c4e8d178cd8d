"""The command ``python -m pspo.train`` around the training loop: what it prints, and how it ends."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from pspo import distributed as dist
from pspo.cli.escape import printable
from pspo.cli.files import Settings
from pspo.cli.parse import memory_errors, parse, user_errors
from pspo.cli.signals import EXIT_INTERRUPTED, EXIT_STOPPED, Stopped
from pspo.cli.user_code import RunFailed, UserCodeFailed
from pspo.config import RewardConfig, TrainConfig, default_lr
from pspo.evaluate.results import ESTIMATES, MEANS, from_record, label, table
from pspo.losses import SurrogateError
from pspo.model import casts_to_bf16, has_adapters, is_out_of_memory
from pspo.run.card import changed_settings, evaluate_command
from pspo.run.folders import newest_checkpoint
from pspo.run.prepare import prepare
from pspo.run.resume import finished_summary
from pspo.run.run import Run
from pspo.tasks.failures import user_frames, user_traceback

METHOD_LINE = (  # switches of the header's line "method", and what changes no number
    "algorithm.surrogate", "algorithm.epochs", "algorithm.minibatches", "algorithm.beta", "rollout.prompts",
    "rollout.group_size", "rollout.lag", "reward.timeout", "reward.on_error", "reward.workers",
)  # fmt: skip
FEW_PROBLEMS = 20  # of validation


@memory_errors(
    "pspo.train",
    "In training: lower --optimizer.microbatch_tokens, or set --model.gradient_checkpointing true; the same command "
    "resumes from the last checkpoint. In rollouts or validation: lower --rollout.max_rows or --run.validation_limit, "
    "in a new --run.output_dir",
)
def train_command(train: Callable[[Run], dict[str, Any]], args: Sequence[str] | None = None) -> None:
    """Parse the switches, prepare the run, train, and print the result.

    Exit codes: 1 for a run that failed, 2 for an error of the user's, 75 for a run stopped by a signal and saved, 130
    for one interrupted at once.
    """
    config, settings = parse(TrainConfig, "pspo.train", args)
    with user_errors("pspo.train", once=True):
        dist.init(config.distributed.strategy)
    try:
        with user_errors("pspo.train"):
            run = None if print_if_finished(config, settings) else prepare(config, settings)
        if run is not None:
            run_training(train, config, run)
    except Stopped:
        raise SystemExit(EXIT_STOPPED) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except RunFailed as error:
        if dist.is_main():
            print(f"\npspo.train: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def print_if_finished(config: TrainConfig, settings: Settings) -> dict[str, Any]:
    """Print the summary of a run that is finished, and return it; {} of any other."""
    summary = dist.run_on_main(lambda: finished_summary(config.run, settings))
    if summary:
        print(f"already finished: {Path(config.run.output_dir) / 'summary.json'}\n")
        print_summary(config, summary)
    return summary


def run_training(train: Callable[[Run], dict[str, Any]], config: TrainConfig, run: Run) -> dict[str, Any]:
    """Train, and print the result; returns the summary."""
    if not config.run.quiet:
        print_header(run)
    if dist.is_main():
        for warning in config_warnings(run):
            print(f"WARNING: {warning}", file=sys.stderr)
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
    """Print model, data, method and learning rate."""
    config, policy = run.config, run.learner.policy
    algorithm, rollout, optimizer = config.algorithm, config.rollout, config.optimizer
    ranks = f" x {dist.world_size()} ranks ({config.distributed.strategy})" if dist.world_size() > 1 else ""
    print(f"model   {config.model.name_or_path}: {describe_model(config, policy)} on {policy.device}{ranks}")

    prompts = run.validator.prompts
    sizes = [f"{len(prompts[split]):,} {split}" for split in prompts]
    stops = run.sampler.tokenizer.convert_ids_to_tokens(run.sampler.sampling.stop_ids)
    stops += [repr(text) for text in run.sampler.sampling.stop_strings]
    end = " or ".join(stops) or "their limit alone"
    print(f"data    {config.data.name}: {', '.join(sizes)} problems; completions end at {end}")

    late = f", trained {rollout.lag} rollouts late" if rollout.lag else ""
    penalty = f", KL penalty {algorithm.beta:g}" if algorithm.beta else ""
    print(f"method  {algorithm.surrogate}, {algorithm.epochs} epochs x {algorithm.minibatches} minibatches per rollout "
          f"of {rollout.prompts} x {rollout.group_size}{late}{penalty}")  # fmt: skip
    others = changed_settings(config, ("algorithm", "rollout", "reward"), METHOD_LINE)
    if others:
        print(f"        {', '.join(text.partition('.')[2] for text in others)}")
    warmup = f" after {optimizer.warmup_steps} steps of warm-up" if optimizer.warmup_steps else ""
    source = "default for its size" if optimizer.lr == default_lr(config.model) else "set"
    rate = f"{optimizer.lr:g} ({source}), {optimizer.schedule}{warmup}"
    print(f"rate    {rate}; {optimizer.name}")


def describe_model(config: TrainConfig, policy: PreTrainedModel) -> str:
    """Such as "494.0M parameters, 8.8M of them trained, in float32"."""
    text = f"{policy.num_parameters() / 1e6:.1f}M parameters"
    if has_adapters(policy):
        trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
        text += f", {trained / 1e6:.1f}M of them trained,"
    dtypes = dict.fromkeys(str(parameter.dtype).removeprefix("torch.") for parameter in policy.parameters())
    autocast = " under bf16 autocast" if casts_to_bf16(config.model.autocast, policy.device) else ""
    return f"{text} in {' and '.join(dtypes)}{autocast}"


def config_warnings(run: Run) -> Iterator[str]:
    """Settings that run, but are hardly meant."""
    config, prompts = run.config, run.validator.prompts
    rollouts = -(-config.run.max_steps // (config.algorithm.epochs * config.algorithm.minibatches))
    if 0 < rollouts - 1 <= config.rollout.lag:
        yield f"--rollout.lag {config.rollout.lag}: the untrained model draws all of this run's {rollouts} rollouts"
    if config.optimizer.warmup_steps >= config.run.max_steps:
        yield f"--optimizer.warmup_steps {config.optimizer.warmup_steps}: the rate is never --optimizer.lr in this run"
    if "validation" in prompts and len(prompts["validation"]) < FEW_PROBLEMS:
        n = len(prompts["validation"])
        yield f"{n} validation problems choose the best model: by chance, mostly; raise --run.validation_limit"
    train = {repr(problem.prompt) for problem in prompts["train"].problems}
    held_out = [problem for split in prompts if split != "train" for problem in prompts[split].problems]
    leaked = train & {repr(problem.prompt) for problem in held_out}
    if leaked:
        yield f"{len(leaked):,} training prompts are also in validation or test"


def print_summary(config: TrainConfig, summary: dict[str, Any]) -> None:
    """Print the tests, what the run has cost, where its best model is, and how to evaluate it."""
    if summary["after"]:
        print(test_table(config, summary))
    validations = describe_validations(summary["validation"])
    if validations:
        print(validations)
    best_step = summary["best_step"]
    cost = f"{summary['tokens']:,} tokens, {summary['seconds']:.0f} s, peak memory {summary['peak_memory_gb']:.1f} GiB"
    print(f"{summary['optimizer_steps']} steps, {cost}; step {best_step}'s model: {summary['best_model']}")
    print(f"look inside: pspo view {Path(summary['best_model']).parent}")
    command = evaluate_command(config, summary["best_model"])
    has_test = summary["after"] or config.data.name != "file"
    if has_test and "__main__." not in command:  # of a notebook
        print(f"evaluate it: {printable(command)}")


def test_table(config: TrainConfig, summary: dict[str, Any]) -> str:
    """Measures of the model before training, of the best and of the final one."""
    names = ["accuracy", "mean_reward", *MEANS]
    if config.reward.functions != RewardConfig().functions:
        names = ["mean_reward", "accuracy", *MEANS]
    names = [name for name in names if name in summary["after"]]
    labels = [f"{label(name)} [95%]" if name in ESTIMATES else label(name) for name in names]
    models = {"before": summary["before"], f"after, step {summary['best_step']}": summary["after"]}
    if summary["best_step"] != summary["optimizer_steps"]:
        models[f"final, step {summary['optimizer_steps']}"] = summary["final"]
    rows = [["greedy, held-out", *labels]]
    for model, test in models.items():
        rows.append([model, *(from_record(test, name) for name in names)])
    return table(rows)


def describe_validations(validations: dict[str, dict[str, Any]]) -> str:
    """Such as "validation reward 0.412 at step 0, 0.905 at step 80 (best), 0.890 at step 100"; "" of none."""
    best = validations["best"]
    rewards = {validation["step"]: validation["validation_reward"] for validation in validations.values() if validation}
    parts = []
    for step in sorted(rewards):
        mark = " (best)" if step == best["step"] else ""
        parts.append(f"{rewards[step]:.3f} at step {step}{mark}")
    text = f"validation reward {', '.join(parts)}" if parts else ""
    if best and best["step"] == 0:
        text += ". No trained step was better than the untrained model, which is returned"
    return text
