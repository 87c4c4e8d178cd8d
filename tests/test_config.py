"""Configuration: defaults, switches and files, plug-ins by import path, round trips, help, and refused values."""

import json
import math
import re
import typing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pspo.cli.parse import parse, resolve
from pspo.cli.python import config_from_python
from pspo.cli.values import to_yaml
from pspo.config import EvaluateConfig, Fact, ModelConfig, TrainConfig, find_switches, switches_with
from pspo.losses import CISPO, GSPO, P3O, TOPR, Clip, NoClip, OffPolicyMask
from pspo.model.find import TINY_BYTES, find_default_lr
from pspo.tasks import FormatReward, MathReward, SoftOverlong

ROOT = Path(__file__).parents[1]
TINY = ROOT / "configs" / "tiny.yaml"
METHODS = [Clip(0.1, epsilon_high=0.28, delta=4.0), NoClip(), P3O(kl_coef=1e-6), TOPR(level="token")]


def train_config(*args: str) -> TrainConfig:
    return parse(TrainConfig, "pspo.train", args)[0]


@pytest.fixture
def yaml_file(tmp_path):
    """Writes own.yaml and returns the arguments that read it."""

    def write(text: str) -> tuple[str, str]:
        (tmp_path / "own.yaml").write_text(text, encoding="utf-8")
        return "--config", str(tmp_path / "own.yaml")

    return write


def test_tiny_yaml_is_the_default_configuration_and_spells_out_every_field(capsys):
    content = yaml.safe_load(TINY.read_text(encoding="utf-8"))
    assert train_config("--config", str(TINY)) == resolve(TrainConfig())
    with pytest.raises(SystemExit) as exit_:
        train_config("--print_config")
    assert not exit_.value.code
    assert yaml.safe_load(capsys.readouterr().out) == content


def test_switches_override_and_null_unsets():
    config = train_config(
        "--rollout.prompts", "4", "--optimizer.lr=1", "--data.system_prompt=", "--run.max_tokens", "150_000_000",
        "--model.gradient_checkpointing", "--model.name_or_path", "123", "--run.output_dir=2024",
        "--data.limit=7", "--data.limit=null", "--reward.functions", "FormatReward", "--rollout.stop_strings=a",
        "--rollout.environment=my.Game", "--rollout.environment=null",
    )  # fmt: skip
    default = resolve(TrainConfig())
    assert config == replace(
        default,
        model=replace(default.model, gradient_checkpointing=True, name_or_path="123"),
        data=replace(default.data, system_prompt=""),
        reward=replace(default.reward, functions=[FormatReward()]),
        rollout=replace(default.rollout, prompts=4, stop_strings=["a"]),
        optimizer=replace(default.optimizer, lr=1.0),
        run=replace(default.run, max_tokens=150_000_000, output_dir="2024"),
    )
    assert isinstance(config.optimizer.lr, float)


