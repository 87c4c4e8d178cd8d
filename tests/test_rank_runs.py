"""Whole runs of two ranks and their faults, in both strategies. On the CPU, through gloo."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from processes import TINY, assert_same, before, contents, kill_at_file_event, one_layer, ranks, send

import pspo.evaluate.__main__
import pspo.evaluate.evaluation
from pspo import distributed as dist
from pspo.endings import exit_codes, fail_together, user_errors
from pspo.files import checkpoints, write_errors
from pspo.rollout.engine import EngineError, EngineSampler
from pspo.rollout.source import Ahead, Now
from pspo.run.checkpointer import Checkpointer
from pspo.train import main

if not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

STRATEGIES = ("ddp", "fsdp2")
SMALL = (
    *TINY, "--run.validate_every=4", "--run.validation_limit=4", "--run.test_limit=3", "--run.save_every=2",
    "--data.limit=9", "--run.keep=9", "--optimizer.lr=1e-4",
    "--reward.functions=[{class_path: SoftOverlong, init_args: {buffer: 8}}]",  # any model's lengths differ
)  # fmt: skip


def train(output: Path, strategy: str, *args: str, number: int = 2, fault: Callable[[], None] = lambda: None):
    """Exit codes of a run's ranks, each of which first prepares its fault."""
    switches = [*SMALL, f"--distributed.strategy={strategy}", f"--run.output_dir={output}", *args]

    def rank() -> None:
        fault()
        main(switches)

    return ranks(rank, number)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Path]:
    """By strategy, a run of two ranks that nothing happened to."""
    runs = {strategy: tmp_path_factory.mktemp("runs") / strategy for strategy in STRATEGIES}
    for strategy, run in runs.items():
        assert train(run, strategy) == [0, 0]
    return runs


def test_both_strategies_are_one_run(whole):
    """The first rollout is the same to the last token, and its steps to rounding."""
    ddp, fsdp2 = (contents(run) for run in whole.values())
    assert all(line["grad_norm"] > 0 for line in ddp["metrics.jsonl"])
    assert ddp["metrics.jsonl"][0] == pytest.approx(fsdp2["metrics.jsonl"][0], rel=1e-3, abs=1e-4)
    first = [json.loads(line) for line in ddp["samples.jsonl"].splitlines()[:8]]
    assert [json.loads(line) for line in fsdp2["samples.jsonl"].splitlines()[:8]] == first
    assert [sample["step"] for sample in first] == [2] * 8
    assert len({sample["prompt"] for sample in first}) == 2  # of both ranks' prompts
    for name in ("config.json", "generation_config.json"):
        assert ddp[f"final/{name}"] == fsdp2[f"final/{name}"]
    for run in whole.values():
        tokens = pd.read_parquet(run / "tokens.parquet")
        visits = tokens[["step", "problem", "sample", "position"]]
        assert not visits.duplicated().any()
        for row, sample in enumerate(first):
            rows = tokens[(tokens.problem == sample["problem"]) & (tokens["sample"] == sample["sample"])]
            assert set(rows.step) <= {1, 2}
            assert set(rows.row) <= {row}
            assert len(rows) in (0, 2 * sample["tokens"])  # every token at both steps, or a row without advantage
            assert len(rows) > 0 or sample["advantage"] == 0


@pytest.mark.slow
def test_torchrun_starts_ranks_of_which_one_talks(whole, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               f"--log-dir={tmp_path}", "-m", "pspo.train", *SMALL, "--distributed.strategy=ddp",
               f"--run.output_dir={tmp_path / 'run'}"]  # fmt: skip
    path = str(Path(__file__).parents[1])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"model   {one_layer()}") == done.stdout.count("greedy, held-out") == 1
    assert_same(whole["ddp"], tmp_path / "run")


STALE = ("--rollout.lag=1", "--rollout.resample=2")
ADAPTERS = ("--model.lora.rank=4", "--algorithm.beta=0.1")
STOP, KILL = partial(send, signal.SIGTERM), partial(send, signal.SIGKILL)
OWNERS = {"next": Now, "update": pspo.train, "save_snapshot": Checkpointer}
ENDS = [  # of a rank, with the run's further switches, and what it is about to do; all but the first nightly
    ("fsdp2", (), 1, "next", STOP),
    ("ddp", (), 1, "update", KILL),
    ("ddp", STALE, 1, "update", STOP),
    ("fsdp2", ADAPTERS, 1, "update", KILL),
    ("fsdp2", (), 0, "save_snapshot", partial(kill_at_file_event, 3)),
    ("fsdp2", (), 0, "save_snapshot", partial(kill_at_file_event, 12)),
    ("fsdp2", (), 1, "save_snapshot", KILL),
]


