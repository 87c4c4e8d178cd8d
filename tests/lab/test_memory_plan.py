"""What a run needs of memory, before its weights are loaded: against the tensors of whole models and of whole steps."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from benchmarks import one_gpu
from pspo_lab.plan import memory
from pspo_lab.plan.memory import GIB, USABLE, Planner, fullest_microbatch, saved_bytes
from pspo.config import (
    AlgorithmConfig,
    DistributedConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)
from pspo.model import load_policy
from pspo.run.optimizers import make_optimizer
from pspo.cli.files import read_config
from pspo.rollout import generate, make_sampling
from pspo.run import prepare
from pspo.train import main
from pspo.update import Learner, update

CPU = torch.device("cpu")
DEEP = {"num_hidden_layers": 5, "hidden_size": 64, "intermediate_size": 160, "vocab_size": 500}
WIDE = {"num_hidden_layers": 6, "hidden_size": 768, "intermediate_size": 2304, "vocab_size": 8192,
        "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 512}  # fmt: skip
SETTINGS = {
    "float32": {},
    "autocast": {"autocast": "bf16"},
    "bfloat16": {"dtype": "bfloat16"},
    "checkpointing": {"gradient_checkpointing": True},
    "LoRA": {"lora": LoraConfig(rank=8), "dtype": "bfloat16", "autocast": "bf16"},
}


class LiveTensors(TorchDispatchMode):
    """Bytes of the tensors that are made and not freed yet, and their peak."""

    def __init__(self, known=()):
        super().__init__()
        self.sizes, self.now, self.peak = {tensor.untyped_storage()._cdata: 0 for tensor in known}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_flatten(made)[0]:
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, storage._cdata)
        return made

    def free(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


@pytest.fixture
def folder(tiny_model, model_folder):
    return lambda **sizes: str(model_folder(tiny_model("Qwen2", **sizes)))


@pytest.mark.parametrize("name", ["float32", "autocast", "bfloat16", "LoRA"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_needs_are_those_of_the_whole_model(folder, name, beta):
    """Five layers, of which two are measured: what the forward pass of a microbatch keeps, and what is trained."""
    if name == "LoRA":
        pytest.importorskip("peft")
    config = TrainConfig(
        model=ModelConfig(folder(**DEEP), **SETTINGS[name]),
        rollout=RolloutConfig(prompts=8, group_size=4, max_completion_tokens=28),
        algorithm=AlgorithmConfig(beta=beta),
        optimizer=OptimizerConfig(microbatch_tokens=4 * (20 + 4 * 28)),
    )
    found, policy = Planner(config.model, 20, CPU).needs(config)["training"], load_policy(config.model, CPU)
    parameters = list(policy.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    weights, gradients = (sum(p.nbytes for p in parameters if p.requires_grad or every) for every in (True, False))
    copies = gradients if name == "LoRA" else weights
    assert found["weights"] == weights + (copies if beta else 0)
    assert found["gradients"] >= gradients
    assert found["optimizer"] == 8 * trained
    tokens, rows = fullest_microbatch(config, 20)
    assert (tokens, rows) == (4 * 132, 16)
    few, many = (saved_bytes(policy, width, config.model, CPU) for width in (64, 64 + tokens // 4))
    number = {"float32": 4, "autocast": 3}.get(name, 2)  # under autocast, rotated keys are float32 and values bf16
    keys = 2 * DEEP["num_hidden_layers"] * rows * 20 * 2 * 16 * number
    assert found["activations"] == pytest.approx(many - few + keys, rel=0.02)


def test_measuring_leaves_no_tensor_behind(folder):
    path = folder(**DEEP)
    with LiveTensors() as live:
        Planner(ModelConfig(path), 20, CPU)
        assert live.peak > 0
    gc.collect()
    assert live.sizes == {}


def test_advice_lists_switches_by_what_is_needed_then(folder, monkeypatch, capsys):
    config = TrainConfig(model=ModelConfig(folder(**DEEP)))
    planned = memory.plan_memory(config, 20, CPU)
    assert f"memory  planned peak {planned:.1f} GiB (rollouts " in capsys.readouterr().out
    there = sum(Planner(config.model, 20, CPU).certain(config).values())
    monkeypatch.setattr(memory, "available_memory", lambda *_: there)
    assert memory.plan_memory(config, 20, CPU) == pytest.approx(planned, rel=0.02)  # of the process then
    before, _, advice = capsys.readouterr().out.partition(" With ")
    assert "it will probably not fit." in before
    assert "--model.gradient_checkpointing true" in advice
    assert "--optimizer.microbatch_tokens 1024" in advice
    sizes = [float(part.split()[-2]) for part in advice.strip().split(", ")]
    assert sizes == sorted(sizes)


def test_an_engines_share_of_a_gpu_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 80))
    for engine, servers, there in (("transformers", [], 60), ("vllm", [], 40), ("vllm", ["http://a:8000"], 60)):
        config = TrainConfig(rollout=RolloutConfig(engine=engine, engine_memory=0.25, servers=servers))
        assert memory.available_memory(config, torch.device("cuda")) == there


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_s_memory_less_what_is_used_and_cannot_be_dropped(tmp_path, version):
    """The tighter of a job's own limit and of those above it."""
    line, top, limit, usage, cache = {
        1: ("4:memory:/job/step", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("0::/job/step", "", "memory.max", "memory.current", "inactive_file"),
    }[version]
    assert memory.group_memory(tmp_path) == float("inf")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"9:cpu:/\n{line}\n")
    for folder, most in (("job/step", "max" if version == 2 else str(2**63 - 4096)), ("job", "1000")):
        group = tmp_path / "sys/fs/cgroup" / top / folder
        group.mkdir(parents=True, exist_ok=True)
        for name, text in ((limit, most), (usage, "700"), ("memory.stat", f"anon 1\n{cache} 100\nother 2\n")):
            (group / name).write_text(f"{text}\n")
    assert memory.group_memory(tmp_path) == 1000 - 700 + 100


