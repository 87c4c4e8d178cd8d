"""Numbers gone bad and models that bring code, through the command: no weight and no checkpoint meets them."""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from processes import run_command
from safetensors.torch import load_file

import pspo.train
from pspo.config import TrainConfig
from pspo.losses import NoClip
from pspo.model import ASSETS
from pspo.rollout import Rollout, group_relative_advantages
from pspo.run.checkpoint import RunFailed, checkpoints
from pspo.run.cli import parse
from pspo.run.prepare import prepare
from pspo.run.state import rollout_metrics
from pspo.tasks import Reward

TINY = (
    "--rollout.prompts=2", "--rollout.max_completion_tokens=8", "--rollout.temperature=1", "--run.max_steps=6",
    "--run.validate_every=0", "--run.test_limit=0", "--run.save_every=1", "--data.limit=5", "--optimizer.lr=1e-3",
)  # fmt: skip


@dataclass(frozen=True)
class Broken(NoClip):
    kind: str = "nan"

    def __call__(self, logprobs, old_logprobs, advantages, mask):
        return super().__call__(logprobs, old_logprobs, advantages, mask) * float(self.kind)


class Length(Reward):
    def __call__(self, completions, problems):
        return [len(text) + row % 3 for row, text in enumerate(completions)]  # never all the same


@dataclass(frozen=True)
class Bad(Length):
    how: str
    call: int = 2

    def __call__(self, completions, problems):
        calls = Path("calls")
        n = int(calls.read_text()) + 1 if calls.exists() else 1
        calls.write_text(str(n))
        values = super().__call__(completions, problems)
        if n != self.call:
            return values
        if self.how == "raises":
            raise KeyError("no such key")
        if self.how == "hangs":
            time.sleep(60)
        bad = {"nan": [math.nan, *values[1:]], "none": [None, *values[1:]], "short": values[:-1], "nothing": None}
        return bad[self.how]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(*args: str) -> int:
    return run_command(pspo.train.main, *TINY, "--run.output_dir=out", *args)


def metrics() -> list[dict]:
    return [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]


