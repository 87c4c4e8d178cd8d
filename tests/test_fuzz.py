"""Hostile input: what a model prints, data files, configurations, checkpoints and model folders that nobody meant.

Bad input is one line and exit code 2 (a damaged checkpoint is named and passed over), never a traceback, and nothing
that came with it is run. `fuzz_answers.py` is the same for answers, for as long as one likes.
"""

import csv
import io
import json
import pickle
import random
import shutil
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from fuzz_answers import Campaign, check, run_own
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import pspo.evaluate.__main__
import pspo.train
from pspo.config import EvaluateConfig, TrainConfig
from pspo.run.checkpoint import checkpoints, describe
from pspo.run.cli import parse
from pspo.run.resume import find_checkpoint
from pspo.tasks import extract_answer, load_problems, math_reward

quick = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)

# --- answers ----------------------------------------------------------------------------------------------------------

PROSE = st.text(st.sampled_from("abc xyz,.!?$%()*#\n"), max_size=40)
ANYTHING = st.text(st.characters(), max_size=200)  # surrogates and control characters included
GRAMMAR = st.text(st.sampled_from("0123456789.,/-+eE#$%\\{}frac \n\u2212\u0665x()"), max_size=80)


@settings(deadline=None, max_examples=300)
@given(ANYTHING | GRAMMAR | st.lists(GRAMMAR, max_size=4).map("\n#### ".join))
def test_answers_are_those_of_a_scanner_without_regular_expressions(text):
    check(text)


@settings(deadline=None)
@given(
    PROSE | GRAMMAR,
    st.sampled_from(["", " ", "the answer is ", "x = ", "**", r"$\boxed{", "< ", "("]),
    st.integers(-(10**30), 10**30),
    st.sampled_from(["{:d}", "{:,d}", "{:d}.0", "{:d}e0", "{:d}/1"]),
    st.sampled_from(["", ".", " apples", "%", "}$", ")", " = 7", " or 8"]),
    PROSE,
)
def test_the_answer_is_the_one_that_was_put_there(junk, before, value, spelling, after, more):
    text = f"{junk}\n#### {before}{spelling.format(value)}{after}\n{more.replace('#', '')}"
    assert extract_answer(text) == value
    assert math_reward(text, value) == 1
    assert math_reward(text, value + 1) in (0, 0.05)


def test_a_short_campaign_finds_nothing(capsys):
    assert run_own(Campaign(2.0), seed=3) == 0
    assert "findings           0" in capsys.readouterr().out


@pytest.mark.parametrize("unit", ["1/0 ", "-1/0", "1,", "1e12345 ", "0/0 ", r"\frac10 "])
def test_a_million_characters_without_a_readable_number(unit):
    text = unit * (10**6 // len(unit))
    start = time.process_time()
    assert math_reward(text, 5) == 0
    assert time.process_time() - start < 2  # it takes 0.2 s


# --- data files -------------------------------------------------------------------------------------------------------

RECORDS = {
    "file": [{"prompt": f"What is {n}+1?", "answer": str(n + 1), "level": "easy"} for n in range(4)],
    "gsm8k": [{"question": "How many?", "answer": f"2+{n}=<<2+{n}={n + 2}>>{n + 2}\n#### {n + 2}"} for n in range(4)],
    "math": [{"problem": "Find $x$.", "level": "Level 3", "type": "Algebra", "solution": r"so \boxed{\frac{6}{4}}."}],
    "svamp": [{"Body": "Dan had 3.", "Question": "How many?", "Answer": 3.5, "Type": "Sum", "ID": "c-1"}],
}
ASDIV = """<?xml version="1.0" encoding="UTF-8" ?><Root><ProblemSet><Problem ID="1" Grade="1" Source="x"><Body>B &lt; 3.
</Body><Question>Q?</Question><Solution-Type>Sum</Solution-Type><Answer>9 (apples)</Answer></Problem></ProblemSet>
</Root>"""


def spelled(name: str, suffix: str) -> bytes:
    records, file = RECORDS.get(name, []), io.BytesIO()
    if suffix == ".xml":
        return ASDIV.encode()
    if suffix == ".jsonl":
        return "".join(json.dumps(record) + "\n" for record in records).encode()
    if suffix == ".json":
        return json.dumps(records, indent=1).encode()
    if suffix == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, records[0])
        writer.writeheader()
        writer.writerows(records)
        return text.getvalue().encode()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
    return file.getvalue()