def test_what_cannot_fit_is_refused_before_anything_large(folder, monkeypatch):
    config = TrainConfig(model=ModelConfig(folder(**DEEP)), rollout=RolloutConfig(prompts=10**8))
    monkeypatch.setattr(memory, "measure_layers", lambda *_: pytest.fail("too late"))
    with pytest.raises(ValueError, match=r"^--rollout.prompts 100000000 does not fit: .*rollouts 1,323\.2, of .* GiB"):
        memory.plan_memory(config, 20, CPU)
    monkeypatch.setattr(memory, "available_memory", lambda *_: 1e6)
    with pytest.raises(ValueError, match=r"^--model.name_or_path \S+ does not fit: GiB of weights 0\.0, optimizer 0"):
        memory.plan_memory(TrainConfig(model=config.model), 20, CPU)


def test_shards_are_divided_and_gathered(folder, monkeypatch):
    model = ModelConfig(folder(**DEEP))
    alone = Planner(model, 20, CPU).needs(TrainConfig(model=model))
    monkeypatch.setattr("pspo.distributed.world_size", lambda: 4)
    for gather, shard in (("microbatch", None), ("step", 2)):
        shards = DistributedConfig(strategy="fsdp2", shard=shard, gather=gather)
        found = Planner(model, 20, CPU).needs(TrainConfig(model=model, distributed=shards))
        for part in ("weights", "optimizer"):
            assert found["step"][part] == alone["step"][part] / (shard or 4)
        assert found["rollout"]["gathered weights"] == alone["step"]["weights"]
        both = found["training"]["gathered weights and gradients"]
        assert both == 2 * alone["step"]["weights"] if gather == "step" else both < 2 * alone["step"]["weights"]


