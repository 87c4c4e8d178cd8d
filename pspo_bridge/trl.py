"""TRL's GRPOTrainer with a surrogate of pspo, and `Record`, which records the run of any GRPOTrainer.

    trainer = pspo_bridge.trl.GRPOTrainer(model, reward, config, train_dataset, surrogate="PSPO")
    pspo_bridge.trl.Record("runs/trl").attach(trainer)

TRL multiplies ratios by advantages. `LossAdvantages` takes the advantages' place and makes this product minus the
surrogate's losses, to which TRL's masks, corrections, KL, entropy and normalisation then apply.
"""

import math
from typing import Any

import trl
from torch import Tensor

from pspo.losses import Surrogate
from pspo_bridge import make_surrogate, token_losses
from pspo_bridge.trl_record import LOGPROBS, TRIED, Record, check_trainer, loss_tensors, watched

AGGREGATIONS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # values of loss_type whose losses are PPO's clip
REPLACED = ("epsilon", "delta", "importance_sampling_level", "sapo_", "vespo_")  # prefixes of arguments of TRL's losses


class LossAdvantages:
    """Advantages (B, 1) or (B, T) whose comparisons are as usual, and whose product is minus the losses (B, T)."""

    def __init__(self, advantages: Tensor) -> None:
        self.advantages = advantages.view(len(advantages), -1)
        self.losses: Tensor | None = None

    def dim(self) -> int:
        return 2

    def __gt__(self, other: float) -> Tensor:
        return self.advantages > other

    def __ge__(self, other: float) -> Tensor:
        return self.advantages >= other

    def __lt__(self, other: float) -> Tensor:
        return self.advantages < other

    def __rmul__(self, ratio: Tensor) -> Tensor:
        return -self.losses


class GRPOTrainer(trl.GRPOTrainer):
    """TRL's GRPOTrainer with one more argument, ``surrogate``. All metrics, the clip ratios included, stay TRL's.

    ``surrogate`` is whatever `pspo_bridge.make_surrogate` takes, or None for TRL's own loss, unchanged. Raises
    ValueError for an unknown surrogate, and for arguments of TRL's own losses, which would have no effect.
    """

    def __init__(self, *args: Any, surrogate: Surrogate | str | dict[str, Any] | None = "PSPO", **options: Any) -> None:
        self.surrogate = None if surrogate is None else make_surrogate(surrogate)
        config = next((each for each in (*args, *options.values()) if isinstance(each, trl.GRPOConfig)), None)
        check_trainer(type(self), config)
        if config and self.surrogate:
            check_arguments(config, self.surrogate)
        super().__init__(*args, **options)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, Record):
                callback.attach(self)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.surrogate is None:
            return super()._compute_loss(model, inputs)
        stand_in = LossAdvantages(inputs["advantages"])
        with watched(self, LOGPROBS, lambda outputs, *_: self.set_losses(stand_in, inputs, outputs[0])):
            loss = super()._compute_loss(model, inputs | {"advantages": stand_in})
        if stand_in.losses is None:
            raise RuntimeError(f"TRL {trl.__version__} computes its loss by methods unknown to this bridge: {TRIED}")
        return loss

    def set_losses(self, stand_in: LossAdvantages, inputs: dict[str, Any], logprobs: Tensor) -> None:
        """Compute the surrogate's losses and metrics, as soon as TRL has a microbatch's log-probs."""
        tensors = loss_tensors(inputs, logprobs)
        stand_in.losses, metrics = token_losses(self.surrogate, logprobs, *tensors, step=self.state.global_step)
        mode = "train" if self.model.training else "eval"
        for name, value in metrics.items():
            mean = self.accelerator.gather(value).nanmean().item()
            if not math.isnan(mean):
                self._metrics[mode][f"surrogate/{name}"].append(mean)


def check_arguments(args: trl.GRPOConfig, surrogate: Surrogate) -> None:
    """Raise ValueError for arguments of TRL's own losses that contradict the surrogate."""
    if args.loss_type not in AGGREGATIONS:
        fix = f"loss_type says how losses are averaged: one of {', '.join(AGGREGATIONS)}"
        raise ValueError(f"loss_type={args.loss_type!r} is a loss of TRL's: name it as surrogate=; {fix}")
    own = {name: value for name, value in vars(surrogate).items() if value is not None}
    own = {"epsilon_high": own.get("epsilon")} | own
    for name, value in vars(args).items():
        if name.startswith(REPLACED) and value not in (None, own.get(name), getattr(type(args), name)):
            raise ValueError(f"{name}={value!r} has no effect here: leave it out; it is an argument of surrogate=")
