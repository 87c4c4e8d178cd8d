"""What a bad command line is answered with: one line, whole, and exit code 2; the answers stand in messages.yaml."""

import contextlib
import re
import shlex
import time
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import yaml

from pspo.cli.parse import parse
from pspo.config import EvaluateConfig, TrainConfig
from pspo.losses import Clip
from pspo.cli.files import to_yaml
from pspo.tasks import MathReward
from pspo.train import main

ROOT = Path(__file__).parents[1]
CASES = yaml.safe_load((ROOT / "tests/messages.yaml").read_text(encoding="utf-8"))
CONFIGS = {"train": TrainConfig, "evaluate": EvaluateConfig}
FILES = {
    "typo.yaml": "rollout:\n  group_sise: 4\n",
    "section.yaml": "rolout:\n  group_size: 4\n",
    "flat.yaml": "lr: 1e-5\n",
    "value.yaml": "rollout:\n  decoder: foo\n",
    "range.yaml": "optimizer: {lr: -1}\n",
    "class.yaml": "algorithm:\n  surrogate: PSPOO\n",
    "init.yaml": "algorithm:\n  surrogate:\n    class_path: PSPO\n    init_args:\n      beta: 1\n",
    "ints.yaml": "run: {max_steps: 1e2, max_tokens: 1e6}\noptimizer: {lr: 1e-6, eps: 1E-9}\n"
                 "algorithm: {surrogate: clip}\nreward: {functions: mathreward, weights: 2}\n",
    "number.yaml": "run:\n  output_dir: 2024\n",
    "scalar.yaml": "rollout: 4\n",
    "empty.yaml": "rollout:\nrun:\n  seed: 1\n",
    "twice.yaml": "run: {seed: 1, seed: 2}\n",
    "itself.yaml": "run: &a {seed: *a}\n",
    "sections.yaml": "run: {seed: 1}\ndata: {}\nrun: {max_steps: 3}\n",
    "deep.yaml": "run: " + "[" * 9_000,
    "inner.yaml": "surrogate: my_exit.Loss\n",
    "outer.yaml": "algorithm: inner.yaml\n",
    "nothing.yaml": "# run: {seed: 1}\n",
    "text.yaml": "hello\n",
    "bytes.yaml": b"\xff\xfe\x00\x01",
    "syntax.yaml": "a: [1, 2\n  b: }\n",
    "my_module.py": "import no_such_package\n",
    "my_syntax.py": "def f(:\n",
    "my_exit.py": "import sys\nsys.exit('usage: my_exit')\n",
    "my_ok.py": "from pspo.tasks import Reward\nclass Bad(Reward):\n    def __init__(self):\n"
                "        raise ValueError('needs a moon')\n    def __call__(self, completions, problems):\n"
                "        return [0.0] * len(completions)\n"
                "from pspo.losses import Surrogate\nclass Three(Surrogate):\n"
                "    def __call__(self, logprobs, old_logprobs, advantages):\n        return -logprobs\n"
                "def estimate(rewards, group_size, lengths):\n    return rewards / lengths\n"
                "def moon(rewards, group_size, phase):\n    return phase * rewards\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("messages")
    for name, text in FILES.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


@pytest.fixture
def here(folder, monkeypatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["command"])
def test_message(case, here, capsys):
    command, *words = shlex.split(case["command"])
    if not case["says"]:
        parse(CONFIGS[command], f"pspo.{command}", words)
        return
    began = time.monotonic()
    with pytest.raises(SystemExit, match=r"^2$"):
        parse(CONFIGS[command], f"pspo.{command}", words)
    assert time.monotonic() - began < 5
    assert capsys.readouterr() == ("", f"pspo.{command}: error: {case['says']}\n")


def test_no_message_speaks_of_jsonargparse():
    for case in CASES:
        assert not re.search(r"Parser key|Union|<class|typing\.|Expected|class_path", case["says"])


def test_what_is_accepted_means_what_it_looks_like(here):
    config, _ = parse(TrainConfig, "pspo.train", ["--config", "ints.yaml", "--rollout.prompts=1_00"])
    assert (config.run.max_steps, config.run.max_tokens, config.rollout.prompts) == (100, 1_000_000, 100)
    assert isinstance(config.run.max_steps, int)
    assert (config.optimizer.lr, config.optimizer.eps) == (1e-6, 1e-9)
    assert (config.algorithm.surrogate, config.reward.functions) == (Clip(), [MathReward()])
    assert config.reward.weights == [2.0]
    config, _ = parse(EvaluateConfig, "pspo.evaluate", ["--eval.temperatures=0.6"])
    assert config.eval.temperatures == [0.6]


@pytest.mark.parametrize("text", ["1e3", "007", "1_000", "-1e-3", "2024", "true", "1.5e3", "[a]"])
def test_text_that_looks_like_something_else_stays_text_and_its_file_is_read_again(text, here):
    config, resolved = parse(TrainConfig, "pspo.train", [f"--run.output_dir={text}", f"--data.prompt_column={text}"])
    assert config.run.output_dir == config.data.prompt_column == text
    Path("again.yaml").write_text(to_yaml(resolved))
    assert parse(TrainConfig, "pspo.train", ["--config", "again.yaml"]) == (config, resolved)


@pytest.mark.parametrize(
    ("file", "imported"),
    [
        ("own.yaml", "my_exit, my_ok"), ("ints.yaml", None), ("dots.yaml", None),
        ("grpo", None),
    ],
)  # fmt: skip
def test_a_file_s_imports_are_said_before_they_run(file, imported, here, capsys):
    Path("own.yaml").write_text(
        "algorithm:\n  surrogate:\n    class_path: my_exit.Loss\nreward: {functions: [my_ok.Good, MathReward]}\n"
    )
    Path("dots.yaml").write_text("model: {name_or_path: tiny.base}\nreward: {weights: [0.5]}\n")
    ended = pytest.raises(SystemExit) if imported else contextlib.nullcontext()
    with ended:
        parse(TrainConfig, "pspo.train", ["--config", file])
    lines = capsys.readouterr().err.splitlines()
    assert lines[:1] == ([f"--config {file} imports {imported}: code that runs"] if imported else [])


def test_a_later_switch_takes_the_blame_from_the_file(here, capsys):
    with pytest.raises(SystemExit):
        parse(TrainConfig, "pspo.train", ["--config", "range.yaml", "--optimizer.lr", "-2"])
    assert capsys.readouterr().err == "pspo.train: error: --optimizer.lr must be above 0, got -2.0\n"


@pytest.mark.parametrize(
    ("switch", "message"),
    [
        ("--model.name_or_path=nobody/no-such-model", r"is neither an embedded model \(.*\) nor one that loads: .*"),
        ("--model.name_or_path=tiny-bse", r"does not exist; did you mean tiny-base\?"),
        ("--data.name=gsm8k", r"cannot load openai/gsm8k from the hub: .*; check --data.name, .* --data.path"),
    ],
)
def test_without_the_hub_there_is_one_line(switch, message, tmp_path, monkeypatch, capsys):
    for library, name in ((huggingface_hub.constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")):
        monkeypatch.setattr(library, name, True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^2$"):
        main([switch, f"--run.output_dir={tmp_path}/out"])
    named = "" if switch.startswith("--data") else f"{switch.replace('=', ' ')} "
    assert re.fullmatch(f"pspo.train: error: {named}{message}\n", capsys.readouterr().err)


def test_a_preset_is_a_name_for_config():
    names = ["grpo", "GRPO", "ppo", "dr-grpo", "Dr. GRPO", "dapo", "rloo"]
    made = {name: parse(TrainConfig, "pspo.train", ["--config", name])[0].algorithm for name in names}
    assert made.pop("GRPO") == made["grpo"]
    assert made.pop("Dr. GRPO") == made["dr-grpo"]
    assert made["grpo"].surrogate == made["dr-grpo"].surrogate == made["ppo"].surrogate == Clip(0.2)
    assert made["dapo"].surrogate == Clip(0.2, 0.28)
    assert {name: (of.advantages, of.aggregation) for name, of in made.items()} == {
        "grpo": ("group", "grpo"), "dr-grpo": ("none", "dr_grpo"), "dapo": ("group", "dapo"), "ppo": ("none", "dapo"),
        "rloo": ("rloo", "dr_grpo"),
    }  # fmt: skip
