"""What the page shows, as plain data: curves, groups, tokens under several surrogates, tests before and after."""

import ast
import base64
import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pyarrow import parquet
from scipy.stats import t
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pspo import losses
from pspo.cli.files import read_json, read_jsonl
from pspo.losses import Surrogate, token_weights
from pspo.run.folders import numbered, step_of
from pspo.run.tokens import COLUMNS, FOLDER
from pspo.tasks.environment import import_path
from pspo_lab.findings import find
from pspo_lab.report.runs import (
    ARGUMENT,
    COLOURS,
    DATA,
    MODEL,
    OTHERS_COLOUR,
    SEED,
    SURROGATE,
    Runs,
    labels,
    methods,
    settings,
    skipping,
    untrained,
)
from pspo_lab.report.tables import GRADIENTS, SEEDS_FOR_AN_INTERVAL, noise_scale

SMOOTHED = 10  # measures of a gradient's size and noise, of which the curve of the noise scale has the means
MOST_TOKENS = 24_000  # visits to tokens on a page, of all its runs together; beyond, rollouts are left out evenly
MOST_SAMPLES = 8_000  # completions on it, of each run
LONGEST = 20_000  # characters of a completion on the page
MOST_CHANGES = 200  # test problems that came out differently
RATIOS = np.exp(np.linspace(-2.5, 2.5, 201))  # of the surrogates' curves

Record = dict[str, Any]


def page_data(runs: Runs, surrogates: dict[str, Surrogate]) -> Record:
    """Everything on the page; ``surrogates`` by the name they are shown by, each run's own is added."""
    label = labels(runs.configs)
    folders = [Path(run) for run in runs.configs.index if (Path(run) / "config.yaml").is_file()]
    shown = {}
    for folder in folders:
        with skipping(folder):
            shown[folder] = describe_run(folder, runs, label[str(folder)]), changed_tests(folder)
    return {
        "curves": list(curves(runs, label)),
        "runs": [run for run, _ in shown.values()],
        "surrogates": {name: surrogate_curve(surrogate) for name, surrogate in surrogates.items()},
        **recorded([*shown], surrogates),
        "tests": [tests for _, tests in shown.values()],
    }


# Curves


def curves(runs: Runs, label: pd.Series) -> Iterator[Record]:
    """By setting, every metric's mean over seeds at each step, and from three seeds on the ends of its 95% interval."""
    time = runs.metrics.filter(like="seconds/").sum(axis=1).groupby(runs.metrics["run"]).cumsum()
    measured = runs.metrics.reindex(columns=["run", *GRADIENTS]).dropna()
    measured = measured.groupby("run")[GRADIENTS].rolling(SMOOTHED, min_periods=1).mean().droplevel("run")
    metrics = runs.metrics.assign(time=time, noise_scale=noise_scale(measured))
    metrics = pd.concat([untrained(runs), metrics], ignore_index=True)
    setting, method = settings(runs.configs), methods(runs.configs)
    names = [name for name in metrics.select_dtypes("number") if name != "step" and metrics[name].notna().any()]
    groups = metrics.groupby([metrics["run"].map(setting).rename("setting"), "step"])[names]
    means, counts = groups.mean(), groups.count()
    half = groups.sem() * t.ppf(0.975, (counts - 1).where(counts >= SEEDS_FOR_AN_INTERVAL))
    for number, members in setting.groupby(setting, sort=False).groups.items():
        ends = {"mean": means, "low": means - half, "high": means + half}
        sides = {side: table.loc[number].dropna(axis=1, how="all") for side, table in ends.items()}
        yield {
            "label": label[members[0]],
            "color": COLOURS.get(method[members[0]], OTHERS_COLOUR),
            "setting": number,
            "seeds": len(members),
            "step": encoded(sides["mean"].index),
            **{side: {name: encoded(table[name]) for name in table} for side, table in sides.items()},
        }


def encoded(values: Any) -> str:
    """Numbers as the base64 text of float32, which the page reads without rounding."""
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()


# Runs


def describe_run(folder: Path, runs: Runs, label: str) -> Record:
    """A run's name, its ends, what happened on its way, and what the doctor finds."""
    config = runs.configs.loc[str(folder)]
    summary = read_json(folder / "summary.json") if (folder / "summary.json").exists() else {}
    metrics = runs.metrics[runs.metrics["run"] == str(folder)].dropna(axis=1, how="all")
    return {
        "name": folder.name,
        "label": label,
        "about": about(config, int(metrics["step"].max()), summary),
        "curve": own_curve(config),
        "events": sorted(events(folder, summary), key=lambda event: event["step"]),
        "findings": [finding._asdict() for finding in find(metrics, dict(config), summary)],
    }


