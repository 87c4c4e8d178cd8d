"""Runs as data frames: read run folders and packed folders, pack them, name their settings.

Folder names mean nothing, the configuration everything: runs that differ only in their seed and output folder are the
seeds of one setting. Whatever cannot be read is named on stderr and left out.
"""

import functools
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from pspo.cli.escape import one_line
from pspo.cli.files import DAMAGE, describe_changes, flat, read_config, read_json, read_steps, write_text
from pspo.run.switches import NO_SETTING

MODEL, DATA, SEED = "model.name_or_path", "data.name", "run.seed"
SURROGATE, ARGUMENT = "algorithm.surrogate.class_path", "algorithm.surrogate.init_args."
NAME = "run.name"
UNSAID = NO_SETTING - {"run.fork_from"}  # of the changes of a run on its way
OF_A_RUN = ["experiment", SEED, *sorted(NO_SETTING)]  # columns of `Runs.configs` that are no part of the setting
NUMBERS = ["run", "stage", "model", "evaluation", "data", "split", "n", "temperature", "part", "group", "measure",
           "value", "low", "high"]  # fmt: skip
PACK = ("runs.parquet", "summaries.parquet", "settings.yaml")
LONG = 40  # characters of a label; longer ones are numbered, and stand in a key
# A method has one colour in every picture, on white and on dark: Okabe & Ito's (2008) for the paper's six, and Tol's.
COLOURS = {"Clip": "#E69F00", "NoClip": "#0072B2", "P3O": "#009E73", "PSPO": "#D55E00", "SAPO": "#CC79A7",
           "TOPR": "#56B4E9", "REINFORCE": "#AA3377", "CISPO": "#44AA99", "GSPO": "#999933", "GMPO": "#B2182B",
           "VESPO": "#6C63B5", "DPPO": "#B58900"}  # fmt: skip
OTHERS_COLOUR = "#8A6D3B"

Row = dict[str, Any]


class Runs(NamedTuple):
    """Three tables, joined by `run`: a run's folder, or its setting and seed in a packed folder.

    Attributes:
        configs: indexed by run; every switch (lists as JSON), and the experiment: the folder above the setting's.
        metrics: run, step and the metrics, one row per rollout; NaN where one is missing or not finite.
        numbers: one row per number of a summary or an evaluation: run (missing: of a model that no run trained), stage
            ("before" training, "after" it: of the returned model, "final": of the last one), model (that the run began
            with), evaluation ("summary", or its folder's name), data, split, n, temperature ("0": greedy), part and
            group (of the problems; missing: all of them), measure, value, low and high (95% interval over problems).
    """

    configs: pd.DataFrame
    metrics: pd.DataFrame
    numbers: pd.DataFrame

    def take(self, runs: Sequence[str]) -> "Runs":
        """These runs, in this order, and the evaluations of models that no run trained."""
        place = {run: i for i, run in enumerate(runs)}

        def rows(table: pd.DataFrame) -> pd.DataFrame:
            table = table[table["run"].isin(runs) | table["run"].isna()]
            return table.sort_values("run", key=lambda run: run.map(place), kind="stable")

        return Runs(self.configs.loc[runs], rows(self.metrics), rows(self.numbers))

    def finished(self) -> list[str]:
        """The runs that have a summary."""
        summaries = set(self.numbers.loc[self.numbers["evaluation"] == "summary", "run"])
        return [run for run in self.configs.index if run in summaries]


def warn(line: str) -> None:
    print(f"pspo report: {one_line(line)}", file=sys.stderr)


# Reading


