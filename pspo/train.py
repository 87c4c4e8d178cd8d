"""Train a model: ``python -m pspo.train``.

    problems -> rollout -> rewards -> advantages -> (old log-probs) -> minibatch epochs
             -> surrogate -> aggregate -> backward -> optimizer step -> metrics / validation / saved model

`train` is that line, top to bottom; its second half, the optimizer steps of one rollout, is `pspo.update`.
"""

import contextlib
import math
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from pspo.config import EvalConfig, TrainConfig
from pspo.distributed import (
    Scalars,
    from_main,
    gathered,
    highest,
    is_main,
    is_sharded,
    own,
    own_device,
    pool,
    run,
    seed_generators,
    share,
    start,
    world_size,
)
from pspo.evaluate.__main__ import (
    Evaluation,
    Prompts,
    evaluate,
    fingerprint_of_problems,
    load_prompts,
    room_for_prompts,
)
from pspo.model import autocast, load_tokenizer, memory_errors, pad_token_id, stop_token_ids
from pspo.rollout import Rollout, Sampling, check_decoder, generate, group_relative_advantages
from pspo.run.card import model_card
from pspo.run.checkpoint import Progress, RunFailed, Saver, checkpoints, save_model
from pspo.run.cli import parse, user_errors
from pspo.run.records import Stopwatch, append_jsonl, check_output, environment, peak_memory_gb, write_json, write_text
from pspo.run.results import percent, table
from pspo.run.resume import (
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    Stopped,
    StopSignals,
    changes,
    claim,
    finished,
    go_on,
    load_across_ranks,
    record_changes,
    run_to_resume,
)
from pspo.run.trackers import Tracker, check_tracker, start_tracker
from pspo.tasks import Problem, total_rewards, without_unknown
from pspo.update import Learner, update


@dataclass(frozen=True)
class Setup:
    """What a run starts from; `prepare` makes it."""

    learner: Learner
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    prompts: dict[str, Prompts]  # by split
    output: Path
    lock: contextlib.ExitStack  # on the output folder, while it is open; rank 0's
    progress: Progress
    saver: Saver
    tracker: Tracker

    def log(self, metrics: dict[str, Any], samples: Iterable[dict[str, Any]]) -> None:
        """Write down what one rollout came to."""
        if is_main():
            with recording(self.output):
                append_jsonl(self.output / "metrics.jsonl", metrics)
                append_jsonl(self.output / "samples.jsonl", *samples)
            self.tracker.log(metrics)


