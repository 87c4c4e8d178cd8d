"""The training loop as the command ``python -m pspo.train`` and from Python: what it prints, and how it ends."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pspo import distributed as dist
from pspo.cli.failures import EXIT_INTERRUPTED, EXIT_STOPPED, RunFailed, UserCodeFailed
from pspo.cli.files import Settings, named_damage
from pspo.cli.parse import memory_errors, parse, user_errors
from pspo.cli.python import config_from_python
from pspo.cli.terminal import clip, printable
from pspo.config import TrainConfig
from pspo.losses import SurrogateError
from pspo.model import casts_to_bf16
from pspo.rollout import Experience, Prompts
from pspo.rollout.engine import EngineError
from pspo.run.card import changed_switches, describe_results, evaluate_command
from pspo.run.folders import describe_newest
from pspo.run.prepare import prepare
from pspo.run.resume import finished_summary
from pspo.run.run import Run
from pspo.tasks.failures import user_frames, user_traceback
from pspo.tasks.workers import Stopped

FEWEST_TO_CHOOSE = 30  # validation problems, below which choosing the best model is mostly luck


@memory_errors(
    "pspo.train",
    "lower --optimizer.microbatch_tokens, --rollout.max_rows or --run.validation_limit, or set "
    "--model.gradient_checkpointing true",
)
def train_command(train: Callable[[Run], dict[str, Any]], args: Sequence[str] | None = None) -> None:
    """Train by the command's arguments; exits with 1 if a run fails, 2 for errors of the user, 75 or 130 if stopped."""
    config, settings = parse(TrainConfig, "pspo.train", args)
    with user_errors("pspo.train", once=True):
        dist.init(config.distributed.strategy)
    try:
        with user_errors("pspo.train"):
            run = None if print_if_finished(config, settings) else prepare(config, settings)
        if run is not None:
            run_training(train, run)
    except Stopped:
        raise SystemExit(EXIT_STOPPED) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except RunFailed as error:
        if dist.is_main():
            print(f"\npspo.train: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def train_from_python(
    train: Callable[[Run], dict[str, Any]],
    file: str | Path | None,
    sections: dict[str, Any],
    on_rollout: Callable[[Experience, list[dict[str, float]]], None] | None,
) -> dict[str, Any]:
    """Train by a YAML file and sections of the configuration over it; returns the summary."""
    try:
        config, settings = config_from_python(file, **sections)
        dist.init(config.distributed.strategy)
        summary = print_if_finished(config, settings)
        if summary:
            return summary
        run = prepare(config, settings)
        run.on_rollout = on_rollout
        return run_training(train, run)
    except (ValueError, OSError, Stopped, RunFailed) as error:
        raise error.with_traceback(None) from None  # frames of this package say nothing, and fill a notebook


def print_if_finished(config: TrainConfig, settings: Settings) -> dict[str, Any]:
    """Print the summary of a run that is finished, and return it; {} of any other."""
    summary = dist.run_on_main(lambda: finished_summary(config.run, settings))
    if summary:
        file = Path(config.run.output_dir) / "summary.json"
        print(f"already finished: {file}\n")
        with named_damage(file):
            print_summary(settings, summary)
    return summary


