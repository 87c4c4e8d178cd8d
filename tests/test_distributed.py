"""Two processes against one: gradients, rollouts, checkpoints, faults. Through torchrun, by gloo, on two cores."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import pspo.distributed
import pspo.evaluate.__main__
import pspo.train
from pspo.config import (
    AlgorithmConfig,
    DistributedConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from pspo.distributed import check_strategy, start
from pspo.evaluate.__main__ import Prompts
from pspo.losses import P3O, PSPO, SAPO, TOPR, Clip, NoClip
from pspo.model import load_policy, load_tokenizer, stop_token_ids
from pspo.rollout import Rollout, Sampling, encode_prompts, generate
from pspo.run.checkpoint import describe
from pspo.train import evaluate_by_all
from pspo.update import Learner, update

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo"),
]
CPU = torch.device("cpu")
TESTS = Path(__file__).parent
STRATEGIES = ("ddp", "fsdp2")
CLOSE = {"rel": 1e-3, "abs": 1e-4}
SMALL = (
    "--rollout.prompts=4", "--rollout.max_completion_tokens=16", "--run.max_steps=8", "--run.validate_every=4",
    "--run.validation_limit=6", "--run.test_limit=5", "--run.save_every=2", "--data.limit=50", "--run.keep=9",
    "--optimizer.lr=1e-4", "--algorithm.minibatches=1", "--run.samples=16", "--rollout.temperature=1",
)  # fmt: skip


def torchrun(*args: str, processes: int = 2, rendezvous: tuple[str, ...] = ("--standalone",)) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", *rendezvous, f"--nproc-per-node={processes}"]
    return [*run, *map(str, args)]


def environment() -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), *sys.path]),
    }  # fmt: skip


def launch(*args: str, **how) -> subprocess.CompletedProcess:
    return subprocess.run(
        torchrun(*args, **how), capture_output=True, text=True, timeout=240, env=environment(), check=False
    )


# --- gradients --------------------------------------------------------------------------------------------------------


def make_config(surrogate, aggregation, **algorithm) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig("tiny-base", autocast="none"),
        algorithm=AlgorithmConfig(surrogate=surrogate, aggregation=aggregation, **algorithm),
        rollout=RolloutConfig(prompts=8, group_size=4, max_completion_tokens=20, temperature=0.7),
        optimizer=OptimizerConfig(name="sgd", lr=0.1, max_grad_norm=0.5, microbatch_tokens=150),
        run=RunConfig(max_steps=100),
    )


def make_rows() -> tuple[Rollout, torch.Tensor]:
    """32 rows of prompts and completions of all lengths, a quarter of the groups with advantages 0."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 21, (32,), generator=generator)
    prompts = torch.randint(3, 12, (8,), generator=generator).repeat_interleave(4)
    ids = torch.randint(5, 500, (8, 12), generator=generator).repeat_interleave(4, dim=0)
    advantages = torch.randn(32, generator=generator)
    advantages[4:8] = advantages[28:] = 0
    return Rollout(
        ids,
        torch.arange(12) >= 12 - prompts[:, None],
        torch.randint(5, 500, (32, 20), generator=generator),
        torch.arange(20) < lengths[:, None],
        lengths < 20,
        [""] * 32,
    ), advantages


CASES = {
    "PSPO, dapo": make_config(PSPO(0.3), "dapo", epochs=2, minibatches=2),
    "Clip, grpo": make_config(Clip(), "grpo", epochs=2),
    "NoClip, dr_grpo": make_config(NoClip(), "dr_grpo", epochs=2, minibatches=2, beta=0.1),
    "P3O, grpo": make_config(P3O(), "grpo", epochs=1, minibatches=2),
    "SAPO, dr_grpo": make_config(SAPO(), "dr_grpo", epochs=2),
    "TOPR, dapo": make_config(TOPR(), "dapo", epochs=2, minibatches=2),
    "checkpointed": replace(
        make_config(PSPO(), "grpo", epochs=2),
        model=ModelConfig("tiny-base", autocast="none", gradient_checkpointing=True),
    ),
    "untied": replace(make_config(SAPO(), "grpo", epochs=2), model=ModelConfig("untied", autocast="none")),
    "once a step": replace(
        make_config(SAPO(), "dr_grpo", epochs=2), distributed=DistributedConfig("fsdp2", gather="step")
    ),
    "once a step, untied, bf16": replace(
        make_config(SAPO(), "grpo", epochs=2),
        model=ModelConfig("untied", autocast="bf16"),
        distributed=DistributedConfig("fsdp2", gather="step"),
    ),
    "bf16": replace(make_config(Clip(), "dapo", epochs=2), model=ModelConfig("tiny-base", autocast="bf16")),
}


