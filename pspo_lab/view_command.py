"""Look inside runs: ``pspo view RUN [RUN ...]`` writes a page of curves, groups, tokens, tests, findings.

RUN is a run's folder, or a folder above several runs. A run in progress is shown up to now.
``--surrogates PSPO my_loss.SoftClip '{class_path: Clip, init_args: {epsilon: 0.1}}'`` compares the tokens' weights
under these surrogates; unset, under all surrogates of `pspo.losses`.

The page is one HTML file that asks no host for anything. Charts are uPlot's (https://github.com/leeoniya/uPlot, MIT).
"""

import argparse
import base64
import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pspo.cli.values import class_names, load_yaml, read
from pspo.endings import user_errors
from pspo.evaluate.statistics import measure_name
from pspo.files import DAMAGE, numbered, read_json, read_jsonl, step_of, write_text
from pspo.losses import Surrogate, token_weights
from pspo.tasks.files import plain
from pspo.tasks.problem import Messages, content_text
from pspo.token_table import COLUMNS, TOKENS
from pspo_lab.findings import find
from pspo_lab.identities import RATIOS, make_surrogate, token_curve
from pspo_lab.runs import LabRun, Runs, grouped, read_runs, run_folders, skip_unreadable, warn
from pspo_lab.settings import DATA, MODEL, SURROGATE, differing, methods, short_names
from pspo_lab.tables import mean_over_seeds

# A method has one colour, on white and on dark: Okabe & Ito's (2008) for the paper's six, and Tol's.
COLOURS = {"Clip": "#E69F00", "NoClip": "#0072B2", "P3O": "#009E73", "PSPO": "#D55E00", "SAPO": "#CC79A7",
           "TOPR": "#56B4E9", "REINFORCE": "#AA3377", "CISPO": "#44AA99", "GSPO": "#999933", "GMPO": "#B2182B",
           "VESPO": "#6C63B5", "DPPO": "#B58900", "SPO": "#1B7F3B", "DRO": "#B15928", "CEGPPO": "#3366AA",
           "ASPO": "#C43C6B"}  # fmt: skip
OWN_COLOURS = ("#8E6FD1", "#5B8C2A", "#0F8B9D", "#C2559A", "#D9534F", "#B07A3A", "#8C8C8C")  # for other losses
FOLDER = Path(__file__).parent / "page"
TOKEN_TYPES = COLUMNS | {"token_id": float}  # a run of another trainer may lack token ids
NEWEST = ("reward", "validation_reward", "entropy", "kl_old_new", "truncated_share")  # in the table of runs
MEASURES = ("mean_reward", "accuracy", "gold_anywhere")
MOST_BYTES = 800_000  # in the tokens.parquet of all runs on a page; beyond, rollouts are left out evenly
MOST_SAMPLES = 8_000  # completions of each run on a page
MOST_CHANGES = 200  # test problems whose reward changed, on a page

Record = dict[str, Any]


def page_data(runs: Runs, surrogates: dict[str, Surrogate]) -> Record:
    """Return all that the page shows, under the names that page.js reads; the keys of ``surrogates`` are shown.

    A group is {run, step, problem, prompt, gold, completions: [{reward, advantage, rewards, text, truncated, ...,
    recorded: {text, id, position, old_logprob, ..., visits: [{step, logprob, entropy, weights: {surrogate: ...}}]}}]}.
    """
    names = short_names(runs.configs)
    varied = {switch: names[switch] for switch in differing(runs.configs)}
    pages = {}
    tests = []
    for run, label in runs.labels.items():
        with skip_unreadable(run.folder):
            page = describe_run(run, label, varied)
            tests.append(changed_tests(run.folder))
            pages[run.folder] = page
    return {
        "curves": list(setting_curves(runs)),
        "runs": list(pages.values()),
        "surrogates": {name: surrogate_curve(surrogate) for name, surrogate in surrogates.items()},
        **recorded_groups(list(pages), surrogates),
        "tests": tests,
    }


def setting_curves(runs: Runs) -> Iterator[Record]:
    """Yield each setting's metrics at each step: the mean over seeds and, from three seeds on, the 95% interval."""
    members = grouped(runs.labels, lambda run: run.setting)
    number = {run.name: i for i, seeds in enumerate(members.values()) for run in seeds}
    method = methods(runs.configs)
    own = sorted(set(method.values()) - COLOURS.keys())  # losses of no fixed colour
    colours = COLOURS | {name: OWN_COLOURS[i % len(OWN_COLOURS)] for i, name in enumerate(own)}
    numbers = runs.rollouts().set_index(["run", "step"]).select_dtypes("number")
    values = numbers.melt(var_name="column", ignore_index=False).dropna(subset="value").reset_index()
    means = mean_over_seeds(values.assign(row=values["run"].map(number)), by=["row", "column", "step"])
    for i, cells in means.groupby("row"):  # not those of a setting without numbers
        seeds = [*members.values()][i]
        sides = {side: cells.pivot(index="step", columns="column", values=side) for side in ("mean", "low", "high")}
        yield {
            "label": runs.labels[seeds[0]],
            "color": colours[method[seeds[0]]],
            "setting": i,
            "seeds": len(seeds),
            "step": encode_floats(sides["mean"].index),
            **{side: encode_columns(table, list(table)) for side, table in sides.items()},
        }