def read_runs(roots: Sequence[Path]) -> Runs:
    """Read what the folders hold, however deep, in order of settings and seeds; raises ValueError if it is nothing."""
    found: dict[str, set[Path]] = {name: set() for name in ("metrics.jsonl", "results.json", "config.yaml", PACK[0])}
    for root in roots:
        here = [path for path in root.rglob("*") if path.name in found]
        if not here:
            warn(f"{root}: {'no run and no evaluation in it' if root.exists() else 'there is no such folder'}")
        for path in here:
            found[path.name].add(path.parent.resolve())
    trained, evaluated, configured, packed = map(sorted, found.values())

    configs, returned = {}, {}  # by run, its switches, and the name of the model that it returned
    metrics, numbers, rows = [], [], []
    for folder in trained:
        with skipping(folder):
            run, config, rollouts = str(folder), _read_config(folder), _read_metrics(folder)
            summary = read_json(folder / "summary.json") if (folder / "summary.json").exists() else {}
            changes = {"changes": text} if (text := describe_changes(folder, UNSAID)) else {}
            returned[run] = Path(summary.get("best_model", "best")).name
            rows += [{"run": run, **row} for row in _of_summary(summary, config)]
            metrics.append(rollouts.assign(run=run))
            configs[run] = config | changes | {"experiment": str(folder.parent.parent)}
    for folder in evaluated:
        with skipping(folder):
            rows += list(_of_evaluation(folder, configs, returned))
    for folder in configured:
        inside = any(str(parent) in configs for parent in folder.parents)  # a checkpoint, say
        if folder not in [*trained, *evaluated] and (not inside or (folder / "completions.jsonl").exists()):
            warn(f"{folder}: neither metrics nor results; left out")
    for folder in packed:
        with skipping(folder):
            packed_configs, *tables = _read_pack(folder)
            configs |= packed_configs
            metrics.append(tables[0])
            numbers.append(tables[1])
    numbers += [pd.DataFrame(rows)] if rows else []
    if not metrics and not numbers:
        raise ValueError("nothing to report in " + ", ".join(map(str, roots)))
    table = pd.DataFrame(list(configs.values()), index=list(configs), dtype=object)
    table = table.reindex(columns=sorted({MODEL, DATA, SURROGATE, "optimizer.max_grad_norm", *OF_A_RUN, *table}))
    metrics = pd.concat(metrics or [pd.DataFrame(columns=["run", "step"])], ignore_index=True)
    numbers = pd.concat(numbers or [pd.DataFrame(columns=NUMBERS)], ignore_index=True).reindex(columns=NUMBERS)
    numbers = numbers.replace({"measure": {"true_accuracy": "gold_anywhere"}})  # its name in 0.1
    return _in_order(Runs(table.where(table.notna(), None), metrics, numbers))


@contextmanager
def skipping(folder: Path) -> Iterator[None]:
    """Name a folder that cannot be read, and go on."""
    try:
        yield
    except (OSError, ValueError) as error:
        warn(f"{folder}: {error}; left out")
    except DAMAGE as error:
        warn(f"{folder}: damaged ({type(error).__name__}: {error}); left out")


def _read_config(folder: Path) -> Row:
    switches = flat(read_config(folder / "config.yaml"))
    if missing := [name for name in (DATA, MODEL, SEED) if switches.get(name) is None]:
        raise ValueError(f"config.yaml says nothing of {', '.join(missing)}")
    " ".join(map(str, [*switches, *switches.values()])).encode()  # raises where half a surrogate pair is: no text
    if switches[DATA] == "file":  # of which there are many
        switches[DATA] = _own_problems(folder, Path(str(switches["data.path"]))) or switches["data.path"]
    return _as_row(switches) | {MODEL: str(switches[MODEL]), DATA: str(switches[DATA]), SEED: int(str(switches[SEED]))}


def _as_row(switches: Row) -> Row:
    """Switches with lists as JSON."""
    lists = {name: json.dumps(value, default=str) for name, value in switches.items() if isinstance(value, list | set)}
    return switches | lists


def _own_problems(folder: Path, path: Path) -> str | None:
    """A name by content for the problems that `pspo.train` wrote into each run's folder; None for other files."""
    for run in (folder, *folder.parents):  # an evaluation's is above it
        if path.parts[-2:] == (run.name, "data") and (files := sorted((run / "data").glob("*.jsonl"))):
            content = b"".join(file.name.encode() + file.read_bytes() for file in files)
            return f"problems {zlib.crc32(content):08x}"
    return None


def _read_metrics(folder: Path) -> pd.DataFrame:
    """The rollouts in order of steps, the last record of each."""
    records = read_steps(folder / "metrics.jsonl")
    if not records:
        raise ValueError("metrics.jsonl holds no rollout")
    metrics = pd.DataFrame(records)
    if nulls := sum(value is None for record in records for value in record.values()):
        warn(f"{folder}: {nulls} values that were not finite; left out")
    metrics = metrics.drop_duplicates("step", keep="last").sort_values("step")
    return metrics.apply(pd.to_numeric, errors="coerce").replace([np.inf, -np.inf], np.nan).astype({"step": int})