def alone(config: TrainConfig) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """One process, one microbatch per minibatch."""
    config = replace(config, optimizer=replace(config.optimizer, microbatch_tokens=10**6))
    policy = load_policy(config.model, CPU)
    reference = load_policy(config.model, CPU).requires_grad_(False) if config.algorithm.beta > 0 else None
    optimizer = torch.optim.SGD(policy.parameters(), lr=config.optimizer.lr)
    learner = Learner(policy, reference, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
    metrics = update(learner, *make_rows(), config)
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}, metrics


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """CASES, the model of "untied" in a folder."""
    folder = str(tmp_path_factory.mktemp("models") / "untied")
    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=512, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=64,
        )
    ).save_pretrained(folder)  # fmt: skip
    return {
        name: replace(config, model=replace(config.model, name_or_path=folder)) if "untied" in name else config
        for name, config in CASES.items()
    }


@pytest.fixture(scope="module", params=STRATEGIES)
def results(request, cases, tmp_path_factory):
    """What two ranks computed, all cases in one launch for each strategy."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = load_tokenizer(ModelConfig("tiny-base"))
    policy = load_policy(ModelConfig("tiny-base"), CPU)
    texts = [
        "Tom has 5 apples and eats 2. How many are left?",
        "What is 3 + 4?",
        "1 + 1",
        "Ann buys 3 pens for $2 each.",
    ]
    prompts = {
        "prompts": encode_prompts(tokenizer, texts),
        "tokenizer": tokenizer,
        "sampling": Sampling(stop_token_ids(policy, tokenizer), tokenizer.pad_token_id, 1.0, 0.9),
        "config": make_config(PSPO(), "dapo"),
    }
    synced = replace(prompts["config"], distributed=DistributedConfig("fsdp2", rollout="synced"))
    training = {name: {"config": config, "rows": make_rows()} for name, config in cases.items()}
    torch.save(training | {"rollout": prompts, "synced": prompts | {"config": synced}}, folder / "cases.pt")
    done = launch(TESTS / "distributed_worker.py", folder / "cases.pt", folder / "out.pt", request.param)
    assert done.returncode == 0, done.stderr
    return request.param, torch.load(folder / "out.pt", weights_only=False), prompts


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_take_the_steps_of_one(results, cases, name):
    """The same weights, by microbatches of any size, and the same metrics."""
    _, computed, _ = results
    weights, metrics = alone(cases[name])
    start = dict(load_policy(cases[name].model, CPU).named_parameters())
    moved = max((weights[n] - start[n].detach()).abs().max() for n in weights)
    assert moved > 1e-3
    for n, expected in weights.items():
        tolerance = 0.2 if "bf16" in name else 1e-4  # other layouts round otherwise
        torch.testing.assert_close(computed[name]["weights"][n], expected, rtol=0, atol=float(moved) * tolerance)
    assert len(metrics) == len(computed[name]["metrics"])
    for step, expected in zip(computed[name]["metrics"], metrics, strict=True):
        assert step == pytest.approx(
            expected, rel=0.1 if "bf16" in name else 1e-3, abs=2e-2 if "bf16" in name else 1e-4
        )


def test_weights_are_gathered_and_gradients_reduced_for_each_microbatch_or_once_a_step(results):
    strategy, computed, _ = results
    if strategy == "ddp":
        pytest.skip("nothing is sharded")
    often, once = (computed[name]["collectives"] for name in ("SAPO, dr_grpo", "once a step"))
    sharded = 5  # modules: four layers, and the model with its embeddings
    steps = 2
    microbatches = often["_reduce_scatter_base_"] / sharded / steps
    assert microbatches >= 3
    assert once["_reduce_scatter_base_"] == sharded * steps
    assert once["_allgather_base_"] == (sharded + microbatches - 1) * steps  # the embeddings for each
    assert often["_allgather_base_"] == (2 * (sharded - 1) + 1) * microbatches * steps  # forward and backward


def test_ranks_roll_out_at_their_own_pace_what_one_process_would(results):
    strategy, computed, case = results
    policy = load_policy(ModelConfig("tiny-base"), CPU)
    for name in ("rollout", "synced"):
        for rank in range(2):
            synced = name == "synced" and strategy == "fsdp2"
            sampling = replace(
                case["sampling"],
                max_completion_tokens=20 if synced else 8 + 12 * rank,
                decoder="hf" if synced else "pspo",
            )
            torch.manual_seed(rank)
            expected = generate(policy, case["tokenizer"], case["prompts"][rank::2], sampling, 2)
            completions = torch.tensor(computed[name]["completions"][rank])
            width = expected.completion_ids.shape[1]  # in step, a rank goes on until the other has ended
            assert torch.equal(completions[:, :width], expected.completion_ids)
            assert bool((completions[:, width:] == case["sampling"].pad_id).all())


def test_what_is_exported_are_the_weights(results):
    strategy, computed, _ = results
    weights = computed["rollout"]["exported"]
    if strategy == "ddp":
        assert weights == {}
    else:
        expected = load_policy(ModelConfig("tiny-base"), CPU).state_dict()
        assert weights.keys() <= expected.keys()
        for name, value in weights.items():
            assert torch.equal(value, expected[name]), name


def test_what_ranks_say_to_each_other(results):
    _, computed, _ = results
    pooled = computed["talk"].pop("pool")
    assert pooled[:2] == ([0, 1], {"a": [10, 11]})
    assert pooled[2].tolist() == [0, 0, 1, 1]
    assert computed["talk"] == {
        "highest": 3, "own": [[0, 1], [2, 3]], "from_main": "rank 0", "refused": ["ValueError", "SystemExit"],
    }  # fmt: skip


# --- the command ------------------------------------------------------------------------------------------------------


def train(output: Path, strategy: str, *args: str, **how) -> subprocess.CompletedProcess:
    switches = (*SMALL, f"--distributed.strategy={strategy}", f"--run.output_dir={output}", *args)
    return launch("-m", "pspo.train", *switches, **how)


def contents(run: Path) -> dict[str, object]:
    """Everything that has to be the same."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "metrics": [{k: v for k, v in line.items() if not k.startswith("seconds/")} for line in lines],
        "samples": (run / "samples.jsonl").read_text(),
        **{name: (run / name / "model.safetensors").read_bytes() for name in ("best", "final")},
    }


