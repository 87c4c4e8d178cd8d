"""Contents of the page as plain data: curves, groups, tokens under several surrogates, tests before and after."""

import base64
import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pyarrow import parquet
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pspo.cli.parse import make_config
from pspo.config import TrainConfig
from pspo.evaluate.statistics import as_text, measure_name
from pspo.files import DAMAGE, numbered, read_json, read_jsonl, step_of
from pspo.losses import Surrogate, token_weights
from pspo.tasks.problem import Messages, content_text
from pspo.token_table import COLUMNS, TOKENS
from pspo_lab import settings
from pspo_lab.figures import method_colours
from pspo_lab.findings import find
from pspo_lab.identities import RATIOS, make_surrogate, token_curve
from pspo_lab.labels import differing, short_names
from pspo_lab.runs import LabRun, Runs, skip_unreadable, warn
from pspo_lab.tables import mean_over_seeds

TOKEN_TYPES = COLUMNS | {"token_id": float}  # which a run of another trainer may lack
NEWEST = ("reward", "validation_reward", "entropy", "kl_old_new", "truncated_share")  # in the table of runs
MEASURES = ("mean_reward", "accuracy", "gold_anywhere")
MOST_TOKENS = 24_000  # visits to tokens on a page, of all its runs together; beyond, rollouts are left out evenly
MOST_SAMPLES = 8_000  # completions on it, of each run
MOST_CHANGES = 200  # test problems that came out differently

Record = dict[str, Any]


def page_data(runs: Runs, surrogates: dict[str, Surrogate]) -> Record:
    """Everything on the page; ``surrogates`` by the name they are shown by, each run's is added."""
    names = short_names(runs.configs)
    varied = {switch: names[switch] for switch in differing(runs.configs)}
    pages = {}
    tests = []
    for name in runs.configs.index:
        run = runs.folders[name]
        with skip_unreadable(run.folder):
            page = describe_run(run, runs.label[name])
            values = {short: run.switches.get(switch) for switch, short in varied.items()}
            page["row"] = {"method": page["method"]} | values | last_metrics(run)
            tests.append(changed_tests(run.folder))
            pages[run.folder] = page
    return {
        "curves": list(setting_curves(runs)),
        "runs": list(pages.values()),
        "surrogates": {name: surrogate_curve(surrogate) for name, surrogate in surrogates.items()},
        **recorded_groups(list(pages), surrogates),
        "tests": tests,
    }


# Curves


def setting_curves(runs: Runs) -> Iterator[Record]:
    """By setting, every metric's mean over seeds at each step, and from three seeds on the ends of its 95% interval."""
    numbers = runs.rollouts().set_index(["run", "step"]).select_dtypes("number")
    setting = settings.setting_numbers(runs.configs)
    method = settings.methods(runs.configs)
    colours = method_colours(method)
    values = numbers.melt(var_name="column", ignore_index=False).dropna(subset="value").reset_index()
    means = mean_over_seeds(values.assign(row=values["run"].map(setting)), by=["row", "column", "step"])
    for number, cells in means.groupby("row"):
        members = setting.index[setting == number]
        sides = {side: cells.pivot(index="step", columns="column", values=side) for side in ("mean", "low", "high")}
        yield {
            "label": runs.label[members[0]],
            "color": colours[method[members[0]]],
            "setting": number,
            "seeds": len(members),
            "step": encode_floats(sides["mean"].index),
            **{side: encode_columns(table, list(table)) for side, table in sides.items()},
        }


def encode_floats(values: Any) -> str:
    """Numbers as the base64 text of float32, which the page reads without rounding."""
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()


# Runs


