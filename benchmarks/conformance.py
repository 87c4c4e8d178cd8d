"""Loss and gradient of all that TRL 1.16 and verl 0.9.1 share with pspo, on the same tensors.

    python3 -m venv trl-env && trl-env/bin/pip install -c constraints.txt -e '.[peers]'
    trl-env/bin/pip install --target verl-only --no-deps verl==0.9.1     # it wants another transformers than trl
    PYTHONPATH=verl-only trl-env/bin/python -m benchmarks.conformance   # the tables of conformance.md, 1 minute

Log-probs are given, float32; the gradient is with respect to them. A minibatch of 8 rows of uneven lengths, one masked
out and one with advantage 0, is accumulated over 2 microbatches of unequal token counts.

TRL: `GRPOTrainer._compute_loss` of a real trainer whose log-probs are replaced; correction weights and advantages come
from its `_generate_and_score_completions`, generation replaced. verl: the registered functions of
`verl.trainer.ppo.core_algos` and `rollout_corr_helper`, from the wheel's files; its packages are not initialised (they
import ray), and `tensordict`, `verl.workers.config` and the like are stubs.

Last, some of TRL's through a whole model, with the log-probs of each library: gradients of its parameters, without
adapters and with LoRA's, TRL's on a `PeftModel`.

Exits with 1 if a loss or gradient that should agree differs by more than 1e-6 of the largest, through a model 1e-5.
"""

import copy
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, metadata, util
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

import pspo_bridge.trl
from pspo.losses import (
    ASPO,
    CEGPPO,
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    P3O,
    PSPO,
    REINFORCE,
    SAPO,
    SPO,
    TOPR,
    VESPO,
    Clip,
    Counts,
    NoClip,
    Surrogate,
    aggregate,
)
from pspo.losses.terms import EntropyBonus, KLPenalty, LossInputs, OffPolicyMask, SamplerCorrection
from pspo.model import token_logprobs
from pspo.rollout import gdpo, group_relative_advantages

TOLERANCE = 1e-6
MODEL_TOLERANCE = 1e-5
ROWS = 8
MICROBATCH = 4
T = 12
LIMIT = 16  # the configured completion limit
BRIDGED = [
    PSPO(), NoClip(), Clip(), P3O(4.0, 0.1), SAPO(), TOPR(), REINFORCE(), CISPO(None, 0.2), GSPO(0.1, 0.2), GMPO(0.1),
    VESPO(), DPPO(), SPO(), DRO(0.5), CEGPPO(0.1), ASPO(0.1),
]  # fmt: skip
LENGTHS = torch.tensor([12, 1, 7, 9, 3, 0, 11, 5])[:, None]  # row 5: masked out
REWARDS = [1.0, 0.05, 0.0, 0.0, 1.0, 1.0, 0.0, 0.05]
CAP = 1.5
FLOOR = 0.9  # of corrections whose name ends in it
FORMAT = [0.5, -3.0, 0.5, 2.0, 0.5, 0.5, 0.5, 8.0]  # of a second reward function
VOCABULARY = 97  # of the model
TEMPERATURE = 0.6

Batch = dict[str, Tensor]


def make_batch() -> Batch:
    """logprobs, old, ref and sampler log-probs (B, T) below 0, advantages (B, 1), mask (B, T)."""
    generator = torch.Generator().manual_seed(1)

    def noise(spread: float) -> Tensor:
        return spread * torch.randn(ROWS, T, generator=generator)

    old = -0.02 - 3 * torch.rand(ROWS, T, generator=generator)
    moved = {
        name: (old + noise(spread)).clamp(max=-0.01) for name, spread in (("new", 0.4), ("ref", 0.7), ("sampler", 0.3))
    }
    advantages = torch.randn(ROWS, 1, generator=generator) + 0.5
    advantages[3] = 0.0
    return {"old": old, **moved, "advantages": advantages, "mask": torch.arange(T) < LENGTHS}


BATCH = make_batch()
COUNTS = Counts(int(BATCH["mask"].sum()), ROWS, LIMIT)
Loss = Callable[[Batch], Tensor]  # of a microbatch, its share of the minibatch's loss


def loss_and_gradient(
    loss: Loss, bounds: tuple[int, ...] = (0, MICROBATCH, ROWS), batch: Batch = BATCH
) -> tuple[float, Tensor]:
    """Accumulated over the microbatches between the bounds; the gradient is (B, T)."""
    leaf = batch["new"].clone().requires_grad_()
    total = 0.0
    for first, last in pairwise(bounds):
        share = loss({name: value[first:last] for name, value in (batch | {"new": leaf}).items()})
        share.backward()
        total += share.item()
    return total, leaf.grad


def entropies(b: Batch) -> Tensor:
    """Made up, (B, T), with a gradient: of a distribution over this token and another one."""
    other = 1 - b["new"].exp()
    return -b["new"].exp() * b["new"] - other * other.log()


