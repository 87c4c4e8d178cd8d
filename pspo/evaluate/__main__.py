"""Evaluate a model: ``python -m pspo.evaluate --model.name_or_path M --data.name gsm8k --data.limit 500``.

Writes ``results.json``, by temperature what `Evaluation.results` of `pspo.evaluate.results` describes, and
``completions.jsonl``.

The same command resumes a stopped evaluation: completions are saved chunk by chunk, and a chunk's random numbers depend
on the seed and its position alone, so the results are those of an evaluation that was never stopped.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from pspo import distributed as dist
from pspo.cli import files as records
from pspo.cli.parse import memory_errors, parse, user_errors
from pspo.cli.user_code import UserCodeFailed
from pspo.config import EvaluateConfig
from pspo.environments import EnvironmentSampler
from pspo.evaluate.evaluation import evaluate
from pspo.evaluate.results import as_text, label, problem_count, table
from pspo.model import load_policy, load_tokenizer, shares_prompts
from pspo.model.exactness import check_exactness
from pspo.model.find import room_for_prompts, token_ids
from pspo.rollout import Prompts, TransformersSampler, load_prompts, make_sampling
from pspo.rollout.generate import decode_greedily
from pspo.run.folders import check_output
from pspo.tasks import check_rewards
from pspo.tasks.environment import MakeEnvironment, load_environment

FINGERPRINT = "fingerprint.json"  # written last of an evaluation's first files, so it shows that they are whole
LONGEST_BREAKDOWN = 12  # lines on the terminal


def fingerprint(policy: transformers.PreTrainedModel, prompts: Prompts) -> dict[str, str]:
    """SHA-256 of the model's weights and of the problems, which the switches only name."""
    weights = hashlib.sha256()
    for name, tensor in policy.state_dict().items():
        weights.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        weights.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return {"model weights": weights.hexdigest(), "problems": prompts.fingerprint()}


def prepare(
    config: EvaluateConfig, settings: records.Settings, device: torch.device
) -> tuple[TransformersSampler, MakeEnvironment | None, Prompts]:
    """Load everything, and make the output folder; ValueError if it holds another evaluation."""
    output = Path(config.run.output_dir)
    dist.run_on_main(lambda: check_folder(output, settings))
    tokenizer = load_tokenizer(config.model, config.data)
    token_ids(tokenizer, config.eval.stop_tokens or (), "eval.stop_tokens")
    room = room_for_prompts(config.model, config.eval.max_completion_tokens, "eval.max_completion_tokens")
    make_environment = load_environment(config.eval.environment)
    prompts = load_prompts(config.data, tokenizer, config.eval.split, room=room, environment=make_environment)
    check_rewards(config.reward.functions, prompts.problems)
    policy = load_policy(config.model, device)
    decoder, rows = "pspo" if shares_prompts(policy) else "hf", config.eval.max_tokens  # which is the limit here
    sampling = make_sampling(policy, tokenizer, config.eval, max_rows=rows, decoder=decoder)
    decode = partial(decode_greedily, policy, tokenizer, sampling)
    check_exactness(policy, prompts.ids, decode, config.model.autocast)
    about = fingerprint(policy, prompts)
    dist.run_on_main(lambda: begin(output, settings, about, device))
    return TransformersSampler(policy, tokenizer, sampling, config.model.autocast), make_environment, prompts


def check_folder(output: Path, settings: records.Settings) -> None:
    """Raise ValueError if the folder holds something else, as far as the switches tell."""
    check_output(output)
    if (output / FINGERPRINT).exists():
        changed = records.differences(records.read_config(output / "config.yaml"), settings)
        listed = ", ".join(f"--{name} is {old!r} there and {new!r} here" for name, (old, new) in changed.items()
                           if name not in ("run.output_dir", "run.quiet"))  # fmt: skip
        if listed:
            raise ValueError(f"--run.output_dir {output} holds another evaluation ({listed}): choose another folder")
    elif any((output / name).exists() for name in ("completions.jsonl", "results.json", "metrics.jsonl", ".lock")):
        raise ValueError(f"--run.output_dir {output} holds something else; choose another folder")


def begin(output: Path, settings: records.Settings, about: dict[str, str], device: torch.device) -> None:
    """Make the folder; ValueError if it holds an evaluation of another model or of other problems."""
    if (known := output / FINGERPRINT).exists():
        old = records.read_json(known)
        if changed := " and ".join(name for name in about if old.get(name) != about[name]):
            raise ValueError(f"--run.output_dir {output} holds an evaluation of other {changed}: choose another folder")
        return
    output.mkdir(parents=True, exist_ok=True)
    records.write_text(output / "config.yaml", records.to_yaml(settings))
    records.write_json(output / "environment.json", records.environment(str(device), dist.world_size()))
    records.write_json(known, about)


