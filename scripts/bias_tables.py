"""Tables and picture of the gradient-bias study: python scripts/bias_tables.py FOLDER --moves MOVES.csv

FOLDER has base.jsonl, math.jsonl and smollm2.jsonl: lines of scripts/gradient_bias.py of commit f6aff6e, of SmolLM2
those of NoClip and Clip. MOVES.csv is what scripts/moves.py writes of forks from the same checkpoints. Writes base.svg,
math.svg, and in FOLDER's README.md what stands between <!-- table: NAME --> and <!-- /table -->.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from moves import AIMS, FOUR, as_text, draw_intervals, intervals, judge
from off_policy import fill

from pspo.cli.files import read_jsonl
from pspo_lab.figures import GREY, picture
from pspo_lab.text import markdown_table

LEFT_OUT = "PSPO"  # NoClip counted again
REPLAY = "NoClip::replay"
SIZES = {"length": "norm2", "noise": "variance"}  # squared, of a gradient's mean and of what varies around it
GROUPS = [FOUR, ["P3O", "VESPO"]]  # that gain alike, and less than the others: seen afterwards
METRICS, LAG = ["adam", "plain"], 8  # the first is the primary one
SHOWN = {"tiny-base": "adam", "tiny-math": "plain"}  # in the tables: tiny-math has intervals of +-1 in adam


def derived(target2: Any, dot: Any, norm2: Any, second: Any) -> dict[str, Any]:
    """What a line says, from its four unbiased estimates, numbers or columns; NaN where a square is not above 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "target2": target2,
            "dot": dot,
            "norm2": norm2,
            "second": second,
            "bias2": norm2 - 2 * dot + target2,
            "variance": second - norm2,
            "mse": second - 2 * dot + target2,
            "cosine": dot / np.sqrt(norm2 * target2),
            "signal": np.divide(norm2, second),  # NaN also for two floats: a loss may leave no token with weight
            "rho": dot / np.sqrt(second * target2),
        }


def by_run(found: pd.DataFrame) -> pd.DataFrame:
    """By run and surrogate, its checkpoints together, each in units of its |t|^2."""
    parts = found[["dot", "norm2", "second"]].div(found["target2"], axis=0).join(found[["realised", "back"]])
    means = parts.astype(float).groupby([found["run"], found["surrogate"]]).mean()
    table = pd.DataFrame(derived(1.0, means["dot"], means["norm2"], means["second"]))
    return table.join(means[["realised", "back"]]).assign(root_signal=table["rho"] / table["cosine"])


