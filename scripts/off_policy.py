"""Tables and pictures of the off-policy study, from its packed runs: python scripts/off_policy.py results/off-policy

Writes best.svg, cells.csv and differences.csv, and in README.md what stands between
<!-- table: NAME --> and <!-- /table -->; the rest of the page is written by hand.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from pspo.cli.files import write_text
from pspo_lab.figures import COLOURS, GREY, INK, picture
from pspo_lab.runs import read_runs
from pspo_lab.settings import MODEL, SEED, methods
from pspo_lab.tables import add_holm, diagnostics, learning, mean_over_seeds, mean_text
from pspo_lab.text import markdown_table

METHODS = ["NoClip", "PSPO", "Clip", "P3O", "SAPO", "TOPR",
           "REINFORCE", "CISPO", "GSPO", "LUSPO", "GMPO", "VESPO", "DPPO"]  # fmt: skip
GRID = ["1 epoch, lr 3e-5", "1 epoch, lr 1e-4", "4 epochs, lr 3e-5", "4 epochs, lr 1e-4"]
# The grid's runs are coupled: ratios to the behaviour policy. Then corrections of decoupled runs, and the nucleus
ARMS = ["coupled", "none", "token_truncate", "sequence_mask", "replay", "top-p 1"]
SWITCHES = {"model": MODEL, "epochs": "algorithm.epochs", "lr": "optimizer.lr", "lag": "rollout.lag", "seed": SEED,
            "aggregation": "algorithm.aggregation", "ratio_to": "algorithm.ratio_to",
            "correction": "algorithm.correction", "nucleus": "algorithm.nucleus", "top_p": "rollout.top_p"}  # fmt: skip
RATIOS = ["ess", "kl_old_new", "ratio_p1", "ratio_p99", "zero_weight_share"]
HOLD = ["Clip", "DPPO", "TOPR", "GSPO", "LUSPO", "GMPO", "VESPO"]  # by masks, or by weights of whole completions
UNTRAINED = {"tiny-base": 0.381, "tiny-math": 0.829}  # validation reward at step 0, the same in every run
FAMILIES = ["noclip", "lag", "decoupled", "corrected", "nucleus"]
CELL = ["model", "epochs", "lr", "grid", "method", "lag", "arm"]  # runs of one cell differ in their seeds
CLAIMS = {  # of configs/sweep/off-policy.yaml: the family of differences, those that a claim is about, and the verdict
    "1: PSPO, Clip, P3O, REINFORCE, CISPO, DPPO are NoClip at lag 0 in 1 epoch": (
        "noclip", "lag == 0 and epochs == 1 and method in ['PSPO', 'Clip', 'P3O', 'REINFORCE', 'CISPO', 'DPPO']",
        "could not fail: r = 1, the same steps"),
    "1: all within 0.05 of NoClip at lag 0 in 4 epochs, lr 3e-5": (
        "noclip", "lag == 0 and epochs == 4 and lr < 5e-5", "held"),
    "2: none differs from NoClip where ess is above 0.9": (
        "noclip", "ess > 0.9", "failed by its intervals; by Holm's correction it hardly could"),
    "2: Clip, TOPR, CISPO, DPPO above NoClip where ess is below 0.5": (
        "noclip", "ess < 0.5", "not tested: no ess was so low"),
    "3: PSPO never differs from NoClip": (
        "noclip", "method == 'PSPO'", "held"),
    "4: REINFORCE level with NoClip up to lag 2 at lr 3e-5": (
        "noclip", "method == 'REINFORCE' and lag <= 2 and lr < 5e-5", "held but for one interval"),
    "5: with a correction above without, lag 8": (
        "corrected", "lag == 8", "held for 5 of 6 with sequence_mask, 3 of 6 with token_truncate"),
    "5: decoupled with a correction level with coupled": (
        "decoupled", "arm in ['token_truncate', 'sequence_mask']", "failed"),
    "6: replay level with ignore at lag 0": (
        "nucleus", "arm == 'replay' and lag == 0", "held, in wide intervals"),
    "6: replay above ignore at lag 4": (
        "nucleus", "arm == 'replay' and lag == 4", "not seen, in wide intervals"),
}  # fmt: skip

Study = dict[str, pd.DataFrame]


def read(folder: Path) -> pd.DataFrame:
    """One row per finished run, in order of cells: CELL, SWITCHES, constants of surrogates, experiment, measures."""
    runs = read_runs([folder])
    runs = runs.take(runs.finished())
    measured = pd.concat([learning(runs), diagnostics(runs)]).pivot(index="run", columns="column", values="value")
    rollouts = runs.metrics.sort_values("step").groupby("run")
    found = runs.configs[list(SWITCHES.values())].set_axis(list(SWITCHES), axis=1).infer_objects()
    found = found.assign(
        method=methods(runs.configs),
        arm=found["correction"].where(found["ratio_to"] == "proximal", "coupled"),
        experiment=runs.configs["experiment"].map(lambda path: Path(path).name),
        final=measured["final validation reward"],
        peak=measured["peak reward"],
        **measured[RATIOS],
        first_kl=rollouts.head(8).groupby("run")["kl_old_new"].mean(),
        groups=rollouts["zero_advantage_share"].mean().rsub(1) * 16,
        seconds=runs.numbers[runs.numbers["measure"] == "seconds"].set_index("run")["value"],
    )
    constants = runs.configs.filter(like="algorithm.surrogate.init_args.")
    found = found.join(constants.rename(columns=lambda name: name.rpartition(".")[2]))
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
    found = mean_over_seeds(pd.DataFrame({"row": rows, "column": value, "value": runs[value].to_numpy()}))
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


def best_settings(study: Study) -> pd.DataFrame:
    """Mean final reward of each method's best of the four settings, at lag 0 and at lag 8, by model and method.

    The setting is chosen by the same seeds that it is shown for: the best of four is too high at both lags.
    """
    found = study["final"].query("lag in [0, 8]")
    best = found.loc[found.groupby(["model", "method", "lag"])["mean"].idxmax()]
    table = best.pivot(index=["model", "method"], columns="lag", values=["mean", "grid"])
    table.columns = [f"{name} {lag}" for name, lag in table.columns]
    return table.assign(cost=table["mean 0"] - table["mean 8"]).infer_objects()


# Blocks of the page


def best(study: Study) -> str:
    """A row per method: its best setting at lag 0 and at lag 8, and what the lag costs."""
    found, columns = best_settings(study), {}
    seeds = study["final"].groupby("method")["seeds"].max().reindex(METHODS)
    for model in UNTRAINED:
        of = found.loc[model].reindex(METHODS)
        for lag in (0, 8):
            setting = of[f"grid {lag}"].str.replace(r" epochs?, lr ", " ep, ", regex=True)
            columns[f"{model}, lag {lag}"] = of[f"mean {lag}"].map("{:.3f}".format) + " (" + setting + ")"
        columns[f"{model}, cost"] = of["cost"].map("{:.3f}".format)
    table = pd.DataFrame({"seeds": seeds.map(str)} | columns).rename_axis(None)
    for model, level in UNTRAINED.items():
        table.loc["untrained", [f"{model}, lag 0", f"{model}, lag 8"]] = f"{level:.3f}"
    return markdown_table(table.fillna("–"))


def predictions(study: Study) -> str:
    """The numbers about each claim, and the verdict."""
    texts = {claim: [tally(study[family].query(about)), verdict] for claim, (family, about, verdict) in CLAIMS.items()}
    for model, of in study["final"].query("lag == 8 and grid == '4 epochs, lr 1e-4'").groupby("model"):
        place = of.set_index("method")["mean"].rank(ascending=False)["REINFORCE"]
        claim = f"4: REINFORCE worst on {model} at lag 8 in 4 epochs, lr 1e-4"
        texts[claim] = [f"place {place:.0f} of {len(of)}", "held" if place == len(of) else "failed"]
    texts = {claim: texts[claim] for claim in sorted(texts, key=lambda claim: claim[0])}
    return markdown_table(pd.DataFrame.from_dict(texts, orient="index", columns=["found", "verdict"]))


def against_noclip(study: Study) -> str:
    """How many differences from NoClip have an interval that excludes 0, by model, epochs and learning rate."""
    found = study["noclip"]
    groups = {", ".join(names): of for names, of in found.groupby(["model", "grid"], sort=False)} | {"all": found}
    counts = {group: map(str, [of["p"].count(), *sides(of)]) for group, of in groups.items()}
    columns = ["differences", "below 0", "above 0", "below, Holm", "above, Holm"]
    return markdown_table(pd.DataFrame.from_dict(counts, orient="index", columns=columns))


def contrast(runs: pd.DataFrame, ahead: list[str], behind: list[str]) -> str:
    """Mean final reward of methods minus that of others, with its interval over the seeds that all have."""
    by_seed = runs.pivot(index="seed", columns="method", values="final")[ahead + behind].dropna()
    values = pd.DataFrame(
        {"row": "", "column": "", "value": by_seed[ahead].mean(axis=1) - by_seed[behind].mean(axis=1)}
    )
    return mean_text(next(mean_over_seeds(values).itertuples()), 1, 3)


def explained(cells: pd.DataFrame, *causes: pd.Series) -> float:
    """R2 of a linear fit of the cells' final rewards."""
    x = np.column_stack([np.ones(len(cells)), *causes])
    rest = cells["final"] - x @ np.linalg.lstsq(x, cells["final"], rcond=None)[0]
    return 1 - rest.var() / cells["final"].var()


