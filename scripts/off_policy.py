"""Tables and pictures of the off-policy study, from its packed runs: python scripts/off_policy.py results/off-policy

Writes heat-MODEL.svg and lags-MODEL.svg, and in README.md what stands between <!-- BLOCK --> and <!-- end BLOCK -->;
the rest of the page is written by hand.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from pspo.records.files import write_text
from pspo.report.figures import GREY, STYLES, picture
from pspo.report.runs import MODEL, SEED, methods, read_runs
from pspo.report.tables import add_holm, as_markdown, as_text, diagnostics, learning, over_seeds

METHODS = ["NoClip", "PSPO", "Clip", "P3O", "SAPO", "TOPR",
           "REINFORCE", "CISPO", "GSPO", "LUSPO", "GMPO", "VESPO", "DPPO"]  # fmt: skip
LAGS, GRID = [0, 1, 2, 4, 8], ["1 epoch, lr 3e-5", "1 epoch, lr 1e-4", "4 epochs, lr 3e-5", "4 epochs, lr 1e-4"]
# The grid's runs are coupled: ratios to the behaviour policy. Then corrections of decoupled runs, and the nucleus
ARMS = ["coupled", "none", "token_truncate", "sequence_mask", "replay", "top-p 1"]
SWITCHES = {"model": MODEL, "epochs": "algorithm.epochs", "lr": "optimizer.lr", "lag": "rollout.lag", "seed": SEED,
            "aggregation": "algorithm.aggregation", "ratio_to": "algorithm.ratio_to",
            "correction": "algorithm.correction", "nucleus": "algorithm.nucleus", "top_p": "rollout.top_p"}  # fmt: skip
RATIOS = {"ess": "ess", "KL(old to new)": "kl_old_new", "r, percentile 1": "ratio_p1", "r, percentile 99": "ratio_p99",
          "tokens without weight": "zero_weight_share"}  # fmt: skip
CELL = ["model", "epochs", "lr", "grid", "method", "lag", "arm"]  # runs of one cell differ in their seeds
CLAIMS = {  # of configs/sweep/off-policy.yaml: the family of differences, and those of it that a claim is about
    "1: PSPO, Clip, P3O, REINFORCE, CISPO, DPPO are NoClip at lag 0 in 1 epoch": (
        "noclip", "lag == 0 and epochs == 1 and method in ['PSPO', 'Clip', 'P3O', 'REINFORCE', 'CISPO', 'DPPO']"),
    "1: all within 0.05 of NoClip at lag 0 in 4 epochs, lr 3e-5": (
        "noclip", "lag == 0 and epochs == 4 and lr < 5e-5"),
    "2: none differs from NoClip where ess is above 0.9": ("noclip", "ess > 0.9"),
    "2: (no claim: ess from 0.5 to 0.9)": ("noclip", "0.5 <= ess <= 0.9"),
    "2: Clip, TOPR, CISPO, DPPO above NoClip where ess is below 0.5": (
        "noclip", "ess < 0.5 and method in ['Clip', 'TOPR', 'CISPO', 'DPPO']"),
    "2: P3O and SAPO between, there": ("noclip", "ess < 0.5 and method in ['P3O', 'SAPO']"),
    "3: PSPO never differs from NoClip": ("noclip", "method == 'PSPO'"),
    "4: REINFORCE level with NoClip up to lag 2 at lr 3e-5": (
        "noclip", "method == 'REINFORCE' and lag <= 2 and lr < 5e-5"),
    "5: with a correction above without, lag 8": ("corrected", "lag == 8"),
    "5: decoupled with a correction level with coupled": ("decoupled", "arm in ['token_truncate', 'sequence_mask']"),
    "6: replay level with ignore at lag 0": ("nucleus", "arm == 'replay' and lag == 0"),
    "6: replay above ignore at lag 4": ("nucleus", "arm == 'replay' and lag == 4"),
}  # fmt: skip

Study = dict[str, pd.DataFrame]


def read(folder: Path) -> pd.DataFrame:
    """One row per finished run, in order of cells: CELL, SWITCHES, experiment, and what was measured."""
    runs = read_runs([folder])
    runs = runs.take(runs.finished())
    measured = pd.concat([learning(runs), diagnostics(runs)]).pivot(index="run", columns="column", values="value")
    found = runs.configs[list(SWITCHES.values())].set_axis(list(SWITCHES), axis=1).infer_objects()
    found = found.assign(
        method=methods(runs.configs),
        arm=found["correction"].where(found["ratio_to"] == "proximal", "coupled"),
        experiment=runs.configs["experiment"].map(lambda path: Path(path).name),
        final=measured["final validation reward"],
        peak=measured["peak reward"],
        **measured[list(RATIOS.values())],
        seconds=runs.numbers[runs.numbers["measure"] == "seconds"].set_index("run")["value"],
    )
    rates = found["lr"].map("{:.0e}".format).str.replace("e-0", "e-")
    found["grid"] = found["epochs"].map({1: "1 epoch, lr ", 4: "4 epochs, lr "}) + rates
    found.loc[(found["method"] == "GSPO") & (found["aggregation"] == "dr_grpo"), "method"] = "LUSPO"
    found.loc[found["nucleus"] == "replay", "arm"] = "replay"
    found.loc[found["top_p"] == 1, "arm"] = "top-p 1"
    order = {name: i for i, name in enumerate([*METHODS, *ARMS])}
    return found.sort_values(CELL, key=lambda of: of.map(order) if of.name in ("method", "arm") else of)


# Numbers


def means(runs: pd.DataFrame, value: str = "final") -> pd.DataFrame:
    """Means over the seeds of every cell, with intervals; their `column` is the value."""
    rows = pd.MultiIndex.from_frame(runs[CELL]).to_flat_index()
    found = over_seeds(pd.DataFrame({"row": rows, "column": value, "value": runs[value].to_numpy()}))
    return found.join(pd.DataFrame(found["row"].tolist(), found.index, columns=CELL))


def differences(runs: pd.DataFrame, base: pd.DataFrame, varied: str) -> pd.DataFrame:
    """Final rewards minus those of base that differ in `varied` alone, paired by seed; Holm's for all of them.

    Their `ess` is the mean over pairs of the lower one of the two.
    """
    same = [key for key in [*CELL, "seed"] if key != varied]
    pairs = runs.merge(base[[*same, "final", "ess"]], on=same, suffixes=("", "_base"))
    pairs = pairs.assign(final=pairs["final"] - pairs["final_base"], ess=pairs[["ess", "ess_base"]].min(axis=1))
    return add_holm(means(pairs)).assign(ess=means(pairs, "ess")["mean"])


def study_of(runs: pd.DataFrame) -> Study:
    """The runs, those of the grid, their means, and the families of differences."""
    grid, none = (runs[runs["arm"] == arm] for arm in ("coupled", "none"))
    corrected = runs[runs["arm"].isin(["token_truncate", "sequence_mask"])]
    return {
        "runs": runs,
        "grid": grid,
        "final": means(grid),
        "noclip": differences(grid[grid["method"] != "NoClip"], grid[grid["method"] == "NoClip"], "method"),
        "lag": differences(grid[grid["lag"] > 0], grid[grid["lag"] == 0], "lag"),
        "decoupled": differences(pd.concat([none, corrected]), grid, "arm"),
        "corrected": differences(corrected, none, "arm"),
        "nucleus": differences(runs[runs["arm"].isin(["replay", "top-p 1"])], grid, "arm"),
    }


def sides(found: pd.DataFrame) -> list[int]:
    """How many intervals lie below 0, above it, and of these after Holm's correction."""
    below, above, holm = found["high"] < 0, found["low"] > 0, found["holm"] < 0.05
    return [int(of.sum()) for of in (below, above, below & holm, above & holm)]


