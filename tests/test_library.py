"""pspo from Python: the pages' own loop equals the command, and `train(...)` is the command."""

import importlib.util
import json
import os
import random
import re
import runpy
import shlex
import sys
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from naive import TEMPERATURE, make_config, make_rollout, run, weights
from safetensors.torch import load_file
from test_docs import blocks

import pspo.tasks.datasets
from examples.expressions import solves
from pspo import train
from pspo.cli.parse import parse, read_config
from pspo.cli.python import config_from_python
from pspo.config import AlgorithmConfig, DataConfig, OptimizerConfig, RolloutConfig, RunConfig, TrainConfig
from pspo.errors import RunFailed
from pspo.files import lock_folder, read_jsonl
from pspo.losses import GSPO, PSPO, Clip, SamplerCorrection, Surrogate
from pspo.model import ASSETS, default_max_rows
from pspo.rollout import Sampling
from pspo.run.validator import Validator
from pspo.tasks import FormatReward, Problem, load_problems
from pspo.train import main
from pspo_lab.runs import read_runs

SWITCHES = {"prompts": 4, "max_completion_tokens": 16}
RUN = {"max_steps": 4, "validate_every": 0, "test_limit": 0}
COMMAND = [  # the same
    "--rollout.prompts=4", "--rollout.max_completion_tokens=16", "--data.limit=40", "--run.max_steps=4",
    "--run.validate_every=0", "--run.test_limit=0",
]  # fmt: skip


def example(name: str, tmp_path: Path) -> dict:
    """The names that a page's example defines."""
    (tmp_path / name).write_text(dict(blocks("python"))[name], encoding="utf-8")
    return runpy.run_path(str(tmp_path / name))


def config_of(**run) -> TrainConfig:
    config = TrainConfig(data=DataConfig(limit=40), optimizer=OptimizerConfig(lr=3e-5))
    return replace(config, rollout=replace(config.rollout, **SWITCHES), run=RunConfig(**{**RUN, **run}))


def logs(completions, log_metric, log_extra):
    log_metric("longest", max(map(len, completions)))
    log_extra("first", ["\ud83d" + text[:1] for text in completions])  # half a surrogate pair, as from hostile JSON
    return [float(len(text) % 3) for text in completions]


def test_what_rewards_log_is_in_metrics_and_samples(here):
    """Also after groups were replaced by others, and in a rollout that waited for its turn."""
    rollout = SWITCHES | {"resample": 2, "lag": 1}
    train(data={"limit": 40}, reward=[logs, "MathReward"], rollout=rollout, run=RUN | {"output_dir": "logged"})
    lines, samples = (read_jsonl(Path("logged", name)) for name in ("metrics.jsonl", "samples.jsonl"))
    assert all("logged/longest" in line and "logged/first" not in line for line in lines)
    assert all(of["logged"]["first"] == "\ud83d" + of["completion"][:1] for of in samples)
    assert all(len(of["completion"]) <= of["logged"]["longest"] for of in samples)


def test_the_pages_loop_equals_the_command_bit_for_bit(tmp_path):
    policy = example("own_loop.py", tmp_path)["train"](config_of(seed=3))
    main([*COMMAND, "--run.seed=3", f"--run.output_dir={tmp_path}/run"])
    saved = load_file(tmp_path / "run/final/model.safetensors")
    ours = {name: tensor for name, tensor in policy.state_dict().items() if name in saved}
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in saved)


def test_the_pages_step_equals_update(tmp_path, tiny_model):
    own_step = example("own_step.py", tmp_path)["own_step"]
    rollout, advantages = make_rollout()
    policy, start = tiny_model(), weights(tiny_model())
    loss = own_step(policy, torch.optim.SGD(policy.parameters(), lr=0.1), rollout, advantages.float(), TEMPERATURE)
    config = make_config(PSPO(), epochs=1, optimizer={"max_grad_norm": 0.0})
    expected, (metrics,) = run(tiny_model(), rollout, advantages.float(), config, sgd=0.1)
    assert loss == pytest.approx(metrics["loss"], abs=1e-6)
    torch.testing.assert_close(weights(policy), expected, atol=1e-6, rtol=1e-5)
    assert not torch.equal(expected, start)


