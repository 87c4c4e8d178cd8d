"""Evaluate a model: ``python -m pspo.evaluate --model.name_or_path M --data.name gsm8k --data.limit 500``.

Temperatures times samples per problem: accuracy by the default rule of `extract_answer`, the true accuracy of the paper
(the gold value anywhere in the response), pass@k, mean reward, format, length; with 95% intervals. Writes
``results.json`` and ``completions.jsonl``.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pspo.config import DataConfig, EvaluateConfig, ModelConfig, RewardConfig, parse, user_errors
from pspo.metrics import append_jsonl, check_output, cluster_bootstrap, environment, wilson, write_json, write_text
from pspo.model import autocast, load_model_config, load_policy, load_tokenizer, stop_token_ids
from pspo.rollout import Sampling, encode_prompts, generate
from pspo.tasks import Problem, contains_answer, extract_answer, load_problems, matches_format, total_rewards
from pspo.tasks.answers import TOLERANCE


@dataclass(frozen=True)
class Prompts:
    """Problems and their encoded prompts, index by index."""

    problems: list[Problem]
    ids: list[list[int]]

    def __len__(self) -> int:
        return len(self.problems)


@dataclass(frozen=True)
class Evaluation:
    """Means over n problems, and over the samples of each.

    Attributes:
        accuracy: share whose extracted answer is right; ci95 is its interval.
        true_accuracy: share with the gold value anywhere in the response.
        pass_at_k: by k, the unbiased estimate (Chen et al. 2021, "Evaluating LLMs Trained on Code").
        format_share: share ending in the format "#### number".
        truncated_share: share that hit the token limit.
        completion_tokens: mean length.
    """

    accuracy: float
    ci95: tuple[float, float]
    n: int
    true_accuracy: float
    true_accuracy_ci95: tuple[float, float]
    mean_reward: float
    format_share: float
    truncated_share: float
    completion_tokens: float
    samples: int = 1
    pass_at_k: dict[int, float] = field(default_factory=dict)
    completions: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def record(self) -> dict[str, Any]:
        """All but the completions, as JSON has it."""
        return {part.name: getattr(self, part.name) for part in fields(self) if part.name != "completions"}


def load_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: str, limit: int | None, room: float
) -> Prompts:
    """Load one split and encode its prompts; those over --data.max_prompt_tokens or over ``room`` are dropped.

    Raises ValueError where none is left, or there is no such split.
    """
    problems = load_problems(
        config.name,
        split,
        config.path,
        limit=limit,
        seed=config.seed,
        prompt_column=config.prompt_column,
        answer_column=config.answer_column,
        fractions=config.fractions,
    )
    ids = encode_prompts(tokenizer, [problem.prompt for problem in problems], config.system_prompt)
    longest = min(config.max_prompt_tokens, room)
    kept = [i for i in range(len(ids)) if len(ids[i]) <= longest]
    if not kept:
        raise ValueError(
            f"all {len(ids)} {split} prompts of {config.name} are longer than {longest} tokens, the shortest has "
            f"{min(map(len, ids))}: raise --data.max_prompt_tokens, or lower max_completion_tokens where the model's "
            "positions are the limit"
        )
    if len(kept) < len(ids):
        dropped = f"dropped {len(ids) - len(kept):,} of {len(ids):,} prompts over {longest} tokens"
        print(f"{config.name} {split}: {dropped}", file=sys.stderr)
    return Prompts([problems[i] for i in kept], [ids[i] for i in kept])


def evaluate(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    sampling: Sampling,
    reward: RewardConfig,
    *,
    samples: int = 1,
    seed: int = 0,
    bar: str = "",
) -> Evaluation:
    """Evaluate on every problem, drawing ``samples`` completions of each.

    The same seed draws the same numbers, whatever was drawn before, and leaves torch's generators as they were.
    """
    completions: list[dict[str, Any]] = []
    order = sorted(range(len(prompts)), key=lambda i: len(prompts.ids[i]))  # similar lengths together: less padding
    at_a_time = max(1, sampling.max_rows // samples)
    devices = [policy.device] if policy.device.type == "cuda" else []
    with torch.random.fork_rng(devices), tqdm(total=len(order), desc=bar, leave=False, disable=not bar) as progress:
        torch.manual_seed(seed)
        for start in range(0, len(order), at_a_time):
            chunk = order[start : start + at_a_time]
            rollout = generate(policy, tokenizer, [prompts.ids[i] for i in chunk], sampling, samples)
            rows = [i for i in chunk for _ in range(samples)]
            problems = [prompts.problems[i] for i in rows]
            totals, _ = total_rewards(reward.functions, reward.weights, rollout.texts, problems)
            ended, lengths = rollout.terminated.tolist(), rollout.completion_mask.sum(dim=1).tolist()
            for row, i in enumerate(rows):
                text, gold = rollout.texts[row], prompts.problems[i].answer
                answer = extract_answer(text)
                completions.append(
                    {
                        "problem": i,
                        "prompt": prompts.problems[i].prompt,
                        "gold": str(gold),
                        "completion": text,
                        "correct": answer is not None and abs(answer - gold) <= TOLERANCE,
                        "contains_gold": contains_answer(text, gold),
                        "format": matches_format(text),
                        "reward": totals[row],
                        "tokens": lengths[row],
                        "truncated": not ended[row],
                    }
                )
            progress.update(len(chunk))
    completions.sort(key=lambda completion: completion["problem"])
    return _summarise(completions, len(prompts), samples)


def _summarise(completions: list[dict[str, Any]], n: int, samples: int) -> Evaluation:
    def by_problem(key: str) -> np.ndarray:  # (n,) mean over each problem's samples
        return np.array([completion[key] for completion in completions], dtype=float).reshape(n, samples).mean(axis=1)

    def interval(values: np.ndarray) -> tuple[float, float]:
        return wilson(values.sum(), n) if samples == 1 else cluster_bootstrap(values)

    correct, contains = by_problem("correct"), by_problem("contains_gold")
    powers = [2**j for j in range(samples.bit_length()) if 2**j <= samples]
    return Evaluation(
        accuracy=float(correct.mean()),
        ci95=interval(correct),
        n=n,
        true_accuracy=float(contains.mean()),
        true_accuracy_ci95=interval(contains),
        mean_reward=float(by_problem("reward").mean()),
        format_share=float(by_problem("format").mean()),
        truncated_share=float(by_problem("truncated").mean()),
        completion_tokens=float(by_problem("tokens").mean()),
        samples=samples,
        pass_at_k={k: float(np.mean([pass_at_k(samples, round(c * samples), k) for c in correct])) for k in powers},
        completions=completions,
    )


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold at least one of the ``correct`` ones."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def room_for_prompts(config: ModelConfig, max_completion_tokens: int, switch: str) -> float:
    """Prompt tokens that the model's positions leave beside a completion, infinite where it has no limit.

    Raises ValueError, naming the switch, where they leave none.
    """
    positions = getattr(load_model_config(config).get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions <= max_completion_tokens:
        raise ValueError(f"--{switch} must be below the model's {positions} positions, got {max_completion_tokens}")
    return math.inf if positions is None else positions - max_completion_tokens


def table(rows: Sequence[Sequence[object]]) -> str:
    """Columns of text, the first row as the header, all but the first column to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        first, *rest = zip(row, widths, strict=True)
        lines.append("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip())
    return "\n".join(lines)


def percent(share: float, ci95: tuple[float, float] | None = None) -> str:
    """A share as "42.0%", with its interval as "42.0% [37.7, 46.4]"."""
    interval = f" [{100 * ci95[0]:.1f}, {100 * ci95[1]:.1f}]" if ci95 else ""
    return f"{100 * share:.1f}%{interval}"


def main(args: Sequence[str] | None = None) -> None:
    config, resolved = parse(EvaluateConfig, "pspo.evaluate", args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with user_errors("pspo.evaluate"):
        output = Path(config.run.output_dir)
        check_output(output)
        if (output / "results.json").exists():
            raise ValueError(f"--run.output_dir {output} already holds results; choose another")
        tokenizer = load_tokenizer(config.model)
        room = room_for_prompts(config.model, config.eval.max_completion_tokens, "eval.max_completion_tokens")
        prompts = load_prompts(config.data, tokenizer, config.eval.split, config.data.limit, room)
        policy = load_policy(config.model, device)
        output.mkdir(parents=True, exist_ok=True)
    write_text(output / "config.yaml", resolved)
    write_json(output / "environment.json", environment(str(device)))
    (output / "completions.jsonl").unlink(missing_ok=True)  # of an evaluation that was cut short

    results = {}
    rows = [("temperature", "accuracy [95%]", "true accuracy [95%]", "reward", "format", "truncated", "tokens")]
    for temperature in config.eval.temperatures:
        sampling = Sampling(
            stop_ids=stop_token_ids(policy, tokenizer),
            pad_id=tokenizer.pad_token_id,
            temperature=temperature,
            top_p=config.eval.top_p,
            max_completion_tokens=config.eval.max_completion_tokens,
            max_rows=config.eval.max_rows,
        )
        samples = config.eval.samples if temperature > 0 else 1
        with autocast(config.model.autocast, device):
            result = evaluate(
                policy, tokenizer, prompts, sampling, config.reward,
                samples=samples, seed=config.run.seed, bar=f"T={temperature:g}",
            )  # fmt: skip
        append_jsonl(output / "completions.jsonl", *({"temperature": temperature} | c for c in result.completions))
        results[f"{temperature:g}"] = result.record()
        rows.append(
            (
                f"{temperature:g}",
                percent(result.accuracy, result.ci95),
                percent(result.true_accuracy, result.true_accuracy_ci95),
                f"{result.mean_reward:.3f}",
                percent(result.format_share),
                percent(result.truncated_share),
                f"{result.completion_tokens:.1f}",
            )
        )
    write_json(output / "results.json", {"model": config.model.name_or_path, "data": config.data.name, **results})
    print(f"{config.model.name_or_path} on {len(prompts)} problems of {config.data.name} {config.eval.split}")
    print(table(rows))
    for temperature, result in results.items():
        if result["samples"] > 1:
            passes = ", ".join(f"pass@{k} {percent(share)}" for k, share in result["pass_at_k"].items())
            print(f"T={temperature}: {passes} ({result['samples']} samples each)")
    print(f"results: {output / 'results.json'}")


if __name__ == "__main__":
    main()
