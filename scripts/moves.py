"""Tables and picture of the equal-movement study: python scripts/moves.py FOLDER [base.jsonl math.jsonl ...]

Lines of scripts/equal_movement.py, if files are given, replace the folder's moves.csv. Of tiny-base
base-controls.jsonl has the second and third stage, base-rate.jsonl the fourth, and base-latenoclip.jsonl and
base-lateclip.jsonl have the fifth; smollm2-small.jsonl has the sixth, base-dose.jsonl the seventh. Writes
differences.csv, differences.svg, and in README.md what stands between <!-- table: NAME --> and <!-- /table -->.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from off_policy import fill, write_csv

from pspo_lab.figures import COLOURS, GREY, picture
from pspo_lab.tables import add_holm, mean_over_seeds
from pspo_lab.text import markdown_table

AIMS = {"tiny-base": 0.004, "tiny-math": 0.001}  # the primary movement of each model, in nats per token
CONTROL = "NoClip::shuffled"
CELL = ["model", "aim", "lag", "surrogate"]
MODELS = {"base": "tiny-base", "math": "tiny-math", "smollm2": "SmolLM2-135M"}  # by the name of the file
MARGIN = 0.01  # of the share of correct answers
RUNS = {"tiny-base": 10, "tiny-math": 10, "SmolLM2-135M": 5}  # said before they were made, as the margin was
NOCLIPS = ["NoClip", "NoClip:grpo"]  # what surrogates are compared with
FOUR = ["Clip", "DPPO", "GSPO:grpo", "GMPO:grpo"]  # of the second stage
CUTS = ["cuts.Cut(keep='nothing')", "cuts.Cut(keep='outward')"]  # of the third


def read_moves(files: list[Path]) -> pd.DataFrame:
    """The lines of every fork, with their model and stage by the file's name: MODEL.jsonl or MODEL-STAGE.jsonl."""
    lines = {tuple(f"{file.stem}-first".split("-")[:2]): pd.read_json(file, lines=True) for file in files}
    found = pd.concat(lines, names=["model", "stage"]).reset_index(["model", "stage"]).reset_index(drop=True)
    return found.assign(model=found["model"].map(MODELS))


def control(surrogate: str) -> str:
    """Its name with shuffled advantages."""
    return surrogate + (":shuffled" if ":" in surrogate else "::shuffled")


def noclip(surrogate: str) -> str:
    """NoClip with its aggregation, shuffled if it is: what a surrogate is compared with."""
    return "".join(["NoClip", *surrogate.partition(":")[1:]])