def describe_run(run: LabRun, label: str) -> Record:
    """A run's name, its ends, its best model, and what the doctor finds."""
    switches = run.switches
    best = run.folder / "best" / "validation.json"
    seed = switches[settings.SEED]
    method = str(switches[settings.SURROGATE]).rpartition(".")[2]
    progress = f"step {run.metrics['step'].max()}"
    if switches.get("run.max_steps"):
        progress += f" of {switches['run.max_steps']}"
    about = [f"{Path(switches[settings.MODEL]).name} on {switches[settings.DATA]}", method, f"seed {seed}", progress]
    before, after = (run.summary.get(stage) or {} for stage in ("before", "after"))
    for name in [name for name in MEASURES if name in before and name in after]:
        about.append(f"{measure_name(name)} {as_text(name, before[name])} before, {as_text(name, after[name])} after")
    return {
        "name": f"{label}, seed {seed}",
        "label": label,
        "seed": seed,
        "method": method,
        "about": " · ".join(about),
        "curve": surrogate_curve(make_surrogate(switches)),
        "best_step": read_json(best)["step"] if best.is_file() else run.summary.get("best_step"),
        "findings": [finding._asdict() for finding in find(run.metrics, switches, run.summary)],
    }


def last_metrics(run: LabRun) -> Record:
    """Numbers of a run for the table of runs: its seed, its newest metrics, its test after training, its speed."""
    newest = run.metrics.ffill().iloc[-1]
    after = run.summary.get("after", {})
    seconds = run.metrics.filter(like="seconds/").sum().sum()
    row = {"seed": run.switches[settings.SEED], "step": int(newest["step"])}
    row |= {name: newest.get(name) for name in NEWEST}
    row |= {f"test {measure_name(name)}": after.get(name) for name in MEASURES}
    is_whole = seconds > 0 and not run.switches.get("run.fork_from")  # a fork counts its parent's tokens
    return row | {"tokens/s": newest.get("tokens", np.nan) / seconds if is_whole else None}


def changed_tests(folder: Path) -> Record:
    """Test problems whose completion changed its reward in training, how many, and the first: the worst."""
    changes = []
    for old, new in zip(*(read_jsonl(folder / f"test-{when}.jsonl") for when in ("before", "after")), strict=False):
        if None not in (old["reward"], new["reward"]) and old["reward"] != new["reward"]:
            sides = (("before", old), ("after", new))
            shown = {when: {"text": one["completion"], "value": float(one["reward"])} for when, one in sides}
            changes.append({"prompt": prompt_text(old["prompt"]), "gold": old["gold"], **shown})
    changes.sort(key=lambda change: change["after"]["value"] - change["before"]["value"])
    worse = sum(change["after"]["value"] < change["before"]["value"] for change in changes)
    return {"worse": worse, "better": len(changes) - worse, "shown": changes[:MOST_CHANGES]}


def prompt_text(prompt: str | Messages) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{turn['role']}: {content_text(turn)}" for turn in prompt)


# Groups and tokens


def recorded_groups(folders: Sequence[Path], surrogates: dict[str, Surrogate]) -> Record:
    """The recorded groups of all runs, with the visits to their tokens; beyond `MOST_TOKENS` some rollouts' only."""
    files = [{step_of(file): file for file in numbered(folder / TOKENS, ".parquet")} for folder in folders]
    visits = 0
    for file in (file for run_files in files for file in run_files.values()):
        with contextlib.suppress(OSError, ValueError):  # `add_visits` names a damaged file
            visits += parquet.read_metadata(file).num_rows
    groups = []
    left_out = 0
    for run, (folder, token_files) in enumerate(zip(folders, files, strict=True)):
        with skip_unreadable(folder):
            samples = read_jsonl(folder / "samples.jsonl")
            steps = sorted({sample["step"] for sample in samples})
            every = max(1, math.ceil(visits / MOST_TOKENS), math.ceil(len(samples) / MOST_SAMPLES))
            on_page = {*steps[::every], *steps[-1:]}
            left_out += len(steps) - len(on_page)
            for step, step_samples in groupby(samples, key=lambda sample: sample["step"]):
                if step in on_page:
                    step_groups = make_groups(run, list(step_samples))
                    if step in token_files:
                        add_visits(step_groups, token_files[step], surrogates)
                    groups += step_groups
    return {"groups": groups, "left_out": left_out}


def make_groups(run: int, samples: Sequence[Record]) -> list[Record]:
    """The groups of a rollout from its lines of ``samples.jsonl``; None for what these do not have."""
    groups = []
    starts = [i for i, sample in enumerate(samples) if sample["sample"] == 0]
    for start, end in pairwise([*starts, len(samples)]):
        first = samples[start]
        completions = []
        for sample in samples[start:end]:
            values = {name: sample.get(name) for name in ("sample", "reward", "advantage", "tokens", "truncated")}
            text = sample.get("completion", "")
            completions.append(values | {"rewards": sample.get("rewards", {}), "text": text, "recorded": None})
        groups.append({
            "run": run,
            "step": first["step"],
            "problem": first["problem"],
            "prompt": prompt_text(first.get("prompt", "")),
            "gold": first.get("gold"),
            "completions": completions,
        })  # fmt: skip
    return groups