def test_a_call_is_configured_as_the_command():
    call = {"data": {"limit": 40}, "rollout": SWITCHES, "algorithm": Clip(epsilon=0.3), "run": RUN}
    command = [*COMMAND, "--algorithm.surrogate=Clip", "--algorithm.surrogate.epsilon=0.3"]
    assert config_from_python(**call) == parse(TrainConfig, "pspo.train", command)


def test_problems_and_functions_of_python(here, capsys):
    problems = [Problem(f"Tom has {n} pens and buys 5. How many now?", Fraction(n + 5)) for n in range(9)]
    problems[0] = replace(problems[0], source="pens", solution="0 + 5 = 5")
    data = {"train": problems, "test": [{"prompt": "Ann has 3 pens.", "answer": 3}]}
    call = {"data": data, "rollout": SWITCHES, "reward": [FormatReward()]}
    summary = train("tiny-base", run=RUN | {"test_limit": 5, "output_dir": "mine"}, **call)
    assert summary["before"]["n"] == 1
    assert [row["answer"] for row in read_jsonl(Path("mine/data/train.jsonl"))] == [str(n + 5) for n in range(9)]
    first = load_problems("file", "train", "mine/data/train.jsonl", seed=0)
    assert {("pens", "0 + 5 = 5")} < {(of.fields.get("source"), of.fields.get("solution")) for of in first}
    assert "FormatReward" in str(read_config(Path("mine/config.yaml"))["reward"]["functions"])
    capsys.readouterr()
    again = train("tiny-base", run=RUN | {"test_limit": 5, "output_dir": "mine"}, **call)
    assert again == json.loads(json.dumps(summary))
    assert "already finished" in capsys.readouterr().out
    with pytest.raises(ValueError, match="mine has other problems"):
        train("tiny-base", run=RUN | {"output_dir": "mine"}, **(call | {"data": problems}))
    Path("starting").mkdir()
    with lock_folder(Path("starting")), pytest.raises(ValueError, match="starting is in use by another process"):
        train("tiny-base", run=RUN | {"output_dir": "starting"}, **(call | {"data": problems}))
    assert not list(Path("starting/data").glob("*.jsonl"))
    (run,) = read_runs([Path("mine")]).labels
    Path("mine").rename("moved")
    assert [moved.switches["data.name"] for moved in read_runs([Path("moved")]).labels] == [run.switches["data.name"]]


def test_problems_replace_those_of_a_call_that_failed_but_nobody_elses(here):
    problems = [{"prompt": f"Tom has {n} pens.", "answer": np.float32(n + 0.1), "flag": np.bool_(n)} for n in range(6)]
    run = {"max_steps": 2, "validate_every": 0}
    with pytest.raises(ValueError, match="there is no nowhere"):
        train("./nowhere", data={"train": problems, "validation": problems}, run=run | {"output_dir": "out"})
    train(data=problems[:4], rollout=SWITCHES, run=run | {"output_dir": "out"})
    assert [path.name for path in Path("out/data").glob("[!.]*")] == ["train.jsonl"]
    assert read_jsonl(Path("out/data/train.jsonl"))[0] == {"prompt": "Tom has 0 pens.", "answer": 0.1, "flag": False}
    Path("project/checkpoints").mkdir(parents=True)
    Path("project/config.yaml").write_text("mine: 1")
    Path("other/data").mkdir(parents=True)
    Path("other/data/train.jsonl").write_text("mine")
    for folder, words in (("project", "already holds something"), ("other", "other problems: choose another folder")):
        with pytest.raises(ValueError, match=words):
            train(data=problems, rollout=SWITCHES, run=run | {"output_dir": folder})
    assert {path.name for path in Path("project").iterdir()} == {"config.yaml", "checkpoints"}
    assert Path("other/data/train.jsonl").read_text() == "mine"


def test_a_list_of_problems_is_divided_as_a_file_of_them(here):
    problems = [{"prompt": f"Tom has {n} pens and buys 5. How many now?", "answer": n + 5} for n in range(63)]
    Path("file.yaml").write_text("data: {holdout: 0.5}")
    divided = [
        config_from_python(data={"train": problems}, run={"output_dir": "new"}),
        config_from_python("file.yaml", data=problems, run={"output_dir": "new"}),
        config_from_python(data={"train": problems, "holdout": 0.0}, run={"output_dir": "new"}),
        config_from_python(data={"train": problems[:49]}, run={"output_dir": "fewer"}),
    ]
    found = [(config.data.holdout, config.run.test_limit > 0) for config, _ in divided]
    assert found == [(0.2, True), (0.5, True), (0.0, False), (0.0, False)]


