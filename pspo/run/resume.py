"""Going on with a run: whose folder it is, what may have changed meanwhile, where it goes on from, what stops it."""

import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
import yaml
from transformers import PreTrainedModel

from pspo.config import ModelConfig, RunConfig, TrainConfig
from pspo.distributed import (
    as_forward,
    fill,
    from_main,
    is_main,
    is_sharded,
    load_shards,
    seed_generators,
    shard,
    world_size,
)
from pspo.model import autocasts, check_head, empty_policy, load_policy, weight_files
from pspo.run.checkpoint import (
    Progress,
    checkpoints,
    load_checkpoint,
    newest_checkpoint,
    remove,
    step_of,
    tidy,
    unreadable_is_damaged,
)
from pspo.run.records import flat, lock, read_config, read_json, read_jsonl, to_jsonl, write_text

EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped by a signal and saved; the same command goes on
EXIT_INTERRUPTED = 130  # stopped at once

# What a run may have changed when it goes on. Any other change makes another experiment of it, and is refused.
FREE = {  # changes no number of the run
    "data.path", "distributed.timeout", "optimizer.halve_on_oom", "optimizer.max_skipped", "reward.on_error",
    "reward.timeout", "run.keep", "run.output_dir", "run.resume", "run.samples", "run.save_every", "run.tracker",
}  # fmt: skip
LONGER = {"run.max_steps", "run.max_tokens"}  # may grow, unless the learning rate depends on them
ROUNDING = {"model.attn_implementation", "model.compile", "model.gradient_checkpointing", "optimizer.microbatch_tokens",
            "distributed.gather"}  # fmt: skip


class Stopped(Exception):
    """A run that was told to stop, and is saved."""


