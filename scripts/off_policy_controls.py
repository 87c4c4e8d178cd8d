"""Tables and picture of configs/sweep/off-policy-controls.yaml: python scripts/off_policy_controls.py FOLDER

FOLDER has its packed runs. Writes paths.svg, and in FOLDER's README.md what stands between <!-- table: NAME -->
and <!-- /table -->. Numbers are final validation rewards.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from moves import as_text, intervals, judge, word
from off_policy import UNTRAINED, fill, read

from pspo_lab.figures import COLOURS, GREY, picture
from pspo_lab.tables import add_holm
from pspo_lab.text import markdown_table

LAGS, EPOCHS = [0, 8], [1, 2, 4, 8]  # of the paths
PATHS = {1: "1 x 4e-4", 2: "2 x 2e-4", 4: "4 x 1e-4", 8: "8 x 5e-5"}
AHEAD, BEHIND = ["Clip", "TOPR"], ["NoClip", "P3O"]
CONSTANTS = {"Clip": "epsilon", "CISPO": "epsilon_high", "DPPO": "epsilon", "GSPO": "epsilon", "TOPR": "level"}
FOUR = {"NoClip": "NoClip", "P3O": "P3O", "SAPO": "SAPO", "TOPR": "TOPR sequence"}  # of which both aggregations are
RANGES = {"Clip": (0.1, 0.4, "dapo"), "CISPO": (1.0, 4.0, "dapo"), "DPPO": (0.15, 0.3, "dapo"),
          "GSPO": (3e-4, 3e-3, "grpo")}  # fmt: skip
DECOUPLED = "NoClip, dapo, decoupled, {}".format
PAIRS = {  # differences of variants
    "TOPR minus NoClip, dapo": ("TOPR sequence, dapo", "NoClip, dapo"),
    "TOPR minus NoClip, grpo": ("TOPR sequence, grpo", "NoClip, grpo"),
    "TOPR, ratio of the token, minus NoClip, grpo": ("TOPR token, grpo", "NoClip, grpo"),
    "SAPO minus NoClip, dapo": ("SAPO, dapo", "NoClip, dapo"),
    **{f"{name}, grpo minus dapo": (f"{of}, grpo", f"{of}, dapo") for name, of in FOUR.items()},
    "TOPR, ratio of the token minus that of the completion": ("TOPR token, grpo", "TOPR sequence, grpo"),
    "decoupled minus coupled, no correction": (DECOUPLED("none"), "NoClip, dapo"),
    "decoupled minus coupled, sequence_mask": (DECOUPLED("sequence_mask"), "NoClip, dapo"),
    "sequence_mask minus shuffled": (DECOUPLED("sequence_mask"), DECOUPLED("shuffled_sequence_mask")),
    "shuffled minus no correction": (DECOUPLED("shuffled_sequence_mask"), DECOUPLED("none")),
    "sequence_mask minus no correction": (DECOUPLED("sequence_mask"), DECOUPLED("none")),
    "random_mask minus no correction": (DECOUPLED("random_mask"), DECOUPLED("none")),
    "random_mask minus shuffled": (DECOUPLED("random_mask"), DECOUPLED("shuffled_sequence_mask")),
    "sequence_truncate minus shuffled": (DECOUPLED("sequence_truncate"), DECOUPLED("shuffled_sequence_mask")),
    "sequence_mask minus random_mask": (DECOUPLED("sequence_mask"), DECOUPLED("random_mask")),
    "sequence_truncate minus no correction": (DECOUPLED("sequence_truncate"), DECOUPLED("none")),
    "sequence_mask minus sequence_truncate": (DECOUPLED("sequence_mask"), DECOUPLED("sequence_truncate")),
    **{f"{name}, {low:g} minus {high:g}": (f"{name} {low:g}, {how}", f"{name} {high:g}, {how}")
       for name, (low, high, how) in RANGES.items()},
}  # fmt: skip


def slopes(paths: pd.DataFrame, epochs: list[int] = EPOCHS, measure: str = "final") -> pd.DataFrame:
    """(lag, seed; method): least-squares slopes of a measure over log2(epochs)."""
    x = np.log2(epochs) - np.log2(epochs).mean()
    values = paths.pivot(index=["lag", "seed", "method"], columns="epochs", values=measure)[epochs]
    return (values @ (x / (x @ x))).unstack("method")


def lead(paths: pd.DataFrame) -> pd.DataFrame:
    """(seed; epochs): mean of AHEAD minus mean of BEHIND at lag 8."""
    values = paths[paths["lag"] == 8].pivot(index=["seed", "epochs"], columns="method", values="final")
    return (values[AHEAD].mean(axis=1) - values[BEHIND].mean(axis=1)).unstack("epochs")


def chosen(rates: pd.DataFrame, *choice: str) -> pd.DataFrame:
    """(seed; (method, lag)): the reward at the rate, and what else ``choice`` names, that the other seeds choose."""
    found = {}
    for cell, of in rates.groupby(["method", "lag"], sort=False):
        values = of.pivot(index="seed", columns=["lr", *choice], values="final")
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
    found = runs.groupby(["lag", "method", column])[measure].mean().unstack(column)
    return found.map("{:.3f}".format, na_action="ignore").fillna("")


def by_lag(table: pd.DataFrame) -> str:
    """A table with rows (lag, method)."""
    return markdown_table(table.set_axis([f"{method}, lag {lag}" for lag, method in table.index]))


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
    return markdown_table(pd.DataFrame(cells).rename(index="lag {}".format).T)


def moved(paths: pd.DataFrame) -> str:
    """A row per method at lag 8: the KL from the policy that drew, before a rollout's last step, on every path."""
    return markdown_table(means(paths, "epochs", "kl_old_new").loc[8].rename(columns=PATHS).rename_axis(None))


