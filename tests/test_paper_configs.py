"""configs/paper against the paper's numbers: its setup, its table of shared settings and its two tables of methods."""

import functools
from pathlib import Path

import pandas as pd
import pytest

import pspo.config
from pspo.cli.parse import differences, parse
from pspo.config import AlgorithmConfig, DataConfig, ModelConfig, OptimizerConfig, RolloutConfig, RunConfig, TrainConfig
from pspo.losses import P3O, PSPO, SAPO, TOPR, Clip, NoClip
from pspo_lab.sweep_plan import SweepConfig, make_plan

PAPER = Path(__file__).parents[1] / "configs" / "paper"
METHODS = {  # switches: surrogate, iterations, loss
    "noclip": ("--algorithm.surrogate NoClip --algorithm.epochs 1", NoClip(), 1, "dapo"),
    "clip": ("--algorithm.surrogate Clip --algorithm.surrogate.epsilon 0.4", Clip(epsilon=0.4), 2, "dapo"),
    "pspo": ("--algorithm.surrogate PSPO --algorithm.surrogate.alpha 0.1", PSPO(alpha=0.1), 2, "dapo"),
    "p3o": ("--algorithm.surrogate P3O --algorithm.surrogate.tau 4", P3O(tau=4), 2, "dapo"),
    "sapo": ("--algorithm.surrogate SAPO --algorithm.aggregation grpo", SAPO(tau_pos=1, tau_neg=3), 2, "grpo"),
    "topr": ("--algorithm.surrogate TOPR --algorithm.aggregation grpo", TOPR(1, 1, 0, 1), 2, "grpo"),
}
MATH_METHODS = {  # switches for Qwen2-Math: surrogate, learning rate
    "noclip": ("--optimizer.lr 5e-6", NoClip(), 5e-6),
    "clip": ("--optimizer.lr 5e-6 --algorithm.surrogate.epsilon 0.2", Clip(epsilon=0.2), 5e-6),
    "pspo": ("--algorithm.surrogate.alpha 0.4", PSPO(alpha=0.4), 1e-6),
}
BASES = {  # switches of the base's first lines: model, data, training tokens
    "--data.name gsm8k": ("Qwen/Qwen2.5-0.5B", "gsm8k", 150_000_000),
    "": ("Qwen/Qwen2.5-0.5B", "gsm8k+math", 150_000_000),
    "--model.name_or_path Qwen/Qwen2.5-1.5B": ("Qwen/Qwen2.5-1.5B", "gsm8k+math", 150_000_000),
    "--model.name_or_path Qwen/Qwen2-Math-1.5B --run.max_tokens 75000000": (
        "Qwen/Qwen2-Math-1.5B", "gsm8k+math", 75_000_000),
    "--model.name_or_path Qwen/Qwen2.5-7B --model.gradient_checkpointing true --run.max_tokens 75000000": (
        "Qwen/Qwen2.5-7B", "gsm8k+math", 75_000_000),
}  # fmt: skip


def switches(method: str | None, *words: str) -> list[str]:
    """The base, a method's switches, and others."""
    texts = [METHODS[method][0] if method else "", *words]
    return [f"--config={PAPER / 'base.yaml'}", *(word for text in texts for word in text.split())]


@functools.cache
def resolved(method: str, *words: str) -> dict:
    return parse(TrainConfig, "pspo.train", switches(method, *words))[1]


@pytest.mark.parametrize("base", BASES)
def test_files_say_what_the_paper_says(base):
    model, data, max_tokens = BASES[base]
    settings = {(method, ""): (*METHODS[method or "pspo"][1:], 1e-6) for method in (None, *METHODS)}  # PSPO by default
    for method, (words, surrogate, lr) in MATH_METHODS.items() if "Math" in model else ():
        settings[method, words] = (surrogate, *METHODS[method][2:], lr)
    for (method, words), (surrogate, epochs, aggregation, lr) in settings.items():
        config, _ = parse(TrainConfig, "pspo.train", switches(method, base, words))
        assert config == TrainConfig(
            model=ModelConfig(name_or_path=model, autocast="bf16", gradient_checkpointing=model.endswith("7B")),
            data=DataConfig(name=data, holdout=0.0, max_prompt_tokens=512, system_prompt=pspo.config.SYSTEM_PROMPT),
            rollout=RolloutConfig(
                prompts=32, group_size=4, max_completion_tokens=128, temperature=0.6, top_p=0.85, top_k=0
            ),
            algorithm=AlgorithmConfig(surrogate, epochs=epochs, minibatches=1, aggregation=aggregation, beta=0.0),
            optimizer=OptimizerConfig(name="adamw", lr=lr, warmup_steps=125, max_grad_norm=1.0, microbatch_tokens=4096),
            run=RunConfig(
                max_steps=1_000_000, max_tokens=max_tokens, validate_every=1000, save_every=1000,
                validation_limit=1000, test_limit=0,
            ),
        )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("processes", "experiments"), [(1, 4), (4, 1)])
def test_the_sweep_of_the_main_table_has_its_rows_and_settings(monkeypatch, processes, experiments):
    """All of `results/paper.csv`, and what the files of configs/paper say but for memory, disk and revisions."""
    monkeypatch.chdir(PAPER.parents[1])
    args = ["--config=configs/sweep/main-table.yaml", f"--processes={processes}"]
    args += ["--only=qwen2.5-7b"] * (processes == 4)
    paper = pd.read_csv(PAPER.parents[1] / "results/paper.csv", keep_default_na=False)
    paper = paper[(paper["table"] == {1: "main", 4: "7B"}[processes]) & (paper["method"] != "untrained")]
    found, untrained = set(), 0
    for method in make_plan(parse(SweepConfig, "pspo sweep", args)[0]):
        untrained += method.name == "untrained"
        for job in method.possible if method.name != "untrained" else ():
            config = job.config
            model, data, name = config["model"]["name_or_path"], config["data"]["name"], method.name
            found.add((model.removeprefix("Qwen/"), data, METHODS[name][1].__class__.__name__))
            words = [MATH_METHODS[name][0]] if "Math" in model and name in MATH_METHODS else []
            base = [words for words, (*of, _) in BASES.items() if of == [model, data]]
            assert {*differences(resolved(name, *base, *words), config)} <= {
                "model.revision", "optimizer.microbatch_tokens", "run.keep", "run.seed", "run.output_dir",
                "distributed.strategy"}  # fmt: skip
            assert config["model"]["revision"] is not None or "Math" in model
    assert found == set(paper[["model", "data", "method"]].itertuples(index=False, name=None))
    assert untrained == experiments