FILES = [(name, suffix) for name in RECORDS for suffix in (".jsonl", ".json", ".csv", ".parquet")] + [("asdiv", ".xml")]
ODD = (
    b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r", b'"', b"'", b"\\", b"{", b"}", b"[", b"]", b",", b":",
    b"<", b">", b"&", b"null", b"NaN", b"-Infinity", b"1e400", b"1e99999999999999999999", b"9" * 5000,
    b"[" * 3000, b'{"a":' * 3000,
    b"\\ud800", b"true", b"####", b"\\boxed{", b"<Body>", b"<!DOCTYPE a [<!ENTITY b 'c'>]>", b'encoding="x"',
    b'"answer": 1,', b"\xed\xa0\x80", b"a" * 200_000,
)  # fmt: skip


def loads_or_names(name: str, path: Path) -> None:
    """Load, or the one ValueError, which has to name the file."""
    try:
        error = None
        problems = load_problems(name, "test", path)
    except ValueError as raised:
        error = raised
    assert problems if error is None else (type(error) is ValueError and str(path) in str(error)), error


@pytest.mark.parametrize(("name", "suffix"), FILES)
@settings(quick, max_examples=25)
@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.sampled_from([0, 0, 1, 5, 50]), st.sampled_from(ODD)), min_size=1, max_size=4
    )
)
def test_a_mutated_data_file_loads_or_is_named(tmp_path, name, suffix, edits):
    content = spelled(name, suffix)
    for place, cut, odd in edits:
        i = int(place * len(content))
        content = content[:i] + odd + content[i + cut :]
    path = tmp_path / f"test{suffix}"
    path.write_bytes(content)
    loads_or_names(name, path)


@quick
@given(st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["question", "answer", "prompt", "level", "x"]), inner, max_size=4),
    max_leaves=12,
))  # fmt: skip
def test_any_json_loads_or_is_named(tmp_path, value):
    for suffix in (".json", ".jsonl"):
        path = tmp_path / f"test{suffix}"
        path.write_text(json.dumps(value))
        for name in ("file", "gsm8k"):
            loads_or_names(name, path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "[" * 200_000, "a.jsonl line 1: nested too deeply"),
        ("a.json", '{"a":' * 200_000, "a.json: nested too deeply"),
        ("a.jsonl", '{"prompt": "p", "answer": 1e99999999999999999999}', "line 1: not valid JSON .* out of range"),
        ("a.jsonl", '{"prompt": "p\\ud800", "answer": 1}', "line 1: column 'prompt' holds half of a surrogate pair"),
        ("a.jsonl", '{"prompt": "p", "answer": 1, "answer": 2}', "line 1: column 'answer' comes twice"),
        ("a.csv", "prompt,answer,answer\np,1,2\n", "a.csv line 1: column 'answer' comes twice"),
        ("a.xml", '<?xml version="1.0" encoding="bogus"?><Root/>', "a.xml: not valid XML .*bogus"),
        ("a.xml", '<?xml version="1.0" encoding="utf-32"?><Root/>', "a.xml: not valid XML .*multi-byte"),
        ("a.xml", "<r><Problem><Answer>1</Answer><Answer>2</Answer></Problem></r>", "problem 1: column 'answer' comes"),
    ],
)  # fmt: skip
def test_what_raised_something_else_or_nothing(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_problems("file", "test", tmp_path / name)


def test_odd_columns_of_parquet(tmp_path):
    path = tmp_path / "test.parquet"
    seconds = pyarrow.array([10**18], pyarrow.duration("s"))
    for columns, message in [
        ({"prompt": [b"\xff"], "answer": [1]}, "record 1: column 'prompt' is a bytes, not text"),
        ({"prompt": ["p"], "answer": [{"a": 1}]}, "record 1: column 'answer' is a dict"),
        ({"prompt": ["p"], "answer": [float("nan")]}, "record 1: column 'answer' is nan"),
        ({"prompt": ["p"], "answer": seconds}, "test.parquet: not valid parquet"),
    ]:
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        with pytest.raises(ValueError, match=message):
            load_problems("file", "test", path)
    arrays = [pyarrow.array(["p"]), pyarrow.array([1]), pyarrow.array([2])]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, names=["prompt", "answer", "answer"]), path)
    with pytest.raises(ValueError, match=r"test.parquet: column 'answer' comes twice"):
        load_problems("file", "test", path)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["p"], "answer": [Decimal("0.30")]}), path)
    assert load_problems("file", "test", path)[0].answer == Fraction(3, 10)


