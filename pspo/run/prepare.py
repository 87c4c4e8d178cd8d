"""Everything before the first rollout: the run's folder, data, model and optimizer, and the parts made of them."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.cli import files as records
from pspo.cli.python import default_output
from pspo.config import TrainConfig, require
from pspo.model import StartingAdapters, has_adapters, load_policy, load_tokenizer
from pspo.model.chat import drops_thoughts
from pspo.model.exactness import check_exactness
from pspo.model.find import room_for_prompts, token_ids
from pspo.rollout import Prompts, load_prompts
from pspo.rollout.delay import Delay
from pspo.rollout.engine import find_engine
from pspo.rollout.generate import decode_greedily
from pspo.rollout.generators import Generators
from pspo.run.checkpointer import Checkpointer
from pspo.run.folders import check_output, checkpoints, claim
from pspo.run.learner import Learner
from pspo.run.optimizers import check_optimizer, make_optimizer, make_scheduler
from pspo.run.prompt_stream import PromptStream
from pspo.run.recorder import Recorder
from pspo.run.resume import check_or_start_anew, fork_parent, restore, run_to_resume
from pspo.run.run import Run
from pspo.run.sampler import Sampler
from pspo.run.trackers import check_tracker
from pspo.run.validator import Validator
from pspo.tasks import check_rewards
from pspo.tasks.environment import MakeEnvironment, load_environment


def prepare(config: TrainConfig, settings: records.Settings) -> Run:
    """Load everything, and make the run's folder or restore the run that it holds.

    ``settings`` is the configuration for the folder. Raises ValueError for anything the user can mend, before anything
    expensive happens if possible.
    """
    with contextlib.ExitStack() as resources:  # released if the preparation fails
        dist.run_on_main(lambda: config.check_ranks(dist.world_size()))
        output, resumed, parent = dist.run_on_main(lambda: find_output(config, settings, resources))
        if not config.run.quiet:
            print(f"output  {output}", flush=True)  # before anything that takes seconds
        check_tracker(config.run.tracker)
        check_optimizer(config.optimizer.name)
        if config.rollout.external:
            find_engine(config.rollout)
        make_environment = load_environment(config.rollout.environment)
        tokenizer = load_tokenizer(config.model, config.data)
        token_ids(tokenizer, config.rollout.stop_tokens or ())
        prompts = load_splits(config, tokenizer, make_environment)

        device = dist.local_device()
        generators = Generators(device, config.run.seed)
        if device.type == "cpu":  # otherwise several threads add up gradients in any order
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False
        with generators:
            learner = make_learner(config, device)
        sampler = Sampler(config, learner, tokenizer, generators, make_environment, output)
        with dist.unsharded(learner.policy):
            decode = partial(decode_greedily, learner.policy, tokenizer, sampler.sampling)
            check_exactness(learner.policy, prompts["train"].ids, decode, config.model.autocast)
        if config.rollout.external:
            sampler.start_engine(prompts, resources)

        stream = PromptStream(prompts["train"], config)
        recorder = Recorder(config, learner, tokenizer, prompts["train"], output)
        delay = Delay(config, stream, sampler, recorder)
        validator = Validator(config, sampler, recorder, prompts)
        parts = {"stream": stream, "delay": delay, "learner": learner, "validator": validator}
        parts |= {"recorder": recorder, "generators": generators}
        surrogate = config.algorithm.surrogate
        with_state = {"surrogate": surrogate} if hasattr(surrogate, "state_dict") else {}
        checkpointer = Checkpointer(config, parts | with_state, output)
        if not resumed:
            dist.run_on_main(lambda: make_output(output, settings, resources))
        seen, rule = all(dist.gather_objects(output.exists())), "must be in a folder that all nodes share"
        dist.run_on_main(lambda: require(seen, "run.output_dir", rule, str(output)))
        if resumed or config.run.fork_from:
            restore(config, settings, checkpointer, parent)
        dist.run_on_main(lambda: write_start(output, device, learner.steps, settings))
        own = {"sampler": sampler, "checkpointer": checkpointer, "resources": resources.pop_all()}
        return Run(config, output=output, **parts, **own)


def load_splits(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, make_environment: MakeEnvironment | None
) -> dict[str, Prompts]:
    """Prompts by split: train, and validation and test if the run has them."""
    room = room_for_prompts(config.model, config.rollout.max_completion_tokens, "rollout.max_completion_tokens")
    limits = {"train": config.data.limit}
    limits |= {"validation": config.run.validation_limit} if config.run.validate_every else {}
    limits |= {"test": config.run.test_limit} if config.run.test_limit else {}
    load = partial(load_prompts, config.data, tokenizer, room=room, environment=make_environment)
    prompts = {split: load(split, limit) for split, limit in limits.items()}
    for split in prompts:
        check_rewards(config.reward.functions, prompts[split].problems)
    role = getattr(make_environment(), "role", "user") if make_environment else None
    if role and drops_thoughts(tokenizer, role) and not config.run.quiet:
        print(f"thoughts stay in episodes; the chat template leaves them out once a turn of role {role} follows")
    return prompts


def make_learner(config: TrainConfig, device: torch.device) -> Learner:
    """Load the policy, and the reference if there is one, and make the optimizer."""
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # a skipped first step is no mistake
    policy, reference = load_policy(config.model, device, config.distributed), None
    if config.algorithm.beta > 0 and has_adapters(policy):
        reference = StartingAdapters(policy)  # no second copy of the model
    elif config.algorithm.beta > 0:
        reference = load_policy(config.model, device, config.distributed).requires_grad_(False)
    optimizer = make_optimizer(policy, config.optimizer)
    scheduler = make_scheduler(optimizer, config.optimizer, config.run.max_steps)
    return Learner(policy, optimizer, scheduler, reference)


def find_output(
    config: TrainConfig, settings: records.Settings, resources: contextlib.ExitStack
) -> tuple[Path, bool, Path | None]:
    """The run's folder; whether it holds a run to resume, which is then locked; a fork's parent, until it is copied."""
    resumed = run_to_resume(config.run)
    output = resumed or Path(config.run.output_dir or default_output(config))
    check_output(output)
    if resumed:
        resources.enter_context(claim(output))
        check_or_start_anew(output, settings)
        if changed := records.changed_code(output, settings):
            advice = "it goes on with the new code; another --run.output_dir starts anew, --run.fork_from forks it"
            print(f"WARNING: {', '.join(changed)} has changed since the last start: {advice}", file=sys.stderr)
    forks = config.run.fork_from and not checkpoints(output)
    return output, resumed is not None, fork_parent(config.run, settings) if forks else None


def make_output(output: Path, settings: records.Settings, resources: contextlib.ExitStack) -> None:
    """Make the run's folder and lock it."""
    output.mkdir(parents=True, exist_ok=True)
    resources.enter_context(claim(output))
    records.write_text(output / "config.yaml", records.to_yaml(settings))


def write_start(output: Path, device: torch.device, step: int, settings: records.Settings) -> None:
    """Write environment.json, once for a run, and the step, the time and the user's code of every start."""
    if not (path := output / "environment.json").exists():
        records.write_json(path, records.environment(str(device), dist.world_size()))
    start = {"step": step, "time": time.strftime("%Y-%m-%d %H:%M:%S"), "code": records.code_of(settings)}
    records.append_jsonl(output / "starts.jsonl", start)
