"""The configuration: defaults, overrides, plug-ins by import path, round trips, and what is refused with which line."""

import dataclasses
import re
import types
import typing
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import yaml

from pspo import config as config_module
from pspo.config import EvaluateConfig, TrainConfig
from pspo.losses import P3O, PSPO, SAPO, TOPR, Clip, NoClip
from pspo.run.cli import parse
from pspo.tasks import FormatReward, MathReward

TINY = Path(__file__).parents[1] / "configs" / "tiny.yaml"

MAIN_SWITCHES = [  # of issue 2
    "run.output_dir", "run.seed", "run.max_steps", "run.max_tokens", "run.save_every", "model.name_or_path",
    "data.name", "data.path", "rollout.prompts", "rollout.group_size", "rollout.max_completion_tokens",
    "rollout.min_completion_tokens", "rollout.temperature", "rollout.top_p", "model.autocast", "algorithm.surrogate",
    "algorithm.epochs", "algorithm.minibatches", "algorithm.aggregation", "algorithm.advantage_scale",
    "algorithm.beta", "optimizer.lr", "optimizer.max_grad_norm", "optimizer.warmup_steps",
]  # fmt: skip

SURROGATES = [
    PSPO(alpha=0.4),
    Clip(epsilon=0.1, epsilon_high=0.28, delta=4.0),
    NoClip(),
    P3O(tau=2.0, kl_coef=1e-6),
    SAPO(tau_pos=0.5, tau_neg=1.5),
    TOPR(a_pos=0.5, b_pos=2.0, a_neg=0.25, b_neg=1.5, level="token"),
]

CONFIG_CLASSES = [
    value
    for value in vars(config_module).values()
    if is_dataclass(value) and value.__module__ == config_module.__name__
]
LEAF_CLASSES = [cls for cls in CONFIG_CLASSES if cls not in (TrainConfig, EvaluateConfig)]


def train_config(*args: str) -> TrainConfig:
    return parse(TrainConfig, "pspo.train", args)[0]


