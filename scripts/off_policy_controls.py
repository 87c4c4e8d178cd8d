"""Tables and picture of configs/sweep/off-policy-controls.yaml: python scripts/off_policy_controls.py FOLDER

FOLDER has its packed runs. Writes paths.svg, and in FOLDER's README.md what stands between <!-- BLOCK --> and
<!-- end BLOCK -->. Numbers are final validation rewards.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from moves import as_text, intervals, judge, word
from off_policy import UNTRAINED, fill, read

from pspo.report.figures import GREY, picture
from pspo.report.runs import COLOURS
from pspo.report.tables import add_holm, as_markdown

LAGS, EPOCHS = [0, 8], [1, 2, 4, 8]  # of the paths
PATHS = {1: "1 x 4e-4", 2: "2 x 2e-4", 4: "4 x 1e-4", 8: "8 x 5e-5"}
AHEAD, BEHIND = ["Clip", "TOPR"], ["NoClip", "P3O"]


def slopes(paths: pd.DataFrame, epochs: list[int] = EPOCHS, measure: str = "final") -> pd.DataFrame:
    """(lag, seed; method): least-squares slopes of a measure over log2(epochs)."""
    x = np.log2(epochs) - np.log2(epochs).mean()
    values = paths.pivot(index=["lag", "seed", "method"], columns="epochs", values=measure)[epochs]
    return (values @ (x / (x @ x))).unstack("method")


def lead(paths: pd.DataFrame) -> pd.DataFrame:
    """(seed; epochs): mean of AHEAD minus mean of BEHIND at lag 8."""
    values = paths[paths["lag"] == 8].pivot(index=["seed", "epochs"], columns="method", values="final")
    return (values[AHEAD].mean(axis=1) - values[BEHIND].mean(axis=1)).unstack("epochs")


def chosen(rates: pd.DataFrame) -> pd.DataFrame:
    """(seed; (method, lag)): the reward at the rate that the other seeds choose by their mean."""
    found = {}
    for cell, of in rates.groupby(["method", "lag"], sort=False):
        values = of.pivot(index="seed", columns="lr", values="final")
        found[cell] = pd.Series({seed: values.loc[seed, values.drop(seed).mean().idxmax()] for seed in values.index})
    return pd.DataFrame(found).rename_axis(columns=["method", "lag"])


def best_rates(rates: pd.DataFrame) -> pd.DataFrame:
    """(method; lag): the rate with the best mean of all seeds."""
    means = rates.groupby(["method", "lag", "lr"])["final"].mean().unstack("lr")
    return means.idxmax(axis=1).unstack("lag")


def compare(reached: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """By method, of what ``chosen`` found: the cost of lag 8, and there the differences from NoClip, with Holm's p."""
    on_time, stale = (reached.xs(lag, axis=1, level=1) for lag in LAGS)
    apart = stale.drop(columns="NoClip").sub(stale["NoClip"], axis=0)
    return intervals(on_time - stale), add_holm(intervals(apart))


def mean_slopes(paths: pd.DataFrame, **which: Any) -> pd.DataFrame:
    """(lag; mean, low, high): the slope, mean over methods; ``which`` as of ``slopes``."""
    return intervals(slopes(paths, **which).mean(axis=1).unstack("lag"))


def means(runs: pd.DataFrame, column: str, measure: str = "final") -> pd.DataFrame:
    """(lag, method; column): means over seeds, as text."""
    return runs.groupby(["lag", "method", column])[measure].mean().unstack(column).map("{:.3f}".format)


def by_lag(table: pd.DataFrame) -> str:
    """A table with rows (lag, method)."""
    return as_markdown(table.set_axis([f"{method}, lag {lag}" for lag, method in table.index]))


def paths_table(paths: pd.DataFrame) -> str:
    """A row per lag and method: its mean on every path, and its slope."""
    slope = pd.concat({lag: intervals(of) for lag, of in slopes(paths).groupby("lag")}).apply(as_text, axis=1)
    return by_lag(means(paths, "epochs").rename(columns=PATHS).assign(**{"slope per doubling": slope}))


