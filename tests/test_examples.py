"""examples/grpo.py is the command: the same weights to the last bit, on one thread of a CPU."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pspo.model import ASSETS
from pspo.train import main as train

FILE = Path(__file__).parents[1] / "examples" / "grpo.py"


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_grpo_in_one_file_is_the_command(tmp_path, one_thread):
    source = FILE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 120
    specification = importlib.util.spec_from_file_location("grpo", FILE)
    grpo = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(grpo)
    ours = grpo.train(steps=4, seed=3).state_dict()

    (switches,) = re.findall(r"python -m pspo\.train (.*?)\n\n", source, re.DOTALL)
    own = ["--run.max_steps=4", "--run.seed=3", "--run.test_limit=0", "--run.quiet", f"--run.output_dir={tmp_path}/run"]
    train([*shlex.split(switches.replace("\\\n", "")), *own])
    theirs = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all(torch.equal(ours[name], weights) for name, weights in theirs.items())
    untrained = load_file(ASSETS / "tiny-base" / "model.safetensors")
    assert not torch.equal(ours["model.norm.weight"], untrained["model.norm.weight"])
