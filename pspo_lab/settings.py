"""Settings of runs: the switches of a setting, read from a folder's configuration, and its name in tables."""

import functools
import importlib
import inspect
import json
import re
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from pspo.cli.parse import flat, make_config, read_config
from pspo.config import TrainConfig, switches_with
from pspo.terminal import one_line

MODEL = "model.name_or_path"
DATA = "data.name"
SEED = "run.seed"
RATE = "optimizer.lr"  # its default depends on the model, so labels give any that differs
SURROGATE = "algorithm.surrogate.class_path"
ARGUMENT = "algorithm.surrogate.init_args."
REWARDS = "reward.functions"
WEIGHTS = "reward.weights"
NOT_COMPARED = switches_with("no setting")
OF_A_SEED = r"(?<=seed-)\d+|\d{8}-\d{6}(-\d+)?"  # seeds in a sweep's folder names, times in default folder names

Switches = dict[str, Any]  # a run's numbers and texts by switch; None counts as absent
Configs = dict[Any, Switches]  # by run
Setting = frozenset[tuple[str, Any]]  # equal for runs that differ in seed and files alone


def make_setting(switches: Switches, ignore: tuple[str, ...] = ()) -> Setting:
    """Return the switches that make a setting, except those whose name begins with one of ``ignore``."""
    names = [name for name in switches.keys() - NOT_COMPARED if not name.startswith(ignore)]
    return frozenset((name, switches[name]) for name in names if switches[name] is not None)


def read_switches(folder: Path) -> Switches:
    """Return the switches of a run or an evaluation, lists and mappings as JSON; pspo's runs get missing defaults."""
    written = flat(read_config(folder / "config.yaml"))
    " ".join(map(str, [*written, *written.values()])).encode()  # raises if half a surrogate pair makes it no text
    named = {
        MODEL: str(written.get(MODEL) or "unknown"),
        DATA: data_name(folder, written),
        SEED: int(str(written.get(SEED) or 0)),
        SURROGATE: str(written.get(SURROGATE) or written.get("trainer") or "unknown"),
    }
    known = {} if "trainer" in written else defaults(named[SURROGATE])
    return known | plain_switches(written) | named | origin(folder, written)


def data_name(folder: Path, switches: Switches) -> str:
    """Return the data's name: the path of a file, or a checksum of problems that `pspo.train` wrote into its folder."""
    if switches.get(DATA) != "file":  # which says nothing: every file has this name
        return str(switches.get(DATA) or folder)
    path = Path(str(switches.get("data.path")))
    for run in (folder, *folder.parents):  # an evaluation lies in its run's folder
        if path.name == "data" and (run / "data/.of_a_run").exists():  # the run may have been moved
            files = sorted((run / "data").glob("*.jsonl"))
            content = b"".join(file.name.encode() + file.read_bytes() for file in files)
            return f"problems {zlib.crc32(content):08x}"
    return str(switches.get("data.path") or folder)


def origin(folder: Path, switches: Switches) -> Switches:
    """Return what else makes a setting: whether a search made the run, and which run, of any seed, it is a fork of."""
    parent = switches.get("run.fork_from")
    return {
        "search": folder.parent.parent.name.endswith("-search") or None,  # such runs choose, and confirm nothing
        "forked": re.sub(OF_A_SEED, "*", str(parent)) if parent else None,
    }


def plain_switches(switches: Switches) -> Switches:
    """Return the switches, lists and mappings as hashable JSON, and every reward function with its weight."""
    functions = switches.get(REWARDS)
    weights = switches.get(WEIGHTS)
    if isinstance(functions, list) and isinstance(weights, list) and len(functions) == len(weights):
        weighted = [{"weight": weight, "reward": function} for function, weight in zip(functions, weights, strict=True)]
        switches = switches | {REWARDS: weighted, WEIGHTS: None}
    return {
        name: json.dumps(value, default=str, sort_keys=True) if isinstance(value, list | set | dict) else value
        for name, value in switches.items()
        if value == value  # leaves out NaN
    }


@functools.cache
def defaults(class_path: str) -> Switches:
    """Return the default of every switch, and of the arguments if the class is a surrogate of `pspo.losses`."""
    switches = plain_switches(flat(make_config(TrainConfig, "pspo", [], {})[1]))
    arguments = {ARGUMENT + name: value for name, value in default_arguments(class_path).items()}
    return {name: value for name, value in switches.items() if not name.startswith(ARGUMENT)} | arguments