def refusal(capsys: pytest.CaptureFixture, *args: str, config_class: type = TrainConfig) -> str:
    """The one line on stderr with which these arguments are refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        parse(config_class, "pspo.train", args)
    captured = capsys.readouterr()
    assert exit_.value.code == 2
    assert captured.out == ""
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("pspo.train: error: ")
    return captured.err.removeprefix("pspo.train: error: ").strip()


def switches(config_class: type) -> dict[str, tuple[type, dataclasses.Field]]:
    """Every dotted switch of a command, with the section class and the field it fills."""
    hints = typing.get_type_hints(config_class)
    return {f"{part.name}.{leaf.name}": (hints[part.name], leaf) for part in fields(config_class)
            for leaf in fields(hints[part.name])}  # fmt: skip


# --- defaults ---------------------------------------------------------------------------------------------------------


def test_no_arguments_give_the_dataclass_defaults():
    assert train_config() == TrainConfig()
    assert parse(EvaluateConfig, "pspo.evaluate", [])[0] == EvaluateConfig()


def test_tiny_yaml_is_the_default_configuration():
    assert train_config("--config", str(TINY)) == TrainConfig()


def test_tiny_yaml_spells_out_every_field():
    content = yaml.safe_load(TINY.read_text(encoding="utf-8"))
    assert [f"{part}.{leaf}" for part, leaves in content.items() for leaf in leaves] == list(switches(TrainConfig))


def test_print_config_prints_what_tiny_yaml_says(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(TrainConfig, "pspo.train", ["--print_config"])
    captured = capsys.readouterr()
    assert not exit_.value.code
    assert captured.err == ""
    assert yaml.safe_load(captured.out) == yaml.safe_load(TINY.read_text(encoding="utf-8"))


@pytest.mark.parametrize("config_class", CONFIG_CLASSES)
def test_configuration_is_frozen(config_class):
    assert config_class.__dataclass_params__.frozen


# --- what is accepted -------------------------------------------------------------------------------------------------


def test_dotted_switches_override():
    config = train_config(
        "--rollout.prompts", "4", "--optimizer.lr=2e-6", "--data.system_prompt=", "--run.max_tokens", "150_000_000",
        "--model.gradient_checkpointing", "true", "--model.name_or_path", "123", "--run.output_dir=2024",
    )  # fmt: skip
    default = TrainConfig()
    assert config == replace(
        default,
        model=replace(default.model, gradient_checkpointing=True, name_or_path="123"),
        data=replace(default.data, system_prompt=""),
        rollout=replace(default.rollout, prompts=4),
        optimizer=replace(default.optimizer, lr=2e-6),
        run=replace(default.run, max_tokens=150_000_000, output_dir="2024"),
    )


def test_null_unsets_an_optional_field():
    args = ("--run.max_tokens=7", "--data.limit=7", "--data.path=x")
    assert train_config(*args, "--run.max_tokens=null", "--data.limit=null", "--data.path=null") == TrainConfig()


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-06", "0.000001"])
def test_floats_in_yaml_and_switches(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(f"optimizer:\n  lr: {text}\n  eps: {text}\nalgorithm:\n  surrogate: Clip\n")
    config = train_config("--config", str(file), "--algorithm.surrogate.epsilon", text)
    assert (config.optimizer.lr, config.optimizer.eps, config.algorithm.surrogate) == (1e-6, 1e-6, Clip(epsilon=1e-6))
    assert train_config("--optimizer.lr", text).optimizer.lr == 1e-6


def test_integers_are_accepted_for_floats():
    lr = train_config("--optimizer.lr=1").optimizer.lr
    assert lr == 1.0
    assert isinstance(lr, float)


def test_the_later_of_file_and_switch_wins(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("rollout: {prompts: 5, group_size: 3}\n")
    second.write_text("rollout: {prompts: 6}\n")
    for args, expected in [
        (["--config", first, "--rollout.prompts=7"], (7, 3)),
        (["--rollout.prompts=7", "--config", first], (5, 3)),
        (["--config", first, "--config", second], (6, 3)),
        (["--config", second, "--config", first], (5, 3)),
    ]:
        rollout = train_config(*map(str, args)).rollout
        assert (rollout.prompts, rollout.group_size) == expected


def test_switching_the_method():
    config = train_config("--algorithm.surrogate", "PSPO", "--algorithm.surrogate.alpha", "0.4")
    assert config.algorithm.surrogate == PSPO(alpha=0.4)
    assert train_config("--algorithm.surrogate.alpha", "0.4").algorithm.surrogate == PSPO(alpha=0.4)
    assert train_config("--algorithm.surrogate=pspo.losses.PSPO").algorithm.surrogate == PSPO()


@pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda surrogate: type(surrogate).__name__)
def test_every_method_over_a_file_of_another(surrogate, capsys, recwarn):
    name = type(surrogate).__name__
    args = [f"--algorithm.surrogate.{part.name}={getattr(surrogate, part.name)}" for part in fields(surrogate)]
    for base in ((), ("--config", str(TINY))):
        assert train_config(*base, f"--algorithm.surrogate={name}").algorithm.surrogate == type(surrogate)()
        assert train_config(*base, f"--algorithm.surrogate={name}", *args).algorithm.surrogate == surrogate
    assert capsys.readouterr() == ("", "")
    assert not [warning for warning in recwarn if issubclass(warning.category, UserWarning)]


@pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda surrogate: type(surrogate).__name__)
def test_resolved_text_parses_back_to_an_equal_configuration(surrogate, tmp_path):
    args = [f"--algorithm.surrogate.{part.name}={getattr(surrogate, part.name)}" for part in fields(surrogate)]
    config, resolved = parse(
        TrainConfig,
        "pspo.train",
        [f"--algorithm.surrogate={type(surrogate).__name__}", *args, "--optimizer.lr=1e-6", "--run.output_dir=0123"],
    )
    file = tmp_path / "config.yaml"
    file.write_text(resolved)
    again, resolved_again = parse(TrainConfig, "pspo.train", ["--config", str(file)])
    assert again.algorithm.surrogate == surrogate
    assert again == config
    assert resolved_again == resolved
    assert [f"{part}.{leaf}" for part, leaves in yaml.safe_load(resolved).items() for leaf in leaves] == list(
        switches(TrainConfig)
    )


def test_resolved_text_of_rewards_and_odd_strings_parses_back(tmp_path):
    rewards = "[{class_path: MathReward, init_args: {tolerance: 1e-3, marker: first}}, FormatReward]"
    args = [f"--reward.functions={rewards}", "--reward.weights=[1, 0.5]"]
    args += ["--data.system_prompt=Say: 'yes'\n# \"no\" \u00e9 #### 1", "--run.output_dir=a: b # c", "--data.limit=3"]
    config, resolved = parse(TrainConfig, "pspo.train", args)
    file = tmp_path / "config.yaml"
    file.write_text(resolved, encoding="utf-8")
    assert train_config("--config", str(file)) == config
    assert config.data.system_prompt == "Say: 'yes'\n# \"no\" \u00e9 #### 1"
    assert [type(function) for function in config.reward.functions] == [MathReward, FormatReward]


def test_evaluate_resolved_text_parses_back(tmp_path):
    args = ["--eval.temperatures=[0, 0.6, 1]", "--eval.samples=4", "--data.name=gsm8k+math", "--run.output_dir=out"]
    config, resolved = parse(EvaluateConfig, "pspo.evaluate", args)
    file = tmp_path / "config.yaml"
    file.write_text(resolved)
    assert config.eval.temperatures == [0.0, 0.6, 1.0]
    assert parse(EvaluateConfig, "pspo.evaluate", ["--config", str(file)])[0] == config


# --- a user's own classes ---------------------------------------------------------------------------------------------

OWN_MODULE = '''
from dataclasses import dataclass
import torch
from pspo.losses import Surrogate
from pspo.tasks import Reward

@dataclass(frozen=True)
class MyLoss(Surrogate):
    """A loss of one's own.

    Args:
        strength: multiplies it.
    """

    strength: float = 2.0

    def __call__(self, logprobs, old_logprobs, advantages, mask):
        return torch.where(mask, -self.strength * logprobs * advantages, 0.0)

@dataclass(frozen=True)
class Brevity(Reward):
    max_characters: int = 500

    def __call__(self, completions, problems):
        return [float(len(completion) <= self.max_characters) for completion in completions]

class Refuses(Reward):
    def __init__(self):
        raise ValueError("needs a moon")

class Stranger:
    pass
'''


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    """The name of an importable module of a user's."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_own_surrogate_by_import_path(own, tmp_path):
    config, resolved = parse(
        TrainConfig, "pspo.train", [f"--algorithm.surrogate={own}.MyLoss", "--algorithm.surrogate.strength", "3"]
    )
    surrogate = config.algorithm.surrogate
    assert (type(surrogate).__module__, type(surrogate).__name__, surrogate.strength) == (own, "MyLoss", 3.0)
    file = tmp_path / "config.yaml"
    file.write_text(resolved)
    assert train_config("--config", str(file)).algorithm == config.algorithm

    file.write_text(f"algorithm:\n  surrogate:\n    class_path: {own}.MyLoss\n    init_args:\n      strength: 4\n")
    assert train_config("--config", str(file)).algorithm.surrogate == replace(surrogate, strength=4.0)