def afterwards(paths: pd.DataFrame) -> str:
    """A row per way to measure the slope, mean over methods, that was not predicted."""
    ways = {
        "all four paths": {},
        "without 1 x 4e-4": {"epochs": EPOCHS[1:]},
        "4 x 1e-4 and 8 x 5e-5": {"epochs": EPOCHS[2:]},
        "peak training reward": {"measure": "peak"},
    }
    cells = {name: mean_slopes(paths, **way).apply(as_text, axis=1) for name, way in ways.items()}
    return as_markdown(pd.DataFrame(cells).rename(index="lag {}".format).T)


def moved(paths: pd.DataFrame) -> str:
    """A row per method at lag 8: the KL from the policy that drew, before a rollout's last step, on every path."""
    return as_markdown(means(paths, "epochs", "kl_old_new").loc[8].rename(columns=PATHS).rename_axis(None))


def rates_table(rates: pd.DataFrame) -> str:
    """A row per method: what its chosen rates reach at each lag, the best rate of all seeds, and what the lag costs."""
    reached, best = chosen(rates), best_rates(rates)
    costs, apart = compare(reached)
    texts = reached.mean().map("{:.3f} ".format) + best.stack().map("({:.0e})".format)
    columns = texts.unstack().rename(columns="lag {}".format)
    columns["cost of lag 8"] = costs.apply(as_text, axis=1)
    stars = apart["holm"].lt(0.05).map({True: "*", False: ""})
    columns["at lag 8 minus NoClip's"] = apart.apply(as_text, axis=1) + stars
    return as_markdown(columns.loc[costs.index].fillna("").rename_axis(None))


def every_rate(rates: pd.DataFrame) -> str:
    """A row per method and lag: the mean at every rate."""
    return by_lag(means(rates, "lr").rename(columns="{:.0e}".format))


def verdicts(paths: pd.DataFrame, rates: pd.DataFrame) -> str:
    """Each prediction of the configuration file with its verdict."""
    slope, best, (costs, apart) = mean_slopes(paths), best_rates(rates)[8], compare(chosen(rates))
    return as_markdown(pd.DataFrame({"verdict": {
        "1: lag 8, the slope is 0, within 0.02": judge(slope.loc[[8]], -0.02, 0.02),
        "2: lag 0, the same": judge(slope.loc[[0]], -0.02, 0.02),
        "3: Clip and TOPR above NoClip and P3O on every path": judge(intervals(lead(paths)), low=0),
        "4: no method pays more than 0.08 for lag 8": judge(costs, high=0.08),
        "4: Clip's and TOPR's rates are at least twice NoClip's": word(best[AHEAD].min() >= 2 * best["NoClip"]),
        "5: none differs from NoClip after Holm": word((apart["holm"] >= 0.05).all()),
    }}))  # fmt: skip


def draw(paths: pd.DataFrame, path: Path) -> None:
    """Draw every method's final reward on the four paths, at each lag, with the untrained level."""
    with picture(path, 8.4, 3.4, "epochs x learning rate") as figure:
        for axes, (lag, of) in zip(figure.subplots(1, 2, sharey=True), paths.groupby("lag"), strict=True):
            axes.axhline(UNTRAINED["tiny-base"], color=GREY, ls=":", linewidth=1)
            axes.annotate("untrained", (-0.1, UNTRAINED["tiny-base"]), va="bottom")
            for method, own in of.groupby("method"):
                cells, colour = intervals(own.pivot(index="seed", columns="epochs", values="final")), COLOURS[method]
                axes.plot(cells["mean"].to_numpy(), color=colour)
                axes.fill_between(range(len(cells)), cells["low"], cells["high"], color=colour, alpha=0.12, linewidth=0)
                axes.annotate(f" {method}", (len(cells) - 1, cells["mean"].iloc[-1]), va="center")
            axes.set(title=f"final reward at lag {lag}", xlim=(-0.2, 3.6), xticks=range(4), xticklabels=PATHS.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with runs.parquet, summaries.parquet, settings.yaml and README.md")
    folder = parser.parse_args().folder
    runs = read(folder)
    paths, rates = runs[runs["experiment"] != "rates"], runs[runs["experiment"] == "rates"]
    draw(paths, folder / "paths.svg")
    blocks = {"paths": paths_table(paths), "afterwards": afterwards(paths), "moved": moved(paths)}
    blocks |= {"rates": rates_table(rates), "every-rate": every_rate(rates), "predictions": verdicts(paths, rates)}
    fill(folder / "README.md", blocks)


if __name__ == "__main__":
    main()
