"""Train a model: ``python -m pspo.train``.

    problems -> rollout -> rewards -> advantages -> (old log-probs) -> minibatch epochs
             -> surrogate -> aggregate -> backward -> optimizer step -> metrics / validation / saved model

`train` is that line, top to bottom; `update` is its second half: the off-policy schedule over one rollout.
"""

import copy
import math
import random
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import yaml
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from pspo.card import model_card
from pspo.checkpoint import Progress, RunFailed, Saver, checkpoints, save_model
from pspo.config import EvalConfig, TrainConfig, parse, user_errors
from pspo.evaluate import Prompts, evaluate, fingerprint_of_problems, load_prompts, room_for_prompts
from pspo.losses import Counts, diagnose, divided_sum, kl_estimate, token_divisors, token_weights
from pspo.metrics import Stopwatch, append_jsonl, check_output, environment, peak_memory_gb, write_json, write_text
from pspo.model import (
    autocast,
    backward_in_one_pass,
    load_policy,
    load_tokenizer,
    stop_token_ids,
    token_logprobs,
)
from pspo.results import percent, table
from pspo.resume import (
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    Stopped,
    StopSignals,
    changes,
    claim,
    finished,
    go_on,
    record_changes,
    run_to_resume,
)
from pspo.rollout import (
    Batch,
    Rollout,
    Sampling,
    check_decoder,
    generate,
    group_relative_advantages,
    to_device,
)
from pspo.tasks import Problem, total_rewards, without_unknown
from pspo.trackers import Tracker, check_tracker, start_tracker


@dataclass
class Learner:
    """What an optimizer step changes, and the reference model that it leaves alone (None where beta is 0)."""

    policy: PreTrainedModel
    reference: PreTrainedModel | None
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    steps: int = 0


@dataclass(frozen=True)
class Setup:
    """What a run starts from; `prepare` makes it."""

    learner: Learner
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    prompts: dict[str, Prompts]  # by split
    output: Path
    lock: IO[Any]  # on the output folder, while it is open
    progress: Progress
    saver: Saver
    tracker: Tracker


def train(config: TrainConfig, setup: Setup, stop: StopSignals | None = None) -> dict[str, Any]:
    """The loop, from the progress that there is. Returns the run's summary, as written to ``summary.json``.

    Raises Stopped, all saved, where ``stop`` received a signal; RunFailed after too many skipped steps in a row.
    """
    learner, prompts, output, progress = setup.learner, setup.prompts["train"], setup.output, setup.progress
    device, group_size, max_tokens = learner.policy.device, config.rollout.group_size, config.run.max_tokens or math.inf
    start, stop = time.perf_counter() - progress.seconds, stop or StopSignals()
    order = islice(prompt_order(len(prompts), config.run.seed), progress.prompts, None)

    if progress.before is None:
        progress.before = test_accuracy(config, setup, learner.policy, "test before")
        if config.run.validate_every:
            progress.best = progress.validated = {"step": 0} | validate(config, setup)
            save_best(config, setup)

    with tqdm(total=config.run.max_steps, initial=learner.steps, desc="train", unit="step") as bar:
        while not stop.received and learner.steps < config.run.max_steps and progress.tokens < max_tokens:
            watch, first_step = Stopwatch(), learner.steps

            chosen = list(islice(order, config.rollout.prompts))
            with watch("generate"), autocast(config.model.autocast, device):
                ids = [prompts.ids[i] for i in chosen]
                rollout = generate(learner.policy, setup.tokenizer, ids, setup.sampling, group_size)
            with watch("reward"):
                problems = [prompts.problems[i] for i in chosen for _ in range(group_size)]
                rewards, rewards_by_name, advantages = reward(config, rollout, problems)
            with watch("train"):
                steps = update(learner, rollout, advantages, config)
            progress.prompts += len(chosen)
            progress.tokens += rollout.tokens

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
            append_jsonl(output / "metrics.jsonl", line)
            setup.tracker.log(line)
            shown = range(0, len(rollout), group_size)[: config.run.samples]
            append_jsonl(output / "samples.jsonl", *(
                {"step": learner.steps, "prompt": problems[i].prompt, "gold": str(problems[i].answer),
                 "completion": rollout.texts[i], "reward": rewards[i]} for i in shown
            ))  # fmt: skip
            count_skipped(steps, config, setup)
            progress.seconds = time.perf_counter() - start
            if not stop.received and (done or crossed(config.run.save_every, first_step, learner.steps)):
                setup.saver.save(learner.steps, card(config, setup), progress)
            bar.update(learner.steps - first_step)
            rate = rollout.tokens / (watch.seconds["generate"] + watch.seconds["train"])
            length = metrics["completion_tokens"]
            bar.set_postfix_str(f"reward {metrics['reward']:.3f}, length {length:.0f}, {rate:,.0f} tokens/s")

    if stop.received:
        setup.saver.save(learner.steps, card(config, setup), progress)
        raise Stopped
    setup.saver.wait()
    save_model(learner.policy, setup.tokenizer, output / "final", card(config, setup))
    returned = output / ("best" if progress.best else "final")
    best = replace(config.model, name_or_path=str(returned))
    policy = load_policy(best, device) if progress.best else learner.policy
    summary = {
        "before": progress.before,
        "after": test_accuracy(config, setup, policy, "test after"),
        "tokens": progress.tokens,
        "optimizer_steps": learner.steps,
        "seconds": round(time.perf_counter() - start, 2),
        "peak_memory_gb": round(peak_memory_gb(device), 3),
        "best_model": str(returned),
        "best_step": progress.best.get("step", learner.steps),
    }
    write_json(output / "summary.json", summary)
    setup.tracker.finish()
    return summary


