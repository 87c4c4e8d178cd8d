"""The plan's arithmetic against transformers, autograd and FlopCounterMode, and against sums done by another route."""

import re
from dataclasses import replace

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.plan.__main__ import (
    Assumptions,
    Load,
    PlanConfig,
    Strategy,
    apart,
    choose,
    fits,
    lost,
    main,
    memory,
    messages,
    seconds,
    shapes,
    total,
)
from benchmarks.plan.shapes import GPUS, QWEN, Shape
from pspo.config import AlgorithmConfig, ModelConfig, OptimizerConfig, RolloutConfig
from pspo.losses import NoClip
from pspo.model import _hidden_states, backward_in_one_pass
from pspo.rollout import Rollout
from pspo.run.cli import parse
from pspo.update import split_minibatches

TOTALS = {  # of the published weights: the safetensors index's bytes / 2
    "0.5B": 494_032_768,
    "1.5B": 1_543_714_304,
    "3B": 3_085_938_688,
    "7B": 7_615_616_512,
    "14B": 14_770_033_664,
    "32B": 32_763_876_352,
    "72B": 72_706_203_648,
}
TINY = Shape(32, 48, 2, 4, 2, 64, True, 8)  # conftest's


def config_of(plan: dict | None = None, **sections) -> PlanConfig:
    return PlanConfig(plan=Assumptions(**(plan or {})), **sections)


@pytest.mark.parametrize("size", QWEN)
def test_parameters_are_those_published_and_those_of_transformers(size):
    s = QWEN[size]
    settings = {
        "hidden_size": s.hidden,
        "intermediate_size": s.intermediate,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "vocab_size": s.vocab,
        "tie_word_embeddings": s.tied,
    }
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**settings))
    assert s.parameters == model.num_parameters() == TOTALS[size]
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert s.matrices == sum(m.weight.numel() for m in linear)
    assert s.hidden == s.heads * s.head_dim


def test_the_shape_of_a_folder_and_of_a_llama(model_folder, tiny_model):
    (shape,) = shapes(ModelConfig(str(model_folder(tiny_model())))).values()
    assert shape == TINY
    assert shape.parameters == tiny_model().num_parameters()
    llama = tiny_model("Llama", tie_word_embeddings=False)
    (shape,) = shapes(ModelConfig(str(model_folder(llama)))).values()
    assert shape.parameters == llama.num_parameters()
    for name in ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-Math-7B", "models/Qwen2.5-Coder-7B", "Qwen/Qwen2-7B"):
        assert list(shapes(ModelConfig(name)).values()) == [QWEN["7B"]]


def test_cache_bytes_are_those_of_a_real_cache(tiny_model):
    model, rows, tokens = tiny_model(dtype=torch.bfloat16), 3, 7
    cache = transformers.DynamicCache(config=model.config)
    model(torch.zeros(rows, tokens, dtype=torch.long), past_key_values=cache, use_cache=True)
    held = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    assert held == rows * tokens * TINY.kv_bytes


def microbatch(groups: int, common: int = 20, prompt: int = 30, length: int = 12, group_size: int = 4):
    """Prompts that begin alike, each for a group of rows, nothing padded; and the plan's configuration of it."""
    ids = torch.randint(0, 64, (groups, prompt))
    ids[:, :common] = ids[0, :common].clone()
    ids[:, common] = torch.arange(groups)
    ids = ids.repeat_interleave(group_size, dim=0)
    completions = torch.randint(0, 64, (len(ids), length))
    inputs = (ids, torch.ones_like(ids).bool(), completions, torch.ones_like(completions).bool())
    config = config_of(
        {"prompt_tokens": prompt, "shared_tokens": common},
        rollout=RolloutConfig(groups, group_size, max_completion_tokens=length),
    )
    return inputs, Load.of(config, Strategy("none", 1))


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_flops_are_those_that_torch_counts(tiny_model, groups):
    model = tiny_model(attn_implementation="eager")  # sdpa on a CPU is not counted
    inputs, load = microbatch(groups)
    with FlopCounterMode(display=False) as counter:
        backward_in_one_pass(model, *inputs, temperature=1.0, loss=lambda logprobs, part: logprobs.sum())
    unused = 0  # what the last layer makes of the common beginning goes nowhere but into its keys and values
    if groups > 1:
        unused = 20 * 2 * (2 * 32 * 32 + 3 * 32 * 48) + 4 * 32 * 20**2
    assert counter.get_total_flops() == 3 * TINY.flops(load.tokens, load.pairs, load.predicted) - 2 * unused


