"""Configuration: defaults, switches and files, plug-ins by import path, round trips, help, and refused values."""

import importlib.util
import re
import subprocess
import sys
import typing
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import yaml

import pspo
from pspo.cli.parse import parse
from pspo.config import SYSTEM_PROMPT, TINY_BYTES, EvaluateConfig, LoraConfig, ModelConfig, TrainConfig, default_lr
from pspo.losses import P3O, PSPO, TOPR, Clip, NoClip, Surrogate
from pspo.cli.files import to_yaml
from pspo.tasks import FormatReward, MathReward

TINY = Path(__file__).parents[1] / "configs" / "tiny.yaml"
METHODS = [PSPO(alpha=0.4), Clip(0.1, epsilon_high=0.28, delta=4.0), NoClip(), P3O(kl_coef=1e-6), TOPR(level="token")]


def train_config(*args: str) -> TrainConfig:
    return parse(TrainConfig, "pspo.train", args)[0]


@pytest.fixture
def yaml_file(tmp_path):
    """Writes own.yaml and returns the arguments that read it."""

    def write(text: str) -> tuple[str, str]:
        (tmp_path / "own.yaml").write_text(text, encoding="utf-8")
        return "--config", str(tmp_path / "own.yaml")

    return write


def switches(config_class: type) -> dict[str, list[str]]:
    """Every field of a command, by section."""
    hints = typing.get_type_hints(config_class)
    return {part.name: [leaf.name for leaf in fields(hints[part.name])] for part in fields(config_class)}


def test_no_arguments_give_the_dataclass_defaults():
    assert train_config() == TrainConfig()
    assert parse(EvaluateConfig, "pspo.evaluate", [])[0] == EvaluateConfig()


def test_tiny_yaml_is_the_default_configuration_and_spells_out_every_field(capsys):
    content = yaml.safe_load(TINY.read_text(encoding="utf-8"))
    assert train_config("--config", str(TINY)) == TrainConfig()
    assert {part: list(leaves) for part, leaves in content.items()} == switches(TrainConfig)
    with pytest.raises(SystemExit) as exit_:
        train_config("--print_config")
    assert not exit_.value.code
    assert yaml.safe_load(capsys.readouterr().out) == content


def test_switches_override_and_null_unsets():
    config = train_config(
        "--rollout.prompts", "4", "--optimizer.lr=1", "--data.system_prompt=", "--run.max_tokens", "150_000_000",
        "--model.gradient_checkpointing", "true", "--model.name_or_path", "123", "--run.output_dir=2024",
        "--data.limit=7", "--data.limit=null",
    )  # fmt: skip
    default = TrainConfig()
    assert config == replace(
        default,
        model=replace(default.model, gradient_checkpointing=True, name_or_path="123"),
        data=replace(default.data, system_prompt=""),
        rollout=replace(default.rollout, prompts=4),
        optimizer=replace(default.optimizer, lr=1.0),
        run=replace(default.run, max_tokens=150_000_000, output_dir="2024"),
    )
    assert isinstance(config.optimizer.lr, float)


def test_a_bare_switch_means_true():
    assert train_config("--model.compile").model.compile
    config = train_config("--model.compile", "--data.fractions", "false", "--run.seed", "3")
    assert (config.model.compile, config.data.fractions, config.run.seed) == (True, False, 3)


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-06", "0.000001"])
def test_floats_in_yaml_and_switches(yaml_file, text):
    args = yaml_file(f"optimizer:\n  lr: {text}\nalgorithm:\n  surrogate: Clip\n")
    config = train_config(*args, "--algorithm.surrogate.epsilon", text, "--optimizer.eps", text)
    assert (config.optimizer.lr, config.optimizer.eps, config.algorithm.surrogate) == (1e-6, 1e-6, Clip(epsilon=1e-6))


