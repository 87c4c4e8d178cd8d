"""The planner against transformers, autograd, torch's counters, the trainer's microbatches and sums by hand."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import test_engines
import torch
from processes import before, one_layer, ranks, run_command
from test_distributed import make_rows
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import pspo.run.recorder
import pspo.train
from benchmarks.floor import Machine, Work, floors, measure_run
from pspo_lab.plan.__main__ import main
from pspo_lab.plan.cost import (
    Assumptions,
    Load,
    PlanConfig,
    Strategy,
    between_groups,
    candidates,
    choose,
    fits,
    memory,
    messages,
    seconds,
    shapes,
    total,
)
from pspo_lab.plan.shapes import QWEN, Shape
from pspo import distributed as dist
from pspo.config import (
    SYSTEM_PROMPT,
    AlgorithmConfig,
    DistributedConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)
from pspo_vllm.servers import chunks
from pspo.model.adapters import weights_of_files
from pspo.model import load_policy, load_tokenizer
from pspo.model.logprobs import hidden_states, token_logprobs
from pspo.cli.files import read_jsonl
from pspo.rollout import Rollout, encode_prompts
from pspo.rollout.batching import split_minibatches
from pspo.run.prepare import make_learner
from pspo.tasks import load_problems
from pspo.update import update

TOTALS = {  # parameters of the published weights: the safetensors index's bytes / 2
    "0.5B": 494_032_768, "1.5B": 1_543_714_304, "3B": 3_085_938_688, "7B": 7_615_616_512, "14B": 14_770_033_664,
    "32B": 32_763_876_352, "72B": 72_706_203_648,
}  # fmt: skip
TINY = Shape(32, 48, 2, 4, 2, 64, True, 8)  # conftest's
ONE = Strategy("none", 1)


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
    weights = dict(weights_of_files(model))
    assert shape.tensors == len(weights)
    assert shape.pushed_bytes == sum(weight.nbytes for weight in weights.values())


def test_a_push_to_servers_has_the_bytes_planned():
    (shape,) = shapes(ModelConfig("tiny-base")).values()
    sent = list(chunks(weights_of_files(load_policy(ModelConfig("tiny-base")))))
    assert sum(map(len, sent)) == shape.tensors
    assert sum(weight.nbytes for chunk in sent for weight in chunk.values()) == shape.pushed_bytes


class Clock:
    """Seconds that pass in this process alone."""

    now, push, draw = 0.0, 1.0, 0.0


class Timed(test_engines.Copy):
    """Takes its time to be pushed to, and draws while others do what they do."""

    def push(self, policy, version):
        Clock.now += Clock.push * (version != self.version)
        super().push(policy, version)

    def begin(self, *asked):
        super().begin(*asked)
        self.until = Clock.now + Clock.draw

    def complete(self, *asked):
        drawn = super().complete(*asked)
        Clock.now = max(Clock.now, self.until)
        return drawn


@pytest.mark.parametrize(("lag", "draw", "train"), [(0, 4.0, 2.0), (1, 4.0, 2.0), (1, 2.0, 4.0), (3, 4.0, 2.0)])
def test_what_a_lag_hides_is_what_a_run_records(monkeypatch, tmp_path, lag, draw, train):
    """A run whose parts take known times, by the seconds in its metrics."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pspo.run.recorder, "time", SimpleNamespace(perf_counter=lambda: Clock.now))
    monkeypatch.setattr(pspo.train, "update", pspo.train.update)  # undone at the end
    before("update", lambda *_: setattr(Clock, "now", Clock.now + train))
    monkeypatch.setattr(Clock, "draw", draw)
    switches = ("--rollout.engine=test_plan.Timed", f"--rollout.lag={lag}", "--run.max_steps=10")
    assert test_engines.train("out", *switches, "--run.validate_every=0", "--run.save_every=0") == 0
    phases = {"rollout": {"push": Clock.push, "decoding": draw}, "training": {"passes": train}}
    ahead = TrainConfig(rollout=RolloutConfig(engine="vllm", lag=lag)).draws_ahead
    for line in read_jsonl(Path("out/metrics.jsonl"))[1:-1]:  # all but the first, which has several draws, and the last
        assert line["seconds/generate"] + line["seconds/train"] == total(phases, ahead)


