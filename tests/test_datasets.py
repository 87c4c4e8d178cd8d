"""Loading: every format and source, the splits, strict gold answers, and malformed input."""

import datetime
import json
import re
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import datasets
import numpy
import pandas
import pyarrow.parquet
import pytest

from pspo.config import DataConfig
from pspo.tasks.answers import parse_gold
from pspo.tasks.datasets import SOURCES, SPLITS, group_by_split, load_problems, local_parts
from pspo.tasks.problem import Problem, content_text


def write_jsonl(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def numbered(count: int, start: int = 0) -> list[dict]:
    return [{"prompt": f"What is {n}?", "answer": n} for n in range(start, start + count)]


def answers(problems: list[Problem]) -> list[Fraction]:
    return [problem.answer for problem in problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", "42"), (" 1,080 ", "1080"), ("-3", "-3"), ("$5", "5"), (r"\$ 10", "10"), (r"-\$0.50", "-1/2"),
        (r"16,\!386.16", "16386.16"), ("50%", "50"), (r"7.2\%", "7.2"), (r"-5^\circ", "-5"), (r"80^{\circ}", "80"),
        ("90°", "90"), (r"\frac{9}{7}", "9/7"), ("5/2", "5/2"), ("51.0", "51"), ("1e3", "1000"), ("$7$", "7"),
        (r"3\frac18", "25/8"), (r"137 \frac{1}{2}", "275/2"), ("2 1/2", "5/2"),
    ] + [
        (text, None) for text in (
            "", "x=5", "k = 15", "(1,2)", "1,2", "0,1", "2:3", "12:50", "3:30 p.m.", "6th", "Yes", "11; 12", "1-2",
            r"10\text{ inches}", r"9\text{ a.m.}", r"12\text{ and }13", "1101_2", r"141_{13}", r"2^{2005}", "2k",
            r"2\sqrt{5}", r"9\pi", r"45^\circ, 135^\circ", r"1 \pm 2", "6+9i", "-(1/3)", "5 apples", "nan", "inf",
            "3/0", "%", r"\infty", "$", "1e5000",
        )
    ],
)  # fmt: skip
def test_gold_is_one_number_or_left_out(text, value):
    assert parse_gold(text) == (None if value is None else Fraction(value))


def test_math(tmp_path, capsys):
    solutions = [
        r"$\boxed{\frac{6}{4}}$", r"$\boxed{x=5}$", r"both $\boxed{-2}$ and $\boxed{1}$",
        r"$\boxed{3}$, that is \boxed{3.0}", r"$\boxed{\frac{6}{3}}$", "no box",
        r"$\boxed{\sqrt{4}+1}$, so $a+b=\boxed{5}$", r"$\boxed{70,110}$",
    ]  # fmt: skip
    common = {"problem": "Find $x$.", "level": "Level 3", "type": "Algebra"}
    listed = common | {"problem": "Enter all the solutions, separated by commas.", "solution": solutions[-1]}
    (tmp_path / "test.json").write_text(json.dumps([listed, *(common | {"solution": each} for each in solutions)]))
    problems = load_problems("math", "test", tmp_path)
    assert answers(problems) == [Fraction(3, 2), 3, 2, 5, 70110]
    fields = {"level": "Level 3", "type": "Algebra", "solution": solutions[0]}
    assert problems[0] == Problem(
        "Find $x$.", Fraction(3, 2), fields, source="math", category="Algebra", level="Level 3", solution=solutions[0]
    )
    assert "5 of 9" in capsys.readouterr().out
    texts = load_problems("math", "test", tmp_path, answer_kind="text")
    assert answers(texts) == ["70,110", r"\frac{6}{4}", "x=5", "1", "3.0", r"\frac{6}{3}", "5", "70,110"]
    assert "8 of 9 problems have an answer" in capsys.readouterr().out