def tally(found: pd.DataFrame) -> str:
    """How many differences have an interval, from where to where they reach, and how many of them are not 0."""
    found = found.dropna(subset="p")
    if found.empty:
        return "no differences"
    low, high = (f"{round(side, 3) + 0.0:.3f}" for side in (found["mean"].min(), found["mean"].max()))
    below, above, *holm = sides(found)
    return f"{len(found)} from {low} to {high}; {below} below 0 and {above} above, after Holm {holm[0]} and {holm[1]}"


# Blocks of the page


def of_models(texts: dict[str, pd.DataFrame]) -> str:
    return "\n\n".join(f"{model}:\n\n{as_markdown(text)}" for model, text in texts.items())


def tables(cells: pd.DataFrame, row: str, column: str, family: pd.DataFrame | None = None) -> str:
    """A table for each model, its rows and columns named by templates of the cells' columns; the family is Holm's."""
    records = cells.to_dict("records")
    named = cells.assign(row=[row.format(**of) for of in records], column=[column.format(**of) for of in records])
    ordered = named.loc[cells.sort_values(["column", "lag"], kind="stable").index]  # columns by lag, rows as they came
    text = of_models({model: as_text(ordered[ordered["model"] == model]).loc[of["row"].unique()]
                      for model, of in named.groupby("model")})  # fmt: skip
    counted = "" if family is None else f"\n\nHolm's correction is for {family['p'].count()} differences."
    return text + counted