def beside_noclip(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows (run, surrogate), and beside each NoClip's with the run's nucleus, of its run and aggregation.

    Without NoClip itself and LEFT_OUT.
    """
    base = [(run, ":".join(["NoClip", *name.split(":")[1:2]]).removesuffix(":")) for run, name in table.index]
    shown = [pair != of and pair[1] != LEFT_OUT for pair, of in zip(table.index, base, strict=True)]
    return table[shown], table.reindex(base).set_axis(table.index)[shown]


def share_of_bias(rows: pd.DataFrame, base: pd.DataFrame) -> pd.Series:
    """By run, the part of the squared differences of rho = cosine sqrt(signal) that the cosine makes.

    A difference of products is the sum of each factor's difference times the mean of the other one.
    """
    whole, difference = rows["cosine"].notna() & base["cosine"].notna(), rows["rho"] - base["rho"]
    by_cosine = (rows["cosine"] - base["cosine"]) * (rows["root_signal"] + base["root_signal"]) / 2
    return (by_cosine * difference)[whole].groupby("run").sum() / (difference**2)[whole].groupby("run").sum()


def rank_correlation(one: pd.DataFrame, other: pd.DataFrame) -> pd.Series:
    """Spearman's over the surrogates that both have, run by run, of two tables of runs x surrogates."""
    one, other = one.align(other, join="inner")
    both = one.notna() & other.notna()
    return one.where(both).rank(axis=1).corrwith(other.where(both).rank(axis=1), axis=1)


def gains(moves: pd.DataFrame, found: pd.DataFrame, model: str) -> pd.DataFrame:
    """Gain in reward at equal movement, runs x surrogates, of forks from the lines' checkpoints."""
    at = {"model": model, "stage": "first", "lag": LAG, "aim": AIMS[model], "matched": True}
    forks = moves[(moves[list(at)] == pd.Series(at)).all(axis=1)].merge(found[["run", "rollouts"]].drop_duplicates())
    return forks.groupby(["run", "surrogate"])["reward"].mean().unstack()


def correlations(rows: pd.DataFrame, base: pd.DataFrame, gained: pd.DataFrame) -> pd.DataFrame:
    """By run, rank correlations over surrogates of what a line has with the gain in reward, both minus NoClip's.

    ``gains of the other runs``: of their mean gain, the best that any number of the surrogate's could predict.
    """
    more, usual = beside_noclip(gained.stack().to_frame("reward"))
    gained = (more - usual)["reward"].unstack()
    gained = gained[gained.columns.intersection(rows.index.unique("surrogate"))]
    others = pd.DataFrame({run: gained.drop(run).mean() for run in gained.index}).T
    found = {name: (rows - base)[name].unstack() for name in ("rho", "cosine", "root_signal", "realised", "back")}
    found["gains of the other runs"] = others
    return pd.DataFrame({name: rank_correlation(gained, of) for name, of in found.items()})


def verdicts(found: pd.DataFrame, gained: pd.DataFrame) -> dict[str, str]:
    """Each prediction of the page with its verdict, from the lines of one metric at lag 8."""
    rows, base = beside_noclip(table := by_run(found))
    cosine = table["cosine"].unstack()
    own = intervals(cosine.drop(columns=REPLAY))
    cells = {name: intervals((rows - base)[name].unstack()) for name in ("rho", "cosine", "root_signal", "back")}
    compared, p3o = cells["rho"].drop(REPLAY), ["P3O"]
    apart = int(((compared["low"] > 0) | (compared["high"] < 0)).sum())
    share = judge(intervals(share_of_bias(*(of.drop(REPLAY, level=1) for of in (rows, base))).to_frame()), low=0.5)
    ranks = intervals(correlations(rows, base, gained))
    predicted = judge(ranks.loc[["rho"]], low=0)
    if predicted.startswith("undecided") and ranks.loc["gains of the other runs", "low"] > 0:
        predicted = predicted.replace("undecided", "failed")
    return {
        "1: bias's share is above 0.5": share if apart >= 3 else f"none: {apart} of 10 differences without 0",
        "2: cosines of Clip, DPPO, GSPO, GMPO are below 0": judge(own.loc[FOUR], high=0),
        "2: their back is above NoClip's": judge(cells["back"].loc[FOUR], low=0),
        "2: cosines of the other nine are above 0": judge(own.drop(FOUR), low=0),
        "3: P3O's sqrt(signal) is below NoClip's": judge(cells["root_signal"].loc[p3o], high=0),
        "3: its cosine is NoClip's, within 0.1": judge(cells["cosine"].loc[p3o], -0.1, 0.1),
        "4: REINFORCE's rho is above NoClip's": judge(cells["rho"].loc[["REINFORCE"]], low=0),
        "5: rho ranks surrogates as the gain does": predicted,
        "6: so does realised": judge(ranks.loc[["realised"]], low=0),
        "7: the nucleus replayed, rho is NoClip's, within 0.03": judge(cells["rho"].loc[[REPLAY]], -0.03, 0.03),
    }


def surrogates(found: pd.DataFrame, gained: pd.DataFrame) -> str:
    """A row per surrogate, best gain first, from the lines of one metric at lag 8."""
    rows, base = beside_noclip(table := by_run(found))
    apart = intervals((rows - base)["cosine"].unstack())
    ratios = {name: ((rows / base)[of] ** 0.5).groupby("surrogate").mean() for name, of in SIZES.items()}
    of = {name: intervals(table[name].unstack()) for name in ("cosine", "signal", "rho", "back")}
    gain = gained.mean().reindex(of["rho"].index)
    columns = {
        "gain in reward": gain.map("{:+.3f}".format, na_action="ignore"),
        "cosine": of["cosine"].apply(as_text, axis=1),
        "minus NoClip's": apart.apply(as_text, axis=1),
        **{name: of.map("{:.2f}".format) for name, of in ratios.items()},
        "signal": of["signal"]["mean"].map("{:.2f}".format),
        "rho": of["rho"]["mean"].map("{:+.2f}".format),
        "back": of["back"]["mean"].map("{:+.2f}".format),
    }
    order = gain.sort_values(ascending=False).index
    return markdown_table(pd.DataFrame(columns).loc[order].fillna("").rename_axis(None))


def draw(found: pd.DataFrame, gained: pd.DataFrame, path: Path) -> None:
    """Draw each surrogate's cosine, signal and gain with their intervals, best gain on top."""
    table, gained = by_run(found), gained[gained.columns.intersection(found["surrogate"].unique())]
    names = gained.mean().sort_values().index
    panels = {
        "cosine with the true gradient": table["cosine"].unstack(),
        "signal: share that replicates agree on": table["signal"].unstack(),
        "gain in reward at equal movement": gained,
    }
    with picture(path, 9.6, 4.2, "gradients on rollouts eight rollouts old, and what a step gains") as figure:
        for axes, (title, values) in zip(figure.subplots(1, 3, sharey=True), panels.items(), strict=True):
            cells, y = intervals(values).loc[names], np.arange(len(names))
            axes.axvline(0, color=GREY, ls=":", linewidth=1)
            draw_intervals(axes, cells, y)
            axes.set(xlabel=title, yticks=y, yticklabels=names)


def afterwards(found: pd.DataFrame, gained: pd.DataFrame) -> dict[str, pd.Series]:
    """By run, numbers of the page's text that were not predicted."""
    rows, base = beside_noclip(by_run(found))
    clip, noclip = (by_run(found)["dot"].xs(name, level="surrogate") for name in ("Clip", "NoClip"))
    names = rows.index.get_level_values("surrogate")
    group = pd.Series(np.select([names.isin(of) for of in GROUPS], [0, 1], 2), rows.index)
    alike, others = group == 2, ~names.isin(FOUR) & (names != REPLAY)
    wider = by_run(found.assign(second=found["norm2"] + (found["second"] - found["norm2"]) / 8))["rho"].unstack()
    return {
        "share of NoClip's progress that Clip cuts": 1 - clip / noclip,
        "NoClip's bias, of the true gradient's square": by_run(found)["bias2"].unstack()["NoClip"],
        "rank correlation of the three groups with the gain": correlations(
            rows.assign(rho=group), base.assign(rho=0), gained)["rho"],
        "rank correlation of rho within the best group": correlations(rows[alike], base[alike], gained)["rho"],
        "bias's share without the four": share_of_bias(rows[others], base[others]),
        "REINFORCE's gain minus NoClip's": gained["REINFORCE"] - gained["NoClip"],
        "REINFORCE's rho minus NoClip's at 256 x 8": wider["REINFORCE"] - wider["NoClip"],
    }  # fmt: skip


def in_small(lines: pd.DataFrame) -> dict[str, str]:
    """Of NoClip and Clip alone: a row per lag and metric, the primary one first, and a column of verdicts on 10 to 12.

    Inner products with the true gradient, unbiased also where a run's cosine is not to be had, are in units of the mean
    over runs of its square.
    """
    rows, columns = {}, {}
    lines = lines.sort_values(["lag", "metric"], ascending=[True, False])
    for (lag, metric), of in lines.groupby(["lag", "metric"], sort=False):
        table = of.pivot(index="run", columns="surrogate")
        dot, back = table["dot"] / table["target2"]["NoClip"].mean(), table["back"]
        cells = intervals(pd.DataFrame({
            "NoClip": dot["NoClip"],
            "Clip": dot["Clip"],
            "Clip minus half of NoClip": dot["Clip"] - dot["NoClip"] / 2,
            "back, NoClip": back["NoClip"],
            "back, Clip minus NoClip": back["Clip"] - back["NoClip"],
        }))  # fmt: skip
        rows[f"lag {lag}, {metric}"] = cells.apply(as_text, axis=1).where(cells["low"].notna(), "")
        seen = judge(cells.loc[["NoClip"]], low=0)
        own = {
            "10: NoClip's inner product is above 0": seen,
            "11: Clip's is below half of it": judge(cells.loc[["Clip minus half of NoClip"]], high=0),
            "12: Clip's back is above NoClip's": judge(cells.loc[["back, Clip minus NoClip"]], low=0),
        }
        if not seen.startswith("held"):  # 10 is the check
            own |= dict.fromkeys(list(own)[1:], "none")
        columns[f"lag {lag}, {metric}"] = own
    return {
        "smollm2": markdown_table(pd.DataFrame(rows).T),
        "smollm2 predictions": markdown_table(pd.DataFrame(columns)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with base.jsonl, math.jsonl, smollm2.jsonl and README.md")
    parser.add_argument("--moves", type=Path, required=True)
    args = parser.parse_args()
    moves, columns = pd.read_csv(args.moves), {}
    blocks = in_small(pd.DataFrame(read_jsonl(args.folder / "smollm2.jsonl")))
    for path in (args.folder / "base.jsonl", args.folder / "math.jsonl"):
        lines, model = pd.DataFrame(read_jsonl(path)), f"tiny-{path.stem}"
        stale, gained = lines[lines["lag"] == LAG], gains(moves, lines, model)
        for metric in METRICS:
            found = stale[stale["metric"] == metric]
            columns[f"{model}, {metric}"] = verdicts(found, gained)
        adam, plain = (columns[f"{model}, {metric}"] for metric in METRICS)
        differ = sorted({row[0] for row in adam if adam[row].partition(":")[0] != plain[row].partition(":")[0]})
        shown = stale[stale["metric"] == SHOWN[model]]
        on_time = lines[(lines["lag"] == 0) & (lines["metric"] == METRICS[0])]
        rows, base = beside_noclip(by_run(shown))
        others = ~rows.index.isin(FOUR, level="surrogate")
        ranks = {"ten surrogates": correlations(rows, base, gained),
                 "without the four that cut": correlations(rows[others], base[others], gained)}  # fmt: skip
        ranks = {name: intervals(of).apply(as_text, axis=1) for name, of in ranks.items()}
        blocks[f"{model} ranks"] = markdown_table(pd.DataFrame(ranks))
        blocks[model] = surrogates(shown, gained)
        draw(shown, gained, args.folder / f"{path.stem}.svg")
        if not on_time.empty:
            verdict = judge(intervals(by_run(on_time)["cosine"].unstack()[[REPLAY]]), 0.97, 1.03)
            adam["8: at lag 0 NoClip::replay's cosine is 1, within 0.03"] = verdict
        adam["9: all the same in the metric plain"] = f"failed: {', '.join(differ)}" if differ else "held"
        after = intervals(pd.DataFrame(afterwards(shown, gained))).apply(as_text, axis=1)
        blocks[f"{model} afterwards"] = markdown_table(after.to_frame("mean over runs"))
    blocks["predictions"] = markdown_table(pd.DataFrame(columns).fillna(""))
    fill(args.folder / "README.md", blocks)


if __name__ == "__main__":
    main()
