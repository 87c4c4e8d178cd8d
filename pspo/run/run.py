"""A run: how its parts come together, how it starts (by the command ``python -m pspo.train`` or from Python) and ends.

A run resumes from its newest undamaged checkpoint if the configuration is the same. Only switches that change no number
and an engine's arguments may differ, and limits may grow (`pspo.config.Fact`).
"""

import contextlib
import importlib.util
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pspo import distributed as dist
from pspo import files
from pspo.cli.parse import Changes, Settings, parse, require_same
from pspo.cli.python import config_from_python, default_output
from pspo.cli.values import to_yaml
from pspo.config import RunConfig, TrainConfig, require, switches_with
from pspo.endings import exit_codes, fail_together, save_at_end, user_errors
from pspo.errors import Stopped
from pspo.inputs import Inputs, load_inputs
from pspo.model.device import VARIABLES, choose_threads, peak_memory_gb
from pspo.model.find import resolve_adapters
from pspo.rollout import Experience, How, PolicySampler, PromptStream, Sampler, make_sampling
from pspo.rollout.drawing import Generators, random_numbers, set_torch_states, torch_states
from pspo.rollout.engine import Engine, find_engine, start_engine
from pspo.rollout.sampler import check_decoding
from pspo.rollout.source import find_source
from pspo.run.checkpointer import Checkpointer
from pspo.run.messages import model_card, print_header, print_warnings, summary_text
from pspo.run.recorder import Recorder
from pspo.run.validator import Validator
from pspo.signals import StopSignals
from pspo.token_table import TOKENS
from pspo.update import drawn_logprobs
from pspo.update.learner import check_reference, make_learner
from pspo.update.optimizers import check_optimizer

Summary = dict[str, Any]  # a run's summary.json
OnRollout = Callable[[Experience, list[dict[str, float]]], None]  # called with a rollout and its steps' metrics


