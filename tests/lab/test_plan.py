"""The planner against transformers, autograd, torch's counters and sums by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.common import operations
from benchmarks.shapes import QWEN, Shape
from benchmarks.workloads import shape_config
from pspo.config import LoraConfig, ModelConfig, RolloutConfig
from pspo.model import token_logprobs
from pspo.model.logprobs import hidden_states
from pspo_lab.plan_command import Assumptions, PlanConfig, activations, count_elements, fullest_microbatch, main, memory

TOTALS = {"0.5B": 494_032_768, "7B": 7_615_616_512}  # of the published weights: the safetensors index's bytes / 2


def config_of(plan: dict | None = None, **sections) -> PlanConfig:
    return PlanConfig(plan=Assumptions(**(plan or {})), **sections)


@pytest.mark.parametrize("size", TOTALS)
def test_elements_are_those_of_published_models(size):
    shape = QWEN[size]
    n = count_elements(ModelConfig(), shape_config(shape))
    assert (n.parameters, n.trained) == (TOTALS[size], TOTALS[size])
    assert (n.matrices, n.layer, n.head) == (shape.matrices, shape.layer, shape.head)
    assert n.embeddings == (1 if shape.tied else 2) * shape.head


def test_adapters_are_those_of_peft():
    pytest.importorskip("peft")
    lora = LoraConfig(4, target_modules=["q_proj", "down_proj"])
    n = count_elements(ModelConfig(lora=lora), shape_config(QWEN["0.5B"]))
    assert (n.parameters, n.trained) == (TOTALS["0.5B"], 24 * 4 * (2 * 896 + 896 + 4864))


def microbatch(groups: int, common: int = 10, prompt: int = 30, length: int = 12, group_size: int = 4):
    """Prompts that begin alike, each for a group of rows without padding; and the plan's count of it."""
    ids = torch.randint(0, 64, (groups, prompt))
    ids[:, :common] = ids[0, :common].clone()
    ids[:, common] = torch.arange(groups)
    ids = ids.repeat_interleave(group_size, dim=0)
    completions = torch.randint(0, 64, (len(ids), length))
    inputs = (ids, torch.ones_like(ids).bool(), completions, torch.ones_like(completions).bool())
    rollout = RolloutConfig(groups, group_size, max_completion_tokens=length)
    config = config_of({"prompt_tokens": prompt}, rollout=rollout)
    return inputs, fullest_microbatch(config, 1, 4096, is_sharded=False)


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_operations_are_those_that_torch_counts(tiny_model, groups):
    model = tiny_model(attn_implementation="eager")  # sdpa on a CPU is not counted
    inputs, batch = microbatch(groups)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        token_logprobs(model, *inputs)
    shape = Shape(32, 48, 2, 4, 2, 64, True, 8)  # conftest's
    assert counter.get_total_flops() == operations(shape, batch.tokens, batch.pairs, inputs[2].numel())


@pytest.mark.parametrize("groups", [1, 3])
def test_activations_are_those_that_autograd_keeps(tiny_model, groups, monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "0")  # a GPU copies keys and values for every query head
    model = tiny_model(hidden_size=64, intermediate_size=176, num_hidden_layers=3)
    weights, sizes = {p.data_ptr() for p in model.parameters()}, {p.numel() for p in model.parameters()}
    kept = {}  # by storage; neither weights nor their bf16 copies

    def pack(tensor):
        if tensor.data_ptr() not in weights and not (tensor.dim() == 2 and tensor.numel() in sizes):
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address comes twice
        return tensor

    inputs, batch = microbatch(groups)
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden_states(model, *inputs, shared=True)
    planned = activations(model.config, batch, checkpointing=False)
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) == pytest.approx(planned, rel=0.03)


def test_memory_by_hand():
    """Qwen2.5-0.5B, 8 rows on each of 16 GPUs."""
    n, tokens, layers = TOTALS["0.5B"], 115 + 128, 24 * (896 * 896 * 2 + 896 * 128 * 2 + 3 * 896 * 4864)
    model_config = shape_config(QWEN["0.5B"])
    elements = count_elements(ModelConfig(), model_config)
    parts = memory(config_of(), model_config, elements, 16, "ddp")
    assert parts["rollout"] == {
        "weights": 4 * n, "optimizer": 8 * n, "bf16 weights": 2 * (layers + 151936 * 896),
        "cache": 8 * tokens * 24 * 2 * 2 * 64 * 2, "sampler": 36 * 8 * 151936,
    }  # fmt: skip
    assert parts["training"]["gradients"] == 4 * n
    logits = 0.9 * 80e9 / 64  # bytes, and as many of their gradient
    assert parts["training"]["head"] == pytest.approx(6 * 151936 * 896 + 2 * logits)
    # Two groups in one microbatch: 115 tokens for each prompt, 127 for each of 8 rows.
    computed, keys, pairs = 2 * 115 + 8 * 127, 2 * 115 + 8 * 242, 2 * 115 * 115 + 8 * 127 * 242
    layer = computed * (26 * 896 + 4 * 896 + 8 * 4864 + 4 * 14 + 8) + keys * 4 * 896 + 2 * pairs
    assert parts["training"]["activations"] == pytest.approx(24 * layer + computed * (8 * 896 + 4), rel=1e-12)
    sharded = memory(config_of(), model_config, elements, 16, "fsdp2")
    assert sharded["rollout"]["weights"] + sharded["rollout"]["optimizer"] == pytest.approx(12 * n / 16)
    assert sharded["training"]["gradients"] == pytest.approx(4 * n / 16 + 6 * (2 * layers / 24 + 151936 * 896))


@pytest.mark.parametrize(("is_sharded", "groups"), [(False, 4096 / (115 + 64 * 128)), (True, 4096 / (64 * 243))])
def test_a_microbatch_holds_at_most_the_limit(is_sharded, groups):
    config = config_of(rollout=RolloutConfig(32, 64))
    batch = fullest_microbatch(config, 1, 4096, is_sharded)
    assert batch.tokens == pytest.approx(groups * ((64 if is_sharded else 1) * 115 + 64 * 127), rel=1e-12)


@pytest.mark.parametrize(("gpus", "gigabytes", "strategy"), [(1, 64, "does"), (2, 141, "ddp"), (2, 64, "fsdp2")])
def test_ddp_is_planned_where_it_fits(gpus, gigabytes, strategy, capsys, tmp_path):
    """Qwen2.5-3B: weights, gradients and AdamW states take 49 GB."""
    shape_config(QWEN["3B"]).save_pretrained(tmp_path)
    main([f"--model.name_or_path={tmp_path}", f"--plan.gpus=[{gpus}]", f"--plan.memory={gigabytes}"])
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == [str(gpus)])
    assert row[:2] == [str(gpus), strategy]
