"""prime-rl's custom loss, by its import path.

    [trainer.loss]
    type = "custom"
    import_path = "pspo_bridge.prime_rl.loss"
    kwargs = { surrogate = "PSPO", alpha = 0.1 }

Tested with stand-ins of the `LossInputs` and `LossOutputs` that prime-rl documents: it is on no package index.
"""

from typing import Any

from pspo_bridge import make_surrogate, token_losses


def loss(inputs: Any, surrogate: str = "PSPO", **arguments: Any) -> Any:
    """Summed loss of one sequence, a `LossOutputs`; prime-rl divides it by the number of tokens of the batch.

    ``inputs`` are prime-rl's `LossInputs`, (T,) each. Ratios are to ``inference_logprobs``: it keeps no others.
    A custom loss has no KL to them, which prime-rl's own has. A sequence without an advantage has no metrics.
    """
    from prime_rl.trainer.rl.loss import LossOutputs  # installed where this is called

    tensors = (inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages, inputs.loss_mask)
    losses, metrics = token_losses(make_surrogate(surrogate, **arguments), *(tensor[None] for tensor in tensors))
    weights = getattr(inputs, "loss_weights", None)  # older versions have none
    losses = losses if weights is None else losses * weights
    known = {f"surrogate/{name}": value for name, value in metrics.items() if not value.isnan()}
    return LossOutputs(loss=losses.sum(), metrics=known)
