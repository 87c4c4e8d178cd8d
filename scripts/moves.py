"""Tables and picture of the equal-movement study: python scripts/moves.py FOLDER [base.jsonl math.jsonl]

Lines of scripts/equal_movement.py, if files are given, replace the folder's moves.csv. From that it writes
differences.csv, differences.svg, and in README.md what stands between <!-- BLOCK --> and <!-- end BLOCK -->.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from equal_movement import CONTROL
from off_policy import fill, write_csv

from pspo.report.figures import GREY, picture
from pspo.report.runs import COLOURS
from pspo.report.tables import add_holm, as_markdown, over_seeds

AIMS = {"tiny-base": 0.004, "tiny-math": 0.001}  # the primary movement of each model, in nats per token
CELL = ["model", "aim", "lag", "surrogate"]
MARGIN, RUNS = 0.01, 10  # of the share of correct answers, and of each model: said before the runs


def read_moves(files: list[Path]) -> pd.DataFrame:
    """The lines of every fork, with their model by the file's name."""
    lines = {f"tiny-{file.stem}": pd.read_json(file, lines=True) for file in files}
    return pd.concat(lines, names=["model"]).reset_index("model").reset_index(drop=True)


def reference(surrogate: pd.Series) -> pd.Series:
    """What each surrogate is compared with: NoClip with the same aggregation."""
    return "NoClip" + surrogate.str.extract(r"(:\w+)$")[0].fillna("")