def test_paths_at_home_are_expanded(yaml_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    yaml_file("model: {name_or_path: ~/model}\noptimizer: {lr: 1}\n")
    config = train_config("--config=~/own.yaml", "--run.output_dir=~/out", "--run.fork_from=~/run")
    paths = [config.model.name_or_path, config.run.output_dir, config.run.fork_from]
    assert paths == [str(tmp_path / name) for name in ("model", "out", "run")]


def test_the_later_of_file_and_switch_wins(tmp_path):
    first = tmp_path / "first.yaml"
    second = tmp_path / "second.yaml"
    first.write_text("rollout: {prompts: 5, group_size: 3}\n")
    second.write_text("rollout: {prompts: 6}\n")
    for args, expected in [
        (["--config", first, "--rollout.prompts=7"], (7, 3)),
        (["--rollout.prompts=7", "--config", first], (5, 3)),
        (["--config", first, "--config", second], (6, 3)),
        (["--config", "dapo", "--config", second], (6, 4)),
    ]:
        rollout = train_config(*map(str, args)).rollout
        assert (rollout.prompts, rollout.group_size) == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--config=dapo", "--config=own.yaml"], GSPO(0.01)),
        (
            ["--config=own.yaml", "--algorithm.surrogate={class_path: CISPO, init_args: {epsilon_high: 2}}"],
            CISPO(None, 2),
        ),
        (["--config=dapo", "--algorithm.surrogate.class_path=Clip"], Clip()),  # no epsilon_high of dapo's
        (["--config=dapo", "--algorithm.surrogate.init_args.epsilon=0.1"], Clip(0.1, 0.28)),
    ],
    ids=str,
)
def test_a_class_begins_with_its_own_defaults(yaml_file, tmp_path, monkeypatch, args, expected):
    rewards = "reward: {functions: [{class_path: MathReward, init_args: {format_bonus: 0.3}}]}\n"
    yaml_file(rewards + "algorithm: {surrogate: {class_path: GSPO, init_args: {epsilon: 0.01}}}\n")
    monkeypatch.chdir(tmp_path)
    config = train_config(*args, "--reward.functions=MathReward")
    assert (config.algorithm.surrogate, config.reward.functions) == (expected, [MathReward()])


def test_a_printed_file_leaves_open_what_depends_on_other_switches(yaml_file, capsys):
    with pytest.raises(SystemExit):
        train_config("--rollout.lag=1", "--algorithm.ratio_to=proximal", "--print_config")
    first = "--rollout.engine={class_path: my.First, init_args: {memory: 0.3}}"
    printed = capsys.readouterr().out
    for text in (printed, to_yaml(parse(TrainConfig, "pspo.train", yaml_file(printed))[1])):  # a run's config.yaml, too
        args = [*yaml_file(text), "--model.lora.rank=8", first, "--rollout.engine=my.Engine"]
        config, settings = parse(TrainConfig, "pspo.train", args)
        assert (config.correction, config.optimizer.lr) == ("token_truncate", 3e-4)
        assert (settings["algorithm"]["correction"], settings["optimizer"]["lr"]) == ("token_truncate", 3e-4)
        assert config.rollout.engine == {"class_path": "my.Engine"}


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


TEXTS = ["# Role: tutor", "#run", "~", "null", "true", "no", "1.10", "0123456", "1e3", "0x10", "1_000", "2024-01-01",
         "[END]", "[END", "{x", "a: b", "- a", "-h", "*a", "!x", "%", "'", '"a"', "['a']", " a ", "\t", "a\r\nb\n",
         "\u2028", "a\x85b", "\u00e9\u7ec8", "<<", "x #y", "a, b", "<|im_end|>", ".inf"]  # fmt: skip
SWITCHES = ["data.system_prompt", "model.revision", "data.hub.revision", "data.hub.config", "data.hub.splits.train",
            "data.columns.prompt", "rollout.stop_strings", "rollout.stop_tokens"]  # fmt: skip
PATHS = ["run.output_dir", "data.chat_template"]


def value_of(config: object, switch: str) -> object:
    for name in switch.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_taken_as_it_was_typed_from_words_files_and_python(text, yaml_file):
    switches = SWITCHES + (PATHS if text != "~" else [])  # the home folder
    sections = {}
    for switch in switches:
        *names, last = switch.split(".")
        section = sections
        for name in names:
            section = section.setdefault(name, {})
        section[last] = text
    ways = [
        parse(TrainConfig, "pspo.train", [word for switch in switches for word in (f"--{switch}", text)]),
        parse(TrainConfig, "pspo.train", [f"--{switch}={text}" for switch in switches]),
        parse(TrainConfig, "pspo.train", yaml_file(json.dumps(sections))),
        config_from_python(**sections),
    ]
    for i, (config, settings) in enumerate(ways):
        item = "a" if text == "['a']" and i < 2 else text  # in a command a whole list, its texts in quotes
        for switch in switches:
            expected = [item] if "stop_" in switch else text
            assert value_of(config, switch) == value_of(settings, switch) == expected
    config, settings = ways[-1]
    assert train_config(*yaml_file(to_yaml(settings))) == config


