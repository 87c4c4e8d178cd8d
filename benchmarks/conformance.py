"""Loss and gradient of all that TRL 1.16 and verl 0.9.1 share with pspo, on the same tensors.

    python3 -m venv peers && . peers/bin/activate && pip install -c constraints.txt -e '.[peers]'
    pip install --target verl-only --no-deps verl==0.9.1 ...  # and what it imports, as .ci/nightly does
    PYTHONPATH=verl-only python -m benchmarks.conformance     # the tables of conformance.md, 1 minute

Log-probs are given, float32; the gradient is with respect to them. A minibatch of 8 rows of uneven lengths, one masked
out and one with advantage 0, is accumulated over 2 microbatches of unequal token counts.

TRL: `GRPOTrainer._compute_loss` of a real trainer whose log-probs are replaced; correction weights and advantages come
from its `_generate_and_score_completions`, generation replaced. verl: the registered functions of
`verl.trainer.ppo.core_algos` and `rollout_corr_helper`.

Last, some of TRL's through a whole model, with the log-probs of each library: gradients of its parameters, without
adapters and with LoRA's, TRL's on a `PeftModel`.

Exits with 1 if a loss or gradient that should agree differs by more than 1e-6 of the largest, through a model 1e-5.
"""

import copy
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import metadata
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

import pspo_bridge.trl
import pspo_bridge.verl
from pspo import losses as L
from pspo.config import ModelConfig
from pspo.losses import Clip
from pspo.model import load_tokenizer, token_logprobs
from pspo.rollout import gdpo, group_relative_advantages

TOLERANCE = 1e-6
MODEL_TOLERANCE = 1e-5
ROWS = 8
MICROBATCH = 4
BOUNDS = (0, MICROBATCH, ROWS)  # of the microbatches' rows
T = 12
LIMIT = 16  # the configured completion limit
LENGTHS = torch.tensor([12, 1, 7, 9, 3, 0, 11, 5])[:, None]  # row 5: masked out
COUNTS = L.Counts(int(LENGTHS.sum()), ROWS, LIMIT)
REWARDS = [1.0, 0.05, 0.0, 0.0, 1.0, 1.0, 0.0, 0.05]
CAP = 1.5
FLOOR = 0.9  # of corrections whose name ends in it
FORMAT = [0.5, -3.0, 0.5, 2.0, 0.5, 0.5, 0.5, 8.0]  # of a second reward function
VOCABULARY = 97  # of the model
TEMPERATURE = 0.6

Batch = dict[str, Tensor]  # of a whole minibatch, or some of its rows
Loss = Callable[[Batch], Tensor]  # of a microbatch, its share of the minibatch's loss


@cache
def make_batch() -> Batch:
    """new, old, ref and sampler log-probs (B, T) below 0, advantages (B, 1), mask (B, T), prompts and tokens."""
    generator = torch.Generator().manual_seed(1)
    old = -0.02 - 3 * torch.rand(ROWS, T, generator=generator)
    batch = {"old": old, "mask": torch.arange(T) < LENGTHS, "row": torch.arange(ROWS)}
    for name, spread in (("new", 0.4), ("ref", 0.7), ("sampler", 0.3)):
        batch[name] = (old + spread * torch.randn(ROWS, T, generator=generator)).clamp(max=-0.01)
    batch["advantages"] = torch.randn(ROWS, 1, generator=generator) + 0.5
    batch["advantages"][3] = 0.0
    ids = torch.full((ROWS, T), 5)
    return batch | {"prompt_ids": ids[:, :2], "prompt_mask": ids[:, :2] > 0, "completion_ids": ids}


def accumulate(loss: Loss, batch: Batch, bounds: Sequence[int] = BOUNDS) -> float:
    """The loss, and its gradient in the leaves, over the microbatches between the bounds."""
    total = 0.0
    for first, last in pairwise(bounds):
        share = loss({name: values[first:last] for name, values in batch.items()})
        share.backward()
        total += share.item()
    return total


def loss_and_gradient(loss: Loss, batch: Batch, bounds: Sequence[int] = BOUNDS) -> tuple[float, Tensor]:
    """The gradient is with respect to the log-probs, (B, T)."""
    leaf = batch["new"].clone().requires_grad_()
    total = accumulate(lambda b: loss(b | {"entropies": entropies(b["new"])}), batch | {"new": leaf}, bounds)
    return total, leaf.grad


