"""The bridge to TRL: the same losses, the same weights after steps, a run that `pspo view` reads."""

import base64
import copy
import functools
import gzip
import json
import re

import pandas as pd
import pytest
import torch
from batches import SURROGATES, random_batch
from test_contracts import guide_lines
from torch.nn.utils import parameters_to_vector

from pspo.config import AlgorithmConfig, ModelConfig, OptimizerConfig, RolloutConfig, RunConfig, TrainConfig
from pspo.losses import PSPO, TOPR, Clip, Counts, aggregate
from pspo.model import ASSETS, load_policy, load_tokenizer
from pspo.rollout import Rollout
from pspo.update import Learner, update
from pspo_lab.report_command import main as report
from pspo_lab.view_command import main as view

trl = pytest.importorskip("trl", reason="needs TRL: pip install 'pspo[trl]'")

from datasets import Dataset

from pspo_bridge.trl import GRPOTrainer, Record, check_arguments, watched

GROUP = 4
LIMIT = 12
PROMPTS = ["Ann has 3 apples.", "Bob buys 14 pens and loses 5 of them."]


def by_length(completion_ids, **_):
    return [float(len(ids) % 3) for ids in completion_ids]


def make_trainer(folder, surrogate="PSPO", model=None, accumulation=1, callbacks=None, rewards=by_length, **arguments):
    rows = len(PROMPTS) * GROUP
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": rows // accumulation,
        "gradient_accumulation_steps": accumulation,
        "num_generations": GROUP,
        "max_completion_length": LIMIT,
        "num_iterations": 2,
        "max_steps": 2,
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "temperature": 0.8,
    }
    config = ModelConfig()
    prompts = Dataset.from_dict({"prompt": PROMPTS * 12, "solution": ["3", "9"] * 12})
    kind = trl.GRPOTrainer if surrogate == "stock" else functools.partial(GRPOTrainer, surrogate=surrogate)
    return kind(
        model or load_policy(config, torch.device("cpu")),
        rewards,
        trl.GRPOConfig(**defaults | arguments),
        prompts,
        prompts.take(2),
        processing_class=load_tokenizer(config),
        callbacks=callbacks,
    )


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("trainer"), accumulation=2)
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    return trainer


def loss_inputs(mask, advantages, old_logprobs, tokens):
    """What TRL gives its loss of a batch, whose tokens themselves do not matter."""
    ids = torch.ones(mask.shape, dtype=torch.long)
    return {
        "prompt_ids": ids[:, :2],
        "prompt_mask": ids[:, :2],
        "completion_ids": ids,
        "completion_mask": mask.long(),
        "advantages": advantages[:, 0],
        "old_per_token_logps": old_logprobs,
        "num_items_in_batch": torch.tensor(tokens),
    }