def add_visits(groups: Sequence[Record], file: Path, surrogates: dict[str, Surrogate]) -> None:
    """Add to a rollout's completions the visits to their tokens that its file has; the run's weights are named ""."""
    completions = [one for group in groups for one in group["completions"]]
    try:
        table = pd.read_parquet(file).reindex(columns=[*TOKEN_TYPES]).astype(TOKEN_TYPES)
        if table["row"].max() >= len(completions):
            raise ValueError("samples.jsonl lacks completions whose tokens it has")
    except (OSError, ValueError, *DAMAGE) as error:
        warn(f"{file} is not what a run records ({error}); left out")
        return
    table = table.sort_values(["step", "row", "position"], ignore_index=True)
    table["visit"] = table.groupby(["step", "row"]).ngroup()
    if table[["logprob", "old_logprob", "advantage"]].notna().any().all():  # none if no optimizer step visited it
        for name, surrogate in surrogates.items():
            steps = [surrogate_weights(surrogate.bind_step(step - 1), visit) for step, visit in table.groupby("step")]
            table[f"weight {name}"] = pd.concat(steps)
    for (step, row), visit in table.groupby(["step", "row"]):
        if completions[row]["recorded"] is None:
            completions[row]["recorded"] = {
                "text": visit["text"].fillna("").tolist(),
                "id": visit["token_id"].tolist(),
                "position": visit["position"].tolist(),
                "visits": [],
                **encode_columns(visit, ("old_logprob", "sampler_logprob", "reference_logprob")),
            }
        weights = encode_columns(visit, [f"weight {name}" for name in surrogates] + ["weight"])
        completions[row]["recorded"]["visits"].append({
            "step": int(step),
            "weights": {name.removeprefix("weight").strip(): values for name, values in weights.items()},
            **encode_columns(visit, ("logprob", "entropy")),
        })  # fmt: skip


def encode_columns(table: pd.DataFrame, names: Sequence[str]) -> dict[str, str]:
    """The columns that have values, as `encode_floats` writes them."""
    return {name: encode_floats(table[name]) for name in names if name in table and table[name].notna().any()}


def surrogate_weights(surrogate: Callable[..., Tensor], table: pd.DataFrame) -> pd.Series:
    """`token_weights` of a surrogate at the recorded tokens, by the code that trains."""
    lengths = table.groupby("visit").size().tolist()
    names = ("logprob", "old_logprob", "advantage")
    values = [pad_sequence(torch.tensor(table[name].to_numpy()).split(lengths), batch_first=True) for name in names]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # (B, T)
    return pd.Series(token_weights(surrogate, *values, mask)[mask].numpy(), table.index)


# Surrogates


def surrogate_curve(surrogate: Surrogate | None) -> Record | None:
    """dL/dlogprob against the ratio for advantages 1 and -1; None if it depends on the rest of a completion."""
    above, below = (token_curve(surrogate, advantage) if surrogate else None for advantage in (1.0, -1.0))
    if above is None or below is None:
        return None
    return {"ratio": encode_floats(RATIOS), "above": encode_floats(above), "below": encode_floats(below)}


def parse_surrogate(text: str) -> Surrogate:
    """A surrogate from ``PSPO``, ``Clip(epsilon=0.1)`` or ``my_loss.SoftClip(width=2)``; ValueError if it is none."""
    match = re.fullmatch(r"([\w.]+)(?:\((.*)\))?", text)
    if match is None:
        raise ValueError(f"--surrogates {text}: write Name or 'Name(parameter=1.0)'")
    arguments = [part.strip() for part in (match[2] or "").split(",") if part.strip()]
    words = [f"--algorithm.surrogate={match[1]}", *(f"--algorithm.surrogate.{part}" for part in arguments)]
    return make_config(TrainConfig, "pspo view", words, {})[0].algorithm.surrogate
