"""The command ``python -m pspo.train`` around the training loop: what it prints, and how it ends."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from pspo import distributed as dist
from pspo.cli.escape import printable
from pspo.cli.files import Settings
from pspo.cli.parse import memory_errors, parse, user_errors
from pspo.cli.signals import EXIT_INTERRUPTED, EXIT_STOPPED, Stopped
from pspo.cli.user_code import RunFailed, UserCodeFailed
from pspo.config import DefaultRate, TrainConfig
from pspo.evaluate.results import ESTIMATES, MEANS, from_record, label, table
from pspo.losses import SurrogateError
from pspo.model import casts_to_bf16, is_out_of_memory
from pspo.rollout.engine import EngineError
from pspo.run.card import changed_settings, evaluate_command
from pspo.run.folders import newest_checkpoint
from pspo.run.prepare import prepare
from pspo.run.resume import finished_summary
from pspo.run.run import Run
from pspo.tasks.failures import user_frames, user_traceback

METHOD_LINE = (  # switches of the header's line "method"
    "algorithm.surrogate", "algorithm.epochs", "algorithm.minibatches", "rollout.prompts", "rollout.group_size",
)  # fmt: skip


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
    """Train, print the result, and return the summary; save a run that is stopped, or whose user's code raises."""
    if not config.run.quiet:
        print_header(run)
    if dist.is_main():
        warn_of_leaks(run)
    resumes = f"the same command with --run.output_dir {run.output} resumes"
    with run.resources, run.signals:
        try:
            summary = train(run)
        except (Stopped, KeyboardInterrupt) as error:
            run.recorder.bar.close()
            if isinstance(error, Stopped):
                run.save_snapshot()
            if dist.is_main():
                print(f"\nstopped; {resumes}", file=sys.stderr)
            raise
        except EngineError as error:
            raise RunFailed(f"the engine failed: {error}; {resumes} from the last checkpoint") from error
        except UserCodeFailed as error:  # between two updates: the weights are the snapshot's
            run.save_snapshot()
            saved = f"last checkpoint: {newest_checkpoint(run.output)}; {resumes}"
            raise UserCodeFailed(f"{error}\n\n{saved}") from error.__cause__
        except Exception as error:  # a surrogate of the user's may raise anything
            if isinstance(error, RunFailed) or is_out_of_memory(error):
                raise
            if type(error) is not SurrogateError and not user_frames(error):
                raise
            saved = f"last checkpoint: {newest_checkpoint(run.output)}"
            raise UserCodeFailed(f"{user_traceback(error)}\n\n{saved}") from error
    print_summary(config, summary)
    return summary


def print_header(run: Run) -> None:
    """Print model, data, method and learning rate."""
    config = run.config
    policy = run.learner.policy
    sampling = run.sampler.sampling
    stops = run.sampler.tokenizer.convert_ids_to_tokens(sampling.stop_ids)
    stops += [repr(text) for text in sampling.stop_strings]
    sizes = [f"{len(prompts):,} {split}" for split, prompts in run.validator.prompts.items()]
    optimizer = config.optimizer
    source = "default for its size" if isinstance(optimizer.lr, DefaultRate) else "set"
    settings = changed_settings(config, ("algorithm", "rollout", "reward"), METHOD_LINE)
    print(f"model   {config.model.name_or_path}: {describe_model(config, policy)} on {policy.device}")
    if dist.world_size() > 1:
        print(f"ranks   {dist.world_size()} ({config.distributed.strategy})")
    print(
        f"data    {config.data.name}: {', '.join(sizes)} problems; completions end at {' or '.join(stops) or 'nothing'}"
    )
    print(f"method  {config.algorithm.surrogate}, {config.algorithm.epochs} epochs x {config.algorithm.minibatches} "
          f"minibatches per rollout of {config.rollout.prompts} x {config.rollout.group_size}")  # fmt: skip
    if settings:
        print(f"        {', '.join(settings)}")
    print(f"rate    {optimizer.lr:g} ({source}), {optimizer.schedule}, {optimizer.warmup_steps} steps of warm-up; "
          f"{optimizer.name}")  # fmt: skip


def describe_model(config: TrainConfig, policy: PreTrainedModel) -> str:
    """Such as "494.0M parameters, 8.8M of them trained, in float32"."""
    text = f"{policy.num_parameters() / 1e6:.1f}M parameters"
    trained = policy.num_parameters(only_trainable=True)
    if trained < policy.num_parameters():
        text += f", {trained / 1e6:.1f}M of them trained,"
    dtypes = dict.fromkeys(str(parameter.dtype).removeprefix("torch.") for parameter in policy.parameters())
    autocast = " under bf16 autocast" if casts_to_bf16(config.model.autocast, policy.device) else ""
    return f"{text} in {' and '.join(dtypes)}{autocast}"


def warn_of_leaks(run: Run) -> None:
    """Warn if training prompts are also validated or tested on."""
    prompts = {split: {repr(problem.prompt) for problem in run.validator.prompts[split].problems}
               for split in run.validator.prompts}  # fmt: skip
    leaked = prompts["train"] & (prompts.get("validation", set()) | prompts.get("test", set()))
    if leaked:
        print(f"WARNING: {len(leaked):,} training prompts are also in validation or test", file=sys.stderr)


def print_summary(config: TrainConfig, summary: dict[str, Any]) -> None:
    """Print tests and validations, what the run has cost, where its best model is, and how to evaluate it."""
    best_step = summary["best_step"]
    steps = summary["optimizer_steps"]
    if summary["after"]:
        names = [name for name in ("accuracy", "mean_reward", *MEANS) if name in summary["after"]]
        labels = [f"{label(name)} [95%]" if name in ESTIMATES else label(name) for name in names]
        rows = [["greedy, held-out", *labels]]
        models = {"before": "before", "after": f"after, step {best_step}", "final": f"final, step {steps}"}
        for test, model in models.items():
            if test != "final" or best_step != steps:
                rows.append([model, *(from_record(summary[test], name) for name in names)])
        print(table(rows))
    validations = {record["step"]: record for record in summary["validation"].values() if record}
    if validations:
        rewards = [f"{validations[step]['validation_reward']:.3f} at step {step}" for step in sorted(validations)]
        print(f"validation reward {', '.join(rewards)}; best at step {best_step}")
        if best_step == 0:
            print("no trained step was better than the untrained model, which is returned")
    cost = f"{summary['tokens']:,} tokens, {summary['seconds']:.0f} s, peak memory {summary['peak_memory_gb']:.1f} GiB"
    print(f"{steps} steps, {cost}; step {best_step}'s model: {summary['best_model']}")
    print(f"look inside: pspo view {Path(summary['best_model']).parent}")
    print(f"evaluate it: {printable(evaluate_command(config, summary['best_model']))}")
