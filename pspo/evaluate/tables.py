"""The tables that ``python -m pspo.evaluate`` prints."""

from typing import Any

from pspo.evaluate.results import as_text, label, table

LONGEST_BREAKDOWN = 12  # lines on the terminal


def render(results: dict[str, Any]) -> str:
    """The contents of ``results.json`` as tables: a line per measure, a column per temperature, and the breakdowns."""
    temperatures = results["temperatures"]
    heads = [f"T = {t}" + f", {of['samples']} samples" * (of["samples"] > 1) for t, of in temperatures.items()]
    hidden = ("samples", "breakdown", "pass@1", "maj@1", "macro_accuracy", "macro_gold_anywhere", "macro_mean_reward")
    names = dict.fromkeys(name for of in temperatures.values() for name in of if name not in hidden)
    rows = [("mean [95%]", *heads)]
    rows += [(label(name), *(cell(name, of) for of in temperatures.values())) for name in names]
    on = f"{results['n']:,} problems of {results['data']} {results['split']}"
    parts = [f"{results['model']} on {on}\n{table(rows)}"]

    first = "accuracy" if "accuracy" in names else "mean_reward"
    for part, groups in next(iter(temperatures.values()))["breakdown"].items():
        rows = [(part, "n", *(f"{label(first)} at T = {temperature} [95%]" for temperature in temperatures))]
        for value, group in groups.items():
            here = [of["breakdown"][part][value] for of in temperatures.values()]
            rows.append((value or "-", group["n"], *(cell(first, of) for of in here)))
        if part == "source":
            rows.append(("macro average", "", *(cell(f"macro_{first}", of) for of in temperatures.values())))
        long = f"{part}: {len(groups)} kinds, in results.json"
        parts.append(table(rows) if len(groups) <= LONGEST_BREAKDOWN else long)
    return "\n\n".join(parts)


def cell(name: str, of: dict[str, Any]) -> str:
    """A measure as text; "-" if it is not there."""
    if name not in of:
        return "-"
    return as_text(name, **of[name]) if isinstance(of[name], dict) else as_text(name, of[name])