def rates_table(rates: pd.DataFrame) -> str:
    """A row per method: what its chosen rates reach at each lag, the best rate of all seeds, and what the lag costs."""
    reached, best = chosen(rates), best_rates(rates)
    costs, apart = compare(reached)
    texts = reached.mean().map("{:.3f} ".format) + best.stack().map("({:.0e})".format)
    columns = texts.unstack().rename(columns="lag {}".format)
    columns["cost of lag 8"] = costs.apply(as_text, axis=1)
    stars = apart["holm"].lt(0.05).map({True: "*", False: ""})
    columns["at lag 8 minus NoClip's"] = apart.apply(as_text, axis=1) + stars
    return markdown_table(columns.loc[costs.index].fillna("").rename_axis(None))


def every_rate(rates: pd.DataFrame) -> str:
    """A row per method and lag: the mean at every rate."""
    return by_lag(means(rates, "lr").rename(columns="{:.0e}".format))


def shorter_paths(runs: pd.DataFrame) -> str:
    """A row per method at lag 8: four epochs minus one, at 1.2 times as much rate x steps, less than that of PATHS."""
    values = runs.pivot(index="seed", columns=["method", "epochs", "lr"], values="final")
    lrs = {"4 x 3e-5 minus 1 x 1e-4": (3e-5, 1e-4), "4 x 6e-5 minus 1 x 2e-4": (6e-5, 2e-4)}
    found = {title: {name: as_text(intervals((values[name, 4, many] - values[name, 1, few]).to_frame()).iloc[0])
                     for name in ("Clip", "NoClip")} for title, (many, few) in lrs.items()}  # fmt: skip
    return markdown_table(pd.DataFrame(found))


def variants(runs: pd.DataFrame) -> pd.DataFrame:
    """(seed; (measure, lr, variant)): final rewards and KLs, a variant named by its method and what varies of it."""
    constants = [run.get(CONSTANTS.get(run["method"])) for _, run in runs.iterrows()]
    shown = ["" if of is None else f" {of:g}" if isinstance(of, float) else f" {of}" for of in constants]
    arm = (", decoupled, " + runs["arm"].str.rpartition(".")[2]).where(runs["arm"] != "coupled", "")
    named = runs.assign(variant=runs["method"] + shown + ", " + runs["aggregation"] + arm)
    return named.pivot(index="seed", columns=["lr", "variant"], values=["final", "kl_old_new"]).sort_index(axis=1)


def pairs(values: pd.DataFrame) -> pd.DataFrame:
    """(pair; mean, low, high): PAIRS over seeds, of variants (seed; variant) at one rate."""
    found = {name: values[one] - values[other] for name, (one, other) in PAIRS.items()}
    found["mean of the four, grpo minus dapo"] = sum(found[f"{name}, grpo minus dapo"] for name in FOUR) / len(FOUR)
    return intervals(pd.DataFrame(found))


def variants_table(values: pd.DataFrame) -> str:
    """A row per variant: its mean reward at each rate, and the KL but of those whose ratios are to another policy."""
    means = values.mean().map("{:.3f}".format).unstack("lr").rename(columns="{:.0e}".format)
    kl = means.loc["kl_old_new"].add_prefix("KL at ")
    kl.loc[kl.index.str.contains("decoupled")] = ""
    return markdown_table(means.loc["final"].join(kl).rename_axis(None))


def pairs_table(at: dict[float, pd.DataFrame]) -> str:
    """A row per pair: its difference at each rate."""
    return markdown_table(pd.DataFrame({f"{lr:.0e}": cells.apply(as_text, axis=1) for lr, cells in at.items()}))


