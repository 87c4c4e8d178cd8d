"""Evaluate a model on problems: for a run's validation, its tests before and after training, and `pspo.evaluate`."""

import math
from collections.abc import Sequence

import torch

from pspo import distributed as dist
from pspo.config import EvalConfig, RewardConfig
from pspo.endings import fail_together
from pspo.evaluate.statistics import Record
from pspo.rollout import How, Prompts, Sampler
from pspo.tasks import MathReward, contains_answer, is_correct, matches_format
from pspo.tasks.files import plain
from pspo.tasks.scoring import judges, show_failures
from pspo.terminal import Bar

SEED_STEP = 0x9E3779B9  # 2^32 over the golden ratio: chunks of evaluations with nearby seeds do not meet


def chunks(
    lengths: Sequence[int], samples: int, max_completion_tokens: int, max_tokens: int, max_rows: float = math.inf
) -> list[list[int]]:
    """Split problems into chunks of similar length, by index, to decode together: rows <= max_rows and rows x (longest
    prompt + max_completion_tokens) <= max_tokens. A chunk of one problem may exceed both limits.
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
    sampler: Sampler, how: How, prompts: Prompts, indices: list[int], samples: int, reward: RewardConfig, step: int
) -> tuple[list[Record], dict[str, Exception]]:
    """Draw and score samples of some problems; returns a record of each sample, and each reward's first failure.

    Answers are compared with the gold answer if a reward `judges` them, by the rules of the first MathReward.
    """
    with dist.unsharded(how.model):
        rollout = sampler.draw(prompts.take(indices), samples, how)
    math_reward = next((function for function in reward.functions if isinstance(function, MathReward)), MathReward())
    judge = MathReward(math_reward.tolerance, 0.0, math_reward.marker)  # 1 if the number is right, else 0
    problems = [prompts.problems[i] for i in indices for _ in range(samples)]
    scores = rollout.score(problems, samples, reward, step, how.sampling.max_completion_tokens)
    lengths = rollout.loss_mask.sum(dim=1).tolist()
    terminated = rollout.terminated.tolist()
    records = []
    for row, (problem, text) in enumerate(zip(problems, rollout.texts, strict=True)):
        answer = problem.answer if judges(reward.functions, problem.answer) else None
        is_number = not isinstance(answer, str | None)
        record = {
            "temperature": how.sampling.temperature,
            "problem": indices[row // samples],
            "sample": row % samples,
            **prompts.record(indices[row // samples]),
            "completion": text,
            "correct": judge([text], [problem]) == [1.0] if is_number else is_correct(text, answer),
            "contains_gold": contains_answer(text, answer),
            "format": matches_format(text, judge.marker) if is_number else None,
            "reward": plain(scores.totals[row]),
            "rewards": {name: plain(values[row]) for name, values in scores.by_function.items()},
            "tokens": lengths[row],
            "truncated": not terminated[row],
        }
        records.append(record)
    return records, scores.failures


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
    shown_failures: dict[str, str] | None = None,
) -> list[Record] | None:
    """Draw and score ``samples`` completions of every problem; rank 0 alone gets their records, as of `complete`.

    The random numbers depend on the seed alone, not on earlier draws; torch's generators are restored afterwards.
    """
    shown_failures = {} if shown_failures is None else shown_failures
    lengths = [len(ids) for ids in prompts.ids]
    parts = chunks(lengths, samples, how.sampling.max_completion_tokens, max_tokens, max_rows)
    device = dist.local_device()
    devices = [device] if device.type == "cuda" else []
    completions = []
    progress = Bar(total=len(prompts) * samples, desc=bar, leave=False, quiet=not bar or not dist.is_main())
    with torch.random.fork_rng(devices), progress:
        for first in range(0, len(parts), dist.world_size()):  # ranks take turns
            together = parts[first : first + dist.world_size()]
            number = first + min(dist.rank(), len(together) - 1)  # spare ranks repeat the last: all must gather weights
            with fail_together():
                torch.manual_seed((seed + SEED_STEP * number) % 2**32)  # torch's CPU generator takes 32 bits
                records, failures = complete(sampler, how, prompts, parts[number], samples, reward, step)
                show_failures(failures, shown_failures)
            completions += dist.gather_on_main(records if dist.rank() < len(together) else [])
            progress.advance(samples * sum(map(len, together)))
    if not dist.is_main():
        return None
    completions.sort(key=lambda record: (record["problem"], record["sample"]))
    return completions
