"""What a bad command line is answered with: one line on stderr that names the switch, and exit code 2."""

import re

import pytest

from pspo.cli.parse import parse
from pspo.config import TrainConfig

FILES = {
    "typo.yaml": "rollout:\n  group_sise: 4\n",
    "twice.yaml": "run: {seed: 1}\nrun: {keep: 1}\n",
    "syntax.yaml": "a: [1, 2\n  b: }\n",
    "my_moon.py": "from pspo.tasks import Reward\n"
    "class Moon(Reward):\n"
    "    def __init__(self):\n"
    "        raise ValueError('needs a moon')\n"
    "    def __call__(self, completions):\n"
    "        return [0.0] * len(completions)\n",
}
MESSAGES = {
    "--rollout.group_sise 4": "unrecognized arguments: --rollout.group_sise=4; did you mean --rollout.group_size?",
    "--lr 1e-5": "unrecognized arguments: --lr=1e-5; did you mean --optimizer.lr?",
    "--config typo.yaml": "Group 'rollout' does not accept option 'group_sise'",
    "--config syntax.yaml": "syntax.yaml is damaged: .* line 2, column 4",
    "--config twice.yaml": "twice.yaml is damaged: run stands twice, the second time in line 2",
    "--config missing.yaml": ".*config.*File does not exist: .*missing.yaml'",
    "--rollout.prompts many": ".*rollout.prompts.* Expected a <class 'int'>. Got value: many",
    "--rollout.decoder foo": ".*rollout.decoder.* Expected a typing.Literal.'pspo', 'graphs', 'hf'.*foo",
    "--algorithm.surrogate.alpha 4": "PSPO: alpha must be in .0, 1., got 4.0",
    "--algorithm.terms OffPolicyMask": ".*algorithm.terms.* the following arguments are required: threshold",
    "--reward.functions my_moon.Moon": "needs a moon",
}


@pytest.mark.parametrize("command", MESSAGES)
def test_message(command, tmp_path, monkeypatch, capsys):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match=r"^2$"):
        parse(TrainConfig, "pspo.train", command.split())
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"pspo.train: error: {MESSAGES[command]}.*\n", err), err