def test_own_reward_by_import_path(own, tmp_path):
    config = train_config(f"--reward.functions=[MathReward, {own}.Brevity]", "--reward.weights=[1, 0.5]")
    assert config.reward.functions[0] == MathReward()
    assert type(config.reward.functions[1]).__module__ == own
    assert config.reward.weights == [1.0, 0.5]
    file = tmp_path / "config.yaml"
    file.write_text(
        "reward:\n  functions:\n"
        f"  - class_path: {own}.Brevity\n    init_args:\n      max_characters: 3\n  - FormatReward\n"
    )
    functions = train_config("--config", str(file)).reward.functions
    assert functions == [replace(config.reward.functions[1], max_characters=3), FormatReward()]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--algorithm.surrogate={own}.Nope"], ("algorithm.surrogate", "Nope")),
        (["--algorithm.surrogate={own}.Stranger"], ("algorithm.surrogate", "Stranger", "Surrogate")),
        (["--algorithm.surrogate=no_such_module.MyLoss"], ("algorithm.surrogate", "no_such_module")),
        (["--algorithm.surrogate={own}.MyLoss", "--algorithm.surrogate.alpha=1"], ("algorithm.surrogate", "alpha")),
        (["--reward.functions=[{own}.Nope]"], ("reward.functions", "Nope")),
        (["--reward.functions=[{own}.MyLoss]"], ("reward.functions", "MyLoss", "Reward")),
        (["--reward.functions=[no_such_module.MyReward]"], ("reward.functions", "no_such_module")),
    ],
)
def test_own_class_that_is_not_there_is_refused(own, capsys, args, named):
    line = refusal(capsys, *(arg.format(own=own) for arg in args))
    assert all(part.format(own=own) in line for part in named), line