def about(config: pd.Series, step: int, summary: Record) -> str:
    """A run in a line: model, data, method, how far it is, and its test."""
    parts = [f"{Path(config[MODEL]).name} on {config[DATA]}", config[SURROGATE].rpartition(".")[2]]
    parts += [f"seed {config[SEED]}", f"step {step} of {config['run.max_steps']}"]
    if before := summary.get("before"):
        name = "accuracy" if "accuracy" in before else "mean_reward"
        parts.append(f"{name.replace('_', ' ')} {before[name]:.3f} before, {summary['after'][name]:.3f} after")
    return " · ".join(parts)


def events(folder: Path, summary: Record) -> Iterator[Record]:
    """Best model, changed switches, forks, and starts after the first."""
    best = folder / "best" / "validation.json"
    step = read_json(best)["step"] if best.is_file() else summary.get("best_step")
    if step is not None:
        yield {"step": step, "kind": "best", "text": f"best model (step {step})"}
    for change in read_jsonl(folder / "changes.jsonl"):
        fork = change["switch"] == "run.fork_from"
        text = "forked" if fork else "--{switch} {old} -> {new}".format_map(change)
        yield {"step": change["step"], "kind": "fork" if fork else "change", "text": text}
    for last, start in pairwise(read_jsonl(folder / "starts.jsonl")):
        code = {name for name, digest in start.get("code", {}).items() if last.get("code", {}).get(name) != digest}
        changed = f", with other code: {', '.join(sorted(code))}" if code else ""
        yield {"step": start["step"], "kind": "resume", "text": f"resumed at step {start['step']}{changed}"}


def changed_tests(folder: Path) -> Record:
    """Test problems whose completion changed its worth in training, how many, and the first: the worst."""
    before, after = (read_jsonl(folder / f"test-{when}.jsonl") for when in ("before", "after"))
    if not before or not after:
        return {"worse": 0, "better": 0, "shown": []}
    key = "reward" if all(record["correct"] is None for record in before) else "correct"
    changes = []
    for old, new in zip(before, after, strict=False):
        if None not in (old[key], new[key]) and old[key] != new[key]:
            sides = {name: {"text": clipped(of["completion"]), "value": float(of[key])}
                     for name, of in (("before", old), ("after", new))}  # fmt: skip
            changes.append({"prompt": prompt_text(old["prompt"]), "gold": old["gold"], **sides})
    changes.sort(key=lambda change: change["after"]["value"] - change["before"]["value"])
    worse = sum(change["after"]["value"] < change["before"]["value"] for change in changes)
    return {"worse": worse, "better": len(changes) - worse, "shown": changes[:MOST_CHANGES]}