@pytest.mark.parametrize("how", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("surrogate", SURROGATES, ids=repr)
def test_loss_and_gradient_are_ours(trainer, surrogate, how, monkeypatch):
    """TRL's real loss over two microbatches, its log-probs replaced, against the loss of the whole minibatch."""
    logprobs, old, advantages, mask = random_batch([12, 1, 7, 9, 3, 2, 11, 5], dtype=torch.float32)
    counts = Counts(int(mask.sum()), len(mask), LIMIT)
    ours = logprobs.clone().requires_grad_()
    losses = surrogate(ours, old, advantages, mask)
    expected = aggregate(losses, mask, how, counts)
    expected.backward()

    theirs = logprobs.clone().requires_grad_()
    monkeypatch.setattr(trainer, "surrogate", surrogate)
    monkeypatch.setattr(trainer, "loss_type", how)
    total = 0.0
    for rows in (slice(0, 4), slice(4, 8)):
        outputs = (theirs[rows], torch.zeros(4, 12), None)
        monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *_, o=outputs, **__: o)
        inputs = loss_inputs(mask[rows], advantages[rows], old[rows], counts.tokens)
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        total += loss.item()
    assert abs(total - expected.item()) < 1e-7 * aggregate(losses.abs(), mask, how, counts).item()
    assert torch.equal(theirs.grad, ours.grad)


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1},
        {"beta": 0.1, "use_bias_correction_kl": False},
        {"off_policy_mask_threshold": 0.05},
        {"top_entropy_quantile": 0.5},
        {"entropy_coef": 0.1},
        {"use_vllm": True},
        {"loss_type": "bnpo"},
        {"loss_type": "luspo"},
    ],
    ids=str,
)
def test_all_else_of_the_loss_is_what_trl_does(trainer, settings, monkeypatch):
    """Clip(0.2) through the bridge against TRL's own loss: value, gradient and metrics."""
    logprobs, old, advantages, mask = random_batch([12, 1, 7, 9], dtype=torch.float32)
    noise = torch.rand(5, 4, 12, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(trainer, "surrogate", Clip(0.2))
    for name, value in settings.items():
        owner = trainer.args if name == "use_bias_correction_kl" else trainer
        monkeypatch.setattr(owner, name, value, raising=False)
    monkeypatch.setattr(trainer, "_entropy_bonus_enabled", "entropy_coef" in settings)
    monkeypatch.setattr(trainer, "vllm_importance_sampling_correction", True, raising=False)
    results = []
    for loss_of in (GRPOTrainer._compute_loss, trl.GRPOTrainer._compute_loss):
        leaf = logprobs.clone().requires_grad_()
        outputs = (leaf, noise[0] - leaf, None)
        monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *_, o=outputs, **__: o)
        trainer._metrics["train"].clear()
        inputs = loss_inputs(mask, advantages, old, int(mask.sum())) | {
            "tool_mask": (noise[1] < 0.8).long(),
            "ref_per_token_logps": old + noise[2] - 0.5,
            "sampling_per_token_logps": old + noise[3] / 2,
            "importance_sampling_ratio": noise[4] + 0.5,
        }
        loss = loss_of(trainer, trainer.model, inputs)
        loss.backward()
        metrics = {name: values for name, values in trainer._metrics["train"].items() if "surrogate" not in name}
        results.append((loss.item(), leaf.grad, metrics))
    (loss, gradient, metrics), (their_loss, their_gradient, their_metrics) = results
    assert loss == pytest.approx(their_loss, rel=2e-7, abs=2e-7)
    torch.testing.assert_close(gradient, their_gradient, rtol=0, atol=2e-7 * their_gradient.abs().max().item())
    assert metrics == their_metrics


@pytest.mark.parametrize(("surrogate", "accumulation"), [(PSPO(), 1), (TOPR(), 4)], ids=repr)
def test_weights_after_two_iterations_are_those_of_update(tmp_path, surrogate, accumulation):
    model = load_policy(ModelConfig(), torch.device("cpu"))
    policy = copy.deepcopy(model)
    initial = copy.deepcopy(model)
    trainer = make_trainer(tmp_path, surrogate, model, accumulation)
    outputs = {}  # of the rollout that is trained on
    with watched(trainer, "_generate_and_score_completions", lambda rollout, *_: outputs.update(rollout)):
        trainer.train()
    mask = outputs["completion_mask"].bool()
    tokens = outputs["prompt_ids"], outputs["prompt_mask"].bool(), outputs["completion_ids"], mask
    rollout = Rollout(*tokens, terminated=torch.ones(len(mask)).bool(), texts=[""] * len(mask))
    config = TrainConfig(
        rollout=RolloutConfig(prompts=2, group_size=GROUP, max_completion_tokens=LIMIT, temperature=0.8, top_p=1.0),
        algorithm=AlgorithmConfig(surrogate=surrogate, epochs=2),
        optimizer=OptimizerConfig(name="sgd", lr=0.5, max_grad_norm=0.0),
        run=RunConfig(max_steps=2),
    )
    learner = Learner(policy, torch.optim.SGD(policy.parameters(), lr=0.5))
    steps = update(learner, rollout, outputs["advantages"], config)
    assert len(steps) == 2
    assert outputs["advantages"].abs().max() > 0.5

    theirs, ours, before = (parameters_to_vector(each.parameters()) for each in (model, policy, initial))
    assert (theirs - ours).norm() < 1e-5 * ours.norm()
    assert (theirs - ours).norm() < 1e-3 * (ours - before).norm()  # what another loss would miss by far


