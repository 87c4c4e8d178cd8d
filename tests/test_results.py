"""The tables of a results page hold the numbers of its table of runs, to the last digit that they show."""

import functools
import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from pspo.evaluate import results
from pspo.report.runs import Runs, labels, methods, read_runs
from pspo.report.tables import add_holm, compared, over_seeds, tables, with_interval

RESULTS = Path(__file__).parents[1] / "results"


def rows(page: str, header: str) -> list[list[str]]:
    """Cells of the table of a page whose header begins so."""
    text = (RESULTS / page).read_text(encoding="utf-8").replace("**", "")
    lines = text[text.index(header) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def percent(row: pd.Series, interval: bool = True) -> str:
    return results.percent(row.value, (row.low, row.high) if interval else None)


def measures(numbers: pd.DataFrame, evaluation: str, temperature: str = "0") -> dict[str, pd.Series]:
    """Rows of an evaluation by measure."""
    of_all = numbers[(numbers["evaluation"] == evaluation) & (numbers["temperature"] == temperature)]
    of_all = of_all[of_all["group"].isna()]
    assert of_all["measure"].is_unique
    return {row.measure: row for _, row in of_all.iterrows()}


def smollm2_runs(experiment: str) -> Runs:
    runs = read_runs([RESULTS / "smollm2"])
    return runs.take(list(runs.configs.index[runs.configs["experiment"].str.endswith(f"/{experiment}")]))


def test_smollm2_word_problems():
    numbers = read_runs([RESULTS / "smollm2"]).numbers
    expected = []
    for name, words, gsm8k in (
        ("before", "before-word-problems", "before-gsm8k"),
        ("seed 0, after stage 1", "seed-0-stage-1-word-problems", "seed-0-stage-1-gsm8k"),
        ("seed 0, after stage 2", "seed-0-word-problems", "seed-0-gsm8k"),
        ("seed 1, after stage 1", "seed-1-stage-1-word-problems", None),
        ("seed 1, after stage 2", "seed-1-word-problems", "seed-1-gsm8k"),
    ):
        found, of_gsm8k = measures(numbers, words), measures(numbers, gsm8k) if gsm8k else {}
        expected.append([
            name, percent(found["accuracy"]), percent(found["gold_anywhere"]),
            f"{found['completion_tokens'].value:.0f}", f"{100 * found['truncated_share'].value:.0f}%",
            *(percent(of_gsm8k[measure]) if of_gsm8k else "" for measure in ("accuracy", "gold_anywhere")),
        ])  # fmt: skip
    assert rows("smollm2/README.md", "| | ASDiv + SVAMP, 976 held-out problems |") == expected


def test_smollm2_sampled():
    numbers = read_runs([RESULTS / "smollm2"]).numbers
    expected = [
        [name, *(percent(measures(numbers, evaluation, "0.6")[f"pass@{k}"]) for k in (1, 2, 4))]
        for name, evaluation in (("before", "before-sampled-300"), ("after stage 2", "seed-0-sampled-300"))
    ]
    assert rows("smollm2/README.md", "| | pass@1 |") == expected


def test_smollm2_weights():
    runs, expected = smollm2_runs("bf16"), []
    configs = runs.configs.sort_values(["model.dtype", "run.seed"], key=lambda of: of.replace("float32", "a"))
    for run, config in configs.iterrows():
        found = measures(runs.numbers[runs.numbers["run"] == run], "evaluation")
        summary = runs.numbers[(runs.numbers["run"] == run) & (runs.numbers["evaluation"] == "summary")]
        summary = summary.set_index("measure")["value"]
        rewards = runs.metrics.loc[runs.metrics["run"] == run].sort_values("step")["reward"]
        expected.append([
            config["model.dtype"], str(config["run.seed"]), percent(found["accuracy"]),
            percent(found["gold_anywhere"], interval=False), f"{found['completion_tokens'].value:.0f}",
            f"{100 * found['truncated_share'].value:.0f}%", f"{rewards.tail(5).mean():.3f}",
            f"{summary['peak_memory_gb']:.1f} GB", f"{summary['tokens']:,.0f}",
        ])  # fmt: skip
    assert rows("smollm2/README.md", "| weights | seed |") == expected


@pytest.mark.parametrize(("evaluation", "said"), [("evaluation", "10.5% [8.7, 12.5]"), ("before", "4.6% [3.5, 6.1]")])
def test_smollm2_lora(evaluation, said):
    found = measures(smollm2_runs("lora").numbers, evaluation)
    assert percent(found["accuracy"]) == said
    page = (RESULTS / "smollm2/README.md").read_text(encoding="utf-8").partition("## With LoRA")[2]
    assert said in page.replace("**", "")
    assert percent(found["gold_anywhere"]) in page


def test_smollm2_lora_costs():
    runs = smollm2_runs("lora")
    page = " ".join((RESULTS / "smollm2/README.md").read_text(encoding="utf-8").split())
    spent = (runs.metrics["seconds/generate"] + runs.metrics["seconds/train"]).sum()
    summary = runs.numbers[runs.numbers["evaluation"] == "summary"].set_index("measure")["value"]
    assert f"40 steps, {summary['tokens']:,.0f} tokens, {spent:,.0f} s generating" in page
    assert f"peak {summary['peak_memory_gb']:.1f} GB" in page


SELECTED = ["NoClip", "Clip", "PSPO", "P3O", "SAPO", "TOPR"]


@pytest.fixture(scope="module")
def protocol() -> dict[str, dict[str, pd.DataFrame]]:
    """The report's tables by model."""
    runs, found = read_runs([RESULTS / "tiny-protocol"]), {}
    for model, names in runs.configs.groupby("model.name_or_path").groups.items():
        of_model = runs.take(list(names))
        found[model] = tables(of_model, methods(of_model.configs), [model])
    return found


def test_tiny_protocol(protocol):
    """The best and the final models of both tables of tasks; the README has the best."""
    expected = {}
    for model, of_model in protocol.items():
        for which in ("", "final "):
            table = of_model["Accuracy"]
            cells = table[table["column"].str.endswith(f": {which}accuracy (%)")].set_index("row").loc[SELECTED]
            expected[model, which] = [cell_text(cell, 1) for _, cell in cells.iterrows()]
    of_page = rows("tiny-protocol/README.md", "| method | tiny-base, best |")
    columns = {("tiny-base", ""): 1, ("tiny-base", "final "): 2, ("tiny-math", ""): 4, ("tiny-math", "final "): 5}
    assert {key: [row[i] for row in of_page] for key, i in columns.items()} == expected
    of_readme = {model: cells for model, *cells in rows("../README.md", "| | NoClip, 1 epoch | Clip |")}
    assert of_readme == {model: expected[model, ""] for model in protocol}
    names = ["noclip", "clip", "pspo", "p3o", "sapo", "topr"]
    for model, i in (("tiny-base", 1), ("tiny-math", 4)):
        for name, row in zip(names, of_page, strict=True):
            method_page = (RESULTS.parent / f"docs/methods/{name}.md").read_text(encoding="utf-8")
            assert row[i] in method_page, (model, name)


def test_tiny_protocols_differences(protocol):
    page = " ".join((RESULTS / "tiny-protocol/README.md").read_text(encoding="utf-8").split())
    for model, row, column, digits, said in (
        ("tiny-base", "PSPO - Clip", ": accuracy", 1, "{} points {} from Clip"),
        ("tiny-base", "PSPO - NoClip", ": accuracy", 1, "and {} {} from NoClip on tiny-base"),
        ("tiny-base", "SAPO - NoClip", ": accuracy", 1, "(paired: {} points {} and"),
        ("tiny-base", "TOPR - NoClip", ": accuracy", 1, "and {} {} against NoClip;"),
        ("tiny-base", "PSPO - Clip", ": final accuracy", 1, "the final models {} {} and"),
        ("tiny-base", "PSPO - NoClip", ": final accuracy", 1, "and {} {}. On tiny-math"),
        ("tiny-base", "SAPO - NoClip", ": final accuracy", 1, "final models {} {} and"),
        ("tiny-base", "TOPR - NoClip", ": final accuracy", 1, "and {} {}). Their search"),
        ("tiny-base", "PSPO - NoClip", "area", 3, "below NoClip on tiny-base, {} {}, and above"),
        ("tiny-math", "PSPO - NoClip", "area", 3, "above it on tiny-math, {} {}."),
        ("tiny-math", "P3O - NoClip", "area", 3, "above NoClip's, {} {} and"),
        ("tiny-math", "SAPO - NoClip", "area", 3, "and {} {}."),
    ):
        table = protocol[model]["Paired differences"]
        (cell,) = table[(table["row"] == row) & table["column"].str.contains(column)].itertuples()
        mean, _, interval = with_interval(cell, 100 if digits == 1 else 1, digits).partition(" ")
        assert said.format(mean, interval) in page, (row, column, mean, interval)
    counts = []
    for model in ("tiny-base", "tiny-math"):
        table = protocol[model]["Paired differences"]
        counts += [table["p"].count(), (table["low"] * table["high"] > 0).sum(), (table["holm"] < 0.05).sum()]
    assert counts == [81, 27, 1, 81, 15, 2]
    assert "Of 81 differences on tiny-base 27 exclude 0, and one after" in page
    assert "Of 81 on tiny-math 15, and two after it" in page
    table = protocol["tiny-base"]["Paired differences"]
    (cell,) = table[table["holm"] < 0.05].itertuples()
    assert (cell.row, "final accuracy" in cell.column) == ("TOPR - Clip", True)
    assert f"final model is {-100 * cell.mean:.1f} points [{-100 * cell.high:.1f}, {-100 * cell.low:.1f}] below" in page
    for of_model in protocol.values():
        assert not of_model["Learning"].query("column == 'returned untrained (%)'")["mean"].any()


@pytest.fixture(scope="module")
def off_policy() -> dict[str, pd.DataFrame]:
    runs = read_runs([RESULTS / "tiny-comparisons"])
    of_model = runs.take(list(runs.configs.index[runs.configs["model.name_or_path"] == "tiny-math"]))
    return tables(of_model, labels(of_model.configs), ["tiny-math"])


def test_off_policy(off_policy):
    accuracy, course = (off_policy[title].set_index(["row", "column"]) for title in ("Accuracy", "Learning"))
    expected = []
    for name in course.index.unique("row"):
        cells = [accuracy.loc[(name, f"arithmetic test, n = 500: {of}accuracy (%)")] for of in ("final ", "")]
        reward, untrained = (course.loc[(name, of)] for of in ("final validation reward", "returned untrained (%)"))
        texts = [
            cell_text(cells[0], 1),
            cell_text(reward, 3),
            cell_text(cells[1], 1),
            f"{5 * untrained['mean']:.0f} of 5",
        ]
        expected.append([name, *texts])
    assert rows("tiny-comparisons/README.md", "| from tiny-math, 81.0% |") == expected


def test_off_policy_differences(off_policy):
    table = off_policy["Paired differences"]
    assert (len(table), (table["holm"] < 0.05).sum()) == (270, 0)
    page = " ".join((RESULTS / "tiny-comparisons/README.md").read_text(encoding="utf-8").split())
    found = table[table["low"] * table["high"] > 0]
    assert len(found) == 13
    for cell in found.itertuples():
        percent = cell.column.endswith("(%)")
        mean, *sides = (abs(100 * x if percent else x) for x in (cell.mean, cell.low, cell.high))
        digits = 1 if percent else 3
        assert f"{mean:.{digits}f} [{min(sides):.{digits}f}, {max(sides):.{digits}f}]" in page, (cell.row, cell.column)
    collapsed = off_policy["Learning"].query("column == 'collapsed (%)' and mean > 0")
    assert collapsed[["row", "mean"]].to_numpy().tolist() == [["PSPO (alpha=0.4)", 0.2], ["PSPO (alpha=0.5)", 0.2]]


def test_smollm2_what_was_learnt():
    answers = pd.read_parquet(RESULTS / "smollm2/answers.parquet").set_index("problem")
    before, expected, shares = answers[answers["model"] == "before"], [], {}
    for model, name in (
        ("before", "before"), ("lora-0", "LoRA, seed 0"), ("bfloat16-0", "bfloat16, seed 0"),
        ("bfloat16-1", "bfloat16, seed 1"), ("float32-0", "float32, seed 0"), ("float32-1", "float32, seed 1"),
    ):  # fmt: skip
        after, marks = answers[answers["model"] == model], []
        assert len(after) == 976
        assert (after["gold"] == before["gold"]).all()
        for equation, gold in after.dropna(subset="equation")[["equation", "gold"]].itertuples(index=False):
            a, operation, b, c = re.fullmatch(r"([\d,.]+) ?([-+*/]) ?([\d,.]+) ?= ?(-?[\d,.]+)", equation).groups()
            a, b, c = (Fraction(number.replace(",", "")) for number in (a, b, c))
            true = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[operation]
            marks.append((true == c, true == Fraction(gold), true == c == Fraction(gold)))
        moved = [(after["correct"] & ~before["correct"]).sum(), (before["correct"] & ~after["correct"]).sum()]
        counts = [len(marks), *(sum(column) for column in zip(*marks, strict=True))]
        moved = ["", ""] if model == "before" else moved
        expected.append([name, *(str(number) for number in (after["correct"].sum(), *moved, *counts))])
        shares[model] = (100 * counts[1] / counts[0], after["format"].mean())
    assert rows("smollm2/README.md", "| run | right | newly right |") == expected
    page = " ".join((RESULTS / "smollm2/README.md").read_text(encoding="utf-8").split())
    worst = max(share for model, (_, share) in shares.items() if model != "before")
    assert f"in {shares['before'][1]:.1%} of answers before, is in {worst:.1%} at most after" in page
    assert f"had ended before, {before[~before['truncated']]['correct'].mean():.1%} were right" in page
    assert {f"{shares[model][0]:.0f}" for model in ("lora-0", "bfloat16-0")} == {"37"}
    assert f"from {shares['before'][0]:.0f}% to 37%" in page


@pytest.fixture(scope="module")
def smollm2() -> pd.DataFrame:
    """Every rollout's metrics, with experiment and seed, by step."""
    metrics = pd.read_parquet(RESULTS / "smollm2/runs.parquet")
    safe = metrics["setting"].str.contains("lr=2e-05")
    return metrics.assign(safe=safe).set_index("step")


def one_run(metrics: pd.DataFrame, experiment: str, seed: int, safe: bool = False) -> pd.DataFrame:
    of_run = (metrics["experiment"] == experiment) & (metrics["seed"] == seed)
    return metrics[of_run & (metrics["safe"] == safe)]


def test_smollm2_costs(smollm2):
    expected = []
    for name, run, rows_of_a_rollout in (
        ("seed 0, stage 1, to step 40", one_run(smollm2, "stage-1", 0).loc[:40], 128),
        ("seed 0, stage 2", one_run(smollm2, "stage-2", 0), 512),
        ("seed 1, stage 1 (one process, another beside it)", one_run(smollm2, "stage-1", 1, safe=True), 128),
        ("seed 1, stage 2", one_run(smollm2, "stage-2", 1), 512),
    ):
        seconds = run["seconds/generate"].sum() + run["seconds/train"].sum()
        tokens = run["tokens"].iloc[-1]
        expected.append([name, str(len(run)), f"{len(run) * rows_of_a_rollout:,}", f"{tokens:,}", f"{seconds:,.0f}"])
    assert [row[:-1] for row in rows("smollm2/README.md", "| | rollouts | completions | tokens |")] == expected


MEASURES = {
    "area under the curve": "area", "final validation reward": "validation",
    "arithmetic test, n = 500: final accuracy (%)": "accuracy",
}  # fmt: skip
NAMES = ["PSPO 0.1", "PSPO 0.4", "NoClip, 2 epochs", "Clip", "NoClip, 1 epoch"]


@functools.cache
def control_runs() -> pd.DataFrame:
    """Of every run of the toy control and of each measure, the value, with what the setting is and the seed."""
    runs = read_runs([RESULTS / "tiny-control"])
    configs, method = runs.configs, methods(runs.configs)
    epochs = configs["algorithm.epochs"].map({1: "NoClip, 1 epoch", 2: "NoClip, 2 epochs"})
    alpha = configs["algorithm.surrogate.init_args.alpha"]
    about = pd.DataFrame({
        "experiment": configs["experiment"].map(lambda path: Path(path).name), "seed": configs["run.seed"],
        "name": method.where(method != "NoClip", epochs).where(method != "PSPO", "PSPO " + alpha.astype(str)),
        "alpha": alpha, "clip": configs["optimizer.max_grad_norm"], "dtype": configs["model.dtype"],
        "scale": configs["algorithm.advantage_scale"],
    })  # fmt: skip
    values = compared(runs).join(about, on="run")
    values = values[values["column"].isin(MEASURES)]
    return values.assign(column=values["column"].map(MEASURES)).drop(columns=["low", "high"])


def cell_text(cell, digits: int) -> str:
    numbers = SimpleNamespace(**cell[["mean", "low", "high"]])
    return with_interval(numbers, 100 if digits == 1 else 1, digits) + ("*" if cell.get("holm", 1) < 0.05 else "")


def control_tables() -> dict[str, list[list[str]]]:
    """Means, and differences from NoClip with two epochs at the same clipping, corrected for all of them."""
    values = control_runs()
    values = values[values["experiment"] != "alpha"]
    where = ["experiment", "clip", "column"]
    keyed = values.assign(row=list(values[["name", *where]].itertuples(index=False, name=None)))
    means = over_seeds(keyed.assign(column="")).set_index("row")
    pairs = values.merge(values[values["name"] == "NoClip, 2 epochs"], on=[*where, "seed"], suffixes=("", "_base"))
    pairs = pairs[pairs["name"] != "NoClip, 2 epochs"]
    pairs["row"] = list(pairs[["name", *where]].itertuples(index=False, name=None))
    pairs["value"] -= pairs["value_base"]
    differences = add_holm(over_seeds(pairs[["row", "value"]].assign(column=""))).set_index("row")
    assert set(means["seeds"]) == set(differences["seeds"]) == {8}

    found = {}
    for title, cells, names in (
        ("means", means, NAMES),
        ("differences", differences, [name for name in NAMES if name != "NoClip, 2 epochs"]),
    ):
        found[title] = []
        for clip in (0.0, 0.1):
            for name in names:
                columns = [
                    (run, column) for run in ("tokens", "steps") for column in ("area", "validation", "accuracy")
                ]
                texts = [
                    cell_text(cells.loc[[(name, run, clip, column)]].iloc[0], 1 if column == "accuracy" else 3)
                    for run, column in columns
                ]
                found[title].append([name, "0.1" if clip else "none", *texts])
    found["compared"] = differences
    return found


def alpha_tables() -> tuple[list[list[str]], pd.DataFrame]:
    """Mean final validation reward by variant and alpha, with spreads; and the table's numbers."""
    values = control_runs()
    values = values[(values["experiment"] == "alpha") & (values["column"] == "validation")]
    variant = ["scale", "clip", "dtype"]
    cells = values.groupby([*variant, "alpha"])["value"].agg(["mean", "std", "size"])
    assert set(cells["size"]) == {8}
    lines, numbers = [], []
    for (scale, clip, dtype), of_variant in cells.groupby(level=variant):
        means, deviation = of_variant["mean"], (of_variant["std"] ** 2).mean() ** 0.5
        paired = values[(values["scale"] == scale) & (values["clip"] == clip) & (values["dtype"] == dtype)]
        wide = paired.pivot(index="seed", columns="alpha", values="value")
        gaps = pd.concat([
            pd.DataFrame({"row": f"{scale} {clip} {dtype} {alpha}", "column": "", "value": wide[alpha] - wide[0.0]})
            for alpha in wide if alpha > 0
        ])  # fmt: skip
        numbers.append(over_seeds(gaps).assign(scale=scale, clip=clip, dtype=dtype))
        lines.append([
            scale, "0.1" if clip else "none", dtype, *(f"{mean:.3f}" for mean in means),
            f"{means.max() - means.min():.3f}", f"{deviation:.3f}",
        ])  # fmt: skip
    return lines, add_holm(pd.concat(numbers, ignore_index=True))


def test_tiny_control():
    found = control_tables()
    page = (RESULTS / "tiny-control/README.md").read_text(encoding="utf-8")
    tables_of_page = page.split("|  | norm clipped at | area |")[1:]
    for title, text in zip(("means", "differences"), tables_of_page, strict=True):
        lines = text.partition("\n\n")[0].splitlines()[2:]
        assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == found[title]
    page, differences = " ".join(page.split()), found["compared"]
    assert (len(differences), (differences["holm"] < 0.05).sum()) == (48, 4)
    assert (differences["low"] * differences["high"] > 0).sum() == 10
    unclipped = [key for key in differences.index if key[0].startswith("PSPO") and key[2] == 0]
    assert not differences.loc[unclipped, ["mean", "sem"]].to_numpy().any()  # the same for every seed
    clipped = differences.loc[[key for key in differences.index if key[0].startswith("PSPO") and key[2] == 0.1]]
    assert (clipped["low"] * clipped["high"] < 0).all()

    def mean(name: str, run: str, clip: float, column: str) -> str:
        return f"{abs(differences.loc[[(name, run, clip, column)], 'mean'].iloc[0]):.3f}"

    one = [mean("NoClip, 1 epoch", "tokens", clip, column) for clip in (0.0, 0.1) for column in ("area", "validation")]
    assert "by {} in the area and {} in the final validation reward ({} and {} with clipping)".format(*one) in page
    ahead = [mean("NoClip, 1 epoch", "steps", clip, "area") for clip in (0.0, 0.1)]
    assert "ahead in the area ({} and {}; not after".format(*ahead) in page
    clip = [cell_text(differences.loc[[("Clip", run, 0.1, "area")]].iloc[0], 3) for run in ("tokens", "steps")]
    assert "its area is {} and {} larger, not after".format(*clip) in page
    hours = (
        pd.read_parquet(RESULTS / "tiny-control/summaries.parquet").query("measure == 'seconds'")["value"].sum() / 3600
    )
    assert f"{hours:.1f} hours of single cores" in page


def test_the_curve_of_alpha():
    lines, differences = alpha_tables()
    assert rows("tiny-control/README.md", "| advantages divided by |") == lines
    page = " ".join((RESULTS / "tiny-control/README.md").read_text(encoding="utf-8").split())
    assert len(differences) == 40
    assert (differences["low"] * differences["high"] <= 0).all()
    spreads, deviations = ([float(line[i]) for line in lines] for i in (-2, -1))
    assert f"largest spread is {max(spreads):.3f}" in page
    assert f"deviation of single seeds ({min(deviations):.3f} to {max(deviations):.3f})" in page
    assert 6 * max(deviations) < 0.149
    plain = differences[(differences["scale"] == "none") & (differences["clip"] == 0)].set_index("row")
    same = plain[["mean", "sem"]].eq(0).all(axis=1)
    assert same[[f"none 0.0 float32 {alpha}" for alpha in (0.1, 0.2, 0.4)]].all()
    assert not same[["none 0.0 float32 0.5", "none 0.0 float32 0.8"]].any()


def test_tiny_alpha_and_control():
    """Every run returned its final model; alpha 0 to 0.4 are one number; the control's differences."""
    runs = read_runs([RESULTS / "tiny-comparisons"])
    experiment = runs.configs["experiment"].map(lambda path: Path(path).name)
    page = " ".join((RESULTS / "tiny-comparisons/README.md").read_text(encoding="utf-8").split())
    best = runs.numbers[runs.numbers["measure"] == "best_step"].set_index("run")["value"]
    assert (best[experiment.index[experiment != "off-policy"]] == 32).all()
    assert "all 75 runs returned their final model" in page

    def of(name: str) -> dict[str, pd.DataFrame]:
        some = runs.take(list(experiment.index[experiment == name]))
        return tables(some, labels(some.configs), ["tiny-base"])

    alpha = of("alpha")
    for title in ("Accuracy", "Learning"):
        cells = alpha[title].pivot(index="column", columns="row", values="mean")
        assert cells[[f"PSPO (alpha={a})" for a in (0.0, 0.1, 0.2, 0.4)]].nunique(axis=1).eq(1).all(), title
    accuracy = alpha["Accuracy"].query("column.str.contains(': accuracy')").set_index("row")["mean"]
    shares = (100 * accuracy[f"PSPO (alpha={a})"] for a in (0.5, 0.8, 0.0))
    assert "({:.1f} and {:.1f}% greedy accuracy against {:.1f}%)".format(*shares) in page

    control = of("control")["Paired differences"]
    assert (len(control), (control["low"] * control["high"] > 0).sum(), (control["holm"] < 0.05).sum()) == (210, 46, 0)
    sgd, adamw = "{}, max_grad_norm={}, optimizer.name=sgd", "lr=3e-05, max_grad_norm={}, optimizer.name=adamw"

    def differences(one: str, other: str) -> pd.DataFrame:
        return control[control["row"] == f"PSPO ({one}) - NoClip ({other})"].set_index("column")

    def cell(one: str, other: str, column: str, digits: int) -> str:
        found = differences(one, other)
        return cell_text(found[found.index.str.contains(column)].iloc[0], digits)

    plain, clipped = sgd.format("lr=0.1", 0.0), sgd.format("lr=0.1", 0.1)
    for one, other in ((adamw.format(0.0), adamw.format(0.0)), (plain, sgd.format("lr=0.06", 0.0))):
        assert len(differences(one, other)) == 7
        assert not differences(one, other)[["mean", "sem"]].to_numpy().any()
    assert (
        f"accuracy {cell(plain, plain, ': accuracy', 1)}, area under the curve {cell(plain, plain, 'area', 3)})" in page
    )
    assert f"(SGD: {cell(clipped, clipped, ': accuracy', 1)}; " in page
    assert f"AdamW: {cell(adamw.format(0.1), adamw.format(0.1), ': accuracy', 1)})" in page
