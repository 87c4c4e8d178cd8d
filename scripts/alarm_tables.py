"""Tables and picture of the alarms study: python scripts/alarm_tables.py FOLDER

FOLDER has lines of scripts/alarms.py of commit f6aff6e: MODEL.jsonl of ``watch``, MODEL-forks.jsonl of ``fork``.
Writes MODEL.svg, and in FOLDER's README.md what stands between <!-- table: NAME --> and <!-- /table -->.

A run collapses at the first update after which the reward is at least DROP below its best before, and still is an
update later. Alarms are judged before that. An alarm's AUC, within one method: of two runs at the same update, one that
collapses within AHEAD updates and one that does not, the chance that the first has more of the alarm. At any two
updates, for comparison, the clock helps. ``drop`` is how far the reward is below its best: an alarm that whoever
evaluates has anyway.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from moves import as_text, draw_intervals, intervals, judge, word
from off_policy import fill

from pspo.cli.files import read_jsonl
from pspo_lab.figures import COLOURS, GREY, picture
from pspo_lab.text import markdown_table

AHEAD, FROM = 5, 3  # updates: before a collapse; the first that may be forked
DROP, FEW, LAG = 0.15, 50, 8  # FEW pairs, below which no AUC is shown; LAG of the runs
ALL, COMPARED = "all methods", ["ess_sequence", "kl", "entropy", "cosine"]  # in prediction 3
ALARMS = {"ess_sequence": -1, "ess_token": -1, "kl": 1, "cosine": -1, "entropy": 1, "drop": 1}  # which way it warns


def collapse(rewards: pd.Series) -> float:
    """The update at which a run collapses, of its rewards after 1, 2, ... updates; infinite if it does not."""
    low = rewards <= rewards.cummax().shift() - DROP
    both = low & low.shift(-1, fill_value=False)
    return float(both.idxmax()) if both.any() else np.inf


def fork_times(lines: pd.DataFrame) -> pd.DataFrame:
    """By run with an alarm, the updates of its forks: alarm, exchanged and random."""
    quarter = lines.groupby(["method", "update"])["ess_sequence"].transform("quantile", 0.25)
    low = lines[(lines["ess_sequence"] <= quarter) & (lines["update"] >= FROM)]
    times = low.groupby(["method", "run"], sort=False)["update"].min().rename("alarm").reset_index("method")
    times["exchanged"] = times.groupby("method", sort=False)["alarm"].transform(lambda of: np.roll(of, -1))
    random = np.random.default_rng(0).integers(FROM, lines["update"].max() - AHEAD, len(times))
    return times.assign(random=random)


def collapses(lines: pd.DataFrame) -> pd.Series:
    """The update at which each run collapses, (method, run)."""
    return lines.pivot(index=["method", "run"], columns="update", values="reward").apply(collapse, axis=1)


def drawn_seeds(runs: pd.Index, draws: int = 2000) -> np.ndarray:
    """(draws, runs): how often each run is drawn, where seeds are drawn with all their runs."""
    seeds, all_seeds = pd.factorize(runs.str.rpartition(" ").get_level_values(2))
    n = len(all_seeds)
    return np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), draws)[:, seeds]


def area(
    lines: pd.DataFrame, name: str, same_update: bool = True, ahead: int = AHEAD, since: int = 1
) -> tuple[int, float, np.ndarray]:
    """Pairs within methods from an update on, an alarm's AUC, and its AUC (draws,) with the seeds drawn again."""
    table = lines.pivot(index=["method", "run"], columns="update")
    rewards = table["reward"]
    warns = rewards.cummax(axis=1).sub(rewards) if name == "drop" else table[name] * ALARMS[name]
    updates = np.arange(since, rewards.columns.max() - ahead)  # a collapse is known an update later
    at, values = collapses(lines).to_numpy()[:, None], warns[updates].to_numpy()  # (n, 1), (n, U)
    methods = rewards.index.get_level_values("method").to_numpy()
    soon, later = (updates < at) & (at <= updates + ahead), at > updates + ahead
    places = np.arange(len(updates))
    first, second = (places, places) if same_update else np.indices((len(updates),) * 2).reshape(2, -1)  # (P,) each
    pairs = soon[:, None, first] & later[None, :, second]  # (n, n, P)
    pairs &= ((methods[:, None] == methods) & ~np.eye(len(at), dtype=bool))[:, :, None]
    right = pairs * (np.sign(values[:, None, first] - values[None, :, second]) + 1) / 2
    right, total = right.sum(axis=2), pairs.sum(axis=2)  # (n, n)
    times = drawn_seeds(rewards.index.get_level_values("run"))
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = ((times @ right) * times).sum(axis=1) / ((times @ total) * times).sum(axis=1)
        return int(total.sum()), float(right.sum() / total.sum()), drawn