class Run:
    """The parts of a run; ``resources`` (the folder's lock, the engine) are closed at its end."""

    on_rollout: OnRollout | None = None

    def __init__(self, config: TrainConfig, settings: Settings, output: Path, resources: contextlib.ExitStack) -> None:
        """Load data and model and make the parts; errors that need no model are raised before it is loaded."""
        self.config = config
        self.settings = settings
        self.output = output
        self.resources = resources
        self.signals = StopSignals()
        engine = None if config.rollout.engine is None else find_engine(config.rollout.engine)
        inputs = load_inputs(config, config.rollout, config.split_limits)
        tokenizer = inputs.tokenizer
        check_reference(config, tokenizer)
        prompts = inputs.prompts
        device = dist.local_device()
        self.generators = Generators(device, config.run.seed)
        with random_numbers(self.generators):
            self.learner = make_learner(config, device)
        policy = self.learner.policy
        choose_threads(policy)
        sampling = make_sampling(policy, tokenizer, config.rollout, config.algorithm)
        check_decoding(policy, tokenizer, sampling, prompts["train"], config.model.autocast)
        self.how = How(sampling, policy if engine is None else None, self.generators)
        sampler = self.make_sampler(engine, inputs)
        self.recorder = Recorder(config, self.learner, tokenizer, prompts["train"], output)
        self.validator = Validator(config, sampler, self.how, self.recorder, prompts)
        self.source = find_source(config)(
            config=config,
            stream=PromptStream(prompts["train"], config),
            sampler=sampler,
            how=self.how,
            learner=self.learner,
            phase=self.phase,
            logprobs=partial(drawn_logprobs, self.learner, config=config),
            failures=self.recorder.failures,
        )
        self.checkpointer = Checkpointer(config, self.parts(), output)

    def make_sampler(self, engine: Engine | None, inputs: Inputs) -> Sampler:
        """The sampler: the policy, an engine, or an environment's episodes by either."""
        sampler = by_model = PolicySampler(inputs.tokenizer, self.config.model.autocast, self.signals, self.generators)
        if engine is not None:
            self.resources.callback(engine.close)
            sampler = start_engine(engine, self.config, self.learner, by_model, inputs.prompts, self.how)
        return inputs.in_episodes(sampler, self.learner.policy)

    def parts(self) -> dict[str, Any]:
        """The parts, by name, whose states a checkpoint holds."""
        parts = {
            "stream": self.source.stream,
            "learner": self.learner,
            "validator": self.validator,
            "recorder": self.recorder,
            "delay": self.source,
            "generators": self.generators,
            "algorithm.surrogate": self.config.algorithm.surrogate,
        }
        return parts | {f"algorithm.terms.{i}": term for i, term in enumerate(self.config.loss_terms)}

    def start(self) -> None:
        """Start tracker and progress bar; test and validate the model, unless it is tested already."""
        self.resources.enter_context(self.recorder.start(self.settings))  # closes the bar before an error is printed
        with self.phase("test"):
            self.validator.start()
        del self.recorder.rollout.seconds["test"]  # the test is no part of a rollout
        self.recorder.bar.restart_clock()
        if self.recorder.rollout.steps:  # the last rollout's validation was stopped or failed
            self.close_rollout()

    def begin_rollout(self) -> bool:
        """Take a snapshot of the parts, then replace the reference if due; False at the end of the run.

        Raises Stopped if any rank was asked to stop.
        """
        self.take_snapshot()
        if dist.max_over_ranks(self.signals.error is not None):
            raise Stopped
        every = self.config.algorithm.reference_every
        if every > 0 and not self.recorder.limit_reached:
            self.learner.refresh_reference(every)  # before the draw, whose advantages may ask for the reference
        return not self.recorder.limit_reached

    def take_snapshot(self) -> None:
        """Wait for a rollout that is being drawn ahead, and keep the parts' states."""
        with self.phase("generate"):
            self.source.settle()
            self.checkpointer.take_snapshot()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase. Outside an update, a stop or an exception on one of several ranks is raised on all of them."""
        self.recorder.bar.set_description_str(f"step, {name}")
        began = time.perf_counter()
        with fail_together() if self.learner.n_ranks > 1 and name != "train" else contextlib.nullcontext():
            yield
        seconds = self.recorder.rollout.seconds
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

    def conclude_rollout(self, experience: Experience, steps: list[dict[str, float]]) -> None:
        """Record a rollout and the metrics of the ``steps`` that it was trained by; validate and save if due."""
        self.recorder.record(experience, steps)
        if self.on_rollout is not None:  # before a validation that may be stopped: a resumed run does not call it again
            self.take_snapshot()  # saved if the callback fails
            state = self.generators.state_dict()
            with fail_together():
                self.on_rollout(experience, [dict(step) for step in steps])
            self.generators.load_state_dict(state)  # the callback changes no bit of the run
        self.close_rollout()

    def close_rollout(self) -> None:
        """Validate if due, write the rollout's line, save if due."""
        every = self.config.run.validate_every
        if every and self.recorder.is_due(every):
            self.take_snapshot()
            with self.phase("validate"):
                self.recorder.rollout.line |= self.validator.validate()
        is_save_due = self.recorder.is_due(self.config.run.save_every)
        self.recorder.write()
        if is_save_due:
            self.take_snapshot()
            self.checkpointer.save_snapshot()

    def finish(self) -> Summary:
        """Save the final model, test it and the best validated one (step 0's counts), and return the summary."""
        self.recorder.bar.close()
        self.checkpointer.snapshot = {}  # the final model is saved; tests replace the policy's weights by the best
        summary = self.validator.finish() | {
            "output_dir": str(self.output),
            "tokens": self.recorder.tokens,
            "optimizer_steps": self.learner.steps,
            "seconds": round(self.recorder.elapsed, 2),
            "peak_memory_gb": round(peak_memory_gb(self.learner.policy.device), 3),
        }
        if dist.is_main():
            with files.write_errors(self.output / "summary.json"):
                models = {str(self.output / "final"): self.learner.steps, summary["best_model"]: summary["best_step"]}
                for model, step in models.items():
                    files.write_text(Path(model) / "README.md", model_card(self.config, self.settings, step, summary))
                files.write_json(self.output / "summary.json", summary)
            self.recorder.finish()
        return summary


