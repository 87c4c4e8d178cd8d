"""Tiny models and model folders, made in code; torch is imported late, for the controller of the workers needs none."""

import json
import os
import shutil

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: on models this small two threads wait for each other
os.fsync = lambda descriptor: None  # a third of a small run's time; what killed processes wrote is safe without it


@pytest.fixture(scope="session")
def tiny_model():
    """Makes a random model in evaluation mode: tiny_model("Qwen2", dtype=torch.float64, vocab_size=100)."""
    import torch
    import transformers
    from architectures import tiny

    def make(name="Qwen2", *, dtype=torch.float32, vocab_size=64, **settings):
        architecture = getattr(transformers, f"{name}Config").model_type
        if name == "Qwen2":
            settings = {"tie_word_embeddings": True} | settings
        settings |= {"vocab_size": vocab_size, "pad_token_id": None}
        return tiny(architecture, **settings).to(dtype)

    return make


@pytest.fixture(scope="session")
def policy(tiny_model):
    """One layer in float64, for the comparisons with the naive trainer."""
    import torch

    return tiny_model(dtype=torch.float64, num_hidden_layers=1)


@pytest.fixture
def model_folder(tmp_path):
    """Makes a copy of tiny-base with entries of its JSON files overwritten, or dropped where the value is None.

    model_folder(generation_config={"top_k": 3}, without=["tokenizer.json"]); with a model of one's own given,
    its weights and config replace tiny-base's.
    """
    from pspo.model import ASSETS

    def make(model=None, *, without=(), **changes):
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(ASSETS / "tiny-base", folder)
        if model is not None:
            model.save_pretrained(folder)
        for name, entries in changes.items():
            file = folder / f"{name}.json"
            merged = json.loads(file.read_text()) | entries
            file.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))
        for name in without:
            (folder / name).unlink()
        return folder

    return make


@pytest.fixture
def load():
    """Loads a folder's policy on the CPU: load(folder, gradient_checkpointing=True)."""
    import torch

    from pspo.config import ModelConfig
    from pspo.model import load_policy

    def make(folder, **settings):
        return load_policy(ModelConfig(name_or_path=str(folder), **settings), torch.device("cpu"))

    return make


@pytest.fixture
def tokenizer():
    """tiny-base's own, a fresh one that a test may change."""
    from pspo.config import ModelConfig
    from pspo.model import load_tokenizer

    return load_tokenizer(ModelConfig())


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The test's own empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