def test_a_run_that_tells_of_its_rollouts_is_the_same_run(here, monkeypatch):
    told = []

    def on_rollout(experience, steps):
        told.append((experience.rewards.mean().item(), [step["loss"] for step in steps], torch.rand(1).item()))
        experience.rewards.zero_()
        experience.rollout.completion_ids.zero_()
        steps.clear()
        if len(told) == 2:
            raise OSError("the disk of plots is full")

    call = {"data": {"limit": 40}, "rollout": SWITCHES | {"lag": 1}}
    run = RUN | {"max_steps": 6, "validate_every": 2, "validation_limit": 2}
    runs = {name: run | {"output_dir": name} for name in ("told", "alone")}
    with monkeypatch.context() as patch:
        patch.setattr(Validator, "measure", lambda self: {"validation_reward": 1 / (self.learner.steps == 0)})
        with pytest.raises(RunFailed, match=r"division by zero\n\nlast checkpoint: told/checkpoints/step-000002"):
            train(run=runs["told"], on_rollout=on_rollout, **call)
    with pytest.raises(RunFailed, match=r"the disk of plots is full\n\nlast checkpoint: told/checkpoints/step-000004"):
        train(run=runs["told"], on_rollout=on_rollout, **call)
    for name, own in (("told", on_rollout), ("alone", None)):
        train(run=runs[name], on_rollout=own, **call)
    ours, theirs = (Path(name, "final/model.safetensors").read_bytes() for name in ("told", "alone"))
    assert ours == theirs
    lines = read_jsonl(Path("told/metrics.jsonl"))
    assert [reward for reward, _, _ in told] == pytest.approx([line["reward"] for line in lines])
    assert [losses[-1] for _, losses, _ in told] == [line["loss"] for line in lines]


class Plain(Surrogate):
    def __init__(self, width: float = 0.5):
        self.width = width

    def __call__(self, logprobs, old_logprobs, advantages, mask):
        return (-self.width * logprobs * advantages).where(mask, 0.0)


class Forgetful(Plain):
    def __init__(self, width: float = 0.5):
        pass


def test_a_preset_and_a_file_are_below_the_other_arguments(here):
    Path("mine.yaml").write_text("data: {limit: 40}\nrun: {max_steps: 9}\nalgorithm: {epochs: 1}\n")
    config, _ = config_from_python("mine.yaml", algorithm=Plain(0.3), rollout=SWITCHES, run=RUN)
    assert (config.algorithm.surrogate.width, config.algorithm.epochs) == (0.3, 1)
    assert (config.data.limit, config.run.max_steps) == (40, 4)
    config, _ = config_from_python("dapo", data="gsm8k", algorithm=GSPO, optimizer={"lr": np.float64(1e-4)})
    assert (config.algorithm.surrogate, config.data.name, config.optimizer.lr) == (GSPO(), "gsm8k", 1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"reward": lambda completions: [1.0]}, "define it at the top of a module"),
        ({"reward": FormatReward().check_problems}, "define it at the top of a module"),
        ({"rollout": 4}, "rollout must be a dict of its switches, got 4"),
        ({"algorithm": Forgetful(0.3)}, "Forgetful does not keep its argument width: make it a dataclass"),
    ],
)
def test_wrong_settings_raise(here, call, message):
    with pytest.raises(ValueError, match=message):
        train(**call)
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("package", "call"), [("peft", {"model": {"lora": {"rank": 2}}}), ("wandb", {"run": {"tracker": "wandb"}})]
)
def test_a_missing_package_is_named_before_anything_is_written(here, monkeypatch, package, call):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"{package}.*pip install 'pspo"):
        train(**call)
    assert not list(here.iterdir())


VARIABLES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "TRANSFORMERS_SDPA_FORCE_GQA")


