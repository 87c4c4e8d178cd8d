"""Everything before the first rollout: the run's folder, data, model and optimizer, and the parts made of them."""

from __future__ import annotations

import contextlib
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.cli.files import Settings, environment, to_yaml, write_json, write_text
from pspo.cli.python import default_output
from pspo.cli.signals import StopSignals
from pspo.config import TrainConfig, require
from pspo.environments import EnvironmentSampler
from pspo.model import StartingAdapters, casts_to_bf16, has_adapters, load_policy, load_tokenizer
from pspo.model.exactness import check_exactness
from pspo.model.find import room_for_prompts, token_ids
from pspo.rollout import (
    Prompts,
    PromptStream,
    Sampler,
    UnshardedSampler,
    decode_greedily,
    load_prompts,
    make_sampling,
)
from pspo.rollout.delay import Delay
from pspo.rollout.engine import find_engine, start_engine
from pspo.rollout.sampler import Generators
from pspo.run.checkpointer import Checkpointer
from pspo.run.folders import check_output, lock_folder
from pspo.run.learner import Learner
from pspo.run.optimizers import check_optimizer, make_optimizer, make_scheduler
from pspo.run.recorder import Recorder
from pspo.run.resume import check_same, find_checkpoint, find_parent, fork, holds_run, remove_records, resume
from pspo.run.run import Run
from pspo.run.trackers import check_tracker
from pspo.run.validator import Validator
from pspo.tasks import check_rewards
from pspo.tasks.environment import MakeEnvironment, load_environment


def prepare(config: TrainConfig, settings: Settings) -> Run:
    """Load everything, and make the run's folder or restore the run that it holds.

    ``settings`` is the configuration for the folder. Raises ValueError for anything the user can mend, before anything
    expensive happens if possible.
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
        decoder = Sampler(policy, tokenizer, sampling, learner.casts_to_bf16, generators.sampling, stop=signals)
        with dist.unsharded(policy):
            decode = partial(decode_greedily, policy, tokenizer, sampling)
            check_exactness(policy, prompts["train"].ids, decode, config.model.autocast)
        sampler = decoder
        if engine is not None:
            resources.callback(engine.close)
            if device.type == "cpu" and config.draws_ahead:  # it draws during the update: more threads than cores stall
                resources.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(max(1, torch.get_num_threads() // 2))
            sampler = engine_sampler = start_engine(engine, config, learner, decoder, prompts)
        if make_environment is not None:
            sampler = EnvironmentSampler(sampler, make_environment)
        if dist.is_sharded(policy):
            sampler = UnshardedSampler(sampler, policy, gathers=engine is None)

        stream = PromptStream(prompts["train"], config)
        recorder = Recorder(config, learner, tokenizer, prompts["train"], output)
        validator = Validator(config, sampler, recorder, prompts)
        delay = None
        if config.rollout.lag > 0:
            delay = Delay(config.rollout, stream, engine_sampler if config.draws_ahead else None)

        pieces = {
            "stream": stream,
            "learner": learner,
            "validator": validator,
            "recorder": recorder,
            "generators": generators,
            "delay": delay,
            "algorithm.surrogate": config.algorithm.surrogate,
        }
        for i, term in enumerate(config.algorithm.terms):
            pieces[f"algorithm.terms.{i}"] = term
        stateful = {name: piece for name, piece in pieces.items() if hasattr(piece, "state_dict")}
        checkpointer = Checkpointer(config, stateful, output)

        if checkpoint is None:
            dist.run_on_main(lambda: make_output(output, resources))
        is_shared = all(dist.gather_objects(output.exists()))
        rule = "must be in a folder that all nodes share"
        dist.run_on_main(lambda: require(is_shared, "run.output_dir", rule, str(output)))
        if checkpoint is not None:
            resume(checkpointer, checkpoint, config.run.seed)
        dist.run_on_main(lambda: write_start(output, device, settings))
        if parent is not None:
            fork(config, settings, checkpointer, parent)
        return Run(
            config,
            stream=stream,
            sampler=sampler,
            delay=delay,
            learner=learner,
            validator=validator,
            recorder=recorder,
            generators=generators,
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
        print(f"{output} holds no checkpoint: its run starts anew", file=sys.stderr)
        remove_records(output)
    return output, None, find_parent(config.run) if config.run.fork_from else None


def make_output(output: Path, resources: contextlib.ExitStack) -> None:
    """Make the folder of a new run and lock it, unless it is locked already."""
    output.mkdir(parents=True, exist_ok=True)
    if not (output / "config.yaml").exists():
        resources.enter_context(lock_folder(output))


def write_start(output: Path, device: torch.device, settings: Settings) -> None:
    """Write config.yaml, and once for a run environment.json."""
    write_text(output / "config.yaml", to_yaml(settings))
    if not (output / "environment.json").exists():
        write_json(output / "environment.json", environment(str(device), dist.world_size()))


def load_splits(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, make_environment: MakeEnvironment | None
) -> dict[str, Prompts]:
    """Prompts by split: train, and validation and test if the run has them."""
    room = room_for_prompts(config.model, config.rollout.max_completion_tokens, "rollout.max_completion_tokens")
    limits = {"train": config.data.limit}
    if config.run.validate_every:
        limits["validation"] = config.run.validation_limit
    if config.run.test_limit:
        limits["test"] = config.run.test_limit
    prompts = {}
    for split, limit in limits.items():
        prompts[split] = load_prompts(config.data, tokenizer, split, limit, room, make_environment)
        check_rewards(config.reward.functions, prompts[split].problems)
    return prompts


def make_learner(config: TrainConfig, device: torch.device) -> Learner:
    """Load the policy, and the reference if there is one, and make the optimizer."""
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # a skipped first step is no mistake
    policy = load_policy(config.model, device, config.distributed)
    reference = None
    if config.algorithm.beta > 0 and has_adapters(policy):
        reference = StartingAdapters(policy)  # no second copy of the model
    elif config.algorithm.beta > 0:
        reference = load_policy(config.model, device, config.distributed).requires_grad_(False)
    optimizer = make_optimizer(policy, config.optimizer)
    scheduler = make_scheduler(optimizer, config.optimizer, config.run.max_steps)
    casts = casts_to_bf16(config.model.autocast, policy.device)
    return Learner(policy, optimizer, scheduler, reference, casts_to_bf16=casts)
