"""Resume a run: find it, check what may have changed since, and restore its state."""

import hashlib
import json
import math
import os
import shutil
import sys
from collections import deque
from dataclasses import asdict, fields, replace
from fnmatch import fnmatch
from numbers import Rational
from pathlib import Path
from typing import IO, Any

import yaml

from pspo import distributed as dist
from pspo.config import LoraConfig, ModelConfig, RunConfig, TrainConfig
from pspo.model import fill_adapters, has_adapters, load_policy
from pspo.rollout import Prompts
from pspo.run.checkpoint import Progress, checkpoints, damage, hidden, load_checkpoint, prune, remove, step_of, tidy
from pspo.run.records import differences, lock, read_config, read_json, read_jsonl, to_jsonl, to_yaml, write_text
from pspo.tasks.datasets import SOURCES
from pspo.update import Learner

# Changes that a resumed run may make; any other would make another experiment of it and is refused.
FREE = {  # changes no number of the run
    "data.path", "distributed.timeout", "optimizer.halve_on_oom", "optimizer.max_skipped", "reward.on_error",
    "reward.timeout", "reward.workers", "rollout.engine_memory", "run.keep", "run.quiet", "run.tracker",
}  # fmt: skip
STEERED = {  # how far a step goes, and what is written when; not what is optimized, nor on which samples
    "algorithm.beta", "optimizer.lr", "optimizer.max_grad_norm", "run.samples", "run.save_every", "run.validate_every",
}  # fmt: skip
LONGER = {"run.max_steps", "run.max_tokens"}  # may grow, unless the learning rate depends on them
ROUNDING = {"model.attn_implementation", "model.compile", "model.gradient_checkpointing", "optimizer.microbatch_tokens",
            "distributed.gather"}  # fmt: skip
FIXED = {"distributed.strategy", "model.name_or_path", "model.revision", "model.dtype", "optimizer.name",
         *(f"model.lora.{part.name}" for part in fields(LoraConfig))}  # in forks, too  # fmt: skip
OURS = {".lock", "config.yaml", "data", "environment.json"}  # in a run's folder before anything is computed


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
        names = set(os.listdir(output)) if output is not None and output.is_dir() else set()
        configured = "config.yaml" in names
        if not configured and all(name in OURS or fnmatch(name, ".*.tmp") for name in names):
            return None
        if resume == "never" or not configured:
            raise ValueError(f"--run.output_dir {output} already holds something; choose a new folder")
        return output
    path = Path(resume).absolute()
    run = path.parent.parent if path.parent.name == "checkpoints" else Path(resume)
    if path not in (run.absolute(), *checkpoints(run)) or not (run / "config.yaml").is_file():
        raise ValueError(f"--run.resume {resume} is neither auto, never, a run's folder nor one of its checkpoints")
    if output is not None and output.absolute() != run.absolute():
        raise ValueError(f"--run.resume {resume} is not in --run.output_dir {output}: leave one of them out")
    return output or run


def changes_since(folder: Path, resolved: str) -> dict[str, tuple[Any, Any]]:
    """By switch, (old, new) of the configuration of a run or checkpoint, and of this one."""
    config = read_config(folder / "config.yaml")
    config["run"] = {"fork_from": None} | config["run"]  # version 0.1.0 had no forks, only float32 and no LoRA
    config["model"] = {"dtype": ModelConfig.dtype, "lora": asdict(LoraConfig())} | config["model"]
    config["rollout"] = {"lag": 0, "resample": 0} | config["rollout"]
    changes = differences(config, yaml.safe_load(resolved))
    return {name: pair for name, pair in changes.items() if name not in ("run.output_dir", "run.resume")}


def allowed_changes(run: Path, resolved: str) -> set[str]:
    """Switches that changed since the run's config.yaml and may; ValueError names those that may not."""
    constant = read_config(run / "config.yaml")["optimizer"]["schedule"] == "constant"
    allowed, refused = set(), []
    for name, (old, new) in changes_since(run, resolved).items():
        grows = name in LONGER and constant and old is not None and (new is None or new > old)
        if name in FREE | STEERED | ROUNDING or grows:
            allowed.add(name)
        else:
            refused.append(f"--{name} was {old!r}, is {new!r}")
    if refused:
        raise ValueError(
            f"--run.output_dir {run} holds another experiment ({'; '.join(refused)}): choose another folder, or the "
            "same switches to resume it"
        )
    return allowed


def check_changes(run: Path, resolved: str) -> None:
    """Raise ValueError for changes that are not allowed, unless the run holds no step yet: then it starts anew."""
    try:
        allowed_changes(run, resolved)
    except ValueError:
        if holds_steps(run):
            raise
        print(f"{run} holds no step of the run that was started there: it starts anew", file=sys.stderr)
        for name in ("best", "checkpoints"):
            shutil.rmtree(run / name, ignore_errors=True)
        (run / "environment.json").unlink(missing_ok=True)


def holds_steps(run: Path) -> bool:
    best = run / "best" / "validation.json"
    steps = [step_of(folder) for folder in checkpoints(run)] + [read_json(best)["step"] if best.is_file() else 0]
    return any(steps) or bool(read_jsonl(run / "metrics.jsonl"))