def start() -> dict[str, torch.Tensor]:
    return load_file(ASSETS / "tiny-base/model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name].float()) for name in one)


# --- optimizer steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_steps_gone_bad_in_a_row_end_the_run_and_leave_its_last_good_checkpoint(capsys, kind):
    args = ("--reward.functions=[test_faults.Length]", "--algorithm.surrogate=test_faults.Broken",
            f"--algorithm.surrogate.kind={kind}", "--optimizer.max_skipped=3")  # fmt: skip
    assert train(*args) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert "3 optimizer steps in a row were skipped" in err
    assert "out/checkpoints/step-000002" in err
    assert [line["steps_skipped"] for line in metrics()] == [2, 2]
    assert same(load_file("out/checkpoints/step-000002/model.safetensors"), start())
    assert train(*args) == 1  # the two skipped before the checkpoint count on
    assert [line["step"] for line in metrics()] == [2, 4]


def test_a_good_step_in_between_starts_the_count_again(monkeypatch):
    calls, clip = [], torch.nn.utils.clip_grad_norm_

    def broken(*args):
        calls.append(clip(*args))
        return calls[-1] if len(calls) == 3 else calls[-1] * math.nan

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", broken)
    assert train("--reward.functions=[test_faults.Length]", "--algorithm.epochs=1", "--optimizer.max_skipped=3",
                 "--run.max_steps=8", "--run.keep=8") == 1  # fmt: skip
    assert [line["steps_skipped"] for line in metrics()] == [1, 1, 0, 1, 1, 1]
    two, three, five = (load_file(f"out/checkpoints/step-00000{n}/model.safetensors") for n in (2, 3, 5))
    assert same(two, start())
    assert not same(three, start())
    assert same(three, five)


def test_weights_that_are_not_finite_are_not_saved():
    run = prepare(*parse(TrainConfig, "", [*TINY, "--run.output_dir=out"]))
    run.start()
    run.save_checkpoint()
    next(run.learner.policy.parameters()).data[0, 0] = math.inf
    run.learner.steps = 2
    with pytest.raises(RunFailed, match="step 2"):
        run.save_checkpoint()
    assert [folder.name for folder in checkpoints(Path("out"))] == ["step-000000"]


# --- rewards ----------------------------------------------------------------------------------------------------------

BAD = {  # how, and what is raised
    "raises": (KeyError, "no such key"),
    "hangs": (TimeoutError, "--reward.timeout 0.3"),
    "short": (ValueError, "reward Bad returned 7 values"),
    "nothing": (ValueError, "reward Bad returned None"),
    "nan": (ValueError, "reward Bad returned nan"),
    "none": (ValueError, "reward Bad returned None"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_reward_ends_the_run_or_counts_as_none(how):
    kind, message = BAD[how]
    args = ["--reward.functions=[test_faults.Bad]", f"--reward.functions.how={how}", "--reward.timeout=0.3"]
    began = time.monotonic()
    with pytest.raises(kind, match=message):  # main lets it through: a traceback
        train(*args)
    assert time.monotonic() - began < 20
    assert [line["step"] for line in metrics()] == [2]
    assert checkpoints(Path("out"))[0].name == "step-000002"

    Path("calls").write_text("1")
    assert train(*args, "--reward.on_error=none") == 0  # resumes
    share = 1 / 8 if how in ("nan", "none") else 1.0
    first, second, third = metrics()
    assert [line["reward_unknown_share"] for line in (first, second, third)] == [0, share, 0]
    assert second["zero_advantage_share"] >= share
    assert second["step_skipped"] == 0
    assert (second["reward"] is None) == (share == 1)
    assert (second["grad_norm"] == 0) == (share == 1)


def test_unknown_rewards_leave_the_others_mean_alone():
    advantages = group_relative_advantages(torch.tensor([math.nan, 2, 2, 3, 6, 6, 0, 4]), 4)
    assert advantages.tolist() == pytest.approx([0, -1 / 3, -1 / 3, 2 / 3, 2, 2, -4, 0])


def test_a_rollout_whose_rewards_are_all_equal_moves_nothing_and_is_seen():
    assert train("--reward.weights=[0.0]", "--algorithm.advantage_scale=group") == 0
    for line in metrics():
        assert line["zero_advantage_share"] == 1
        assert line["reward_std"] == line["grad_norm"] == 0
    assert same(load_file("out/final/model.safetensors"), start())


def test_empty_and_truncated_completions_are_counted():
    rollout = Rollout(
        *[torch.zeros(4, 1)] * 3, torch.ones(4, 1), torch.tensor([True, True, False, False]), ["", " \n", "a", "b c"]
    )
    seen = rollout_metrics(rollout, [0.0, 1.0, math.nan, 0.5], {"A": [math.nan] * 4}, torch.zeros(4))
    assert (seen["empty_share"], seen["truncated_share"], seen["reward_unknown_share"]) == (0.5, 0.5, 0.25)
    assert seen["reward"] == 0.5
    assert math.isnan(seen["reward/A"])


# --- models that bring code ------------------------------------------------------------------------------------------


class Payload:
    """Creates a file when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def needs_remote_code(folder: Path) -> None:
    auto_map = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({"auto_map": auto_map, "model_type": "own"}))
    (folder / "own.py").write_text("from pathlib import Path\nPath('executed').touch()\n")


def holds_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Payload()}, folder / "pytorch_model.bin")


def has_an_unsafe_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (needs_remote_code, "--model.trust_remote_code"),
        (holds_a_pickle, "--model.name_or_path"),
        (has_an_unsafe_template, "chat template"),
    ],
)
def test_a_model_s_own_code_is_refused_in_one_line_and_not_run(capsys, model_folder, spoil, named):
    folder = model_folder()
    spoil(folder)
    assert train(f"--model.name_or_path={folder}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
    assert str(folder) in line
    assert not Path("executed").exists()
    assert not Path("out").exists()