def test_asdiv(tmp_path, capsys):
    golds = ["9 (apples)", "3 (apples); 4 (pears)", "2:3", "5/2", "7", "12:50", "14  (seats)", "6 (km/hour)"]
    xml = "".join(
        f'<Problem ID="nluds-{n}" Grade="2"><Body>B <i>is</i> &lt; 3.</Body><Question>Q?</Question>'
        f"<Solution-Type>Sum</Solution-Type><Answer>{gold}</Answer><Formula/></Problem>"
        for n, gold in enumerate(golds)
    )
    (tmp_path / "ASDiv.xml").write_text(f"<Root><ProblemSet>{xml}</ProblemSet></Root>")
    problems = load_problems("asdiv", "test", tmp_path)
    assert answers(problems) == [9, Fraction(5, 2), 7, 14, 6]
    fields = {"solution_type": "Sum", "answer": "9 (apples)", "formula": "", "grade": "2"}
    assert problems[0] == Problem("B is < 3. Q?", Fraction(9), fields, source="asdiv", category="Sum", level="2")
    assert "5 of 8" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet", "csv.gz", "jsonl.bz2"])
def test_own_file_in_every_format(tmp_path, suffix):
    values, path = ["0.1", "-7", "1,234", "3/4"], tmp_path / f"own.{suffix}"
    prompts = [f"  Say «{n}»\u2028please\n" for n in [*values[:3], "x" * 200_000]]  # longer than a csv's field may be
    table = pandas.DataFrame({"q": prompts, "a": values, "level": "easy"})
    if "json" in suffix:  # pandas compresses by the name
        table.to_json(path, orient="records", lines="jsonl" in suffix, force_ascii=False)
    elif "csv" in suffix:
        table.to_csv(path, index=False, encoding="utf-8-sig")  # as spreadsheets save it
    else:
        table.to_parquet(path)
    problems = load_problems("file", "test", path, columns={"prompt": "q", "answer": "a"})
    assert answers(problems) == [Fraction(1, 10), -7, 1234, Fraction(3, 4)]
    fields = {"a": "0.1", "level": "easy"}
    assert problems[0] == Problem(prompts[0], Fraction(1, 10), fields, source="file", level="easy")
    assert problems[3].prompt == prompts[3]


def test_numbers_stay_exact(tmp_path):
    (tmp_path / "own.jsonl").write_text(
        '{"prompt": 1, "answer": 0.1}\n{"prompt": 2, "answer": 0.1000000000000000000001}\n{"prompt": 3, "answer": 1e22}'
    )
    values = [Fraction(1, 10), Fraction("0.1000000000000000000001"), Fraction(10**22)]
    assert answers(load_problems("file", "test", tmp_path / "own.jsonl")) == values
    (tmp_path / "own.jsonl").write_text('{"prompt": 1, "answer": 1e3}\n{"prompt": 2, "answer": 1.50E+2}')
    assert answers(load_problems("file", "test", tmp_path / "own.jsonl", answer_kind="text")) == ["1e3", "1.50E+2"]


@pytest.mark.parametrize("kind", [numpy.float16, numpy.float32, numpy.float64, Decimal])
def test_a_number_of_a_table_is_its_shortest_decimal(tmp_path, kind):
    golds = ["0.1", "99.9", "-2.5", "7"] if kind == numpy.float16 else ["99.99", "1234.1", "123456.7", "1e22"]
    values = pyarrow.array(numpy.array([kind(gold) for gold in golds]))
    lists = pyarrow.ListArray.from_arrays(range(5), values)
    columns = {"prompt": golds, "answer": values, "row": pyarrow.StructArray.from_arrays([lists], ["x"])}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "own.parquet")
    problems = load_problems("file", "test", tmp_path / "own.parquet")
    assert answers(problems) == [Fraction(gold) for gold in golds]
    assert [problem.fields["row"] for problem in problems] == [{"x": [float(gold)]} for gold in golds]