def over_runs(values: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Means over runs of each cell that has them all, with t-intervals; a run's checkpoints count as one value."""
    clusters = values.groupby([*CELL, "run"], sort=False)[measure].mean().reset_index()
    rows = pd.MultiIndex.from_frame(clusters[CELL]).to_flat_index()
    cells = over_seeds(pd.DataFrame({"row": rows, "column": measure, "value": clusters[measure]}))
    cells = cells.join(pd.DataFrame(cells["row"].tolist(), cells.index, columns=CELL)).drop(columns=["row", "column"])
    return cells[cells["seeds"] == RUNS]


def differences(moves: pd.DataFrame, measure: str = "correct") -> pd.DataFrame:
    """Changes minus the reference's from the same checkpoint, rollout and movement; Holm's for a model, aim and lag."""
    same = ["model", "aim", "lag", "run", "rollouts"]
    moves = moves[moves["matched"]].assign(reference=lambda found: reference(found["surrogate"]))
    base = moves[[*same, "surrogate", measure]].rename(columns={"surrogate": "reference", measure: "base"})
    pairs = moves[~moves["surrogate"].str.startswith("NoClip")].merge(base, on=[*same, "reference"])
    found = over_runs(pairs.assign(**{measure: pairs[measure] - pairs["base"]}), measure)
    families = found[found["surrogate"] != CONTROL].groupby(["model", "aim", "lag"], group_keys=False)
    return found.join(pd.concat([add_holm(family)[["p", "holm"]] for _, family in families]))


def lag_costs(moves: pd.DataFrame) -> pd.DataFrame:
    """NoClip's change at each lag minus that at lag 0, from the same checkpoint and movement."""
    noclip = moves[moves["matched"] & (moves["surrogate"] == "NoClip")]
    same = ["model", "aim", "run", "rollouts"]
    pairs = noclip[noclip["lag"] > 0].merge(noclip.query("lag == 0")[[*same, "correct"]], on=same, suffixes=("", "_0"))
    return over_runs(pairs.assign(correct=pairs["correct"] - pairs["correct_0"]), "correct")


def at(cells: pd.DataFrame, model: str, aim: float) -> pd.DataFrame:
    return cells[(cells["model"] == model) & (cells["aim"] == aim)]


def verdict(cells: pd.DataFrame, margin: float = MARGIN) -> str:
    """How many intervals lie inside of the margin, how many outside of it; those left are undecided."""
    inside = int(((cells["low"] > -margin) & (cells["high"] < margin)).sum())
    outside = int(((cells["low"] > margin) | (cells["high"] < -margin)).sum())
    word = "failed" if outside else "held" if inside == len(cells) else "undecided"
    return f"{word}: of {len(cells)} intervals {inside} inside of ±{margin:g}, {outside} outside"


def interval(cell: pd.Series) -> str:
    return f"{cell['mean']:+.3f} [{cell['low']:+.3f}, {cell['high']:+.3f}]"


def table(moves: pd.DataFrame, found: pd.DataFrame) -> str:
    """A row per surrogate: its change at equal movement, and minus that of NoClip, by model, at lag 8 and lag 0."""
    columns, changes = {}, over_runs(moves[moves["matched"]], "correct")
    for model, aim in AIMS.items():
        for lag in (8, 0):
            cells, own = (at(of, model, aim).query(f"lag == {lag}").set_index("surrogate") for of in (found, changes))
            if not cells.empty:
                name = f"{model}, lag {lag}"
                columns[name] = own["mean"].sort_values(ascending=False).map("{:+.3f}".format)
                columns[f"{name}: minus NoClip's"] = cells.apply(interval, axis=1)
                columns[f"{name}: Holm's p"] = cells["holm"].map("{:.3f}".format)
    return as_markdown(pd.DataFrame(columns, index=next(iter(columns.values())).index).replace("nan", "").fillna(""))


def predictions(moves: pd.DataFrame, found: pd.DataFrame) -> str:
    """Each prediction of configs/sweep/equal-movement.yaml with its verdict, by model."""
    rows, costs = {}, lag_costs(moves)
    for model, aim in AIMS.items():
        cells = at(found, model, aim)
        if cells.empty:
            continue
        losses, control = cells[cells["surrogate"] != CONTROL], cells[cells["surrogate"] == CONTROL]
        rows[f"1: lag 8, none differs from NoClip by more than {MARGIN} ({model})"] = verdict(losses.query("lag == 8"))
        rows[f"3: PSPO is NoClip, within 0.005 ({model})"] = verdict(losses.query("surrogate == 'PSPO'"), 0.005)
        word = "held" if (control["high"] < 0).all() else "failed: 1 and 2 show nothing"
        texts = [f"lag {cell['lag']} {interval(cell)}" for _, cell in control.iterrows()]
        rows[f"4: shuffled advantages are below NoClip ({model})"] = f"{word}: {', '.join(texts)}"
        if (on_time := losses.query("lag == 0")).empty:
            continue
        cost = at(costs, model, aim).query("lag == 8")
        rows[f"2: the same at lag 0 ({model})"] = verdict(on_time)
        rows[f"5: NoClip's change at lag 8 is that at lag 0, within {MARGIN} ({model})"] = (
            f"{verdict(cost)}: {interval(cost.iloc[0])}"
        )
    return as_markdown(pd.DataFrame({"verdict": pd.Series(rows).sort_index()}))


def draw(found: pd.DataFrame, path: Path) -> None:
    """Draw the primary cells: each surrogate's difference from NoClip with its interval, and the margin."""
    models = [model for model in AIMS if (found["model"] == model).any()]
    with picture(path, 8.4, 3.4, "change of the share of correct answers, minus NoClip's, at equal movement") as figure:
        for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
            cells = at(found, model, AIMS[model]).query("lag == 8").sort_values("mean")
            y = np.arange(len(cells))
            axes.axvspan(-MARGIN, MARGIN, color=GREY, alpha=0.15, lw=0)
            axes.axvline(0, color=GREY, ls=":", linewidth=1)
            axes.hlines(y, cells["low"], cells["high"], color=COLOURS["NoClip"], linewidth=1.2)
            axes.plot(cells["mean"], y, "o", color=COLOURS["NoClip"], markersize=4)
            axes.set(title=f"{model}, lag 8, KL {AIMS[model]:g}", yticks=y, yticklabels=cells["surrogate"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with moves.csv and README.md")
    parser.add_argument("files", nargs="*", type=Path, help="written by scripts/equal_movement.py: base, math")
    args = parser.parse_args()
    if args.files:
        write_csv(read_moves(args.files), args.folder / "moves.csv")
    moves = pd.read_csv(args.folder / "moves.csv")
    found = differences(moves)
    write_csv(found, args.folder / "differences.csv")
    draw(found, args.folder / "differences.svg")
    fill(args.folder / "README.md", {"differences": table(moves, found), "predictions": predictions(moves, found)})


if __name__ == "__main__":
    main()