def entropies(logprobs: Tensor) -> Tensor:
    """Made up, (B, T), with a gradient: of a distribution over this token and another one."""
    other = 1 - logprobs.exp()
    return -logprobs.exp() * logprobs - other * other.log()


def split_floor(correction: str) -> tuple[str, float]:
    """A mode and its floor, of "token_mask" or "token_mask, floor"."""
    mode, has_floor, _ = correction.partition(", ")
    return mode, FLOOR if has_floor else 0.0


def as_text(first: str, arguments: dict[str, Any]) -> str:
    return ", ".join([first, *(f"{name}={value}" for name, value in arguments.items())])


@dataclass(frozen=True)
class Ours:
    """A loss of pspo. A peer that it is compared with takes from it `how`, `beta`, `correction` and `entropy_coef`."""

    surrogate: L.Surrogate
    how: str
    beta: float = 0.0
    kl: str = ""  # with a beta
    correction: str = "none"
    scale: float = 1.0
    mask_off_policy: float = 0.0
    entropy_coef: float = 0.0

    def __str__(self) -> str:
        defaults = vars(Ours(self.surrogate, self.how))
        return as_text(repr(self.surrogate), {name: v for name, v in vars(self).items() if v != defaults[name]})

    def __call__(self, b: Batch) -> Tensor:
        sampler = b["sampler"] if self.correction != "none" else None
        x = L.LossInputs(b["new"], b["old"], b["advantages"], b["mask"], b["entropies"], b["ref"], sampler)
        losses = self.surrogate(x.logprobs, x.old_logprobs, x.advantages, x.mask)
        if self.mask_off_policy:
            losses = L.OffPolicyMask(self.mask_off_policy)(losses, x)
        if self.correction != "none":
            mode, floor = split_floor(self.correction)
            losses = L.SamplerCorrection(mode, CAP, floor)(losses, x)
        if self.beta:
            losses = L.KLPenalty(self.beta, self.kl)(losses, x)
        if self.entropy_coef:
            losses = L.EntropyBonus(self.entropy_coef)(losses, x)
        return self.scale * L.aggregate(losses, x.mask, self.how, COUNTS)


# ---------------------------------------------------------------- TRL


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, tie_word_embeddings=True, attn_implementation="eager",
        initializer_range=0.2,  # far from uniform, so that log-probs differ from token to token
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


