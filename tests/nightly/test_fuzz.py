"""Fuzzing of data files and configurations: input is read rightly, or refused in one line that names it."""

import csv
import io
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pspo.cli.parse import parse
from pspo.config import TrainConfig
from pspo.tasks import load_problems

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("here")]
DEFAULTS = Path(__file__).parents[2] / "configs" / "tiny.yaml"
fixtures = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# --- data files -------------------------------------------------------------------------------------------------------

RECORDS = {
    "file": [{"prompt": f"What is {n}+1?", "answer": str(n + 1), "level": "easy"} for n in range(4)],
    "gsm8k": [{"question": "How many?", "answer": f"2+{n}=<<2+{n}={n + 2}>>{n + 2}\n#### {n + 2}"} for n in range(4)],
    "math": [{"problem": "Find $x$.", "level": "Level 3", "type": "Algebra", "solution": r"so \boxed{\frac{6}{4}}."}],
    "svamp": [{"Body": "Dan had 3.", "Question": "How many?", "Answer": 3.5, "Type": "Sum", "ID": "c-1"}],
}
ASDIV = """<?xml version="1.0"?><Root><ProblemSet><Problem ID="1" Grade="1" Source="x"><Body>B &lt; 3.
</Body><Question>Q?</Question><Solution-Type>Sum</Solution-Type><Answer>9 (apples)</Answer></Problem></ProblemSet>
</Root>"""
FILES = [(name, suffix) for name in RECORDS for suffix in (".jsonl", ".json", ".csv", ".parquet")] + [("asdiv", ".xml")]
ODD = (
    b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r", b'"', b"'", b"\\", b"{", b"}", b"[", b"]", b",", b":",
    b"<", b">", b"&", b"null", b"NaN", b"-Infinity", b"1e400", b"9" * 5000, b"\\ud800", b"true", b"####", b"\\boxed{",
    b"<Body>", b"<!DOCTYPE a [<!ENTITY b 'c'>]>", b'"answer": 1,', b"\xed\xa0\x80", b"a" * 200_000,
)  # fmt: skip


def spelled(name: str, suffix: str) -> bytes:
    records, file, text = RECORDS.get(name, []), io.BytesIO(), io.StringIO()
    if suffix == ".xml":
        return ASDIV.encode()
    if suffix == ".jsonl":
        return "".join(json.dumps(record) + "\n" for record in records).encode()
    if suffix == ".json":
        return json.dumps(records, indent=1).encode()
    if suffix == ".csv":
        writer = csv.DictWriter(text, records[0])
        writer.writeheader()
        writer.writerows(records)
        return text.getvalue().encode()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
    return file.getvalue()


def loads_or_names(name: str, path: Path) -> None:
    """Load, or raise the one ValueError, which has to name the file."""
    try:
        error, problems = None, load_problems(name, "test", path)
    except ValueError as raised:
        error = raised
    assert problems if error is None else str(path) in str(error), error


@pytest.mark.parametrize(("name", "suffix"), FILES)
@settings(fixtures, max_examples=200)
@given(edits=st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0, 0, 1, 5, 50]), st.sampled_from(ODD)), max_size=4))
def test_a_mutated_data_file_loads_or_is_named(tmp_path, name, suffix, edits):
    content = spelled(name, suffix)
    for place, cut, odd in edits:
        i = int(place * len(content))
        content = content[:i] + odd + content[i + cut :]
    path = tmp_path / f"test{suffix}"
    path.write_bytes(content)
    loads_or_names(name, path)


# --- configurations ---------------------------------------------------------------------------------------------------

WRONG = (
    "null", "true", "-1", "0", "1.5", "1e400", ".nan", "-.inf", "[]", "{}", "[1]", "{a: 1}", "'", '"', "[", "{",
    "!!python/object/apply:os.system [exit]", "2020-13-45", "*a", "~", "\t", "no", "\u2028", "PSPO", "os.system",
    "{class_path: Clip, init_args: {epsilon: null}}", "1_000", "0x10", "1:60", "Say: 'yes'", "a # b",
    "{class_path: PSPO, dict_kwargs: {a: 1}}", "[{class_path: MathReward, init_args: {format_bonus: null}}]",
)  # fmt: skip
SWITCHES = [f"{part}.{leaf}" for part, leaves in yaml.safe_load(DEFAULTS.read_text()).items() for leaf in leaves]


def taken_or_refused(capsys, *args: str) -> None:
    """Parse silently, or exit with code 2 and one line on stderr."""
    capsys.readouterr()
    try:
        code, _ = None, parse(TrainConfig, "pspo.train", args)
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert out == ""
    assert (code, err) == (None, "") or (code, err.count("\n"), err[:19]) == (2, 1, "pspo.train: error: "), err


@settings(fixtures, max_examples=1000)
@given(
    lines=st.lists(
        st.tuples(st.sampled_from([*SWITCHES, "run", "rollout", "x.y"]), st.sampled_from(WRONG)), max_size=3
    ),
    edits=st.lists(st.tuples(st.floats(0, 1), st.sampled_from(WRONG)), max_size=2),
)
def test_any_file_is_taken_or_refused_in_one_line(capsys, tmp_path, lines, edits):
    text = "".join(f"{name.partition('.')[0]}:\n  {name.partition('.')[2]}: {value}\n" for name, value in lines)
    for place, odd in edits:
        i = int(place * len(text))
        text = text[:i] + odd + text[i:]
    file = tmp_path / "config.yaml"
    file.write_text(text)
    taken_or_refused(capsys, "--config", str(file))
