"""LoRA: PEFT's own numbers, a base that nothing moves, adapters that are saved, resumed, evaluated and merged."""

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import naive
import pytest
import torch
from naive import make_rollout
from processes import run_command
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import pspo.evaluate.__main__
import pspo.model.linear
import pspo.run.export
import pspo.update.step
from pspo.config import LoraConfig, ModelConfig
from pspo.files import checkpoints
from pspo.losses import PSPO
from pspo.model import ASSETS, StartingAdapters, load_policy, load_tokenizer, token_logprobs
from pspo.model.adapters import save_adapters
from pspo.model.device import autocast
from pspo.model.linear import fused_forward, use_fast_products
from pspo.rollout import Rollout
from pspo.train import main
from pspo.update import Learner, drawn_logprobs, update
from pspo.update.optimizers import make_optimizer

peft = pytest.importorskip("peft")
CPU = torch.device("cpu")
LORA = ModelConfig("tiny-base", lora=LoraConfig(rank=4))
SMALL = (
    "--data.chat_template={messages: []}",
    "--model.lora.rank=4", "--rollout.prompts=2", "--rollout.max_completion_tokens=8", "--rollout.temperature=1",
    "--run.max_steps=4", "--run.validate_every=2", "--run.validation_limit=4", "--run.test_limit=2",
    "--run.save_every=1", "--data.limit=9", "--optimizer.lr=1e-2", "--run.keep=9",
)  # fmt: skip


def make_policy(model: ModelConfig = LORA):
    """A policy whose adapters do something: B is not 0."""
    policy = load_policy(model, CPU)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=generator)
    return policy


def make_rows() -> tuple[Rollout, torch.Tensor]:
    """16 rows, groups of four with one prompt each, and their advantages."""
    rollout, advantages = make_rollout()
    return rollout, advantages.float()


make_config = partial(naive.make_config, PSPO(0.3), optimizer={"name": "sgd", "lr": 0.1, "max_grad_norm": 0})


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["float32", "bf16 autocast", "bf16 autocast over float32"])
@pytest.mark.parametrize("shape", [(300, 48), (3, 5, 48)])  # the first by oneDNN where the CPU has AVX-512
def test_a_layer_is_no_further_from_float64_than_peft_s(shape, mode, monkeypatch):
    """Values and gradients of the fused layer and of PEFT's own, which rounds more often."""
    monkeypatch.setattr(pspo.model.linear, "MIN_MULTIPLICATIONS", 10**5)
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 33).requires_grad_(False)
    if mode == "bf16 autocast":
        linear.bfloat16()
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["0"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(config, torch.nn.Sequential(linear))
    for parameter in model.parameters():
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    exact, theirs, ours = copy.deepcopy(model).double(), model, copy.deepcopy(model)
    use_fast_products(ours, has_adapters=True)
    assert ours[0].forward.func is fused_forward

    x, weights = torch.randn(shape).bfloat16().double(), torch.randn(*shape[:-1], 33).bfloat16().double()
    results = []
    for layer, dtype in ((exact, torch.float64), (theirs, torch.float32), (ours, torch.float32)):
        inputs = x.to(dtype, copy=True).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32 and mode != "float32"):
            outputs = layer(inputs)
        (outputs * weights.to(dtype)).sum().backward()
        results.append([outputs, inputs.grad, *(p.grad for p in layer.parameters() if p.requires_grad)])
    assert len(results[0]) == 4
    for expected, their, our in zip(*results, strict=True):
        assert (our.shape, our.dtype) == (their.shape, their.dtype)
        error, their_error = ((values.double() - expected).norm() / expected.norm() for values in (our, their))
        assert error < (1e-6 if mode == "float32" else 1.1 * their_error)


def test_swapped_adapters_are_seen_by_the_next_pass():
    """Autocast keeps bf16 copies of float32 weights for as long as its block."""
    policy = make_policy()
    reference = StartingAdapters(policy)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
        ids = torch.arange(8)[None]
        with autocast("bf16", policy.device):
            first = policy(ids).logits
            with reference as start:
                other = start(ids).logits
            again = policy(ids).logits
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 0.1