class Collectives(TorchDispatchMode):
    """Bytes of each collective that is larger than metrics are, by kind."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        whole = {"_allgather_base_": 0, "_reduce_scatter_base_": 1, "allreduce_": 0}.get(func.overloadpacket.__name__)
        if func.namespace == "c10d" and whole is not None:
            tensor = args[whole][0] if isinstance(args[whole], list) else args[whole]
            if tensor.nbytes > 10_000:
                self.found.setdefault(func.overloadpacket.__name__, []).append(tensor.nbytes)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shard", [None, 2])
@pytest.mark.parametrize("gather", ["microbatch", "step"])
@pytest.mark.parametrize("one_pass", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_collectives_are_those_that_four_ranks_make(shard, gather, one_pass):
    """In a step of two microbatches, in bf16; torch pads 559 rows of the vocabulary to 560."""
    config = config_of(
        {"prompt_tokens": 12, "shared_tokens": 0},
        model=ModelConfig(one_layer(), autocast="bf16"), algorithm=AlgorithmConfig(epochs=1),
        rollout=RolloutConfig(8, 4, max_completion_tokens=20),
        optimizer=OptimizerConfig(microbatch_tokens=130, one_pass=one_pass),
        distributed=DistributedConfig("fsdp2", shard, gather=gather),
    )  # fmt: skip
    (shape,) = shapes(config.model).values()
    s = Strategy("fsdp2", 4, gather_step=gather == "step", shard=shard or 0)
    planned = *messages(shape, config, s)[1], *between_groups(shape, s)

    def rank() -> None:
        dist.init("fsdp2", timeout=60)
        learner, (rollout, _) = make_learner(config, torch.device("cpu")), make_rows()
        rollout = rollout.rows(torch.tensor(dist.take_rank_share(list(range(32)), 1)))
        with Collectives() as counter:
            update(learner, rollout, torch.ones(8), config)
        within = counter.found["_allgather_base_"] + counter.found["_reduce_scatter_base_"]
        between = counter.found.get("allreduce_", [])  # which reduces and gathers
        assert (sum(within), len(within), 2 * sum(between), 2 * len(between)) == pytest.approx(planned, rel=2e-3)

    assert ranks(rank, 4) == [0] * 4


def microbatch(groups: int, common: int = 20, prompt: int = 30, length: int = 12, group_size: int = 4):
    """Prompts that begin alike, each for a group of rows without padding; and the plan's load of it."""
    ids = torch.randint(0, 64, (groups, prompt))
    ids[:, :common] = ids[0, :common].clone()
    ids[:, common] = torch.arange(groups)
    ids = ids.repeat_interleave(group_size, dim=0)
    completions = torch.randint(0, 64, (len(ids), length))
    inputs = (ids, torch.ones_like(ids).bool(), completions, torch.ones_like(completions).bool())
    rollout = RolloutConfig(groups, group_size, max_completion_tokens=length)
    return inputs, Load.of(config_of({"prompt_tokens": prompt, "shared_tokens": common}, rollout=rollout), ONE)


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_operations_are_those_that_torch_counts(tiny_model, groups):
    model = tiny_model(attn_implementation="eager")  # sdpa on a CPU is not counted
    inputs, load = microbatch(groups)
    with FlopCounterMode(display=False) as counter:
        token_logprobs(model, *inputs).sum().backward()
    expected = 3 * TINY.flops(load.tokens, load.pairs, load.predicted)
    expected += TINY.flops(0, 0, load.predicted)  # the head is recomputed
    if groups > 1:  # the last layer's output for the common beginning has no gradient
        expected -= 2 * (20 * 2 * (2 * 32 * 32 + 3 * 32 * 48) + 4 * 32 * 20**2)
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize("groups", [1, 3])
def test_activations_are_those_that_autograd_keeps(tiny_model, groups):
    model = tiny_model(hidden_size=64, intermediate_size=176, num_hidden_layers=3)
    weights, sizes = {p.data_ptr() for p in model.parameters()}, {p.numel() for p in model.parameters()}
    kept = {}  # by storage; neither weights nor their bf16 copies

    def pack(tensor):
        if tensor.data_ptr() not in weights and not (tensor.dim() == 2 and tensor.numel() in sizes):
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address comes twice
        return tensor

    inputs, load = microbatch(groups)
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden_states(model, *inputs)
    planned = Shape(64, 176, 3, 4, 2, 64, True, 16).activations(load.tokens, load.keys, load.pairs)
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) == pytest.approx(planned, rel=0.03)