def auc(lines: pd.DataFrame, name: str, *which: int) -> tuple[int, float, float, float]:
    """Pairs, an alarm's AUC and its 95% interval; ``which`` as of ``area``."""
    pairs, mean, drawn = area(lines, name, *which)
    return pairs, mean, *(np.nanquantile(drawn, [0.025, 0.975]) if pairs else [np.nan, np.nan])


def foretells(lines: pd.DataFrame, name: str, ahead: int, since: int = 1) -> tuple[float, float, float]:
    """Partial correlation of an alarm, from an update on, with the reward's change over the next, before a collapse.

    Within methods and updates, given the reward and its best so far; with its 95% interval.
    """
    table = lines.pivot(index=["method", "run"], columns="update")
    rewards = table["reward"]
    columns = {"alarm": table[name] * ALARMS[name], "change": rewards.shift(-ahead, axis=1) - rewards,
               "reward": rewards, "best": rewards.cummax(axis=1)}  # fmt: skip
    long = pd.DataFrame({key: of.stack() for key, of in columns.items()}).dropna()
    at = collapses(lines).reindex(long.index.droplevel("update")).to_numpy()
    update = long.index.get_level_values("update")
    long = long[(since <= update) & (update < at)]
    long -= long.groupby(["method", "update"]).transform("mean")
    given, asked = long[["reward", "best"]].to_numpy(), long[["alarm", "change"]].to_numpy()
    x, y = (asked - given @ np.linalg.lstsq(given, asked)[0]).T
    runs = rewards.index.get_level_values("run")
    times = drawn_seeds(runs)[:, runs.get_indexer(long.index.get_level_values("run"))]
    drawn = times @ (x * y) / np.sqrt((times @ x**2) * (times @ y**2))
    return x @ y / np.sqrt((x @ x) * (y @ y)), *np.quantile(drawn, [0.025, 0.975])


def areas(lines: pd.DataFrame) -> pd.DataFrame:
    """(alarm, method, same; pairs, mean, low, high): every AUC, of two runs at the same update and at any two."""
    by_method = [(ALL, lines), *lines.groupby("method")]
    cells = {(name, method, same): auc(of, name, same) for name in ALARMS for method, of in by_method
             for same in (True, False)}  # fmt: skip
    found = pd.DataFrame(cells, index=["pairs", "mean", "low", "high"]).T.rename_axis(["alarm", "method", "same"])
    return found[found["pairs"] >= FEW]


def table(found: pd.DataFrame) -> str:
    """A row per alarm: AUCs of all methods together and of each at the same update, and of all at any two."""
    texts = found.apply(lambda cell: "{mean:.2f} [{low:.2f}, {high:.2f}]".format(**cell), axis=1)
    columns = texts.xs(True, level="same").unstack("method")
    columns[f"{ALL}, any two updates"] = texts.xs(False, level="same").xs(ALL, level="method")
    return markdown_table(columns.reindex(list(ALARMS)).fillna("").rename_axis(None))