def run_training(train: Callable[[Run], dict[str, Any]], run: Run) -> dict[str, Any]:
    """Train, print the result, and return the summary; save a run that is stopped, or whose user's code raises."""
    if not run.config.run.quiet:
        print_header(run)
    if dist.is_main():
        warn_of_leaks(run.validator.prompts)
        n_validation = len(run.validator.prompts.get("validation", range(FEWEST_TO_CHOOSE)))
        if n_validation < FEWEST_TO_CHOOSE:
            fix = "add some, or return the last model by --run.validate_every 0"
            print(f"WARNING: {n_validation} validation problems choose the best model, by luck: {fix}", file=sys.stderr)
    resumes = f"the same command with --run.output_dir {run.output} resumes"
    with run.resources, run.signals:
        try:
            summary = train(run)
        except (Stopped, KeyboardInterrupt) as error:
            run.recorder.bar.close()
            if isinstance(error, Stopped) and run.learner.steps and run.checkpointer.snapshot:
                run.checkpointer.save_snapshot()
            if dist.is_main():
                print(f"\nstopped; {resumes}", file=sys.stderr)
            raise
        except EngineError as error:
            raise RunFailed(f"the engine failed: {error}; {resumes} from the last checkpoint") from error
        except UserCodeFailed as error:  # between two updates: the weights are the snapshot's
            if run.learner.steps and run.checkpointer.snapshot:
                run.checkpointer.save_snapshot()
            raise UserCodeFailed(f"{error}\n\n{describe_newest(run.output)}; {resumes}") from error.__cause__
        except Exception as error:  # a surrogate of the user's may raise anything
            is_users = type(error) is SurrogateError or user_frames(error)
            if isinstance(error, RunFailed) or not is_users:
                raise
            raise UserCodeFailed(f"{user_traceback(error)}\n\n{describe_newest(run.output)}") from error
    print_summary(run.settings, summary)
    return summary


def print_header(run: Run) -> None:
    """Print model, data, method and learning rate."""
    config = run.config
    policy = run.learner.policy
    dtypes = " and ".join(dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in policy.parameters()))
    trained = policy.num_parameters(only_trainable=True)
    autocast = " under bf16 autocast" if casts_to_bf16(config.model.autocast, policy.device) else ""
    sizes = [f"{len(prompts):,} {split}" for split, prompts in run.validator.prompts.items()]
    stops = run.sampler.tokenizer.convert_ids_to_tokens(run.sampler.sampling.stop_ids)
    stops += [repr(text) for text in run.sampler.sampling.stop_strings]
    print(f"""\
model   {config.model.name_or_path}: {policy.num_parameters() / 1e6:.1f}M parameters, \
{trained / 1e6:.1f}M trained, in {dtypes}{autocast}, on {dist.world_size()} x {policy.device}
data    {config.data.name}: {", ".join(sizes)} problems; completions end at {" or ".join(stops) or "their limit alone"}
system  {clip(repr(config.data.system_text), 100) if config.data.system_text else "no system prompt"}
method  {config.algorithm.surrogate}, {config.algorithm.epochs} epochs x {config.algorithm.minibatches} minibatches \
per rollout of {config.rollout.prompts} x {config.rollout.group_size}
rate    {config.optimizer.lr:g}, {config.optimizer.schedule}; {config.optimizer.name}""")
    if policy.device.type == "cuda" and config.rollout.engine is None:
        tokens = config.optimizer.microbatch_tokens or run.learner.microbatch_tokens
        print(f"memory  {tokens:,} tokens in a microbatch, "
              f"{run.sampler.sampling.max_rows:,} rows decoded at a time")  # fmt: skip
    changed = changed_switches(run.settings)
    if changed:
        print(f"changed {', '.join(changed)}")


def warn_of_leaks(prompts: dict[str, Prompts]) -> None:
    """Warn if training prompts are also validated or tested on."""
    train = {repr(problem.prompt) for problem in prompts["train"].problems}
    held_out = {repr(problem.prompt) for split in prompts if split != "train" for problem in prompts[split].problems}
    if train & held_out:
        print(f"WARNING: {len(train & held_out):,} training prompts are also in validation or test", file=sys.stderr)


def print_summary(settings: Settings, summary: dict[str, Any]) -> None:
    """Print tests and validations, what the run has cost, where its best model is, and how to evaluate it."""
    model = summary["best_model"]
    cost = f"{summary['tokens']:,} tokens, {summary['seconds']:.0f} s, peak memory {summary['peak_memory_gb']:.1f} GiB"
    results = describe_results(summary)
    if results:
        print(results)
    returned = f"step {summary['best_step']}'s" if summary["best_step"] else "the untrained"
    print(f"{summary['optimizer_steps']} steps, {cost}; {returned} model: {model}")
    print(f"look inside: pspo view {Path(model).parent}")
    print(f"evaluate it: {printable(evaluate_command(settings, model))}")
