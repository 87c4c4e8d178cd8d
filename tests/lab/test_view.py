"""The page of `pspo view`: its numbers are the parquet's and the trainer's; nothing that a model wrote can run."""

import base64
import gzip
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from pspo.files import append_jsonl, read_json, read_jsonl
from pspo.train import main as train
from pspo_lab.report_command import main as report
from pspo_lab.view_command import main as view
from pspo_lab.view_command import make_page

HOSTILE = [
    "</script><script>document.body.dataset.hacked = 1</script>",
    "<img src=x onerror='document.body.dataset.hacked = 1'>",
    "]]> --> {{ 7 * 7 }} {% raw %} &lt; \u2028\u2029",
    "\ud800 alone",
    "\u202eright to left\u2066",
    "\x1b[2J\x1b[31mred\x07\x00",
    "x" * 100_000,
]


def train_run(folder: Path) -> None:
    train([
        "--run.max_steps=8", "--rollout.prompts=4", "--rollout.max_completion_tokens=32", "--run.test_limit=24",
        "--run.validate_every=4", "--run.validation_limit=4", "--data.limit=64", "--algorithm.surrogate=Clip",
        "--optimizer.lr=3e-4", "--run.record_tokens=4", "--run.quiet", f"--run.output_dir={folder}",
    ])  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run, and a copy of it with another seed and half of its rewards."""
    folder = tmp_path_factory.mktemp("view")
    train_run(folder / "seed-0")
    copy = Path(shutil.copytree(folder / "seed-0", folder / "seed-1"))
    config = yaml.safe_load((copy / "config.yaml").read_text())
    (copy / "config.yaml").write_text(yaml.safe_dump(config | {"run": config["run"] | {"seed": 1}}, sort_keys=False))
    text = (copy / "metrics.jsonl").read_text()
    halved = re.sub(r'"reward": ([\d.]+)', lambda match: f'"reward": {float(match[1]) / 2}', text)
    (copy / "metrics.jsonl").write_text(halved)
    return folder


def data_of(page: str) -> dict:
    (packed,) = re.findall(r'id="data">([\w+/=]+)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


@pytest.fixture(scope="module")
def both(runs) -> dict:
    """The data of a page of the two runs."""
    return data_of(make_page([runs]))


@pytest.fixture(scope="module")
def first(runs) -> dict:
    return data_of(make_page([runs / "seed-0"]))


def numbers(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")


def recorded(data: dict) -> list[tuple[dict, dict]]:
    return [(group, one) for group in data["groups"] for one in group["completions"] if one["recorded"]]


def test_tokens_are_those_of_the_parquet_and_weights_those_of_the_trainer(runs, first):
    table = pd.read_parquet(runs / "seed-0/tokens.parquet")
    seen = 0
    for group, one in recorded(first):
        for visit in one["recorded"]["visits"]:
            own = table[(table.step == visit["step"]) & (table.problem == group["problem"])]
            own = own[own["sample"] == group["completions"].index(one)].sort_values("position")
            seen += len(own)
            for name in ("logprob", "entropy"):
                np.testing.assert_array_equal(numbers(visit[name]), own[name].to_numpy())
            np.testing.assert_array_equal(numbers(one["recorded"]["old_logprob"]), own["old_logprob"].to_numpy())
            np.testing.assert_array_equal(numbers(visit["weights"][""]), own["weight"].to_numpy())
            np.testing.assert_array_equal(numbers(visit["weights"]["Clip"]), own["weight"].to_numpy())  # the run's own
            assert one["recorded"]["text"] == own["text"].tolist()
            assert one["advantage"] == pytest.approx(own["advantage"].iloc[0], abs=1e-6)
    assert seen == len(table) > 0


def test_curves_are_means_over_seeds(runs, both):
    (curve,) = both["curves"]
    assert curve["seeds"] == 2
    assert curve["low"] == {}  # two seeds have no interval
    lines = [pd.DataFrame(read_jsonl(runs / f"seed-{seed}" / "metrics.jsonl")).set_index("step") for seed in (0, 1)]
    steps = numbers(curve["step"])
    assert steps.tolist() == [0, *lines[0].index]
    expected = (lines[0]["reward"] + lines[1]["reward"]) / 2
    np.testing.assert_allclose(numbers(curve["mean"]["reward"])[1:], expected, rtol=1e-6)
    summaries = [json.loads((runs / f"seed-{seed}/summary.json").read_text()) for seed in (0, 1)]
    first = sum(summary["validation"]["untrained"]["validation_reward"] for summary in summaries) / 2
    assert numbers(curve["mean"]["validation_reward"])[0] == pytest.approx(first)


def test_what_a_run_of_another_trainer_lacks_is_left_out(runs, tmp_path):
    config = {"trainer": "trl", "algorithm": {"surrogate": {"class_path": "pspo.losses.Clip"}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    for name, columns in (("metrics", ("step", "reward")), ("samples", ("step", "problem", "sample", "completion"))):
        records = read_jsonl(runs / f"seed-0/{name}.jsonl")
        append_jsonl(tmp_path / f"{name}.jsonl", *({key: record[key] for key in columns} for record in records))
    table = pd.read_parquet(runs / "seed-0/tokens.parquet")
    (tmp_path / "tokens.parquet").mkdir()
    for step, rollout in table.groupby((table["step"] + 1) // 2 * 2):  # two steps in each
        kept = rollout.drop(columns=["entropy", "token_id", "weight"])
        kept.to_parquet(tmp_path / f"tokens.parquet/step-{step}.parquet")
    data = data_of(make_page([tmp_path]))
    assert data["runs"][0]["about"] == f"unknown on {tmp_path} · Clip · seed 0 · step 8"
    assert all(len(group["completions"]) == 4 for group in data["groups"])
    weights = [numbers(visit["weights"]["Clip"]) for _, one in recorded(data) for visit in one["recorded"]["visits"]]
    assert sorted(np.concatenate(weights)) == sorted(table["weight"])
    assert recorded(data)[0][1]["recorded"]["visits"][0].keys() == {"step", "weights", "logprob"}
    report([str(tmp_path), "--output_dir", str(tmp_path / "report")])
    assert "in no table: Clip, seed 0" in (tmp_path / "report/report.txt").read_text()


def test_of_a_problem_that_comes_twice_in_a_rollout_each_copy_has_its_own_tokens(runs, tmp_path, capsys):
    run = Path(shutil.copytree(runs / "seed-0", tmp_path / "run"))
    last = read_jsonl(run / "samples.jsonl")[-1]
    copies = [last | {"sample": 0, "step": 8, "problem": 0, "completion": "a d"} for _ in range(3)]
    (run / "samples.jsonl").write_text("".join(json.dumps(copy) + "\n" for copy in copies))
    (file,) = (run / "tokens.parquet").glob("step-*8.parquet")
    rows = [{"step": step, "row": row, "problem": 0, "sample": 0, "position": i, "text": text, "logprob": -step}
            for step, row in ((6, 2), (7, 1), (8, 2)) for i, text in enumerate("ad")]  # fmt: skip
    table = pd.DataFrame(rows)
    table.to_parquet(file)
    groups = data_of(make_page([run]))["groups"]
    visits = [[visit["step"] for visit in (one["recorded"] or {"visits": []})["visits"]]
              for group in groups for one in group["completions"]]  # fmt: skip
    assert visits == [[], [7], [6, 8]]
    for damaged, reason in ((table.drop(columns="row"), "non-finite"), (table.assign(row=3), "lacks completions")):
        damaged.to_parquet(file)
        assert not recorded(data_of(make_page([run])))
        assert reason in capsys.readouterr().err


def test_the_tests_of_a_run_are_sorted_by_reward(runs, first):
    (tests,) = first["tests"]
    old, new = ([record["reward"] for record in read_jsonl(runs / f"seed-0/test-{when}.jsonl")]
                for when in ("before", "after"))  # fmt: skip
    moved = np.subtract(new, old)
    shown = [change["after"]["value"] - change["before"]["value"] for change in tests["shown"]]
    assert shown == sorted(moved[moved != 0]) != []


def test_each_run_has_a_name_a_row_and_its_reward_first(runs, both):
    assert [run["name"] for run in both["runs"]] == ["Clip, seed 0", "Clip, seed 1"]
    for seed, run in enumerate(both["runs"]):
        tests = read_json(runs / f"seed-{seed}/summary.json")
        row = run["row"]
        assert (row["method"], row["seed"], row["step"]) == ("Clip", seed, 8)
        for when in ("before", "after"):
            assert row[f"test reward {when}"] == tests[when]["mean_reward"]
            assert row[f"test accuracy {when}"] == tests[when]["accuracy"]
        assert row["reward"] == read_jsonl(runs / f"seed-{seed}/metrics.jsonl")[-1]["reward"]


def test_what_a_model_wrote_is_data(runs, tmp_path):
    run = Path(shutil.copytree(runs / "seed-0", tmp_path / "</title><b>run"))
    samples = read_jsonl(run / "samples.jsonl")
    pairs = zip(samples, HOSTILE, strict=False)
    lines = [sample | {"completion": text, "prompt": text, "gold": text} for sample, text in pairs]
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = make_page([run])
    assert "<b>run" not in page
    texts = [one["text"] for group in data_of(page)["groups"] for one in group["completions"]]
    assert texts[:4] == HOSTILE[:4]


def test_a_damaged_run_and_damaged_files_of_tokens_are_named_and_left_out(runs, tmp_path, capsys):
    shutil.copytree(runs, tmp_path / "runs")
    damaged, mistyped, *others = sorted((tmp_path / "runs/seed-0/tokens.parquet").iterdir())
    damaged.write_bytes(b"garbage")
    pd.read_parquet(mistyped).assign(position="first").to_parquet(mistyped)
    (tmp_path / "runs/seed-1/test-after.jsonl").write_text("{}\n")
    data = data_of(make_page([tmp_path / "runs"]))
    assert [run["name"] for run in data["runs"]] == ["Clip, seed 0"]
    assert len(recorded(data)) > 0 < len(others)
    for missing in ("runs/seed-0/metrics.jsonl", "runs/typo"):
        with pytest.raises(SystemExit, match="2"):
            view([str(tmp_path / missing)])
    assert not (tmp_path / "runs/typo").exists()
    printed = capsys.readouterr().err
    assert "seed-1: damaged (KeyError: 'reward')" in printed
    assert all(f"{file} is not what a run records" in printed for file in (damaged, mistyped))


def test_a_page_imports_nothing_that_a_run_names(runs, here):
    shutil.copytree(runs / "seed-0", "run")
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    config["algorithm"]["surrogate"] = {"class_path": "os.system", "init_args": {"command": "touch executed"}}
    Path("run/config.yaml").write_text(yaml.safe_dump(config))
    assert data_of(make_page([Path("run")]))["runs"][0]["curve"] is None
    assert not Path("executed").exists()