def test_a_folder_of_save_to_disk_is_read(tmp_path, monkeypatch):
    """Class labels are their names."""
    label = datasets.ClassLabel(names=["no", "yes"])
    lists = {"lists": datasets.List(label), "objects": [{"labels": datasets.Sequence(label)}]}
    features = datasets.Features({"prompt": datasets.Value("string"), "answer": label} | lists)
    labels = {"lists": [1, -1, 0], "objects": [{"labels": [0, 1]}]}
    rows = [{"prompt": f"{n}?", "answer": n % 2} | labels for n in range(40)]
    table = datasets.Dataset.from_list(rows, features=features)
    golds = sorted(["no", "yes"] * 20)
    table.save_to_disk(tmp_path / "one")
    monkeypatch.chdir(tmp_path / "one")
    assert sorted(answers(load_problems("file", "test", ".", answer_kind="text"))) == golds
    datasets.DatasetDict(train=table, test=table.select([1, 3])).save_to_disk(tmp_path / "two")
    train, validation, test = (load_problems("file", split, tmp_path / "two", answer_kind="text") for split in SPLITS)
    assert (sorted(answers(train + validation)), answers(test)) == (golds, ["yes", "yes"])
    table.to_parquet(tmp_path / "own.parquet")
    problems = load_problems("file", "test", tmp_path / "own.parquet", answer_kind="text")
    assert answers(problems) == ["no", "yes"] * 20
    fields = {"lists": ["yes", None, "no"], "objects": [{"labels": ["no", "yes"]}]}
    assert problems[0].fields == {"answer": "no"} | fields


@pytest.mark.parametrize(
    ("files", "train", "test"),
    [
        (("train_test_split/train.jsonl", "train_test_split/test.jsonl"), [0], [1]),  # the file's own name decides
        (("train/a.jsonl", "train/sub/b.jsonl", "test/a.jsonl"), [0, 1], [2]),
        (("train-00-of-02.jsonl", "train-01-of-02.jsonl", "my_test.jsonl", ".cache/test.jsonl"), [0, 1], [2]),
        (("training.jsonl", "testing.jsonl"), [0], [1]), (("pretrain.jsonl", "my-test.jsonl"), [0], [1]),
        (("train.jsonl", "latest.jsonl", "contest.jsonl", "test.jsonl"), [0], [3]), (("train/test.jsonl",), [], [0]),
    ],
)  # fmt: skip
def test_the_split_of_a_file_is_by_known_words(tmp_path, files, train, test):
    for n, file in enumerate(files):
        write_jsonl(tmp_path / file, numbered(1, start=n) * 2)
    groups = group_by_split(local_parts(tmp_path), {})
    found = {split: [record["answer"] for part in parts for record in part.records] for split, parts in groups.items()}
    assert found == {split: sorted(ns * 2) for split, ns in (("train", train), ("test", test)) if ns}


@pytest.mark.parametrize(("n_numbers", "is_refused"), [(3, True), (0, True), (197, False), (200, False), (60, True)])
@pytest.mark.parametrize("name", ["file", "me/cities"])
def test_texts_for_answers_are_refused_until_the_switch_says_text(tmp_path, monkeypatch, name, n_numbers, is_refused):
    rows = [{"prompt": f"{n}?", "answer": str(n) if n < n_numbers else "Paris"} for n in range(200)]
    path = write_jsonl(tmp_path / "test.jsonl", rows) if name == "file" else None
    message = f"{n_numbers} answers are numbers and {200 - n_numbers} are not: --data.answer_kind text"
    message = message if n_numbers else "test: none of 200 problems has a numeric answer: give --data.answer_kind text"
    monkeypatch.setattr("datasets.load_dataset", lambda *where, revision: tables(test=rows))
    if is_refused:
        with pytest.raises(ValueError, match=message):
            load_problems(name, "test", path)
    else:
        assert len(load_problems(name, "test", path)) == n_numbers


def test_splits_of_a_folder(tmp_path):
    own = write_jsonl(tmp_path / "own.jsonl", numbered(5))  # named for nothing: test, and never trained on
    assert answers(load_problems("file", "test", tmp_path)) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"own.jsonl has no train split, only test; .*train.jsonl"):
        load_problems("file", "train", own)
    for split, start in (("train", 0), ("val", 10), ("test", 20)):
        write_jsonl(tmp_path / f"{split}.jsonl", numbered(9 if split == "val" else 2, start))
    for holdout in (0, 0.9):  # only divides a single split
        assert answers(load_problems("file", "test", tmp_path, holdout=holdout)) == [20, 21]
    validation = answers(load_problems("file", "validation", tmp_path))
    assert sorted(validation) == [*range(10, 19)] != validation  # such files are often sorted by subject
    assert sorted(answers(load_problems("file", "train", tmp_path))) == [0, 1]
    same = write_jsonl(tmp_path / "train.jsonl", [{"prompt": "Play.", "answer": n} for n in range(3)])
    assert sorted(answers(load_problems("file", "train", same))) == [0, 1, 2]  # not all are validation