OPTIONS = [
    {},
    {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3},
    {"loss_type": "bnpo", "delta": 1.1},
    {"loss_type": "dr_grpo", "top_entropy_quantile": 0.2},
    {"loss_type": "luspo", "importance_sampling_level": "sequence", "top_entropy_quantile": 0.5},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "sapo"},
    {"loss_type": "vespo", "off_policy_mask_threshold": 1e-4},
    {"importance_sampling_level": "sequence", "beta": 0.1},
    {"beta": 0.1, "use_bias_correction_kl": True},
    {"off_policy_mask_threshold": 1e-4, "mask_truncated_completions": True},
    {"entropy_coef": 0.1},
    {"accumulation": 2, "loss_type": "grpo"},
    {"surrogate": None, "scale_rewards": "none", "loss_type": "cispo"},
    {"use_vllm": True, "beta": 0.1},
]


def correct_for_an_engine(trainer):
    """Make TRL multiply the losses by ratios to an engine that there is not."""
    compute_loss = trainer._compute_loss
    trainer.vllm_importance_sampling_correction = True

    def corrected(model, inputs):
        ratios = torch.rand(inputs["completion_ids"].shape, generator=torch.Generator().manual_seed(3)) + 0.5
        sampled = inputs["old_per_token_logps"] - ratios.log()
        trainer.use_vllm = True
        loss = compute_loss(model, inputs | {"importance_sampling_ratio": ratios, "sampling_per_token_logps": sampled})
        trainer.use_vllm = False
        return loss

    trainer._compute_loss = corrected


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_record_changes_no_bit_and_its_weights_are_the_gradients(tmp_path, options):
    """Weight times gradient of the log-prob, summed over the tokens, is the gradient of each step."""
    options = {"surrogate": "stock", "accumulation": 1} | options
    is_corrected = options.pop("use_vllm", False)
    stock = make_trainer(tmp_path / "stock", **options | {"surrogate": "stock"})
    if is_corrected:
        correct_for_an_engine(stock)
    stock.train()

    steps = []  # of each the model before it, the inputs of its microbatches, and its gradient

    class Gradients(trl.trainer.grpo_trainer.TrainerCallback):
        def on_pre_optimizer_step(self, *_, model, **__):
            steps[-1]["gradient"] = parameters_to_vector(weights.grad for weights in model.parameters())

    trainer = make_trainer(tmp_path / "recorded", **options, callbacks=[Gradients()])
    Record(tmp_path / "run", groups=99).attach(trainer)
    if is_corrected:
        correct_for_an_engine(trainer)

    def see(_, model, inputs):
        if not steps or "gradient" in steps[-1]:
            steps.append({"model": copy.deepcopy(model), "inputs": []})
        steps[-1]["inputs"].append(inputs)

    with watched(trainer, "_compute_loss", see):
        trainer.train()

    for ours, theirs in zip(trainer.model.parameters(), stock.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert [*map(timeless, trainer.state.log_history)] == [*map(timeless, stock.state.log_history)]
    if "entropy_coef" in options:  # a gradient that is not the log-probs'
        return
    tokens = pd.read_parquet(tmp_path / "run/tokens.parquet")
    assert len(steps) == tokens["step"].nunique() == 2
    for step, record in enumerate(steps, start=1):
        model = record["model"]
        model.zero_grad()
        own = tokens[tokens["step"] == step]
        for inputs in record["inputs"]:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            width = inputs["completion_ids"].shape[1]
            logprobs, *_ = trl.GRPOTrainer._get_per_token_logps_and_entropies(trainer, model, ids, mask, width)
            weights = torch.zeros(len(PROMPTS) * GROUP, width)
            weights[own["row"].to_numpy(), own["position"].to_numpy()] = torch.tensor(own["weight"].to_numpy())
            (weights[inputs["drawn"]] / len(own) * logprobs).sum().backward()
        gradient = parameters_to_vector(weights.grad for weights in model.parameters())
        assert record["gradient"].norm() > 0
        assert (gradient - record["gradient"]).norm() < 1e-5 * record["gradient"].norm()


def timeless(record):
    return {name: value for name, value in record.items() if not re.search("time|second|epoch", name)}


def lines_of(file):
    return [timeless(json.loads(line)) for line in file.read_text().splitlines()]


def test_a_resumed_run_goes_on_in_its_record(tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-3}
    Record(tmp_path / "run").attach(trainer := make_trainer(tmp_path / "checkpoints", "stock", **options))
    trainer.train()
    names = ("metrics.jsonl", "samples.jsonl")
    whole = [lines_of(tmp_path / "run" / name) for name in names]
    tokens = pd.read_parquet(tmp_path / "run/tokens.parquet")
    with (tmp_path / "run/samples.jsonl").open("a") as lines:
        lines.write('{"step": ')  # killed while it wrote
    Record(tmp_path / "run").attach(resumed := make_trainer(tmp_path / "checkpoints", "stock", **options))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoints/checkpoint-2"))
    for weights in zip(trainer.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(*weights)
    assert [lines_of(tmp_path / "run" / name) for name in names] == whole
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "run/tokens.parquet"), tokens)