def predictions(study: Study) -> str:
    """The numbers about each claim."""
    texts = {claim: tally(study[family].query(about)) for claim, (family, about) in CLAIMS.items()}
    for model, of in study["final"].query("lag == 8 and grid == '4 epochs, lr 1e-4'").groupby("model"):
        place = of.set_index("method")["mean"].rank(ascending=False)["REINFORCE"]
        texts[f"4: REINFORCE worst on {model} at lag 8 in 4 epochs, lr 1e-4"] = f"place {place:.0f} of {len(of)}"
    ess = means(study["grid"], "ess")
    lowest = "{mean:.3f}: {method} on {model}, {grid}, lag {lag}".format(**ess.loc[ess["mean"].idxmin()])
    texts["2: (lowest mean ess)"] = lowest
    return as_markdown(pd.DataFrame({"found": dict(sorted(texts.items(), key=lambda of: of[0][0]))}))


def against_noclip(study: Study) -> str:
    """Counts by model, epochs and learning rate, and the differences whose own interval excludes 0."""
    found = study["noclip"]
    groups = {", ".join(names): of for names, of in found.groupby(["model", "grid"], sort=False)} | {"all": found}
    counts = {group: map(str, [of["p"].count(), *sides(of)]) for group, of in groups.items()}
    columns = ["differences", "below 0", "above 0", "below, Holm", "above, Holm"]
    text = as_markdown(pd.DataFrame.from_dict(counts, orient="index", columns=columns))
    shown = found[found["low"] * found["high"] > 0]
    return f"{text}\n\n{tables(shown, '{grid}: {method}', 'lag {lag}')}".strip()


def drops(study: Study) -> str:
    """Mean ess at each method's first lag whose interval lies below lag 0; in parentheses at the last if none does."""
    texts: dict[str, dict[str, dict[str, str]]] = {}
    tested = study["lag"].dropna(subset="p").merge(means(study["grid"], "ess"), on=CELL, suffixes=("", "_ess"))
    for (model, grid, method), of in tested.groupby(["model", "grid", "method"], sort=False):
        below = of[of["high"] < 0]
        at = of.iloc[-1] if below.empty else below.iloc[0]
        drop = f"{at['mean_ess']:.3f} at lag {at['lag']}{'*' if at['holm'] < 0.05 else ''}"
        text = f"({at['mean_ess']:.3f})" if below.empty else drop
        texts.setdefault(model, {}).setdefault(grid, {})[method] = text
    return of_models({model: pd.DataFrame(of).fillna("–") for model, of in texts.items()})


def ratios(study: Study) -> str:
    """Final rewards at lag 8 beside means of what the runs' ratios did, in the mildest and the harshest grid."""
    shown = study["grid"].query("lag == 8 and grid in [@GRID[0], @GRID[-1]]")
    found = shown.groupby(CELL, sort=False)[["final", *RATIOS.values()]].mean().reset_index()
    found = found.assign(row=found["grid"] + ": " + found["method"]).set_index("row").rename_axis(None)
    columns = {"final": "final reward"} | {value: name for name, value in RATIOS.items()}
    return of_models({model: of[list(columns)].rename(columns=columns).map("{:.3f}".format)
                      for model, of in found.groupby("model")})  # fmt: skip


def budget(study: Study) -> str:
    groups = {**dict(list(study["runs"].groupby("experiment"))), "all": study["runs"]}
    found = {name: [f"{len(of)}", f"{of['seed'].nunique()}", f"{of['seconds'].sum() / 3600:.2f}"]
             for name, of in groups.items()}  # fmt: skip
    return as_markdown(pd.DataFrame.from_dict(found, orient="index", columns=["runs", "seeds", "core-hours"]))


# Pictures