def over_runs(values: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Means over runs of each cell that has them all, with t-intervals; a run's checkpoints count as one value."""
    clusters = values.groupby([*CELL, "run"], sort=False)[measure].mean().reset_index()
    rows = pd.MultiIndex.from_frame(clusters[CELL]).to_flat_index()
    cells = mean_over_seeds(pd.DataFrame({"row": rows, "column": measure, "value": clusters[measure]}))
    cells = cells.join(pd.DataFrame(cells["row"].tolist(), cells.index, columns=CELL)).drop(columns=["row", "column"])
    return cells[cells["seeds"] == cells["model"].map(RUNS)]


def differences(moves: pd.DataFrame, references: dict[str, str], measure: str = "correct") -> pd.DataFrame:
    """Surrogates' measures minus their references', of the same checkpoint, rollout and movement, over runs."""
    same = ["model", "aim", "lag", "run", "rollouts"]
    base = moves[[*same, "surrogate", measure]].rename(columns={"surrogate": "reference", measure: "base"})
    pairs = moves.assign(reference=moves["surrogate"].map(references)).merge(base, on=[*same, "reference"])
    return over_runs(pairs.assign(**{measure: pairs[measure] - pairs["base"]}), measure)


def from_noclip(moves: pd.DataFrame) -> pd.DataFrame:
    """The first stage's differences, with Holm's correction over the surrogates of a model, movement and lag."""
    names = [name for name in moves["surrogate"].unique() if name not in NOCLIPS]
    found = differences(moves, {name: "NoClip" if name == CONTROL else noclip(name) for name in names})
    families = found[found["surrogate"] != CONTROL].groupby(["model", "aim", "lag"], group_keys=False)
    return found.join(pd.concat([add_holm(family)[["p", "holm"]] for _, family in families]))


def lag_costs(moves: pd.DataFrame) -> pd.DataFrame:
    """NoClip's change at each lag minus that at lag 0, from the same checkpoint and movement."""
    same, noclips = ["model", "aim", "run", "rollouts"], moves[moves["surrogate"] == "NoClip"]
    on_time = noclips.loc[noclips["lag"] == 0, [*same, "correct"]]
    pairs = noclips[noclips["lag"] > 0].merge(on_time, on=same, suffixes=("", "_0"))
    return over_runs(pairs.assign(correct=pairs["correct"] - pairs["correct_0"]), "correct")


def at(cells: pd.DataFrame, model: str, aim: float) -> pd.DataFrame:
    return cells[(cells["model"] == model) & (cells["aim"] == aim)]


def as_text(cell: pd.Series, digits: int = 3) -> str:
    return "{:+.{n}f} [{:+.{n}f}, {:+.{n}f}]".format(*cell[["mean", "low", "high"]], n=digits)


def intervals(values: pd.DataFrame) -> pd.DataFrame:
    """A row per column of a table with a row per run: its mean over runs, 95% t-interval (low, high), sem and seeds."""
    long = values.melt(var_name="column").dropna().assign(row="")
    return mean_over_seeds(long).set_index("column").rename_axis(None)


def word(held: bool) -> str:
    """The verdict on a prediction that cannot be undecided."""
    return "held" if held else "failed"


def judge(cells: pd.DataFrame, low: float = -np.inf, high: float = np.inf) -> str:
    """The verdict on intervals that were predicted to lie between low and high."""
    inside = int(((cells["low"] > low) & (cells["high"] < high)).sum())
    outside = int(((cells["high"] < low) | (cells["low"] > high)).sum())
    verdict = "failed" if outside else "held" if inside == len(cells) else "undecided"
    if len(cells) <= 2:
        return f"{verdict}: {', '.join(cells.apply(as_text, axis=1))}"
    return f"{verdict}: of {len(cells)} intervals {inside} there, {outside} wholly elsewhere"


def table(moves: pd.DataFrame, found: pd.DataFrame) -> str:
    """A row per surrogate, by model and lag: NoClip's change, and the others' minus it, * where Holm's p < 0.05."""
    columns, changes = {}, over_runs(moves, "correct")
    for model, aim in AIMS.items():
        for lag in (8, 0):
            cells, own = (at(of, model, aim).query(f"lag == {lag}").set_index("surrogate") for of in (found, changes))
            if not cells.empty:
                texts = cells.apply(as_text, axis=1) + (cells["holm"] < 0.05).map({True: "*", False: ""})
                itself = own.loc[NOCLIPS].apply(as_text, axis=1) + " itself"
                columns[f"{model}, lag {lag}"] = pd.concat([itself, texts])
    primary = at(found, *next(iter(AIMS.items()))).query("lag == 8").sort_values("mean", ascending=False)
    return markdown_table(pd.DataFrame(columns).reindex([*NOCLIPS, *primary["surrogate"]]).fillna(""))


def predictions(moves: pd.DataFrame, found: pd.DataFrame) -> str:
    """Each prediction of configs/sweep/equal-movement.yaml with its verdict, by model."""
    rows, costs = {}, lag_costs(moves)
    for model, aim in AIMS.items():
        cells = at(found, model, aim)
        if cells.empty:
            continue
        losses, control = cells[cells["surrogate"] != CONTROL], cells[cells["surrogate"] == CONTROL]
        stale, on_time = (losses[losses["lag"] == lag] for lag in (8, 0))
        rows[f"1: lag 8, none differs from NoClip by more than {MARGIN} ({model})"] = judge(stale, -MARGIN, MARGIN)
        rows[f"3: PSPO is NoClip, within 0.005 ({model})"] = judge(losses.query("surrogate == 'PSPO'"), -0.005, 0.005)
        control, lags = control.sort_values("lag", ascending=False), "lag 8" if on_time.empty else "lag 8, lag 0"
        rows[f"4: shuffled advantages are below NoClip ({model}, {lags})"] = judge(control, high=0)
        if on_time.empty:
            continue
        cost = at(costs, model, aim).query("lag == 8")
        rows[f"2: the same at lag 0 ({model})"] = judge(on_time, -MARGIN, MARGIN)
        rows[f"5: NoClip's change at lag 8 is that at lag 0, within {MARGIN} ({model})"] = judge(cost, -MARGIN, MARGIN)
    return markdown_table(pd.DataFrame({"verdict": pd.Series(rows).sort_index()}))


def controls(moves: pd.DataFrame) -> tuple[str, str]:
    """The table of the second and third stage and the verdicts on predictions 6 to 11, of all forks, matched or not."""
    compared = [*FOUR, *CUTS]
    shown = [*compared, *NOCLIPS]
    changes = over_runs(moves, "correct").set_index("surrogate")["mean"].map("{:+.3f}".format)
    learnt = differences(moves, {name: control(name) for name in shown}).set_index("surrogate")
    lost = differences(moves, {control(name): control(noclip(name)) for name in compared}).set_index("surrogate")
    lost = lost.rename({control(name): name for name in shown})
    nearer = differences(moves, {name: noclip(name) for name in compared}, "kl_drawer").set_index("surrogate")
    back = over_runs(moves.assign(back=moves["kl_drawer"] - moves["kl_drawer_before"]), "back").set_index("surrogate")
    uncut = differences(moves, {CUTS[0]: "Clip", CUTS[1]: CUTS[0]}).set_index("surrogate").loc[CUTS]
    columns = {
        "change": changes,
        "shuffled": {name: changes.get(control(name)) for name in shown},
        "change minus shuffled": learnt.apply(as_text, axis=1),
        "shuffled minus NoClip shuffled": lost.apply(as_text, axis=1),
        "KL from the drawer minus NoClip's": nearer.apply(as_text, axis=1, digits=4),
        "minus that before": back.apply(as_text, axis=1, digits=4),
    }
    verdicts = {
        "6: the four gain more than with shuffled advantages": judge(learnt.loc[FOUR], low=0),
        "7: shuffled, the four lose more than NoClip shuffled": judge(lost.loc[FOUR], high=0),
        "8: the four end nearer to the drawer than NoClip": judge(nearer.loc[FOUR], high=0),
        "9: GSPO ends nearer to it than it began": judge(back.loc[["GSPO:grpo"]], high=0),
        "9: Clip, DPPO, GMPO and NoClip end further from it": judge(
            back.loc[["Clip", "DPPO", "GMPO:grpo", *NOCLIPS]], low=0),
        "10: the cut of all gains more than Clip, that of the inward more than that of all": judge(uncut, low=0),
        "11: shuffled, neither cut loses more than NoClip shuffled": word((lost.loc[CUTS, "high"] >= 0).all()),
    }  # fmt: skip
    table = markdown_table(pd.DataFrame(columns, index=shown).fillna(""))
    return table, markdown_table(pd.DataFrame({"verdict": verdicts}))


def at_one_rate(moves: pd.DataFrame) -> tuple[str, str]:
    """The table of the fourth stage, where rates are equal and movements are not, and verdicts on its predictions."""
    moves = moves.assign(aim=0)
    clip, names = control("Clip"), ["NoClip", "Clip", "DPPO", *CUTS]
    changes, moved = (over_runs(moves, name).set_index("surrogate") for name in ("correct", "kl"))
    apart = differences(moves, dict.fromkeys(names[1:], "NoClip") | {clip: CONTROL}).set_index("surrogate")
    inward = differences(moves, {"Clip": CUTS[0]}).set_index("surrogate")
    columns = {
        "change": changes.apply(as_text, axis=1),
        "minus NoClip's": apart.apply(as_text, axis=1),
        "KL moved": moved["mean"].map("{:.4f}".format),
    }
    verdicts = {
        "12: Clip's change is below NoClip's": judge(apart.loc[["Clip"]], high=0),
        "13: by less than 0.04, half of what it is at equal movement": judge(apart.loc[["Clip"]], low=-0.04),
        "14: Clip's change is not below 0": word(changes.loc["Clip", "high"] >= 0),
        "15: Clip's is that of the cut of all, within 0.01": judge(inward, -0.01, 0.01),
        "16: shuffled, Clip loses less than NoClip": judge(apart.loc[[clip]], low=0),
    }
    table = pd.DataFrame(columns, index=[*names, CONTROL, clip]).fillna("")
    return markdown_table(table), markdown_table(pd.DataFrame({"verdict": verdicts}))


def own_checkpoints(moves: pd.DataFrame) -> tuple[str, str]:
    """The table of the fifth stage, with a row per method whose runs were forked, and verdicts on its predictions."""
    rows, apart = {}, {}
    for stage, of in moves.groupby("stage", sort=False):
        method = {"latenoclip": "NoClip", "lateclip": "Clip"}[stage]
        apart[method] = differences(of, {"Clip": "NoClip"})
        changes = over_runs(of, "correct").set_index("surrogate").loc[["NoClip", "Clip"]].apply(as_text, axis=1)
        rows[f"{method}'s runs"] = {
            "correct before": f"{of['correct_before'].mean():.3f}",
            "KL from the drawer": f"{of['kl_drawer_before'].mean():.4f}",
            "NoClip": changes["NoClip"],
            "Clip": changes["Clip"],
            "Clip minus NoClip": as_text(apart[method].iloc[0]),
        }
    base = moves[moves["stage"] == "latenoclip"][["run", "surrogate", "correct"]]
    pairs = moves[moves["stage"] == "lateclip"].merge(base, on=["run", "surrogate"], suffixes=("", "_base"))
    pairs["correct"] -= pairs.pop("correct_base")
    verdicts = {
        "17: from Clip's runs Clip is NoClip, within 0.02": judge(apart["Clip"], -0.02, 0.02),
        "18: from NoClip's runs it is further below": judge(differences(pairs, {"Clip": "NoClip"}), low=0),
    }
    return markdown_table(pd.DataFrame(rows).T), markdown_table(pd.DataFrame({"verdict": verdicts}))


def pretrained(moves: pd.DataFrame) -> tuple[str, str]:
    """The table of the sixth stage and verdicts on its predictions."""
    changes = over_runs(moves, "correct").set_index("surrogate").loc[["NoClip", "Clip", CONTROL]]
    apart = differences(moves, {"Clip": "NoClip", CONTROL: "NoClip"}).set_index("surrogate")
    columns = {"change": changes.apply(as_text, axis=1), "minus NoClip's": apart.apply(as_text, axis=1)}
    verdicts = {
        "19: Clip's change is below NoClip's": judge(apart.loc[["Clip"]], high=0),
        "20: so is that with shuffled advantages": judge(apart.loc[[CONTROL]], high=0),
    }
    table = pd.DataFrame(columns, index=changes.index).rename_axis(None).fillna("")
    return markdown_table(table), markdown_table(pd.DataFrame({"verdict": verdicts}))


def smaller_and_nearer(moves: pd.DataFrame) -> tuple[str, str]:
    """The table of the seventh stage, with a row per movement and lag, and verdicts on its predictions."""
    keys, aim = ["aim", "lag"], AIMS["tiny-base"]
    changes = over_runs(moves, "correct").query("surrogate == 'NoClip'").set_index(keys)
    apart = differences(moves, {"Clip": "NoClip", CONTROL: "NoClip"})
    clip, shuffled = (apart[apart["surrogate"] == name].set_index(keys) for name in ("Clip", CONTROL))
    values = moves[moves["aim"] == aim].pivot(index="run", columns=["surrogate", "lag"], values="correct")
    gap = values["Clip"] - values["NoClip"]
    slopes = pd.DataFrame({"per lag": np.polyfit(gap.columns.astype(float), gap.to_numpy().T, 1)[0]})
    columns = {"NoClip": changes, "Clip minus NoClip": clip, "shuffled minus NoClip": shuffled}
    table = pd.DataFrame({name: cells.apply(as_text, axis=1) for name, cells in columns.items()}).sort_index()
    new = shuffled.drop([(aim, 0), (aim, 8)])
    verdicts = {
        "21: a KL of 0.00025, lag 8, Clip's change is below NoClip's": judge(clip.loc[[(0.00025, 8)]], high=0),
        "22: the same at 0.001": judge(clip.loc[[(0.001, 8)]], high=0),
        "23: that difference falls with the lag, per lag": judge(intervals(slopes), high=0),
        "24: at lag 1 it is above -0.01": judge(clip.loc[[(aim, 1)]], low=-MARGIN),
        "25: shuffled advantages are below NoClip in the five cells": judge(new, high=0),
    }
    table.index = [f"KL {aim:g}, lag {lag}" for aim, lag in table.index]
    return markdown_table(table), markdown_table(pd.DataFrame({"verdict": verdicts}))


def draw_intervals(axes: Axes, cells: pd.DataFrame, y: np.ndarray, face: str = COLOURS["NoClip"]) -> None:
    """Draw means with their intervals, lying, at the heights y."""
    axes.hlines(y, cells["low"], cells["high"], color=COLOURS["NoClip"], linewidth=1.2)
    axes.plot(cells["mean"], y, "o", color=COLOURS["NoClip"], markerfacecolor=face, markersize=4)


def draw(moves: pd.DataFrame, path: Path) -> None:
    """Draw each surrogate's change with its interval: lag 8 filled, lag 0, where it is complete, open."""
    changes = over_runs(moves, "correct")
    models = [model for model, aim in AIMS.items() if not at(changes, model, aim).empty]
    with picture(path, 8.4, 4.2, "change of the share of correct answers by one rollout, at equal movement") as figure:
        for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
            cells, colour = at(changes, model, AIMS[model]), COLOURS["NoClip"]
            names = cells.query("lag == 8").sort_values("mean")["surrogate"].tolist()
            axes.axvline(0, color=GREY, ls=":", linewidth=1)
            for lag, face, up, labelled in ((8, colour, 0.0, 0), (0, "white", 0.3, -1)):
                shown = cells[cells["lag"] == lag].set_index("surrogate").reindex(names)
                if shown["mean"].notna().any():
                    y = np.arange(len(names)) + up
                    draw_intervals(axes, shown, y, face)
                    beside = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
                    axes.annotate(f"lag {lag}", (shown["high"].iloc[labelled], y[labelled]), **beside)
            axes.set(title=f"{model}, KL {AIMS[model]:g}", yticks=range(len(names)), yticklabels=names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with moves.csv and README.md")
    parser.add_argument("files", nargs="*", type=Path, help="written by scripts/equal_movement.py: base, math")
    args = parser.parse_args()
    if args.files:
        write_csv(read_moves(args.files), args.folder / "moves.csv")
    moves = pd.read_csv(args.folder / "moves.csv")
    stages = ("first", "controls", "rate", "small", "dose")
    first, second, fourth, sixth, seventh = (moves[moves["stage"] == stage] for stage in stages)
    first, fifth = first[first["matched"].astype(bool)], moves[moves["stage"].str.startswith("late")]
    found = from_noclip(first)
    write_csv(found, args.folder / "differences.csv")
    draw(first, args.folder / "differences.svg")
    blocks = {"differences": table(first, found), "predictions": predictions(first, found)}
    if not second.empty:
        blocks["controls"], blocks["verdicts"] = controls(second)
    if not fourth.empty:
        blocks["rate"], blocks["rate verdicts"] = at_one_rate(fourth)
    if not fifth.empty:
        blocks["late"], blocks["late verdicts"] = own_checkpoints(fifth)
    if not sixth.empty:
        blocks["pretrained"], blocks["pretrained verdicts"] = pretrained(sixth)
    if not seventh.empty:
        beside = first[(first["model"] == "tiny-base") & (first["rollouts"] == 9)]
        blocks["dose"], blocks["dose verdicts"] = smaller_and_nearer(pd.concat([beside, seventh]))
    fill(args.folder / "README.md", blocks)


if __name__ == "__main__":
    main()
