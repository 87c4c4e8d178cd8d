"""Evaluate a model: ``python -m pspo.evaluate --model.name_or_path M --data.name gsm8k --data.limit 500``.

Writes a new folder once all is drawn: ``results.json``, with `summarise` and `breakdown` of `pspo.evaluate.statistics`
for each temperature, ``completions.jsonl``, ``config.yaml`` and ``environment.json``.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pspo import distributed as dist
from pspo import files
from pspo.cli.parse import Settings, parse
from pspo.cli.values import to_yaml
from pspo.config import EvaluateConfig, RolloutConfig
from pspo.endings import EXIT_INTERRUPTED, exit_codes, user_errors
from pspo.evaluate.evaluation import evaluate
from pspo.evaluate.statistics import Record, as_text, breakdown, measure_name, read_numbers, summarise, table
from pspo.inputs import load_inputs
from pspo.model import load_policy
from pspo.model.device import choose_threads
from pspo.rollout import How, PolicySampler, Prompts, Sampler, make_sampling
from pspo.rollout.sampler import check_decoding
from pspo.signals import StopSignals


def load_evaluation(config: EvaluateConfig, signals: StopSignals) -> tuple[Sampler, How, Prompts]:
    """Load problems and model; raises ValueError if they do not fit the configuration."""
    inputs = load_inputs(config, config.eval, {config.eval.split: None})
    prompts = inputs.prompts[config.eval.split]
    policy = load_policy(config.model, dist.local_device())
    choose_threads(policy)
    rollout = RolloutConfig(
        max_completion_tokens=config.eval.max_completion_tokens,
        stop_tokens=config.eval.stop_tokens,
        stop_strings=config.eval.stop_strings,
        top_p=config.eval.top_p,
        max_rows=sys.maxsize,  # --eval.max_tokens is the limit
    )
    sampling = make_sampling(policy, inputs.tokenizer, rollout)
    check_decoding(policy, inputs.tokenizer, sampling, prompts, config.model.autocast)
    sampler = PolicySampler(inputs.tokenizer, config.model.autocast, signals)
    return inputs.in_episodes(sampler, policy), How(sampling, policy), prompts


def check_folder(output: Path) -> None:
    """Make the parent of a new folder; ValueError if the folder exists, OSError if it could not be made."""
    if output.exists():
        raise ValueError(f"--run.output_dir {output} is there already: choose a new folder")
    output.mkdir(parents=True)
    output.rmdir()  # it is made again once all is drawn


def model_step(model: Path) -> int | None:
    """Optimizer steps behind the best or the final model of a run; None for another model."""
    is_final = model.name == "final"  # another folder of a run may hold the model of any step
    file = model.parent / "summary.json" if is_final else model / "validation.json"
    return files.read_json(file).get("optimizer_steps" if is_final else "step") if file.is_file() else None


def render(results: dict[str, Any]) -> str:
    """``results.json`` as a table: a line per measure, a column per temperature."""
    columns = {}
    for temperature, numbers in results["temperatures"].items():
        samples = f", {numbers['samples']} samples" if numbers["samples"] > 1 else ""
        cells = {}
        for name, number in read_numbers(numbers).items():
            if name not in ("n", "samples", "pass@1"):  # pass@1 is the accuracy
                cells[measure_name(name)] = as_text(name, number)
        columns[f"T = {temperature}{samples}"] = cells
    title = f"{results['model']} on {results['n']:,} problems of {results['data']} {results['split']}"
    return f"{title}\n{table('mean [95%]', columns)}"


def write_results(
    config: EvaluateConfig, settings: Settings, step: int | None, prompts: Prompts, results: dict[str, list[Record]]
) -> None:
    """Write the folder and print the numbers of ``results``, the completions' records by temperature."""
    output = Path(config.run.output_dir)
    while output.exists():  # written by an evaluation that ran beside this one
        output = output.with_name(f"{output.name}-2")
    temperatures = {}
    for temperature, completions in results.items():
        temperatures[temperature] = summarise(completions) | {"breakdown": breakdown(completions, prompts.problems)}
    record = {
        "model": config.model.name_or_path,
        "step": step,
        "data": config.data.name,
        "split": config.eval.split,
        "n": len(prompts),
        "samples": config.eval.samples,
        "top_p": config.eval.top_p,
        "max_completion_tokens": config.eval.max_completion_tokens,
        "seed": config.run.seed,
        "temperatures": temperatures,
    }
    every = [record for completions in results.values() for record in completions]
    with files.whole_folder(output) as folder:
        files.write_text(folder / "config.yaml", to_yaml(settings))
        files.write_json(folder / "environment.json", files.environment(str(dist.local_device()), dist.world_size()))
        files.write_text(folder / "completions.jsonl", files.to_jsonl(every))
        files.write_json(folder / "results.json", record)
    print(f"{render(record)}\n\nresults: {output / 'results.json'}")


@exit_codes("pspo.evaluate", stopped=EXIT_INTERRUPTED)
def main(args: Sequence[str] | None = None) -> None:
    """Evaluate by a command's switches, and print the results."""
    config, settings = parse(EvaluateConfig, "pspo.evaluate", args)
    output = Path(config.run.output_dir)
    signals = StopSignals()
    with user_errors("pspo.evaluate"):
        dist.init("ddp" if dist.launched_by_torchrun() else "none", timeout=3600)
        dist.run_on_main(lambda: check_folder(output))
        step = dist.run_on_main(lambda: model_step(Path(config.model.name_or_path)))
        sampler, base_how, prompts = load_evaluation(config, signals)
    results = {}
    with signals:
        for temperature in config.eval.temperatures:
            results[f"{temperature:g}"] = evaluate(
                sampler,
                replace(base_how, sampling=replace(base_how.sampling, temperature=temperature)),
                prompts,
                config.reward,
                samples=config.eval.samples if temperature > 0 else 1,
                seed=config.run.seed,
                max_tokens=config.eval.max_tokens,
                bar="" if config.run.quiet else f"T={temperature:g}",
            )
    if dist.is_main():
        write_results(config, settings, step, prompts, results)


if __name__ == "__main__":
    dist.run_main(main)