def draw_heat(study: Study, model: str, path: Path) -> None:
    """Draw final rewards, method x lag; those with * differ from NoClip after Holm's correction."""
    cells, differ = study["final"].query("model == @model"), study["noclip"].query("holm < 0.05")
    differ, low, high = set(differ["row"]), cells["mean"].min(), cells["mean"].max()
    with picture(path, 8.4, 0.19 * len(METHODS) + 0.8, "lag: rollouts between drawing and training") as figure:
        for axes, grid in zip(figure.subplots(1, len(GRID), sharey=True), GRID, strict=True):
            panel = cells[cells["grid"] == grid]
            values = panel.pivot(index="method", columns="lag", values="mean").reindex(METHODS, columns=LAGS)
            axes.pcolormesh(values, cmap="viridis", vmin=low, vmax=high, edgecolors="face", linewidth=0.1)
            for of in panel.itertuples():
                x, y = LAGS.index(of.lag) + 0.5, METHODS.index(of.method) + 0.5
                text, dark = f"{of.mean:.2f}{'*' if of.row in differ else ''}", 2 * of.mean < low + high
                axes.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
            axes.set(title=grid, xticks=np.arange(len(LAGS)) + 0.5, yticks=np.arange(len(METHODS)) + 0.5)
            axes.set(xticklabels=LAGS, yticklabels=METHODS)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
        figure.axes[0].invert_yaxis()


def draw_lags(study: Study, model: str, path: Path) -> None:
    """Draw final rewards by lag, a panel for each method, before NoClip's in grey."""
    cells = study["final"].query("model == @model")
    lines = len(METHODS) // 5 + 1  # with a place for the legend
    with picture(path, 9, 1.6 * lines + 0.3, "lag; bands are 95% intervals over seeds, NoClip in grey") as figure:
        places = iter(figure.subplots(lines, 5, sharex=True, sharey=True, squeeze=False).flat)
        for method, axes in zip(METHODS, places, strict=False):
            for grid, style in zip(GRID, STYLES, strict=False):
                of_grid = cells[cells["grid"] == grid]
                noclip, of = (of_grid[of_grid["method"] == name] for name in ("NoClip", method))
                x = of["lag"].map(LAGS.index)
                axes.plot(noclip["lag"].map(LAGS.index), noclip["mean"], color=GREY, ls=style["ls"], linewidth=0.8)
                axes.plot(x, of["mean"], marker="o", markersize=2.5, label=grid, **style)
                axes.fill_between(x, of["low"], of["high"], color=style["color"], alpha=0.15, linewidth=0)
            axes.set(title=method, xticks=range(len(LAGS)), xticklabels=LAGS)
            axes.tick_params(labelbottom=True)
        for axes in figure.axes[len(METHODS) :]:
            axes.set_axis_off()
        labels = figure.axes[0].get_legend_handles_labels()
        figure.axes[len(METHODS)].legend(*labels, loc="center", labelcolor="linecolor", frameon=False)


def fill(page: Path, blocks: dict[str, str]) -> None:
    """Write every block in its place on the page."""
    text = page.read_text(encoding="utf-8")
    for name, content in blocks.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end {name} -->")
        if not end:
            raise SystemExit(f"{page}: no place for {name}")
        text = f"{before}{begin}\n{content}\n\n{end}{after}"
    write_text(page, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with runs.parquet, summaries.parquet and settings.yaml")
    folder = parser.parse_args().folder
    study, pictures = study_of(read(folder)), []
    for model in study["grid"]["model"].unique():
        draw_heat(study, model, folder / f"heat-{model}.svg")
        draw_lags(study, model, folder / f"lags-{model}.svg")
        pictures += [f"![Final reward on {model} by method, lag, epochs and learning rate](heat-{model}.svg)",
                     f"![The same by lag, a panel for each method, with intervals](lags-{model}.svg)"]  # fmt: skip
    rewards = [study["final"], means(study["grid"].query("lag in [0, 8]"), "peak")]
    arms = ["{method}, {grid}, lag {lag}", "{arm}"]
    blocks = {
        "predictions": predictions(study),
        "pictures": "\n\n".join(pictures),
        "against NoClip": against_noclip(study),
        "lag 8 minus lag 0": tables(study["lag"].query("lag == 8"), "{method}", "{grid}", study["lag"]),
        "ess at the drop": drops(study),
        "ratios at lag 8": ratios(study),
        "decoupled minus coupled": tables(study["decoupled"], *arms, study["decoupled"]),
        "corrected minus uncorrected": tables(study["corrected"], *arms, study["corrected"]),
        "nucleus minus ignore": tables(study["nucleus"], *arms, study["nucleus"]),
        "rewards": tables(pd.concat(rewards, ignore_index=True), "{grid}: {method}", "{column}, lag {lag}"),
        "budget": budget(study),
    }
    fill(folder / "README.md", blocks)


if __name__ == "__main__":
    main()