def test_files_give_texts_without_quotes_too_and_null_unsets(yaml_file):
    text = (
        "model: {revision: 1.10}\r\ndata:\r\n  hub: {revision: 0123456, config: 2024, splits: {train: 1}}\r\n"
        "  columns: {prompt: 1, answer: yes}\r\n  system_prompt: |\r\n    # Role\r\n    [END]\r\n"
        "rollout: {stop_strings: ['#', 1.0, '~'], stop_tokens: null, temperature: 5e-1}\r\nrun: {max_tokens: ~}\r\n"
    )
    config = train_config("--rollout.stop_tokens=x", "--run.max_tokens=9", *yaml_file(text))
    assert config.model.revision == "1.10"
    assert config.data.hub == {"revision": "0123456", "config": "2024", "splits": {"train": "1"}}
    assert config.data.columns == {"prompt": "1", "answer": "yes"}
    assert config.data.system_prompt == "# Role\n[END]\n"
    assert (config.rollout.stop_strings, config.rollout.stop_tokens) == (["#", "1.0", "~"], None)
    assert (config.rollout.temperature, config.run.max_tokens) == (0.5, None)
    assert train_config(*yaml_file("data: {system_prompt: '~'}")).data.system_prompt == "~"
    assert train_config("--data.system_prompt=a", *yaml_file("data: {system_prompt: ~}")).data.system_prompt is None
    assert config_from_python(data={"system_prompt": None})[0].data.system_prompt is None
    with pytest.raises(ValueError, match=r"--data.hub.config must be a text, got 2024: write it in quotes"):
        config_from_python(data={"hub": {"config": 2024}})


@pytest.mark.parametrize(("words", "switch", "expected"), [
    ('--rollout.stop_strings=["a", \'b\']', "rollout.stop_strings", ["a", "b"]),
    ("--rollout.stop_strings=", "rollout.stop_strings", []),
    ("--rollout.stop_strings=[]", "rollout.stop_strings", []),
    ('--rollout.stop_strings=["\\n"]', "rollout.stop_strings", ["\n"]),
    ('--rollout.stop_tokens=["[EOS]"]', "rollout.stop_tokens", ["[EOS]"]),
    ("--reward.weights=0.5", "reward.weights", [0.5]),
    ("--reward.functions=[MathReward, FormatReward] && --reward.weights=[1, 5e-1]", "reward.weights", [1.0, 0.5]),
    ("--model.lora.target_modules=[qk]_proj", "model.lora.target_modules", "[qk]_proj"),
    ('--model.lora.target_modules=["q_proj", "v_proj"]', "model.lora.target_modules", ["q_proj", "v_proj"]),
    ("--data.chat_template={enable_thinking: false, date: 2024-01-01, n: 1e-3, v: '1.10'}", "data.chat_template",
     {"enable_thinking": False, "date": "2024-01-01", "n": 1e-3, "v": "1.10"}),
    ("--data.chat_template.tools=null", "data.chat_template", {"tools": None}),
    ("--data.hub={revision: 1.10, splits: {train: train_sft}}", "data.hub",
     {"revision": "1.10", "splits": {"train": "train_sft"}}),
    ("--optimizer.options.betas=[0.9, 0.95]", "optimizer.options", {"betas": [0.9, 0.95]}),
    ("--rollout.engine=my.Engine && --rollout.engine.memory=0.3", "rollout.engine",
     {"class_path": "my.Engine", "init_args": {"memory": 0.3}}),
    ("--reward.functions=[SoftOverlong] && --reward.functions.buffer=24", "reward.functions", [SoftOverlong(24)]),
    ("--run.max_tokens=150_000_000", "run.max_tokens", 150_000_000),
    ("--optimizer.lr=1.0E-06", "optimizer.lr", 1e-6),
    ("--run.quiet", "run.quiet", True),
    ("--algorithm.advantages=math.fsum", "algorithm.advantages", math.fsum),
])  # fmt: skip
def test_other_types_read_a_word(words, switch, expected):
    assert value_of(train_config(*words.split(" && ")), switch) == expected