def fork_parent(config: RunConfig, resolved: str) -> Path:
    """The checkpoint that --run.fork_from names, or the newest undamaged one of the run that it names.

    Raises ValueError if there is none, or this configuration cannot continue it.
    """
    path = Path(config.fork_from).absolute()
    every = checkpoints(path) or [folder for folder in checkpoints(path.parent.parent) if folder == path]
    parent = first_intact(every)
    if parent is None:
        raise ValueError(f"--run.fork_from {path} is neither an undamaged checkpoint nor a run's folder with one")
    for name, (old, new) in changes_since(parent, resolved).items():
        if name in FIXED:
            advice = f"to begin with the weights alone, set --model.name_or_path {parent} and no --run.fork_from"
            raise ValueError(f"--{name} was {old!r}, is {new!r}: a fork cannot change it; {advice}")
    if step_of(parent) >= config.max_steps:
        raise ValueError(f"--run.max_steps {config.max_steps} counts from step 0: it must be above {parent.name}")
    return parent


def fork(config: RunConfig, resolved: str, run: Path) -> Path | None:
    """Copy the checkpoint of --run.fork_from into the run, which needs its parent no more; None without a parent.

    Raises OSError if the parent, still training, has removed it meanwhile.
    """
    if config.fork_from is None:
        return None
    parent = fork_parent(config, resolved)
    copy, tested = run / "checkpoints" / parent.name, parent.parents[1] / "test-before.jsonl"
    if tested.exists():
        shutil.copy(tested, run)
    return shutil.copytree(parent, hidden(copy, "new")).rename(copy)


def update_config(run: Path, resolved: str) -> None:
    """Write the run's config.yaml anew, but without a --run.resume PATH, which would resume from there again."""
    config = yaml.safe_load(resolved)
    config["run"] |= {"output_dir": str(run), "resume": "auto"}
    write_text(run / "config.yaml", to_yaml(config))


def find_checkpoint(run: Path, resume: str) -> Path | None:
    """The newest undamaged checkpoint, or the one that --run.resume names; None if none was saved yet.

    Damaged ones are named and skipped. Raises ValueError if only damaged ones are left, or a finished run has none.
    """
    for folder in (run, run / "checkpoints"):
        tidy(folder)
    every = checkpoints(run)
    named = [folder for folder in every if folder.absolute() == Path(resume).absolute()]
    checkpoint = first_intact(named or every)
    if checkpoint is None and (every or (run / "summary.json").exists()):
        raise ValueError(f"--run.output_dir {run}: no checkpoint to resume from is left; choose another folder")
    return checkpoint


def first_intact(folders: list[Path]) -> Path | None:
    """The first undamaged checkpoint; damaged ones before it are named."""
    for folder in folders:
        reason = damage(folder)
        if reason is None:
            return folder
        print(f"{reason}; skipped", file=sys.stderr)
    return None


def restore(
    config: TrainConfig, resolved: str, run: Path, learner: Learner, stateful: dict[str, Any], fresh: Progress
) -> Progress:
    """Restore learner, random generators and the run's folder to a checkpoint, whose progress is returned.

    If nothing was saved yet, that is ``fresh``. What changed since the checkpoint holds from its step on. Raises
    ValueError if the run has other problems than ``fresh``, unless it is the parent of this one.
    """
    found = dist.run_on_main(lambda: find_checkpoint(run, config.run.resume))
    checkpoint = found or dist.run_on_main(lambda: fork(config.run, resolved, run))
    policy, progress, changes = learner.policy, fresh, {}
    if checkpoint != found:
        print(f"forked from {config.run.fork_from} at {checkpoint.name}")
    else:
        print(f"resuming {run} " + (f"from {checkpoint.name}" if checkpoint else "from the start: nothing was saved"))
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
        set_hyperparameters(learner)
        changes = changes_since(checkpoint, resolved)
    if "run.fork_from" in changes:  # the checkpoint is the parent's
        progress = of_fork(progress, fresh)
        if any(name.startswith(("rollout.", "reward.", "algorithm.")) for name in changes.keys() - {"rollout.lag"}):
            progress.waiting.clear()  # drawn and scored otherwise
    known = progress.problems.keys() & fresh.problems  # validation may be steered
    if any(progress.problems[split] != fresh.problems[split] for split in known):
        raise ValueError(f"--run.output_dir {run} has other problems under the same name: choose another folder")
    progress.problems |= fresh.problems
    if progress.best:
        progress.best = best_so_far(run, progress.best["step"], learner.steps)
        if progress.best.get("step") == 0:  # 0.1.0 did not keep these two
            progress.untrained = progress.best
        elif not progress.best_trained or not progress.best:
            progress.best_trained = progress.best
    dist.run_on_main(lambda: cut_back(run, learner.steps, config.run.keep))
    dist.run_on_main(lambda: record_changes(run, learner.steps, changes))
    if "run.seed" in changes:
        dist.seed_generators(config.run.seed, learner.steps)
    if 0 < progress.ranks != dist.world_size():
        dist.seed_generators(config.run.seed, learner.steps)
        dropped = ", and rollouts that waited for --rollout.lag are dropped" if config.rollout.lag else ""
        said = f"the checkpoint is from {progress.ranks} ranks: other tokens are drawn from here on{dropped}"
        dist.run_on_main(lambda: print(said, file=sys.stderr))
    return progress


