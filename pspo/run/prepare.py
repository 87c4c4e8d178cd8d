"""Everything before the first rollout: the run's folder, data, model, optimizer, and the state to resume from."""

import contextlib
import sys
import time
from pathlib import Path

import torch
import yaml
from transformers import get_scheduler

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.model import StartingAdapters, has_adapters, load_policy, load_tokenizer
from pspo.rollout import check_decoder, load_prompts, make_sampling, room_for_prompts
from pspo.run.checkpoint import Progress
from pspo.run.records import check_output, environment, write_json, write_text
from pspo.run.resume import allowed_changes, claim, restore, run_to_resume, update_config
from pspo.run.state import Run
from pspo.run.trackers import check_tracker, start_tracker
from pspo.update import Learner, check_optimizer, make_optimizer


def prepare(config: TrainConfig, resolved: str) -> Run:
    """Load everything, and make the run's folder or restore the run that it holds.

    ``resolved`` is the configuration as YAML, for the folder. Raises ValueError for anything the user can mend, before
    anything expensive happens if possible.
    """
    dist.run_on_main(lambda: config.check_ranks(dist.world_size()))
    lock = contextlib.ExitStack()
    output, resumed = dist.run_on_main(lambda: find_output(config, resolved, lock))
    check_tracker(config.run.tracker)
    check_optimizer(config.optimizer.name)

    tokenizer = load_tokenizer(config.model)
    room = room_for_prompts(config.model, config.rollout.max_completion_tokens, "rollout.max_completion_tokens")
    limits = {"train": config.data.limit}
    limits |= {"validation": config.run.validation_limit} if config.run.validate_every else {}
    limits |= {"test": config.run.test_limit} if config.run.test_limit else {}
    prompts = {split: load_prompts(config.data, tokenizer, split, limit, room) for split, limit in limits.items()}

    dist.seed_generators(config.run.seed)
    device, sharded = dist.local_device(), config.distributed.strategy == "fsdp2"
    if device.type == "cpu":  # otherwise several threads add up gradients in any order
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    policy = load_policy(config.model, device, sharded)
    check_decoder(policy, config.rollout.decoder)
    reference = None
    if config.algorithm.beta > 0:
        lora = has_adapters(policy)  # then no second copy of the model
        reference = (
            StartingAdapters(policy) if lora else load_policy(config.model, device, sharded).requires_grad_(False)
        )
    optimizer = make_optimizer(policy, config.optimizer)
    schedule = "constant_with_warmup" if config.optimizer.schedule == "constant" else config.optimizer.schedule
    scheduler = get_scheduler(schedule, optimizer, config.optimizer.warmup_steps, config.run.max_steps)
    learner = Learner(policy, optimizer, scheduler, reference)
    stateful = {"optimizer": dist.UnshardedState(optimizer) if sharded else optimizer, "scheduler": scheduler}
    progress = Progress({split: prompts[split].fingerprint() for split in prompts})
    if resumed:
        progress = restore(config, output, learner, stateful, progress)
        dist.run_on_main(lambda: update_config(output, resolved))
    else:
        dist.run_on_main(lambda: make_output(output, resolved, device, lock))
    synced = config.distributed.rollout == "synced"
    sampling = make_sampling(policy, tokenizer, config.rollout, synced=synced)
    tracker = config.run.tracker if dist.is_main() else "none"
    tracker = start_tracker(tracker, output, yaml.safe_load(resolved), learner.steps)
    return Run(config, learner, tokenizer, sampling, prompts, output, lock, progress, stateful, tracker)


def find_output(config: TrainConfig, resolved: str, lock: contextlib.ExitStack) -> tuple[Path, bool]:
    """The run's folder, and whether it holds a run to resume, which is then locked."""
    resumed = run_to_resume(config.run.resume, config.run.output_dir)
    output = resumed or Path(config.run.output_dir or default_output(config))
    check_output(output)
    if resumed:
        lock.enter_context(claim(output))
        for message in allowed_changes(output, resolved).values():
            print(f"resuming with a change: {message}", file=sys.stderr)
    return output, resumed is not None


def default_output(config: TrainConfig) -> str:
    method, stamp = type(config.algorithm.surrogate).__name__.lower(), time.strftime("%Y%m%d-%H%M%S")
    return f"runs/{Path(config.model.name_or_path).name}-{config.data.name}-{method}-{stamp}"


def make_output(output: Path, resolved: str, device: torch.device, lock: contextlib.ExitStack) -> None:
    """Make the run's folder and lock it."""
    output.mkdir(parents=True, exist_ok=True)
    lock.enter_context(claim(output))
    write_text(output / "config.yaml", resolved)
    write_json(output / "environment.json", environment(str(device), dist.world_size()))