def text_numbers(study: Study) -> str:
    """Numbers of the page's text that no other table has, by model."""
    table, fall = {}, [method for method in METHODS if method not in [*HOLD, "SAPO"]]
    for model in UNTRAINED:
        grid = study["grid"].query("model == @model")
        near, far = (grid[grid["grid"] == name] for name in (GRID[0], GRID[-1]))
        cells = far.groupby(["method", "lag"])[["final", "kl_old_new", "ess"]].mean().reset_index()
        kl, holds = np.log(cells["kl_old_new"]), cells["method"].isin(HOLD).astype(float)
        ranks = cells.rank(numeric_only=True).corr()["final"]
        runs = far.assign(first_kl=np.log(far["first_kl"])).groupby(["method", "lag"])[["first_kl", "final"]]
        within = runs.transform(lambda of: of - of.mean()).corr().loc["first_kl", "final"]
        groups = study["runs"].query("model == @model").groupby("experiment")["groups"].mean()
        best_of, means_far = best_settings(study).loc[model], far.groupby(["lag", "method"])["final"].mean()
        table[model] = {
            "what training gains at lag 0, mean over methods": f"{best_of['mean 0'].mean() - UNTRAINED[model]:.3f}",
            "what lag 8 costs, mean over methods": f"{best_of['cost'].mean():.3f}",
            "4 epochs, lr 1e-4: what lag 8 costs, mean over methods": f"{(means_far[0] - means_far[8]).mean():.3f}",
            "4 epochs, lr 1e-4, lag 8: Clip, TOPR - NoClip, P3O": contrast(
                far[far["lag"] == 8], ["Clip", "TOPR"], ["NoClip", "P3O"]),
            "4 epochs, lr 1e-4, lag 8: the seven - the five": contrast(far[far["lag"] == 8], HOLD, fall),
            "1 epoch, lr 3e-5, lag 8: the five - the seven": contrast(near[near["lag"] == 8], fall, HOLD),
            f"R2 over {len(cells)} cells: logarithm of the KL": f"{explained(cells, kl):.2f}",
            f"R2 over {len(cells)} cells: one of the seven": f"{explained(cells, holds):.2f}",
            f"R2 over {len(cells)} cells: both": f"{explained(cells, kl, holds):.2f}",
            "rank correlation of KL and final reward": f"{ranks['kl_old_new']:.2f}",
            "rank correlation of ess and final reward": f"{ranks['ess']:.2f}",
            f"r of the first eight rollouts' KL, {len(far)} runs": f"{within:.2f}",
            "groups of 16 that carry signal": f"{groups.min():.1f} to {groups.max():.1f}",
        }  # fmt: skip
    return markdown_table(pd.DataFrame(table))