def split_floor(correction: str) -> tuple[str, float]:
    """A mode and its floor, of "token_mask" or "token_mask, floor"."""
    mode, has_floor, _ = correction.partition(", ")
    return mode, FLOOR if has_floor else 0.0


def ours(
    surrogate: Surrogate, how: str, beta: float = 0.0, correction: str = "none", scale: float = 1.0, kl: str = "k3",
    mask_off_policy: float | None = None, entropy_coef: float = 0.0,
) -> Loss:  # fmt: skip
    terms: list[Callable] = []
    if mask_off_policy is not None:
        terms.append(OffPolicyMask(mask_off_policy))
    if correction != "none":
        mode, floor = split_floor(correction)
        terms.append(SamplerCorrection(mode, CAP, floor))
    if beta:
        terms.append(KLPenalty(beta, kl))
    if entropy_coef:
        terms.append(EntropyBonus(entropy_coef))

    def loss(b: Batch) -> Tensor:
        sampler = b["sampler"] if correction != "none" else None
        x = LossInputs(b["new"], b["old"], b["advantages"], b["mask"], entropies(b), b["ref"], sampler)
        losses = surrogate(x.logprobs, x.old_logprobs, x.advantages, x.mask)
        for term in terms:
            losses = term(losses, x)
        return scale * aggregate(losses, x.mask, how, COUNTS)

    return loss


def moved(loss: Loss, **distances: float) -> Loss:
    """The loss where these log-probs are so far from the policy's: old=0.0 is a first visit."""
    return lambda b: loss(b | {name: b["new"].detach() + distance for name, distance in distances.items()})


