"""Two ranks against one process: gradients, rollouts, whole runs and their faults. On the CPU, through gloo."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from batches import by_root, by_token, row_mean_weights
from processes import assert_same, at_call, before, contents, one_layer, ranks, run_command, send
from safetensors.torch import load_file
from test_update import draw_by_signal

import pspo.evaluate.__main__
import pspo.evaluate.evaluation
import pspo.train
from pspo import distributed as dist
from pspo.config import (
    AlgorithmConfig,
    DistributedConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from pspo.environments import EnvironmentSampler
from pspo.losses import CISPO, DPPO, GMPO, GSPO, P3O, PSPO, REINFORCE, SAPO, TOPR, VESPO, Clip, NoClip
from pspo.model import load_policy, load_tokenizer, stop_token_ids
from pspo.cli.files import read_jsonl
from pspo.run.folders import checkpoints, damage
from pspo.rollout import Prompts, Rollout, Sampling, TransformersSampler, encode_prompts
from pspo.rollout.types import Nucleus
from pspo.run.prepare import make_learner
from pspo.tasks import Problem
from pspo.update import keep_logprobs, update

if not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)
CPU = torch.device("cpu")
STRATEGIES = ("ddp", "fsdp2")

# --- gradients --------------------------------------------------------------------------------------------------------


def make_config(surrogate, aggregation, model="tied", autocast="none", checkpointed=False, measured=0, **algorithm):
    return TrainConfig(
        model=ModelConfig(model, autocast=autocast, gradient_checkpointing=checkpointed),
        algorithm=AlgorithmConfig(surrogate=surrogate, aggregation=aggregation, **algorithm),
        rollout=RolloutConfig(prompts=8, group_size=4, max_completion_tokens=20, temperature=0.7),
        optimizer=OptimizerConfig(name="sgd", lr=0.1, max_grad_norm=0.5, microbatch_tokens=250),
        run=RunConfig(max_steps=100, gradients_every=measured),
    )


CASES = {
    "minibatches": make_config(PSPO(0.3), "dapo", measured=1, epochs=2, minibatches=2),
    "sequences, checkpointed": make_config(TOPR(), "grpo", checkpointed=True, measured=1, epochs=2),
    "KL": make_config(NoClip(), "dr_grpo", epochs=2, minibatches=2, beta=0.1),
    "bf16": make_config(Clip(), "dapo", autocast="bf16", epochs=2),
    "untied": make_config(P3O(), "grpo", model="untied", epochs=2),
    "untied, gathered once": make_config(SAPO(), "grpo", model="untied", epochs=2),
    "REINFORCE": make_config(REINFORCE(), "dapo", epochs=2),
    "CISPO": make_config(CISPO(), "dapo", epochs=2),
    "GSPO": make_config(GSPO(0.1, 0.2), "grpo", epochs=2),
    "LUSPO": make_config(GSPO(0.1, 0.2), "dr_grpo", epochs=2),
    "GMPO": make_config(GMPO(), "grpo", epochs=2),
    "VESPO": make_config(VESPO(), "dapo", epochs=2),
    "correction of tokens": make_config(NoClip(), "dapo", epochs=2, correction="token_mask", correction_cap=1.3),
    "of sequences": make_config(GMPO(), "grpo", epochs=2, correction="sequence_truncate", correction_cap=1.3),
    "DPPO": make_config(DPPO(epsilon=1e-3), "dr_grpo", epochs=2),
    "stale": make_config(GSPO(0.1, 0.2), "grpo", epochs=2, minibatches=2),
    "decoupled": make_config(NoClip(), "dapo", epochs=2, ratio_to="proximal", correction="sequence_truncate"),
    "own pieces": make_config(GMPO(), by_root, epochs=2, advantages=by_token, correction=row_mean_weights),
    "entropy": make_config(Clip(), "grpo", epochs=2, entropy_coef=0.2, entropy_target=9.0),
    "uncertain": make_config(GMPO(), "dapo", epochs=2, minibatches=2, entropy_quantile=0.3, entropy_coef=0.1),
    "moved": make_config(
        NoClip(), "dapo", epochs=2, mask_off_policy=0.01, correction="token_mask", correction_floor=0.8
    ),
    "unbiased KL": make_config(NoClip(), "grpo", epochs=2, minibatches=2, beta=0.1, kl_estimator="unbiased_k3"),
    "replayed": make_config(Clip(), "dapo", epochs=2, minibatches=2, nucleus="replay", beta=0.1),
}
for name in ("stale", "decoupled"):
    CASES[name] = replace(CASES[name], rollout=replace(CASES[name].rollout, lag=1))
if importlib.util.find_spec("peft") is not None:
    adapted = make_config(PSPO(0.3), "dapo", epochs=2, beta=0.1)
    for name, dtype in (("LoRA", "float32"), ("LoRA, bf16", "bfloat16")):
        CASES[name] = replace(adapted, model=replace(adapted.model, dtype=dtype, lora=LoraConfig(rank=4)))


def make_rows() -> tuple[Rollout, torch.Tensor]:
    """32 rows of prompts and completions of all lengths, a quarter of the groups with advantages 0."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 21, (32,), generator=generator)
    prompts = torch.randint(3, 12, (8,), generator=generator).repeat_interleave(4)
    ids = torch.randint(5, 500, (8, 12), generator=generator).repeat_interleave(4, dim=0)
    advantages = torch.randn(32, generator=generator)
    advantages[4:8] = advantages[28:] = 0
    completions, mask = torch.randint(5, 500, (32, 20), generator=generator), torch.arange(20) < lengths[:, None]
    kept = (completions[..., None] + torch.arange(3)).flatten(1)  # of each token, itself and the next two
    nucleus = Nucleus(
        [ids[: 3 * n] for ids, n in zip(kept, lengths, strict=True)],
        3 * mask,
        mask * (0.8 + 0.2 * torch.rand(32, 20, generator=generator)),
    )
    return Rollout(
        ids,
        torch.arange(12) >= 12 - prompts[:, None],
        completions,
        mask,
        lengths < 20,
        [""] * 32,
        -6.3 + 0.3 * torch.randn(32, 20, generator=generator),
        nucleus=nucleus,
    ), advantages