@pytest.fixture(scope="module", params=STRATEGIES)
def whole(request, tmp_path_factory):
    """A run of two ranks that nothing happened to."""
    run = tmp_path_factory.mktemp("runs") / request.param
    done = train(run, request.param)
    assert done.returncode == 0, done.stderr
    return request.param, run, done


def test_one_rank_talks_and_the_model_loads(whole):
    _, run, done = whole
    assert done.stdout.count("model   tiny-base") == done.stdout.count("greedy, held-out") == 1
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [sum(s["step"] == step for s in samples) for step in (2, 8)] == [4, 4]  # of both ranks' prompts
    assert len({s["prompt"] for s in samples if s["step"] == 2}) == 4
    policy = load_policy(ModelConfig(str(run / "final")), CPU)
    assert policy.config.architectures == ["Qwen2ForCausalLM"]


FIRST: dict[str, dict] = {}  # by strategy, the first line of metrics


def test_both_strategies_are_one_run(whole):
    """The first rollout is the same to the last token, and its steps to rounding."""
    strategy, run, _ = whole
    FIRST[strategy] = contents(run)["metrics"][0]
    for first in FIRST.values():
        assert first == pytest.approx(FIRST[strategy], **CLOSE)


def test_a_full_disk_ends_the_job_in_one_line_and_it_goes_on_when_there_is_room(whole, tmp_path):
    """Room for what rank 0 writes before, not for a rank's shards: files may have 4.6 MB."""
    strategy, run, _ = whole
    if strategy == "ddp":
        pytest.skip("it saves as one process does")
    output = tmp_path / "run"
    command = torchrun("-m", "pspo.train", *SMALL, f"--distributed.strategy={strategy}", f"--run.output_dir={output}")
    done = subprocess.run(["bash", "-c", f"ulimit -f 4500; exec {shlex.join(command)}"], capture_output=True, text=True,
                          timeout=120, env=environment(), check=False)  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.count(f"pspo.train: cannot save {output / 'checkpoints/step-000002'}") == 1
    assert list((output / "checkpoints").iterdir()) == []
    done = train(output, strategy)
    assert done.returncode == 0, done.stderr
    assert contents(output) == contents(run)