def test_all_of_a_text_with_tags_inside_is_read(tmp_path):
    (tmp_path / "a.xml").write_text(ASDIV.replace("B &lt; 3.", "B <i>is</i> 3."))
    assert load_problems("asdiv", "test", tmp_path / "a.xml")[0].prompt == "B is 3. Q?"


# --- configurations ---------------------------------------------------------------------------------------------------


def refusal(capsys, *args: str, config_class: type = TrainConfig) -> str | None:
    """The one line with which these arguments are refused, None where they are taken."""
    capsys.readouterr()
    try:
        code = None
        parse(config_class, "pspo.train", list(args))
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert (out, err) == ("", "") if code is None else (code, out, err.count("\n"), err[-1]) == (2, "", 1, "\n"), err
    assert code is None or err.startswith("pspo.train: error: ")
    return None if code is None else err


WRONG = (
    "null", "true", "-1", "0", "1.5", "1e400", ".nan", "-.inf", "9" * 400, "[]", "{}", "[1]", "{a: 1}", "'", '"', "[",
    "{", "!!python/object/apply:os.system [exit]", "!!timestamp x", "!!binary aGVsbG8=", "2020-13-45", "*a", "&a [*a]",
    "~", "\t", "no", "\u2028", "PSPO", "os.system", "{class_path: Clip, init_args: {epsilon: null}}", "1_000", "0x10",
    "1:60", "{class_path: PSPO, dict_kwargs: {a: 1}}", "[{class_path: MathReward, init_args: {format_bonus: null}}]",
    "<<: *a", "a\\0b", "\ud800",
)  # fmt: skip
SWITCHES = [f"{part}.{leaf}" for part, leaves in yaml.safe_load(
    (Path(__file__).parents[1] / "configs/tiny.yaml").read_text()).items() for leaf in leaves]  # fmt: skip


@quick
@given(st.lists(st.tuples(st.sampled_from(SWITCHES), st.sampled_from(WRONG)), min_size=1, max_size=3))
def test_any_switch_is_taken_or_refused_in_one_line(capsys, switches):
    refusal(capsys, *(f"--{name}={value}" for name, value in switches))


@quick
@given(st.lists(st.tuples(st.sampled_from([*SWITCHES, "run", "rollout", "x.y"]), st.sampled_from(WRONG)), max_size=3),
       st.lists(st.tuples(st.floats(0, 1), st.sampled_from(WRONG)), max_size=2))  # fmt: skip
def test_any_file_is_taken_or_refused_in_one_line(capsys, tmp_path, lines, edits):
    text = "".join(f"{name.partition('.')[0]}:\n  {name.partition('.')[2]}: {value}\n" for name, value in lines)
    for place, odd in edits:
        i = int(place * len(text))
        text = text[:i] + odd + text[i:]
    file = tmp_path / "config.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    refusal(capsys, "--config", str(file))


