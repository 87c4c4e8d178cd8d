"""Everything before the first rollout: the run's folder, data, model and optimizer, and the parts made of them."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import torch

from pspo import distributed as dist
from pspo.cli.files import Settings, environment, to_yaml, write_json, write_text
from pspo.config import TrainConfig, require
from pspo.environments import EnvironmentSampler
from pspo.model import load_tokenizer
from pspo.model.find import token_ids
from pspo.rollout import How, PolicySampler, PromptStream, make_sampling
from pspo.rollout.engine import find_engine, start_engine
from pspo.rollout.experience import Delay
from pspo.rollout.generators import Generators
from pspo.rollout.prompts import load_splits
from pspo.rollout.sampler import check_decoding
from pspo.run.recorder import Recorder
from pspo.run.resume import find_start, fork, resume
from pspo.run.run import Run
from pspo.run.trackers import check_tracker
from pspo.run.validator import Validator
from pspo.signals import StopSignals
from pspo.tasks.environment import load_class
from pspo.update.learner import make_learner
from pspo.update.optimizers import check_optimizer


def prepare(config: TrainConfig, settings: Settings) -> Run:
    """Load everything, and make the run's folder or restore the run that it holds; ValueError for the user's errors.

    ``settings`` is the configuration for the folder.
    """
    with contextlib.ExitStack() as resources:  # released if the preparation fails
        dist.run_on_main(lambda: config.check_ranks(dist.world_size()))
        start = dist.run_on_main(lambda: find_start(config, settings, resources))
        output = start.output
        if not config.run.quiet:
            print(f"output  {output}", flush=True)  # before anything that takes seconds
        run = load_run(config, settings, output, resources)
        if start.checkpoint is not None:
            resume(run.checkpointer, start.checkpoint)
        dist.run_on_main(lambda: write_start(run))
        is_shared = all(dist.gather_objects(output.exists()))
        rule = "must be in a folder that all nodes share"
        dist.run_on_main(lambda: require(is_shared, "run.output_dir", rule, str(output)))
        if start.parent is not None:
            fork(run.checkpointer, start.parent, settings)
        run.resources = resources.pop_all()
        return run


def load_run(config: TrainConfig, settings: Settings, output: Path, resources: contextlib.ExitStack) -> Run:
    """Load data and model, and make the parts of a run; what can be refused without the model is refused before it."""
    check_tracker(config.run.tracker)
    check_optimizer(config.optimizer)
    engine = None if config.rollout.engine is None else find_engine(config.rollout.engine)
    make_environment = load_class(config.rollout.environment, "rollout.environment")
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
    sampling = make_sampling(policy, tokenizer, config.rollout, config.algorithm, logprobs=config.ratios_to_engine)
    check_decoding(policy, tokenizer, sampling, prompts["train"], config.model.autocast)
    how = How(sampling, policy if engine is None else None, generators)
    signals = StopSignals()
    sampler = PolicySampler(tokenizer, config.model.autocast, signals)

    engine_sampler = None
    if engine is not None:
        resources.callback(engine.close)
        if device.type == "cpu" and config.draws_ahead:  # it draws during the update: more threads than cores stall
            resources.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(max(1, torch.get_num_threads() // 2))
        sampler = engine_sampler = start_engine(engine, config, learner, sampler, prompts, how)
    if make_environment is not None:
        sampler = EnvironmentSampler(sampler, make_environment, tokenizer, policy.config)
    stream = PromptStream(prompts["train"], config)
    delay = None
    if config.rollout.lag > 0:
        delay = Delay(config.rollout, stream, how, engine_sampler if config.draws_ahead else None)
    recorder = Recorder(config, learner, tokenizer, prompts["train"], output)
    validator = Validator(config, sampler, how, recorder, prompts)
    return Run(
        config=config,
        settings=settings,
        output=output,
        stream=stream,
        sampler=sampler,
        how=how,
        gathered_weights=partial(dist.unsharded, how.model) if dist.is_sharded(how.model) else contextlib.nullcontext,
        delay=delay,
        learner=learner,
        validator=validator,
        recorder=recorder,
        generators=generators,
        signals=signals,
        resources=resources,
    )


def write_start(run: Run) -> None:
    """Write config.yaml, and once for a run environment.json."""
    output = run.output
    write_text(output / "config.yaml", to_yaml(run.settings))
    if not (output / "environment.json").exists():
        write_json(output / "environment.json", environment(str(run.learner.policy.device), dist.world_size()))
