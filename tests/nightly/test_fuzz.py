"""Fuzzing of configurations: a file is taken, or refused in one line."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pspo.cli.parse import parse
from pspo.config import TrainConfig

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("here")]
DEFAULTS = Path(__file__).parents[2] / "configs" / "tiny.yaml"
fixtures = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

WRONG = (
    "null", "true", "-1", "0", "1.5", "1e400", ".nan", "-.inf", "[]", "{}", "[1]", "{a: 1}", "'", '"', "[", "{",
    "!!python/object/apply:os.system [exit]", "2020-13-45", "*a", "~", "\t", "no", "\u2028", "PSPO", "os.system",
    "{class_path: Clip, init_args: {epsilon: null}}", "1_000", "0x10", "1:60", "Say: 'yes'", "a # b",
    "{class_path: PSPO, dict_kwargs: {a: 1}}", "[{class_path: MathReward, init_args: {format_bonus: null}}]",
)  # fmt: skip
SWITCHES = [f"{part}.{leaf}" for part, leaves in yaml.safe_load(DEFAULTS.read_text()).items() for leaf in leaves]


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
    capsys.readouterr()
    try:
        code, _ = None, parse(TrainConfig, "pspo.train", ["--config", str(file)])
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    assert out == ""
    assert (code, err) == (None, "") or (code, err.count("\n"), err[:19]) == (2, 1, "pspo.train: error: "), err
