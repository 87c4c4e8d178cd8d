"""Names of settings in tables and pictures, as a person would write them."""

import json
import re
from collections import Counter
from contextlib import suppress
from typing import Any

import pandas as pd

from pspo.terminal import one_line
from pspo_lab.settings import ARGUMENT, DATA, MODEL, RATE, SURROGATE, default_arguments, defaults, methods, not_compared


def labels(configs: pd.DataFrame) -> pd.Series:
    """Name of each run's setting: its surrogate, and the switches in which these runs differ, unless at their default.

    A surrogate's arguments come first, all that are not at their default, which is unknown for a class of a user's. A
    learning rate is always said.
    """
    short = short_names(configs)
    value_texts = configs.apply(short_values)
    names = sorted(name for name in configs if name.startswith(ARGUMENT))
    names += [name for name in differing(configs) if not name.startswith(ARGUMENT)]
    texts = {}
    for run, method in methods(configs).items():
        usual = defaults(configs.at[run, SURROGATE]) | {RATE: None}
        values = configs.loc[run, names].dropna()
        changed = [name for name, value in values.items() if value != usual.get(name)]
        parts = [f"{short[name]}={value_texts.at[run, name]}" for name in changed]
        text = f"{method} ({', '.join(parts)})" if parts else method
        texts[run] = one_line(text).replace(" - ", " – ")  # " - " stands between two labels
    return pd.Series(texts, dtype=object)


def differing(configs: pd.DataFrame) -> list[str]:
    """Switches in which settings differ, surrogates aside; what another trainer did not record counts as equal."""
    switches = configs.drop(columns=[*not_compared(), SURROGATE], errors="ignore")
    ours = configs["trainer"].isna() if "trainer" in configs else pd.Series(True, configs.index)
    return sorted(name for name in switches if switches[name][ours | switches[name].notna()].nunique(dropna=False) > 1)


def shared_sentence(configs: pd.DataFrame) -> str:
    """The switches that all runs share and that are at no default, model and data aside; "" if there are none."""
    short = short_names(configs)
    switches = configs.drop(columns=[*not_compared(), MODEL, DATA, SURROGATE], errors="ignore")
    shared = switches.loc[:, switches.nunique(dropna=False) == 1].iloc[0].dropna()
    default_values = defaults() | {RATE: None}
    unusual = {name: value for name, value in shared.items() if value != default_values.get(name, value)}
    texts = [f"{short[name]}={short_value(value)}" for name, value in unusual.items()]
    return f"All have {', '.join(texts)}." if texts else ""


def short_names(configs: pd.DataFrame) -> dict[str, str]:
    """The last word of each switch, and the whole where another one ends in it."""
    words = {name: name.rpartition(".")[2] for name in configs}
    count = Counter(word for name, word in words.items() if not name.startswith(ARGUMENT))
    return {name: word if name.startswith(ARGUMENT) or count[word] == 1 else name for name, word in words.items()}


def short_values(values: pd.Series) -> pd.Series:
    """A switch's values in labels: short where that tells them apart."""
    texts = values.map(short_value)
    return texts if texts.nunique() == values.nunique(dropna=False) else values.map(str)


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