def cut_off(run: Path, tmp_path: Path, steps: int) -> Path:
    """A copy of a finished run as it was when it had saved so many steps."""
    again = tmp_path / "again"
    shutil.copytree(run, again)
    (again / "summary.json").unlink()
    shutil.rmtree(again / "final")
    for folder in (again / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > steps:
            shutil.rmtree(folder)
    return again


def test_a_job_goes_on_exactly(whole, tmp_path):
    strategy, run, _ = whole
    if strategy == "fsdp2":
        pytest.skip("the tests of its faults show it")
    again = cut_off(run, tmp_path, 6)
    done = train(again, strategy)
    assert done.returncode == 0, done.stderr
    assert contents(again) == contents(run)


def ranks_of(job: subprocess.Popen) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(job.pid)], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]


def wait_for(file: Path, job: subprocess.Popen) -> None:
    end = time.monotonic() + 120
    while not file.exists() and job.poll() is None and time.monotonic() < end:
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_rank_that_dies_or_is_told_to_stop_ends_the_job(whole, tmp_path, number):
    """Dead: the others end, too, soon. Told: all save, and the job goes on to the same end."""
    strategy, run, _ = whole
    if strategy == "ddp":
        pytest.skip("it dies, is stopped and saves in the same way")
    output = tmp_path / "run"
    switches = (*SMALL, f"--distributed.strategy={strategy}", f"--run.output_dir={output}", "--distributed.timeout=30")
    with subprocess.Popen(torchrun("-m", "pspo.train", *switches), env=environment(), stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True, start_new_session=True) as job:  # fmt: skip
        wait_for(output / "metrics.jsonl", job)
        os.kill(ranks_of(job)[1], number)
        began = time.monotonic()
        _, err = job.communicate(timeout=90)
        assert job.returncode != 0, err
    assert time.monotonic() - began < 60
    if number == signal.SIGTERM:
        steps = [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]
        newest = max(int(folder.name.removeprefix("step-")) for folder in (output / "checkpoints").glob("step-*"))
        assert newest == steps[-1]
        assert "SIGTERM: stopping after this rollout, then saving" in err
    done = train(output, strategy)
    assert done.returncode == 0, done.stderr
    assert contents(output) == contents(run)