TRAINERS = {"gmpo": (GMPOTrainer, GMPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}  # in place of a loss_type


def make_trainer(
    loss_type: str = "dapo", microbatch: int = MICROBATCH, rewards: Sequence[Sequence[float]] = (REWARDS,),
    model: Any = None, surrogate: L.Surrogate | None = None, **arguments: Any,
) -> GRPOTrainer:  # fmt: skip
    """A trainer of TRL's; with a surrogate the bridge's."""
    kind, config_kind = TRAINERS.get(loss_type, (GRPOTrainer, GRPOConfig))
    if surrogate is not None:
        kind = partial(pspo_bridge.trl.GRPOTrainer, surrogate=surrogate)
    if loss_type not in TRAINERS:
        arguments["loss_type"] = loss_type
    config = config_kind(
        output_dir="build/conformance", per_device_train_batch_size=microbatch, num_generations=4, use_cpu=True,
        gradient_accumulation_steps=ROWS // microbatch, max_completion_length=LIMIT, beta=0.0, bf16=False,
        report_to="none", **arguments,
    )  # fmt: skip
    trainer = kind(
        model=model or make_model(), args=config, processing_class=load_tokenizer(ModelConfig()),
        reward_funcs=[lambda completions, own=own, **_: own[: len(completions)] for own in rewards],
        train_dataset=Dataset.from_dict({"prompt": ["w3 w4"] * ROWS}),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = ROWS // microbatch
    trainer.model.train()
    return trainer


def trl_scored(trainer: GRPOTrainer) -> dict[str, Tensor]:
    """What TRL makes of a rollout of the batch's lengths: weights, advantages."""
    b = make_batch()
    lengths = LENGTHS[:, 0].clamp(min=1).tolist()  # TRL knows no empty completion
    ids = [[5] * length for length in lengths]
    sampled = [row[:length].tolist() for row, length in zip(b["sampler"], lengths, strict=True)]
    rest = ([""] * ROWS,) if isinstance(trainer, RLOOTrainer) else (None, [""] * ROWS, sampled, {}, None, None)
    trainer._generate = lambda prompts: ([[3, 4]] * ROWS, ids, *rest)
    with patch.object(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (b["old"], None, None)):
        return trainer._generate_and_score_completions([{"prompt": "w3 w4"} for _ in range(ROWS)])


def trl_loss(here: Ours, loss_type: str, scale: float = 1.0, tokens: int = COUNTS.tokens, **arguments: Any) -> Loss:
    """``tokens``: of all minibatches of the rollout; ``arguments``: of `make_trainer`; with a model its log-probs."""
    if here.entropy_coef:
        arguments["entropy_coef"] = here.entropy_coef
    trainer = make_trainer(loss_type, **arguments)
    trainer.beta = here.beta  # without a reference model
    weights = None
    if here.correction != "none":
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        trainer.vllm_importance_sampling_mode, floor = split_floor(here.correction)
        trainer.vllm_importance_sampling_clip_max = CAP
        trainer.vllm_importance_sampling_clip_min = floor or None
        weights = trl_scored(trainer)["importance_sampling_ratio"].expand(ROWS, T)

    def loss(b: Batch) -> Tensor:
        inputs = {
            "prompt_ids": b["prompt_ids"], "prompt_mask": b["prompt_mask"].long(),
            "completion_ids": b["completion_ids"], "completion_mask": b["mask"].long(),
            "advantages": b["advantages"][:, 0], "num_items_in_batch": torch.tensor(tokens),
            "old_per_token_logps": b["old"], "ref_per_token_logps": b["ref"],
            "old_logps": (b["old"] * b["mask"]).sum(dim=1),
            "importance_sampling_ratio": None if weights is None else weights[b["row"]],
        }  # fmt: skip
        if "model" in arguments:
            return scale * trainer._compute_loss(trainer.model, inputs)
        outputs = (b["new"], b["entropies"], None)
        with patch.object(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: outputs):
            return scale * trainer._compute_loss(trainer.model, inputs)

    return loss


# ---------------------------------------------------------------- verl


WHOLE = {"dp_size": 1, "batch_num_tokens": COUNTS.tokens, "global_batch_size": ROWS, "loss_scale_factor": LIMIT}
VERL_HOW = {"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}


def verl_weights(b: Batch, correction: str) -> Tensor:
    mode, floor = split_floor(correction)
    level, _, constraint = mode.partition("_")
    threshold = CAP if constraint == "truncate" else f"{floor or 1e-30}_{CAP}"
    log_ratio = b["old"] - b["sampler"]
    return compute_rollout_correction_weights(log_ratio, b["mask"].float(), level, threshold)[0]


def verl_loss(here: Ours, name: str, scale: float = 1.0, how: str = "", kl: str = "k3", **values: Any) -> Loss:
    """``how``: verl's own name; ``values``: of the actor's configuration."""
    reinforce = core_algos.compute_policy_loss_reinforce  # not registered
    function = reinforce if name == "reinforce" else core_algos.get_policy_loss_fn(name)
    how = how or VERL_HOW[here.how]
    config = ActorConfig(strategy="fsdp", rollout_n=4, use_dynamic_bsz=True, **{"global_batch_info": WHOLE} | values)

    def loss(b: Batch) -> Tensor:
        mask = b["mask"].float()
        weights = None if here.correction == "none" else verl_weights(b, here.correction)
        total, _ = function(b["old"], b["new"], b["advantages"].expand_as(mask), mask, how, config, weights)
        info = config.global_batch_info
        if here.beta:
            estimate = core_algos.kl_penalty(b["new"], b["ref"], kl)
            total = total + here.beta * core_algos.agg_loss(estimate, mask, how, **info)
        if here.entropy_coef:
            total = total - here.entropy_coef * core_algos.agg_loss(b["entropies"], mask, how, **info)
        return scale * total

    return loss


# ---------------------------------------------------------------- comparisons


class Peer(NamedTuple):
    """A loss of another trainer."""

    text: str
    loss: Callable[[Ours], Loss]  # makes it, when it is measured


def trl(loss_type: str, **arguments: Any) -> Peer:
    return Peer(as_text(f"TRL: {loss_type}", arguments), partial(trl_loss, loss_type=loss_type, **arguments))


def verl(name: str, how: str = "", **arguments: Any) -> Peer:
    text = as_text(f"verl: {name}, {how or '{how}'}", arguments)
    return Peer(text, partial(verl_loss, name=name, how=how, **arguments))


@dataclass(frozen=True)
class Pair:
    """A loss here and one there."""

    here: Ours
    there: Peer
    bounds: Sequence[int] = BOUNDS
    distances: dict[str, float] = field(default_factory=dict)  # by which other log-probs lie above the policy's
    loss_differs: str = ""  # why, where the gradient alone agrees

    def differences(self) -> tuple[float, float]:
        """Relative difference of the loss, and of the gradient's entries to its largest."""
        batch = make_batch()
        batch = batch | {name: batch["new"] + distance for name, distance in self.distances.items()}
        mine, gradient = loss_and_gradient(self.here, batch, self.bounds)
        theirs, their_gradient = loss_and_gradient(self.there.loss(self.here), batch, self.bounds)
        return abs(mine - theirs) / abs(theirs), largest_difference(gradient, their_gradient)


def largest_difference(mine: Tensor, theirs: Tensor) -> float:
    """By the largest entry of theirs."""
    return ((mine - theirs).abs().max() / theirs.abs().max()).item()


MODES = [f"{level}_{kind}" for level in ("token", "sequence") for kind in ("truncate", "mask")]
FLOORED = [f"{mode}, floor" for mode in MODES]
CLIP = Clip(0.2)
DUAL = Clip(0.2, delta=3.0)  # verl's clip
GSPO = L.GSPO(0.1, 0.2)
HALF_DRO = {"policy_loss": types.SimpleNamespace(dro_beta=0.5)}
TRL_GSPO = {"epsilon": 0.1, "epsilon_high": 0.2, "importance_sampling_level": "sequence"}
BOUNDED = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}
DPPO = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 1e4}

SAME_AS_TRL = [
    *(Pair(Ours(CLIP, how), trl(how)) for how in VERL_HOW),
    Pair(Ours(Clip(0.2, 0.28), "dapo"), trl("dapo", epsilon_high=0.28)),
    Pair(Ours(Clip(0.2, delta=1.5), "dapo"), trl("dapo", delta=1.5)),
    Pair(Ours(CLIP, "grpo", 0.1, "k3"), trl("grpo", use_bias_correction_kl=False)),
    Pair(Ours(CLIP, "grpo", 0.1, "unbiased_k3"), trl("grpo", use_bias_correction_kl=True)),
    Pair(Ours(CLIP, "dapo", mask_off_policy=0.05), trl("dapo", off_policy_mask_threshold=0.05)),
    Pair(Ours(L.SAPO(1.0, 1.05), "grpo"), trl("sapo")),
    Pair(Ours(L.CISPO(None, 0.2), "dapo"), trl("cispo", epsilon_high=1.2)),
    *(Pair(Ours(GSPO, how), trl(how, **TRL_GSPO)) for how in VERL_HOW),
    Pair(Ours(GSPO, "dr_grpo", scale=LIMIT), trl("luspo", **TRL_GSPO)),
    Pair(Ours(L.GMPO(0.1), "grpo"), trl("gmpo", epsilon=0.1, epsilon_high=0.1),
         loss_differs="a masked row adds -A there"),
    Pair(Ours(L.VESPO(), "dapo"), trl("vespo")),
    *(Pair(Ours(CLIP, "dapo", correction=mode), trl("dapo")) for mode in MODES + FLOORED),
    Pair(Ours(GSPO, "grpo", correction="sequence_mask"), trl("grpo", **TRL_GSPO)),
]  # fmt: skip


def same_as_verl(how: str) -> list[Pair]:
    """What is the same with each aggregation."""
    return [
        Pair(Ours(DUAL, how), verl("vanilla")),
        Pair(Ours(DUAL, how, entropy_coef=0.1), verl("vanilla")),
        Pair(Ours(L.REINFORCE(), how), verl("gpg")),
        Pair(Ours(L.CISPO(0.1, 0.2), how), verl("cispo", **BOUNDED)),
        Pair(Ours(GSPO, how), verl("gspo", **BOUNDED)),
        Pair(Ours(L.DRO(0.5, "token"), how), verl("dro", **HALF_DRO)),
        *(Pair(Ours(L.DPPO(kind, 0.05), how), verl(f"dppo_{kind}", **DPPO), loss_differs="log π there, r here")
          for kind in ("tv", "kl")),
    ]  # fmt: skip


SAME_AS_VERL = [
    *(pair for how in VERL_HOW for pair in same_as_verl(how)),
    Pair(Ours(L.REINFORCE(), "dr_grpo", scale=LIMIT), verl("reinforce", how="seq-mean-token-sum")),
    Pair(Ours(L.SAPO(1.0, 1.05), "grpo"), verl("sapo")),
    Pair(Ours(L.GMPO(0.2), "grpo"), verl("geo_mean", scale=MICROBATCH / ROWS)),
    *(Pair(Ours(DUAL, "dapo", 0.1, kl), verl("vanilla", kl=there))
      for kl, there in (("k1", "k1+"), ("k2", "k2"), ("k3", "k3"))),
    *(Pair(Ours(DUAL, "dapo", correction=mode), verl("vanilla")) for mode in MODES + FLOORED[1::2]),
]  # fmt: skip


class Namesake(NamedTuple):
    """One name, with the same or the default numbers, and different mathematics."""

    name: str
    what: str  # differs there
    apart: Pair
    settings: str  # with which they agree
    agree: dict[str, Any]  # the fields of ``apart`` that these settings change


LOCAL = WHOLE | dict.fromkeys(("batch_num_tokens", "global_batch_size", "loss_scale_factor"))  # of a microbatch
NAMESAKES = [  # name, what differs there; pair that is apart; settings with which it agrees, and what they change
    Namesake("CISPO, TRL", "epsilon_high is the bound itself",
             Pair(Ours(L.CISPO(None, 1.2), "dapo"), trl("cispo", epsilon_high=1.2)),
             "`CISPO(None, 0.2)` for 1.2", {"here": Ours(L.CISPO(None, 0.2), "dapo")}),
    Namesake("CISPO, verl", "bounded from below as well, both by 0.2 unless set",
             Pair(Ours(L.CISPO(None, 0.2), "dapo"), verl("cispo")),
             "`CISPO(0.2, 0.2)`", {"here": Ours(L.CISPO(0.2, 0.2), "dapo")}),
    Namesake("clip, verl", "where A < 0 bounded at clip_ratio_c = 3 unless set (dual clip; shown at 1.3)",
             Pair(Ours(CLIP, "dapo"), verl("vanilla", clip_ratio_c=1.3)),
             "`Clip(0.2, delta=1.3)`", {"here": Ours(Clip(0.2, delta=1.3), "dapo")}),
    Namesake("GSPO, TRL and verl", "epsilon 0.2 unless set; the paper's are 3e-4 and 4e-4",
             Pair(Ours(L.GSPO(), "grpo"), verl("gspo")),
             "`GSPO(0.2, 0.2)`", {"here": Ours(L.GSPO(0.2, 0.2), "grpo")}),
    Namesake("GMPO, verl", "epsilon 0.2 unless set; a microbatch's rows are averaged, so the split matters",
             Pair(Ours(L.GMPO(), "grpo"), verl("geo_mean", scale=MICROBATCH / ROWS)),
             "`GMPO(0.2)`, microbatches of one size", {"here": Ours(L.GMPO(0.2), "grpo")}),
    Namesake("SAPO, TRL and verl", "tau_neg 1.05 unless set, 3 here",
             Pair(Ours(L.SAPO(), "grpo"), trl("sapo")),
             "`SAPO(1, 1.05)`", {"here": Ours(L.SAPO(1.0, 1.05), "grpo")}),
    Namesake("DPPO, verl", "r bounded at clip_ratio_c = 3 unless set (shown at 1.3); epsilon 0.2 unless set",
             Pair(Ours(L.DPPO(), "dr_grpo"), verl("dppo_tv", clip_ratio_c=1.3)),
             "clip_ratio_c=1e4 there, `DPPO(epsilon=0.2)` here",
             {"here": Ours(L.DPPO(epsilon=0.2), "dr_grpo"), "there": verl("dppo_tv", clip_ratio_c=1e4)}),
    Namesake("DRO, verl", "a token's log-ratio in the penalty; Kimi k1.5's is the completion's",
             Pair(Ours(L.DRO(0.5), "dr_grpo"), verl("dro", **HALF_DRO)),
             '`DRO(0.5, "token")`', {"here": Ours(L.DRO(0.5, "token"), "dr_grpo")}),
    Namesake("KL, TRL", "k3 times the ratio",
             Pair(Ours(CLIP, "grpo", 0.5, "k3"), trl("grpo")),
             "use_bias_correction_kl=False", {"there": trl("grpo", use_bias_correction_kl=False)}),
    Namesake("KL k1, verl", "k1's own gradient, which the reference does not enter; here k2's, the KL's",
             Pair(Ours(DUAL, "dapo", 0.5, "k1"), verl("vanilla", kl="k1")),
             "k1+", {"there": verl("vanilla", kl="k1+")}),
    Namesake("KL k3, verl", "at most 10, without a gradient there (shown: the reference 3 nats above)",
             Pair(Ours(DUAL, "dapo", 0.5, "k3"), verl("vanilla"), distances={"ref": 3.0}),
             "nearer references (shown: 1 nat)", {"distances": {"ref": 1.0}}),
    Namesake("RLOO, TRL", "a trainer that clips a completion's product of ratios; here an advantage scale",
             Pair(Ours(CLIP, "dr_grpo", scale=LIMIT), trl("rloo", scale=MICROBATCH / ROWS)),
             "r = 1, `dr_grpo` x 16", {"distances": {"old": 0.0}}),
    Namesake("GMPO with token corrections, verl",
             "a row's weights are averaged, geometrically; here each acts on its token",
             Pair(Ours(L.GMPO(0.2), "grpo", correction="token_truncate"), verl("geo_mean", scale=MICROBATCH / ROWS)),
             "sequence corrections", {"here": Ours(L.GMPO(0.2), "grpo", correction="sequence_truncate")}),
    Namesake("entropy_coef, TRL", "the mean of the microbatches' means, whatever the loss_type: the split matters",
             Pair(Ours(CLIP, "dapo", entropy_coef=0.5), trl("dapo")),
             "one microbatch, `dapo`", {"there": trl("dapo", microbatch=ROWS), "bounds": (0, ROWS)}),
    Namesake("token mean, TRL's bnpo", "the mean of the microbatches' means: the split matters",
             Pair(Ours(CLIP, "dapo"), trl("bnpo")),
             "loss_type=dapo", {"there": trl("dapo")}),
    Namesake("token mean, TRL", "divided by the mean number of tokens of a rollout's minibatches (shown: 2, the "
             "other of 16 tokens); here by each minibatch's own",
             Pair(Ours(CLIP, "dapo"), trl("dapo", tokens=COUNTS.tokens + 16, steps_per_generation=4)),
             "one minibatch", {"there": trl("dapo")}),
    Namesake("token mean, verl", "as bnpo, if batch_num_tokens is not given",
             Pair(Ours(DUAL, "dapo"), verl("vanilla", scale=0.5, global_batch_info=LOCAL)),
             "batch_num_tokens", {"there": verl("vanilla")}),
    Namesake("sequence mean, verl", "without global_batch_size, rows that are masked out do not count",
             Pair(Ours(DUAL, "grpo"), verl("vanilla", global_batch_info=LOCAL), (0, ROWS)),
             "global_batch_size", {"there": verl("vanilla")}),
    Namesake("dr_grpo, verl", "without loss_scale_factor, divided by the batch's width",
             Pair(Ours(DUAL, "dr_grpo"), verl("vanilla", global_batch_info=WHOLE | {"loss_scale_factor": None})),
             "loss_scale_factor", {"there": verl("vanilla")}),
    Namesake("GSPO with token corrections, TRL",
             "a row's weights are averaged; here and in verl each acts on its token",
             Pair(Ours(L.GSPO(0.2, 0.2), "grpo", correction="token_truncate"),
                  trl("grpo", importance_sampling_level="sequence")),
             "sequence corrections", {"here": Ours(L.GSPO(0.2, 0.2), "grpo", correction="sequence_truncate")}),
    Namesake("VESPO with corrections, TRL", "token weights are factors of w; here of the loss",
             Pair(Ours(L.VESPO(), "dapo", correction="token_truncate"), trl("vespo")),
             "no correction", {"here": Ours(L.VESPO(), "dapo")}),
]  # fmt: skip
BRIDGED = [
    L.PSPO(), L.NoClip(), Clip(), L.P3O(4.0, 0.1), L.SAPO(), L.TOPR(), L.REINFORCE(), L.CISPO(None, 0.2), GSPO,
    L.GMPO(0.1), L.VESPO(), L.DPPO(), L.SPO(), L.DRO(0.5), L.CEGPPO(0.1), L.ASPO(0.1),
]  # fmt: skip
THROUGH_MODEL = {
    **{f"`Clip(0.2)`, `{how}`": Ours(CLIP, how) for how in ("dapo", "grpo", "dr_grpo")},
    "`Clip(0.2), k3, beta 0.1`, `grpo`": Ours(CLIP, "grpo", 0.1, "k3"),
    "`Clip(0.2), entropy_coef 0.1`, `dapo`": Ours(CLIP, "dapo", entropy_coef=0.1),
    "`Clip(0.2)`, `dapo`, LoRA": Ours(CLIP, "dapo"),
}


def model_inputs(b: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return b["prompt_ids"], b["prompt_mask"], b["completion_ids"], b["mask"]


def through_model(here: Ours, lora: bool) -> float:
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
    batch = make_batch()
    batch = batch | {
        "prompt_ids": ids[:, :6].where(prompt_mask, 0), "prompt_mask": prompt_mask,
        "completion_ids": ids[:, 6:].where(batch["mask"], 0),
    }  # fmt: skip

    def our_loss(b: Batch) -> Tensor:
        new, own_entropies = token_logprobs(plain, *model_inputs(b), TEMPERATURE, with_entropies=True)
        return here(b | {"new": new, "entropies": own_entropies})

    with torch.no_grad():
        now = token_logprobs(plain, *model_inputs(batch), TEMPERATURE)
    for name, spread in (("old", 0.4), ("ref", 0.7)):
        batch[name] = now + spread * torch.randn(now.shape, generator=generator)
    bounds = (0, ROWS) if here.entropy_coef else BOUNDS  # TRL's bonus depends on the split
    arguments = {"use_bias_correction_kl": False} if here.beta else {}
    their_loss = trl_loss(here, here.how, model=their_model, temperature=TEMPERATURE, microbatch=bounds[1], **arguments)
    mine = accumulate(our_loss, batch, bounds)
    theirs = accumulate(their_loss, batch, bounds)
    pairs = zip(our_model.parameters(), their_model.parameters(), strict=True)
    gradients = [largest_difference(a.grad, b.grad) for a, b in pairs if b.requires_grad]
    return max(abs(mine - theirs) / abs(theirs), *gradients)


def advantage_table() -> list[tuple[str, Tensor, Tensor]]:
    """Names of advantages, and (B,) here and there."""
    rewards = torch.tensor(REWARDS)
    by_function = {"a": rewards, "b": torch.tensor(FORMAT)}
    weights = [1.0, 0.25]

    def ours(scale: str, eps: float = 1e-4) -> Tensor:
        return group_relative_advantages(rewards, 4, scale, eps=eps)

    def by_trl(**arguments: Any) -> Tensor:
        return trl_scored(make_trainer(**arguments))["advantages"]

    def by_verl(name: str, **arguments: Any) -> Tensor:
        function = getattr(core_algos, f"compute_{name}_outcome_advantage")
        group = torch.tensor([0] * 4 + [1] * 4).numpy()
        return function(rewards[:, None].clone(), torch.ones(ROWS, 1), group, **arguments)[0][:, 0]

    both = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": weights}
    verl_both = {
        "epsilon": 1e-9, "config": {"gdpo_reward_keys": [*by_function], "gdpo_reward_weights": weights},
        "non_tensor_batch": {name: values.numpy() for name, values in by_function.items()},
        "batch": {"prompts": torch.zeros(ROWS, 1), "attention_mask": torch.ones(ROWS, 2, dtype=torch.long)},
    }  # fmt: skip
    return [
        *((f"`{scale}`: TRL, scale_rewards={scale}", ours(scale), by_trl(scale_rewards=scale))
          for scale in ("none", "group", "batch")),
        ("`rloo`: TRL, RLOOTrainer", ours("rloo"), by_trl(loss_type="rloo")),
        ("`gdpo`: TRL, multi_objective_aggregation=normalize_then_sum",
         gdpo(rewards, 4, by_function, weights), by_trl(rewards=(REWARDS, FORMAT), **both)),
        ("`gdpo`: verl, gdpo; it whitens over tokens, of rows of one length",
         gdpo(rewards, 4, by_function, weights, 1e-9), by_verl("gdpo", **verl_both)),
        ("`none`: verl, grpo, norm_adv_by_std_in_grpo=False",
         ours("none"), by_verl("grpo", norm_adv_by_std_in_grpo=False)),
        ("`group`: verl, grpo, with its eps of 1e-6", ours("group", 1e-6), by_verl("grpo")),
        ("`rloo`: verl, rloo", ours("rloo"), by_verl("rloo")),
    ]  # fmt: skip


def through_bridge(here: Ours) -> list[float]:
    """Differences of loss and gradient through the bridge, of TRL and of verl; and the losses' largest to float64's.

    Losses are compared as shares of the mean |token loss|: losses of both signs cancel, their roundings do not.
    """
    batch = make_batch()
    exact_batch = {name: values.double() if values.is_floating_point() else values for name, values in batch.items()}
    exact, _ = loss_and_gradient(here, exact_batch)
    size, _ = loss_and_gradient(replace(here, surrogate=lambda *x: here.surrogate(*x).abs()), batch)
    mine, gradient = loss_and_gradient(here, batch)
    name = f"pspo.{type(here.surrogate).__name__}"
    policy_loss = pspo_bridge.verl.PolicyLossConfig(loss_mode=name, arguments=vars(here.surrogate))
    differences = []
    losses = [mine]
    for peer in (trl(here.how, surrogate=here.surrogate), verl(name, policy_loss=policy_loss)):
        theirs, their_gradient = loss_and_gradient(peer.loss(here), batch)
        differences += [abs(theirs - mine) / size, largest_difference(gradient, their_gradient)]
        losses.append(theirs)
    return [*differences, max(abs(loss - exact) for loss in losses) / size]


def main() -> int:
    versions = {name: metadata.version(name) for name in ("trl", "verl", "torch", "transformers")}
    print(", ".join(f"{name} {version}" for name, version in versions.items()) + "; float32\n")
    print("| here | aggregation | there | loss | gradient |\n|---|---|---|---|---|")
    worst = 0.0
    for pair in SAME_AS_TRL + SAME_AS_VERL:
        loss, gradient = pair.differences()
        worst = max(worst, gradient, 0.0 if pair.loss_differs else loss)
        there = pair.there.text.format(how=VERL_HOW[pair.here.how])
        shown = pair.loss_differs or f"{loss:.1e}"
        print(f"| `{pair.here}` | `{pair.here.how}` | {there} | {shown} | {gradient:.1e} |")
    print("\n| advantage scale | difference |\n|---|---|")
    for name, mine, theirs in advantage_table():
        difference = largest_difference(mine, theirs)
        worst = max(worst, difference)
        print(f"| {name} | {difference:.1e} |")
    print("\n| name | there | gradients differ by | they agree with | then by |\n|---|---|---|---|---|")
    for each in NAMESAKES:
        _, apart = each.apart.differences()
        _, agree = replace(each.apart, **each.agree).differences()
        worst = max(worst, agree)
        print(f"| {each.name} | {each.what} | {apart:.0%} | {each.settings} | {agree:.1e} |")
    print("\n| through the bridge | TRL: loss | gradient | verl: loss | gradient | loss, to float64 |")
    print("|---|---|---|---|---|---|")
    for surrogate in BRIDGED:
        columns = [through_bridge(Ours(surrogate, how)) for how in VERL_HOW]
        values = [max(by_how) for by_how in zip(*columns, strict=True)]
        worst = max(worst, *values)
        print(f"| `{surrogate}` | {' | '.join(f'{value:.1e}' for value in values)} |")
    print("\n| through a model | difference |\n|---|---|")
    farthest = 0.0
    for name, here in THROUGH_MODEL.items():
        difference = through_model(here, lora="LoRA" in name)
        farthest = max(farthest, difference)
        print(f"| {name} | {difference:.1e} |")
    print(f"\nlargest difference of what is the same: {worst:.1e}")
    return int(not worst <= TOLERANCE or not farthest <= MODEL_TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
