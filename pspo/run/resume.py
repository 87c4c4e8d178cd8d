"""Resume a run: find it, check what may have changed since, and restore its state."""

import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import yaml

from pspo import distributed as dist
from pspo.config import RunConfig, TrainConfig
from pspo.model import fill_adapters, has_adapters, load_policy
from pspo.run.checkpoint import Progress, checkpoints, damage, load_checkpoint, remove, step_of, tidy
from pspo.run.records import differences, lock, read_config, read_json, read_jsonl, to_jsonl, write_text
from pspo.update import Learner

# Changes that a resumed run may make; any other would make another experiment of it and is refused.
FREE = {  # changes no number of the run
    "data.path", "distributed.timeout", "optimizer.halve_on_oom", "optimizer.max_skipped", "reward.on_error",
    "reward.timeout", "run.keep", "run.samples", "run.save_every", "run.tracker",
}  # fmt: skip
LONGER = {"run.max_steps", "run.max_tokens"}  # may grow, unless the learning rate depends on them
ROUNDING = {"model.attn_implementation", "model.compile", "model.gradient_checkpointing", "optimizer.microbatch_tokens",
            "distributed.gather"}  # fmt: skip


def claim(run: Path) -> IO[Any]:
    """Lock the run's folder until the returned file is closed; ValueError if another process has locked it."""
    file = (run / ".lock").open("a")
    if not lock(file):
        file.close()
        raise ValueError(f"--run.output_dir {run} is in use by another run: wait for it, or choose another folder")
    return file


def run_to_resume(resume: str, output_dir: str | None) -> Path | None:
    """The folder of the run to resume; None to start a new one.

    Raises ValueError if --run.output_dir holds something else, or --run.resume names no run or another one.
    """
    output = None if output_dir is None else Path(output_dir)
    if resume in ("auto", "never"):
        if output is None or not output.is_dir() or not set(os.listdir(output)) - {".lock"}:
            return None
        if resume == "never" or not (output / "config.yaml").is_file():
            raise ValueError(f"--run.output_dir {output} already holds something; choose a new folder")
        return output
    path = Path(resume).absolute()
    run = path.parent.parent if path.parent.name == "checkpoints" else Path(resume)
    if path not in (run.absolute(), *checkpoints(run)) or not (run / "config.yaml").is_file():
        raise ValueError(f"--run.resume {resume} is neither auto, never, a run's folder nor one of its checkpoints")
    if output is not None and output.absolute() != run.absolute():
        raise ValueError(f"--run.resume {resume} is not in --run.output_dir {output}: leave one of them out")
    return output or run


def allowed_changes(run: Path, resolved: str) -> dict[str, str]:
    """Allowed changes since the run's config.yaml, {switch: message}; ValueError names those that are not."""
    old_config = read_config(run / "config.yaml")
    constant = old_config["optimizer"]["schedule"] == "constant"
    changes, refused = {}, []
    for name, (old, new) in differences(old_config, yaml.safe_load(resolved)).items():
        message = f"--{name} was {old!r}, is {new!r}"
        grows = name in LONGER and constant and old is not None and (new is None or new > old)
        if name in FREE or name in ROUNDING or grows:
            changes[name] = f"{message} (other rounding)" if name in ROUNDING else message
        elif name not in ("run.output_dir", "run.resume"):
            refused.append(message)
    if refused:
        raise ValueError(
            f"--run.output_dir {run} holds another experiment ({'; '.join(refused)}): choose another folder, or the "
            "same switches to resume it"
        )
    return changes