@dataclass(frozen=True)
class Wordy(NoClip):
    """Its arguments have types that a word could be mistaken for."""

    text: str
    maybe: str | None
    texts: list[str]
    root: Path
    untyped: Any = None


def my_term(losses, x):
    return losses * x.mask


def test_own_classes_by_import_path_whose_arguments_are_read_by_their_types(yaml_file, capsys):
    words = {"text": "1.10", "maybe": "~", "texts": "[END]", "root": "#x", "untyped": "1e-3"}
    args = [f"--algorithm.surrogate.{name}={word}" for name, word in words.items()]
    terms = "[test_config.my_term, {class_path: pspo.losses.OffPolicyMask, init_args: {threshold: 0.1}}]"
    args.append(f"--algorithm.terms={terms}")
    config, settings = parse(TrainConfig, "pspo.train", ["--algorithm.surrogate=test_config.Wordy", *args])
    assert config.algorithm.surrogate == Wordy("1.10", "~", ["[END]"], Path("#x"), 1e-3)
    assert config.algorithm.terms == [my_term, OffPolicyMask(0.1)]
    assert train_config(*yaml_file(to_yaml(settings))) == config
    for wrong in (args[1:], [*args, "--algorithm.surrogate.txt=1"]):
        with pytest.raises(SystemExit, match=r"^2$"):
            train_config("--algorithm.surrogate=test_config.Wordy", *wrong)
        messages = r"Wordy\(text, maybe, .*(argument: 'text'|unexpected keyword argument 'txt')"
        assert re.search(messages, capsys.readouterr().err)


def test_the_learning_rate_of_the_embedded_models_or_the_paper_s(tmp_path, model_folder):
    assert find_default_lr(ModelConfig("tiny-math")) == find_default_lr(ModelConfig(str(model_folder()))) == 3e-5
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(int(TINY_BYTES))
    (tmp_path / "config.json").touch()
    for name in ("Qwen/Qwen2.5-0.5B", str(tmp_path)):
        config, resolved = parse(TrainConfig, "pspo.train", [f"--model.name_or_path={name}"])
        assert config.optimizer.lr == resolved["optimizer"]["lr"] == 1e-6
        assert train_config(f"--model.name_or_path={name}", "--optimizer.lr=3e-5").optimizer.lr == 3e-5