def verdicts(paths: pd.DataFrame, rates: pd.DataFrame, more: pd.DataFrame, at: dict[float, pd.DataFrame]) -> str:
    """Each prediction of the configuration file with its verdict; ``more`` are the low rates and the single epochs."""
    slope, best, (costs, apart) = mean_slopes(paths), best_rates(rates)[8], compare(chosen(rates))
    stale = pd.concat([rates[rates["lag"] == 8], more])
    by_rate = stale[stale["epochs"] == 4].pivot(index="seed", columns=["method", "lr"], values="final")
    lower = pd.DataFrame({name: by_rate[name, 3e-6] - by_rate[name, 1e-5] for name in BEHIND})
    reached = chosen(stale[stale["method"].isin(["Clip", "NoClip"])], "epochs").droplevel("lag", axis=1)
    of_clip = intervals((reached["Clip"] - reached["NoClip"]).to_frame("Clip"))
    slow, fast = at.values()
    ranges = [name for name in fast.index if name.partition(",")[0] in RANGES and name[-1].isdigit()]
    return markdown_table(pd.DataFrame({"verdict": {
        "1: lag 8, the slope is 0, within 0.02": judge(slope.loc[[8]], -0.02, 0.02),
        "2: lag 0, the same": judge(slope.loc[[0]], -0.02, 0.02),
        "3: Clip and TOPR above NoClip and P3O on every path": judge(intervals(lead(paths)), low=0),
        "4: no method pays more than 0.08 for lag 8": judge(costs, high=0.08),
        "4: at lag 8 Clip's and TOPR's rates are at least twice NoClip's": word(
            best[AHEAD].min() >= 2 * best["NoClip"]),
        "5: none differs from NoClip after Holm": word((apart["holm"] >= 0.05).all()),
        "6: at 1e-4 TOPR is above NoClip under dapo and grpo": judge(fast.filter(like="TOPR minus", axis=0), low=0),
        "7: grpo is dapo, within 0.03, mean of the four": judge(
            pd.concat([of.loc[["mean of the four, grpo minus dapo"]] for of in (slow, fast)]), -0.03, 0.03),
        "8: at 1e-4 TOPR with each token's ratio is below": judge(
            fast.filter(like="of the completion", axis=0), high=0),
        "9: at 1e-4 sequence_mask is above it shuffled": judge(fast.loc[["sequence_mask minus shuffled"]], low=0),
        "10: at 1e-4 shuffled is above no correction": judge(fast.loc[["shuffled minus no correction"]], low=0),
        "11: NoClip and P3O are lower at 3e-6 than at 1e-5": judge(intervals(lower), high=0),
        "12: epochs and rate chosen, Clip is NoClip, within 0.03": judge(of_clip, -0.03, 0.03),
        "13: at 1e-4 the narrow range is above the wide one": judge(fast.loc[ranges], low=0),
        "14: at 3e-5 below": judge(slow.loc[ranges], high=0),
        "15: at 1e-4 sequence_mask is above the random mask": judge(
            fast.loc[["sequence_mask minus random_mask"]], low=0),
        "16: at 1e-4 sequence_truncate is above no correction": judge(
            fast.loc[["sequence_truncate minus no correction"]], low=0),
        "17: at 1e-4 sequence_mask is above sequence_truncate": judge(
            fast.loc[["sequence_mask minus sequence_truncate"]], low=0),
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
    by_experiment = dict(list(runs.groupby("experiment")))
    paths, rates = pd.concat([by_experiment[f"path-{n}"] for n in EPOCHS]), by_experiment["rates"]
    low, once = by_experiment["low-rates"], by_experiment["one-epoch"]
    at_two = rates[(rates["lag"] == 8) & rates["lr"].isin([3e-5, 1e-4])]
    more = pd.concat([at_two, *(by_experiment[name] for name in ("aggregation", "masks", "more-masks", "ranges"))])
    values = variants(more)
    at = {lr: pairs(values["final", lr]) for lr in values.columns.unique("lr")}
    draw(paths, folder / "paths.svg")
    blocks = {"paths": paths_table(paths), "afterwards": afterwards(paths), "moved": moved(paths)}
    blocks |= {"rates": rates_table(rates), "every-rate": every_rate(pd.concat([rates, low]))}
    blocks |= {"one-epoch": every_rate(once), "shorter": shorter_paths(pd.concat([rates[rates["lag"] == 8], once]))}
    blocks |= {"variants": variants_table(values), "pairs": pairs_table(at)}
    blocks["predictions"] = verdicts(paths, rates, pd.concat([low, once]), at)
    fill(folder / "README.md", blocks)


if __name__ == "__main__":
    main()