def update(learner: Learner, rollout: Rollout, advantages: Tensor, config: TrainConfig) -> list[dict[str, float]]:
    """Take the optimizer steps of one rollout: epochs x minibatches, each accumulated over its microbatches.

    Old log-probs cost no pass of their own where they need none: rows first visited before any step use that
    visit's detached log-probs. A row stays in its microbatch, so that its old and new log-probs come from identical
    shapes.

    Args:
        rollout: B rows.
        advantages: (B,) float32.

    Returns:
        The metrics of each step, in order; ratios and the like are those of the tokens with A != 0.
    """
    algorithm = config.algorithm
    if algorithm.mask_truncated:
        rollout = replace(rollout, completion_mask=rollout.completion_mask & rollout.terminated[:, None])

    minibatches = split_minibatches(rollout, advantages, config)
    with torch.no_grad(), autocast(config.model.autocast, advantages.device):
        for m, (_, batches) in enumerate(minibatches):
            for i, batch in enumerate(batches):
                inputs = (*batch.rollout.token_ids, config.rollout.temperature)
                # Only rows first visited after a step need a pass now, while the policy is still the old one.
                old_logprobs = token_logprobs(learner.policy, *inputs) if m > 0 else None
                ref_logprobs = token_logprobs(learner.reference, *inputs) if learner.reference else None
                batches[i] = replace(batch, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)

    steps: list[dict[str, float]] = []
    for counts, batches in minibatches * algorithm.epochs:
        if learner.steps == config.run.max_steps:
            break
        loss, kl_reference, seen = torch.zeros((), device=advantages.device), 0.0, []
        for i, batch in enumerate(batches):
            share, logprobs = backward(learner.policy, batch, counts, config)
            if batch.old_logprobs is None:
                batch = batches[i] = replace(batch, old_logprobs=logprobs)
            loss += share
            mask, row_advantages = batch.rollout.completion_mask, batch.advantages[:, None]  # (b, t), (b, 1)
            if batch.ref_logprobs is not None:
                kl = kl_estimate(logprobs, batch.ref_logprobs, mask, algorithm.kl_estimator)
                kl_reference += kl.sum() / max(counts.tokens, 1)
            weights = token_weights(algorithm.surrogate, logprobs, batch.old_logprobs, row_advantages, mask)
            values = (logprobs, batch.old_logprobs, row_advantages, weights)
            seen.append(torch.stack([value.expand_as(mask)[mask] for value in values]))  # (4, n)

        seen = torch.cat(seen, dim=1)  # (4, N)
        max_norm = config.optimizer.max_grad_norm or math.inf
        grad_norm = torch.nn.utils.clip_grad_norm_(learner.policy.parameters(), max_norm)
        lr, finite = learner.scheduler.get_last_lr()[0], bool(torch.isfinite(grad_norm + loss + seen[0].sum()))
        if finite:  # numbers gone bad never reach the weights
            learner.optimizer.step()
        learner.scheduler.step()
        learner.optimizer.zero_grad()
        learner.steps += 1
        steps.append({"loss": loss.item(), "grad_norm": grad_norm.item(), "lr": lr, "step_skipped": float(not finite)})
        if learner.reference is not None:
            steps[-1]["kl_reference"] = float(kl_reference)
        steps[-1] |= diagnose(*seen, mask=seen[2] != 0)  # the same tokens for every method: those with an advantage
    return steps