class StopSignals:
    """SIGTERM and SIGINT: the first asks the run to stop after its rollout, the second is a KeyboardInterrupt."""

    received: signal.Signals | None = None

    def __enter__(self) -> "StopSignals":
        self.previous = {number: signal.signal(number, self.receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def receive(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number)
        for other in self.previous:
            signal.signal(other, signal.default_int_handler)
        line = f"\n{self.received.name}: stopping after this rollout, then saving; a second one stops at once\n"
        os.write(2, line.encode())  # a print could be what was interrupted


def claim(run: Path) -> IO[Any]:
    """Lock the run's folder until the file returned is closed or the process ends; ValueError where it is locked."""
    file = (run / ".lock").open("a")
    if not lock(file):
        file.close()
        raise ValueError(f"--run.output_dir {run} is in use by another run: wait for it, or choose another folder")
    return file


def run_to_resume(resume: str, output_dir: str | None) -> Path | None:
    """The folder of the run to go on with; None where there is none and a new one is to be started.

    Raises ValueError where --run.output_dir holds something else, or --run.resume names no run, or another than that.
    """
    output = None if output_dir is None else Path(output_dir)
    if resume in ("auto", "never"):
        if output is None or not output.is_dir() or not set(os.listdir(output)) - {".lock"}:
            return None
        if resume == "never" or not (output / "config.yaml").is_file():
            raise ValueError(f"--run.output_dir {output} already holds something; choose a new folder")
        return output
    path = Path(resume)
    run = path.absolute().parent.parent if path.absolute().parent.name == "checkpoints" else path
    if not path.is_dir() or not (run / "config.yaml").is_file():
        raise ValueError(f"--run.resume {resume} is neither a run's folder nor one of its checkpoints, auto or never")
    if output is not None and output.absolute() != run.absolute():
        raise ValueError(f"--run.resume {resume} is not in --run.output_dir {output}: leave one of them out")
    return output or run


def changes(run: Path, resolved: str) -> dict[str, str]:
    """What is different from the run's config.yaml and may be, as text by switch; ValueError names what may not be."""
    old, new = flat(read_config(run / "config.yaml")), flat(yaml.safe_load(resolved))
    changed = {
        name: f"--{name} was {old[name]!r}, is {new.get(name)!r}"
        for name in old
        if old[name] != new.get(name) and name not in ("run.output_dir", "run.resume")
    }
    longer = {name for name in changed.keys() & LONGER if old.get("optimizer.schedule") == "constant"
              and old[name] is not None and (new[name] is None or new[name] > old[name])}  # fmt: skip
    if refused := [line for name, line in changed.items() if name not in FREE | ROUNDING | longer]:
        raise ValueError(
            f"--run.output_dir {run} holds another experiment ({'; '.join(refused)}): choose another folder, or the "
            "same switches to go on with it"
        )
    return {name: f"{line} (other rounding)" if name in ROUNDING else line for name, line in changed.items()}


def record_changes(run: Path, resolved: str) -> None:
    """Bring the run's config.yaml up to date, but for a --run.resume PATH: it would start from there again."""
    config = yaml.safe_load(resolved)
    config["run"] |= {"output_dir": str(run), "resume": "auto"}
    write_text(run / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def find_checkpoint(run: Path, resume: str, load: Callable[[Path], None] = lambda folder: None) -> Path | None:
    """The newest checkpoint that verifies and loads, or the one that --run.resume names; None where none was saved yet.

    Damaged ones are named. Raises ValueError where there is none to be found but a run to lose.
    """
    every, is_finished = from_main(lambda: (tidied(run), (run / "summary.json").exists()))
    named = [folder for folder in every if folder.absolute() == Path(resume).absolute()]
    if not named and Path(resume).absolute().parent == (run / "checkpoints").absolute():
        raise ValueError(f"--run.resume {resume} is no checkpoint's name, such as step-000042")
    found, damage = newest_checkpoint(named or every, load)
    for line in damage if is_main() else []:
        print(f"{line}; passed over", file=sys.stderr)
    if found is None and (every or is_finished):
        raise ValueError(f"--run.output_dir {run}: no checkpoint that could be gone on from; choose another folder")
    return found


def tidied(run: Path) -> list[Path]:
    """The run's checkpoints, newest first, once what a kill cut off is finished or undone."""
    tidy(run)
    return checkpoints(run)


def load_across_ranks(config: TrainConfig, model: ModelConfig, device: torch.device) -> PreTrainedModel:
    """A model as --distributed.strategy has it: whole on every rank, or sharded."""
    if config.distributed.strategy != "fsdp2":
        return load_policy(model, device)
    from_main(lambda: weight_files(model) and None)  # downloads them, if need be, before the others look
    files = weight_files(model)
    policy = empty_policy(model, files[0].parent)
    shard(policy, torch.bfloat16 if autocasts(model.autocast, device) else None)
    if missing := fill(policy, files, device):
        raise ValueError(
            f"--model.name_or_path {model.name_or_path}: its files lack {', '.join(missing[:3])} ...; load it in one "
            "process and save it with save_pretrained"
        )
    as_forward(check_head, policy)
    if model.compile:
        policy.base_model.compile(dynamic=True)
    return policy


def go_on(
    config: TrainConfig, run: Path, policy: PreTrainedModel, stateful: dict[str, Any], fresh: Progress
) -> tuple[int, Progress]:
    """Put policy, optimizer, schedule, random generators and the run's folder back to where a checkpoint was taken.

    Returns the optimizer steps taken and the progress; 0 and ``fresh`` where nothing was saved yet. Raises ValueError
    where the run is of other problems than ``fresh``.
    """
    loaded = [(0, fresh)]

    def load(folder: Path) -> None:
        with unreadable_is_damaged(folder, "the model"):
            if is_sharded(policy):
                load_shards(folder / "shards", policy, stateful["optimizer"].optimizer)
            else:
                saved = load_policy(replace(config.model, name_or_path=str(folder), revision=None), policy.device)
                policy.load_state_dict(saved.state_dict())  # into the tensors that are there: same memory, same sums
        loaded.append(load_checkpoint(folder, stateful, policy.device))

    checkpoint = find_checkpoint(run, config.run.resume, load)
    steps, progress = loaded[-1]
    if progress.problems != fresh.problems:
        raise ValueError(f"--run.output_dir {run} is of other problems under the same name: choose another folder")
    if progress.best:
        progress.best = best_of(run, progress.best["step"])
    from_main(lambda: cut_back(run, steps))
    if 0 < progress.ranks != world_size():
        seed_generators(config.run.seed, steps)
        if is_main():
            print(
                f"the checkpoint is of {progress.ranks} ranks, this is {world_size()}: weights and optimizer are the "
                "same, but from here on other tokens are drawn than would have been",
                file=sys.stderr,
            )
    print(f"going on with {run} " + (f"from {checkpoint.name}" if checkpoint else "from the start: nothing was saved"))
    return steps, progress


def best_of(run: Path, step: int) -> dict[str, Any]:
    """The validation of the model in ``best/``: the one that was best by this step, or one found later.

    A later one may stay: on its way there the run finds nothing better, and there it finds the same numbers. Where
    numbers do not repeat (on a GPU), it is still what its validation.json says.
    """
    file = run / "best" / "validation.json"
    best = read_json(file, ("step", "validation_reward")) if file.is_file() else {"step": -1}
    if best["step"] < step:
        raise ValueError(f"{file.parent} is missing, or not the best model (step {step}'s): choose another folder")
    return best


def finished(config: RunConfig, resolved: str) -> dict[str, Any]:
    """The summary of the run that is there already; {} where there is none, or it is not finished."""
    run = run_to_resume(config.resume, config.output_dir)
    if run is None or not (run / "summary.json").exists():
        return {}
    longer = changes(run, resolved).keys() & LONGER
    keys = ("before", "after", "best_model", "best_step", "tokens", "optimizer_steps")
    summary = read_json(run / "summary.json", keys)
    left = summary["optimizer_steps"] < config.max_steps and summary["tokens"] < (config.max_tokens or math.inf)
    return {} if longer and left else summary


def cut_back(run: Path, steps: int) -> None:
    """Take what came after this step out of the run: it is done again, or, where it was finished, more of it.

    Newer checkpoints go, and lines of the records, one that was cut short included; a summary makes room for another.
    """
    if (summary := run / "summary.json").exists():
        ended = read_json(summary, ("optimizer_steps",))["optimizer_steps"]
        summary.rename(run / f"summary-step-{ended:06d}.json")
    for folder in checkpoints(run):
        if step_of(folder) > steps:
            remove(folder)
    for path in (run / "metrics.jsonl", run / "samples.jsonl"):
        if path.exists():
            write_text(path, to_jsonl(record for record in read_jsonl(path) if record["step"] <= steps))