def test_adapters_are_float32_beside_a_bfloat16_base():
    policy = make_policy(replace(LORA, dtype="bfloat16"))
    for name, parameter in policy.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name
    rollout, advantages = make_rows()
    rough, exact = (token_logprobs(p, *rollout.token_ids).detach() for p in (policy, make_policy()))
    torch.testing.assert_close(rough, exact, rtol=0, atol=0.3)
    config, start = make_config(), {name: p.detach().clone() for name, p in policy.named_parameters()}
    update(Learner(policy, make_optimizer(policy, config.optimizer)), rollout, advantages, config)
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, start[name]) != ("lora_" in name), name  # no bit of the base moves


def test_the_reference_is_the_model_with_the_adapters_it_began_from(tmp_path):
    save_adapters(make_policy(), tmp_path)
    rollout, advantages = make_rows()
    for model in (LORA, ModelConfig(str(tmp_path))):
        policy = load_policy(model, CPU)
        config = make_config(epochs=1, beta=0.1)
        start = token_logprobs(load_policy(model, CPU), *rollout.token_ids, 0.7).detach()
        if model is LORA:
            base = load_policy(ModelConfig("tiny-base"), CPU)
            torch.testing.assert_close(token_logprobs(base, *rollout.token_ids, 0.7).detach(), start)
        learner = Learner(policy, make_optimizer(policy, config.optimizer), reference=StartingAdapters(policy))
        assert update(learner, rollout, advantages, config)[0]["kl_reference"] == 0
        now = token_logprobs(policy, *rollout.token_ids, 0.7).detach()
        with learner.reference_model() as model_at_start:
            reference = drawn_logprobs(learner, rollout, torch.ones(len(rollout)), model_at_start, config)
        torch.testing.assert_close(reference, start)
        assert torch.equal(token_logprobs(policy, *rollout.token_ids, 0.7).detach(), now)  # swapped back


# --- runs and folders -------------------------------------------------------------------------------------------------


def train(output: str, *args: str) -> int:
    return run_command(main, *SMALL, f"--run.output_dir={output}", *args)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "lora"
    assert train(str(folder)) == 0
    return folder


def test_folders_hold_adapters_alone_and_load_everywhere(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (run / "best", run / "final", checkpoints(run)[0]):
        weights = load_file(folder / "adapter_model.safetensors")
        assert all("lora_" in name for name in weights)
        assert not (folder / "model.safetensors").exists()
    assert json.loads((run / "final/adapter_config.json").read_text())["base_model_name_or_path"] == "tiny-base"
    template = (run / "final/chat_template.jinja").read_text()  # which has the run's arguments
    assert template != load_tokenizer(ModelConfig()).chat_template
    assert load_tokenizer(ModelConfig(str(run / "final"))).chat_template == template
    base = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, run / "final")
    ours = load_policy(ModelConfig(str(run / "final")), CPU)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)
        merged = tmp_path / "merged"
        pspo.run.export.main([f"--model.name_or_path={run / 'final'}", "--output_dir=~/merged"])
        whole = AutoModelForCausalLM.from_pretrained(merged)
        assert (merged / "chat_template.jinja").read_text() == template
        assert not any("lora" in name for name in whole.state_dict())
        torch.testing.assert_close(whole(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_adapters_are_merged_into_the_weights_beside_which_they_were_trained(tmp_path):
    torch.manual_seed(0)
    trained, (rollout, _) = make_policy(replace(LORA, dtype="bfloat16")), make_rows()
    (tmp_path / "adapters").mkdir()
    save_adapters(trained, tmp_path / "adapters")
    args = (f"--model.name_or_path={tmp_path / 'adapters'}", f"--output_dir={tmp_path / 'ours'}")
    pspo.run.export.main([*args, "--model.dtype=bfloat16"])
    base = load_policy(ModelConfig("tiny-base"), CPU)
    peft.PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload().save_pretrained(tmp_path / "float32")
    expected, merged, float32 = (
        token_logprobs(policy.float(), *rollout.token_ids).detach()
        for policy in (trained, *(load_policy(ModelConfig(str(tmp_path / name)), CPU) for name in ("ours", "float32")))
    )
    error, usual = ((logprobs - expected).abs().max() for logprobs in (merged, float32))
    assert error < min(0.05, usual)


def test_a_peft_folder_can_be_trained_further(run, tmp_path):
    args = ("--model.lora.rank=0", f"--model.name_or_path={run / 'final'}", "--run.max_steps=2")
    assert train(str(tmp_path / "more"), *args) == 0
    assert (tmp_path / "more/final/adapter_model.safetensors").exists()