def render(results: dict[str, Any]) -> str:
    """The contents of ``results.json`` as tables: a line per measure, a column per temperature, and the breakdowns."""
    temperatures = results["temperatures"]
    heads = [f"T = {t}" + f", {of['samples']} samples" * (of["samples"] > 1) for t, of in temperatures.items()]
    hidden = ("samples", "breakdown", "pass@1", "maj@1", "macro_accuracy", "macro_gold_anywhere", "macro_mean_reward")
    names = dict.fromkeys(name for of in temperatures.values() for name in of if name not in hidden)
    rows = [(label(name), *(cell(name, of) for of in temperatures.values())) for name in names]
    title = f"{results['model']} on {problem_count(results['n'])} of {results['data']} {results['split']}"
    parts = [f"{title}\n{table([('mean [95%]', *heads), *rows])}"]

    first = "accuracy" if "accuracy" in names else "mean_reward"
    for part, groups in next(iter(temperatures.values()))["breakdown"].items():
        rows = [(part, "n", *(f"{label(first)} at T = {temperature} [95%]" for temperature in temperatures))]
        for value, group in groups.items():
            here = [of["breakdown"][part][value] for of in temperatures.values()]
            rows.append((value or "-", group["n"], *(cell(first, of) for of in here)))
        if part == "source":
            rows.append(("macro average", "", *(cell(f"macro_{first}", of) for of in temperatures.values())))
        short = len(groups) <= LONGEST_BREAKDOWN
        parts.append(table(rows) if short else f"{part}: {len(groups)} kinds, in results.json")
    return "\n\n".join(parts)


def cell(name: str, of: dict[str, Any]) -> str:
    """A measure as text; "-" if it is not there."""
    value = of.get(name)
    return "-" if value is None else as_text(name, **value) if isinstance(value, dict) else as_text(name, value)


@memory_errors("pspo.evaluate", "Lower --eval.max_tokens and choose another --run.output_dir: the tokens drawn change")
def main(args: Sequence[str] | None = None) -> None:
    config, settings = parse(EvaluateConfig, "pspo.evaluate", args)
    with user_errors("pspo.evaluate", once=True):
        dist.init("ddp" if dist.launched_by_torchrun() else "none", timeout=3600)
    device, output = dist.local_device(), Path(config.run.output_dir)
    kept, finished = output / "completions.jsonl", output / "results.json"
    with user_errors("pspo.evaluate"):
        decoder, make_environment, prompts = prepare(config, settings, device)
        done = dist.run_on_main(lambda: records.read_jsonl(kept))
        summary = dist.run_on_main(lambda: records.read_json(finished) if finished.exists() else {})
    if summary:
        print(f"already finished: {finished}\n\n{render(summary)}")
        return
    if done:
        print(f"resuming {output}: {len(done):,} completions are done")
    dist.run_on_main(lambda: kept.exists() and records.write_text(kept, records.to_jsonl(done)))  # drops half a line

    completions, results = [], {}
    try:
        for temperature in config.eval.temperatures:
            sampler = replace(decoder, sampling=replace(decoder.sampling, temperature=temperature))
            if make_environment:
                sampler = EnvironmentSampler(sampler, make_environment)
            result = evaluate(
                sampler,
                prompts,
                config.reward,
                samples=config.eval.samples if temperature > 0 else 1,
                seed=config.run.seed,
                max_tokens=config.eval.max_tokens,
                bar="" if config.run.quiet else f"T={temperature:g}",
                done=[record for record in done if record["temperature"] == temperature],
                save=lambda lines: records.append_jsonl(kept, *lines),
            )
            if dist.is_main():
                completions += result.completions
                results[f"{temperature:g}"] = result.results()
    except UserCodeFailed as error:
        if dist.is_main():
            advice = f"{len(records.read_jsonl(kept)):,} completions are saved; the same command resumes {output}"
            print(f"\npspo.evaluate: a reward failed\n\n{error}\n\n{advice}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print(f"\nstopped; the same command resumes {output}", file=sys.stderr)
        raise SystemExit(130) from None
    if not dist.is_main():
        return
    records.write_text(kept, records.to_jsonl(completions))  # in order, and once each
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
    records.write_json(finished, summary)
    print(f"{render(summary)}\n\nresults: {finished}")


if __name__ == "__main__":
    dist.run_main(main)
