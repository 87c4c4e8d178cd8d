"""The tables that ``python -m pspo.evaluate`` prints."""

from typing import Any

from pspo.run.results import percent, table

LONGEST_BREAKDOWN = 12  # lines on the terminal


def render(results: dict[str, Any]) -> str:
    """The contents of ``results.json`` as tables: one line per temperature, pass@k, and the breakdowns."""

    def estimate(result: dict[str, Any], name: str) -> str:
        return percent(result[name]["value"], result[name]["ci95"])

    temperatures = results["temperatures"]
    rows = [("temperature", "accuracy [95%]", "true accuracy [95%]", "reward", "format", "truncated", "tokens")]
    for temperature, result in temperatures.items():
        shares = (percent(result["format_share"]), percent(result["truncated_share"]))
        rows.append(
            (temperature, estimate(result, "accuracy"), estimate(result, "true_accuracy"),
             f"{result['mean_reward']:.3f}", *shares, f"{result['completion_tokens']:.1f}")
        )  # fmt: skip
    on = f"{results['n']:,} problems of {results['data']} {results['split']}"
    parts = [f"{results['model']} on {on}\n{table(rows)}"]

    sampled = {temperature: result for temperature, result in temperatures.items() if result["samples"] > 1}
    if sampled:
        passes = [name for name in next(iter(sampled.values())) if name.startswith("pass@")]
        rows = [("temperature", *(f"{name} of {results['samples']} [95%]" for name in passes))]
        rows += [(temperature, *(estimate(result, name) for name in passes)) for temperature, result in sampled.items()]
        parts.append(table(rows))

    for part, groups in next(iter(temperatures.values()))["breakdown"].items():
        rows = [(part, "n", *(f"accuracy at {temperature} [95%]" for temperature in temperatures))]
        for value, group in groups.items():
            here = [result["breakdown"][part][value] for result in temperatures.values()]
            rows.append((value or "-", group["n"], *(estimate(result, "accuracy") for result in here)))
        long = f"{part}: {len(groups)} kinds, in results.json"
        parts.append(table(rows) if len(groups) <= LONGEST_BREAKDOWN else long)
    return "\n\n".join(parts)