def process_state() -> dict[str, object]:
    return {
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "torch": torch.get_rng_state().tolist(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fills": torch.utils.deterministic.fill_uninitialized_memory,
        "threads": torch.get_num_threads(),
        "variables": [os.environ.get(name) for name in VARIABLES],
    }


def fails(completions):
    raise KeyError("no such key")


def test_a_call_leaves_the_process_as_it_was(here, monkeypatch, request):
    """Also one that fails. A small model computes by one thread."""
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for name in ("OMP_NUM_THREADS", *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    within = []
    before = process_state()
    call = {"data": {"limit": 40}, "rollout": SWITCHES}
    train(run=RUN | {"max_steps": 2}, on_rollout=lambda *_: within.append(process_state()), **call)
    assert process_state() == before
    with pytest.raises(RunFailed):
        train(run=RUN, reward=fails, **call)
    assert process_state() == before
    assert not [name for name in before if within[0][name] == before[name]]
    assert within[0]["threads"] == 1


def test_a_section_may_be_replaced_after_the_configuration_is_made():
    engine = RolloutConfig(engine="my.Engine")
    for config in (TrainConfig(), config_from_python()[0]):
        drawn = replace(config, rollout=engine)
        assert [type(term) for term in drawn.loss_terms] == [SamplerCorrection]
        assert replace(drawn, rollout=config.rollout).loss_terms == []
        for changed in ({"environment": "my.Game"}, {"lag": 1}):  # ratios are to the policy's or the engine's log-probs
            assert replace(drawn, rollout=replace(engine, **changed)).loss_terms == []
        assert replace(drawn, algorithm=AlgorithmConfig(correction="none")).loss_terms == []
        later = replace(drawn, algorithm=replace(drawn.algorithm, beta=0.1))
        assert later.correction == "token_truncate"
        assert config.correction == "none"
    assert config_from_python(rollout={"engine": "my.Engine"})[1]["algorithm"]["correction"] == "token_truncate"


def test_sampling_has_the_commands_defaults(tiny_model):
    config = TrainConfig().rollout
    sampling = Sampling([1], 0)
    for name in ("temperature", "top_p", "top_k", "max_completion_tokens"):
        assert getattr(sampling, name) == getattr(config, name)
    assert sampling.max_rows == default_max_rows(torch.device("cpu"))


# ---------------------------------------------------------------- examples/

FILE = Path(__file__).parents[1] / "examples" / "grpo.py"


def test_grpo_in_one_file_is_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(pspo.tasks.datasets.GENERATED_SIZES, "train", 200)  # 10,000 take seconds
    source = FILE.read_text(encoding="utf-8")
    specification = importlib.util.spec_from_file_location("grpo", FILE)
    grpo = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(grpo)
    ours = grpo.train(steps=4, seed=3).state_dict()

    (switches,) = re.findall(r"python -m pspo\.train (.*?)\n\n", source, re.DOTALL)
    own = ["--run.max_steps=4", "--run.seed=3", "--run.test_limit=0", "--run.quiet", f"--run.output_dir={tmp_path}/run"]
    main([*shlex.split(switches.replace("\\\n", "")), *own])
    theirs = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all(torch.equal(ours[name], weights) for name, weights in theirs.items())
    untrained = load_file(ASSETS / "tiny-base" / "model.safetensors")
    assert not torch.equal(ours["model.norm.weight"], untrained["model.norm.weight"])


@pytest.mark.parametrize(("completion", "reward"), [
    ("So 16 / 2 = 7, no: 9 * 9", 1), ("2 + 3 * 2", 1), ("8", 0), ("it is 1 + 1, or 12 - 4", 0), ("8 / 0", 0),
    ("9**9**9**9", 0), ("__import__('os') + 8", 0), ("1 + " * 100_000 + "1", 0),
])  # fmt: skip
def test_an_expression_is_worth_its_value(completion, reward):
    assert solves([completion], [Problem("", Fraction(8))]) == [reward]


@pytest.mark.nightly
def test_letters(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(FILE.with_name("letters.ipynb"), as_version=4)
    learned = "assert summary['after']['mean_reward_ci95'][0] > summary['before']['mean_reward_ci95'][1], summary"
    notebook.cells.append(nbformat.v4.new_code_cell(learned))
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": tmp_path}}).execute()
    (train,) = (cell.outputs for cell in notebook.cells if "pspo.train(" in cell.source)
    printed = "".join(output.text for output in train if output.get("name") == "stdout")
    assert len(re.findall(r"\d\.\d\d ", printed)) == 30  # the mean reward of every rollout