def test_prompts_are_counted_once_where_they_are_shared():
    config = TrainConfig(optimizer=OptimizerConfig(microbatch_tokens=4 * (20 + 4 * 128)))
    assert fullest_microbatch(config, 20, 10) == (4 * 532 - 3 * 10, 16)
    assert fullest_microbatch(replace(config, distributed=DistributedConfig("fsdp2")), 20, 10) == (4 * 532, 12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_auto_is_the_largest_number_that_fits(folder, monkeypatch, ranks):
    monkeypatch.setattr("pspo.distributed.world_size", lambda: ranks)
    monkeypatch.setattr(memory, "resident_memory", lambda: 2**29)
    config = TrainConfig(
        model=ModelConfig(folder(**DEEP)),
        rollout=RolloutConfig(max_rows="auto"),
        optimizer=OptimizerConfig(microbatch_tokens="auto"),
    )
    planner = Planner(config.model, 20, CPU)

    def need(switch: str, number: int) -> float:
        values = dict.fromkeys(memory.AUTO, 1) | {switch: number}
        return sum(planner.plan(memory.replace_switches(config, values))[memory.AUTO[switch]].values())

    def filled(memory_there: float) -> dict[str, int]:
        monkeypatch.setattr(memory, "available_memory", lambda *_: memory_there)
        return memory.largest_that_fit(config, 20, CPU)

    everything = {"rollout.max_rows": 500 // ranks, "optimizer.microbatch_tokens": 32 // ranks * (20 + 4 * 128)}
    assert filled(1e12) == everything  # the rows of the test, the tokens of a whole minibatch
    assert fullest_microbatch(memory.replace_switches(config, everything), 20)[1] == 128 // ranks
    assert set(filled(1.0).values()) == {1}
    for switch, numbers in {"rollout.max_rows": (1, 7, 30), "optimizer.microbatch_tokens": (600, 1200, 3000)}.items():
        for number in numbers:
            there = need(switch, number)
            found = filled(there / USABLE)[switch]
            assert found >= number
            assert need(switch, found) == there < need(switch, found + 1)
    monkeypatch.setattr(memory, "measure_layers", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match=r"--rollout.max_rows auto: .* cannot be measured .* give a number"):
        filled(1e12)


@pytest.mark.nightly
def test_a_run_with_auto_keeps_its_numbers_when_it_is_resumed(tmp_path, monkeypatch, capsys):
    def train(steps: int) -> dict:
        tiny = ["--rollout.prompts=2", "--rollout.max_completion_tokens=8", "--run.test_limit=0", "--data.limit=20"]
        auto = ["--rollout.max_rows=auto", "--optimizer.microbatch_tokens=auto", "--run.validate_every=0"]
        main([*tiny, *auto, f"--run.max_steps={steps}", f"--run.output_dir={tmp_path / 'run'}"])
        return read_config(tmp_path / "run/config.yaml")

    def room_for(max_rows: int, microbatch_tokens: int) -> None:
        limits = {"rollout.max_rows": max_rows, "optimizer.microbatch_tokens": microbatch_tokens}
        monkeypatch.setattr(prepare, "largest_that_fit", lambda *_: limits)

    room_for(8, 100)
    config = train(2)
    assert (config["rollout"]["max_rows"], config["optimizer"]["microbatch_tokens"]) == (8, 100)
    assert "auto    --rollout.max_rows 8 --optimizer.microbatch_tokens 100\n" in capsys.readouterr().out
    room_for(16, 1000)
    longer = config | {"run": config["run"] | {"max_steps": 4}}
    assert train(4) == train(4) == longer  # and finished


@pytest.mark.nightly
@pytest.mark.parametrize("name", SETTINGS)
def test_tensors_alive_at_the_peak_are_those_that_were_planned(folder, tokenizer, name):
    """A rollout and its step at full lengths; gradients and moments are made in it, weights before it."""
    if name == "LoRA":
        pytest.importorskip("peft")
    config = TrainConfig(
        model=ModelConfig(folder(**WIDE), **SETTINGS[name]),
        rollout=RolloutConfig(prompts=8, group_size=4, min_completion_tokens=128, max_completion_tokens=128),
        algorithm=AlgorithmConfig(epochs=2),
        optimizer=OptimizerConfig(microbatch_tokens=6 * (101 + 4 * 128)),  # six groups, of full lengths
    )
    policy = load_policy(config.model, CPU)
    learner = Learner(policy, make_optimizer(policy, config.optimizer))
    prompts = [[i, *range(100)] for i in range(8)]
    planned = Planner(config.model, 101, CPU).needs(config)
    found = {phase: sum(parts.values()) for phase, parts in planned.items()}
    weights, measured = sum(p.nbytes for p in policy.parameters()), {}
    with LiveTensors(policy.parameters()) as live:
        rollout = generate(policy, tokenizer, prompts, make_sampling(policy, tokenizer, config.rollout), 4)
        measured["rollout"], live.peak = weights + live.peak, live.now
        update(learner, rollout, torch.randn(32), config)
        measured["training"] = weights + live.peak
    rollout_needs = found["rollout"] - planned["rollout"]["optimizer"]  # none yet
    assert max(measured["training"], rollout_needs) == pytest.approx(max(found["training"], found["step"]), rel=0.1)
    assert measured["rollout"] < 1.1 * rollout_needs


@pytest.mark.nightly
def test_the_page_of_recipes_is_what_is_planned_and_fits():
    pytest.importorskip("peft")
    page = (one_gpu.ROOT / "docs/guide/one-gpu.md").read_text(encoding="utf-8")
    rows = one_gpu.rows()
    assert [line for line in page.splitlines() if line.startswith("| `qwen")] == rows
    for row, (_, _, gpu, _) in zip(rows, one_gpu.PLANS, strict=True):
        assert max(float(cell) for cell in row.split("|")[-3:-1]) * GIB < USABLE * gpu * 1e9