def test_own_reward_that_refuses_its_arguments_is_named(own, capsys):
    line = refusal(capsys, f"--reward.functions=[{own}.Refuses]")
    assert "needs a moon" in line
    assert "Refuses" in line or "reward.functions" in line, line


@pytest.mark.parametrize(
    ("code", "named"),
    [("import no_such_package\n", "no_such_package"), ("def f(:\n", "syntax")],
    ids=["missing-import", "syntax-error"],
)
def test_own_module_that_does_not_import_is_refused(tmp_path, monkeypatch, capsys, code, named):
    name = f"broken_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    line = refusal(capsys, f"--algorithm.surrogate={name}.MyLoss")
    assert "algorithm.surrogate" in line
    assert named in line


# --- help -------------------------------------------------------------------------------------------------------------


def test_help_mentions_the_main_switches(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(TrainConfig, "pspo.train", ["--help"])
    text = capsys.readouterr().out
    assert not exit_.value.code
    for switch in MAIN_SWITCHES:
        assert re.search(rf"^ +--{re.escape(switch)}\b", text, re.MULTILINE), switch
    assert "--model.autocast {auto,bf16,none}" in text


def test_help_of_a_method(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(TrainConfig, "pspo.train", ["--algorithm.surrogate.help=PSPO"])
    assert not exit_.value.code
    assert "smoothing strength in [0, 1]" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("config_class", LEAF_CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_has_a_help_text_and_every_help_text_a_field(config_class):
    _, _, args = config_class.__doc__.partition("Args:")
    documented = re.findall(r"^ {8}(\w+): \S", args, re.MULTILINE)
    assert documented == [part.name for part in fields(config_class)]


@pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda surrogate: type(surrogate).__name__)
def test_every_parameter_of_a_method_has_a_help_text(surrogate):
    _, _, args = type(surrogate).__doc__.partition("Args:")
    documented = [name for names in re.findall(r"^ {8}([\w, ]+): \S", args, re.MULTILINE) for name in names.split(", ")]
    assert documented == [part.name for part in fields(surrogate)]


# --- what is refused --------------------------------------------------------------------------------------------------

OUT_OF_RANGE = {
    "data.limit": ["0", "-1"],
    "data.max_prompt_tokens": ["0", "-1"],
    "reward.functions": ["[]"],
    "reward.weights": ["[1, 1]", "[]", "[.nan]", "[.inf]"],
    "reward.timeout": ["-1", ".nan", ".inf"],
    "rollout.prompts": ["0", "-1"],
    "rollout.group_size": ["1", "0", "-4"],
    "rollout.max_completion_tokens": ["0", "-1"],
    "rollout.min_completion_tokens": ["-1", "129"],
    "rollout.temperature": ["0", "-0.5", ".nan", ".inf"],
    "rollout.top_p": ["0", "-0.1", "1.01", ".nan"],
    "rollout.top_k": ["-1"],
    "rollout.repetition_penalty": ["0", "-1", ".nan", ".inf"],
    "rollout.max_rows": ["0", "-1"],
    "algorithm.epochs": ["0", "-1"],
    "algorithm.minibatches": ["0", "-1", "33"],
    "algorithm.beta": ["-0.1", ".nan", ".inf"],
    "optimizer.lr": ["0", "-1e-6", ".nan", ".inf"],
    "optimizer.beta1": ["1", "-0.1", ".nan"],
    "optimizer.beta2": ["1", "-0.1", ".nan"],
    "optimizer.eps": ["-1e-8", ".nan", ".inf"],
    "optimizer.weight_decay": ["-0.1", ".nan", ".inf"],
    "optimizer.warmup_steps": ["-1"],
    "optimizer.max_grad_norm": ["-1", ".nan"],
    "optimizer.microbatch_tokens": ["0", "-1"],
    "optimizer.max_skipped": ["0", "-1"],
    "run.seed": ["-1", "4294967296"],  # numpy's range
    "run.max_steps": ["0", "-1"],
    "run.max_tokens": ["0", "-1"],
    "run.validate_every": ["-1"],
    "run.validation_limit": ["0", "-1"],
    "run.test_limit": ["-1"],
    "run.save_every": ["-1"],
    "run.keep": ["0", "-1"],
    "run.samples": ["-1"],
    "data.holdout": ["-0.1", "1", ".nan"],
    "distributed.timeout": ["0", "-1", ".inf", ".nan"],
}
EVALUATE_OUT_OF_RANGE = {
    "eval.temperatures": ["[]", "[-0.1]", "[0.6, .nan]", "[.inf]"],
    "eval.samples": ["0", "-1"],
    "eval.top_p": ["0", "1.5", ".nan"],
    "eval.max_completion_tokens": ["0", "-1"],
    "eval.max_tokens": ["0", "-1"],
}
UNBOUNDED = {"data.seed", "run.seed"}  # any integer will do (evaluate's run.seed, too)


def cases(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(switch, value) for switch, values in table.items() for value in values]


@pytest.mark.parametrize(("switch", "value"), cases(OUT_OF_RANGE))
def test_out_of_range_is_refused_by_name(switch, value, capsys, tmp_path):
    assert switch in refusal(capsys, f"--{switch}={value}")
    section, leaf = switch.split(".")
    file = tmp_path / "config.yaml"
    file.write_text(f"{section}:\n  {leaf}: {value}\n")
    assert switch in refusal(capsys, "--config", str(file))


@pytest.mark.parametrize(("switch", "value"), cases(EVALUATE_OUT_OF_RANGE))
def test_evaluate_out_of_range_is_refused_by_name(switch, value, capsys):
    assert switch in refusal(capsys, f"--{switch}={value}", config_class=EvaluateConfig)


@pytest.mark.parametrize(
    ("config_class", "tables"),
    [(TrainConfig, [OUT_OF_RANGE]), (EvaluateConfig, [OUT_OF_RANGE, EVALUATE_OUT_OF_RANGE])],
)
def test_the_tables_above_cover_every_numeric_field(config_class, tables):
    def numeric(hint: object) -> bool:
        if typing.get_origin(hint) in (list, typing.Union, types.UnionType):
            return any(numeric(part) for part in typing.get_args(hint))
        return hint in (int, float)

    covered = UNBOUNDED.union(*tables)
    for switch, (section, leaf) in switches(config_class).items():
        if numeric(typing.get_type_hints(section)[leaf.name]):
            assert switch in covered, f"--{switch}: add values out of its range, or say that it has none"


def test_warmup_beyond_the_run_is_refused_for_decaying_schedules(capsys):
    args = ("--run.max_steps=10", "--optimizer.warmup_steps=10")
    assert train_config(*args).optimizer.warmup_steps == 10
    for schedule in ("linear", "cosine"):
        assert "optimizer.warmup_steps" in refusal(capsys, *args, f"--optimizer.schedule={schedule}")


BAD_METHODS = [
    ("PSPO", "alpha", "4"),
    ("PSPO", "alpha", "-0.1"),
    ("PSPO", "alpha", ".nan"),
    ("PSPO", "alpha", "much"),
    ("Clip", "epsilon", "-0.1"),
    ("Clip", "epsilon", ".nan"),
    ("Clip", "epsilon_high", "-0.1"),
    ("Clip", "delta", "0.5"),
    ("P3O", "tau", "0"),
    ("P3O", "kl_coef", "-1"),
    ("SAPO", "tau_pos", "0"),
    ("SAPO", "tau_neg", "-1"),
    ("TOPR", "a_pos", "2"),
    ("TOPR", "a_pos", "-1"),
    ("TOPR", "b_pos", "0.5"),
    ("TOPR", "a_neg", "2"),
    ("TOPR", "b_neg", "-1"),
    ("TOPR", "level", "word"),
]


@pytest.mark.parametrize(("name", "parameter", "value"), BAD_METHODS)
def test_a_method_s_parameter_out_of_range_is_refused_by_name(name, parameter, value, capsys):
    line = refusal(capsys, f"--algorithm.surrogate={name}", f"--algorithm.surrogate.{parameter}={value}")
    assert name in line
    assert parameter in line


def test_every_parameter_of_every_method_has_a_bad_value_above():
    tested = {(name, parameter) for name, parameter, _ in BAD_METHODS}
    assert tested == {(type(each).__name__, part.name) for each in SURROGATES for part in fields(each)}


@pytest.mark.parametrize(
    ("parameter", "value"), [("tolerance", "-1"), ("tolerance", "tiny"), ("format_bonus", "2"), ("marker", "middle")]
)
def test_a_reward_s_parameter_out_of_range_is_refused_by_name(parameter, value, capsys):
    reward = f"[{{class_path: MathReward, init_args: {{{parameter}: {value}}}}}]"
    assert parameter in refusal(capsys, f"--reward.functions={reward}")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--rollout.group_sise=4"], "--rollout.group_sise"),
        (["--rollout.group_sise", "4"], "--rollout.group_sise"),
        (["--rolout.group_size=4"], "--rolout.group_size"),
        (["--group_size=4"], "--group_size"),
        (["--eval.samples=4"], "--eval.samples"),
        (["--algorithm.surrogate.epsilon=0.1"], "epsilon"),
        (["--algorithm.surrogate=PPO"], "PPO"),
        (["--algorithm.surrogate=pspo"], "pspo"),
        (["--reward.functions=[Nope]"], "Nope"),
        (["train.yaml"], "train.yaml"),
        (["--run.max_steps"], "run.max_steps"),
    ],
)
def test_unknown_is_refused_by_name(args, named, capsys):
    assert named in refusal(capsys, *args)