def _of_summary(summary: Row, config: Row) -> Iterator[Row]:
    where = {"stage": "run", "model": config[MODEL], "evaluation": "summary"}
    yield from _measures(summary, where)
    for stage in ("before", "after", "final"):
        if result := summary.get(stage):  # {} with --run.test_limit 0
            intervals = {name: result.get("ci95" if name == "accuracy" else f"{name}_ci95") for name in result}
            estimates = {name: {"value": result[name], "ci95": ci95} for name, ci95 in intervals.items() if ci95}
            test = {"stage": stage, "data": config[DATA], "split": "test", "temperature": "0"}
            yield from _measures(result | estimates, where | test)


def _of_evaluation(folder: Path, configs: dict[str, Row], returned: dict[str, str]) -> Iterator[Row]:
    results = read_json(folder / "results.json")
    if not {"model", "data", "split", "n", "temperatures"} <= results.keys():
        raise ValueError("results.json is not of an evaluation")
    model = Path(results["model"])
    candidates = map(str, (model.resolve().parent, folder, *folder.parents))  # of RUN/best, or somewhere in RUN
    run = next((folder for folder in candidates if folder in configs), None)
    if run is None or results["model"] == configs[run][MODEL]:
        where = {"stage": "before", "model": results["model"]}
    elif model.name in (returned[run], "final"):
        stage = "after" if model.name == returned[run] else "final"
        where = {"run": run, "stage": stage, "model": configs[run][MODEL]}
    else:
        raise ValueError(f"evaluates {model}, neither the model that the run returned nor its final one")
    data = _read_config(folder)[DATA] if results["data"] == "file" else results["data"]
    where |= {"evaluation": folder.name, "data": data} | {name: results[name] for name in ("split", "n")}
    yield from _measures(results, where)  # its switches
    for temperature, result in results["temperatures"].items():
        yield from _measures(result, where | {"temperature": temperature})


def _measures(result: Row, where: Row) -> Iterator[Row]:
    """One row per number of a result, breakdowns included."""
    where = where | {"n": result.get("n", where.get("n"))}
    for name, value in result.items():
        if isinstance(value, dict) and "ci95" in value and "value" in value:
            low, high = value["ci95"] or (None, None)  # of one problem
            yield where | {"measure": name, "value": value["value"], "low": low, "high": high}
        elif isinstance(value, int | float) and name != "n":
            yield where | {"measure": name, "value": value}
    for part, groups in result.get("breakdown", {}).items():
        for group, of_group in groups.items():
            yield from _measures(of_group, where | {"part": part, "group": group})


def _in_order(runs: Runs) -> Runs:
    """Sort by setting and seed, each once: of two runs the finished one."""
    keys = pd.DataFrame({"label": labels(runs.configs), "setting": settings(runs.configs), "seed": runs.configs[SEED]})
    keys["unfinished"] = ~keys.index.isin(runs.finished())
    keys = keys.sort_values(["label", "setting", "seed", "unfinished"], kind="stable")
    first = keys.groupby(["setting", "seed"])["label"].transform(lambda of_one: of_one.index[0])
    for run, kept in first[first != first.index].items():
        warn(f"{run}: the same setting and seed as {kept}; left out")
    return runs.take(list(first.unique()))


# Settings


def settings(configs: pd.DataFrame, besides: Sequence[str] = ()) -> pd.Series:
    """Number the settings, by run; those that differ in the switches besides alone have one number."""
    switches = configs.drop(columns=[*OF_A_RUN, *besides], errors="ignore")
    return switches.groupby([*switches], dropna=False, sort=False).ngroup()


def methods(configs: pd.DataFrame) -> pd.Series:
    """Name each run's surrogate, with its module where two have one name."""
    paths = configs[SURROGATE].astype(str)
    names = paths.str.split(".").str[-1]
    return names.where(paths.groupby(names).transform("nunique") == 1, paths)


