"""Evaluate a model: ``python -m pspo.evaluate --model.name_or_path M --data.name gsm8k --data.limit 500``.

Temperatures times samples per problem: accuracy by the rule that the reward uses (`extract_answer`), the true accuracy
of the paper (the gold value anywhere in the response), pass@k, mean reward, format, length; with 95% intervals, and
broken down by category and level where the data has them. Writes ``results.json`` and ``completions.jsonl``.

Started again, an evaluation that was stopped goes on where it was: completions are kept chunk by chunk, and a chunk's
random numbers depend on the seed and its place alone. So the results are those of one that was never stopped.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pspo.config import DataConfig, EvalConfig, EvaluateConfig, ModelConfig, RewardConfig
from pspo.distributed import from_main, gather, is_main, launched, own_device, pool, rank, run, start, world_size
from pspo.model import (
    autocast,
    load_model_config,
    load_policy,
    load_tokenizer,
    memory_errors,
    pad_token_id,
    shares_prompts,
    stop_token_ids,
)
from pspo.rollout import Sampling, encode_prompts, generate
from pspo.run.cli import parse, user_errors
from pspo.run.records import (
    append_jsonl,
    check_output,
    environment,
    flat,
    read_config,
    read_json,
    read_jsonl,
    to_jsonl,
    write_json,
    write_text,
)
from pspo.run.results import Evaluation, render, summarise
from pspo.tasks import Problem, contains_answer, extract_answer, load_problems, matches_format, total_rewards
from pspo.tasks.answers import TOLERANCE

FINGERPRINT = "fingerprint.json"  # of an evaluation's files the last to be written, so that it vouches for the others
SEED_STEP = 0x9E3779B9  # 2^32 over the golden ratio: chunks of evaluations with nearby seeds do not meet


@dataclass(frozen=True)
class Prompts:
    """Problems and their encoded prompts, index by index."""

    problems: list[Problem]
    ids: list[list[int]]

    def __len__(self) -> int:
        return len(self.problems)


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
        holdout=config.holdout,
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
        print(f"{config.name} {split}: {dropped}")
    return Prompts([problems[i] for i in kept], [ids[i] for i in kept])


@dataclass(frozen=True)
class Chunk:
    """What is decoded at a time: these samples of each of these problems."""

    problems: list[int]
    samples: range


def chunks(
    lengths: Sequence[int], samples: int, max_completion_tokens: int, max_tokens: int, max_rows: float = math.inf
) -> list[Chunk]:
    """Divide ``samples`` of each prompt so that rows x (longest prompt + max_completion_tokens) fits max_tokens.

    None has more than ``max_rows`` rows.

    Prompts of similar lengths come together: less padding. A problem's samples are divided only where they do not fit;
    a single row is decoded whatever its length.

    Args:
        lengths: tokens of each prompt.
    """
    parts, together = [], []
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


def evaluate(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    sampling: Sampling,
    reward: RewardConfig,
    *,
    samples: int = 1,
    seed: int = 0,
    max_tokens: int = EvalConfig.max_tokens,
    max_rows: float = math.inf,
    bar: str = "",
    done: Iterable[dict[str, Any]] = (),
    save: Callable[[list[dict[str, Any]]], None] = lambda records: None,
) -> Evaluation:
    """Evaluate on every problem, drawing ``samples`` completions of each.

    The same seed draws the same numbers, at every temperature and whatever was drawn before, and leaves torch's
    generators as they were.

    Args:
        max_tokens, max_rows: see `chunks`; ``sampling.max_rows`` holds besides.
        done: records of an earlier call with the same arguments; chunks that are complete in it are not drawn again.
        save: called with each new chunk's records.
    """
    completions = {(record["problem"], record["sample"]): record for record in done}
    lengths = [len(ids) for ids in prompts.ids]
    parts = list(enumerate(chunks(lengths, samples, sampling.max_completion_tokens, max_tokens, max_rows)))
    devices = [policy.device] if policy.device.type == "cuda" else []
    bar_of = {"total": len(prompts) * samples, "desc": bar, "leave": False, "disable": not bar or not is_main()}
    # The ranks take turns, unless they have to decode in step: then all do the same.
    turns, turn = (1, 0) if sampling.synced else (world_size(), rank())
    with torch.random.fork_rng(devices), tqdm(**bar_of) as progress:
        for first in range(0, len(parts), turns):
            records = []
            for number, chunk in parts[first : first + turns][turn : turn + 1]:
                keys = {(i, sample) for i in chunk.problems for sample in chunk.samples}
                if not completions.keys() >= keys:
                    torch.manual_seed((seed + SEED_STEP * number) % 2**32)  # torch's CPU generator takes 32 bits
                    records = complete(policy, tokenizer, prompts, chunk, sampling, reward)
            if turns > 1:
                (records,) = pool(records)
            elif world_size() > 1:
                records = gather(records)[0]  # a reward may differ from rank to rank
            if records and is_main():
                save(records)
            completions |= {(record["problem"], record["sample"]): record for record in records}
            progress.update(sum(len(c.problems) * len(c.samples) for _, c in parts[first : first + turns]))
    return summarise(prompts.problems, [completions[key] for key in sorted(completions)], samples)


def complete(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    chunk: Chunk,
    sampling: Sampling,
    reward: RewardConfig,
) -> list[dict[str, Any]]:
    """Draw a chunk's completions; one record for each, with what is to be said of it."""
    keys = [(i, sample) for i in chunk.problems for sample in chunk.samples]
    rollout = generate(policy, tokenizer, [prompts.ids[i] for i in chunk.problems], sampling, len(chunk.samples))
    problems = [prompts.problems[i] for i, _ in keys]
    totals, _ = total_rewards(
        reward.functions, reward.weights, rollout.texts, problems, reward.timeout, reward.on_error
    )
    ended, tokens = rollout.terminated.tolist(), rollout.completion_mask.sum(dim=1).tolist()
    records = []
    for row, (i, sample) in enumerate(keys):
        text, gold = rollout.texts[row], problems[row].answer
        answer = extract_answer(text)
        records.append(
            {
                "temperature": sampling.temperature,
                "problem": i,
                "sample": sample,
                "prompt": problems[row].prompt,
                "gold": str(gold),
                "completion": text,
                "correct": answer is not None and abs(answer - gold) <= TOLERANCE,
                "contains_gold": contains_answer(text, gold),
                "format": matches_format(text),
                "reward": 0.0 if math.isnan(totals[row]) else totals[row],  # --reward.on_error none
                "tokens": tokens[row],
                "truncated": not ended[row],
            }
        )
    return records


