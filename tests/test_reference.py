"""The reference model: any model of the vocabulary, the policy of some rollouts ago, and a teacher without rewards."""

import re
from pathlib import Path

import pandas as pd
import pytest
import reference as oracle
import torch
from processes import TINY, run_command
from transformers import AutoTokenizer

import pspo
from pspo.config import ModelConfig
from pspo.files import read_json, read_jsonl
from pspo.model import ASSETS, load_policy
from pspo.train import main

pytestmark = pytest.mark.usefixtures("here")
CALLS = []
LENGTH = "--reward.functions=[test_reference.length]"


def likely_by_the_reference(rewards, group_size, reference, reference_logprobs):
    CALLS.append((type(reference).__name__, reference_logprobs))
    return reference_logprobs * (torch.arange(len(rewards)) >= group_size)[:, None]  # the first group has no signal


@pytest.mark.parametrize("switches", [{"mask_truncated": True}, {"minibatches": 2}], ids=str)
def test_the_reference_and_its_logprobs_reach_advantages(switches):
    """A named model without a KL penalty, here of a policy with adapters; of cut rows, too, and of one group alone."""
    rollouts = []
    pspo.train(
        {"name_or_path": "tiny-base", "lora": {"rank": 2}},
        algorithm={"reference": "tiny-math", "advantages": likely_by_the_reference} | switches,
        rollout={"prompts": 2, "max_completion_tokens": 8, "temperature": 0.7, "resample": 1},
        run={"max_steps": 2, "validate_every": 0, "test_limit": 0, "record_tokens": 2, "output_dir": "out"},
        on_rollout=lambda experience, steps: rollouts.append(experience.rollout),
    )
    kind, logprobs = CALLS[-1]
    assert kind == "Qwen2ForCausalLM"
    expected = oracle.batch_logprobs(load_policy(ModelConfig("tiny-math")), rollouts[0].token_ids, 0.7)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-5)
    tokens = pd.read_parquet(min(Path("out/tokens.parquet").iterdir()))
    assert tokens["reference_logprob"].notna().all()  # terms have them, too


def length(completions):
    return [float(len(text)) for text in completions]


def kl_by_rollout(*args: str) -> list[float]:
    assert run_command(main, *TINY, "--algorithm.epochs=1", "--run.output_dir=out", *args) == 0
    return [line["kl_reference"] for line in read_jsonl(Path("out/metrics.jsonl")) if "kl_reference" in line]


@pytest.mark.parametrize(("every", "adapters"), [(2, ()), (1, ("--model.lora.rank=2",))], ids=str)
def test_the_policy_becomes_the_reference(every, adapters):
    values = kl_by_rollout("--algorithm.beta=0.1", f"--algorithm.reference_every={every}", *adapters, LENGTH)
    assert [value == 0 for value in values] == [i % every == 0 for i in range(6)]
    Path("out").rename("parent")
    fork = ("--run.fork_from=parent", "--algorithm.beta=0.2", "--run.max_steps=7")
    assert kl_by_rollout(f"--algorithm.reference_every={every}", *adapters, LENGTH, *fork) == [0]


def test_distillation_without_a_reward(capfd):
    """The teacher's KL falls; the estimator whose gradient is another divergence's is warned of."""
    args = ("--algorithm.reference=tiny-math", "--algorithm.beta=1", "--reward.functions=[]", "--rollout.prompts=8")
    validated = ("--run.validate_every=6", "--run.validation_limit=2")
    values = kl_by_rollout(*args, "--algorithm.kl_estimator=k2", "--run.max_steps=12", *validated)
    assert sum(values[-3:]) < 0.8 * sum(values[:3])
    assert "kl_estimator" not in capfd.readouterr().err
    assert read_json(Path("out/summary.json"))["best_step"] == 12  # of models without a reward the newest
    kl_by_rollout(*args, "--run.output_dir=other", "--run.max_steps=1")
    assert re.search("WARNING: --algorithm.kl_estimator k3 .*k2 and unbiased_k3", capfd.readouterr().err)


def test_another_vocabulary_is_refused(tmp_path, model_folder, capfd):
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny-base")
    tokenizer.add_tokens(["<other>"])
    tokenizer.chat_template = None  # which is no fault: a reference needs none
    tokenizer.save_pretrained(folder)
    for name, message in ((folder, "has another vocabulary"), ("./no-such", "--algorithm.reference ./no-such: ")):
        assert run_command(main, *TINY, f"--algorithm.reference={name}", "--run.output_dir=out") == 2
        assert message in capfd.readouterr().err