def test_plain_sgd_goes_on_exactly(tmp_path):
    """Which keeps nothing of its own."""
    run = tmp_path / "run"
    switches = ("--optimizer.name=sgd", "--run.max_steps=4", "--run.validate_every=0", "--run.test_limit=0")
    assert train(run, "fsdp2", *switches).returncode == 0
    expected = (run / "final/model.safetensors").read_bytes()
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints/step-000004")
    done = train(run, "fsdp2", *switches)
    assert done.returncode == 0, done.stderr
    assert "from step-000002" in done.stdout
    assert (run / "final/model.safetensors").read_bytes() == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_of_an_optimizer_that_has_not_moved_yet(tmp_path):
    """As of a run that was told to stop before its first step."""
    from pspo.distributed import Scalars, load_shards, save_shards

    kept, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (kept, other)]
    save_shards(tmp_path / "shards", kept, optimizers[0])
    load_shards(tmp_path / "shards", other, optimizers[1])
    Scalars(optimizers[1]).load_state_dict(Scalars(optimizers[0]).state_dict())
    assert torch.equal(kept.weight, other.weight)
    for model, optimizer in ((kept, optimizers[0]), (other, optimizers[1])):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    assert torch.equal(kept.weight, other.weight)


@pytest.mark.parametrize("what", ["metadata", "shard", "no shard"])
def test_a_damaged_sharded_checkpoint_is_named_and_passed_over(whole, tmp_path, what):
    """Its manifest made again to match: only loading tells."""
    strategy, run, _ = whole
    if strategy == "ddp":
        pytest.skip("its checkpoints are those of one process: test_fuzz.py")
    again = cut_off(run, tmp_path, 8)
    newest = again / "checkpoints/step-000008"
    file = newest / "shards" / (".metadata" if what == "metadata" else "__1_0.distcp")
    manifest = json.loads((newest / "manifest.json").read_text())
    if what == "no shard":
        file.unlink()
        del manifest[str(file.relative_to(newest))]
    else:
        file.write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
        manifest[str(file.relative_to(newest))] = describe(file)
    (newest / "manifest.json").write_text(json.dumps(manifest))
    done = train(again, strategy)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "passed over" in line]
    assert "step-000008 is damaged: the model is not what a run saves" in line
    assert contents(again) == contents(run)


def test_another_number_of_ranks_goes_on(whole, tmp_path):
    """From the same weights and optimizer; the tokens drawn differ."""
    strategy, run, _ = whole
    if strategy == "ddp":
        pytest.skip("it has nothing to spread anew")
    again = cut_off(run, tmp_path, 4)
    done = train(again, strategy, processes=1)
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stderr
    metrics, expected = contents(again)["metrics"], contents(run)["metrics"]
    assert metrics[:2] == expected[:2]
    assert [line["step"] for line in metrics] == [2, 4, 6, 8]
    assert metrics[2]["lr"] == expected[2]["lr"]


def test_a_payload_in_a_sharded_checkpoint_is_not_executed(whole, tmp_path):
    strategy, run, _ = whole
    if strategy == "ddp":
        pytest.skip("its checkpoints are those of one process: test_fuzz.py")
    from pspo.distributed import TensorReader

    shards = tmp_path / "shards"
    shutil.copytree(run / "checkpoints/step-000008/shards", shards)
    assert TensorReader(shards).read_metadata().state_dict_metadata
    marker = tmp_path / "executed"
    (shards / ".metadata").write_bytes(f"cos\nsystem\n(S'touch {marker}'\ntR.".encode())
    with pytest.raises(Exception, match=r"os\.system in the metadata"):
        TensorReader(shards).read_metadata()
    assert not marker.exists()


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_one_rank_of_a_machine_says_what_the_switches_are_wrong_about(monkeypatch, capsys, rank, lines):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(SystemExit):
        pspo.train.main(["--rollout.prompts=0"])
    assert capsys.readouterr().err.count("rollout.prompts must be") == lines


def test_what_does_not_fit_is_refused_in_one_line(tmp_path):
    done = train(tmp_path / "run", "ddp", "--rollout.prompts=3")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "pspo.train: error" in line]
    assert len(said) == 1
    assert "--rollout.prompts 3 must be a multiple of algorithm.minibatches x ranks (2)" in said[0]
    assert not (tmp_path / "run").exists()