def test_a_recorded_run_is_read_as_one_of_pspo(tmp_path, monkeypatch, capsys):
    run = tmp_path / "runs" / "trl"
    options = {"max_steps": 4, "learning_rate": 0.05, "eval_strategy": "steps", "eval_steps": 2}
    trainer = make_trainer(tmp_path, PSPO(0.25), callbacks=[record := Record(run, groups=1)], **options)
    record.attach(trainer)  # once more
    trainer.model.generation_config.eos_token_id = [5, trainer.processing_class.eos_token_id]
    trainer.train()

    metrics = lines_of(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    for first, last in (metrics[:2], metrics[2:]):  # statistics are of a rollout's last step
        assert "ratio_max" not in first
        assert last["ratio_max"] > 1
        assert last["slope"] == pytest.approx(0.75, rel=1e-4)
        assert last["validation_reward"] == last["validation_reward/by_length"] >= 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["optimizer_steps"], summary["tokens"]) == (4, metrics[2]["tokens"])
    samples = lines_of(run / "samples.jsonl")
    assert [(sample["step"], sample["sample"]) for sample in samples] == [(s, i) for s in (2, 4) for i in range(GROUP)]
    assert all(sample["reward"] == sample["tokens"] % 3 for sample in samples)
    assert {(sample["prompt"], sample["gold"]) for sample in samples} <= set(zip(PROMPTS, ["3", "9"], strict=True))
    tokens = pd.read_parquet(run / "tokens.parquet")
    assert tokens.groupby("step").size().sum() == 2 * sum(sample["tokens"] for sample in samples)
    ratio = (tokens["logprob"] - tokens["old_logprob"]).map(torch.tensor).map(torch.exp).map(float)
    assert tokens["weight"].to_numpy() == pytest.approx((-0.75 * ratio * tokens["advantage"]).to_numpy(), rel=1e-4)
    row = tokens[(tokens["step"] == 1) & (tokens["sample"] == 0)].sort_values("position")
    assert "".join(row["text"]).startswith(samples[0]["completion"])

    monkeypatch.setenv("HOME", str(tmp_path))
    view(["~/runs/trl", "--output", "~/page.html"])
    report(["~/runs/trl", "--output_dir", "~/report"])
    assert capsys.readouterr().err == ""
    (packed,) = re.findall(r'id="data">([\w+/=]+)</script>', (tmp_path / "page.html").read_text())
    page = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert [len(group["completions"]) for group in page["groups"]] == [GROUP, GROUP]
    assert {group["prompt"] for group in page["groups"]} <= set(PROMPTS)
    assert page["runs"][0]["row"]["method"] == "PSPO"
    assert page["runs"][0]["curve"] is not None