def afterwards(lines: pd.DataFrame) -> str:
    """A row per alarm of what was not predicted: shorter horizons, ``drop`` minus it, and the change of the reward."""
    _, mean, drawn = area(lines, "drop")
    cells = {}
    for name in ALARMS:
        asked = {"within 2": (2,), "within 3": (3,), f"within {AHEAD}, from update {LAG + 1} on": (AHEAD, LAG + 1)}
        cells[name] = {label: "{:.2f} [{:.2f}, {:.2f}]".format(*auc(lines, name, True, *which)[1:])
                       for label, which in asked.items()}  # fmt: skip
        if name != "drop":
            _, own, own_drawn = area(lines, name)
            low, high = np.quantile(drawn - own_drawn, [0.025, 0.975])
            cells[name] |= {
                "drop's AUC minus it": f"{mean - own:+.2f} [{low:+.2f}, {high:+.2f}]",
                "correlation with the change": "{:+.2f} [{:+.2f}, {:+.2f}]".format(*foretells(lines, name, 3)),
                f"from update {LAG + 1} on": "{:+.2f} [{:+.2f}, {:+.2f}]".format(*foretells(lines, name, 3, LAG + 1)),
            }
    return markdown_table(pd.DataFrame(cells).T.fillna(""))


def no_alarm(cell: pd.Series) -> str:
    """The verdict on an alarm that was predicted to be none."""
    if cell["low"] <= 0.5 <= cell["high"]:
        return "held"
    return "failed" if cell["high"] < 0.5 or cell["mean"] >= 0.6 else "failed, but too small to act on"


def verdicts(found: pd.DataFrame) -> dict[str, str]:
    """Each prediction on alarms of configs/sweep/alarms.yaml with its verdict."""
    same = found.xs((ALL, True), level=["method", "same"])
    others, best = same.loc[COMPARED, "mean"].drop("cosine"), same["mean"].drop("drop")
    any_two = found.xs(False, level="same").loc[["ess_sequence", "kl"]].drop(ALL, level="method")
    cosine, drop, above = same.loc["cosine"], same.loc["drop"], int((any_two["low"] > 0.5).sum())
    return {
        "1: ess_sequence is no alarm": no_alarm(same.loc["ess_sequence"]),
        "2: nor is token KL": no_alarm(same.loc["kl"]),
        "3: the cosine is one, and the best of four": word(cosine["low"] > 0.5 and cosine["mean"] > others.max()),
        "4: the reward's own drop is a better one": word(drop["low"] > 0.5 and drop["mean"] > best.max()),
        "5: at any two updates ess_sequence and kl look like alarms": word(above == len(any_two))
        + f": {above} of {len(any_two)} intervals above 0.5",
    }


def saved(lines: pd.DataFrame, forked: pd.DataFrame) -> pd.DataFrame:
    """(method, run, treatment): final reward minus that of the run itself, treated at its alarm and at other times.

    ``kept``: minus that of the run at its alarm.
    """
    times, last = fork_times(lines), lines["update"].max()
    rewards = lines.set_index(["run", "update"])["reward"]
    long = times.melt("method", var_name="when", value_name="update", ignore_index=False).reset_index()
    found = forked.merge(long, on=["run", "method", "update"]).join(rewards.rename("untreated"), on=["run", "update"])
    found["saved"] = found["reward"] - found["run"].map(rewards.xs(last, level="update"))
    found["kept"] = found["reward"] - found["untreated"]
    by_time = found.pivot(index=["method", "run", "treatment"], columns="when")
    return by_time["saved"].assign(kept=by_time["kept", "alarm"])