def train(config: TrainConfig, setup: Setup, signals: StopSignals | None = None) -> dict[str, Any]:
    """The loop, from the progress that there is. Returns the run's summary, as written to ``summary.json``.

    Raises Stopped, all saved, where ``signals`` received a signal; RunFailed after too many skipped steps in a row.
    """
    learner, prompts, output, progress = setup.learner, setup.prompts["train"], setup.output, setup.progress
    device, group_size, max_tokens = learner.policy.device, config.rollout.group_size, config.run.max_tokens or math.inf
    began, signals = time.perf_counter() - progress.seconds, signals or StopSignals()
    order = islice(prompt_order(len(prompts), config.run.seed), progress.prompts, None)

    if progress.before is None:
        progress.before = test_accuracy(config, setup, learner.policy, "test before")
        if config.run.validate_every:
            progress.best = progress.validated = {"step": 0} | validate(config, setup)
            save_best(config, setup)

    bar_of = {"total": config.run.max_steps, "initial": learner.steps, "unit": "step", "disable": not is_main()}
    with tqdm(desc="train", **bar_of) as bar:
        while (
            not (stopped := highest(signals.received is not None))  # by a signal to any rank
            and learner.steps < config.run.max_steps
            and progress.tokens < max_tokens
        ):
            watch, first_step = Stopwatch(), learner.steps

            bar.set_description("rollout")
            chosen = share(list(islice(order, config.rollout.prompts)), config.algorithm.minibatches)
            with watch("generate"), rolling_out(config, learner.policy):
                ids = [prompts.ids[i] for i in chosen]
                rollout = generate(learner.policy, setup.tokenizer, ids, setup.sampling, group_size)
            with watch("reward"):
                problems = [prompts.problems[i] for i in chosen for _ in range(group_size)]
                rewards, rewards_by_name, advantages = reward(config, rollout, problems)
            bar.set_description("train")
            with watch("train"):
                steps = update(learner, rollout, advantages, config)
            rollout, problems, rewards, rewards_by_name, advantages = pool(
                rollout.cpu(), problems, rewards, rewards_by_name, advantages.cpu()
            )  # from here on of all ranks
            progress.prompts += config.rollout.prompts
            progress.tokens += rollout.tokens
            progress.ranks, progress.microbatch_limit = world_size(), learner.microbatch_limit

            metrics = rollout_metrics(rollout, rewards, rewards_by_name, advantages)
            metrics |= steps[-1]  # the last: most off-policy
            metrics["steps_skipped"] = sum(step["step_skipped"] for step in steps)
            done = learner.steps == config.run.max_steps or progress.tokens >= max_tokens
            if config.run.validate_every and (done or crossed(config.run.validate_every, first_step, learner.steps)):
                with watch("validate"):
                    validation = validate(config, setup)
                metrics |= validation
                progress.validated = {"step": learner.steps} | validation
                if validation["validation_reward"] > progress.best["validation_reward"]:
                    progress.best = progress.validated
                    save_best(config, setup)

            seconds = {f"seconds/{phase}": round(spent, 4) for phase, spent in watch.seconds.items()}
            line = {"step": learner.steps, "tokens": progress.tokens} | metrics | seconds
            shown = range(0, len(rollout), group_size)[: config.run.samples]
            samples = (
                {"step": learner.steps, "prompt": problems[i].prompt, "gold": str(problems[i].answer),
                 "completion": rollout.texts[i], "reward": rewards[i]} for i in shown
            )  # fmt: skip
            setup.log(line, samples)
            count_skipped(steps, config, setup)
            progress.seconds = time.perf_counter() - began
            if done or crossed(config.run.save_every, first_step, learner.steps):
                setup.saver.save(learner.steps, card(config, setup), progress)
            bar.update(learner.steps - first_step)
            rate = rollout.tokens / (watch.seconds["generate"] + watch.seconds["train"])
            length = metrics["completion_tokens"]
            bar.set_postfix_str(f"reward {metrics['reward']:.3f}, length {length:.0f}, {rate:,.0f} tokens/s")

    if stopped:
        setup.saver.save(learner.steps, card(config, setup), progress)
        setup.saver.wait()  # on every rank: the launcher ends all with the first that ends
        raise Stopped
    setup.saver.wait()
    save_model(learner.policy, setup.tokenizer, output / "final", card(config, setup))
    returned = output / ("best" if progress.best else "final")
    best = replace(config.model, name_or_path=str(returned))
    policy = load_across_ranks(config, best, device) if progress.best else learner.policy
    summary = {
        "before": progress.before,
        "after": test_accuracy(config, setup, policy, "test after"),
        "tokens": progress.tokens,
        "optimizer_steps": learner.steps,
        "seconds": round(time.perf_counter() - began, 2),
        "peak_memory_gb": round(peak_memory_gb(device), 3),
        "best_model": str(returned),
        "best_step": progress.best.get("step", learner.steps),
    }
    if is_main():
        with recording(output):
            write_json(output / "summary.json", summary)
        setup.tracker.finish()
    return summary


@contextlib.contextmanager
def recording(output: Path) -> Iterator[None]:
    """A record that cannot be written (disk full) ends the run."""
    try:
        yield
    except OSError as error:
        raise RunFailed(f"cannot write into {output}: {error}") from error


def prompt_order(n: int, seed: int) -> Iterator[int]:
    """Endless passes over n prompts, each pass in an order of its own."""
    for epoch in count():
        yield from np.random.default_rng((seed, epoch)).permutation(n).tolist()


def crossed(every: int, before: int, after: int) -> bool:
    """Whether a multiple of ``every`` lies in (before, after]; never for 0."""
    return every > 0 and before // every < after // every


def reward(
    config: TrainConfig, rollout: Rollout, problems: list[Problem]
) -> tuple[list[float], dict[str, list[float]], Tensor]:
    """Total rewards, those of each function, and advantages (B,): 0 where --reward.on_error none left no reward."""
    r, group_size = config.reward, config.rollout.group_size
    rewards, by_name = total_rewards(r.functions, r.weights, rollout.texts, problems, r.timeout, r.on_error)
    (everyones,) = pool(rewards)
    filled = torch.tensor(without_unknown(everyones, group_size), device=rollout.completion_ids.device)
    advantages = own(group_relative_advantages(filled, group_size, config.algorithm.advantage_scale))
    unknown = torch.tensor(rewards, device=filled.device).isnan()
    return rewards, by_name, advantages.where(~unknown, 0.0)


