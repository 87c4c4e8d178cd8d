"""Evaluate a model on problems: the validation of a run, its test before and after, and `pspo.evaluate`."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from pspo import distributed as dist
from pspo.cli.failures import fail_together
from pspo.cli.terminal import Bar
from pspo.config import EvalConfig, RewardConfig
from pspo.evaluate.results import Evaluation, Record
from pspo.rollout import How, Prompts, Sampler
from pspo.tasks import contains_answer, is_correct, matches_format, total_rewards
from pspo.tasks.failures import show_failures
from pspo.tasks.files import plain

SEED_STEP = 0x9E3779B9  # 2^32 over the golden ratio: chunks of evaluations with nearby seeds do not meet


def chunks(
    lengths: Sequence[int], samples: int, max_completion_tokens: int, max_tokens: int, max_rows: float = math.inf
) -> list[list[int]]:
    """Problems to decode together: rows x (longest prompt + max_completion_tokens) <= max_tokens, and rows <= max_rows.

    Prompts of similar length (in tokens) are batched, to pad little. A single problem's samples are drawn whatever
    their number and length.
    """
    parts: list[list[int]] = [[]]
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        rows = (len(parts[-1]) + 1) * samples
        fits = rows <= max_rows and rows * (lengths[i] + max_completion_tokens) <= max_tokens
        if parts[-1] and not fits:
            parts.append([])
        parts[-1].append(i)
    return parts


def complete(
    sampler: Sampler,
    how: How,
    prompts: Prompts,
    indices: list[int],
    samples: int,
    reward: RewardConfig,
    step: int,
    shown_failures: dict[str, str],
) -> list[Record]:
    """Draw and score samples of some problems, one record each."""
    with dist.unsharded(how.model):
        rollout = sampler.draw(prompts.take(indices), samples, how)
    problems = [prompts.problems[i] for i in indices for _ in range(samples)]
    scores = total_rewards(
        reward.functions,
        reward.weights,
        rollout.texts,
        problems,
        reward.timeout,
        reward.on_error,
        reward.workers,
        step=step,
        max_completion_tokens=how.sampling.max_completion_tokens,
        **rollout.reward_inputs,
    )
    show_failures(scores.failures, shown_failures)
    lengths = rollout.loss_mask.sum(dim=1).tolist()
    terminated = rollout.terminated.tolist()
    records = []
    for row, (problem, text) in enumerate(zip(problems, rollout.texts, strict=True)):
        record = {
            "temperature": how.sampling.temperature,
            "problem": indices[row // samples],
            "sample": row % samples,
            **problem.record(),
            "completion": text,
            "correct": is_correct(text, problem.answer),
            "contains_gold": contains_answer(text, problem.answer),
            "format": None if isinstance(problem.answer, str | None) else matches_format(text),
            "reward": plain(scores.totals[row]),
            "rewards": {name: plain(values[row]) for name, values in scores.by_function.items()},
            "tokens": lengths[row],
            "truncated": not terminated[row],
        }
        records.append(record)
    return records


def evaluate(
    sampler: Sampler,
    how: How,
    prompts: Prompts,
    reward: RewardConfig,
    *,
    samples: int = 1,
    seed: int = 0,
    step: int = 0,
    max_tokens: int = EvalConfig.max_tokens,
    max_rows: float = math.inf,
    bar: str = "",
    done: Mapping[tuple[int, int], Record] = MappingProxyType({}),
    save: Callable[[list[Record]], None] = lambda records: None,
    shown_failures: dict[str, str] | None = None,
) -> Evaluation | None:
    """Evaluate on every problem, drawing ``samples`` completions of each; rank 0 alone gets the evaluation.

    The random numbers depend on the seed alone, not on what was drawn before, and torch's generators are restored.

    Chunks that are complete in ``done``, records of an earlier call with the same arguments by problem and sample, are
    not drawn again; ``save`` is called with each new chunk's records; ``shown_failures`` is of `show_failures`.
    """
    shown_failures = {} if shown_failures is None else shown_failures
    completions = dict(done)
    lengths = [len(ids) for ids in prompts.ids]
    parts = chunks(lengths, samples, how.sampling.max_completion_tokens, max_tokens, max_rows)
    device = dist.local_device()
    devices = [device] if device.type == "cuda" else []
    progress = Bar(total=len(prompts) * samples, desc=bar, leave=False, quiet=not bar or not dist.is_main())
    with torch.random.fork_rng(devices), progress:
        for first in range(0, len(parts), dist.world_size()):  # ranks take turns
            together = parts[first : first + dist.world_size()]
            number = first + min(dist.rank(), len(together) - 1)  # maybe another rank's: they gather weights in step
            keys = [(i, sample) for i in parts[number] for sample in range(samples)]
            records = []
            with fail_together():
                if not completions.keys() >= set(keys):
                    torch.manual_seed((seed + SEED_STEP * number) % 2**32)  # torch's CPU generator takes 32 bits
                    records = complete(sampler, how, prompts, parts[number], samples, reward, step, shown_failures)
            gathered = dist.gather_on_main(records)[: len(together)]  # each chunk once: rewards may be random
            records = [record for rank_records in gathered for record in rank_records]
            if records:
                save(records)
            completions |= {(record["problem"], record["sample"]): record for record in records}
            progress.advance(samples * sum(map(len, together)))
    if not dist.is_main():
        return None
    return Evaluation(prompts.problems, samples, [completions[key] for key in sorted(completions)])
