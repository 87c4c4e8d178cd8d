"""examples/: grpo.py is the command, the same weights to the last bit on one thread of a CPU; the notebook runs."""

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


@pytest.mark.nightly
def test_letters(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(FILE.with_name("letters.ipynb"), as_version=4)
    learned = "assert summary['after']['ci95'][0] > summary['before']['ci95'][1], summary; len(rewards)"
    notebook.cells.append(nbformat.v4.new_code_cell(learned))
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    (train,) = (outputs[source] for source in outputs if "pspo.train(" in source)
    pictures = [output.data for output in train if output.output_type == "display_data"]
    assert outputs[learned][0].data["text/plain"] == "30"
    assert any("image/png" in data for data in pictures)  # the live curve, in one place
    assert len(pictures) == 1