def test_a_launched_command_ends_with_its_exit_code_and_all_it_said():
    """It ends at once, without Python's shutting down."""
    script = """
import atexit, sys
from pspo.distributed import run
class Late:
    def __del__(self):
        print("Python shuts down")
late = Late()
atexit.register(print, "a tracker says goodbye")
run(lambda: (print("said"), sys.exit({})))
"""
    for code in (0, 3):
        done = subprocess.run(
            [sys.executable, "-c", script.format(code or "")], check=False, capture_output=True, text=True,
            env=environment() | {"TORCHELASTIC_RUN_ID": "1"},
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (code, "said\na tracker says goodbye\n", "")


def test_strategies_and_launchers_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(ValueError, match=r"--distributed\.strategy fsdp2 needs torchrun"):
        start("fsdp2", 60)
    monkeypatch.setattr(pspo.distributed, "world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"--distributed\.strategy none under torchrun"):
        check_strategy("none")


def test_two_agents_are_one_job(whole, tmp_path):
    """As on two nodes: two launchers that meet at an address, one killed in the middle, the job gone on with."""
    strategy, run, _ = whole
    if strategy == "ddp":
        pytest.skip("one strategy will do")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    output = tmp_path / "run"
    switches = (*SMALL, f"--distributed.strategy={strategy}", f"--run.output_dir={output}", "--distributed.timeout=30")

    def nodes() -> list[subprocess.Popen]:
        rendezvous = (
            "--nnodes=2",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={address}",
            "--rdzv-id=job",
            "--max-restarts=0",
        )
        command = torchrun("-m", "pspo.train", *switches, processes=1, rendezvous=rendezvous)
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        return [subprocess.Popen(command, env=environment(), **pipes) for _ in range(2)]

    job = nodes()
    wait_for(output / "checkpoints/step-000004", job[0])
    for process in [*ranks_of(job[1]), job[1].pid]:  # a node that is gone
        os.kill(process, signal.SIGKILL)
    began = time.monotonic()
    assert all(node.wait(timeout=120) != 0 for node in job)
    assert time.monotonic() - began < 90
    job = nodes()
    errors = [node.communicate(timeout=240)[1] for node in job]
    assert [node.returncode for node in job] == [0, 0], errors
    assert contents(output) == contents(run)


@pytest.mark.parametrize(("ranks", "synced", "chunks"), [(1, False, 1), (2, False, 2), (3, False, 3), (3, True, 1)])
def test_every_rank_has_a_part_of_a_validation(monkeypatch, ranks, synced, chunks):
    asked = {}
    monkeypatch.setattr(pspo.train, "world_size", lambda: ranks)
    monkeypatch.setattr(pspo.train, "rolling_out", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(pspo.train, "evaluate", lambda *_, **how: asked.update(how))
    lengths = [5, 9, 7, 30, 12, 8, 8]
    prompts = Prompts([None] * 7, [[0] * length for length in lengths])
    setup = SimpleNamespace(tokenizer=None)
    evaluate_by_all(TrainConfig(), setup, None, prompts, Sampling([0], 0, synced=synced), "validate")
    assert len(pspo.evaluate.__main__.chunks(lengths, 1, 20, 10**6, asked["max_rows"])) == chunks


def test_evaluation_uses_the_ranks(whole, tmp_path):
    strategy, run, _ = whole
    if strategy == "fsdp2":
        pytest.skip("it is done the same way whatever trained the model")
    command = ["-m", "pspo.evaluate", f"--model.name_or_path={run / 'final'}", "--data.limit=30",
               "--eval.temperatures=[0.0,1.0]", "--eval.samples=3", "--eval.max_completion_tokens=16",
               "--eval.max_tokens=1500"]  # fmt: skip
    one = subprocess.run([sys.executable, *command, f"--run.output_dir={tmp_path / 'one'}"], capture_output=True,
                         text=True, timeout=120, env=environment(), check=False)  # fmt: skip
    assert one.returncode == 0, one.stderr
    two = launch(*command, f"--run.output_dir={tmp_path / 'two'}")
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("results:") == 1
    for name in ("results.json", "completions.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
