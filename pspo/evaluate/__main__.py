"""Evaluate a model: ``python -m pspo.evaluate --model.name_or_path M --data.name gsm8k --data.limit 500``.

Writes ``results.json``, by temperature what `Evaluation.results` of `pspo.evaluate.evaluation` describes, and
``completions.jsonl``.

The same command resumes a stopped evaluation: completions are saved chunk by chunk, and a chunk's random numbers depend
on the seed and its position alone, so the results are those of an evaluation that was never stopped.
"""

import contextlib
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from pspo import distributed as dist
from pspo.cli import files
from pspo.cli.parse import parse
from pspo.cli.terminal import quiet_without_reader
from pspo.config import EvaluateConfig, RolloutConfig
from pspo.environments import EnvironmentSampler, check_calls
from pspo.errors import Stopped, UserCodeFailed
from pspo.evaluate.evaluation import evaluate
from pspo.evaluate.statistics import as_text, measure_name, table
from pspo.model import load_policy, load_tokenizer
from pspo.model.device import choose_threads
from pspo.model.find import check_token_ids, load_model_config, room_for_prompts, token_ids
from pspo.rollout import How, PolicySampler, Prompts, Sampler, load_prompts, make_sampling
from pspo.rollout.prompts import completion_columns
from pspo.rollout.sampler import check_decoding
from pspo.run.endings import exit_codes, user_errors
from pspo.tasks import check_rewards
from pspo.tasks.environment import load_class

FINGERPRINT = "fingerprint.json"  # written before config.yaml: one without it is not an evaluation's
LOCK = ".evaluation"  # not a run's .lock: a folder with that and a config.yaml is a run


def load_evaluation(
    config: EvaluateConfig, settings: files.Settings, device: torch.device, resources: contextlib.ExitStack
) -> tuple[Sampler, How, Prompts]:
    """Load everything, and make and lock the output folder; ValueError if it holds something else."""
    output = Path(config.run.output_dir)
    dist.run_on_main(lambda: check_folder(output, settings))
    tokenizer = load_tokenizer(config.model, config.data)
    sampler = PolicySampler(tokenizer, config.model.autocast)
    resources.enter_context(sampler.signals)
    token_ids(tokenizer, config.eval.stop_tokens or (), "eval.stop_tokens")
    make_environment = load_class(config.eval.environment, "eval.environment")
    most = completion_columns(config.eval.max_completion_tokens, make_environment is not None)
    room = room_for_prompts(config.model, most, "eval.max_completion_tokens")
    prompts = load_prompts(config.data, tokenizer, config.eval.split, room=room, make_environment=make_environment)
    if make_environment is not None:
        check_calls(tokenizer, make_environment)
    check_token_ids(load_model_config(config.model), tokenizer, prompts.ids)
    check_rewards(config.reward.functions, prompts.problems)
    policy = load_policy(config.model, device)
    choose_threads(policy)
    rollout = RolloutConfig(
        max_completion_tokens=config.eval.max_completion_tokens,
        stop_tokens=config.eval.stop_tokens,
        stop_strings=config.eval.stop_strings,
        top_p=config.eval.top_p,
        max_rows=config.eval.max_tokens,  # which is the limit here
    )
    sampling = make_sampling(policy, tokenizer, rollout)
    check_decoding(policy, tokenizer, sampling, prompts, config.model.autocast)
    if make_environment is not None:
        sampler = EnvironmentSampler(sampler, make_environment, tokenizer, policy.config)
    hashes = {"model weights": hash_weights(policy), "problems": prompts.fingerprint()}
    dist.run_on_main(lambda: begin(output, settings, hashes, device, resources))
    return sampler, How(sampling, policy), prompts


def check_folder(output: Path, settings: files.Settings) -> None:
    """Make the folder; ValueError if it holds an evaluation with other switches, or something else."""
    output.mkdir(parents=True, exist_ok=True)
    names = ("config.yaml", "completions.jsonl", "results.json", "metrics.jsonl", ".lock")
    if not (output / FINGERPRINT).exists() and any((output / name).exists() for name in names):
        raise ValueError(f"--run.output_dir {output} holds something else; choose another folder")
    if (output / "config.yaml").exists():
        files.require_same(output, settings, {"run.output_dir", "run.quiet"}, "choose another folder")


def hash_weights(policy: transformers.PreTrainedModel) -> str:
    """SHA-256 of the model's weights, which --model.name_or_path only names."""
    digest = hashlib.sha256()
    for name, tensor in policy.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def begin(
    output: Path,
    settings: files.Settings,
    hashes: dict[str, str],
    device: torch.device,
    resources: contextlib.ExitStack,
) -> None:
    """Lock the folder, and write an evaluation's first files; ValueError if it holds one that is not the same."""
    resources.enter_context(files.lock_folder(output, LOCK))
    check_folder(output, settings)  # another one may have begun there while this one loaded its model
    if not (output / FINGERPRINT).exists():
        files.write_json(output / FINGERPRINT, hashes)
    elif files.read_json(output / FINGERPRINT) != hashes:
        what = f"{output} holds an evaluation of another model or of other problems"
        raise ValueError(f"--run.output_dir {what}: choose another folder")
    if not (output / "config.yaml").exists():
        files.write_json(output / "environment.json", files.environment(str(device), dist.world_size()))
        files.write_text(output / "config.yaml", files.to_yaml(settings))