def saved_bytes(model, function) -> int:
    """Of the tensors that autograd keeps, each storage once, weights and their bf16 copies left out."""
    known = {parameter.data_ptr() for parameter in model.parameters()}
    copies = {p.numel() for p in model.parameters() if p.dim() == 2} | {p.numel() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in known and not (tensor.numel() in copies and tensor.dim() == 2):
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("groups", [1, 3])
def test_activations_are_those_that_autograd_keeps(tiny_model, groups):
    model = tiny_model(hidden_size=64, intermediate_size=176, num_hidden_layers=3)
    shape = Shape(64, 176, 3, 4, 2, 64, True, 16)
    inputs, load = microbatch(groups)
    with torch.autocast("cpu", torch.bfloat16):
        kept = saved_bytes(model, lambda: _hidden_states(model, *inputs))
    assert kept == pytest.approx(shape.activations(load.tokens, load.keys, load.pairs), rel=0.03)


def test_memory_of_one_configuration_by_hand():
    """Qwen2.5-0.5B, 8 rows on each of 16 GPUs; the model's numbers written out."""
    n, tokens = 494_032_768, 115 + 128
    parts = memory(QWEN["0.5B"], config_of(), Strategy("ddp", 16))
    layers = 24 * (896 * 896 * 2 + 896 * 128 * 2 + 3 * 896 * 4864)
    assert parts["rollout"] == {
        "weights": 4 * n,
        "optimizer": 8 * n,
        "bf16 weights": 2 * (layers + 151936 * 896),
        "cache": 8 * tokens * 24 * 2 * 2 * 64 * 2,
        "sampler": 36 * 8 * 151936,
    }
    assert parts["training"]["gradients"] == 4 * n
    assert parts["training"]["head"] == 6 * 151936 * 896 + 256 * 151936 * 8
    # Two groups in one microbatch: 48 tokens once, 67 for each prompt, 127 for each of 8 rows.
    computed, keys = 48 + 2 * 67 + 8 * 127, 48 + 2 * 115 + 8 * 242
    pairs = 48 * 48 + 2 * 67 * 115 + 8 * 127 * 242
    layer = computed * (26 * 896 + 4 * 896 + 8 * 4864 + 4 * 14 + 8) + keys * 4 * 896 + 2 * pairs
    assert parts["training"]["activations"] == pytest.approx(24 * layer + computed * (8 * 896 + 4), rel=1e-12)

    kept = memory(QWEN["0.5B"], config_of(), Strategy("fsdp2", 16))
    assert kept["rollout"]["weights"] + kept["rollout"]["optimizer"] == pytest.approx(12 * n / 16)
    assert kept["training"]["bf16 weights"] == 2 * n
    assert kept["training"]["gradients"] == pytest.approx(4 * n + 4 * n / 16)


def test_settings_that_cost_memory_or_save_it():
    shape, one = QWEN["0.5B"], Strategy("none", 1)
    plain = memory(shape, config_of(), one)["training"]
    sgd = memory(shape, config_of(optimizer=OptimizerConfig(name="sgd")), one)["training"]
    assert plain["optimizer"] - sgd["optimizer"] == 8 * shape.parameters
    reference = memory(shape, config_of(algorithm=AlgorithmConfig(surrogate=NoClip(), beta=0.1)), one)["training"]
    assert reference["weights"] == 2 * plain["weights"]
    less = memory(shape, config_of(model=ModelConfig("Qwen2.5", gradient_checkpointing=True)), one)["training"]
    assert less["activations"] < plain["activations"] / 8


def test_decoding_is_bound_by_reading_the_weights():
    """Any number of rows below the ridge of 148 takes the same time on an H100, and that time by hand."""
    shape = QWEN["7B"]
    read = 128 * 2 * (28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944) + 152064 * 3584) / (0.8 * 3.35e12)
    for gpus in (1, 8, 32, 512):
        parts = seconds(shape, config_of(), Strategy("ddp", gpus))["rollout"]
        assert parts["decoding"] == pytest.approx(read, rel=1e-12)
    many = seconds(shape, config_of(rollout=RolloutConfig(prompts=64)), Strategy("none", 1))["rollout"]  # 256 rows
    assert many["decoding"] == pytest.approx(read * 256 / (0.4 * 989e12) * (0.8 * 3.35e12), rel=1e-12)
    cached = 4 * sum(115 + step for step in range(128)) * 28 * 2 * 4 * 128 * 2 / (0.8 * 3.35e12)
    assert seconds(shape, config_of(), Strategy("ddp", 32))["rollout"]["cache"] == pytest.approx(cached, rel=0.01)