def encode_floats(values: Any) -> str:
    """Encode numbers as the base64 text of float32, which the page reads without rounding."""
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()


def describe_run(run: LabRun, label: str, varied: dict[str, str]) -> Record:
    """Return a run's name, results, findings and row in the table of runs, with a column for each of ``varied``."""
    switches = run.switches
    summary = run.summary
    method = switches[SURROGATE].rpartition(".")[2]
    newest = run.metrics.ffill().iloc[-1]
    step = int(newest["step"])
    progress = f"step {step} of {switches['run.max_steps']}" if switches.get("run.max_steps") else f"step {step}"
    about = [f"{Path(switches[MODEL]).name} on {switches[DATA]}", method, f"seed {run.seed}", progress]
    row = {"method": method} | {short: switches.get(switch) for switch, short in varied.items()}
    row |= {"seed": run.seed, "step": step} | {name: newest.get(name) for name in NEWEST}
    for name, stage in product(MEASURES, ("before", "after")):
        row[f"test {measure_name(name)} {stage}"] = (summary.get(stage) or {}).get(name)
    best = run.folder / "best/validation.json"
    return {
        "name": f"{label}, seed {run.seed}",
        "label": label,
        "seed": run.seed,
        "about": " · ".join(about),
        "curve": surrogate_curve(make_surrogate(switches)),
        "best_step": read_json(best)["step"] if best.is_file() else summary.get("best_step"),
        "findings": [finding._asdict() for finding in find(run.metrics, switches)],
        "row": row,
    }


def changed_tests(folder: Path) -> Record:
    """Return how many test problems got a worse or better reward by training, and the first of them, worst first."""
    tests = (read_jsonl(folder / f"test-{when}.jsonl") for when in ("before", "after"))
    pairs = [(old, new) for old, new in zip(*tests, strict=False) if None not in (old["reward"], new["reward"])]
    changed = [(old, new) for old, new in pairs if old["reward"] != new["reward"]]
    changed.sort(key=lambda pair: pair[1]["reward"] - pair[0]["reward"])
    shown = []
    for old, new in changed[:MOST_CHANGES]:
        before, after = ({"text": one["completion"], "value": float(one["reward"])} for one in (old, new))
        shown.append({"prompt": prompt_text(old["prompt"]), "gold": old["gold"], "before": before, "after": after})
    worse = sum(new["reward"] < old["reward"] for old, new in changed)
    return {"worse": worse, "better": len(changed) - worse, "shown": shown}


def prompt_text(prompt: str | Messages) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{turn['role']}: {content_text(turn)}" for turn in prompt)


def recorded_groups(folders: Sequence[Path], surrogates: dict[str, Surrogate]) -> Record:
    """Return the recorded groups of all runs, with visits to tokens; beyond `MOST_BYTES`, of some rollouts only."""
    files = [{step_of(file): file for file in numbered(folder / TOKENS, ".parquet")} for folder in folders]
    size = sum(file.stat().st_size for run_files in files for file in run_files.values())
    groups = []
    left_out = 0
    for run, (folder, token_files) in enumerate(zip(folders, files, strict=True)):
        with skip_unreadable(folder):
            samples = read_jsonl(folder / "samples.jsonl")
            rollouts = grouped(samples, lambda sample: sample["step"])
            steps = sorted(rollouts)
            every = max(1, math.ceil(size / MOST_BYTES), math.ceil(len(samples) / MOST_SAMPLES))
            on_page = sorted({*steps[::every], *steps[-1:]})
            left_out += len(steps) - len(on_page)
            for step in on_page:
                file = token_files.get(step)
                tokens = {} if file is None else recorded_tokens(file, len(rollouts[step]), surrogates)
                groups += make_groups(run, rollouts[step], tokens)
    return {"groups": groups, "left_out": left_out}


def make_groups(run: int, samples: Sequence[Record], tokens: dict[int, Record]) -> Iterator[Record]:
    """Yield a rollout's groups from its lines of ``samples.jsonl`` and tokens by line; a missing value is None."""
    completions = []
    for row, sample in enumerate(samples):
        values = {name: sample.get(name) for name in ("reward", "advantage", "tokens", "truncated")}
        text = sample.get("completion", "")
        completions.append(values | {"rewards": sample.get("rewards", {}), "text": text, "recorded": tokens.get(row)})
    starts = [row for row, sample in enumerate(samples) if sample["sample"] == 0]
    for start, end in pairwise([*starts, len(samples)]):
        first = samples[start]
        yield {
            "run": run,
            "step": first["step"],
            "problem": first["problem"],
            "prompt": prompt_text(first.get("prompt", "")),
            "gold": first.get("gold"),
            "completions": completions[start:end],
        }