def room_for_prompts(config: ModelConfig, max_completion_tokens: int, switch: str) -> float:
    """Prompt tokens that the model's positions leave beside a completion, infinite where it has no limit.

    Raises ValueError, naming the switch, where they leave none.
    """
    positions = getattr(load_model_config(config).get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions <= max_completion_tokens:
        raise ValueError(f"--{switch} must be below the model's {positions} positions, got {max_completion_tokens}")
    return math.inf if positions is None else positions - max_completion_tokens


def fingerprint(policy: PreTrainedModel, prompts: Prompts) -> dict[str, str]:
    """What an evaluation is about, beyond its configuration: SHA-256 of the model's weights and of its problems."""
    weights = hashlib.sha256()
    for name, tensor in policy.state_dict().items():
        weights.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        weights.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return {"model weights": weights.hexdigest(), "problems": fingerprint_of_problems(prompts)}


def fingerprint_of_problems(prompts: Prompts) -> str:
    parts = [
        (ids, str(problem.answer), problem.source, problem.category, problem.level)
        for ids, problem in zip(prompts.ids, prompts.problems, strict=True)
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def refuse_other_switches(output: Path, resolved: str) -> None:
    """Raise ValueError where the folder holds an evaluation with other switches, naming those that differ."""
    old, new = flat(read_config(output / "config.yaml")), flat(yaml.safe_load(resolved))
    changed = [name for name in new if old.get(name) != new[name] and name != "run.output_dir"]
    if changed:
        differences = ", ".join(f"--{name} is {old.get(name)!r} there and {new[name]!r} here" for name in changed)
        raise ValueError(
            f"--run.output_dir {output} holds another evaluation ({differences}): choose another folder, or the same "
            "switches to go on with it"
        )


def prepare(
    config: EvaluateConfig, resolved: str, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Prompts, Sampling]:
    """Load everything, and make the output folder or see that it holds this evaluation and no other.

    Raises ValueError where it holds another, before the model is loaded where the switches tell.
    """
    output = Path(config.run.output_dir)
    from_main(lambda: check_folder(output, resolved))
    tokenizer = load_tokenizer(config.model)
    room = room_for_prompts(config.model, config.eval.max_completion_tokens, "eval.max_completion_tokens")
    prompts = load_prompts(config.data, tokenizer, config.eval.split, config.data.limit, room)
    policy = load_policy(config.model, device)
    sampling = Sampling(
        stop_ids=stop_token_ids(policy, tokenizer),
        pad_id=pad_token_id(policy, tokenizer),
        top_p=config.eval.top_p,
        max_completion_tokens=config.eval.max_completion_tokens,
        max_rows=config.eval.max_tokens,  # no limit of its own
        decoder="pspo" if shares_prompts(policy) else "hf",
    )
    about = fingerprint(policy, prompts)
    from_main(lambda: begin(output, resolved, about, device))
    return policy, tokenizer, prompts, sampling


def check_folder(output: Path, resolved: str) -> None:
    """Raise ValueError where the folder holds something else, as far as the switches tell."""
    check_output(output)
    if (output / FINGERPRINT).exists():
        refuse_other_switches(output, resolved)
    elif any((output / name).exists() for name in ("completions.jsonl", "results.json", "metrics.jsonl", ".lock")):
        raise ValueError(
            f"--run.output_dir {output} holds something else, a training run perhaps; choose another folder"
        )


def begin(output: Path, resolved: str, about: dict[str, str], device: torch.device) -> None:
    """Make the folder; raise ValueError where it is there and of another model or other problems."""
    known = output / FINGERPRINT
    if not known.exists():
        output.mkdir(parents=True, exist_ok=True)
        write_text(output / "config.yaml", resolved)
        write_json(output / "environment.json", environment(str(device), world_size()))
        write_json(known, about)
        return
    old = read_json(known)
    if changed := [name for name in about if old.get(name) != about[name]]:
        raise ValueError(
            f"--run.output_dir {output} holds an evaluation with other {' and '.join(changed)} under the same "
            "name: choose another folder"
        )


@memory_errors("pspo.evaluate", "Lower --eval.max_tokens and choose another --run.output_dir: the tokens drawn change")
def main(args: Sequence[str] | None = None) -> None:
    config, resolved = parse(EvaluateConfig, "pspo.evaluate", args)
    with user_errors("pspo.evaluate", once=True):
        start("ddp" if launched() else "none", timeout=3600)
    device = own_device()
    output = Path(config.run.output_dir)
    kept, finished = output / "completions.jsonl", output / "results.json"
    with user_errors("pspo.evaluate"):
        policy, tokenizer, prompts, sampling = prepare(config, resolved, device)
        done = from_main(lambda: read_jsonl(kept))
        results = from_main(lambda: read_json(finished, ("temperatures",)) if finished.exists() else {})
    if results:
        print(f"finished before, nothing to do: {finished}\n")
        print(render(results))
        return
    if done:
        print(f"going on with {output}: {len(done):,} completions are there")

    completions, results = [], {}
    try:
        for temperature in config.eval.temperatures:
            with autocast(config.model.autocast, device):
                result = evaluate(
                    policy,
                    tokenizer,
                    prompts,
                    replace(sampling, temperature=temperature),
                    config.reward,
                    samples=config.eval.samples if temperature > 0 else 1,
                    seed=config.run.seed,
                    max_tokens=config.eval.max_tokens,
                    bar=f"T={temperature:g}",
                    done=[record for record in done if record["temperature"] == temperature],
                    save=lambda records: append_jsonl(kept, *records),
                )
            completions += result.completions
            results[f"{temperature:g}"] = result.results()
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on with {output}", file=sys.stderr)
        raise SystemExit(130) from None
    if not is_main():
        return
    write_text(kept, to_jsonl(completions))  # in order, where a chunk that was cut short left some twice
    summary = {
        "model": config.model.name_or_path,
        "data": config.data.name,
        "split": config.eval.split,
        "n": len(prompts),
        "samples": config.eval.samples,
        "top_p": config.eval.top_p,
        "max_completion_tokens": config.eval.max_completion_tokens,
        "seed": config.run.seed,
        "temperatures": results,
    }
    write_json(finished, summary)
    print(render(summary))
    print(f"\nresults: {finished}")


if __name__ == "__main__":
    run(main)