def test_training_and_communication_by_hand():
    shape, n, rate = QWEN["7B"], 7_615_616_512, 0.8
    parts = seconds(shape, config_of(), Strategy("ddp", 16))["training"]
    between = 2 * 4 * n * (1 / 2) / (8 * 50e9 * rate)  # half of it crosses two nodes' sixteen links, there and back
    within = 2 * 4 * n * (7 / 8) / (450e9 * rate)
    assert parts["communication"] == pytest.approx(2 * (max(between, within) + 2 * 15 * 5e-6), rel=1e-12)
    assert parts["optimizer"] == pytest.approx(2 * 28 * n / (3.35e12 * rate))
    computed, predicted = 48 + 2 * 67 + 8 * 127, 8 * 128
    body = 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    pairs = 48 * 48 + 2 * 67 * 115 + 8 * 127 * 242
    flops = 6 * body * computed + 6 * 152064 * 3584 * predicted + 12 * 28 * 3584 * pairs
    assert parts["passes"] == pytest.approx(2 * flops / (0.4 * 989e12), rel=1e-12)

    rollout, step = messages(shape, config_of(), Strategy("fsdp2", 16))
    assert rollout == (2 * n, 29)
    assert step == (6 * n, 2 * 29)
    config = config_of(optimizer=OptimizerConfig(microbatch_tokens=1000))  # a group of 4 x 128 + 115 in each
    assert messages(shape, config, Strategy("fsdp2", 16, keep=False))[1] == (2 * 8 * n, 2 * 3 * 29)
    assert messages(shape, config, Strategy("fsdp2", 16, whole=False))[0] == (128 * 2 * n, 128 * 29)


def test_microbatches_are_filled_by_tokens_and_groups_stay_whole():
    for prompts, gpus, limit, rows, n in ((32, 1, 4096, 128, 6), (32, 8, 4096, 16, 1), (32, 8, 600, 16, 6),
                                          (10, 4, 4096, 12, 1), (32, 512, 4096, 4, 1)):  # fmt: skip
        config = config_of(rollout=RolloutConfig(prompts), optimizer=OptimizerConfig(microbatch_tokens=limit))
        load = Load.of(config, Strategy("ddp", gpus))
        assert (load.rows, load.microbatches) == (rows, n)
    alone = Load.of(config_of(), Strategy("fsdp2", 8))  # which computes every row's prompt
    assert (alone.rows, alone.microbatches, alone.tokens) == (16, 1, 16 * 242)
    half = Load.of(config_of({"moving": 0.5}), Strategy("none", 1))
    assert half.rows == 128
    assert half.predicted * half.microbatches == 64 * 128