def test_memory_by_hand():
    """Qwen2.5-0.5B, 8 rows on each of 16 GPUs."""
    n, tokens, layers = TOTALS["0.5B"], 115 + 128, 24 * (896 * 896 * 2 + 896 * 128 * 2 + 3 * 896 * 4864)
    parts = memory(QWEN["0.5B"], config_of(), Strategy("ddp", 16))
    assert parts["rollout"] == {
        "weights": 4 * n, "optimizer": 8 * n, "bf16 weights": 2 * (layers + 151936 * 896),
        "cache": 8 * tokens * 24 * 2 * 2 * 64 * 2, "sampler": 36 * 8 * 151936,
    }  # fmt: skip
    assert parts["training"]["gradients"] == 4 * n
    assert parts["training"]["head"] == 6 * 151936 * 896 + 256 * 151936 * 8
    # Two groups in one microbatch: 48 tokens once, 67 for each prompt, 127 for each of 8 rows.
    computed, keys, pairs = 48 + 2 * 67 + 8 * 127, 48 + 2 * 115 + 8 * 242, 48 * 48 + 2 * 67 * 115 + 8 * 127 * 242
    layer = computed * (26 * 896 + 4 * 896 + 8 * 4864 + 4 * 14 + 8) + keys * 4 * 896 + 2 * pairs
    assert parts["training"]["activations"] == pytest.approx(24 * layer + computed * (8 * 896 + 4), rel=1e-12)
    sharded = memory(QWEN["0.5B"], config_of(), Strategy("fsdp2", 16))
    assert sharded["rollout"]["weights"] + sharded["rollout"]["optimizer"] == pytest.approx(12 * n / 16)
    assert sharded["training"]["gradients"] == pytest.approx(4 * n + 4 * n / 16)


def test_time_and_communication_by_hand():
    """Qwen2.5-7B, 8 rows on each of 16 H100s."""
    n, rate, config = TOTALS["7B"], 0.8, config_of()
    parts = seconds(QWEN["7B"], config, Strategy("ddp", 16))
    body, head = 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944), 152064 * 3584
    assert parts["rollout"]["decoding"] == pytest.approx(128 * 2 * (body + head) / (rate * 3.35e12))  # weights, read
    computed, predicted, pairs = 48 + 2 * 67 + 8 * 127, 8 * 128, 48 * 48 + 2 * 67 * 115 + 8 * 127 * 242
    flops = 6 * body * computed + 6 * head * predicted + 12 * 28 * 3584 * pairs
    assert parts["training"]["passes"] == pytest.approx(2 * flops / (0.4 * 989e12), rel=1e-12)
    assert parts["training"]["optimizer"] == pytest.approx(2 * 28 * n / (3.35e12 * rate))
    within, between = 2 * 4 * n * (7 / 8) / (450e9 * rate), 2 * 4 * n * (1 / 2) / (8 * 50e9 * rate)  # of a node's links
    assert parts["training"]["communication"] == pytest.approx(2 * (max(between, within) + 2 * 15 * 5e-6), rel=1e-12)
    assert messages(QWEN["7B"], config, Strategy("fsdp2", 16)) == ((2 * n, 29), (6 * n, 2 * 29))


