"""Add the surrogates to verl's registry of policy losses: actor.policy_loss.loss_mode=pspo.PSPO.

    actor_rollout_ref.model.external_lib=pspo_bridge.verl
    actor_rollout_ref.actor.policy_loss._target_=pspo_bridge.verl.PolicyLossConfig
    actor_rollout_ref.actor.policy_loss.loss_mode=pspo.PSPO
    +actor_rollout_ref.actor.policy_loss.arguments.alpha=0.2

For default arguments the first and third line are enough. To use your own class, write its import path as loss_mode.
Tried with verl 0.9.1.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.workers.config import actor

from pspo_bridge import BUILT_IN, make_surrogate, token_losses


@dataclass
class PolicyLossConfig(actor.PolicyLossConfig):
    """verl's section with the arguments of the surrogate. Raises ValueError for arguments that it lacks."""

    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "." in self.loss_mode:  # without a dot it names a loss of verl's
            make_surrogate(self.loss_mode, **(self.arguments or {}))
            register_policy_loss(self.loss_mode)(policy_loss)
        elif self.arguments:
            fix = f"name a surrogate, as loss_mode=pspo.PSPO, or leave {', '.join(self.arguments)} out"
            raise ValueError(f"policy_loss.arguments have no effect with verl's loss_mode={self.loss_mode}: {fix}")


def check_clip_ratios(config: actor.ActorConfig) -> None:
    """Raise ValueError if a clip bound of verl's own losses is set: a surrogate has bounds of its own."""
    for one in fields(config):
        value = getattr(config, one.name)
        if one.name.startswith("clip_ratio") and value != one.default:
            fix = "leave it out; a bound is one of +actor_rollout_ref.actor.policy_loss.arguments"
            raise ValueError(f"actor.{one.name}={value} has no effect with {config.policy_loss.loss_mode}: {fix}")


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: actor.ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Return loss and metrics of a microbatch. Tensors are (B, T); verl's `agg_loss` aggregates the loss."""
    check_clip_ratios(config)
    name = config.policy_loss.loss_mode
    surrogate = make_surrogate(name, **(config.policy_loss.get("arguments") or {}))
    losses, metrics = token_losses(surrogate, log_prob, old_log_prob, advantages, response_mask)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    total = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    return total, {f"actor/{name}/{key}": value.nan_to_num().item() for key, value in metrics.items()}


for built_in in BUILT_IN:
    register_policy_loss(f"pspo.{built_in}")(policy_loss)