@pytest.mark.parametrize(("prompts", "group_size", "minibatches", "prompt", "length"), [
    (7, 4, 1, 115, 128), (32, 4, 1, 115, 128), (32, 8, 4, 115, 512), (32, 64, 1, 115, 128), (8, 16, 1, 512, 900),
])  # fmt: skip
@pytest.mark.parametrize("checkpointing", [False, True])
def test_microbatches_are_the_trainer_s(prompts, group_size, minibatches, prompt, length, checkpointing):
    config = config_of(
        {"prompt_tokens": prompt},
        model=ModelConfig("Qwen2.5", gradient_checkpointing=checkpointing),
        rollout=RolloutConfig(prompts, group_size, max_completion_tokens=length),
        algorithm=AlgorithmConfig(minibatches=minibatches),
    )
    rows = prompts * group_size
    sizes = [torch.ones(rows, n, dtype=torch.bool) for n in (prompt, length)]
    parts = [part for mask in sizes for part in (mask.long(), mask)]
    rollout = Rollout(*parts, terminated=sizes[1][:, 0], texts=[""] * rows)
    _, batches = split_minibatches(rollout, torch.ones(rows), config)[0]
    largest, mean = (Load.of(config, Strategy("none", 1), fullest) for fullest in (True, False))
    assert largest.predicted == max(len(batch.rollout) for batch in batches) * length
    assert mean.microbatches == pytest.approx(len(batches), rel=0.05)  # rows of two groups may need a prompt more
    assert mean.predicted * mean.microbatches == pytest.approx(rows // minibatches * length, rel=1e-12)


def test_with_a_kl_term_no_row_leaves():
    alone, kl = (Load.of(config_of({"moving": 0.25}, algorithm=AlgorithmConfig(beta=b)), Strategy("none", 1))
                 for b in (0, 0.1))  # fmt: skip
    assert (alone.predicted * alone.microbatches, kl.predicted * kl.microbatches) == (32 * 128, 128 * 128)


@pytest.mark.parametrize("size", QWEN)
def test_limits_and_monotony(size):
    shape, config = QWEN[size], config_of({"gpu": "H200"})
    assert total(seconds(shape, config, Strategy("none", 1))) == pytest.approx(
        total(seconds(shape, config, Strategy("ddp", 1))), rel=1e-12
    )
    before = {"rollout": float("inf"), "training": float("inf")}
    for gpus in (2, 4, 8, 16, 32, 64, 128, 256, 512):
        s = Strategy("fsdp2", gpus, keep=False)
        held = {phase: sum(parts.values()) for phase, parts in memory(shape, config, s).items()}
        assert all(held[phase] < before[phase] for phase in held)
        before = held
        assert sum(memory(shape, config, replace(s, keep=True))["training"].values()) > held["training"]
        assert total(seconds(shape, config, replace(s, whole=False))) > total(seconds(shape, config, s))
        assert all(value >= 0 for phase in seconds(shape, config, s).values() for value in phase.values())
        if chosen := choose(shape, config, gpus):
            assert fits(shape, config, chosen)
            # efficiency and losses are one account
            alone, many = total(seconds(shape, config, Strategy("none", 1))), total(seconds(shape, config, chosen))
            assert sum(lost(shape, config, chosen).values()) == pytest.approx(gpus * many - alone)


def test_own_workers_cannot_more_than_halve_the_time():
    shape, config = QWEN["7B"], config_of()
    together = total(seconds(shape, config, choose(shape, config, 8)))
    overlapped, workers = apart(shape, config, 8)
    assert 0 < workers < 8
    assert together / 2 < overlapped < together
    assert apart(shape, config, 1) == (float("inf"), 0)
    assert apart(QWEN["72B"], config, 512)[1] == 0  # no GPU holds the model in bf16


def test_faster_machines_take_less_time():
    h100, h200 = config_of(), config_of({"gpu": "H200"})
    assert GPUS["H100"].flops == GPUS["H200"].flops
    s = Strategy("ddp", 8)
    slow, fast = (seconds(QWEN["3B"], config, s) for config in (h100, h200))
    assert slow["rollout"]["decoding"] / fast["rollout"]["decoding"] == pytest.approx(4.8 / 3.35)
    assert slow["training"]["passes"] == fast["training"]["passes"]


def test_the_command_on_all_sizes(capsys):
    main(["--plan.gpus=[1,32]"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:16:2]] == list(QWEN)
    assert re.match(r"0\.5B +1 +none .*100%", lines[2])
    assert re.match(r"72B +32 +does not fit", lines[15])


def test_the_command_on_a_run_s_configuration(tmp_path, capsys):
    _, text = parse(PlanConfig, "pspo.plan", ["--model.name_or_path=tiny-base"])
    text = text[: text.index("plan:")]  # as a run folder has it
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    main([f"--config={tmp_path / 'config.yaml'}", "--plan.gpus=[2]", "--rollout.prompts=8"])
    out = capsys.readouterr().out
    assert out.startswith("8 prompts x 4, 115 + 128 tokens each, 2 epochs x 1 minibatches; H100: 40%")
    assert "training: activations" in out
    assert "at most 8 GPUs have work" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--plan.gpus=[0]"], "--plan.gpus must be one or more numbers above 0"),
        (["--plan.gpus=[8]", "--plan.strategy=none"], "--plan.strategy none is for --plan.gpus '[1]'"),
        (["--plan.mfu=40"], "--plan.mfu must be in (0, 1]"),
        (["--plan.gpu=A100"], "plan.gpu"),
        (["--plan.shared_tokens=115"], "--plan.shared_tokens must be at least 0 and below plan.prompt_tokens (115)"),
        (["--plan.completion_tokens=129"], "at most rollout.max_completion_tokens (128)"),
        (["--model.autocast=none"], "--model.autocast must be auto or bf16"),
        (["--model.name_or_path=./nowhere"], "--model.name_or_path: model folder nowhere does not exist"),
        (["--algorithm.minibatches=64"], "--algorithm.minibatches must not be above rollout.prompts (32)"),
    ],
)
def test_bad_input_is_one_line(args, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pspo.plan: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_another_architecture_is_refused(model_folder, tiny_model, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([f"--model.name_or_path={model_folder(tiny_model('GPT2'))}"])
    assert stopped.value.code == 2
    assert "must be a Qwen2 or a Llama for a plan, got 'gpt2'" in capsys.readouterr().err