@pytest.mark.parametrize(
    ("name", "rows", "held_out"), [("file", 2, 1), ("file", 100, 5), ("file", 10_100, 500), ("gsm8k", 7_010, 10)]
)
def test_validation_is_held_out_of_train(tmp_path, name, rows, held_out):
    columns = {"columns": {"prompt": "question"}} if name == "file" else {}
    records = [{"question": f"q{n}", "answer": f"{n}"} for n in range(rows)]
    path = write_jsonl(tmp_path / "train.jsonl", records)
    train, validation = (load_problems(name, split, path, **columns) for split in ("train", "validation"))
    assert len(validation) == held_out
    assert sorted(answers(train) + answers(validation)) == list(range(rows))
    assert answers(train) != sorted(answers(train)) or rows == 2
    assert load_problems(name, "train", path, seed=1, limit=7, **columns) != train[:7] or rows == 2


def test_mixture(tmp_path):
    write_jsonl(tmp_path / "gsm8k" / "train.jsonl", [{"question": f"g{n}", "answer": f"#### {n}"} for n in range(40)])
    solution = "2+3=<<2+3=5>>5 thousand\n#### 5,000"
    write_jsonl(tmp_path / "gsm8k" / "test.jsonl", [{"question": "gt", "answer": solution}])
    write_jsonl(tmp_path / "gsm8k" / "train_socratic.jsonl", [{"question": "s", "answer": "#### 7"}])
    math = [{"problem": f"m{n}", "solution": rf"\boxed{{{n}}}"} for n in range(40)]
    write_jsonl(tmp_path / "math" / "train.jsonl", math)
    write_jsonl(tmp_path / "math" / "test.jsonl", math[:2])
    assert [p.prompt for p in load_problems("math+gsm8k", "test", tmp_path)] == ["m0", "m1", "gt"]
    train = load_problems("gsm8k+math", "train", tmp_path)
    assert Counter(problem.source for problem in train) == {"gsm8k": 38, "math": 38}
    assert {problem.source for problem in train[:20]} == {"gsm8k", "math"}  # shuffled together
    validation = load_problems("gsm8k+math", "validation", tmp_path)
    assert len(set(train) | set(validation)) == 80
    mixed = load_problems("gsm8k+arithmetic", "train", tmp_path)
    assert Counter(problem.source for problem in mixed) == {"gsm8k": 38, "arithmetic": 10_000}
    assert all(problem.fields.keys() == {"answer"} for problem in mixed)  # of which arithmetic has none
    (problem,) = load_problems("gsm8k", "test", tmp_path)  # a folder of folders serves a single name too
    assert problem == Problem("gt", Fraction(5000), {"answer": solution}, source="gsm8k", solution=solution)


def test_a_limit_takes_a_seeded_sample_of_a_test_split(tmp_path):
    """Published test splits are sorted by subject, a mixture's by source."""
    path = write_jsonl(tmp_path / "test.jsonl", [{"prompt": f"q{n}", "answer": n} for n in range(100)])
    sample, other = (answers(load_problems("file", "test", path, limit=20, seed=seed)) for seed in (0, 1))
    assert sample == sorted(sample) != sorted(other) == other
    assert len(set(sample)) == 20
    assert max(sample) > 60


def tables(**splits: list[dict]) -> dict[str, datasets.Dataset]:
    return {split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}