def recorded_tokens(file: Path, n_rows: int, surrogates: dict[str, Surrogate]) -> dict[int, Record]:
    """Return by row a rollout's tokens, with the optimizer steps' visits to them; "" names the run's own weights."""
    try:
        table = pd.read_parquet(file).reindex(columns=[*TOKEN_TYPES]).astype(TOKEN_TYPES)
        if table["row"].max() >= n_rows:
            raise ValueError("samples.jsonl lacks completions whose tokens the file has")
    except (OSError, *DAMAGE) as error:
        warn(f"{file} is not what a run records ({error}); left out")
        return {}
    table = table.sort_values(["step", "row", "position"], ignore_index=True)
    if table[["logprob", "old_logprob", "advantage"]].notna().any().all():  # not if no step visited the rollout
        for name, surrogate in surrogates.items():
            steps = [surrogate_weights(surrogate.bind_step(step - 1), visits) for step, visits in table.groupby("step")]
            table[f"weight {name}"] = pd.concat(steps)
    tokens = {}
    for row, visits in table.groupby("row"):
        first = visits[visits["step"] == visits["step"].min()]
        tokens[row] = {
            "text": first["text"].fillna("").tolist(),
            "id": first["token_id"].tolist(),
            "position": first["position"].tolist(),
            "visits": [make_visit(step, visit, surrogates) for step, visit in visits.groupby("step")],
            **encode_columns(first, ("old_logprob", "sampler_logprob", "reference_logprob")),
        }
    return tokens


def make_visit(step: int, visit: pd.DataFrame, surrogates: Iterable[str]) -> Record:
    """Return an optimizer step's visit to the tokens of a completion."""
    weights = encode_columns(visit, [f"weight {name}" for name in surrogates] + ["weight"])
    return {
        "step": int(step),
        "weights": {name.removeprefix("weight").strip(): values for name, values in weights.items()},
        **encode_columns(visit, ("logprob", "entropy")),
    }


def encode_columns(table: pd.DataFrame, names: Sequence[str]) -> dict[str, str]:
    """Encode the columns that have values by `encode_floats`."""
    return {name: encode_floats(table[name]) for name in names if name in table and table[name].notna().any()}


def surrogate_weights(surrogate: Callable[..., Tensor], table: pd.DataFrame) -> pd.Series:
    """`token_weights` of a surrogate at the recorded tokens of a step, by the code that trains."""
    lengths = table.groupby("row").size().tolist()
    names = ("logprob", "old_logprob", "advantage")
    values = [pad_sequence(torch.tensor(table[name].to_numpy()).split(lengths), batch_first=True) for name in names]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # (B, T)
    return pd.Series(token_weights(surrogate, *values, mask)[mask].numpy(), table.index)


def surrogate_curve(surrogate: Surrogate | None) -> Record | None:
    """Return dL/dlogprob at each ratio for advantages 1 and -1; None if it depends on the rest of a completion."""
    above, below = (token_curve(surrogate, advantage) if surrogate else None for advantage in (1.0, -1.0))
    if above is None or below is None:
        return None
    return {"ratio": encode_floats(RATIOS), "above": encode_floats(above), "below": encode_floats(below)}


def make_page(roots: Sequence[Path], surrogates: Sequence[str] = ()) -> str:
    """Return the HTML page of the runs below the roots; ValueError without any run, or for an invalid surrogate."""
    files = {"css": "page.css", "js": "page.js", "uplot_js": "uplot.js"}
    assets = {name: Markup((FOLDER / file).read_text(encoding="utf-8")) for name, file in files.items()}
    template = Environment(loader=FileSystemLoader(FOLDER), autoescape=True).get_template("page.html.j2")
    compared = {text: read(Surrogate, load_yaml(text), "surrogates") for text in surrogates}
    compared = compared or {name: surrogate() for name, surrogate in class_names(Surrogate).items()}
    runs = read_runs(roots)
    if not runs.labels:
        raise ValueError(f"no run is in {', '.join(map(str, roots))}")
    content = json.dumps(plain(page_data(runs, compared))).encode()  # ASCII: lone surrogates are escaped
    data = base64.b64encode(gzip.compress(content, mtime=0)).decode()  # base64: no text can end the element
    return template.render(title=", ".join(root.resolve().name for root in roots), data=data, **assets)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("pspo view", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders above them")
    parser.add_argument("--output", type=Path, help="the file (default: view.html in the first folder with a run)")
    parser.add_argument("--surrogates", nargs="+", default=[], metavar="SURROGATE", help="compare weights under these")
    options = parser.parse_args(args)
    with user_errors("pspo view"):
        runs = run_folders(options.runs)
        page = make_page(runs, options.surrogates)
        folder = next(root for root in runs if any(root.rglob("metrics.jsonl")))  # a data folder gets no page
        output = (options.output or folder / "view.html").expanduser()
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, page)
    print(f"{output}  ({output.stat().st_size / 1e6:.1f} MB)")