@contextlib.contextmanager
def rolling_out(config: TrainConfig, policy: PreTrainedModel) -> Iterator[None]:
    """What completions are drawn in: weights where they are needed, in the forward passes' dtype."""
    with gathered(policy, config.distributed.rollout), autocast(config.model.autocast, policy.device):
        yield


def rollout_metrics(
    rollout: Rollout, rewards: list[float], rewards_by_name: dict[str, list[float]], advantages: Tensor
) -> dict[str, float]:
    """What the samples of one rollout were like; rewards that are unknown (NaN) are left out of the means."""
    lengths = rollout.completion_mask.sum(dim=1).float()
    known, *by_name = (
        [value for value in values if not math.isnan(value)] or [math.nan]
        for values in (rewards, *rewards_by_name.values())
    )
    return {
        "reward": float(np.mean(known)),
        "reward_std": float(np.std(known)),
        **{f"reward/{name}": float(np.mean(values)) for name, values in zip(rewards_by_name, by_name, strict=True)},
        "reward_unknown_share": float(np.isnan(rewards).mean()),
        "empty_share": float(np.mean([not text.strip() for text in rollout.texts])),
        "zero_advantage_share": (advantages == 0).float().mean().item(),
        "completion_tokens": lengths.mean().item(),
        "completion_tokens_max": lengths.max().item(),
        "truncated_share": (~rollout.terminated).float().mean().item(),
    }


def count_skipped(steps: list[dict[str, float]], config: TrainConfig, setup: Setup) -> None:
    """Raise RunFailed where --optimizer.max_skipped steps in a row were skipped."""
    progress = setup.progress
    for step in steps:
        progress.skipped = progress.skipped + 1 if step["step_skipped"] else 0
        if progress.skipped >= config.optimizer.max_skipped:
            setup.saver.wait()
            saved = next(iter(checkpoints(setup.output)), "none yet")
            raise RunFailed(
                f"{progress.skipped} optimizer steps in a row were skipped, for loss ({step['loss']}), gradient (norm "
                f"{step['grad_norm']}) or log-probs were not finite. The weights are as they were before; last good "
                f"checkpoint: {saved}. Lower --optimizer.lr, or look at the reward and the surrogate"
            )


def save_best(config: TrainConfig, setup: Setup) -> None:
    """Save the policy as the best one; its validation.json says how good it is, which a run that goes on reads."""
    learner, progress = setup.learner, setup.progress
    model = (learner.policy, setup.tokenizer, setup.output / "best", card(config, setup))
    save_model(*model, lambda folder: write_json(folder / "validation.json", progress.best))


def card(config: TrainConfig, setup: Setup) -> str:
    """The model card of the policy as it is now."""
    path = "path/to/data" if config.data.path else None  # in place of a path of this machine
    command = evaluate_command(replace(config, data=replace(config.data, path=path)), "path/to/this/model")
    problems, progress = len(setup.prompts["train"]), setup.progress
    counts = {"problems": problems, "step": setup.learner.steps, "tokens": progress.tokens}
    return model_card(config, command, **counts, before=progress.before or {}, validation=progress.validated)


def validate(config: TrainConfig, setup: Setup) -> dict[str, float]:
    """Mean reward under the training sampling, and greedy accuracy, on the validation problems."""
    prompts, policy, sampling = setup.prompts["validation"], setup.learner.policy, setup.sampling
    sampled = evaluate_by_all(config, setup, policy, prompts, sampling, "validate")
    greedy = evaluate_by_all(config, setup, policy, prompts, greedily(sampling), "validate")
    return {"validation_reward": sampled.mean_reward, "validation_accuracy": greedy.accuracy}


def test_accuracy(config: TrainConfig, setup: Setup, policy: PreTrainedModel, bar: str) -> dict[str, Any]:
    """Greedy accuracy on the held-out problems; empty for --run.test_limit 0."""
    if config.run.test_limit == 0:
        return {}
    return evaluate_by_all(config, setup, policy, setup.prompts["test"], greedily(setup.sampling), bar).record()