def backward(policy: PreTrainedModel, batch: Batch, counts: Counts, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Accumulate the gradient of a microbatch's share of the minibatch's loss.

    Returns:
        The share, a scalar, and the policy's log-probs, (b, t); both without gradient.
    """
    algorithm, completion_mask = config.algorithm, batch.rollout.completion_mask  # (b, t)
    token_local = algorithm.surrogate.token_local

    def laid_out(values: Tensor) -> Tensor:
        """A token-local loss may see the unmasked tokens alone, as (N, 1): then the head needs one pass only."""
        return values.expand_as(completion_mask)[completion_mask][:, None] if token_local else values

    mask, advantages = laid_out(completion_mask), laid_out(batch.advantages[:, None])
    divisors = laid_out(token_divisors(completion_mask, algorithm.aggregation, counts))
    old = None if batch.old_logprobs is None else laid_out(batch.old_logprobs)
    ref = None if batch.ref_logprobs is None else laid_out(batch.ref_logprobs)
    share = torch.zeros((), device=mask.device)

    def loss(logprobs: Tensor, part: slice = slice(None)) -> Tensor:
        old_logprobs = logprobs.detach() if old is None else old[part]
        per_token_loss = algorithm.surrogate(logprobs, old_logprobs, advantages[part], mask[part])
        if ref is not None:
            kl = kl_estimate(logprobs, ref[part], mask[part], algorithm.kl_estimator)
            per_token_loss = per_token_loss + algorithm.beta * kl
        total = divided_sum(per_token_loss, mask[part], divisors[part])
        share.add_(total.detach())
        return total

    with autocast(config.model.autocast, mask.device):
        inputs = (policy, *batch.rollout.token_ids, config.rollout.temperature)
        if token_local:
            return share, backward_in_one_pass(*inputs, loss)
        logprobs = token_logprobs(*inputs)
    loss(logprobs).backward()
    return share, logprobs.detach()


def split_minibatches(rollout: Rollout, advantages: Tensor, config: TrainConfig) -> list[tuple[Counts, list[Batch]]]:
    """Assign rows to optimizer steps and to microbatches, once for all epochs of a rollout. Groups stay whole.

    Rows that cannot move the loss (no unmasked token, or advantage 0 where surrogate and KL are silent then) are left
    out but counted: the denominators are the full minibatch's, so loss and gradient stay what they were. The groups of
    a minibatch are sorted by length, so that microbatches hold little padding; a group is split only where it is over
    --optimizer.microbatch_tokens alone.
    """
    algorithm, group_size = config.algorithm, config.rollout.group_size
    moving = rollout.completion_mask.any(dim=1)  # (B,)
    if algorithm.beta == 0 and algorithm.surrogate.silent_at_zero_advantage:
        moving &= advantages != 0
    moving = moving.tolist()
    prompt_lengths, lengths = (mask.sum(dim=1).tolist() for mask in (rollout.prompt_mask, rollout.completion_mask))

    def tokens(rows: list[int]) -> int:
        """What the forward pass computes, padding included; `token_logprobs` computes a group's prompt once."""
        prompts = rows if config.model.gradient_checkpointing else {row // group_size for row in rows}
        return len(prompts) * max(prompt_lengths[row] for row in rows) + len(rows) * max(lengths[row] for row in rows)

    minibatches = []
    for numbers in np.array_split(np.arange(len(rollout) // group_size), algorithm.minibatches):
        groups = [range(number * group_size, (number + 1) * group_size) for number in numbers.tolist()]
        counts = Counts(
            tokens=sum(lengths[row] for group in groups for row in group),
            sequences=len(groups) * group_size,
            max_completion_tokens=config.rollout.max_completion_tokens,
        )
        kept = [[row for row in group if moving[row]] for group in groups]
        kept = sorted(filter(None, kept), key=lambda rows: -max(lengths[row] for row in rows))
        if not kept:  # a row whose gradient is 0: a step without any gradient would stop AdamW's momentum, too
            kept = [[groups[0][0]]]
        microbatches: list[list[int]] = [[]]
        for rows in kept:
            for part in [rows] if tokens(rows) <= config.optimizer.microbatch_tokens else [[row] for row in rows]:
                if microbatches[-1] and tokens(microbatches[-1] + part) > config.optimizer.microbatch_tokens:
                    microbatches.append([])
                microbatches[-1] += part
        indices = [to_device(torch.tensor(rows), advantages.device) for rows in microbatches]
        minibatches.append((counts, [Batch(rollout.rows(rows), advantages[rows]) for rows in indices]))
    return minibatches


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
    filled = torch.tensor(without_unknown(rewards, group_size), device=rollout.completion_ids.device)
    advantages = group_relative_advantages(filled, group_size, config.algorithm.advantage_scale)
    unknown = torch.tensor(rewards, device=filled.device).isnan()
    return rewards, by_name, advantages.where(~unknown, 0.0)


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
        if progress.skipped == config.optimizer.max_skipped:
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
    prompts, policy = setup.prompts["validation"], setup.learner.policy
    with autocast(config.model.autocast, policy.device):
        sampled = evaluate(policy, setup.tokenizer, prompts, setup.sampling, config.reward, bar="validate")
        greedy = evaluate(policy, setup.tokenizer, prompts, greedily(setup.sampling), config.reward, bar="validate")
    return {"validation_reward": sampled.mean_reward, "validation_accuracy": greedy.accuracy}


def test_accuracy(config: TrainConfig, setup: Setup, policy: PreTrainedModel, bar: str) -> dict[str, Any]:
    """Greedy accuracy on the held-out problems; empty for --run.test_limit 0."""
    if config.run.test_limit == 0:
        return {}
    prompts = setup.prompts["test"]
    with autocast(config.model.autocast, policy.device):
        return evaluate(policy, setup.tokenizer, prompts, greedily(setup.sampling), config.reward, bar=bar).record()


def greedily(sampling: Sampling) -> Sampling:
    """Greedy decoding of the plain model, with the same limit and stop tokens."""
    return replace(sampling, temperature=0.0, repetition_penalty=1.0, min_completion_tokens=0)


def prepare(config: TrainConfig, resolved: str) -> Setup:
    """Load everything, the cheap and fallible first; the output folder is made last, so that no error leaves one."""
    old = run_to_resume(config.run.resume, config.run.output_dir)
    output = old or Path(config.run.output_dir or default_output(config))
    check_output(output)
    lock, changed = (claim(old), changes(old, resolved)) if old else (None, [])
    for line in changed:
        print(f"going on with a change: {line}", file=sys.stderr)
    check_tracker(config.run.tracker)

    tokenizer = load_tokenizer(config.model)
    room = room_for_prompts(config.model, config.rollout.max_completion_tokens, "rollout.max_completion_tokens")
    limits = {"train": config.data.limit}
    if config.run.validate_every:
        limits["validation"] = config.run.validation_limit
    if config.run.test_limit:
        limits["test"] = config.run.test_limit
    prompts = {split: load_prompts(config.data, tokenizer, split, limit, room) for split, limit in limits.items()}

    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(config.run.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = load_policy(config.model, device)
    check_decoder(policy, config.rollout.decoder)
    reference = copy.deepcopy(policy).requires_grad_(False) if config.algorithm.beta > 0 else None
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
        pad_id=tokenizer.pad_token_id,
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        repetition_penalty=r.repetition_penalty,
        max_completion_tokens=r.max_completion_tokens,
        min_completion_tokens=r.min_completion_tokens,
        max_rows=r.max_rows,
        decoder=r.decoder,
    )
    learner = Learner(policy, reference, optimizer, scheduler)
    stateful = {"optimizer": optimizer, "scheduler": scheduler}
    progress = Progress({split: fingerprint_of_problems(prompts[split]) for split in prompts})
    if lock:
        learner.steps, progress = go_on(config, output, policy, stateful, progress)
        if changed:
            record_changes(output, resolved)
    else:
        output.mkdir(parents=True, exist_ok=True)
        lock = claim(output)
        write_text(output / "config.yaml", resolved)
        write_json(output / "environment.json", environment(str(device)))
    tracker = start_tracker(config.run.tracker, output, yaml.safe_load(resolved), learner.steps)
    saver = Saver(output, config.run.keep, policy, tokenizer, stateful)
    return Setup(learner, tokenizer, sampling, prompts, output, lock, progress, saver, tracker)


def default_output(config: TrainConfig) -> str:
    method, stamp = type(config.algorithm.surrogate).__name__.lower(), time.strftime("%Y%m%d-%H%M%S")
    return f"runs/{Path(config.model.name_or_path).name}-{config.data.name}-{method}-{stamp}"


def main(args: Sequence[str] | None = None) -> None:
    config, resolved = parse(TrainConfig, "pspo.train", args)
    with user_errors("pspo.train"):
        if summary := finished(config.run, resolved):
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
        with setup.lock, setup.saver, StopSignals() as stop:
            summary = train(config, setup, stop)
    except (Stopped, KeyboardInterrupt) as stopped:
        print(f"\nstopped; the same command with --run.output_dir {setup.output} goes on", file=sys.stderr)
        raise SystemExit(EXIT_STOPPED if isinstance(stopped, Stopped) else EXIT_INTERRUPTED) from None
    except RunFailed as error:
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
    main()
