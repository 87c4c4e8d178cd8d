"""Everything before the first rollout: the run's folder, data, model, optimizer, and the state to resume from."""

import contextlib
import math
import time
import warnings
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import torch
import yaml

from pspo import distributed as dist
from pspo.config import ModelConfig, TrainConfig
from pspo.engines import check_vllm, make_engine
from pspo.environments import player
from pspo.hub.models import token_ids
from pspo.model import StartingAdapters, has_adapters, load_model_config, load_policy, load_tokenizer
from pspo.optimizers import check_optimizer, make_optimizer, make_scheduler
from pspo.rollout import check_decoder, load_prompts, make_sampling
from pspo.run.checkpoint import Progress, checkpoints
from pspo.run.exactness import check_engine, check_exactness
from pspo.run.memory import auto_switches, largest_that_fit, replace_switches, say_needs
from pspo.run.records import check_output, environment, flat, read_config, to_yaml, write_json, write_text
from pspo.run.resume import (
    check_changes,
    claim,
    fork_parent,
    holds_steps,
    problems_hash,
    restore,
    run_to_resume,
    update_config,
)
from pspo.run.state import Run
from pspo.run.trackers import check_tracker, start_tracker
from pspo.tasks import check_rewards
from pspo.tasks.environment import load_environment
from pspo.update import Learner


def prepare(config: TrainConfig, resolved: str) -> Run:
    """Load everything, and make the run's folder or restore the run that it holds.

    ``resolved`` is the configuration as YAML, for the folder. Raises ValueError for anything the user can mend, before
    anything expensive happens if possible.
    """
    with contextlib.ExitStack() as lock:
        run = prepare_in(lock, config, resolved)
        run.lock = lock.pop_all()
    return run