def write_csv(found: pd.DataFrame, path: Path) -> None:
    write_text(path, found.to_csv(index=False, float_format="%.6g"))


def write_tables(study: Study, folder: Path) -> None:
    """Every cell's means, and every difference with its interval and Holm's correction for its family."""
    cells = study["runs"].groupby(CELL, sort=False)[["peak", *RATIOS]].mean().reset_index()
    final = means(study["runs"])[[*CELL, "seeds", "mean", "low", "high"]].rename(columns={"mean": "final"})
    write_csv(final.merge(cells, on=CELL), folder / "cells.csv")
    families = pd.concat({name: study[name] for name in FAMILIES}, names=["family"]).reset_index("family")
    write_csv(families[["family", *CELL, "seeds", "mean", "low", "high", "p", "holm", "ess"]],
              folder / "differences.csv")  # fmt: skip


def budget(study: Study) -> str:
    groups = {**dict(list(study["runs"].groupby("experiment"))), "all": study["runs"]}
    found = {name: [f"{len(of)}", f"{of['seed'].nunique()}", f"{of['seconds'].sum() / 3600:.2f}"]
             for name, of in groups.items()}  # fmt: skip
    return markdown_table(pd.DataFrame.from_dict(found, orient="index", columns=["runs", "seeds", "core-hours"]))