@pytest.mark.parametrize("args", [["--run.max_step=4"], ["--rollout.prom", "4"], ["--conf=x"], ["--print"], ["--hel"]])
def test_abbreviations_are_refused(args, capsys):
    assert args[0].partition("=")[0] in refusal(capsys, *args)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rollout:\n  group_sise: 4\n", ("rollout", "group_sise")),
        ("rolout:\n  group_size: 4\n", ("rolout",)),
        ("group_size: 4\n", ("group_size",)),
        ("algorithm:\n  surrogate:\n    class_path: PSPO\n    init_args:\n      beta: 1\n", ("surrogate", "beta")),
        ("algorithm:\n  surrogate: PPO\n", ("algorithm.surrogate", "PPO")),
        ("reward:\n  functions: MathReward\n", ("reward.functions",)),
        ("rollout: 4\n", ("rollout",)),
    ],
)
def test_unknown_in_a_file_is_refused_by_name(text, named, capsys, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    line = refusal(capsys, "--config", str(file))
    assert all(part in line for part in named), line


@pytest.mark.parametrize(
    ("switch", "value"),
    [
        ("rollout.group_size", "four"),
        ("run.max_steps", "1.5"),
        ("run.max_steps", "null"),
        ("run.max_tokens", "1e6"),
        ("run.seed", "true"),
        ("optimizer.lr", "fast"),
        ("model.gradient_checkpointing", "maybe"),
        ("model.autocast", "fp16"),
        ("algorithm.aggregation", "mean"),
        ("algorithm.advantage_scale", "std"),
        ("algorithm.kl_estimator", "k4"),
        ("algorithm.surrogate", "null"),
        ("optimizer.schedule", "step"),
        ("reward.weights", "1"),
    ],
)
def test_ill_typed_is_refused_by_name(switch, value, capsys, tmp_path):
    assert switch in refusal(capsys, f"--{switch}={value}")
    section, leaf = switch.split(".")
    file = tmp_path / "config.yaml"
    file.write_text(f"{section}:\n  {leaf}: {value}\n")
    assert switch in refusal(capsys, "--config", str(file))


@pytest.mark.parametrize(
    "content",
    [b"- a\n- b\n", b"hello\n", b"a: [1, 2\n  b: }\n", b"\xff\xfe\x00\x01", b""],
    ids=["list", "string", "not-yaml", "binary", "empty"],
)
def test_a_file_that_is_no_configuration_is_named(content, capsys, tmp_path):
    file = tmp_path / "wrong.yaml"
    file.write_bytes(content)
    assert "wrong.yaml" in refusal(capsys, "--config", str(file))


def test_a_missing_file_or_a_folder_is_named(capsys, tmp_path):
    for path in (tmp_path / "missing.yaml", tmp_path):
        line = refusal(capsys, "--config", str(path))
        assert "config" in line
        assert path.name in line


@pytest.mark.parametrize("name", ["smollm2-gsm8k", "smollm2-word-problems/1-solvable", "smollm2-word-problems/2-all"])
def test_configurations_of_the_repository_are_read(name):
    config, _ = parse(TrainConfig, "", [f"--config={TINY.parent / name}.yaml"])
    assert "smollm2" in config.model.name_or_path.lower()
