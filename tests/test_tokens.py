"""``tokens.parquet``: what it says of a token is what the step computed, and recording changes no number of a run."""

import functools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from processes import metric_lines
from transformers import AutoModelForCausalLM, PreTrainedModel

from pspo.files import read_jsonl
from pspo.losses import GSPO, Clip, token_weights
from pspo.model import ASSETS
from pspo.rollout import encode_prompts
from pspo.token_table import COLUMNS, token_texts
from pspo.train import main as train

pytestmark = pytest.mark.usefixtures("here")
SMALL = ("--run.max_steps=4", "--rollout.prompts=4", "--rollout.max_completion_tokens=32", "--run.test_limit=0",
         "--run.validate_every=0", "--data.limit=20", "--optimizer.lr=1e-3", "--run.quiet")  # fmt: skip
TEMPERATURE = 0.6


def run(name: str, *args: str) -> Path:
    train([*SMALL, f"--run.output_dir={name}", *args])
    return Path(name)


def test_recording_changes_no_number():
    every = run("every", "--run.record_tokens=4")
    none = run("none", "--run.record_tokens=0")
    assert (every / "final/model.safetensors").read_bytes() == (none / "final/model.safetensors").read_bytes()
    assert (none / "samples.jsonl").read_text() == ""
    assert metric_lines(every) == metric_lines(none)
    assert not (none / "tokens.parquet").exists()


@functools.cache
def untrained() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-base", dtype=torch.float32)


def plain_numbers(prompt_ids: list[int], ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and entropies (T,) of the untrained model, from a log_softmax of its own logits in float64."""
    with torch.no_grad():
        logits = untrained()(input_ids=torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1].double()
    logprobs = (logits / TEMPERATURE).log_softmax(dim=1)
    entropies = -(logprobs.exp() * logprobs).sum(dim=1)
    return logprobs[range(len(ids)), ids].numpy(), entropies.numpy()


@pytest.mark.parametrize(
    ("surrogate", "args", "present"),
    [
        (Clip(), (), set()),
        (Clip(), ("--algorithm.beta=0.1",), {"reference_logprob"}),
        (Clip(), ("--algorithm.correction=token_truncate",), {"sampler_logprob"}),
        (GSPO(), ("--algorithm.aggregation=grpo",), set()),  # the plain step
    ],
    ids=["one pass", "reference", "correction", "sequence level"],
)
def test_columns_are_what_the_steps_computed(tokenizer, surrogate, args, present):
    switches = "--run.record_tokens=4", "--run.max_steps=2", f"--algorithm.surrogate={type(surrogate).__name__}"
    folder = run("run", *switches, *args)
    table, samples = pd.read_parquet(folder / "tokens.parquet"), read_jsonl(folder / "samples.jsonl")
    assert list(table.columns) == list(COLUMNS)
    (line,) = read_jsonl(folder / "metrics.jsonl")
    has_signal = table.advantage != 0  # with a KL term the other rows are passed, too
    assert has_signal.all() == (not present & {"reference_logprob"})
    assert line["entropy"] == pytest.approx(table[(table.step == 2) & has_signal].entropy.mean(), rel=1e-5)
    assert not table.duplicated(["step", "problem", "sample", "position"]).any()
    for name in COLUMNS:
        missing = name in ("reference_logprob", "sampler_logprob") and name not in present
        assert table[name].isna().all() if missing else table[name].notna().all(), name

    for sample in samples:
        own = table[(table.problem == sample["problem"]) & (table["sample"] == sample["sample"])]
        trained = sample["advantage"] != 0 or "reference_logprob" in present
        assert sorted(set(own.step)) == ([1, 2] if trained else [])
        if not trained:
            continue
        (prompt,) = encode_prompts(tokenizer, [sample["prompt"]])
        first, second = (own[own.step == step] for step in (1, 2))
        assert set(own.row) == {samples.index(sample)}
        logprobs, entropies = plain_numbers(prompt, first.token_id.tolist())
        np.testing.assert_allclose(first.logprob, logprobs, atol=1e-4)
        np.testing.assert_allclose(first.entropy, entropies, atol=1e-4)
        for name in present:
            np.testing.assert_allclose(first[name], logprobs, atol=1e-4)
        assert first.logprob.tolist() == first.old_logprob.tolist() == second.old_logprob.tolist()
        assert first.logprob.tolist() != second.logprob.tolist()
        for visit in (first, second):
            assert visit.position.tolist() == list(range(sample["tokens"]))
            assert visit.advantage.unique() == pytest.approx(sample["advantage"], abs=1e-6)
            assert "".join(visit.text).removesuffix("<|im_end|>") == sample["completion"]
            inputs = (torch.tensor(visit[name].to_numpy())[None] for name in ("logprob", "old_logprob", "advantage"))
            expected = token_weights(surrogate, *inputs, torch.ones(1, len(visit), dtype=torch.bool))
            np.testing.assert_allclose(visit.weight, expected[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "text", ["7 + 2 = 9", "naïve 数学 🙂👩‍👩‍👧 done", "🙂", "\u202e\u2028 a\ud7ff", "\ufffd" * 99 + "a"]
)
def test_texts_of_tokens_are_those_of_the_completion(tokenizer, text):
    """Characters of several tokens stand at the last of these."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.decode(ids)
    cut = token_texts(tokenizer, ids[:-1])  # in the middle of a character, perhaps
    assert "".join(cut) == tokenizer.decode(ids[:-1])