def update_config(run: Path, resolved: str) -> None:
    """Write the run's config.yaml anew, but without a --run.resume PATH, which would resume from there again."""
    config = yaml.safe_load(resolved)
    config["run"] |= {"output_dir": str(run), "resume": "auto"}
    write_text(run / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def find_checkpoint(run: Path, resume: str) -> Path | None:
    """The newest undamaged checkpoint, or the one that --run.resume names; None if none was saved yet.

    Damaged ones are named and skipped. Raises ValueError if only damaged ones are left, or a finished run has none.
    """
    for folder in (run, run / "checkpoints"):
        tidy(folder)
    every = checkpoints(run)
    for folder in [folder for folder in every if folder.absolute() == Path(resume).absolute()] or every:
        reason = damage(folder)
        if reason is None:
            return folder
        print(f"{reason}; skipped", file=sys.stderr)
    if every or (run / "summary.json").exists():
        raise ValueError(f"--run.output_dir {run}: no checkpoint to resume from is left; choose another folder")
    return None


def restore(config: TrainConfig, run: Path, learner: Learner, stateful: dict[str, Any], fresh: Progress) -> Progress:
    """Restore learner, random generators and the run's folder to a checkpoint, whose progress is returned.

    If nothing was saved yet, that is ``fresh``. Raises ValueError if the run has other problems than ``fresh``.
    """
    checkpoint = dist.run_on_main(lambda: find_checkpoint(run, config.run.resume))
    policy, progress = learner.policy, fresh
    if checkpoint is not None:
        if dist.is_sharded(policy):
            dist.load_shards(checkpoint / "shards", policy, learner.optimizer)
        elif has_adapters(policy):
            fill_adapters(policy, str(checkpoint))
        else:
            saved = load_policy(replace(config.model, name_or_path=str(checkpoint), revision=None), policy.device)
            policy.load_state_dict(saved.state_dict())  # into the same memory: other alignment, other sums
        learner.steps, progress = load_checkpoint(checkpoint, stateful, policy.device)
        learner.microbatch_limit = progress.microbatch_limit
    if progress.problems != fresh.problems:
        raise ValueError(f"--run.output_dir {run} has other problems under the same name: choose another folder")
    if progress.best:
        progress.best = newest_best(run, progress.best["step"])
    dist.run_on_main(lambda: cut_back(run, learner.steps))
    if 0 < progress.ranks != dist.world_size():
        dist.seed_generators(config.run.seed, learner.steps)
        said = f"the checkpoint is from {progress.ranks} ranks: other tokens are drawn from here on"
        dist.run_on_main(lambda: print(said, file=sys.stderr))
    print(f"resuming {run} " + (f"from {checkpoint.name}" if checkpoint else "from the start: nothing was saved"))
    return progress


def newest_best(run: Path, step: int) -> dict[str, Any]:
    """The validation of the model in ``best/``: step ``step``'s or a later one's, which resuming reproduces."""
    file = run / "best" / "validation.json"
    if not file.is_file() or (best := read_json(file))["step"] < step:
        raise ValueError(f"{file.parent} is missing, or not the best model (step {step}'s): choose another folder")
    return best


def finished_summary(config: RunConfig, resolved: str) -> dict[str, Any]:
    """The summary of a run that is there already and finished; else {}."""
    run = run_to_resume(config.resume, config.output_dir)
    if run is None or not (run / "summary.json").exists():
        return {}
    longer = allowed_changes(run, resolved).keys() & LONGER
    summary = read_json(run / "summary.json")
    left = summary["optimizer_steps"] < config.max_steps and summary["tokens"] < (config.max_tokens or math.inf)
    return {} if longer and left else summary


def cut_back(run: Path, steps: int) -> None:
    """Remove what came after this step: newer checkpoints and lines of the records. An old summary is renamed."""
    if (summary := run / "summary.json").exists():
        ended = read_json(summary)["optimizer_steps"]
        summary.rename(run / f"summary-step-{ended:06d}.json")
    for folder in checkpoints(run):
        if step_of(folder) > steps:
            remove(folder)
    for path in (run / "metrics.jsonl", run / "samples.jsonl"):
        if path.exists():
            write_text(path, to_jsonl(record for record in read_jsonl(path) if record["step"] <= steps))