def default_arguments(class_path: str) -> Switches:
    """Return the defaults of a class's arguments; {} for a class from outside pspo, which is never imported."""
    module, _, name = str(class_path).rpartition(".")
    if module not in ("pspo.tasks", "pspo.losses"):
        return {}
    cls = getattr(importlib.import_module(module), name, None)
    parameters = {} if cls is None else inspect.signature(cls).parameters  # None: a class of another version
    return {name: parameter.default for name, parameter in parameters.items()}


def make_labels(configs: Configs) -> dict[Any, str]:
    """Name each run's setting by its surrogate and by the switches that differ between the runs and from the default.

    All arguments of the surrogate that are not at their default come first; a user's own class has no known defaults. A
    learning rate that differs between the runs is given even at its default.
    """
    short = short_names(configs)
    names = [name for name in sorted(short) if name.startswith(ARGUMENT)]
    names += [name for name in differing(configs) if not name.startswith(ARGUMENT)]
    value_text = {}
    for name in names:
        values = {switches.get(name) for switches in configs.values()}
        is_told_apart = len(set(map(short_value, values))) == len(values)
        value_text[name] = short_value if is_told_apart else str
    method = methods(configs)
    texts = {}
    for run, switches in configs.items():
        usual = defaults(switches[SURROGATE]) | {RATE: None}
        changed = [name for name in names if switches.get(name) not in (None, usual.get(name))]
        parts = [f"{short[name]}={value_text[name](switches[name])}" for name in changed]
        text = f"{method[run]} ({', '.join(parts)})" if parts else method[run]
        texts[run] = one_line(text).replace(" - ", " – ")  # " - " stands between two labels
    return texts


def methods(configs: Configs) -> dict[Any, str]:
    """Return the name of each run's surrogate, with its module where two surrogates have the same name."""
    paths = {run: switches[SURROGATE] for run, switches in configs.items()}
    names = {path: path.rpartition(".")[2] for path in paths.values()}
    count = Counter(names.values())
    return {run: names[path] if count[names[path]] == 1 else path for run, path in paths.items()}


def differing(configs: Configs) -> list[str]:
    """Return the switches, except surrogates, that differ; a switch that another trainer did not record does not."""
    varied = []
    for name in sorted(short_names(configs).keys() - NOT_COMPARED - {SURROGATE}):
        known = [s for s in configs.values() if s.get(name) is not None or "trainer" not in s]
        if len({switches.get(name) for switches in known}) > 1:
            varied.append(name)
    return varied


def short_names(configs: Configs) -> dict[str, str]:
    """Return the last word of each switch's name, or the whole name where another name ends in the same word."""
    words = {name: name.rpartition(".")[2] for switches in configs.values() for name in switches}
    count = Counter(words.values())
    return {name: word if name.startswith(ARGUMENT) or count[word] == 1 else name for name, word in words.items()}


def short_value(value: Any) -> str:
    """Return a switch's value as in a label: a class or function by its last name, a folder by its last part."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        with suppress(ValueError):  # a text that is no list or mapping
            value = json.loads(value)
    if isinstance(value, list):
        has_weights = any(isinstance(part, dict) and "weight" in part for part in value)
        return (" + " if has_weights else " ").join(map(short_value, value))
    if isinstance(value, dict) and "weight" in value:
        return f"{value['weight']:g} {short_value(value['reward'])}".removeprefix("1 ")
    if isinstance(value, dict) and "class_path" in value:
        usual = default_arguments(value["class_path"])
        changed = {name: part for name, part in value.get("init_args", {}).items() if part != usual.get(name, ...)}
        arguments = ", ".join(f"{name}={short_value(part)}" for name, part in changed.items())
        return short_value(value["class_path"]) + (f"({arguments})" if arguments else "")
    if isinstance(value, dict):
        return ", ".join(f"{name}: {short_value(part)}" for name, part in value.items())
    text = re.sub(r"(?<![\w./-])[\w./-]*[./](?=[A-Za-z_])", "", " ".join(str(value).split()))
    return text if len(text) <= 40 else f"{text[:39]}…"