def test_servers_by_hand():
    """Qwen2.5-7B: the trainer on one of two H100 nodes, 4 servers of 2 GPUs on the other; 64 prompts x 4."""
    n, rate, config = TOTALS["7B"], 0.8, config_of(rollout=RolloutConfig(64, engine="vllm"))
    s = Strategy("fsdp2", 8, servers=4, tensor_parallel=2)
    assert s in candidates(config, 16)
    held, parts = memory(QWEN["7B"], config, s), seconds(QWEN["7B"], config, s)
    assert held["rollout"] == {
        "bf16 weights": n, "cache": 64 * 243 * 28 * 2 * 4 * 128 * 2 / 2, "sampler": 36 * 64 * 152064,
    }  # fmt: skip
    assert held["training"] == memory(QWEN["7B"], config, Strategy("fsdp2", 8))["training"]
    gather, send = 4 * n * (7 / 8) / (450e9 * rate) + (28 * 12 + 3) * 7 * 5e-6, 4 * n / (50e9 * rate)
    assert parts["rollout"]["push"] == pytest.approx(4 * (gather + send), rel=1e-12)
    body, head = 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944), 152064 * 3584
    assert parts["rollout"]["decoding"] == pytest.approx(128 * 2 * (body + head) / (2 * rate * 3.35e12))
    one = 5e-6 + 2 * (2 * 64 * 3584) * (1 / 2) / (450e9 * rate)  # all-reduce of 64 tokens in bf16
    assert parts["rollout"]["tensor parallel"] == pytest.approx(128 * 2 * 28 * one)
    assert messages(QWEN["7B"], config, s)[0] == (0, 0)


def test_shards_by_hand():
    """Qwen2.5-7B, 32 GPUs, sharded within nodes of 8."""
    n, rate, config = TOTALS["7B"], 0.8, config_of()
    s = Strategy("fsdp2", 32, shard=8)
    assert between_groups(QWEN["7B"], s) == (n, 58)
    within = 6 * n * (7 / 8) / (450e9 * rate) + 58 * 7 * 5e-6
    between = n * (3 / 4) / (50e9 * rate) + 58 * 3 * 5e-6
    parts = seconds(QWEN["7B"], config, s)["training"]
    assert parts["communication"] == pytest.approx(2 * (within + between) - parts["passes"], rel=1e-9)
    held = memory(QWEN["7B"], config, s)["training"]
    assert held["weights"] + held["optimizer"] == 12 * n / 8


def test_gpus_are_split_so_that_prompts_divide():
    config = config_of(rollout=RolloutConfig(48, engine="vllm", lag=1))
    found = candidates(config, 16)
    split = {(s.gpus, s.node) for s in found if s.gpus > 1}
    assert split == {*((n, n) for n in (2, 3, 4, 6, 8)), *((2 * n, n) for n in (1, 2, 3, 4, 6))}
    assert max(s.gpus + s.servers * s.tensor_parallel for s in found) == 16
    s = choose(QWEN["7B"], config, 16)
    times = [total(seconds(QWEN["7B"], config, other), True) for other in found if fits(QWEN["7B"], config, other)]
    assert total(seconds(QWEN["7B"], config, s), True) == min(times)
    assert not candidates(config, 1)