ALIASES = "a: &a [1, 2]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rollout: &a {x: *a}", "own.yaml is nested too deeply, holds too much or refers to itself"),  # hung
        ("a: " + "[" * 5000, "own.yaml is not a YAML file: maximum recursion"),
        ("a: " + "[" * 30 + "]" * 30, "own.yaml is nested too deeply"),
        (ALIASES, "own.yaml is nested too deeply, holds too much"),
        ("a: !!timestamp x", "own.yaml is not a YAML file"),
        ("run: {seed: 1}\ndata: {}\nrun: {max_steps: 3}", "own.yaml is not a YAML file: run comes twice"),
        ("run: {seed: 1, seed: 2}", "own.yaml is not a YAML file: seed comes twice"),
        ("algorithm: {surrogate: Surrogate}", "--algorithm.surrogate must be a subclass of Surrogate"),
        ("reward: {functions: [Reward]}", "--reward.functions must be subclasses of Reward"),
        ("run: {output_dir: 2020-13-45}", "own.yaml is not a YAML file: month"),
        ('run: {output_dir: "a\\0b"}', "--run.output_dir must be UTF-8 text without NUL"),
        ("rollout: {prompts: 1" + "0" * 30 + "}", "--rollout.prompts must be below 2^63"),
        ("optimizer: {lr: 1" + "0" * 400 + "}", "int too large to convert to float"),
        ("reward: {timeout: 1e300}", "--reward.timeout must be"),
        ("algorithm: {surrogate: {class_path: Clip, init_args: {epsilon: null}}}", "Clip refused its arguments"),
        ("algorithm: {surrogate: {class_path: PSPO, dict_kwargs: {a: 1}}}", "pspo.losses.PSPO refused its arguments"),
    ],
)  # fmt: skip
def test_files_that_hung_or_raised(capsys, tmp_path, text, named):
    (tmp_path / "own.yaml").write_text(text)
    assert named in refusal(capsys, f"--config={tmp_path / 'own.yaml'}")


def test_switches_that_raised(capsys):
    assert "cannot be read" in refusal(capsys, "--data.path=!!timestamp x")
    assert "cannot be read" in refusal(capsys, "--eval.temperatures=[" + "9" * 400 + "]", config_class=EvaluateConfig)
    assert "--data.system_prompt must be UTF-8" in refusal(capsys, "--data.system_prompt=\udcff")


# --- checkpoints that somebody changed --------------------------------------------------------------------------------

TINY = (
    "--rollout.prompts=2", "--rollout.max_completion_tokens=4", "--rollout.temperature=1", "--run.max_steps=4",
    "--run.validate_every=0", "--run.test_limit=0", "--run.save_every=1", "--data.limit=5", "--run.output_dir=out",
)  # fmt: skip


