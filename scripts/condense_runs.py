"""Condense runs to a table with a row per run: python scripts/condense_runs.py runs/off-policy --output runs.csv

Columns: the experiment, the method, the switches that differ between the runs, the seed; means over all rollouts of the
training's reward, kl_sampler_old, kl_old_new and zero_weight_share (docs/guide/runs.md), validation (last validation
reward), accuracy (greedy, of the final model), returned_accuracy (of the best model by validation), untrained_accuracy
and best_step. Each greedy evaluation NAME of a sweep adds NAME_reward and NAME_gold_anywhere of the returned model, and
untrained_NAME_... of the model that the run began with.

--answers NAME... writes every answer of these evaluations beside the table, as a .parquet file of the same name: the
temperature, the numbers of problem and sample, the completion and its reward, the evaluation, and the run's experiment,
method, varied switches and seed (empty for the model that the runs began with).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from pspo.files import read_jsonl, write_text
from pspo_lab.runs import Runs, read_runs
from pspo_lab.settings import MODEL, SEED, differing, methods, short_names

STAGE_COLUMNS = {"before": "untrained_accuracy", "after": "returned_accuracy", "final": "accuracy"}
ROOMS = ("algorithm.", "model.", "optimizer.", "rollout.")
MEANS = {
    "reward": "mean", "kl_sampler_old": "mean", "kl_old_new": "mean", "zero_weight_share": "mean",
    "validation_reward": "last",
}  # over a run's rollouts  # fmt: skip


def test_numbers(runs: Runs) -> pd.DataFrame:
    """Return greedy numbers in percent by run: accuracies of summaries, rewards and gold anywhere of evaluations.

    An evaluated run also has the numbers of the model that it began with.
    """
    evaluated = {test.run for test in runs.tests if test.evaluation != "summary"} - {None}
    columns: dict[str, dict[str, float]] = {}
    for test in runs.tests:
        if test.temperature != "0":
            continue
        measures = {"accuracy": STAGE_COLUMNS[test.stage]}
        if test.evaluation != "summary":
            name = f"{'untrained_' if test.stage == 'before' else ''}{test.evaluation}"
            measures = {"mean_reward": f"{name}_reward", "gold_anywhere": f"{name}_gold_anywhere"}
        owners = [test.run] if test.run else [run for run in evaluated if run.switches[MODEL] == test.model]
        for measure, column in measures.items():
            if measure in test.numbers:
                columns.setdefault(column, {}).update({run.name: 100 * test.numbers[measure].value for run in owners})
    return pd.DataFrame(columns, index=[run.name for run in runs.labels]).sort_index(axis=1)


def condense(runs: Runs) -> pd.DataFrame:
    """A row per run, in order of experiments and settings."""
    names = [run.name for run in runs.labels]
    configs = pd.DataFrame([run.switches for run in runs.labels], names, dtype=object)
    varied = [name for name in differing(runs.configs) if name.startswith(ROOMS)]
    rollouts = runs.rollouts().groupby("run")
    means = {name: how for name, how in MEANS.items() if name in rollouts.obj}
    rows = pd.DataFrame({"experiment": [Path(run.experiments[0]).name for run in runs.labels]}, names)
    rows["method"] = [*methods(runs.configs).values()]
    rows = rows.join(configs[varied].rename(columns=short_names(runs.configs))).assign(seed=configs[SEED])
    rows = rows.join(rollouts.agg(means).rename(columns={"validation_reward": "validation"}))
    rows["best_step"] = [run.summary.get("best_step") for run in runs.labels]
    return rows.join(test_numbers(runs)).dropna(axis="columns", how="all")


def answers(runs: Runs, table: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """A row per answer of the evaluations with these names."""
    described = table.loc[:, :"seed"]
    tests = {test.file: test for test in runs.tests if test.evaluation in names}  # a file holds all temperatures
    parts = []
    for file, test in tests.items():
        part = pd.DataFrame(read_jsonl(file))[["temperature", "problem", "sample", "completion", "reward"]]
        of_run = {} if test.run is None else described.loc[test.run.name]
        parts.append(part.assign(evaluation=test.evaluation, **of_run))
    return pd.concat(parts, ignore_index=True).drop_duplicates()  # experiments may share an untrained model


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--answers", nargs="+", metavar="NAME")
    given = parser.parse_args(args)
    runs = read_runs(given.folders).finished
    table = condense(runs)
    write_text(given.output, table.to_csv(index=False, float_format="%.7g"))
    print(f"{len(table)} runs: {given.output}")
    if given.answers:
        answers(runs, table, given.answers).to_parquet(given.output.with_suffix(".parquet"))


if __name__ == "__main__":
    main()