def test_hub(monkeypatch):
    """Tests cannot reach the hub: its tables are stood in for."""
    asked = []

    def load_dataset(hub_id, config, revision):
        asked.append((hub_id, config, revision))
        if hub_id == "EleutherAI/asdiv":
            row = {"body": "B.", "question": "Q?", "solution_type": "Sum", "answer": "9 (apples)", "formula": "9=9"}
            return tables(validation=[row])
        if hub_id == "openai/gsm8k":
            return tables(train=[{"question": f"{n}", "answer": f"#### {n}"} for n in range(7473)], test=[])
        if hub_id == "ChilleD/SVAMP":
            return tables(test=[{"Body": "B 3.", "Question": "Q?", "Answer": 3.5, "Type": "Sum"}])
        if hub_id == "EleutherAI/hendrycks_math":
            return tables(test=[{"problem": config, "type": config, "solution": r"\boxed{3}"}])
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    fields = {"solution_type": "Sum", "answer": "9 (apples)", "formula": "9=9"}
    assert load_problems("asdiv", "test") == [Problem("B. Q?", Fraction(9), fields, source="asdiv", category="Sum")]
    assert len(load_problems("gsm8k", "validation")) == 473
    assert asked[0] == ("EleutherAI/asdiv", "asdiv", SOURCES["asdiv"].revision)
    assert asked[1:] == [("openai/gsm8k", "main", SOURCES["gsm8k"].revision)]
    load_problems("gsm8k", "validation", hub={"revision": "main"})
    with pytest.raises(ValueError, match=r"--data\.hub: only hub ids .* have configurations and splits, not gsm8k"):
        load_problems("gsm8k", "validation", hub={"config": "socratic"})
    with pytest.raises(ValueError, match=r"--data\.columns: only files of yours and hub ids .* not gsm8k"):
        load_problems("gsm8k", "validation", columns={"prompt": "q2"})
    assert asked[2:] == [("openai/gsm8k", "main", "main")]
    assert len({problem.category for problem in load_problems("math", "test")}) == 7
    fields = {"Answer": 3.5, "Type": "Sum"}
    assert load_problems("svamp", "test") == [Problem("B 3. Q?", Fraction("3.5"), fields, "svamp", "Sum")]
    with pytest.raises(ValueError, match=r"me/mine .*no route.* --data.path"):
        load_problems("me/mine", "test")