def step(config: TrainConfig) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights after one rollout's steps, by plain SGD so that they show the gradients; and metrics."""
    torch.manual_seed(7 + dist.rank())  # of adapters; only rank 0's counts
    learner = make_learner(config, CPU)
    rollout, advantages = make_rows()
    if callable(own := config.algorithm.advantages):
        advantages = own(advantages, 4, rollout.completion_mask)
    mine = torch.tensor(dist.take_rank_share(list(range(len(rollout))), config.algorithm.minibatches))
    rollout, advantages = rollout.rows(mine), advantages[mine]
    if config.rollout.lag:
        rollout, fresh = keep_logprobs(learner, rollout, advantages, config), rollout
        update(learner, fresh, advantages, config)  # the policy moves on
    metrics = update(learner, rollout, advantages, config)
    exported = dist.full_state_dict(learner.policy)
    assert exported is None or not any("base_layer" in name for name in exported)  # adapters alone
    return {name: dist.full_tensor(p.detach()).clone() for name, p in learner.policy.named_parameters()}, metrics


TEXTS = ["Tom has 5 apples and eats 2. How many are left?", "What is 3 + 4?", "1 + 1", "Ann buys 3 pens for $2 each."]
ROLLOUTS = ("none", "gathered", "synced")  # "none": whole models


class Patient:
    """An environment that ends an episode after one turn on rank 0, after three on rank 1."""

    def reset(self, problem: Problem) -> str:
        self.turns = 1 if problem.prompt in TEXTS[::2] else 3
        return problem.prompt

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turns -= 1
        return "Are you sure?", 0.0, self.turns == 0