# --- how a run starts


def make_folder(config: TrainConfig, resources: contextlib.ExitStack) -> Path:
    """Make and lock a run's folder; ValueError if it cannot be used."""
    output = Path(config.run.output_dir or default_output(config))
    files.check_new_folder(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        resources.enter_context(files.lock_folder(output))
    except OSError as error:
        raise ValueError(f"--run.output_dir {output} cannot be written to: {error}") from error
    resources.callback(remove_unbegun, output)
    return output


def remove_unbegun(folder: Path) -> None:
    """Remove the folder of a run that could not begin, unless it holds problems."""
    if not files.is_run(folder):
        with contextlib.suppress(OSError):
            (folder / ".lock").unlink()
            folder.rmdir()


def check_same(run: Path, settings: Settings) -> Changes:
    """The `differences` from the run's configuration; ValueError if one of them is not allowed."""
    is_constant = settings["optimizer"]["schedule"] == "constant"
    steps = settings["algorithm"]["epochs"] * settings["algorithm"]["minibatches"]  # steps of a rollout

    def may_differ(name: str, old: Any, new: Any) -> bool:
        grows = name in switches_with("may grow") and is_constant and old is not None and (new is None or new > old)
        grows = grows and (name != "run.max_steps" or old % steps == 0)  # otherwise the old limit cut a rollout short
        return grows or name in switches_with("free") or name.startswith("rollout.engine.init_args.")

    fix = f"choose another --run.output_dir; --run.fork_from {run} starts there from this run's weights"
    return require_same(run, settings, may_differ, fix)


def find_checkpoint(run: Path, settings: Settings) -> Path | None:
    """The newest undamaged checkpoint of a run of these settings; None, and old records removed, if none was saved."""
    if not files.is_run(run):
        return None
    if files.checkpoints(run) or (run / "metrics.jsonl").exists():  # another run's records are kept
        check_same(run, settings)
    for folder in (run, run / "checkpoints"):
        files.remove_leftovers(folder)
    saved = files.checkpoints(run)
    checkpoint = files.first_undamaged(saved)
    if checkpoint is None and (saved or (run / "summary.json").exists()):
        raise ValueError(f"--run.output_dir {run}: no checkpoint to resume from is left; choose another folder")
    if checkpoint is None:
        print(f"{run} holds no checkpoint: its run starts anew", file=sys.stderr)
        for name in ("best", "checkpoints", TOKENS):
            shutil.rmtree(run / name, ignore_errors=True)
        for file in (run / "environment.json", *run.glob("*.jsonl")):
            file.unlink(missing_ok=True)
    return checkpoint


def find_parent(fork_from: str) -> Path:
    """The checkpoint that --run.fork_from names, or the newest undamaged one of the run that it names."""
    path = Path(fork_from).absolute()
    parent = files.first_undamaged(files.checkpoints(path) or [path])
    if parent is None or not (parent / "parts.pt").exists():  # best/ has a manifest, but no parts
        raise ValueError(f"--run.fork_from {path} is neither an undamaged checkpoint nor a run's folder with one")
    return parent


def compute_in_order(resources: contextlib.ExitStack, device: torch.device) -> None:
    """Make a CPU's threads add gradients in one order; closing ``resources`` restores the process's settings."""
    resources.callback(random.setstate, random.getstate())
    resources.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 (users' code may draw from it)
    resources.callback(set_torch_states, torch_states(device), device)  # fork_rng would restore them when collected
    resources.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
    fills = torch.utils.deterministic.fill_uninitialized_memory
    resources.callback(setattr, torch.utils.deterministic, "fill_uninitialized_memory", fills)
    resources.callback(torch.set_num_threads, torch.get_num_threads())
    for name in VARIABLES.keys() - os.environ.keys():
        resources.callback(os.environ.pop, name, None)
    if device.type == "cpu":
        torch.set_deterministic_debug_mode("warn")
        torch.utils.deterministic.fill_uninitialized_memory = False


def prepare(config: TrainConfig, settings: Settings) -> Run:
    """Make the run's folder or resume the run in it, and load everything; ValueError for errors of the user."""
    tracker = config.run.tracker
    if tracker != "none" and getattr(importlib.util.find_spec(tracker), "origin", None) is None:  # as of ./wandb
        raise ValueError(f"--run.tracker {tracker} needs {tracker}: pip install 'pspo[{tracker}]'")
    check_optimizer(config.optimizer)
    resolve_adapters(config.model)
    with contextlib.ExitStack() as resources:  # released if the preparation fails
        compute_in_order(resources, dist.local_device())
        dist.run_on_main(lambda: config.check_ranks(dist.world_size()))
        output = dist.run_on_main(lambda: make_folder(config, resources))
        checkpoint = dist.run_on_main(lambda: find_checkpoint(output, settings))
        parent = None
        if checkpoint is None and config.run.fork_from is not None:
            parent = dist.run_on_main(lambda: find_parent(config.run.fork_from))
        if not config.run.quiet:
            print(f"output  {output}", flush=True)  # before anything that takes seconds
        is_shared = all(dist.gather_objects(output.exists()))
        require(is_shared, "run.output_dir", "must be in a folder that all nodes share", str(output))
        run = Run(config, settings, output, resources)
        if checkpoint is not None:
            run.checkpointer.resume(checkpoint)
        if dist.is_main():
            files.write_text(output / "config.yaml", to_yaml(settings))
            if not (output / "environment.json").exists():
                device = str(run.learner.policy.device)
                files.write_json(output / "environment.json", files.environment(device, dist.world_size()))
        if parent is not None:
            run.checkpointer.fork(parent, settings)
        run.resources = resources.pop_all()
        return run


# --- the command, and the call from Python


def print_if_finished(config: RunConfig, settings: Settings) -> Summary:
    """Print and return a finished run's summary; {} if no run has finished, or the configuration may prolong it."""
    file = Path(config.output_dir or "") / "summary.json"
    if config.output_dir is None or not file.exists():
        return {}
    changes = check_same(file.parent, settings)
    if changes.keys() & (switches_with("may grow") | {"data.path"}):
        return {}  # resuming the run compares the problems in the other path
    summary = files.read_json(file)
    summary["output_dir"] = str(file.parent)  # it may have been moved
    summary["best_model"] = str(file.parent / Path(summary["best_model"]).name)
    print(f"already finished: {file}\n\n{summary_text(summary)}")
    return summary


def run_training(train: Callable[[Run], Summary], run: Run) -> Summary:
    """Train, print the result, and return the summary."""
    if not run.config.run.quiet:
        print_header(run)
    if dist.is_main():
        print_warnings(run.config, run.validator.prompts)
    with run.resources, run.signals, save_at_end(run):
        summary = train(run)
    print(summary_text(summary))
    return summary


@exit_codes("pspo.train")
def train_command(train: Callable[[Run], Summary], args: Sequence[str] | None = None) -> None:
    """Train by the command's arguments; exit code 1 if the run fails, 2 for a user's errors, 75 or 130 if stopped."""
    config, settings = parse(TrainConfig, "pspo.train", args)
    with user_errors("pspo.train"):
        dist.init(config.distributed.strategy)
        is_finished = dist.run_on_main(lambda: print_if_finished(config.run, settings))
        run = None if is_finished else prepare(config, settings)
    if run is not None:
        run_training(train, run)


def train_from_python(
    train: Callable[[Run], Summary], file: str | Path | None, sections: Settings, on_rollout: OnRollout | None
) -> Summary:
    """Train by a YAML file, overridden by sections of the configuration; returns the summary."""
    config, settings = config_from_python(file, **sections)
    dist.init(config.distributed.strategy)
    summary = dist.run_on_main(lambda: print_if_finished(config.run, settings))
    if summary:
        return summary
    run = prepare(config, settings)
    run.on_rollout = on_rollout
    return run_training(train, run)