def prepare_in(lock: contextlib.ExitStack, config: TrainConfig, resolved: str) -> Run:
    """`prepare`, with what must be released if it fails in ``lock``."""
    dist.run_on_main(lambda: config.check_ranks(dist.world_size()))
    output, resumed = dist.run_on_main(lambda: find_output(config, resolved, lock))
    check_tracker(config.run.tracker)
    check_optimizer(config.optimizer.name)
    if config.rollout.engine == "vllm":
        check_vllm()
    make_environment = load_environment(config.rollout.environment)

    tokenizer = load_tokenizer(config.model)
    token_ids(tokenizer, config.rollout.stop_tokens or ())
    room = room_for_prompts(config.model, config.rollout.max_completion_tokens, "rollout.max_completion_tokens")
    limits = {"train": config.data.limit}
    limits |= {"validation": config.run.validation_limit} if config.run.validate_every else {}
    limits |= {"test": config.run.test_limit} if config.run.test_limit else {}
    load = partial(load_prompts, config.data, tokenizer, room=room, environment=make_environment)
    prompts = {split: load(split, limit) for split, limit in limits.items()}

    for split in prompts:
        check_rewards(config.reward.functions, prompts[split].problems)

    device, sharded = dist.local_device(), config.distributed.strategy == "fsdp2"
    longest = max(map(len, prompts["train"].ids))
    config, resolved = resolve_auto(config, resolved, output, longest, device)
    if dist.is_main() and not sharded and not config.run.quiet:
        say_needs(config, longest, device)
    dist.seed_generators(config.run.seed)
    if device.type == "cpu":  # otherwise several threads add up gradients in any order
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # a skipped first step is no mistake
    policy = load_policy(config.model, device, sharded)
    check_decoder(policy, config.rollout.decoder)
    more = {
        "logprobs": config.algorithm.correction != "none" or config.ratios_to_engine,
        "nucleus": config.algorithm.nucleus == "replay",
        "play": player(make_environment),
    }
    sampling = make_sampling(policy, tokenizer, config.rollout, synced=config.distributed.rollout == "synced", **more)
    with dist.unsharded(policy, config.distributed.rollout):
        check_exactness(policy, tokenizer, prompts["train"].ids, sampling, config.model.autocast)
    if config.rollout.engine != "transformers":
        room = max(len(ids) for split in prompts.values() for ids in split.ids) + config.rollout.max_completion_tokens
        if device.type == "cpu" and config.draws_ahead:  # it draws during the update: more threads than cores stall
            lock.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(max(1, torch.get_num_threads() // 2))
        engine = make_engine(config, room, device)
        lock.callback(engine.close)
        sampling = replace(sampling, served_by=engine)
        mean, largest = check_engine(policy, tokenizer, prompts["train"].ids[:8], sampling)
        if dist.is_main() and not config.run.quiet:
            print(f"engine  {config.rollout.engine}: log-probs are the policy's within {mean:.1g} nats on average, "
                  f"{largest:.1g} at most")  # fmt: skip
    reference = None
    if config.algorithm.beta > 0:
        lora = has_adapters(policy)  # then no second copy of the model
        reference = (
            StartingAdapters(policy) if lora else load_policy(config.model, device, sharded).requires_grad_(False)
        )
    optimizer = make_optimizer(policy, config.optimizer)
    scheduler = make_scheduler(optimizer, config.optimizer, config.run.max_steps)
    learner = Learner(policy, optimizer, scheduler, reference)
    stateful = {"optimizer": dist.UnshardedState(optimizer) if sharded else optimizer, "scheduler": scheduler}
    progress = Progress({split: problems_hash(prompts[split]) for split in prompts})
    if not resumed:
        dist.run_on_main(lambda: make_output(output, resolved, lock))
    if resumed or config.run.fork_from:
        progress = restore(config, resolved, output, learner, stateful, progress)
        dist.run_on_main(lambda: update_config(output, resolved))
    dist.run_on_main(lambda: write_environment(output, device))
    tracker = config.run.tracker if dist.is_main() else "none"
    tracker = start_tracker(tracker, output, yaml.safe_load(resolved), learner.steps)
    return Run(config, learner, tokenizer, sampling, prompts, output, lock, progress, stateful, tracker)


def room_for_prompts(config: ModelConfig, max_completion_tokens: int, switch: str) -> float:
    """Prompt tokens that fit the model's positions beside a completion; infinite without such a limit.

    LongRoPE's positions end where it would switch to other frequencies, for all rows of a batch at once. Raises
    ValueError, naming the switch, if none fit.
    """
    text_config = load_model_config(config).get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        positions = rope["original_max_position_embeddings"]
    if positions is not None and positions <= max_completion_tokens:
        raise ValueError(f"--{switch} must be below the model's {positions} positions, got {max_completion_tokens}")
    return math.inf if positions is None else positions - max_completion_tokens


def find_output(config: TrainConfig, resolved: str, lock: contextlib.ExitStack) -> tuple[Path, bool]:
    """The run's folder, and whether it holds a run to resume, which is then locked."""
    resumed = run_to_resume(config.run.resume, config.run.output_dir)
    output = resumed or Path(config.run.output_dir or default_output(config))
    check_output(output)
    if resumed:
        lock.enter_context(claim(output))
        check_changes(output, resolved)
    if config.run.fork_from and not checkpoints(output):
        fork_parent(config.run, resolved)
    return output, resumed is not None


def resolve_auto(
    config: TrainConfig, resolved: str, run: Path, prompt_tokens: int, device: torch.device
) -> tuple[TrainConfig, str]:
    """The configuration, also as YAML, with numbers for ``auto``: those of the steps that the run has."""
    if not (switches := auto_switches(config)):
        return config, resolved

    def find() -> dict[str, int]:
        if not holds_steps(run):
            return largest_that_fit(config, prompt_tokens, device)
        known = flat(read_config(run / "config.yaml"))
        return {switch: known[switch] for switch in switches}

    values = dist.run_on_main(find)
    if dist.is_main() and not config.run.quiet:
        print(f"auto    {' '.join(f'--{switch} {value}' for switch, value in values.items())}")
    settings = yaml.safe_load(resolved)
    for switch, value in values.items():
        section, name = switch.split(".")
        settings[section][name] = value
    return replace_switches(config, values), to_yaml(settings)


def default_output(config: TrainConfig) -> str:
    method, stamp = type(config.algorithm.surrogate).__name__.lower(), time.strftime("%Y%m%d-%H%M%S")
    data = config.data.name.replace("/", "-")  # of a hub id
    folder = f"runs/{Path(config.model.name_or_path).name}-{data}-{method}-{stamp}"
    return next(name for n in count(1) if not Path(name := folder if n == 1 else f"{folder}-{n}").exists())


def make_output(output: Path, resolved: str, lock: contextlib.ExitStack) -> None:
    """Make the run's folder and lock it."""
    output.mkdir(parents=True, exist_ok=True)
    lock.enter_context(claim(output))
    write_text(output / "config.yaml", resolved)


def write_environment(output: Path, device: torch.device) -> None:
    """Write environment.json, once for a run."""
    if not (path := output / "environment.json").exists():
        write_json(path, environment(str(device), dist.world_size()))