@pytest.mark.parametrize("per_generation", [1, 3])
def test_a_record_of_rollouts_that_end_inside_a_step(tmp_path, per_generation):
    """Each token of a recorded completion once; truncated ones that TRL masks, and rewards that are None, too."""

    def unknown(completion_ids, **_):
        return [None] * len(completion_ids)

    run = tmp_path / "run"
    record = Record(run, groups=99)
    record.rollout.microbatches.append({})  # of a run that was interrupted
    options = {"accumulation": 2, "steps_per_generation": per_generation, "num_iterations": 1, "max_steps": 3}
    options |= {"rewards": [by_length, unknown], "mask_truncated_completions": True}
    trainer = make_trainer(tmp_path, callbacks=[record], **options)
    trainer.train()
    samples = lines_of(run / "samples.jsonl")
    assert len(samples) == 3 * 2 * GROUP
    assert all(sample["rewards"] == {"by_length": sample["reward"], "unknown": None} for sample in samples)
    assert any(sample["truncated"] and sample["tokens"] == LIMIT for sample in samples)
    tokens = pd.read_parquet(run / "tokens.parquet")
    assert len(tokens) == sum(sample["tokens"] for sample in samples if not sample["truncated"])
    with pytest.raises(ValueError, match="groups must be at least 1"):
        Record(tmp_path / "none", groups=0)
    with pytest.raises(ValueError, match="holds a run already"):
        trainer.train()
    with pytest.raises(ValueError, match=r"records no trainer.*attach"):
        make_trainer(tmp_path, "stock", callbacks=[Record(run)]).train()


@pytest.mark.parametrize(
    ("surrogate", "arguments", "message"),
    [
        ({"class_path": "PSPO", "init_args": {"epsilon": 0.1}}, {}, r"PSPO\(alpha: float = 0.1\).*epsilon"),
        ("PSPO", {"epsilon": 0.1}, r"epsilon=0.1 has no effect here"),
        (Clip(0.2, 0.28), {"epsilon_high": 0.3}, r"epsilon_high=0.3 has no effect here"),
        ("PSPO", {"vespo_k_pos": 1.0}, r"vespo_k_pos=1.0 has no effect here"),
        ("PSPO", {"loss_type": "sapo"}, "loss_type='sapo' is a loss of TRL's"),
        ("PSPO", {"use_liger_kernel": True}, "use_liger_kernel=True computes a loss of its own"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(tmp_path, surrogate, arguments, message):
    with pytest.raises(ValueError, match=message) as refusal:
        make_trainer(tmp_path, surrogate, **arguments)
    assert "\n" not in str(refusal.value)
    for surrogate in (Clip(0.3), Clip(0.2, 0.3)):  # which says the same
        check_arguments(trl.GRPOConfig(use_cpu=True, bf16=False, epsilon_high=0.3), surrogate)


def test_the_lines_of_the_guide_make_a_trainer(tmp_path, monkeypatch):
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    prompts = Dataset.from_dict({"prompt": chats, "solution": [""] * 2})
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: prompts)
    monkeypatch.setattr(GRPOTrainer, "train", lambda trainer: None)
    lines = guide_lines("datasets").replace("Qwen/Qwen2.5-0.5B-Instruct", str(ASSETS / "tiny-base"))
    exec(lines.replace("GRPOConfig(num", "GRPOConfig(use_cpu=True, bf16=False, num"), names := {})
    assert names["trainer"].surrogate == PSPO(0.1)
    assert any(isinstance(callback, Record) for callback in names["trainer"].callback_handler.callbacks)


def test_another_way_to_the_loss_is_refused(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", lambda *_: torch.zeros(()))
    with pytest.raises(RuntimeError, match="pip install trl=="):
        trainer._compute_loss(trainer.model, {"advantages": torch.zeros(2)})
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer._compute_loss(trainer.model, {"advantages": torch.zeros(2)})
    assert "_get_per_token_logps_and_entropies" not in vars(trainer)  # nobody watches it any more

    def compute_loss(*_, **__):  # as of Unsloth
        return torch.zeros(())

    monkeypatch.setattr(trl.GRPOTrainer, "compute_loss", compute_loss)
    for make in (lambda: make_trainer(tmp_path), lambda: Record(tmp_path / "run").attach(trainer)):
        with pytest.raises(ValueError, match="compute_loss of GRPOTrainer is test_trl's, not TRL's"):
            make()