# ---------------------------------------------------------------- TRL


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, tie_word_embeddings=True, attn_implementation="eager",
        initializer_range=0.2,  # far from uniform, so that log-probs differ from token to token
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def make_trainer(
    arguments: dict[str, Any], beta: float = 0.0, correction: str = "none", model: Any = None,
    rewards: Sequence[Sequence[float]] = (REWARDS,), microbatch: int = MICROBATCH, surrogate: Surrogate | None = None,
) -> GRPOTrainer:  # fmt: skip
    """A trainer of TRL's; with a surrogate the bridge's."""
    bridged = (partial(pspo_bridge.trl.GRPOTrainer, surrogate=surrogate), GRPOConfig)
    own = {"gmpo": (GMPOTrainer, GMPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
    kinds = bridged if surrogate else own.get(arguments.get("loss_type"), (GRPOTrainer, GRPOConfig))
    config = kinds[1](
        output_dir="build/conformance", per_device_train_batch_size=microbatch, num_generations=4, use_cpu=True,
        gradient_accumulation_steps=ROWS // microbatch, max_completion_length=LIMIT, beta=0.0, bf16=False,
        report_to="none", **{name: value for name, value in arguments.items() if str(value) not in own},
    )  # fmt: skip
    trainer = kinds[0](
        model=model or make_model(), args=config, processing_class=make_tokenizer(),
        reward_funcs=[lambda completions, own=own, **_: own[: len(completions)] for own in rewards],
        train_dataset=Dataset.from_dict({"prompt": ["w3 w4"] * ROWS}),
    )  # fmt: skip
    trainer.beta = beta
    trainer.current_gradient_accumulation_steps = ROWS // microbatch
    trainer.model.train()
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = correction != "none"
    trainer.vllm_importance_sampling_mode, floor = split_floor(correction)
    trainer.vllm_importance_sampling_clip_max = CAP
    trainer.vllm_importance_sampling_clip_min = floor or None
    return trainer


def trl_scored(trainer: GRPOTrainer, b: Batch) -> dict[str, Tensor]:
    """What TRL makes of a rollout whose completions have the lengths of the mask: weights, advantages."""
    lengths = b["mask"].sum(dim=1).tolist()
    ids = [[5] * length for length in lengths]
    sampled = [row[:length].tolist() for row, length in zip(b["sampler"], lengths, strict=True)]
    rest = ([""] * ROWS,) if isinstance(trainer, RLOOTrainer) else (None, [""] * ROWS, sampled, {}, None, None)
    trainer._generate = lambda prompts: ([[3, 4]] * ROWS, ids, *rest)
    with patch.object(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (b["old"], None, None)):
        return trainer._generate_and_score_completions([{"prompt": "w3 w4"} for _ in range(ROWS)])


def trl(
    beta: float = 0.0, correction: str = "none", scale: float = 1.0, tokens: int = COUNTS.tokens,
    microbatch: int = MICROBATCH, surrogate: Surrogate | None = None, **arguments: Any,
) -> Loss:  # fmt: skip
    """``tokens``: of all minibatches of the rollout; ``surrogate``: through the bridge."""
    trainer = make_trainer(arguments, beta, correction, microbatch=microbatch, surrogate=surrogate)
    weights = None
    if correction != "none":
        everyone = {**BATCH, "mask": torch.arange(T) < LENGTHS.clamp(min=1)}  # TRL knows no empty completion
        weights = trl_scored(trainer, everyone)["importance_sampling_ratio"].expand(ROWS, T)
    first = 0

    def loss(b: Batch) -> Tensor:
        nonlocal first
        outputs = (b["new"], entropies(b), None)
        ids = torch.full_like(b["mask"], 5, dtype=torch.long)
        rows = len(b["mask"])
        inputs = {
            "prompt_ids": ids[:, :2], "prompt_mask": ids[:, :2] > 0, "completion_ids": ids,
            "completion_mask": b["mask"].long(), "advantages": b["advantages"][:, 0], "old_per_token_logps": b["old"],
            "ref_per_token_logps": b["ref"], "num_items_in_batch": torch.tensor(tokens),
            "old_logps": (b["old"] * b["mask"]).sum(dim=1),
            "importance_sampling_ratio": None if weights is None else weights[first : first + rows],
        }  # fmt: skip
        first = (first + rows) % ROWS
        kind = RLOOTrainer if isinstance(trainer, RLOOTrainer) else GRPOTrainer  # below the bridge's
        with patch.object(kind, "_get_per_token_logps_and_entropies", lambda *_, **__: outputs):
            return scale * trainer._compute_loss(trainer.model, inputs)

    return loss


# ---------------------------------------------------------------- verl


WHOLE = {"dp_size": 1, "batch_num_tokens": COUNTS.tokens, "global_batch_size": ROWS, "loss_scale_factor": LIMIT}


@dataclass
class ActorConfig:
    """Stands for verl's: fields, `get` and the counts of the whole minibatch."""

    clip_ratio: float = 0.2
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    policy_loss: Any = field(default_factory=dict)
    global_batch_info: dict[str, int] = field(default_factory=lambda: WHOLE)  # of the minibatch

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def load_verl() -> tuple[types.ModuleType, types.ModuleType]:
    """core_algos and rollout_corr_helper, their heavy imports stubbed."""
    root = Path(next(iter(util.find_spec("verl").submodule_search_locations)))
    for name in ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo"):  # as packages without their __init__
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    stubs = {
        "tensordict": ["TensorDict"], "verl.protocol": ["DataProto"],
        "verl.utils": ["as_torch_index", "group_mean_std"],
        "verl.utils.device": ["get_device_name", "get_torch_device"], "verl.trainer.config": ["AlgoConfig"],
        "verl.trainer.config.algorithm": ["RolloutCorrectionConfig"], "verl.workers": [], "verl.workers.config": [],
        "verl.workers.config.actor": ["PolicyLossConfig", "ActorConfig"],
    }  # fmt: skip
    for name, contents in stubs.items():
        module = sys.modules.setdefault(name, types.ModuleType(name))
        vars(module).update({each: type(each, (), {}) for each in contents})
    sys.modules["verl.workers.config"].ActorConfig = ActorConfig
    return import_module("verl.trainer.ppo.core_algos"), import_module("verl.trainer.ppo.rollout_corr_helper")


CORE, CORRECTIONS = load_verl()
VERL_HOW = {"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}


def verl_weights(b: Batch, correction: str) -> Tensor:
    mode, floor = split_floor(correction)
    level, _, constraint = mode.partition("_")
    threshold = CAP if constraint == "truncate" else f"{floor or 1e-30}_{CAP}"
    return CORRECTIONS.compute_rollout_correction_weights(b["old"] - b["sampler"], b["mask"].float(), level, threshold)[
        0
    ]


def verl(
    name: str, how: str, beta: float = 0.0, correction: str = "none", scale: float = 1.0, kl: str = "k3",
    entropy_coef: float = 0.0, **values: Any,
) -> Loss:  # fmt: skip
    """``name`` as registered; ``how`` as here, or verl's own name."""

    def loss(b: Batch) -> Tensor:
        mask = b["mask"].float()
        how_ = VERL_HOW.get(how, how)
        config = ActorConfig(**values)
        advantages = b["advantages"].expand_as(mask)
        weights = None if correction == "none" else verl_weights(b, correction)
        function = CORE.get_policy_loss_fn(name) if name != "reinforce" else CORE.compute_policy_loss_reinforce
        total, _ = function(b["old"], b["new"], advantages, mask, how_, config, weights)
        if beta:
            estimate = CORE.kl_penalty(b["new"], b["ref"], kl)
            total = total + beta * CORE.agg_loss(estimate, mask, how_, **config.global_batch_info)
        if entropy_coef:
            total = total - entropy_coef * CORE.agg_loss(entropies(b), mask, how_, **config.global_batch_info)
        return scale * total

    return loss


# ---------------------------------------------------------------- comparisons


@dataclass(frozen=True)
class Case:
    method: str
    how: str
    there: str
    mine: Loss
    theirs: Loss
    loss_differs: str = ""  # why, where the gradient alone agrees


def as_text(first: str, arguments: dict[str, Any]) -> str:
    return ", ".join([first, *(f"{name}={value}" for name, value in arguments.items())])


def case(
    peer: Callable[..., Loss], there: str, surrogate: Surrogate, how: str, here: dict[str, Any] | None = None,
    loss_differs: str = "", **arguments: Any,
) -> Case:  # fmt: skip
    """``here``: further arguments of `ours`; those in `SHARED`, and ``arguments``, are the peer's."""
    here = here or {}
    shared = {name: value for name, value in here.items() if name in SHARED}
    mine = ours(surrogate, how, **here)
    theirs = peer(**shared, **arguments)
    return Case(as_text(repr(surrogate), here), how, as_text(there, arguments), mine, theirs, loss_differs)


SHARED = ("beta", "correction", "entropy_coef")
MODES = [f"{level}_{kind}" for level in ("token", "sequence") for kind in ("truncate", "mask")]


def at_trl(surrogate: Surrogate, how: str, *further: Any, loss_type: str, **arguments: Any) -> Case:
    return case(partial(trl, loss_type=loss_type), f"TRL: {loss_type}", surrogate, how, *further, **arguments)


def same_as_trl() -> list[Case]:
    clip = Clip(0.2)
    gspo = GSPO(0.1, 0.2)
    bounds = {"epsilon": 0.1, "epsilon_high": 0.2, "importance_sampling_level": "sequence"}
    modes = [*MODES, *(f"{mode}, floor" for mode in MODES)]
    return [
        *(at_trl(clip, how, loss_type=how) for how in VERL_HOW),
        at_trl(Clip(0.2, 0.28), "dapo", loss_type="dapo", epsilon_high=0.28),
        at_trl(Clip(0.2, delta=1.5), "dapo", loss_type="dapo", delta=1.5),
        at_trl(clip, "grpo", {"beta": 0.1, "kl": "k3"}, loss_type="grpo", use_bias_correction_kl=False),
        at_trl(clip, "grpo", {"beta": 0.1, "kl": "unbiased_k3"}, loss_type="grpo", use_bias_correction_kl=True),
        at_trl(clip, "dapo", {"mask_off_policy": 0.05}, loss_type="dapo", off_policy_mask_threshold=0.05),
        at_trl(SAPO(1.0, 1.05), "grpo", loss_type="sapo"),
        at_trl(CISPO(None, 0.2), "dapo", loss_type="cispo", epsilon_high=1.2),
        *(at_trl(gspo, how, loss_type=how, **bounds) for how in VERL_HOW),
        at_trl(gspo, "dr_grpo", {"scale": LIMIT}, loss_type="luspo", **bounds),
        at_trl(GMPO(0.1), "grpo", None, "a masked row adds -A there", loss_type="gmpo", epsilon=0.1, epsilon_high=0.1),
        at_trl(VESPO(), "dapo", loss_type="vespo"),
        *(at_trl(clip, "dapo", {"correction": mode}, loss_type="dapo") for mode in modes),
        at_trl(gspo, "grpo", {"correction": "sequence_mask"}, loss_type="grpo", **bounds),
    ]


def at_verl(name: str, surrogate: Surrogate, how: str, *further: Any, **arguments: Any) -> Case:
    return case(partial(verl, name, how), f"verl: {name}, {VERL_HOW[how]}", surrogate, how, *further, **arguments)


def same_as_verl() -> list[Case]:
    dual = Clip(0.2, delta=3.0)
    bounds = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}
    narrow = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 1e4}
    differs = "log π there, r here"
    cases = []
    for how in VERL_HOW:
        cases += [
            at_verl("vanilla", dual, how),
            at_verl("vanilla", dual, how, {"entropy_coef": 0.1}),
            at_verl("gpg", REINFORCE(), how),
            at_verl("cispo", CISPO(0.1, 0.2), how, **bounds),
            at_verl("gspo", GSPO(0.1, 0.2), how, **bounds),
            at_verl("dro", DRO(0.5, "token"), how, policy_loss=types.SimpleNamespace(dro_beta=0.5)),
            *(at_verl(f"dppo_{kind}", DPPO(kind, 0.05), how, None, differs, **narrow) for kind in ("tv", "kl")),
        ]
    summed = partial(verl, "reinforce", "seq-mean-token-sum")
    cases += [
        case(summed, "verl: reinforce, seq-mean-token-sum", REINFORCE(), "dr_grpo", {"scale": LIMIT}),
        at_verl("sapo", SAPO(1.0, 1.05), "grpo"),
        at_verl("geo_mean", GMPO(0.2), "grpo", scale=MICROBATCH / ROWS),
    ]
    for kl, there in (("k1", "k1+"), ("k2", "k2"), ("k3", "k3")):
        cases.append(at_verl("vanilla", dual, "dapo", {"beta": 0.1, "kl": kl}, kl=there))
    for correction in (*MODES, "token_mask, floor", "sequence_mask, floor"):
        cases.append(at_verl("vanilla", dual, "dapo", {"correction": correction}))
    return cases


@dataclass(frozen=True)
class Namesake:
    name: str
    there: str
    apart: tuple[Loss, Loss]  # here and there, under one name and with the same or the default numbers
    settings: str  # with which they agree
    agree: tuple[Loss, Loss]
    bounds: tuple[int, ...] = (0, MICROBATCH, ROWS)
    agree_bounds: tuple[int, ...] | None = None  # if other ones


def namesakes() -> list[Namesake]:
    local = WHOLE | dict.fromkeys(("batch_num_tokens", "global_batch_size", "loss_scale_factor"))
    clip = ours(Clip(0.2), "dapo")
    dual = ours(Clip(0.2, delta=3.0), "dapo")
    grpo = ours(Clip(0.2, delta=3.0), "grpo")
    dr_grpo = ours(Clip(0.2, delta=3.0), "dr_grpo")
    kl = ours(Clip(0.2), "grpo", 0.5)
    cispo = trl(loss_type="cispo", epsilon_high=1.2)
    gspo = verl("gspo", "grpo")
    sapo = trl(loss_type="sapo")
    low = verl("vanilla", "dapo", clip_ratio_c=1.3)
    geo_mean = verl("geo_mean", "grpo", scale=MICROBATCH / ROWS)
    sequence = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    k1, k3 = (ours(Clip(0.2, delta=3.0), "dapo", 0.5, kl=kl) for kl in ("k1", "k3"))
    bounded = verl("vanilla", "dapo", 0.5)
    summed = ours(Clip(0.2), "dr_grpo", scale=LIMIT)
    rloo = trl(loss_type="rloo", scale=MICROBATCH / ROWS)
    bonus = ours(Clip(0.2), "dapo", entropy_coef=0.5)

    def corrected(surrogate: Surrogate, how: str, mode: str, **arguments: Any) -> tuple[Loss, Loss]:
        return ours(surrogate, how, correction=mode), trl(correction=mode, **arguments)

    return [
        Namesake("CISPO, TRL", "epsilon_high is the bound itself", (ours(CISPO(None, 1.2), "dapo"), cispo),
                 "`CISPO(None, 0.2)` for 1.2", (ours(CISPO(None, 0.2), "dapo"), cispo)),
        Namesake("CISPO, verl", "bounded from below as well, both by 0.2 unless set",
                 (ours(CISPO(None, 0.2), "dapo"), verl("cispo", "dapo")),
                 "`CISPO(0.2, 0.2)`", (ours(CISPO(0.2, 0.2), "dapo"), verl("cispo", "dapo"))),
        Namesake("clip, verl", "where A < 0 bounded at clip_ratio_c = 3 unless set (dual clip; shown at 1.3)",
                 (clip, low), "`Clip(0.2, delta=1.3)`", (ours(Clip(0.2, delta=1.3), "dapo"), low)),
        Namesake("GSPO, TRL and verl", "epsilon 0.2 unless set; the paper's are 3e-4 and 4e-4",
                 (ours(GSPO(), "grpo"), gspo), "`GSPO(0.2, 0.2)`", (ours(GSPO(0.2, 0.2), "grpo"), gspo)),
        Namesake("GMPO, verl", "epsilon 0.2 unless set; a microbatch's rows are averaged, so the split matters",
                 (ours(GMPO(), "grpo"), geo_mean), "`GMPO(0.2)`, microbatches of one size",
                 (ours(GMPO(0.2), "grpo"), geo_mean)),
        Namesake("SAPO, TRL and verl", "tau_neg 1.05 unless set, 3 here", (ours(SAPO(), "grpo"), sapo),
                 "`SAPO(1, 1.05)`", (ours(SAPO(1.0, 1.05), "grpo"), sapo)),
        Namesake("DPPO, verl", "r bounded at clip_ratio_c = 3 unless set (shown at 1.3); epsilon 0.2 unless set",
                 (ours(DPPO(), "dr_grpo"), verl("dppo_tv", "dr_grpo", clip_ratio_c=1.3)),
                 "clip_ratio_c=1e4 there, `DPPO(epsilon=0.2)` here",
                 (ours(DPPO(epsilon=0.2), "dr_grpo"), verl("dppo_tv", "dr_grpo", clip_ratio_c=1e4))),
        Namesake("DRO, verl", "a token's log-ratio in the penalty; Kimi k1.5's is the completion's",
                 (ours(DRO(0.5), "dr_grpo"), verl("dro", "dr_grpo", policy_loss=types.SimpleNamespace(dro_beta=0.5))),
                 '`DRO(0.5, "token")`', (ours(DRO(0.5, "token"), "dr_grpo"),
                                         verl("dro", "dr_grpo", policy_loss=types.SimpleNamespace(dro_beta=0.5)))),
        Namesake("KL, TRL", "k3 times the ratio", (kl, trl(0.5, loss_type="grpo")), "use_bias_correction_kl=False",
                 (kl, trl(0.5, loss_type="grpo", use_bias_correction_kl=False))),
        Namesake("KL k1, verl", "k1's own gradient, which the reference does not enter; here k2's, the KL's",
                 (k1, verl("vanilla", "dapo", 0.5, kl="k1")), "k1+", (k1, verl("vanilla", "dapo", 0.5, kl="k1+"))),
        Namesake("KL k3, verl", "at most 10, without a gradient there (shown: the reference 3 nats above)",
                 (moved(k3, ref=3.0), moved(bounded, ref=3.0)), "nearer references (shown: 1 nat)",
                 (moved(k3, ref=1.0), moved(bounded, ref=1.0))),
        Namesake("RLOO, TRL", "a trainer that clips a completion's product of ratios; here an advantage scale",
                 (summed, rloo), "r = 1, `dr_grpo` x 16", (moved(summed, old=0.0), moved(rloo, old=0.0))),
        Namesake("GMPO with token corrections, verl", "a row's weights are averaged, geometrically; here each acts on "
                 "its token", (ours(GMPO(0.2), "grpo", correction="token_truncate"),
                           verl("geo_mean", "grpo", scale=MICROBATCH / ROWS, correction="token_truncate")),
                 "sequence corrections", (ours(GMPO(0.2), "grpo", correction="sequence_truncate"),
                           verl("geo_mean", "grpo", scale=MICROBATCH / ROWS, correction="sequence_truncate"))),
        Namesake("entropy_coef, TRL", "the mean of the microbatches' means, whatever the loss_type: the split matters",
                 (bonus, trl(loss_type="dapo", entropy_coef=0.5)), "one microbatch, `dapo`",
                 (bonus, trl(loss_type="dapo", entropy_coef=0.5, microbatch=ROWS)), agree_bounds=(0, ROWS)),
        Namesake("token mean, TRL's bnpo", "the mean of the microbatches' means: the split matters",
                 (clip, trl(loss_type="bnpo")), "loss_type=dapo", (clip, trl(loss_type="dapo"))),
        Namesake("token mean, TRL", "divided by the mean number of tokens of a rollout's minibatches (shown: 2, the "
                 "other of 16 tokens); here by each minibatch's own",
                 (clip, trl(tokens=COUNTS.tokens + 16, loss_type="dapo", steps_per_generation=4)),
                 "one minibatch", (clip, trl(loss_type="dapo"))),
        Namesake("token mean, verl", "as bnpo, if batch_num_tokens is not given",
                 (dual, verl("vanilla", "dapo", scale=0.5, global_batch_info=local)), "batch_num_tokens",
                 (dual, verl("vanilla", "dapo"))),
        Namesake("sequence mean, verl", "without global_batch_size, rows that are masked out do not count",
                 (grpo, verl("vanilla", "grpo", global_batch_info=local)), "global_batch_size",
                 (grpo, verl("vanilla", "grpo")), (0, ROWS)),
        Namesake("dr_grpo, verl", "without loss_scale_factor, divided by the batch's width",
                 (dr_grpo, verl("vanilla", "dr_grpo", global_batch_info=WHOLE | {"loss_scale_factor": None})),
                 "loss_scale_factor", (dr_grpo, verl("vanilla", "dr_grpo"))),
        Namesake("GSPO with token corrections, TRL",
                 "a row's weights are averaged; here and in verl each acts on its token",
                 corrected(GSPO(0.2, 0.2), "grpo", "token_truncate", **sequence), "sequence corrections",
                 corrected(GSPO(0.2, 0.2), "grpo", "sequence_truncate", **sequence)),
        Namesake("VESPO with corrections, TRL", "token weights are factors of w; here of the loss",
                 corrected(VESPO(), "dapo", "token_truncate", loss_type="vespo"), "no correction",
                 (ours(VESPO(), "dapo"), trl(loss_type="vespo"))),
    ]  # fmt: skip


def differences(mine: Loss, theirs: Loss, bounds: tuple[int, ...] = (0, MICROBATCH, ROWS)) -> tuple[float, float]:
    """Relative difference of the loss, and of the gradient's entries to its largest."""
    (loss, gradient), (their_loss, their_gradient) = (loss_and_gradient(each, bounds) for each in (mine, theirs))
    largest = their_gradient.abs().max()
    return abs(loss - their_loss) / abs(their_loss), ((gradient - their_gradient).abs().max() / largest).item()


def through_model(
    surrogate: Surrogate, how: str, beta: float = 0.0, lora: bool = False, entropy_coef: float = 0.0
) -> float:
    """Largest difference of loss, or of a parameter's gradient to its largest entry, each side by its own log-probs."""
    generator = torch.Generator().manual_seed(1)
    their_model = make_model()
    if lora:
        adapters = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        their_model = get_peft_model(their_model, adapters)
    our_model = copy.deepcopy(their_model)
    plain = our_model.base_model.model if lora else our_model
    ids = torch.randint(3, VOCABULARY, (ROWS, 6 + T), generator=generator)
    prompt_mask = torch.arange(6) >= 6 - torch.tensor([6, 3, 5, 6, 4, 6, 2, 5])[:, None]
    parts = (ids[:, :6].where(prompt_mask, 0), prompt_mask, ids[:, 6:].where(BATCH["mask"], 0), BATCH["mask"])
    with torch.no_grad():
        now = token_logprobs(plain, *parts, TEMPERATURE)
    old, ref = (now + spread * torch.randn(now.shape, generator=generator) for spread in (0.4, 0.7))
    kl = {"use_bias_correction_kl": False} if beta else {}
    size = ROWS if entropy_coef else MICROBATCH  # TRL's bonus depends on the split
    settings = {"loss_type": how, "temperature": TEMPERATURE, "entropy_coef": entropy_coef} | kl
    trainer = make_trainer(settings, beta, model=their_model, microbatch=size)
    theirs = mine = 0.0
    for rows in (slice(first, first + size) for first in range(0, ROWS, size)):
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        inputs = {name: part[rows].long() for name, part in zip(names, parts, strict=True)} | {
            "advantages": BATCH["advantages"][rows, 0], "old_per_token_logps": old[rows],
            "ref_per_token_logps": ref[rows], "num_items_in_batch": torch.tensor(COUNTS.tokens),
        }  # fmt: skip
        loss = trainer._compute_loss(their_model, inputs)
        loss.backward()
        theirs += loss.item()
        inputs = (*(part[rows] for part in parts), TEMPERATURE)
        logprobs, own_entropies = token_logprobs(plain, *inputs, with_entropies=True)
        b = {"new": logprobs, "old": old, "ref": ref, "advantages": BATCH["advantages"], "mask": BATCH["mask"]}
        loss = ours(surrogate, how, beta)({key: value if key == "new" else value[rows] for key, value in b.items()})
        loss = loss - entropy_coef * aggregate(own_entropies, BATCH["mask"][rows], how, COUNTS)
        loss.backward()
        mine += loss.item()
    pairs = zip(our_model.parameters(), their_model.parameters(), strict=True)
    gradients = [((a.grad - b.grad).abs().max() / b.grad.abs().max()).item() for a, b in pairs if b.requires_grad]
    return max(abs(mine - theirs) / abs(theirs), *gradients)


def advantage_table() -> list[tuple[str, float]]:
    rewards = torch.tensor(REWARDS)
    group = torch.tensor([0] * 4 + [1] * 4).numpy()
    everyone = {**BATCH, "mask": torch.arange(T) < LENGTHS.clamp(min=1)}
    rows = []

    def add(name: str, mine: Tensor, theirs: Tensor) -> None:
        rows.append((name, ((mine - theirs).abs().max() / theirs.abs().max()).item()))

    for scale in ("none", "group", "batch"):
        trainer = make_trainer({"scale_rewards": scale})
        theirs = trl_scored(trainer, everyone)["advantages"]
        add(f"`{scale}`: TRL, scale_rewards={scale}", group_relative_advantages(rewards, 4, scale), theirs)
    theirs = trl_scored(make_trainer({"loss_type": "rloo"}), everyone)["advantages"]
    add("`rloo`: TRL, RLOOTrainer", group_relative_advantages(rewards, 4, "rloo"), theirs)
    by_function = {"a": rewards, "b": torch.tensor(FORMAT)}
    weights = [1.0, 0.25]
    both = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": weights}
    theirs = trl_scored(make_trainer(both, rewards=(REWARDS, FORMAT)), everyone)["advantages"]
    add("`gdpo`: TRL, multi_objective_aggregation=normalize_then_sum", gdpo(rewards, 4, by_function, weights), theirs)
    one_token = {
        "prompts": torch.zeros(ROWS, 1),
        "attention_mask": torch.ones(ROWS, 2, dtype=torch.long),
    }  # rows of one length
    theirs = CORE.compute_gdpo_outcome_advantage(
        rewards[:, None], torch.ones(ROWS, 1), group, epsilon=1e-9, batch=one_token,
        config={"gdpo_reward_keys": [*by_function], "gdpo_reward_weights": weights},
        non_tensor_batch={name: values.numpy() for name, values in by_function.items()},
    )[0][:, 0]  # fmt: skip
    mine = gdpo(rewards, 4, by_function, weights, 1e-9)
    add("`gdpo`: verl, gdpo; it whitens over tokens, of rows of one length", mine, theirs)
    grpo = CORE.compute_grpo_outcome_advantage
    rloo = CORE.compute_rloo_outcome_advantage
    for name, scale, function in (
        ("grpo, norm_adv_by_std_in_grpo=False", "none", partial(grpo, norm_adv_by_std_in_grpo=False)),
        ("grpo, with its eps of 1e-6", "group", grpo),
        ("rloo", "rloo", rloo),
    ):
        theirs = function(rewards[:, None].clone(), torch.ones(ROWS, 1), group)[0][:, 0]
        add(f"`{scale}`: verl, {name}", group_relative_advantages(rewards, 4, scale, eps=1e-6), theirs)
    return rows


def bridge_table() -> list[tuple[str, list[float]]]:
    """By surrogate the differences of loss and gradient through the bridge to TRL, then to verl; then the largest of
    the three losses to float64's. Each is the largest of the three aggregations.

    Losses are compared as shares of the mean |token loss|: losses of both signs cancel, their roundings do not.
    """
    import_module("pspo_bridge.verl")  # once verl is loaded
    exact_batch = {name: values if name == "mask" else values.double() for name, values in BATCH.items()}
    rows = []
    for surrogate in BRIDGED:
        name = f"pspo.{type(surrogate).__name__}"
        columns = []
        for how in VERL_HOW:
            mine = ours(surrogate, how)
            through_verl = verl(name, how, policy_loss={"arguments": vars(surrogate)})
            every = (mine, trl(loss_type=how, surrogate=surrogate), through_verl)
            losses, gradients = zip(*map(loss_and_gradient, every), strict=True)
            exact, _ = loss_and_gradient(mine, batch=exact_batch)
            size, _ = loss_and_gradient(ours(lambda *tensors, surrogate=surrogate: surrogate(*tensors).abs(), how))
            column = []
            for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
                apart = (gradient - gradients[0]).abs().max() / gradient.abs().max()
                column += [abs(loss - losses[0]) / size, apart.item()]
            columns.append([*column, max(abs(loss - exact) for loss in losses) / size])
        rows.append((repr(surrogate), [max(values) for values in zip(*columns, strict=True)]))
    return rows


def main() -> int:
    versions = {name: metadata.version(name) for name in ("trl", "verl", "torch", "transformers")}
    print(", ".join(f"{name} {version}" for name, version in versions.items()) + "; float32\n")
    print("| here | aggregation | there | loss | gradient |\n|---|---|---|---|---|")
    worst = 0.0
    for case in [*same_as_trl(), *same_as_verl()]:
        loss, gradient = differences(case.mine, case.theirs)
        worst = max(worst, gradient, 0.0 if case.loss_differs else loss)
        shown = case.loss_differs or f"{loss:.1e}"
        print(f"| `{case.method}` | `{case.how}` | {case.there} | {shown} | {gradient:.1e} |")
    print("\n| advantage scale | difference |\n|---|---|")
    for name, difference in advantage_table():
        worst = max(worst, difference)
        print(f"| {name} | {difference:.1e} |")
    print("\n| name | there | gradients differ by | they agree with | then by |\n|---|---|---|---|---|")
    for each in namesakes():
        apart = differences(*each.apart, each.bounds)[1]
        agree = differences(*each.agree, each.agree_bounds or each.bounds)[1]
        worst = max(worst, agree)
        print(f"| {each.name} | {each.there} | {apart:.0%} | {each.settings} | {agree:.1e} |")
    print("\n| through the bridge | TRL: loss | gradient | verl: loss | gradient | loss, to float64 |")
    print("|---|---|---|---|---|---|")
    for name, values in bridge_table():
        worst = max(worst, *values)
        print(f"| `{name}` | {' | '.join(f'{value:.1e}' for value in values)} |")
    print("\n| through a model | difference |\n|---|---|")
    through = {
        **{f"`Clip(0.2)`, `{how}`": through_model(Clip(0.2), how) for how in ("dapo", "grpo", "dr_grpo")},
        "`Clip(0.2), k3, beta 0.1`, `grpo`": through_model(Clip(0.2), "grpo", beta=0.1),
        "`Clip(0.2), entropy_coef 0.1`, `dapo`": through_model(Clip(0.2), "dapo", entropy_coef=0.1),
        "`Clip(0.2)`, `dapo`, LoRA": through_model(Clip(0.2), "dapo", lora=True),
    }
    for name, difference in through.items():
        print(f"| {name} | {difference:.1e} |")
    print(f"\nlargest difference of what is the same: {worst:.1e}")
    return int(not worst <= TOLERANCE or not max(through.values()) <= MODEL_TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