def labels(configs: pd.DataFrame) -> pd.Series:
    """Name each run's setting: its --run.name, or its surrogate and the switches in which these settings differ.

    A surrogate's own arguments are compared with the same surrogate's. What is `usual` is left out. Names are short
    where no other switch ends in the same word, and numbered where several settings have one.
    """
    named, left_out, short, setting = {}, usual(configs), short_names(configs), settings(configs)
    others = [name for name in _differing(configs) if not name.startswith(ARGUMENT)]
    for method, of_method in configs.groupby(methods(configs)):
        own = [name for name in _differing(of_method) if name.startswith(ARGUMENT)]
        for run, values in of_method[own + others].iterrows():
            texts = [
                _short_changes(value) if name == "changes" else f"{short[name]}={_short(value)}"
                for name, value in values.dropna().items()
                if value != left_out.get(name)
            ]
            named[run] = f"{method} ({', '.join(texts)})" if texts else method
    label = pd.Series(named, dtype=object).reindex(configs.index)
    if NAME in configs:
        name = configs[NAME].groupby(setting).transform("first")
        label = label.where(name.isna(), name)
    lines = [one_line(str(text)).replace(" - ", " – ") for text in label]  # " - " stands between two of them
    label = pd.Series(lines, configs.index, dtype=object)
    of_label = setting.groupby(label)
    number = of_label.transform(lambda numbers: pd.factorize(numbers)[0] + 1).astype(str)
    return label.where(of_label.transform("nunique") == 1, label + " [" + number + "]")


def _differing(configs: pd.DataFrame) -> list[str]:
    """The switches in which settings differ, their surrogates aside."""
    switches = configs.drop(columns=[*OF_A_RUN, SURROGATE], errors="ignore")
    return [name for name in switches if switches[name].nunique(dropna=False) > 1]


def usual(configs: pd.DataFrame) -> dict[str, Any]:
    """Values that labels leave out, by switch.

    Those of two thirds of the settings, of most methods where the value depends on these, or else the default.
    """
    found, default, of_methods = {}, defaults(), configs.groupby(methods(configs))
    each = configs[~settings(configs).duplicated()]
    for name in [name for name in _differing(configs) if not name.startswith(ARGUMENT)]:
        alike = of_methods[name].nunique(dropna=False).max() == 1
        shares = (of_methods.nth(0) if alike else each)[name].value_counts(normalize=True, dropna=False)
        if shares.max() > (0.5 if alike else 2 / 3):
            found[name] = shares.idxmax()
        elif name in default and default[name] in shares.index:
            found[name] = default[name]
    return found


@functools.cache
def defaults() -> Row:
    """The default of every switch, as `Runs.configs` has it."""
    from pspo.cli.parse import parse_settings  # slow to import: torch
    from pspo.config import TrainConfig

    return _as_row(flat(parse_settings(TrainConfig, {})[1]))


def in_sentences(configs: pd.DataFrame) -> Iterator[str]:
    """What all share and is no default, their model and data aside, and what labels leave out."""
    short, (shared, _) = short_names(configs), _shared(configs.drop(columns=[*OF_A_RUN, MODEL, DATA, SURROGATE]))
    shared = {name: value for name, value in shared.items() if value != defaults().get(name, value)}
    sentences = {"All have {}.": shared, "Unless its name says otherwise, a setting has {}.": usual(configs)}
    for sentence, values in sentences.items():
        texts = {short[name]: _short(value) for name, value in values.items() if pd.notna(value)}
        if texts := [f"{name}={text if len(text) <= LONG else f'{text[: LONG - 1]}…'}" for name, text in texts.items()]:
            yield sentence.format(", ".join(texts))


def short_names(configs: pd.DataFrame) -> dict[str, str]:
    """The last word of each switch, and the whole where another one ends in it."""
    words = {name: name.rpartition(".")[2] for name in configs}
    count = Counter(word for name, word in words.items() if not name.startswith(ARGUMENT))
    return {name: word if name.startswith(ARGUMENT) or count[word] == 1 else name for name, word in words.items()}


def _short(value: Any) -> str:
    """A switch's value in a label: of classes and functions their last names, of a folder its own."""
    if isinstance(value, str) and value.startswith("["):
        with suppress(ValueError):  # text, and no list
            return " ".join(map(_short, json.loads(value)))
    if isinstance(value, dict) and "class_path" in value:
        arguments = ", ".join(f"{name}={_short(of)}" for name, of in value.get("init_args", {}).items())
        return _short(value["class_path"]) + (f"({arguments})" if arguments else "")
    return re.sub(r"(?<![\w./-])[\w./-]*[./](?=[A-Za-z_])", "", " ".join(str(value).split()))