def play(policy, rank: int) -> tuple[list[list[int]], list[int]]:
    """Completions of a rank's episodes, which have other numbers of turns than the other's; and these numbers."""
    tokenizer = load_tokenizer(ModelConfig("tiny-base"))
    sampling = Sampling(stop_token_ids(policy, tokenizer), tokenizer.pad_token_id, 1.0, 0.9, max_completion_tokens=300)
    prompts = Prompts([Problem(text) for text in TEXTS[rank::2]], encode_prompts(tokenizer, TEXTS[rank::2]))
    torch.manual_seed(rank)
    rollout = EnvironmentSampler(TransformersSampler(policy, tokenizer, sampling), Patient).draw(prompts, 2)
    return rollout.completion_ids.tolist(), rollout.turns.tolist()


def roll_out(policy, rank: int, how: str) -> list[list[int]]:
    """A rank's completions; at its own pace a rank's may be longer than another's."""
    tokenizer = load_tokenizer(ModelConfig("tiny-base"))
    synced, limit = how == "synced", 20 if how == "synced" else 8 + 12 * rank
    sampling = Sampling(
        stop_token_ids(policy, tokenizer), tokenizer.pad_token_id, 1.0, 0.9, max_completion_tokens=limit,
        decoder="hf" if synced else "pspo", synced=synced and dist.world_size() > 1,
    )  # fmt: skip
    torch.manual_seed(rank)
    prompts = Prompts([Problem(text) for text in TEXTS[rank::2]], encode_prompts(tokenizer, TEXTS[rank::2]))
    weights = "gathered" if how == "none" else how
    rollout = TransformersSampler(policy, tokenizer, sampling, weights=weights).draw(prompts, 2)
    return rollout.completion_ids.tolist()


def talk() -> dict:
    """What the small functions return on rank 0."""
    refused = None
    try:
        dist.run_on_main(lambda: int("no"))
    except (ValueError, SystemExit) as error:
        refused = type(error).__name__
    me = dist.rank()
    return {
        "refused": dist.gather_objects(refused),
        "run on main": dist.gather_objects(dist.run_on_main(lambda: me)),
        "highest": dist.max_over_ranks(3 * me),
        "sum": dist.sum_over_ranks(torch.tensor([1, me])).tolist(),
        "concatenated": dist.concat_over_ranks(torch.full((1 + me, 1), me)).flatten().tolist(),
        "columns": dist.gather_columns(torch.full((1, 1 + me), me)).tolist(),
        "on main": dist.gather_on_main(me),
        "padded": len(dist.pad_to_longest(["item"] * me, "filler")),
        "shares": dist.gather_objects(dist.take_rank_share(list(range(8)), 2)),
    }