def test_any_set_of_the_hub(monkeypatch):
    """Splits go by their words or by name, in the configuration asked for; validation is held out as of files."""
    cities = tables(
        train_sft=[{"q": f"{n}?", "a": f"city {n}", "lang": "en"} for n in range(40)],
        test_sft=[{"q": "Capital?", "a": " Paris ", "lang": "fr"}, {"q": "None?", "a": None, "lang": "fr"}],
        unsupervised=[{"q": "no", "a": "no", "lang": "no"}],
    )
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda *where, revision: asked.append((*where, revision)) or cities)
    columns = {"answer_kind": "text", "columns": {"prompt": "q", "answer": "a"}}
    paris = Problem("Capital?", "Paris", {"a": " Paris ", "lang": "fr"}, source="me/cities")
    assert load_problems("me/cities", "test", hub={"config": "small", "revision": "v1"}, **columns) == [paris]
    assert asked == [("me/cities", "small", "v1")]
    train, validation = (load_problems("me/cities", split, **columns) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (38, 2)
    assert sorted(int(p.prompt[:-1]) for p in train + validation) == list(range(40))
    with pytest.raises(ValueError, match=r"has no test split, only train; .*--data\.hub"):
        load_problems("me/cities", "test", hub={"splits": {"train": "unsupervised"}}, **columns)
    with pytest.raises(ValueError, match=r"me/cities from the hub: KeyError\('dev_sft'\); check .*--data\.hub"):
        load_problems("me/cities", "train", hub={"splits": {"train": "train_sft", "validation": "dev_sft"}}, **columns)
    for mistyped in ({"columns": {"anwser": "a"}}, {"hub": {"splits": {"valid": "test_sft"}}}):
        with pytest.raises(ValueError, match=r"^--data\.(columns|hub\.splits) must have no keys but .*, got"):
            DataConfig(**mistyped)
    cities |= tables(eval_numbers=[{"prompt": "2?", "answer": 2.0}, {"prompt": "?", "answer": None}])
    assert answers(load_problems("me/cities", "test", hub={"splits": {"test": "eval_numbers"}})) == [2]


def test_answers_of_every_kind(tmp_path, capsys):
    golds = ["Paris", "  New\tYork ", None, "", 7, "NA"]
    path = write_jsonl(tmp_path / "own.jsonl", [{"prompt": f"{n}", "answer": gold} for n, gold in enumerate(golds)])
    assert answers(load_problems("file", "test", path, answer_kind="text")) == ["Paris", "New\tYork", "7", "NA"]
    assert capsys.readouterr().out == f"{path} test: 4 of 6 problems have an answer\n"
    for column in ("answer", "anything"):  # which need not be there
        problems = load_problems("file", "test", path, answer_kind="none", columns={"answer": column})
        assert answers(problems) == [None] * 6
        assert [problem.fields["answer"] for problem in problems] == golds


def test_further_columns_travel_as_plain_values(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "p", "answer": 0.5, "tests": [{"in": 1.5, "out": null}], "weight": 1e400, "n": 3}')
    (problem,) = load_problems("file", "test", path)
    assert problem.fields == {"answer": 0.5, "tests": [{"in": 1.5, "out": None}], "weight": None, "n": 3}
    assert [type(value) for value in problem.fields.values()] == [float, list, type(None), int]
    day, raw = datetime.date(2024, 7, 26), b"x" * 99
    rows = [
        {"prompt": "p", "answer": 1.0, "day": day, "raw": raw, "info": [{"a": 1}], "x": float("nan"), "level": None},
        {"prompt": "q", "answer": float("nan"), "day": None, "raw": b"", "info": [{"b": 2}], "x": 1.0, "level": "NA"},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "own.parquet")
    first, second = load_problems("file", "test", tmp_path / "own.parquet", answer_kind="none")
    assert first.fields == {"answer": 1.0, "day": day, "raw": raw, "info": [{"a": 1}], "x": None, "level": None}
    assert (second.fields["info"], second.fields["answer"], second.level) == ([{"b": 2}], None, "NA")
    assert answers(load_problems("file", "test", tmp_path / "own.parquet", answer_kind="text")) == ["1.0"]
    assert first.record()["fields"] == first.fields | {"day": "2024-07-26", "raw": f"b'{'x' * 78}"}


TURN = {"role": "user", "content": "3 + 4?"}


@pytest.mark.parametrize(
    ("suffix", "record", "columns"),
    [
        ("parquet", {"prompt": [TURN], "reward_model": {"style": "rule", "ground_truth": "7"}, "data_source": "mine"},
         {"answer": "reward_model.ground_truth"}),
        ("jsonl", {"prompt": [TURN], "solution": "$7$"}, {"answer": "solution"}),
        ("jsonl", {"question": "3 + 4?", "answer": "7", "info": {"tests": [{"in": None}]}}, {"prompt": "question"}),
        ("parquet", {"problem": "3 + 4?", "answer": "7", "solution": "So 7."}, {"prompt": "problem"}),
        ("jsonl", {"messages": [TURN | {"content": [{"type": "text", "text": "3 + 4?"}]}], "answer": 7}, {}),
        ("json", {"a": {"b": {"prompt": "3 + 4?", "gold": 7}}}, {"prompt": "a.b.prompt", "answer": "a.b.gold"}),
        ("jsonl", {"the.prompt": "3 + 4?", "answer": 7}, {"prompt": "the.prompt"}),
    ],
)  # fmt: skip
def test_your_file_from_another_trainer(tmp_path, suffix, record, columns):
    path = tmp_path / f"own.{suffix}"
    table = pandas.DataFrame([record] * 10)
    table.to_parquet(path) if suffix == "parquet" else table.to_json(path, orient="records", lines=suffix == "jsonl")
    config = DataConfig(path=str(path), columns=columns)
    assert config.numeric
    problems = load_problems("file", "test", path, columns=config.columns)
    prompt = problems[0].prompt
    said = prompt if isinstance(prompt, str) else content_text(prompt[0])
    assert (said, answers(problems)) == ("3 + 4?", [7] * 10)
    prompt_column = columns.get("prompt", "prompt" if "prompt" in record else "messages")
    assert problems[0].fields == {name: value for name, value in record.items() if name != prompt_column}


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi, TOM?"}]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_chats_are_prompts(tmp_path, suffix):
    """A table gives every turn and call the keys of all the others, None where one lacks it; JSON means its null."""
    chats = [CHAT, [{"role": "user", "content": " Hi\n", "name": "Ann"}]]
    for arguments in ({"city": "Rome"}, {"offset": 1.5} | ({"limit": None} if suffix == "jsonl" else {})):
        call = {"type": "function", "function": {"name": "look_up", "arguments": arguments}}
        chats.append([CHAT[1], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "7"}])
    rows = [{"prompt": chat, "answer": 7} for chat in chats]
    path = tmp_path / f"own.{suffix}"
    write_jsonl(path, rows) if suffix == "jsonl" else pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    prompts = [problem.prompt for problem in load_problems("file", "test", path)]
    assert json.dumps(prompts, sort_keys=True) == json.dumps(chats, sort_keys=True)  # what a template's tojson writes


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.jsonl", '{"prompt": "p", "answer": 1}\n\n{"prompt"\n', ["line 3"]),
        ("a.jsonl", '{"prompt": "p", "gold": 1}', ["record 1", "'answer'", "prompt, gold", "--data.columns"]),
        ("a.jsonl", '{"prompt": "p", "answer": 1}\n{"prompt": "\\ud800", "answer": 1}', ["record 2", "surrogate"]),
        ("a.jsonl", '{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": 1}', ["type image"]),
        ("a.jsonl", '{"prompt": "<image>Which?", "images": ["x.png"], "answer": 1}', ["record 1", "has an <image>"]),
        ("a.jsonl", "7\n", ["record 1 must be an object"]),
        ("a.jsonl", '{"prompt": "p", "answer": 1, "answer": 2}', ["line 1", "'answer' is there twice"]),
        ("a.csv", "prompt,answer,answer\np,1,2\n", ["'answer' is there twice"]),
        ("a.jsonl", '{"prompt": " ", "answer": 1}', ["record 1", "'prompt' is empty"]),
        ("a.json", "[" * 100_000, []),
        ("a.xml", "<Root>", []),
        ("a.csv", "prompt,answer\np,1\nq\n", ["line 3", "fewer cells than the header"]),
        ("a.jsonl.gz", "not compressed", []),
        ("a.csv", "prompt,answer\nCafé?,1\n".encode("UTF-16-LE"), ["a.csv: not UTF-8"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_malformed_file_is_named_with_the_record_and_the_column(tmp_path, name, content, named):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=re.escape(str(path))) as error:
        load_problems("file", "test", path)
    assert all(part in str(error.value) for part in named), error.value


def words(problems: list[Problem]) -> set[str]:
    texts = [p.prompt if isinstance(p.prompt, str) else p.prompt[0]["content"] for p in problems]
    return {" ".join(re.findall("[a-z0-9]+", text.lower())) for text in texts}


def test_holdout_makes_train_validation_and_test_that_share_no_problem(tmp_path):
    """Every problem is there in three spellings, one a chat's: the same words are on one side."""
    rows = []
    for n in range(400):
        turn = {"role": "user", "content": f"TOM has {n}  apples and eats {n % 7}!"}
        texts = (f"Tom has {n} apples, and eats {n % 7}.", f"tom has {n}  apples and eats {n % 7} ?")
        rows += [{"prompt": prompt, "answer": n} for prompt in (*texts, [turn])]
    file = write_jsonl(tmp_path / "problems.jsonl", rows)  # names no split
    parts = {split: load_problems("file", split, file, holdout=0.3) for split in SPLITS}
    assert sum(map(len, parts.values())) == 1200
    assert sum(len(words(part)) for part in parts.values()) == 400
    assert len(words(parts["test"])) / 400 == pytest.approx(0.3, abs=0.07)  # three standard deviations of 400 draws
    assert 0 <= len(parts["validation"]) - (1200 - len(parts["test"])) // 20 < 3  # whole groups until there are enough
    assert load_problems("file", "test", file, holdout=0.3, seed=1) != parts["test"]
    assert words(parts["test"]) < words(load_problems("file", "test", file, holdout=0.5))  # a larger share only adds
    renamed = file.rename(tmp_path / "train.jsonl")
    assert {split: load_problems("file", split, renamed, holdout=0.3) for split in SPLITS} == parts