def _short_changes(text: str) -> str:
    """Such as "fork@50, lr=1e-05@60" of what `describe_changes` says."""
    of_switches = re.findall(r"([\w.]+) [^,]*? -> (\S+?) at step (\d+)", text)
    forks = [f"fork@{step}" for step in re.findall(r"forked at step (\d+)", text)]
    return ", ".join([*forks, *(f"{name.rpartition('.')[2]}={value}@{step}" for name, value, step in of_switches)])


def keyed(label: pd.Series) -> tuple[pd.Series, dict[str, str]]:
    """Labels of at most `LONG` characters, and the whole ones by those that were cut and numbered."""
    long = [text for text in dict.fromkeys(label) if len(text) > LONG]
    short = {text: f"{text.partition(' (')[0][: LONG - 5]} #{number}" for number, text in enumerate(long, 1)}
    return label.replace(short), {number: text for text, number in short.items()}


def untrained(runs: Runs) -> pd.DataFrame:
    """The validations of step 0, of runs that are finished; a packed folder has none."""
    rows = []
    for run in runs.configs.index:
        summary = Path(run) / "summary.json"
        if summary.is_file() and (known := read_json(summary).get("validation", {}).get("untrained")):
            rows.append(known | {"run": run, "time": 0.0})
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["run", "step"])


# Packing


def pack(runs: Runs, folder: Path) -> list[Path]:
    """Write runs.parquet, summaries.parquet and settings.yaml, which `read_runs` reads as it reads the runs' folders.

    Settings are named by what they differ in from the others of their experiment.
    """
    if runs.configs.empty:
        raise ValueError("no run to pack")
    experiment = runs.configs["experiment"].map(lambda path: Path(path).name)
    setting = pd.concat([labels(of_experiment) for _, of_experiment in runs.configs.groupby(experiment)])
    names = pd.DataFrame({"experiment": experiment, "setting": setting, "seed": runs.configs[SEED].astype("Int64")})
    for file, table in zip(PACK, (runs.metrics, runs.numbers), strict=False):
        of_rows = names.reindex(table["run"]).set_index(table.index)
        pd.concat([of_rows, table.drop(columns="run")], axis=1).to_parquet(folder / file, index=False)

    shared, own = _shared(runs.configs.drop(columns=OF_A_RUN))
    content = {"shared": shared, "experiments": {}}
    for name, of_experiment in own.groupby(experiment):
        shared, own = _shared(of_experiment)
        of_settings = {setting[run]: values.dropna().to_dict() for run, values in own.iterrows()}
        content["experiments"][name] = {"shared": shared, "settings": of_settings}
    head = "# Settings by their switches: what all share, what those of an experiment share, and each one's own.\n"
    text = yaml.safe_dump(content, sort_keys=False, width=120, allow_unicode=True)
    write_text(folder / PACK[2], f"{head}# A switch that is not here is null.\n{text}")
    return [folder / name for name in PACK]


def _shared(switches: pd.DataFrame) -> tuple[Row, pd.DataFrame]:
    """The switches that are alike in all rows, and the columns of the others."""
    alike = [name for name in switches if switches[name].nunique(dropna=False) == 1]
    return switches[alike].iloc[0].dropna().to_dict(), switches.drop(columns=alike)


def _read_pack(folder: Path) -> tuple[dict[str, Row], pd.DataFrame, pd.DataFrame]:
    """Switches by run, metrics and numbers."""
    metrics, numbers = (pd.read_parquet(folder / name) for name in PACK[:2])
    content, configs = read_config(folder / PACK[2]), {}
    for table in (metrics, numbers):
        name = table["experiment"] + ": " + table["setting"] + ", seed " + table["seed"].astype(str)
        table["run"] = f"{folder}/" + name
    for row in metrics.drop_duplicates("run").itertuples():
        of_experiment = content["experiments"][row.experiment]
        switches = content["shared"] | of_experiment["shared"] | of_experiment["settings"][row.setting]
        configs[row.run] = switches | {"experiment": f"{folder}/{row.experiment}", SEED: row.seed}
    names = ["experiment", "setting", "seed"]
    return configs, metrics.drop(columns=names), numbers.drop(columns=names)
