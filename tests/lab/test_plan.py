"""The planner against transformers, autograd, torch's counters, the trainer's microbatches and sums by hand."""

import pytest
import torch
from batches import packing
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.common import operations
from pspo.config import AlgorithmConfig, LoraConfig, ModelConfig, RolloutConfig
from pspo.model import token_logprobs
from pspo.model.logprobs import hidden_states
from pspo.rollout import Rollout
from pspo.update.batching import split_minibatches
from pspo_lab.plan_command import Assumptions, PlanConfig, fullest_microbatch, main, memory, shapes
from pspo_lab.shapes import QWEN, Shape

TOTALS = {  # parameters of the published weights: the safetensors index's bytes / 2
    "0.5B": 494_032_768, "1.5B": 1_543_714_304, "3B": 3_085_938_688, "7B": 7_615_616_512, "14B": 14_770_033_664,
    "32B": 32_763_876_352, "72B": 72_706_203_648,
}  # fmt: skip
TINY = Shape(32, 48, 2, 4, 2, 64, True, 8)  # conftest's


def config_of(plan: dict | None = None, **sections) -> PlanConfig:
    return PlanConfig(plan=Assumptions(**(plan or {})), **sections)


@pytest.mark.parametrize("size", QWEN)
def test_parameters_are_those_published(size):
    assert QWEN[size].parameters == TOTALS[size]


@pytest.mark.parametrize("name", ["Qwen2", "Llama"])
def test_shapes_are_read_from_folders(name, model_folder, tiny_model):
    model = tiny_model(name, tie_word_embeddings=name == "Qwen2")
    (shape,) = shapes(ModelConfig(str(model_folder(model)))).values()
    assert shape.parameters == model.num_parameters()
    assert shape.matrices == sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    if name == "Qwen2":
        assert shape == TINY
    assert list(shapes(ModelConfig("Qwen/Qwen2.5-Math-7B")).values()) == [QWEN["7B"]]


def test_adapters_are_those_of_peft(tiny_model):
    peft = pytest.importorskip("peft")
    for targets in ("all-linear", ["q_proj", "down_proj"]):
        model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, target_modules=targets))
        assert TINY.adapters(4, targets) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_adapters_that_a_plan_cannot_count_are_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen2.5-7B"}')
    with pytest.raises(ValueError, match="all-linear or a list of names for a plan"):
        config_of(model=ModelConfig(lora=LoraConfig(16, target_modules=r".*\.(q|v)_proj")))
    with pytest.raises(ValueError, match="a model without adapters for a plan"):
        shapes(ModelConfig(str(tmp_path)))


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
    return inputs, fullest_microbatch(config, 1, is_sharded=False)


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_operations_are_those_that_torch_counts(tiny_model, groups):
    model = tiny_model(attn_implementation="eager")  # sdpa on a CPU is not counted
    inputs, batch = microbatch(groups)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        token_logprobs(model, *inputs)
    assert counter.get_total_flops() == operations(TINY, batch.tokens, batch.pairs, inputs[2].numel())


@pytest.mark.parametrize("groups", [1, 3])
def test_activations_are_those_that_autograd_keeps(tiny_model, groups):
    model = tiny_model(hidden_size=64, intermediate_size=176, num_hidden_layers=3)
    weights, sizes = {p.data_ptr() for p in model.parameters()}, {p.numel() for p in model.parameters()}
    kept = {}  # by storage; neither weights nor their bf16 copies

    def pack(tensor):
        if tensor.data_ptr() not in weights and not (tensor.dim() == 2 and tensor.numel() in sizes):
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address comes twice
        return tensor

    inputs, batch = microbatch(groups)
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden_states(model, *inputs)
    planned = Shape(64, 176, 3, 4, 2, 64, True, 16).activations(batch.tokens, batch.keys, batch.pairs, False)
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) == pytest.approx(planned, rel=0.03)


def test_memory_by_hand():
    """Qwen2.5-0.5B, 8 rows on each of 16 GPUs."""
    n, tokens, layers = TOTALS["0.5B"], 115 + 128, 24 * (896 * 896 * 2 + 896 * 128 * 2 + 3 * 896 * 4864)
    parts = memory(QWEN["0.5B"], config_of(), 16, "ddp")
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
    sharded = memory(QWEN["0.5B"], config_of(), 16, "fsdp2")
    assert sharded["rollout"]["weights"] + sharded["rollout"]["optimizer"] == pytest.approx(12 * n / 16)
    assert sharded["training"]["gradients"] == pytest.approx(4 * n / 16 + 6 * (2 * layers / 24 + 151936 * 896))


@pytest.mark.parametrize(("prompts", "group_size", "minibatches", "prompt", "length"), [
    (7, 4, 1, 115, 128), (32, 8, 4, 115, 512), (32, 64, 1, 115, 128), (8, 16, 1, 512, 900),
])  # fmt: skip
def test_microbatches_are_the_trainer_s(prompts, group_size, minibatches, prompt, length):
    config = config_of(
        {"prompt_tokens": prompt}, rollout=RolloutConfig(prompts, group_size, max_completion_tokens=length),
        algorithm=AlgorithmConfig(minibatches=minibatches),
    )  # fmt: skip
    rows = prompts * group_size
    parts = [part for n in (prompt, length) for part in (torch.ones(rows, n).long(), torch.ones(rows, n).bool())]
    rollout = Rollout(*parts, terminated=parts[1][:, 0], texts=[""] * rows)
    batches = split_minibatches(packing(4096), rollout, torch.ones(rows), config)[0].batches
    assert fullest_microbatch(config, 1, is_sharded=False).rows == max(len(batch.rollout) for batch in batches)


@pytest.mark.parametrize(("gpus", "gigabytes", "strategy"), [(1, 80, "does"), (2, 141, "ddp"), (2, 80, "fsdp2")])
def test_ddp_is_planned_where_it_fits(gpus, gigabytes, strategy, capsys):
    """Qwen2.5-3B trains in 82 GB."""
    main(["--model.name_or_path=Qwen/Qwen2.5-3B", f"--plan.gpus=[{gpus}]", f"--plan.memory={gigabytes}"])
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("Qwen"))
    assert row[:3] == ["Qwen2.5-3B", str(gpus), strategy]
