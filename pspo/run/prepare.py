"""Everything before the first rollout: the run's folder, data, model and optimizer, and the parts made of them."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import torch

from pspo import distributed as dist
from pspo.cli.failures import StopSignals
from pspo.cli.files import Settings, environment, to_yaml, write_json, write_text
from pspo.cli.python import default_output
from pspo.config import TrainConfig, require
from pspo.environments import EnvironmentSampler
from pspo.model import casts_to_bf16, load_tokenizer
from pspo.model.exactness import check_exactness
from pspo.model.find import token_ids
from pspo.rollout import PromptStream, Sampler, UnshardedSampler, decode_greedily, make_sampling
from pspo.rollout.delay import Delay
from pspo.rollout.engine import find_engine, start_engine
from pspo.rollout.prompts import load_splits
from pspo.rollout.sampler import Generators
from pspo.run.checkpointer import Checkpointer
from pspo.run.folders import check_output, lock_folder
from pspo.run.learner import make_learner
from pspo.run.optimizers import check_optimizer
from pspo.run.recorder import Recorder
from pspo.run.resume import check_same, find_checkpoint, find_parent, fork, holds_run, resume
from pspo.run.run import Run
from pspo.run.trackers import check_tracker
from pspo.run.validator import Validator
from pspo.tasks.environment import load_environment


def prepare(config: TrainConfig, settings: Settings) -> Run:
    """Load everything, and make the run's folder or restore the run that it holds; ValueError for the user's errors.

    ``settings`` is the configuration for the folder.
    """
    with contextlib.ExitStack() as resources:  # released if the preparation fails
        dist.run_on_main(lambda: config.check_ranks(dist.world_size()))
        output, checkpoint, parent = dist.run_on_main(lambda: find_start(config, settings, resources))
        if not config.run.quiet:
            print(f"output  {output}", flush=True)  # before anything that takes seconds
        check_tracker(config.run.tracker)
        check_optimizer(config.optimizer)
        engine = None if config.rollout.engine is None else find_engine(config.rollout.engine)
        make_environment = load_environment(config.rollout.environment)
        tokenizer = load_tokenizer(config.model, config.data)
        token_ids(tokenizer, config.rollout.stop_tokens or ())
        prompts = load_splits(config, tokenizer, make_environment)

        device = dist.local_device()
        generators = Generators(device, config.run.seed)
        if device.type == "cpu":  # otherwise several threads add up gradients in any order
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False
        with generators.sampling():
            learner = make_learner(config, device)
        policy = learner.policy

        signals = StopSignals()
        sampling = make_sampling(policy, tokenizer, config.rollout, config.algorithm, logprobs=config.ratios_to_engine)
        casts = casts_to_bf16(config.model.autocast, device)
        sampler = Sampler(policy, tokenizer, sampling, casts, generators.sampling, stop=signals)
        with dist.unsharded(policy):
            decode = partial(decode_greedily, policy, tokenizer, sampling)
            check_exactness(policy, prompts["train"].ids, decode, config.model.autocast)
        stream = PromptStream(prompts["train"], config)
        engine_sampler = None
        if engine is not None:
            resources.callback(engine.close)
            if device.type == "cpu" and config.draws_ahead:  # it draws during the update: more threads than cores stall
                resources.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(max(1, torch.get_num_threads() // 2))
            sampler = engine_sampler = start_engine(engine, config, learner, sampler, prompts)
        if make_environment is not None:
            sampler = EnvironmentSampler(sampler, make_environment)
        if dist.is_sharded(policy):
            sampler = UnshardedSampler(sampler, policy, gathers=engine is None)
        delay = None
        if config.rollout.lag > 0:
            delay = Delay(config.rollout, stream, engine_sampler if config.draws_ahead else None)

        recorder = Recorder(config, learner, tokenizer, prompts["train"], output)
        validator = Validator(config, sampler, recorder, prompts)
        parts = {
            "stream": stream,
            "learner": learner,
            "validator": validator,
            "recorder": recorder,
            "generators": generators,
            "delay": delay,
            "algorithm.surrogate": config.algorithm.surrogate,
        }
        parts |= {f"algorithm.terms.{i}": term for i, term in enumerate(config.algorithm.terms)}
        stateful_parts = {name: part for name, part in parts.items() if hasattr(part, "state_dict")}
        checkpointer = Checkpointer(config, stateful_parts, output)
        if checkpoint is not None:
            resume(checkpointer, checkpoint)
        dist.run_on_main(lambda: write_start(output, device, settings, resources))
        is_shared = all(dist.gather_objects(output.exists()))
        dist.run_on_main(
            lambda: require(is_shared, "run.output_dir", "must be in a folder that all nodes share", str(output))
        )
        if parent is not None:
            fork(checkpointer, parent, settings)
        return Run(
            config=config,
            stream=stream,
            sampler=sampler,
            delay=delay,
            learner=learner,
            validator=validator,
            recorder=recorder,
            checkpointer=checkpointer,
            output=output,
            resources=resources.pop_all(),
            signals=signals,
        )


def find_start(
    config: TrainConfig, settings: Settings, resources: contextlib.ExitStack
) -> tuple[Path, Path | None, Path | None]:
    """The run's folder, locked if it is there; its checkpoint to resume from; or the checkpoint of a run to fork."""
    output = Path(config.run.output_dir or default_output(config))
    check_output(output)
    if holds_run(output):
        resources.enter_context(lock_folder(output))
        checkpoint = find_checkpoint(output)
        if checkpoint is not None:
            check_same(output, settings)
            return output, checkpoint, None
    return output, None, find_parent(config.run.fork_from) if config.run.fork_from else None


def write_start(output: Path, device: torch.device, settings: Settings, resources: contextlib.ExitStack) -> None:
    """Make and lock the folder of a new run; write config.yaml, and once for a run environment.json."""
    if not (output / "config.yaml").exists():
        output.mkdir(parents=True, exist_ok=True)
        resources.enter_context(lock_folder(output))
    write_text(output / "config.yaml", to_yaml(settings))
    if not (output / "environment.json").exists():
        write_json(output / "environment.json", environment(str(device), dist.world_size()))