def prompt_text(prompt: str | list[dict[str, str]]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def clipped(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... {len(text) - LONGEST:,} characters more"


# Groups and tokens


def recorded(folders: Sequence[Path], surrogates: dict[str, Surrogate]) -> Record:
    """The recorded groups of all runs, with the visits to their tokens; beyond `MOST_TOKENS` some rollouts' only."""
    files = [{step_of(file): file for file in numbered(folder / FOLDER, ".parquet")} for folder in folders]
    visits = sum(parquet.read_metadata(file).num_rows for of_run in files for file in of_run.values())
    groups, left_out = [], 0
    for run, (folder, tokens) in enumerate(zip(folders, files, strict=True)):
        samples = [sample for sample in read_jsonl(folder / "samples.jsonl") if "sample" in sample]
        steps = sorted({sample["step"] for sample in samples})
        every = max(1, math.ceil(visits / MOST_TOKENS), math.ceil(len(samples) / MOST_SAMPLES))
        shown = {*steps[::every], *steps[-1:]}
        left_out += len(steps) - len(shown)
        starts = [i for i, sample in enumerate(samples) if sample["sample"] == 0]
        sequences = {step: read_sequences(tokens[step], surrogates) for step in shown & tokens.keys()}
        for start, end in pairwise([*starts, len(samples)]):
            first = samples[start]
            if first["step"] in shown:
                of_step = sequences.get(first["step"], {})
                completions = [completion(sample, of_step) for sample in samples[start:end]]
                about = {name: first[name] for name in ("gold", "step", "problem")}
                prompt = prompt_text(first["prompt"])
                groups.append({"run": run, "prompt": prompt, "completions": completions} | about)
    return {"groups": groups, "left_out": left_out}


def completion(sample: Record, sequences: dict[tuple[int, int], list[Record]]) -> Record:
    """A line of ``samples.jsonl``, with what optimizer steps computed at its tokens, None if none visited it."""
    known = sequences.get((sample["problem"], sample["sample"]))
    names = ("reward", "rewards", "advantage", "tokens", "truncated")
    text = clipped(sample["completion"])
    return {name: sample[name] for name in names} | {"text": text, "recorded": known.pop(0) if known else None}


def read_sequences(file: Path, surrogates: dict[str, Surrogate]) -> dict[tuple[int, int], list[Record]]:
    """By problem and sample the completions that a rollout's file has: their tokens, and every visit to them."""
    try:
        table = pd.read_parquet(file)[[*COLUMNS]]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{file} is not what a run records ({error})") from error
    keys = ["step", "problem", "sample"]
    begins = (table[keys] != table[keys].shift()).any(axis=1) | (table["position"] <= table["position"].shift())
    table["sequence"] = begins.cumsum()
    for name, surrogate in surrogates.items():
        at_steps = [surrogate_weights(surrogate.at(step - 1), visit) for step, visit in table.groupby("step")]
        table[f"weight {name}"] = pd.concat(at_steps)
    sequences = table.groupby("sequence")[keys].first()
    table["copy"] = table["sequence"].map(sequences.groupby(keys).cumcount())  # a problem may come twice in a rollout
    found: dict[tuple[int, int], list[Record]] = {}
    for (problem, sample, _), tokens in table.groupby(["problem", "sample", "copy"]):
        visits = [visit for _, visit in tokens.groupby("sequence")]
        first, shown = visits[0], [describe_visit(visit, surrogates) for visit in visits]
        known = {"text": list(first["text"]), "id": first["token_id"].tolist(), "position": first["position"].tolist()}
        logprobs = {name: encoded(first[name]) for name in ("old_logprob", "sampler_logprob", "reference_logprob")
                    if first[name].notna().any()}  # fmt: skip
        found.setdefault((problem, sample), []).append({**known, **logprobs, "visits": shown})
    return found


def describe_visit(visit: pd.DataFrame, surrogates: dict[str, Surrogate]) -> Record:
    """What an optimizer step computed at the tokens of a completion."""
    weights = {name: encoded(visit[f"weight {name}"]) for name in surrogates} | {"": encoded(visit["weight"])}
    values = {name: encoded(visit[name]) for name in ("logprob", "entropy")}
    return {"step": int(visit["step"].iloc[0]), "weights": weights} | values


def surrogate_weights(surrogate: Callable[..., Tensor], table: pd.DataFrame) -> pd.Series:
    """`token_weights` of a surrogate at the recorded tokens, by the code that trains."""
    lengths = table.groupby("sequence").size().tolist()
    names = ("logprob", "old_logprob", "advantage")
    values = [pad_sequence(torch.tensor(table[name].to_numpy()).split(lengths), batch_first=True) for name in names]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # (B, T)
    return pd.Series(token_weights(surrogate, *values, mask)[mask].numpy(), table.index)


# Surrogates


def surrogate_curve(surrogate: Surrogate) -> Record | None:
    """dL/dlogprob against the ratio for advantages 1 and -1; None if it depends on the rest of a completion."""
    if not surrogate.token_local:
        return None
    logprobs, ones = torch.tensor(np.log(RATIOS), dtype=torch.float32)[None], torch.ones(1, len(RATIOS))
    above, below = (token_weights(surrogate.at(0), logprobs, 0 * ones, a * ones, ones.bool())[0] for a in (1, -1))
    return {"ratio": encoded(RATIOS), "above": encoded(above), "below": encoded(below)}


def make_surrogate(text: str) -> Surrogate:
    """A surrogate from ``PSPO``, ``Clip(epsilon=0.1)`` or ``my_loss.SoftClip(width=2)``; ValueError if it is none."""
    try:
        call = ast.parse(text, mode="eval").body
        name, words = (call.func, call.keywords) if isinstance(call, ast.Call) else (call, [])
        path = ast.unparse(name)
        arguments = {word.arg: ast.literal_eval(word.value) for word in words}
        return import_path(path if "." in path else f"pspo.losses.{path}")(**arguments)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"--surrogates {text}: {error}; write Name or 'Name(parameter=1.0)'") from error


def own_curve(switches: pd.Series) -> Record | None:
    """That of a run's own surrogate; None of one that is not ours: a page runs no code that a run's files name."""
    arguments = switches[switches.index.str.startswith(ARGUMENT)].dropna()
    words = {name.removeprefix(ARGUMENT): value for name, value in arguments.items()}
    ours = {f"pspo.losses.{name}": type(surrogate) for name, surrogate in built_in_surrogates().items()}
    if switches[SURROGATE] in ours:
        with contextlib.suppress(Exception):  # a file may give it any arguments
            return surrogate_curve(ours[switches[SURROGATE]](**words))


def built_in_surrogates() -> dict[str, Surrogate]:
    """Those of `pspo.losses` with their defaults, by name."""
    classes = [value for value in vars(losses).values() if isinstance(value, type) and issubclass(value, Surrogate)]
    return {cls.__name__: cls() for cls in classes if not inspect.isabstract(cls)}