class Payload:
    """What creates a file where it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run with two checkpoints, whose summary is gone, as a kill would have it."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        pspo.train.main([*TINY])
    for name in ("summary.json", "final"):
        path = folder / "out" / name
        path.unlink() if path.is_file() else shutil.rmtree(path)
    assert len(checkpoints(folder / "out")) == 2
    return folder / "out"


@pytest.fixture
def here(saved, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, "out")
    return tmp_path


def vouch(folder: Path) -> None:
    """Make the manifest again, so that sizes and hashes are right."""
    files = {path.name: describe(path) for path in sorted(folder.iterdir()) if path.name != "manifest.json"}
    (folder / "manifest.json").write_text(json.dumps(files))


def change_state(folder: Path, **changes: object) -> None:
    file = folder / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_training(folder: Path, change) -> None:
    state = torch.load(folder / "training.pt", weights_only=True)
    change(state)
    torch.save(state, folder / "training.pt")


def pickled_model(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Payload()}, folder / "pytorch_model.bin")


def other_shapes(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor[..., :1].contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")


def thin_moments(state: dict) -> None:
    for moments in state["optimizer"]["state"].values():
        moments["exp_avg"] = moments["exp_avg"][..., :1]


TAMPERED = {
    "a payload for optimizer": lambda f: torch.save({"optimizer": Payload()}, f / "training.pt"),
    "a payload, pickled": lambda f: (f / "training.pt").write_bytes(pickle.dumps(Payload())),
    "a payload beside the rest": lambda f: change_training(f, lambda state: state.update(more=Payload())),
    "training.pt: none": lambda f: (f / "training.pt").unlink(),
    "state.json: none": lambda f: (f / "state.json").unlink(),
    "training.pt: text": lambda f: (f / "training.pt").write_text("hello"),
    "training.pt: empty": lambda f: (f / "training.pt").write_bytes(b""),
    "training.pt: a list": lambda f: torch.save([1, 2], f / "training.pt"),
    "training.pt: no scheduler": lambda f: change_training(f, lambda state: state.pop("scheduler")),
    "training.pt: a method of the scheduler": lambda f: change_training(f, lambda s: s["scheduler"].update(step=5)),
    "training.pt: other moments": lambda f: change_training(f, thin_moments),
    "training.pt: short random state": lambda f: change_training(f, lambda s: s.update(random=[[torch.zeros(3)]])),
    "model.safetensors: a pickle": lambda f: (f / "model.safetensors").write_bytes(pickle.dumps(Payload())),
    "pytorch_model.bin in its place": pickled_model,
    "model.safetensors: other shapes": other_shapes,
    "config.json: a list": lambda f: (f / "config.json").write_text("[]"),
    "state.json: a list": lambda f: (f / "state.json").write_text("[]"),
    "state.json: deep": lambda f: (f / "state.json").write_text("[" * 100_000),
    "state.json: not UTF-8": lambda f: (f / "state.json").write_bytes(b"\xff"),
    "state.json: unknown field": lambda f: change_state(f, more=1),
    "state.json: steps": lambda f: change_state(f, steps="many"),
    "state.json: steps below 0": lambda f: change_state(f, steps=-1),
    "state.json: tokens": lambda f: change_state(f, tokens=float("nan")),
    "state.json: prompts": lambda f: change_state(f, prompts=True),
    "state.json: seconds": lambda f: change_state(f, seconds=None),
    "state.json: best": lambda f: change_state(f, best={"step": "x"}),
    "state.json: validated": lambda f: change_state(f, validated=[1]),
    "state.json: random": lambda f: change_state(f, random=[{"python": [3, [1, 2], None], "numpy": []}]),
    "state.json: random of numpy": lambda f: change_state(
        f, random=[{"python": [3, list(random.getstate()[1]), None], "numpy": ["MT19937", [-1], 0, 0, 0.0]}]),
}  # fmt: skip


@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED)
def test_a_tampered_checkpoint_that_its_manifest_vouches_for_is_passed_over(here, capsys, tamper):
    newest, older = checkpoints(here / "out")
    tamper(newest)
    vouch(newest)
    assert find_checkpoint(here / "out", "auto") == newest  # sizes and hashes are right; nothing was removed
    pspo.train.main([*TINY])
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if "passed over" in line]
    assert line.startswith(f"out/checkpoints/{newest.name} is damaged: ")
    assert f"going on with out from {older.name}\n" in out
    assert not Path("executed").exists()
    assert json.loads(Path("out/summary.json").read_text())["optimizer_steps"] == 4


def test_with_all_checkpoints_tampered_the_run_is_left_alone(here, capsys):
    for folder in checkpoints(here / "out"):
        torch.save({"optimizer": Payload()}, folder / "training.pt")
        vouch(folder)
    left = sorted(here.rglob("*"))
    with pytest.raises(SystemExit) as exit_:
        pspo.train.main([*TINY])
    *damage, line = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2
    assert [text.partition(" is damaged: training.pt is not what a run saves (")[0] for text in damage] == [
        "out/checkpoints/step-000004", "out/checkpoints/step-000002"]  # fmt: skip
    assert line.endswith("no checkpoint that could be gone on from; choose another folder")
    assert sorted(here.rglob("*")) == left


def test_a_payload_would_have_been_executed(here):
    """What the tests above rely on."""
    torch.save(Payload(), "payload.pt")
    torch.load("payload.pt", weights_only=False)
    assert Path("executed").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "a: ["), ("config.yaml", "5"), ("config.yaml", "\x00"), ("config.yaml", "[" * 5000),
        ("summary.json", "{"), ("summary.json", "[]"), ("summary.json", "{}"), ("summary.json", "[" * 100_000),
    ],
)  # fmt: skip
def test_a_run_s_own_files_changed(here, capsys, name, content):
    (here / "out" / name).write_text(content)
    (here / "out/summary.json").touch()
    with pytest.raises(SystemExit) as exit_:
        pspo.train.main([*TINY])
    line = capsys.readouterr().err
    assert (exit_.value.code, line.count("\n")) == (2, 1)
    assert f"out/{name} is damaged" in line


# --- model folders ----------------------------------------------------------------------------------------------------

REMOTE = """
from pathlib import Path
Path("executed").touch()
from transformers import PretrainedConfig

class Own(PretrainedConfig):
    model_type = "own"
"""


def refused(capsys, folder: Path, *args: str) -> str:
    """The one line on stderr with which training refuses the model."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        pspo.train.main([*TINY, f"--model.name_or_path={folder}", *args])
    err = capsys.readouterr().err
    assert (exit_.value.code, err.count("\n")) == (2, 1), err
    assert not Path("out").exists()
    assert not Path("executed").exists()
    return err