@pytest.mark.parametrize(("prompts", "group_size", "minibatches", "prompt", "length"), [
    (7, 4, 1, 115, 128), (32, 8, 4, 115, 512), (32, 64, 1, 115, 128), (8, 16, 1, 512, 900),
])  # fmt: skip
@pytest.mark.parametrize("checkpointing", [False, True])
def test_microbatches_are_the_trainer_s(prompts, group_size, minibatches, prompt, length, checkpointing):
    config = config_of(
        {"prompt_tokens": prompt}, model=ModelConfig("Qwen2.5", gradient_checkpointing=checkpointing),
        rollout=RolloutConfig(prompts, group_size, max_completion_tokens=length),
        algorithm=AlgorithmConfig(minibatches=minibatches),
    )  # fmt: skip
    rows = prompts * group_size
    parts = [part for n in (prompt, length) for part in (torch.ones(rows, n).long(), torch.ones(rows, n).bool())]
    rollout = Rollout(*parts, terminated=parts[1][:, 0], texts=[""] * rows)
    _, batches = split_minibatches(rollout, torch.ones(rows), config)[0]
    largest, mean = (Load.of(config, ONE, fullest) for fullest in (True, False))
    assert largest.predicted == max(len(batch.rollout) for batch in batches) * length
    assert mean.microbatches == pytest.approx(len(batches), rel=0.05)  # rows of two groups may need a prompt more
    assert mean.predicted * mean.microbatches == pytest.approx(rows // minibatches * length, rel=1e-12)


def test_the_command(capsys):
    main(["--plan.gpus=[1,32]"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[2:16:2]] == list(QWEN)
    assert lines[2][:3] == ["0.5B", "1", "none"]
    assert lines[15][:5] == ["72B", "32", "does", "not", "fit"]
    main(["--plan.gpus=[1,16]", "--rollout.engine=vllm", "--model.name_or_path=Qwen/Qwen2.5-7B"])
    heads, none, split = capsys.readouterr().out.splitlines()[1:4]
    assert all(f" {name} s " in heads for name in ("push", "draw", "training", "lag 0", "lag 1"))
    assert "1 no GPU for a server" in " ".join(none.split())
    assert "; servers " in split
    for args, message in (["--plan.gpus=[0]"], "--plan.gpus must be"), (["--plan.mfu=40"], "--plan.mfu must be in"):
        with pytest.raises(SystemExit):
            main(args)
        assert message in capsys.readouterr().err


def test_a_run_s_floor_by_hand(tmp_path, monkeypatch):
    """What a run recorded, against its own problems; and sums over TINY."""
    monkeypatch.chdir(tmp_path)
    run_command(
        pspo.train.main, f"--model.name_or_path={one_layer()}", "--rollout.prompts=4", "--rollout.group_size=2",
        "--rollout.max_completion_tokens=8", "--run.max_steps=6", "--run.test_limit=0", "--run.validate_every=0",
        "--data.limit=4", "--reward.functions=[test_resume.Noisy]", "--run.quiet", "--run.output_dir=run",
    )  # fmt: skip
    shape, work, seconds, dtype = measure_run(Path("run"))
    texts = [problem.prompt for problem in load_problems("arithmetic", "train", limit=4)]
    prompts = list(encode_prompts(load_tokenizer(ModelConfig()), texts, SYSTEM_PROMPT))
    lines = read_jsonl(Path("run/metrics.jsonl"))[1:]
    assert work.prompt_tokens == pytest.approx(sum(map(len, prompts)) / 4)  # each rollout has all four
    assert work.completion_tokens == pytest.approx(sum(line["completion_tokens"] for line in lines) / 2)
    assert (work.rows, work.prompts, work.epochs, work.minibatches, dtype) == (8, 4, 2, 1, "fp32")
    assert all(p[: work.common] == prompts[0][: work.common] for p in prompts)
    assert set(seconds) == {"generate", "train"}
    assert shape.layers == 1

    work = Work(8, 6.0, 4, 10.0, 3, 5.0, 7.0, epochs=2, microbatches=2.0)
    forward = 2 * TINY.layers * TINY.layer * (6 * 4 + 3 * 7 + 2 * 3) + 2 * TINY.head * 6 * 5
    forward += 4 * TINY.layers * TINY.heads * TINY.head_dim * 6 * 5 * 12.5
    found = floors(work, TINY, "fp32", Machine(flops=1.0, bandwidth=1e30))
    assert found["train"] == pytest.approx(2 * 3 * forward)
    assert found["generate"] == pytest.approx(2 * (TINY.layers * TINY.layer * (40 + 8 * 5) + TINY.head * 8 * 5))
    found = floors(work, TINY, "fp32", Machine(flops=1e30, bandwidth=1.0))
    assert found["train"] == pytest.approx(2 * 7 * 4 * TINY.parameters)
    keys = 4 * 2 * TINY.layers * TINY.kv_heads * TINY.head_dim * 8 * 5 * 12.5
    assert found["generate"] == pytest.approx(7 * 4 * TINY.matrices + keys)