# Pictures


def draw_best(study: Study, path: Path) -> None:
    """Draw each method's best setting at lag 0 (open) and at lag 8 (filled), from the worst at lag 8 to the best."""
    found = best_settings(study)
    with picture(path, 8.4, 3.4, "mean final reward (256 problems) of each method's best of four settings") as figure:
        for axes, (model, untrained) in zip(figure.subplots(1, len(UNTRAINED)), UNTRAINED.items(), strict=True):
            of = found.loc[model].sort_values("mean 8")
            y = np.arange(len(of))
            axes.hlines(y, of["mean 8"], of["mean 0"], color=GREY, linewidth=1)
            axes.plot(of["mean 0"], y, "o", mfc="none", color=COLOURS["NoClip"], markersize=4, label="lag 0")
            axes.plot(of["mean 8"], y, "o", color=COLOURS["NoClip"], markersize=4, label="lag 8")
            axes.axvline(untrained, color=GREY, ls=":", linewidth=1)
            axes.text(untrained, len(of) - 0.4, " untrained", color=INK, fontsize=7, va="bottom")
            axes.set(title=model, yticks=y, yticklabels=of.index)
        figure.axes[0].legend(loc="lower center", frameon=False)


def fill(page: Path, tables: dict[str, str]) -> None:
    """Write each table between its markers on the page, <!-- table: NAME --> and <!-- /table -->."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        before, begin, rest = text.partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition("<!-- /table -->")
        if not end:
            raise SystemExit(f"{page}: no place for the table {name}")
        text = f"{before}{begin}\n{table}\n\n{end}{after}"
    write_text(page, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with runs.parquet, summaries.parquet and settings.yaml")
    folder = parser.parse_args().folder
    study = study_of(read(folder))
    draw_best(study, folder / "best.svg")
    write_tables(study, folder)
    blocks = {"best": best(study), "predictions": predictions(study), "against NoClip": against_noclip(study)}
    fill(folder / "README.md", blocks | {"budget": budget(study), "text": text_numbers(study)})


if __name__ == "__main__":
    main()