def trained_steps(model: Path) -> int | None:
    """The optimizer steps behind a model in a run's folder; None of others."""
    for file, name in ((model / "validation.json", "step"), (model.parent / "summary.json", "optimizer_steps")):
        if file.is_file():
            return files.read_json(file).get(name)
    return None


def render(results: dict[str, Any]) -> str:
    """The contents of ``results.json`` as a table: a line per measure and breakdown, a column per temperature."""
    columns = {}
    for temperature, numbers in results["temperatures"].items():
        samples = f", {numbers['samples']} samples" if numbers["samples"] > 1 else ""
        cells = {}
        columns[f"T = {temperature}{samples}"] = cells
        for name, number in numbers.items():
            if name not in ("samples", "breakdown", "pass@1", "maj@1"):
                cells[measure_name(name)] = as_text(name, number)
        measure = "accuracy" if "accuracy" in numbers else "mean_reward"
        for attribute, groups in numbers["breakdown"].items():
            for kind, group in groups.items():
                if measure in group:  # otherwise no reward is known of it
                    name = f"{measure_name(measure)}, {attribute} {kind or '-'} ({group['n']:,})"
                    cells[name] = as_text(measure, group[measure])
    title = f"{results['model']} on {results['n']:,} problems of {results['data']} {results['split']}"
    return f"{title}\n{table('mean [95%]', columns)}"


@exit_codes("pspo.evaluate", "Lower --eval.max_tokens and choose another --run.output_dir: the tokens drawn change")
def main(args: Sequence[str] | None = None) -> None:
    config, settings = parse(EvaluateConfig, "pspo.evaluate", args)
    with user_errors("pspo.evaluate", once=True):
        dist.init("ddp" if dist.launched_by_torchrun() else "none", timeout=3600)
    with contextlib.ExitStack() as resources:
        run(config, settings, resources)


def run(config: EvaluateConfig, settings: files.Settings, resources: contextlib.ExitStack) -> None:
    """Evaluate, or resume, and print the results; ``resources`` holds the folder's lock."""
    output = Path(config.run.output_dir)
    completions_file = output / "completions.jsonl"
    results_file = output / "results.json"
    with user_errors("pspo.evaluate"):
        sampler, base_how, prompts = load_evaluation(config, settings, dist.local_device(), resources)
        done = dist.run_on_main(lambda: files.read_jsonl(completions_file))
        done_by_temperature = {temperature: {} for temperature in config.eval.temperatures}
        with files.named_damage(completions_file):
            for record in done:
                done_by_temperature[record["temperature"]][record["problem"], record["sample"]] = record
        summary = dist.run_on_main(lambda: files.read_json(results_file) if results_file.exists() else {})
        if summary:
            with files.named_damage(results_file):
                text = render(summary)
            print(f"already finished: {results_file}\n\n{text}")
            return
    if done:
        print(f"resuming {output}: {sum(map(len, done_by_temperature.values())):,} completions are done")
    dist.run_on_main(lambda: files.write_text(completions_file, files.to_jsonl(done)))  # drops half a line

    evaluations = {}
    try:
        for temperature in config.eval.temperatures:
            how = replace(base_how, sampling=replace(base_how.sampling, temperature=temperature))
            evaluations[f"{temperature:g}"] = evaluate(
                sampler,
                how,
                prompts,
                config.reward,
                samples=config.eval.samples if temperature > 0 else 1,
                seed=config.run.seed,
                max_tokens=config.eval.max_tokens,
                bar="" if config.run.quiet else f"T={temperature:g}",
                done=done_by_temperature[temperature],
                save=lambda records: files.append_jsonl(completions_file, *records),
            )
    except UserCodeFailed as error:
        raise UserCodeFailed(f"{error}\n\nthe same command resumes {output}") from error.__cause__
    except (Stopped, KeyboardInterrupt):
        print(f"\nstopped; the same command resumes {output}", file=sys.stderr)
        raise
    if not dist.is_main():
        return
    completions = [record for evaluation in evaluations.values() for record in evaluation.completions]
    files.write_text(completions_file, files.to_jsonl(completions))  # in order, and once each
    summary = {
        "model": config.model.name_or_path,
        "step": trained_steps(Path(config.model.name_or_path)),
        "data": config.data.name,
        "split": config.eval.split,
        "n": len(prompts),
        "samples": config.eval.samples,
        "top_p": config.eval.top_p,
        "max_completion_tokens": config.eval.max_completion_tokens,
        "seed": config.run.seed,
        "temperatures": {temperature: evaluation.results() for temperature, evaluation in evaluations.items()},
    }
    files.write_json(results_file, summary)
    print(f"{render(summary)}\n\nresults: {results_file}")


if __name__ == "__main__":
    with quiet_without_reader():
        dist.run_main(main)