@pytest.fixture
def away(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_that_needs_remote_code_is_refused_and_runs_nothing(away, capsys, model_folder):
    auto_map = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
    folder = model_folder(config={"auto_map": auto_map, "model_type": "own"})
    (folder / "own.py").write_text(REMOTE)
    line = refused(capsys, folder)
    assert "--model.trust_remote_code is off" in line
    assert str(folder) in line


def test_remote_code_that_is_not_needed_is_not_run(away, model_folder):
    folder = model_folder(config={"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}})
    (folder / "own.py").write_text(REMOTE)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate/generate.py").write_text(REMOTE)
    pspo.train.main([*TINY, f"--model.name_or_path={folder}", "--run.max_steps=2"])
    assert not (away / "executed").exists()


WEIGHTS = {
    "model.safetensors, a pickle": ("model.safetensors", pickle.dumps(Payload())),
    "a pickle": ("pytorch_model.bin", pickle.dumps(Payload())),
    "text": ("pytorch_model.bin", b"junk"),
    "nothing": ("pytorch_model.bin", b""),
}


@pytest.mark.parametrize(("name", "content"), WEIGHTS.values(), ids=WEIGHTS)
def test_a_pickle_in_place_of_weights_is_not_loaded(away, capsys, model_folder, name, content):
    folder = model_folder(without=["model.safetensors"])
    (folder / name).write_bytes(content)
    assert f"--model.name_or_path {folder}" in refused(capsys, folder)


def test_a_payload_among_weights_is_not_loaded(away, capsys, model_folder):
    folder = model_folder(without=["model.safetensors"])
    torch.save({"model.embed_tokens.weight": Payload()}, folder / "pytorch_model.bin")
    assert f"--model.name_or_path {folder}" in refused(capsys, folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"), ("config.json", "{"), ("config.json", "[" * 100_000), ("tokenizer.json", "{}"),
        ("config.json", '{"vocab_size": 1}'), ("tokenizer.json", "[]"), ("tokenizer_config.json", "[]"),
        ("generation_config.json", "[]"), ("generation_config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", '{"eos_token_id": [99999999]}'),
    ],
)  # fmt: skip
def test_a_folder_with_files_of_another_kind(away, capsys, model_folder, name, content):
    folder = model_folder()
    (folder / name).write_text(content)
    assert "--model.name_or_path" in refused(capsys, folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 0},
        {"num_attention_heads": 0},
        {"num_hidden_layers": "3"},
        {"hidden_act": "x"},
        {"vocab_size": -1},
    ],
)
def test_a_configuration_that_no_model_can_have(away, capsys, model_folder, changes):
    assert "--model.name_or_path" in refused(capsys, model_folder(config=changes))


TEMPLATES = {
    "raises": ("{{ raise_exception('no') }}", "failed (no)"),
    "syntax": ("{% for %}", "failed ("),
    "undefined": ("{{ a.b.c }}", "failed ('a' is undefined)"),
    "division": ("{{ 1 / 0 }}", "failed (division by zero)"),
    "other objects": ("{{ ''.__class__.__mro__ }}", "is unsafe"),
    "another file": ("{% include 'x' %}", "failed ("),
    "range": ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth"),
    "nothing": ("{% if false %}x{% endif %}", "makes a prompt of nothing"),
}


@pytest.mark.parametrize(("template", "said"), TEMPLATES.values(), ids=TEMPLATES)
def test_chat_templates_that_fail(away, capsys, model_folder, template, said):
    folder = model_folder()
    (folder / "chat_template.jinja").write_text(template)
    line = refused(capsys, folder)
    assert f"the chat template of {folder} " in line
    assert said in line


@pytest.mark.parametrize("template", [5, {"a": "b"}, [{"name": "a", "template": "x"}]], ids=["int", "dict", "list"])
def test_chat_templates_that_are_no_text(away, capsys, model_folder, template):
    folder = model_folder(tokenizer_config={"chat_template": template}, without=["chat_template.jinja"])
    assert "--model.name_or_path" in refused(capsys, folder)
