"""configs/paper against one table of the paper's numbers: its main table's rows, its tables of hyperparameters."""

from dataclasses import replace
from pathlib import Path

import pytest

from pspo.config import AlgorithmConfig, DataConfig, ModelConfig, OptimizerConfig, RolloutConfig, RunConfig, TrainConfig
from pspo.losses import P3O, PSPO, SAPO, TOPR, Clip, NoClip
from pspo.run.cli import parse
from pspo.train import prepare, train

PAPER = Path(__file__).parents[1] / "configs" / "paper"

#         surrogate, iterations, learning rate, loss
BASE = {
    "noclip": (NoClip(), 1, 1e-6, "dapo"),
    "clip": (Clip(epsilon=0.4), 2, 1e-6, "dapo"),
    "pspo": (PSPO(alpha=0.1), 2, 1e-6, "dapo"),
    "p3o": (P3O(tau=4), 2, 1e-6, "dapo"),
    "sapo": (SAPO(tau_pos=1, tau_neg=3), 2, 1e-6, "grpo"),
    "topr": (TOPR(b_pos=1, b_neg=1), 2, 1e-6, "grpo"),
}
MATH = BASE | {
    "noclip": (NoClip(), 1, 5e-6, "dapo"),
    "clip": (Clip(epsilon=0.2), 2, 5e-6, "dapo"),
    "pspo": (PSPO(alpha=0.4), 2, 1e-6, "dapo"),
}
EXPLORATORY = {method: BASE[method] for method in ("noclip", "clip", "pspo")}
FOLDERS = {
    "qwen2.5-0.5b-gsm8k": ("Qwen/Qwen2.5-0.5B", "gsm8k", 150_000_000, BASE),
    "qwen2.5-0.5b-gsm8k+math": ("Qwen/Qwen2.5-0.5B", "gsm8k+math", 150_000_000, BASE),
    "qwen2.5-1.5b-gsm8k+math": ("Qwen/Qwen2.5-1.5B", "gsm8k+math", 150_000_000, BASE),
    "qwen2-math-1.5b-gsm8k+math": ("Qwen/Qwen2-Math-1.5B", "gsm8k+math", 75_000_000, MATH),
    "qwen2.5-7b-gsm8k+math": ("Qwen/Qwen2.5-7B", "gsm8k+math", 75_000_000, EXPLORATORY),
}
ROWS = {f"{folder}/{method}": (*row, method) for folder, row in FOLDERS.items() for method in row[3]}


def expected(model: str, data: str, max_tokens: int, table: dict, method: str) -> TrainConfig:
    surrogate, epochs, lr, aggregation = table[method]
    return TrainConfig(
        model=ModelConfig(name_or_path=model, autocast="bf16", gradient_checkpointing=model.endswith("7B")),
        data=DataConfig(name=data, max_prompt_tokens=512),
        rollout=RolloutConfig(
            prompts=32, group_size=4, max_completion_tokens=128, temperature=0.6, top_p=0.85, top_k=0
        ),  # 128 rows
        algorithm=AlgorithmConfig(surrogate, epochs, minibatches=1, aggregation=aggregation, beta=0.0),
        optimizer=OptimizerConfig(name="adamw", lr=lr, warmup_steps=125, max_grad_norm=1.0, microbatch_tokens=4096),
        run=RunConfig(
            max_steps=1_000_000, max_tokens=max_tokens, validate_every=1000, save_every=1000,
            validation_limit=1000, test_limit=0,
        ),
    )  # fmt: skip


def test_every_row_has_a_file_and_every_file_is_a_row():
    files = {str(file.relative_to(PAPER).with_suffix("")) for file in PAPER.rglob("*.yaml")}
    assert files == set(ROWS)
    assert len(files) == 4 * 6 + 3


@pytest.mark.parametrize("row", ROWS)
def test_a_file_says_what_the_paper_says(row):
    config, _ = parse(TrainConfig, "pspo.train", ["--config", str(PAPER / f"{row}.yaml")])
    assert config == expected(*ROWS[row])
    assert f"--config configs/paper/{row}.yaml" in (PAPER / f"{row}.yaml").read_text()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """GSM8K and MATH in their own formats, a few problems each."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("gsm8k", "math"):
        (folder / name).mkdir()
        for split in ("train", "validation"):
            problem = '{{"question": "What is {0}+1?", "answer": "It is #### {1}"}}\n'
            if name == "math":
                problem = '{{"problem": "What is {0}+1?", "solution": "\\\\boxed{{{1}}}", "type": "Algebra"}}\n'
            lines = [problem.format(n, n + 1) for n in range(8)]
            (folder / name / f"{split}.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize("row", ROWS)
def test_a_file_loads_and_takes_its_steps_with_a_stand_in_model(row, data, tmp_path):
    """The embedded model and a rollout of two prompts in place of the paper's, all else as the file says."""
    file = str(PAPER / f"{row}.yaml")
    args = ["--config", file, "--model.name_or_path=tiny-base", f"--data.path={data}", "--run.max_tokens=1"]
    args += [f"--run.output_dir={tmp_path / 'run'}", "--rollout.prompts=2", "--rollout.max_completion_tokens=4"]
    config, resolved = parse(TrainConfig, "pspo.train", args)
    setup = prepare(config, resolved)
    n = 16 if "+" in config.data.name else 8
    assert {split: len(prompts) for split, prompts in setup.prompts.items()} == {"train": n, "validation": n}
    if row.startswith("qwen2.5-0.5b-gsm8k/"):  # each method once
        summary = train(replace(config, run=replace(config.run, validation_limit=2)), setup)
        assert summary["optimizer_steps"] == config.algorithm.epochs