def forks_table(found: pd.DataFrame) -> str:
    """A row per method and treatment: reward saved at the alarm, and how much more than otherwise."""
    cells = {}
    for (method, treatment), of in found.groupby(["method", "treatment"]):
        compared = {
            "at its alarm": of["alarm"],
            "more than at another run's": of["alarm"] - of["exchanged"],
            "more than at a random time": of["alarm"] - of["random"],
            "more than stopping at it": of["kept"],
        }
        cells[f"{method}, {treatment}"] = intervals(pd.DataFrame(compared)).apply(as_text, axis=1)
    return markdown_table(pd.DataFrame(cells).T)


def fork_verdicts(found: pd.DataFrame) -> dict[str, str]:
    """Predictions 6 and 7 of configs/sweep/alarms.yaml with their verdicts, of each method."""
    on_time, slower, new = (found.xs(name, level="treatment") for name in ("on time", "lr / 3", "new moments"))
    more = intervals((on_time["alarm"] - on_time["exchanged"]).unstack("method"))
    on_time, slower, new = (intervals(of["alarm"].unstack("method")) for of in (on_time, slower, new))
    return {
        "6: on-time rollouts from the alarm on save reward": judge(on_time, low=0),
        "6: no more than from another run's alarm on": not_more(more),
        "7: a third of the learning rate saves, too": judge(slower, low=0),
        "7: new moments do not": not_more(new),
    }


def not_more(cells: pd.DataFrame) -> str:
    """The verdict on intervals that were predicted not to lie above 0; wide ones could hardly fail."""
    return f"{word((cells['low'] <= 0).all())}: {', '.join(cells.apply(as_text, axis=1))}"


def draw(found: pd.DataFrame, path: Path) -> None:
    """Draw each alarm's AUC of all methods with its interval: at the same update filled, at any two open."""
    with picture(path, 7.2, 3.4, f"does it tell which run collapses within {AHEAD} updates?") as figure:
        axes, colour = figure.subplots(), COLOURS["NoClip"]
        axes.axvline(0.5, color=GREY, ls=":", linewidth=1)
        for same, face, up, label in ((True, colour, 0.0, "same update"), (False, "white", 0.3, "any two updates")):
            cells = found.xs((ALL, same), level=["method", "same"]).reindex(list(ALARMS)[::-1])
            y = np.arange(len(cells)) + up
            draw_intervals(axes, cells, y, face)
            beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(label, (cells["high"].iloc[-1], y[-1]), **beside)
        axes.set(yticks=range(len(ALARMS)), yticklabels=list(ALARMS)[::-1], xlabel="AUC; 0.5 tells nothing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with MODEL.jsonl and README.md")
    folder, blocks, columns = parser.parse_args().folder, {}, {}
    for path in sorted(folder.glob("*.jsonl")):
        if path.stem.endswith("-forks"):
            continue
        lines, forked = pd.DataFrame(read_jsonl(path)), folder / f"{path.stem}-forks.jsonl"
        found = areas(lines)
        counts = (
            np.isfinite(collapses(lines)).groupby("method").agg(["sum", "size"]).set_axis(["collapse", "of"], axis=1)
        )
        blocks[path.stem], blocks[f"{path.stem}-afterwards"] = table(found), afterwards(lines)
        blocks[f"{path.stem}-collapses"] = markdown_table(counts.astype(str).set_axis(["collapse", "of"], axis=1))
        columns[path.stem] = verdicts(found)
        draw(found, folder / f"{path.stem}.svg")
        if forked.exists():
            treated = saved(lines, pd.DataFrame(read_jsonl(forked)))
            blocks[f"{path.stem}-forks"] = forks_table(treated)
            columns[path.stem] |= fork_verdicts(treated)
    first, *others = columns
    for stem in others:
        rows = [row for row in columns[stem] if row[0] in "12345"]
        same = [columns[stem][row].split()[0] == columns[first][row].split()[0] for row in rows]
        columns[stem][f"8: 1 to 5 come out as on {first}"] = word(all(same))
    blocks["predictions"] = markdown_table(pd.DataFrame(columns).fillna(""))
    fill(folder / "README.md", blocks)


if __name__ == "__main__":
    main()