def problems_hash(prompts: Prompts) -> str:
    """SHA-256 of the encoded prompts, the answers, what a breakdown goes by, and the fields.

    Fields that repeat one of these are left out, and those of published sets, which cannot change: so problems that
    earlier versions could load have the same hash as there.
    """
    parts = []
    for ids, problem in zip(prompts.ids, prompts.problems, strict=True):
        answer = str(problem.answer) if isinstance(problem.answer, Rational) else [problem.answer]
        known = (ids, answer, problem.source, problem.category, problem.level)
        fields = {} if problem.source in SOURCES else problem.fields
        more = {name: value for name, value in fields.items() if str(value) not in known}
        parts.append((*known, more) if more else known)
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def set_hyperparameters(learner: Learner) -> None:
    """Give the restored optimizer and schedule this configuration's values; the saved ones may be others."""
    optimizer, scheduler, peak = learner.optimizer, learner.scheduler, learner.optimizer.defaults["lr"]
    lr = peak * scheduler.lr_lambdas[0](scheduler.last_epoch)
    for group in optimizer.param_groups:
        group.update({name: value for name, value in optimizer.defaults.items() if name in group})
        group.update(initial_lr=peak, lr=lr)
    scheduler.base_lrs, scheduler._last_lr = [peak], [lr]


def of_fork(parent: Progress, fresh: Progress) -> Progress:
    """A fork's progress: its parent's, but the best models are of its own validations.

    Other training problems come in an order of their own; the untrained model's test was on other test problems.
    """
    same = {split: parent.problems.get(split) == fresh.problems.get(split) for split in ("train", "test", "validation")}
    prompts, before = parent.prompts if same["train"] else 0, parent.before if same["test"] else {}
    untrained = parent.untrained if same["validation"] else {}
    waiting = parent.waiting if same["train"] else deque()
    own = {"problems": fresh.problems, "prompts": prompts, "before": before, "untrained": untrained}
    return replace(parent, **own, waiting=waiting, validated={}, best={}, best_trained={})


def record_changes(run: Path, step: int, changes: dict[str, tuple[Any, Any]]) -> None:
    """Print the changes since the checkpoint of this step, and make them the last of ``changes.jsonl``."""
    path = run / "changes.jsonl"
    records = [record for record in read_jsonl(path) if record["step"] < step]
    unrecorded = FREE if "run.fork_from" in changes else FREE | LONGER  # which change no number
    for name, (old, new) in changes.items():
        rounding = " (other rounding)" if name in ROUNDING else ""
        if name != "run.fork_from":
            print(f"changed from step {step} on: --{name} was {old!r}, is {new!r}{rounding}", file=sys.stderr)
        records += [{"step": step, "switch": name, "old": old, "new": new}] if name not in unrecorded else []
    if records or path.exists():
        write_text(path, to_jsonl(records))


def best_so_far(run: Path, step: int, steps: int) -> dict[str, Any]:
    """The validation of the model in ``best/``, step ``step``'s; {} if one after ``steps`` replaced it.

    With a change the run may never come to that one again.
    """
    file = run / "best" / "validation.json"
    if not file.is_file() or (best := read_json(file))["step"] < step:
        raise ValueError(f"{file.parent} is missing, or not the best model (step {step}'s): choose another folder")
    return best if best["step"] <= steps else {}


def finished_summary(config: RunConfig, resolved: str) -> dict[str, Any]:
    """The summary of a run that is there already and finished; else {}."""
    run = run_to_resume(config.resume, config.output_dir)
    if run is None or not (run / "summary.json").exists():
        return {}
    changes = allowed_changes(run, resolved)
    summary = read_json(run / "summary.json")
    left = summary["optimizer_steps"] < config.max_steps and summary["tokens"] < (config.max_tokens or math.inf)
    if changes & LONGER and left:
        return {}
    if steered := changes & STEERED:
        advice = "raise --run.max_steps too, or --run.fork_from one of its checkpoints"
        raise ValueError(f"{run} is finished, --{min(steered)} would change nothing: {advice}")
    return summary


def cut_back(run: Path, steps: int, keep: int) -> None:
    """Remove what came after this step: newer checkpoints and lines of the records. An old summary is renamed.

    Older checkpoints than it keeps are there if a kill came between saving one and removing another.
    """
    if (summary := run / "summary.json").exists():
        ended = read_json(summary)["optimizer_steps"]
        summary.rename(run / f"summary-step-{ended:06d}.json")
    for folder in checkpoints(run):
        if step_of(folder) > steps:
            remove(folder)
    prune(run, keep)
    for name in ("test-after.jsonl", "test-final.jsonl"):
        (run / name).unlink(missing_ok=True)
    for path in (run / "metrics.jsonl", run / "samples.jsonl"):
        if path.exists():
            write_text(path, to_jsonl(record for record in read_jsonl(path) if record["step"] <= steps))