@pytest.mark.parametrize(
    ("strategy", "args", "rank", "function", "end"),
    [ENDS[0], *(pytest.param(*end, marks=pytest.mark.nightly) for end in ENDS[1:])],
)
def test_one_rank_that_is_killed_or_told_to_stop_ends_the_run_which_resumes_exactly(
    whole, tmp_path, capfd, strategy, args, rank, function, end
):
    expected, output = whole[strategy], tmp_path / "run"
    if args:
        expected = tmp_path / "whole"
        assert train(expected, strategy, *args) == [0, 0]

    def fault() -> None:
        if os.environ["RANK"] == str(rank):
            before(function, lambda *_: end(), OWNERS[function], nth=2)

    codes = train(output, strategy, *args, fault=fault)
    if end is STOP:
        assert codes == [75, 75]
        assert checkpoints(output)[0].name == ("step-000004" if function == "update" else "step-000002")
        assert "SIGTERM: stopping after this pass or update" in capfd.readouterr().err
    else:
        assert codes[0] != 0
        assert codes[rank] == -signal.SIGKILL
        assert function == "save_snapshot" or checkpoints(output)[0].name == "step-000002"
    assert train(output, strategy, *args) == [0, 0]
    assert_same(expected, output)


class FailsOnRank1(EngineSampler):
    def complete(self):
        self.asked = None
        if dist.rank() == 1:
            raise EngineError("the server is gone")
        return "rollout"


def test_a_drawing_ahead_that_fails_on_one_rank_is_given_up_by_all(capfd):
    def rank() -> None:
        dist.init("ddp")
        sampler = FailsOnRank1(None, None, None, asked=((), 2, None))
        source = Ahead(None, None, sampler, None, None, None, None, {})
        source.settle()
        assert sampler.drawn is None

    assert ranks(rank) == [0, 0]
    assert capfd.readouterr().err.count("the engine failed to draw ahead, and is asked again: the server is gone") == 1


def fails_on_rank_1(completions, step):
    """Lengths and a bit, until the file "broken" is there: then rank 1 raises at step 4, in rollouts of 4 rows."""
    if Path(os.environ["BROKEN"]).exists() and os.environ["RANK"] == "1" and step == 4 and len(completions) == 4:
        raise KeyError("on rank 1")
    return [len(text) + row % 3 for row, text in enumerate(completions)]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_a_reward_that_raises_on_one_rank_ends_all_saved(tmp_path, capfd, monkeypatch, strategy):
    monkeypatch.setenv("BROKEN", str(tmp_path / "broken"))
    args = ("--reward.functions=[test_rank_runs.fails_on_rank_1]", "--run.save_every=0", "--run.validate_every=0",
            "--run.test_limit=0")  # fmt: skip
    assert train(tmp_path / "whole", strategy, *args) == [0, 0]
    (tmp_path / "broken").touch()
    assert train(tmp_path / "run", strategy, *args) == [1, 1]
    assert capfd.readouterr().err.count("KeyError: 'on rank 1'") == 1
    assert checkpoints(tmp_path / "run")[0].name == "step-000004"
    (tmp_path / "broken").unlink()
    assert train(tmp_path / "run", strategy, *args) == [0, 0]
    shutil.rmtree(tmp_path / "run/checkpoints/step-000004")
    assert_same(tmp_path / "whole", tmp_path / "run")


def test_another_number_of_ranks_resumes(whole, tmp_path, capfd):
    """From the same weights and optimizer; the tokens drawn differ."""
    output = tmp_path / "run"
    shutil.copytree(whole["fsdp2"], output)
    (output / "summary.json").unlink()
    shutil.rmtree(output / "checkpoints/step-000006")
    assert train(output, "fsdp2", number=1) == [0]
    assert "2 ranks" in capfd.readouterr().err
    metrics, expected = (contents(run)["metrics.jsonl"] for run in (output, whole["fsdp2"]))
    assert metrics[:2] == expected[:2]
    assert (metrics[2]["step"], metrics[2]["lr"]) == (6, expected[2]["lr"])


def test_evaluation_uses_the_ranks(whole, tmp_path):
    command = [f"--model.name_or_path={whole['ddp'] / 'final'}", "--data.limit=12", "--eval.temperatures=[0.0,1.0]",
               "--eval.samples=2", "--eval.max_completion_tokens=16", "--eval.max_tokens=1000"]  # fmt: skip
    main, one, two = pspo.evaluate.__main__.main, tmp_path / "one", tmp_path / "two"

    def evaluate() -> None:
        before("complete", lambda *_: (tmp_path / f"rank-{dist.rank()}").touch(), pspo.evaluate.evaluation)
        main([*command, f"--run.output_dir={two}"])

    main([*command, f"--run.output_dir={one}"])
    assert ranks(evaluate) == [0, 0]
    assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0", "rank-1"}
    for name in ("results.json", "completions.jsonl"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


full_disk = write_errors(Path("out"))(Path("/proc/out").mkdir)


@pytest.mark.parametrize(("fails", "code"), [(full_disk, 1), (partial(int, "no number"), 2)])
def test_ranks_end_as_rank_0_does(capfd, fails, code):
    run_on_main = fail_together()(dist.run_on_main) if fails is full_disk else dist.run_on_main
    command = exit_codes("pspo")(user_errors("pspo")(run_on_main))
    assert ranks(lambda: dist.init("ddp") or command(fails)) == [code, code]
    assert "Traceback" not in capfd.readouterr().err