@pytest.fixture(scope="module")
def cases(tiny_model, tmp_path_factory) -> dict[str, TrainConfig]:
    """CASES, their models in folders."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("tied", "untied"):
        settings = {"tie_word_embeddings": name == "tied", "num_hidden_layers": 1 if name == "tied" else 2}
        model = tiny_model("Qwen2", vocab_size=512, initializer_range=0.02, **settings)
        model.save_pretrained(folder / name)
    return {
        name: replace(config, model=replace(config.model, name_or_path=str(folder / config.model.name_or_path)))
        for name, config in CASES.items()
    }


SPREAD = tuple(name for name in ("minibatches", "untied, gathered once", "LoRA") if name in CASES)  # by four ranks, too


def distributed(strategy: str, name: str, shard: int | None = None) -> DistributedConfig:
    once = strategy == "fsdp2" and "once" in name
    return DistributedConfig(strategy, shard, gather="step" if once else "microbatch")


@pytest.fixture(scope="module")
def spread(cases, tmp_path_factory) -> dict:
    """What four ranks computed, of which two hold a model together."""
    out = tmp_path_factory.mktemp("ranks") / "out.pt"

    def work() -> None:
        dist.init("fsdp2", 60)
        results = {name: step(replace(cases[name], distributed=distributed("fsdp2", name, 2))) for name in SPREAD}
        policy = load_policy(ModelConfig("tiny-base"), CPU, DistributedConfig("fsdp2", 2))
        for how in ("gathered", "synced"):
            results[how] = dist.gather_objects(roll_out(policy, dist.rank() % 2, how))
        results["held"] = dist.gather_objects(sum(dist.local_shard(p).numel() for p in policy.parameters()))
        results["exported"] = dist.full_state_dict(policy)
        if dist.is_main():
            torch.save(results, out)

    assert ranks(work, 4) == [0] * 4
    return torch.load(out, weights_only=False)


@pytest.fixture(scope="module")
def computed(cases, tmp_path_factory) -> dict:
    """What two ranks computed."""
    out = tmp_path_factory.mktemp("ranks") / "out.pt"

    def work() -> None:
        dist.init("ddp", 60)
        results = {"talk": talk(), "order": draw_by_signal(60)}
        for strategy in STRATEGIES:
            for name, config in cases.items():
                results[strategy, name] = step(replace(config, distributed=distributed(strategy, name)))
        results["episodes"] = dist.gather_objects(
            play(load_policy(ModelConfig("tiny-base"), CPU, DistributedConfig("fsdp2")), dist.rank())
        )
        for how in ROLLOUTS:
            policy = load_policy(ModelConfig("tiny-base"), CPU, None if how == "none" else DistributedConfig("fsdp2"))
            results[how] = dist.gather_objects(roll_out(policy, dist.rank(), how))
            results["exported"] = dist.full_state_dict(policy)
        if dist.is_main():
            torch.save(results, out)

    assert ranks(work) == [0, 0]
    return torch.load(out, weights_only=False)


def norm_of_sum(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics with the |G|^2 of 8 prompts in place of its parts, which sharded ranks estimate from pairs of prompts."""
    others = {name: value for name, value in metrics.items() if name not in ("gradient_norm2", "gradient_variance")}
    if len(others) == len(metrics):
        return others
    return others | {"norm2": metrics["gradient_norm2"] + metrics["gradient_variance"] / 8}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_take_the_steps_of_one(computed, cases, name):
    assert_the_steps_of_one(cases, name, {strategy: computed[strategy, name] for strategy in STRATEGIES})


@pytest.mark.parametrize("name", SPREAD)
def test_a_model_spread_over_two_of_four_ranks_takes_the_steps_of_one(spread, cases, name):
    assert_the_steps_of_one(cases, name, {"fsdp2": spread[name]})


def assert_the_steps_of_one(cases, name: str, computed: dict) -> None:
    """The same weights and metrics as in one process, in microbatches of any size."""
    config = cases[name]
    weights, metrics = step(replace(config, optimizer=replace(config.optimizer, microbatch_tokens=10**6)))
    start = dict(load_policy(config.model, CPU).named_parameters())
    moved = float(max((weights[n] - start[n].detach()).abs().max() for n in start))
    assert moved > 1e-3
    rough = "bf16" in name  # other layouts round otherwise
    for strategy, (its_weights, its_metrics) in computed.items():
        for n, expected in weights.items():
            torch.testing.assert_close(its_weights[n], expected, rtol=0, atol=moved * (0.2 if rough else 1e-4))
        for actual, expected in zip(its_metrics, metrics, strict=True):
            if strategy == "fsdp2":
                actual, expected = norm_of_sum(actual), norm_of_sum(expected)
            assert actual == pytest.approx(expected, rel=0.1 if rough else 1e-3, abs=2e-2 if rough else 1e-4)


@pytest.mark.parametrize("how", ROLLOUTS)
def test_each_rank_rolls_out_what_one_process_would(computed, spread, how):
    policy, pad = load_policy(ModelConfig("tiny-base"), CPU), load_tokenizer(ModelConfig("tiny-base")).pad_token_id
    pairs = [computed[how]] + ([spread[how][:2], spread[how][2:]] if how in spread else [])
    for rank in range(2):
        expected = torch.tensor(roll_out(policy, rank, how))
        for pair in pairs:
            completions = torch.tensor(pair[rank])
            width = expected.shape[1]  # if synced, a rank continues until the others have ended
            assert torch.equal(completions[:, :width], expected)
            assert bool((completions[:, width:] == pad).all())