def evaluate_by_all(
    config: TrainConfig, setup: Setup, policy: PreTrainedModel, prompts: Prompts, sampling: Sampling, bar: str
) -> Evaluation:
    """One completion of each prompt; dealt out evenly, unless all ranks do the same."""
    rows = math.inf if sampling.synced else math.ceil(len(prompts) / world_size())
    with rolling_out(config, policy):
        return evaluate(policy, setup.tokenizer, prompts, sampling, config.reward, max_rows=rows, bar=bar)


def greedily(sampling: Sampling) -> Sampling:
    """Greedy decoding of the plain model, with the same limit and stop tokens."""
    return replace(sampling, temperature=0.0, repetition_penalty=1.0, min_completion_tokens=0)


def prepare(config: TrainConfig, resolved: str) -> Setup:
    """Load everything, the cheap and fallible first; the output folder is made last, so that no error leaves one."""
    device = own_device()
    from_main(lambda: config.check_ranks(world_size()))
    lock = contextlib.ExitStack()
    output, going_on, changed = from_main(lambda: find_output(config, resolved, lock))
    check_tracker(config.run.tracker)

    tokenizer = load_tokenizer(config.model)
    room = room_for_prompts(config.model, config.rollout.max_completion_tokens, "rollout.max_completion_tokens")
    limits = {"train": config.data.limit}
    if config.run.validate_every:
        limits["validation"] = config.run.validation_limit
    if config.run.test_limit:
        limits["test"] = config.run.test_limit
    prompts = {split: load_prompts(config.data, tokenizer, split, limit, room) for split, limit in limits.items()}

    seed_generators(config.run.seed)
    policy = load_across_ranks(config, config.model, device)
    check_decoder(policy, config.rollout.decoder)
    reference = (
        load_across_ranks(config, config.model, device).requires_grad_(False) if config.algorithm.beta > 0 else None
    )
    o = config.optimizer
    if o.name == "sgd":
        optimizer = torch.optim.SGD(policy.parameters(), lr=o.lr, weight_decay=o.weight_decay)
    else:
        optimizer = torch.optim.AdamW(
            policy.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, fused=True
        )
    schedule = "constant_with_warmup" if o.schedule == "constant" else o.schedule
    scheduler = get_scheduler(schedule, optimizer, o.warmup_steps, config.run.max_steps)
    r = config.rollout
    sampling = Sampling(
        stop_ids=stop_token_ids(policy, tokenizer),
        pad_id=pad_token_id(policy, tokenizer),
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        repetition_penalty=r.repetition_penalty,
        max_completion_tokens=r.max_completion_tokens,
        min_completion_tokens=r.min_completion_tokens,
        max_rows=r.max_rows,
        decoder=r.decoder,
        synced=config.distributed.rollout == "synced",
    )
    learner = Learner(policy, reference, optimizer, scheduler)
    stateful = {"optimizer": Scalars(optimizer) if is_sharded(policy) else optimizer, "scheduler": scheduler}
    progress = Progress({split: fingerprint_of_problems(prompts[split]) for split in prompts})
    if going_on:
        learner.steps, progress = go_on(config, output, policy, stateful, progress)
        learner.microbatch_limit = progress.microbatch_limit
        if changed:
            from_main(lambda: record_changes(output, resolved))
    else:
        from_main(lambda: begin(output, resolved, device, lock))
    tracker = start_tracker(
        config.run.tracker if is_main() else "none", output, yaml.safe_load(resolved), learner.steps
    )
    saver = Saver(output, config.run.keep, policy, tokenizer, stateful)
    return Setup(learner, tokenizer, sampling, prompts, output, lock, progress, saver, tracker)


def find_output(config: TrainConfig, resolved: str, lock: contextlib.ExitStack) -> tuple[Path, bool, bool]:
    """The run's folder, whether it holds a run to go on with (locked now), and if anything changed since then."""
    old = run_to_resume(config.run.resume, config.run.output_dir)
    output = old or Path(config.run.output_dir or default_output(config))
    check_output(output)
    if old is None:
        return output, False, False
    lock.enter_context(claim(old))
    changed = changes(old, resolved)
    for line in changed.values():
        print(f"going on with a change: {line}", file=sys.stderr)
    return output, True, bool(changed)


def begin(output: Path, resolved: str, device: torch.device, lock: contextlib.ExitStack) -> None:
    """Make the run's folder, and lock it."""
    output.mkdir(parents=True, exist_ok=True)
    lock.enter_context(claim(output))
    write_text(output / "config.yaml", resolved)
    write_json(output / "environment.json", environment(str(device), world_size()))