@pytest.mark.parametrize("words", ["-h", "--help all", "--help model"])
def test_help_has_a_text_for_every_switch(words, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(TrainConfig, "pspo.train", words.split())
    assert not exit_.value.code
    described = re.findall(r"^  --([a-z]+\.[\w.]+) +\S.*$", capsys.readouterr().out, re.MULTILINE)
    basic = switches_with("basic")
    shown = {"-h": basic.__contains__, "--help all": str, "--help model": lambda name: name.startswith("model.")}
    assert described == [*filter(shown[words], find_switches(TrainConfig))]


def test_the_guide_lists_exactly_the_switches():
    page = (ROOT / "docs/guide/switches.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\* `--([\w.]+)`: .+$", page, re.MULTILINE)
    assert rows == list(find_switches(TrainConfig))


# ---------------------------------------------------------------- messages

FILES = {
    "typo.yaml": "rollout:\n  group_sise: 4\n",
    "twice.yaml": "run: {seed: 1}\nrun: {keep: 1}\n",
    "syntax.yaml": "a: [1, 2\n  b: }\n",
}
MESSAGES = {
    "--rollout.group_sise 4": "unrecognized arguments: --rollout.group_sise; did you mean --rollout.group_size?",
    "--max_steps 4": "unrecognized arguments: --max_steps; did you mean --run.max_steps?",
    "--config typo.yaml": "unrecognized arguments: --rollout.group_sise; did you mean --rollout.group_size?",
    "--config syntax.yaml": "syntax.yaml is damaged: .* line 2, column 4",
    "--config twice.yaml": "twice.yaml is damaged: run stands twice, the second time in line 2",
    "--config grpo --run.keep 0": "--run.keep must be",
    "--data.chat_template a.jinja --data.chat_template.tools []": "--data.chat_template is a.jinja, which takes no",
    "--config missing.yaml": ".*No such file or directory: 'missing.yaml'",
    "--algorithm.advantages math.fsun": "--algorithm.advantages math.fsun: .* no attribute .fsun.",
    '--reward.functions [{"class_path":"SoftOverlong","init_args":{"buffer":0}}]': ".* buffer must be above 0, not 0",
    '--algorithm.surrogate {"class_path":"Clip","init_args":[1]}': "--algorithm.surrogate.init_args must be a mapping",
    "--algorithm.surrogate Clipp": ".* no such class; choose from ASPO, .*VESPO, or give an import path",
    "--algorithm.surrogate.alpha=0.4 --algorithm.surrogate=PSPO": "--algorithm.surrogate must stand before its",
    "--rollout.prompts many": "--rollout.prompts must be a whole number, got many",
    "--optimizer.lr .inf": "--optimizer.lr must be finite and above 0, got inf",
    "--data.system_prompt --briefly": "--data.system_prompt needs a value; one that begins with -- is given as --data",
    "--algorithm.terms OffPolicyMask": r"--algorithm.terms OffPolicyMask\(threshold\): .* argument: 'threshold'",
    "--algorithm.nucleus replay --rollout.decoder hf": "--algorithm.nucleus",
    "--algorithm.correction token_mask --rollout.engine my.Engine --rollout.lag 1": "--algorithm.correction",
    "--optimizer.name adamw8bit --distributed.strategy fsdp2": "--optimizer.name",
    "--algorithm.beta 1 --algorithm.reference_every 2 --distributed.strategy fsdp2": "--algorithm.reference_every must",
}
BAD_VALUES = """
data.limit=0 data.holdout=1 reward.functions=[] reward.weights=[1,1] rollout.group_size=1 rollout.temperature=.nan
rollout.top_p=1.01 algorithm.minibatches=33 algorithm.correction_floor=4 algorithm.surrogate=math.exp
run.max_steps=null run.keep=0 eval.temperatures=[0.6,.nan]
"""
MESSAGES |= {f"--{case}": f".*{re.escape(case.partition('=')[0])}" for case in BAD_VALUES.split()}


@pytest.mark.parametrize("command", MESSAGES)
def test_message(command, tmp_path, monkeypatch, capsys):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "grpo").mkdir()  # the method of that name is meant
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^2$"):
        parse(EvaluateConfig if "--eval." in command else TrainConfig, "pspo.train", command.split())
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"pspo.train: error: {MESSAGES[command]}.*\n", err), err


@pytest.mark.parametrize("config_class", [TrainConfig, EvaluateConfig])
def test_what_is_said_of_every_switch_is_known_and_fits_its_type(config_class):
    for name, part in find_switches(config_class).items():
        facts = part.metadata.get("facts", ())
        kinds = set(typing.get_args(part.type)) or {part.type}
        assert set(facts) <= set(typing.get_args(Fact)), name
        assert "path" not in facts or str in kinds, name
        has_keys = "dict[" in str(part.type)
        assert has_keys == ("mapping" in facts or "class" in facts), name
        assert not part.metadata.get("limits") or kinds & {int, float}, name
        assert not ("free" in facts and "may grow" in facts), name
    assert {switch.partition(".")[0] for switch in switches_with("main")} == {"model", "data", "reward", "algorithm"}
