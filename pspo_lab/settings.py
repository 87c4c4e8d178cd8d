"""Settings of runs: the switches that make one, read from a folder's configuration, and their names in tables."""

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
from pspo.tasks.files import local_path
from pspo.terminal import one_line

MODEL = "model.name_or_path"
DATA = "data.name"
SEED = "run.seed"
RATE = "optimizer.lr"  # whose default depends on the model, and so is always said
SURROGATE = "algorithm.surrogate.class_path"
ARGUMENT = "algorithm.surrogate.init_args."
REWARDS = "reward.functions"
WEIGHTS = "reward.weights"
NOT_COMPARED = switches_with("no setting")
OF_A_SEED = r"(?<=seed-)\d+|\d{8}-\d{6}(-\d+)?"  # in the names of sweeps' runs, and of runs without a name

Switches = dict[str, Any]  # of a run, by name: numbers and texts; None as if it were not there
Configs = dict[Any, Switches]  # by run
Setting = frozenset[tuple[str, Any]]  # what makes a run: equal of runs that differ in seed and files alone


def make_setting(switches: Switches, ignore: tuple[str, ...] = ()) -> Setting:
    """The switches that make a setting, without those that begin with one of ``ignore``."""
    names = [name for name in switches.keys() - NOT_COMPARED if not name.startswith(ignore)]
    return frozenset((name, switches[name]) for name in names if switches[name] is not None)


def read_switches(folder: Path) -> Switches:
    """The switches of a run or an evaluation, lists and mappings as JSON; where ours lack one, its default."""
    written = flat(read_config(folder / "config.yaml"))
    " ".join(map(str, [*written, *written.values()])).encode()  # raises where half a surrogate pair is: no text
    named = {
        MODEL: str(written.get(MODEL) or "unknown"),
        DATA: data_name(folder, written),
        SEED: int(str(written.get(SEED) or 0)),
        SURROGATE: str(written.get(SURROGATE) or written.get("trainer") or "unknown"),
    }
    known = {} if "trainer" in written else defaults(named[SURROGATE])
    return known | plain_switches(written) | named | origin(folder, written)


def data_name(folder: Path, switches: Switches) -> str:
    """The data's name; of a file its path, but a name by content for problems that `pspo.train` wrote into a folder."""
    if switches.get(DATA) != "file":  # of which there are many
        return str(switches.get(DATA) or local_path(folder))
    path = Path(str(switches.get("data.path")))
    for run in (folder, *folder.parents):  # an evaluation's is above it
        if path.name == "data" and (run / "data/.of_a_run").exists():  # wherever the run is now
            files = sorted((run / "data").glob("*.jsonl"))
            content = b"".join(file.name.encode() + file.read_bytes() for file in files)
            return f"problems {zlib.crc32(content):08x}"
    return str(switches.get("data.path") or local_path(folder))


def origin(folder: Path, switches: Switches) -> Switches:
    """What else makes a setting: the search that a run belongs to, and the run, of any seed, that it is a fork of."""
    found = {}
    experiment = str(folder.parent.parent)
    full = experiment.removesuffix("-search")
    if full != experiment and Path(full, "selection.json").exists():
        found["search"] = True  # its runs choose, and confirm nothing
    if switches.get("run.fork_from"):
        found["forked"] = re.sub(OF_A_SEED, "*", str(switches["run.fork_from"]))
    return found


def plain_switches(switches: Switches) -> Switches:
    """Switches with lists and mappings as JSON, so that settings are hashable; rewards with their weights."""
    functions = switches.get(REWARDS)
    weights = switches.get(WEIGHTS)
    if isinstance(functions, list) and isinstance(weights, list) and len(functions) == len(weights):
        weighted = [{"weight": weight, "reward": function} for function, weight in zip(functions, weights, strict=True)]
        switches = switches | {REWARDS: weighted, WEIGHTS: None}
    return {
        name: json.dumps(value, default=str) if isinstance(value, list | set | dict) else value
        for name, value in switches.items()
        if value == value  # NaN
    }


@functools.cache
def defaults(class_path: str = "") -> Switches:
    """The default of every switch, with the arguments of a surrogate of `pspo.losses`."""
    switches = plain_switches(flat(make_config(TrainConfig, "pspo", [], {})[1]))
    arguments = {ARGUMENT + name: value for name, value in default_arguments(class_path).items()}
    return {name: value for name, value in switches.items() if not name.startswith(ARGUMENT)} | arguments


def default_arguments(class_path: str) -> Switches:
    """Defaults of a class's arguments, of our own rewards and losses: nothing else that a file names is imported."""
    module, _, name = str(class_path).rpartition(".")
    if module not in ("pspo.tasks", "pspo.losses"):
        return {}
    cls = getattr(importlib.import_module(module), name, None)
    parameters = {} if cls is None else inspect.signature(cls).parameters  # None: of another version
    return {name: parameter.default for name, parameter in parameters.items()}


def make_labels(configs: Configs) -> dict[Any, str]:
    """Name of each run's setting: its surrogate, and the switches in which these runs differ, unless at their default.

    A surrogate's arguments come first, all that are not at their default, which is unknown for a class of a user's. A
    learning rate is always said.
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
    """Name of each run's surrogate, with its module where two have one name."""
    paths = {run: switches[SURROGATE] for run, switches in configs.items()}
    names = {path: path.rpartition(".")[2] for path in paths.values()}
    count = Counter(names.values())
    return {run: names[path] if count[names[path]] == 1 else path for run, path in paths.items()}


def differing(configs: Configs) -> list[str]:
    """Switches in which settings differ, surrogates aside; what another trainer did not record counts as equal."""
    varied = []
    for name in sorted(short_names(configs).keys() - NOT_COMPARED - {SURROGATE}):
        known = [s for s in configs.values() if s.get(name) is not None or "trainer" not in s]
        if len({switches.get(name) for switches in known}) > 1:
            varied.append(name)
    return varied


def shared_sentence(configs: Configs) -> str:
    """The switches that all runs share and that are at no default, model and data aside; "" if there are none."""
    short = short_names(configs)
    shared = frozenset.intersection(*(make_setting(s, ignore=(MODEL, DATA, SURROGATE)) for s in configs.values()))
    default_values = defaults() | {RATE: None}
    unusual = {name: value for name, value in sorted(shared) if value != default_values.get(name, value)}
    texts = [f"{short[name]}={short_value(value)}" for name, value in unusual.items()]
    return f"All have {', '.join(texts)}." if texts else ""


def short_names(configs: Configs) -> dict[str, str]:
    """The last word of each switch, and the whole where another one ends in it."""
    words = {name: name.rpartition(".")[2] for switches in configs.values() for name in switches}
    count = Counter(word for name, word in words.items() if not name.startswith(ARGUMENT))
    return {name: word if name.startswith(ARGUMENT) or count[word] == 1 else name for name, word in words.items()}


def short_value(value: Any) -> str:
    """A switch's value in a label: of classes and functions their last names, of a folder its last part."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        with suppress(ValueError):  # text, and neither list nor mapping
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
