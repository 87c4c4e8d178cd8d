"""Use a surrogate as prime-rl's custom loss, which its configuration names by import path.

    [trainer.loss]
    type = "custom"
    import_path = "pspo_bridge.prime_rl.loss"
    kwargs = { surrogate = "PSPO", alpha = 0.1 }

Tested with stand-ins for the documented `LossInputs` and `LossOutputs`, as prime-rl is on no package index.
"""

from typing import Any

from pspo_bridge import make_surrogate, token_losses


def loss(inputs: Any, surrogate: str = "PSPO", **arguments: Any) -> Any:
    """Return the summed loss of one sequence as `LossOutputs`; prime-rl divides it by the batch's number of tokens.

    The tensors of ``inputs``, prime-rl's `LossInputs`, are (T,). Ratios are to ``inference_logprobs``, the only old
    log-probs that prime-rl keeps. A custom loss lacks the KL to ``inference_logprobs`` that prime-rl's own loss has.
    A sequence whose advantages are all 0 has no metrics.
    """
    from prime_rl.trainer.rl.loss import LossOutputs  # prime-rl is installed where it calls this

    tensors = (inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages, inputs.loss_mask)
    losses, metrics = token_losses(make_surrogate(surrogate, **arguments), *(tensor[None] for tensor in tensors))
    weights = getattr(inputs, "loss_weights", None)  # older versions of prime-rl have no weights
    losses = losses if weights is None else losses * weights
    known = {f"surrogate/{name}": value for name, value in metrics.items() if not value.isnan()}
    return LossOutputs(loss=losses.sum(), metrics=known)