def default_output(config: TrainConfig) -> str:
    method, stamp = type(config.algorithm.surrogate).__name__.lower(), time.strftime("%Y%m%d-%H%M%S")
    return f"runs/{Path(config.model.name_or_path).name}-{config.data.name}-{method}-{stamp}"


@memory_errors(
    "pspo.train",
    "Lower --optimizer.microbatch_tokens (training), --rollout.max_rows (rollouts) or --run.validation_limit, or set "
    "--model.gradient_checkpointing true or --distributed.gather microbatch; the same command goes on from the last "
    "checkpoint",
)
def main(args: Sequence[str] | None = None) -> None:
    config, resolved = parse(TrainConfig, "pspo.train", args)
    with user_errors("pspo.train", once=True):
        start(config.distributed.strategy, config.distributed.timeout)
    with user_errors("pspo.train"):
        if summary := from_main(lambda: finished(config.run, resolved)):
            print(f"finished before, nothing to do: {Path(summary['best_model']).parent / 'summary.json'}\n")
            report(config, summary)
            return
        setup = prepare(config, resolved)
    policy, stops = setup.learner.policy, setup.tokenizer.convert_ids_to_tokens(setup.sampling.stop_ids)
    sizes = ", ".join(f"{len(prompts):,} {split}" for split, prompts in setup.prompts.items())
    print(f"model   {config.model.name_or_path}: {policy.num_parameters() / 1e6:.1f}M parameters on {policy.device}")
    print(f"data    {config.data.name}: {sizes} problems; completions end at {' or '.join(map(str, stops))}")
    print(f"method  {config.algorithm.surrogate}, {config.algorithm.epochs} epochs x "
          f"{config.algorithm.minibatches} minibatches per rollout of "
          f"{config.rollout.prompts} x {config.rollout.group_size}")  # fmt: skip
    print(f"output  {setup.output}")

    try:
        with setup.lock, StopSignals() as signals, setup.saver:
            summary = train(config, setup, signals)
    except (Stopped, KeyboardInterrupt) as stopped:
        if is_main():
            print(f"\nstopped; the same command with --run.output_dir {setup.output} goes on", file=sys.stderr)
        raise SystemExit(EXIT_STOPPED if isinstance(stopped, Stopped) else EXIT_INTERRUPTED) from None
    except RunFailed as error:
        if is_main():
            print(f"\npspo.train: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    report(config, summary)


def report(config: TrainConfig, summary: dict[str, Any]) -> None:
    if summary["before"]:
        rows = [("greedy, held-out", "accuracy [95%]", "reward", "format", "length")]
        for name in ("before", "after"):
            e = summary[name]
            rows.append((name, percent(e["accuracy"], e["ci95"]), f"{e['mean_reward']:.3f}",
                         percent(e["format_share"]), f"{e['completion_tokens']:.0f}"))  # fmt: skip
        print(table(rows))
    cost = f"{summary['tokens']:,} tokens, {summary['seconds']:.0f} s, {summary['peak_memory_gb']:.1f} GB"
    print(f"{summary['optimizer_steps']} steps, {cost}; step {summary['best_step']}'s model: {summary['best_model']}")
    if summary["before"] or config.data.name != "file":  # which may hold no test problems
        print(f"evaluate it: {evaluate_command(config, summary['best_model'])}")


def evaluate_command(config: TrainConfig, model: str) -> str:
    """The command that evaluates the returned model on the same data, prompts and lengths."""
    switches = {"model.name_or_path": model, "data.name": config.data.name}
    for name, section in (("model", config.model), ("data", config.data)):
        for part in fields(section):
            if part.name not in ("name_or_path", "revision", "limit") and getattr(section, part.name) != part.default:
                switches[f"{name}.{part.name}"] = getattr(section, part.name)
    if config.run.test_limit:
        switches["data.limit"] = config.run.test_limit  # the held-out problems of the run itself
    if config.rollout.max_completion_tokens != EvalConfig.max_completion_tokens:
        switches["eval.max_completion_tokens"] = config.rollout.max_completion_tokens
    switches["run.output_dir"] = Path(model).parent / "evaluation"
    return " ".join(["python -m pspo.evaluate", *(f"--{name} {shlex.quote(str(v))}" for name, v in switches.items())])


if __name__ == "__main__":
    run(main)