def test_the_later_of_file_and_switch_wins(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("rollout: {prompts: 5, group_size: 3}\n")
    second.write_text("rollout: {prompts: 6}\n")
    for args, expected in [
        (["--config", first, "--rollout.prompts=7"], (7, 3)),
        (["--rollout.prompts=7", "--config", first], (5, 3)),
        (["--config", first, "--config", second], (6, 3)),
    ]:
        rollout = train_config(*map(str, args)).rollout
        assert (rollout.prompts, rollout.group_size) == expected


@pytest.mark.parametrize("surrogate", METHODS, ids=lambda surrogate: type(surrogate).__name__)
def test_every_method_over_a_file_of_another_and_back_from_its_resolved_text(surrogate, yaml_file, capsys, recwarn):
    name = f"--algorithm.surrogate={type(surrogate).__name__}"
    args = [f"--algorithm.surrogate.{part.name}={getattr(surrogate, part.name)}" for part in fields(surrogate)]
    assert train_config("--config", str(TINY), name).algorithm.surrogate == type(surrogate)()
    config, resolved = parse(TrainConfig, "pspo.train", ["--config", str(TINY), name, *args, "--run.output_dir=0123"])
    assert config.algorithm.surrogate == surrogate
    assert parse(TrainConfig, "pspo.train", yaml_file(to_yaml(resolved))) == (config, resolved)
    assert capsys.readouterr() == ("", "")
    assert not [warning for warning in recwarn if issubclass(warning.category, UserWarning)]


def test_answers_of_another_kind_with_another_reward(yaml_file):
    args = ["--data.name=me/my.set", "--data.config=main", "--data.splits={train: train_sft, test: test_sft}",
            "--data.answer_kind=text", "--reward.functions=[FormatReward]"]  # fmt: skip
    for config_class in (TrainConfig, EvaluateConfig):
        config, resolved = parse(config_class, "pspo", args)
        assert config.data.splits == {"train": "train_sft", "test": "test_sft"}
        assert (config.data.config, config.data.answer_kind, config.data.system_text) == ("main", "text", "")
        assert parse(config_class, "pspo", yaml_file(to_yaml(resolved)))[0] == config
    assert TrainConfig().data.system_text == SYSTEM_PROMPT


def test_resolved_text_parses_back(yaml_file):
    rewards = "[{class_path: MathReward, init_args: {tolerance: 1e-3, marker: first}}, FormatReward]"
    args = [f"--reward.functions={rewards}", "--reward.weights=[1, 0.5]", "--eval.temperatures=[0, 0.6, 1]",
            "--data.system_prompt=Say: 'yes'\n# \"no\" \u00e9 #### 1", "--run.output_dir=a: b # c"]  # fmt: skip
    config, resolved = parse(EvaluateConfig, "pspo.evaluate", args)
    assert parse(EvaluateConfig, "pspo.evaluate", yaml_file(to_yaml(resolved)))[0] == config
    assert config.data.system_prompt == "Say: 'yes'\n# \"no\" \u00e9 #### 1"
    assert config.reward.functions == [MathReward(tolerance=1e-3, marker="first"), FormatReward()]
    assert config.eval.temperatures == [0.0, 0.6, 1.0]


@pytest.mark.parametrize("name", ["smollm2-gsm8k", "smollm2-word-problems/1-solvable", "smollm2-word-problems/2-all"])
def test_configurations_of_the_repository_are_read(name):
    assert "smollm2" in train_config(f"--config={TINY.parent / name}.yaml").model.name_or_path.lower()


@dataclass(frozen=True)
class MyLoss(Surrogate):
    """A loss of a user's own."""

    strength: float = 2.0

    def __call__(self, logprobs, old_logprobs, advantages, mask):
        return -self.strength * logprobs * advantages * mask


def test_own_surrogate_by_import_path(yaml_file):
    args = ["--algorithm.surrogate=test_config.MyLoss", "--algorithm.surrogate.strength", "3"]
    config, resolved = parse(TrainConfig, "pspo.train", args)
    surrogate = config.algorithm.surrogate
    assert (type(surrogate).__module__, type(surrogate).__name__, surrogate.strength) == ("test_config", "MyLoss", 3.0)
    assert train_config(*yaml_file(to_yaml(resolved))).algorithm == config.algorithm
    text = "{class_path: test_config.MyLoss, init_args: {strength: 4}}"
    args = yaml_file(f"algorithm:\n  surrogate: {text}\n")
    assert train_config(*args).algorithm.surrogate == replace(surrogate, strength=4.0)


def test_the_learning_rate_of_the_embedded_models_or_the_paper_s(tmp_path, model_folder):
    assert default_lr(ModelConfig("tiny-math")) == default_lr(ModelConfig(str(model_folder()))) == 3e-5
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(int(TINY_BYTES))
    for name in ("Qwen/Qwen2.5-0.5B", str(tmp_path)):
        config, resolved = parse(TrainConfig, "pspo.train", [f"--model.name_or_path={name}"])
        assert config.optimizer.lr == resolved["optimizer"]["lr"] == 1e-6
        assert train_config(f"--model.name_or_path={name}", "--optimizer.lr=3e-5").optimizer.lr == 3e-5


@pytest.mark.parametrize("config_class", [TrainConfig, EvaluateConfig])
def test_help_has_one_line_for_every_switch_and_a_short_usage(config_class, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    with pytest.raises(SystemExit) as exit_:
        parse(config_class, "pspo.train", ["--help"])
    assert not exit_.value.code
    text = capsys.readouterr().out
    assert len(text.partition("\n\n")[0]) < 100
    sections = switches(config_class)
    sections["model"].remove("lora")  # a section of its own
    sections["model.lora"] = [leaf.name for leaf in fields(LoraConfig)]
    for section, leaves in sections.items():
        for leaf in leaves:
            described = re.search(rf"^  --{section}\.{leaf} .*?\s{{2,}}(\S.*)$", text, re.MULTILINE)
            assert described, leaf
            assert 5 < len(described[1].partition(" (default")[0]) <= 110, leaf


def test_the_package_lists_its_commands_and_the_version():
    run = [sys.executable, "-m", "pspo"]
    text = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"python -m (pspo\.\w+) +\w", text)
    names = ("train", "evaluate", "sweep", "report", "view", "export", "serve")
    assert commands == [f"pspo.{name}" for name in names]
    assert all(importlib.util.find_spec(name) for name in commands)
    assert pspo.__version__ in text
    assert subprocess.run([*run, "train"], capture_output=True, check=False).returncode == 2


BAD_VALUES = """
data.limit=0 data.limit=-1 data.max_prompt_tokens=0 data.holdout=-0.1 data.holdout=1 data.holdout=.nan
reward.functions=[] reward.weights=[1,1] reward.weights=[] reward.weights=[.nan] reward.timeout=-1 reward.timeout=.inf
rollout.prompts=0 rollout.group_size=1 rollout.max_completion_tokens=0 rollout.min_completion_tokens=-1
rollout.min_completion_tokens=129 rollout.temperature=0 rollout.temperature=.nan rollout.temperature=.inf
rollout.top_p=0 rollout.top_p=1.01 rollout.top_p=.nan rollout.top_k=-1 rollout.min_p=1 rollout.repetition_penalty=0
rollout.max_rows=0
algorithm.epochs=0 algorithm.minibatches=0 algorithm.minibatches=33 algorithm.beta=-0.1 algorithm.beta=.nan
optimizer.lr=0 optimizer.lr=-1e-6 optimizer.lr=.nan optimizer.lr=.inf optimizer.beta1=1 optimizer.beta2=-0.1
optimizer.eps=-1e-8 optimizer.eps=.nan optimizer.weight_decay=-0.1 optimizer.weight_decay=.inf optimizer.warmup_steps=-1
optimizer.max_grad_norm=-1 optimizer.max_grad_norm=.nan optimizer.microbatch_tokens=0 optimizer.max_skipped=0
run.seed=-1 run.seed=4294967296 run.max_steps=0 run.max_tokens=0 run.validate_every=-1 run.validation_limit=0
run.test_limit=-1 run.save_every=-1 run.keep=0 run.samples=-1 distributed.timeout=0 distributed.timeout=.nan
distributed.gather=step distributed.rollout=synced distributed.shard=2 distributed.shard=1
eval.temperatures=[] eval.temperatures=[-0.1] eval.temperatures=[0.6,.nan] eval.samples=0 eval.top_p=0 eval.top_p=.nan
eval.max_completion_tokens=0 eval.max_tokens=0
"""


@pytest.mark.parametrize("case", BAD_VALUES.split())
def test_a_bad_value_is_refused_by_name(case, capsys):
    switch = case.partition("=")[0]
    config_class = EvaluateConfig if switch.startswith("eval.") else TrainConfig
    with pytest.raises(SystemExit, match=r"^2$"):
        parse(config_class, "pspo.train", [f"--{case}"])
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"pspo.train: error: .*{re.escape(switch)}.*\n", err)
