"""Evaluate a model on problems: the validation of a run, its test before and after, and `pspo.evaluate`."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from pspo import distributed as dist
from pspo.cli.progress import Bar
from pspo.cli.user_code import fail_together
from pspo.config import EvalConfig, RewardConfig
from pspo.evaluate.results import Evaluation, Record
from pspo.rollout import Prompts, RolloutSampler
from pspo.tasks import contains_answer, is_correct, matches_format, total_rewards

SEED_STEP = 0x9E3779B9  # 2^32 over the golden ratio: chunks of evaluations with nearby seeds do not meet


@dataclass(frozen=True)
class Chunk:
    """Rows that are decoded together: these samples of each of these problems."""

    problems: list[int]
    samples: range

    @property
    def keys(self) -> list[tuple[int, int]]:
        """(problem, sample) of each row."""
        return [(i, sample) for i in self.problems for sample in self.samples]


def chunks(
    lengths: Sequence[int], samples: int, max_completion_tokens: int, max_tokens: int, max_rows: float = math.inf
) -> list[Chunk]:
    """Split ``samples`` of each prompt so that rows x (longest prompt + max_completion_tokens) fits ``max_tokens``.

    Prompts of similar length (in tokens) are batched, to pad little. A problem's samples are split only if they do not
    fit; a single row is decoded whatever its length. No chunk has more than ``max_rows`` rows.
    """
    parts: list[Chunk] = []
    together: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        rows = max(1, min(max_rows, max_tokens // (lengths[i] + max_completion_tokens)))  # i is the longest so far
        if together and (len(together) + 1) * samples > rows:
            parts.append(Chunk(together, range(samples)))
            together = []
        if samples <= rows:
            together.append(i)
        else:
            parts += [Chunk([i], range(s, min(s + rows, samples))) for s in range(0, samples, rows)]
    return [*parts, Chunk(together, range(samples))] if together else parts


def none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def complete(sampler: RolloutSampler, prompts: Prompts, chunk: Chunk, reward: RewardConfig, step: int) -> list[Record]:
    """Draw and score a chunk's completions, one record each."""
    rollout = sampler.draw(prompts.take(chunk.problems), len(chunk.samples))
    problems = [prompts.problems[i] for i, _ in chunk.keys]
    totals, function_values = total_rewards(
        reward.functions,
        reward.weights,
        rollout.texts,
        problems,
        reward.timeout,
        reward.on_error,
        reward.workers,
        step=step,
        max_completion_tokens=sampler.sampling.max_completion_tokens,
        **rollout.reward_inputs,
    )
    lengths = rollout.loss_mask.sum(dim=1).tolist()
    terminated = rollout.terminated.tolist()
    records = []
    for row, (i, sample) in enumerate(chunk.keys):
        problem, text = problems[row], rollout.texts[row]
        record = {
            "temperature": sampler.sampling.temperature,
            "problem": i,
            "sample": sample,
            **problem.record(),
            "completion": text,
            "correct": is_correct(text, problem.answer),
            "contains_gold": contains_answer(text, problem.answer),
            "format": None if isinstance(problem.answer, str | None) else matches_format(text),
            "reward": none_if_nan(totals[row]),
            "rewards": {name: none_if_nan(values[row]) for name, values in function_values.items()},
            "tokens": lengths[row],
            "truncated": not terminated[row],
        }
        records.append(record)
    return records


def evaluate(
    sampler: RolloutSampler,
    prompts: Prompts,
    reward: RewardConfig,
    *,
    samples: int = 1,
    seed: int = 0,
    step: int = 0,
    max_tokens: int = EvalConfig.max_tokens,
    max_rows: float = math.inf,
    bar: str = "",
    done: Iterable[Record] = (),
    save: Callable[[list[Record]], None] = lambda records: None,
) -> Evaluation | None:
    """Evaluate on every problem, drawing ``samples`` completions of each; rank 0 alone gets the evaluation.

    The random numbers depend on the seed alone, not on what was drawn before, and torch's generators are restored.

    Args:
        step: for rewards that ask for it.
        max_tokens, max_rows: see `chunks`; the sampler's own ``max_rows`` applies as well.
        done: records of an earlier call with the same arguments; chunks that are complete in them are not drawn again.
        save: called with each new chunk's records.
    """
    completions = {(record["problem"], record["sample"]): record for record in done}
    done_keys = set(completions)
    sampling = sampler.sampling
    lengths = [len(ids) for ids in prompts.ids]
    parts = list(enumerate(chunks(lengths, samples, sampling.max_completion_tokens, max_tokens, max_rows)))
    turns = dist.world_size()  # ranks take turns
    turn = dist.rank()
    device = dist.local_device()
    devices = [device] if device.type == "cuda" else []
    progress = Bar(total=len(prompts) * samples, desc=bar, leave=False, quiet=not bar or not dist.is_main())
    with torch.random.fork_rng(devices), progress:
        for first in range(0, len(parts), turns):
            together = parts[first : first + turns]
            number, chunk = together[min(turn, len(together) - 1)]  # maybe another rank's: they gather weights in step
            records = []
            with fail_together():
                if not done_keys.issuperset(chunk.keys):
                    torch.manual_seed((seed + SEED_STEP * number) % 2**32)  # torch's CPU generator takes 32 bits
                    records = complete(sampler, prompts, chunk, reward, step)
            gathered = dist.gather_on_main(records)[: len(together)]  # each chunk once: rewards may be random
            records = [record for rank_records in gathered for record in rank_records]
            if records:
                save(records)
            completions |= {(record["problem"], record["sample"]): record for record in records}
            progress.advance(sum(len(chunk.keys) for _, chunk in together))
    if not dist.is_main():
        return None
    return Evaluation(prompts.problems, samples, [completions[key] for key in sorted(completions)])