def test_ranks_play_different_numbers_of_turns(computed):
    policy = load_policy(ModelConfig("tiny-base"), CPU)
    assert computed["episodes"] == [play(policy, rank) for rank in range(2)]
    assert [max(turns) for _, turns in computed["episodes"]] == [1, 3]


def test_each_group_of_ranks_holds_a_model_once(spread):
    whole = sum(p.numel() for p in load_policy(ModelConfig("tiny-base"), CPU).parameters())
    assert [sum(spread["held"][i : i + 2]) for i in (0, 2)] == [whole, whole]


def test_a_sharded_model_is_exported_whole(computed, spread):
    expected = load_policy(ModelConfig("tiny-base"), CPU).state_dict()
    assert computed["exported"].keys() >= dict(load_policy(ModelConfig("tiny-base"), CPU).named_parameters()).keys()
    for results in (computed, spread):
        assert all(torch.equal(value, expected[name]) for name, value in results["exported"].items())


def test_ranks_draw_the_prompts_of_one(computed):
    assert computed["order"] == draw_by_signal(60)


def test_ranks_talk(computed):
    assert computed["talk"] == {
        "refused": ["ValueError", "SystemExit"], "run on main": [0, 0], "highest": 3, "sum": [2, 1],
        "concatenated": [0, 1, 1], "columns": [[0, 1, 1]], "on main": [0, 1], "padded": 1,
        "shares": [[0, 1, 4, 5], [2, 3, 6, 7]],
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_shards_of_an_optimizer_that_keeps_nothing(tmp_path, kind):
    """AdamW before its first step; SGD always."""
    kept, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizers = [kind(model.parameters(), lr=0.1) for model in (kept, other)]
    dist.save_shards(tmp_path / "shards", kept, optimizers[0])
    dist.load_shards(tmp_path / "shards", other, optimizers[1])
    assert torch.equal(kept.weight, other.weight)
    for model, optimizer in ((kept, optimizers[0]), (other, optimizers[1])):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    assert torch.equal(kept.weight, other.weight)


# --- whole runs -------------------------------------------------------------------------------------------------------

SMALL = (
    f"--model.name_or_path={one_layer()}",
    "--rollout.prompts=2", "--rollout.max_completion_tokens=8", "--run.max_steps=6", "--run.validate_every=4",
    "--run.validation_limit=4", "--run.test_limit=3", "--run.save_every=2", "--data.limit=9", "--run.keep=9",
    "--optimizer.lr=1e-4", "--rollout.temperature=1", "--distributed.timeout=60",
    "--reward.functions=[SoftOverlong]", "--reward.functions.buffer=8",  # any model's lengths differ
)  # fmt: skip


def train(output: Path, strategy: str, *args: str, number: int = 2, fault: Callable[[], None] = lambda: None):
    """Exit codes of a run's ranks, each of which first prepares its fault."""
    switches = [*SMALL, f"--distributed.strategy={strategy}", f"--run.output_dir={output}", *args]

    def rank() -> None:
        fault()
        pspo.train.main(switches)

    return ranks(rank, number)


def torchrun(output: Path, strategy: str, *options: str) -> dict[str, Any]:
    """How `subprocess` starts such a run by torchrun."""
    switches = [*SMALL, f"--distributed.strategy={strategy}", f"--run.output_dir={output}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "pspo.train", *switches]
    path = str(Path(__file__).parents[1])
    return {"args": command, "env": os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Path]:
    """By strategy, a run of two ranks that nothing happened to."""
    runs = {strategy: tmp_path_factory.mktemp("runs") / strategy for strategy in STRATEGIES}
    for strategy, run in runs.items():
        assert train(run, strategy) == [0, 0]
    return runs


def test_both_strategies_are_one_run(whole):
    """The first rollout is the same to the last token, and its steps to rounding."""
    ddp, fsdp2 = (contents(run) for run in whole.values())
    assert all(line["grad_norm"] > 0 for line in ddp["metrics.jsonl"])
    assert ddp["metrics.jsonl"][0] == pytest.approx(fsdp2["metrics.jsonl"][0], rel=1e-3, abs=1e-4)
    first = [json.loads(line) for line in ddp["samples.jsonl"].splitlines()[:8]]
    assert [json.loads(line) for line in fsdp2["samples.jsonl"].splitlines()[:8]] == first
    assert [sample["step"] for sample in first] == [2] * 8
    assert len({sample["prompt"] for sample in first}) == 2  # of both ranks' prompts
    for run in whole.values():
        tokens = pd.read_parquet(run / "tokens.parquet")
        visits = tokens[["step", "problem", "sample", "position"]]
        assert not visits.duplicated().any()
        for sample in first:
            own = tokens[(tokens.problem == sample["problem"]) & (tokens["sample"] == sample["sample"])]
            assert set(own.step) <= {1, 2}
            assert len(own) in (0, 2 * sample["tokens"])  # every token at both steps, or a row without advantage
            assert len(own) > 0 or sample["advantage"] == 0


def test_ranks_without_a_common_folder_are_told(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)

    def apart() -> None:
        Path(node := os.environ["RANK"]).mkdir()
        os.chdir(node)

    assert train(Path("run"), "ddp", fault=apart) == [2, 2]
    assert capfd.readouterr().err == (
        "pspo.train: error: --run.output_dir must be in a folder that all nodes share, got 'run'\n"
    )


class OfRows(NoClip):
    def __call__(self, logprobs, old_logprobs, advantages, mask):
        return super().__call__(logprobs, old_logprobs, advantages, mask).sum(dim=1)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_a_surrogate_s_wrong_shape_is_named_on_every_rank(tmp_path, capfd, strategy):
    assert train(tmp_path / "run", strategy, "--algorithm.surrogate=test_distributed.OfRows") == [1, 1]
    err = capfd.readouterr().err
    assert "surrogate OfRows returned a loss of shape (" in err
    assert "Traceback" not in err


def test_torchrun_starts_ranks_of_which_one_talks(whole, tmp_path):
    job = torchrun(tmp_path / "run", "ddp", "--standalone", "--nproc-per-node=2", f"--log-dir={tmp_path}")
    done = subprocess.run(**job, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"model   {one_layer()}") == done.stdout.count("greedy, held-out") == 1
    assert_same(whole["ddp"], tmp_path / "run")


def die_in_second(function: str, rank: int, number: signal.Signals) -> Callable[[], None]:
    def fault() -> None:
        if os.environ["RANK"] == str(rank):
            before(function, at_call(2, lambda: send(number)))

    return fault


STALE = ("--rollout.lag=1", "--rollout.resample=2")
ADAPTERS = ("--model.lora.rank=4", "--algorithm.beta=0.1")
ENDS = [  # of one rank, with the run's further switches, and what it is about to do; all but the first nightly
    ("fsdp2", signal.SIGTERM, (), "draw_prompts"),
    ("fsdp2", signal.SIGTERM, (), "update"),
    ("fsdp2", signal.SIGTERM, ("--distributed.rollout=synced", "--rollout.decoder=hf"), "draw_prompts"),
    ("ddp", signal.SIGTERM, (), "update"),
    ("ddp", signal.SIGKILL, (), "update"),
    ("fsdp2", signal.SIGKILL, (), "update"),
    *((strategy, signal.SIGTERM, STALE, "update") for strategy in STRATEGIES),
    *((strategy, signal.SIGKILL, ADAPTERS, "update") for strategy in STRATEGIES),
]


@pytest.mark.parametrize(
    ("strategy", "number", "args", "function"),
    [ENDS[0], *(pytest.param(*end, marks=pytest.mark.nightly) for end in ENDS[1:])],
)
def test_one_rank_that_is_killed_or_told_to_stop_ends_the_run_which_resumes_exactly(
    whole, tmp_path, capfd, strategy, number, args, function
):
    expected, output = whole[strategy], tmp_path / "run"
    if args:
        expected = tmp_path / "whole"
        assert train(expected, strategy, *args) == [0, 0]
    codes = train(output, strategy, *args, fault=die_in_second(function, 1, number))
    if number == signal.SIGTERM:
        assert codes == [75, 75]
        assert checkpoints(output)[0].name == ("step-000004" if function == "update" else "step-000002")
        assert "SIGTERM: stopping after this pass or update" in capfd.readouterr().err
    else:
        assert codes == [1, -signal.SIGKILL]
        assert checkpoints(output)[0].name == "step-000002"
        err = capfd.readouterr().err
        assert "rank 0 lost another one (" in err.splitlines()[-1]
        assert err.endswith("): the same command resumes from the last checkpoint\n")
        assert "Traceback" not in err
    assert train(output, strategy, *args) == [0, 0]
    assert_same(expected, output)


def fails_on_rank_1(completions, step):
    """Lengths and a bit, until the file "broken" is there: then rank 1 raises at step 4, in rollouts of 4 rows."""
    if Path(os.environ["BROKEN"]).exists() and os.environ["RANK"] == "1" and step == 4 and len(completions) == 4:
        raise KeyError("on rank 1")
    return [len(text) + row % 3 for row, text in enumerate(completions)]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_a_reward_that_raises_on_one_rank_ends_all_saved(tmp_path, capfd, monkeypatch, strategy):
    monkeypatch.setenv("BROKEN", str(tmp_path / "broken"))
    args = ("--reward.functions=[test_distributed.fails_on_rank_1]", "--run.save_every=0")
    assert train(tmp_path / "whole", strategy, *args) == [0, 0]
    (tmp_path / "broken").touch()
    assert train(tmp_path / "run", strategy, *args) == [1, 1]
    assert capfd.readouterr().err.count("KeyError: 'on rank 1'") == 1
    assert checkpoints(tmp_path / "run")[0].name == "step-000004"
    (tmp_path / "broken").unlink()
    assert train(tmp_path / "run", strategy, *args) == [0, 0]
    shutil.rmtree(tmp_path / "run/checkpoints/step-000004")
    assert_same(tmp_path / "whole", tmp_path / "run")


def test_a_manifest_vouches_for_every_rank_s_shards(whole, tmp_path):
    folder = tmp_path / "step-000004"
    shutil.copytree(whole["fsdp2"] / "checkpoints/step-000004", folder)
    assert damage(folder) is None
    shards = sorted((folder / "shards").iterdir())
    assert len(shards) >= 2
    os.truncate(shards[1], shards[1].stat().st_size - 1)
    assert f"shards/{shards[1].name}" in damage(folder)


def test_another_number_of_ranks_resumes(whole, tmp_path, capfd):
    """From the same weights and optimizer; the tokens drawn differ."""
    output = tmp_path / "run"
    shutil.copytree(whole["fsdp2"], output)
    (output / "summary.json").unlink()
    shutil.rmtree(output / "checkpoints/step-000006")
    assert train(output, "fsdp2", number=1) == [0]
    assert "2 ranks" in capfd.readouterr().err
    metrics, expected = (contents(run)["metrics.jsonl"] for run in (output, whole["fsdp2"]))
    assert metrics[:2] == expected[:2]
    assert (metrics[2]["step"], metrics[2]["lr"]) == (6, expected[2]["lr"])


@pytest.mark.nightly
def test_four_ranks_of_which_two_hold_a_model_are_one_run_with_ddp_and_resume(tmp_path, capfd):
    """Exactly; and on two ranks, which hold the model together, from the same weights and optimizer."""
    ddp, whole, killed, other = (tmp_path / name for name in ("ddp", "whole", "killed", "other"))
    args = ("fsdp2", "--rollout.prompts=4", "--distributed.shard=2")
    assert train(ddp, "ddp", args[1], number=4) == [0] * 4
    assert train(whole, *args, number=4) == [0] * 4
    expected = contents(ddp)
    assert contents(whole)["metrics.jsonl"][0] == pytest.approx(expected["metrics.jsonl"][0], rel=1e-3, abs=1e-4)
    assert contents(whole)["samples.jsonl"].splitlines()[:16] == expected["samples.jsonl"].splitlines()[:16]

    written = [load_file(file) for file in (whole / "checkpoints/step-000004/shards").iterdir()]
    numbers = sum(part.numel() for file in written for name, part in file.items() if not name.endswith(".step"))
    assert numbers == 3 * sum(p.numel() for p in load_policy(ModelConfig(one_layer()), CPU).parameters())  # once each

    assert train(killed, *args, number=4, fault=die_in_second("update", 1, signal.SIGKILL)).count(1) == 3
    assert train(killed, *args, number=4) == [0] * 4
    assert_same(whole, killed)

    shutil.copytree(whole, other)
    (other / "summary.json").unlink()
    shutil.rmtree(other / "checkpoints/step-000006")
    assert train(other, "fsdp2", args[1]) == [0, 0]
    err = capfd.readouterr().err
    assert "changed from step 4 on: --distributed.shard was 2, is None (other rounding)" in err
    assert "4 ranks" in err
    metrics, expected = (contents(run)["metrics.jsonl"] for run in (other, whole))
    assert metrics[:2] == expected[:2]
    assert (metrics[2]["step"], metrics[2]["lr"]) == (6, expected[2]["lr"])


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_fork_and_steer(whole, tmp_path, strategy):
    expected = contents(whole[strategy])["metrics.jsonl"][2:]
    parent, (same, slower) = whole[strategy] / "checkpoints/step-000004", (tmp_path / "same", tmp_path / "slower")
    for output, args in ((same, []), (slower, ["--optimizer.lr=1e-6"])):
        assert train(output, strategy, f"--run.fork_from={parent}", *args) == [0, 0]
    assert contents(same)["metrics.jsonl"] == expected
    (line,) = contents(slower)["metrics.jsonl"]
    assert (line["step"], line["lr"]) == (6, 1e-6)
    assert [change["switch"] for change in read_jsonl(slower / "changes.jsonl")] == ["optimizer.lr", "run.fork_from"]


def test_evaluation_uses_the_ranks(whole, tmp_path):
    command = [f"--model.name_or_path={whole['ddp'] / 'final'}", "--data.limit=12", "--eval.temperatures=[0.0,1.0]",
               "--eval.samples=2", "--eval.max_completion_tokens=16", "--eval.max_tokens=1000"]  # fmt: skip
    main, one, two = pspo.evaluate.__main__.main, tmp_path / "one", tmp_path / "two"

    def evaluate() -> None:
        before("complete", lambda *_: (tmp_path / f"rank-{dist.rank()}").touch(), pspo.evaluate.evaluation)
        main([*command, f"--run.output_dir={two}"])

    assert run_command(main, *command, f"--run.output_dir={one}") == 0
    assert ranks(evaluate) == [0, 0]
    assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0", "rank-1"}
    for name in ("results.json", "completions.jsonl"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", ["--rollout.prompts=0", "--rollout.prompts=3"])
def test_one_rank_says_what_is_wrong(tmp_path, capfd, switch):
    assert train(tmp_path / "run", "ddp", switch) == [2, 2]
    assert capfd.readouterr().err.count("rollout.prompts") == 1
    assert not (tmp_path / "run").exists()


def test_strategies_and_launchers_that_do_not_fit_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"--distributed\.strategy fsdp2 needs torchrun"):
        dist.init("fsdp2", 60)
    monkeypatch.setattr(dist.ranks, "world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"--distributed\.strategy none under torchrun"):
        dist.check_strategy("none")


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_ends_with_its_exit_code_and_all_it_said(capfd, code):
    def action() -> None:
        print("said")
        sys.exit(code)

    assert ranks(action, number=1) == [code]
    assert capfd.readouterr().out == "said\n"
