"""The one-pass head: the gradient of a token-local loss without computing any logits twice.

`token_logprobs` computes each chunk of logits again in the backward pass, because all of them do not fit into memory.
If a token's loss depends on that token's log-prob alone, its gradient can be formed while the chunk's logits are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import transformers
from torch import Tensor

from pspo import distributed as dist
from pspo.losses.entropy import add_entropy_slopes_, cached_rows
from pspo.model.logprobs import chunk_tokens, head_logits, hidden_states, nucleus_by_chunk, outside, unflatten


@dist.gathers_weights
def backward_in_one_pass(
    model: transformers.PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    temperature: float,
    token_loss: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    divisors: Tensor,
    nucleus_ids: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accumulate the gradient of a loss that is a sum over tokens, each term one of its own log-prob and entropy.

    Each chunk of logits is turned into its own gradient, in place; then one backward pass goes through the body.

    Args:
        prompt_ids ... temperature, nucleus_ids: as for `token_logprobs`.
        token_loss: maps log-probs and entropies (n, 1) of some unmasked tokens, and those tokens' ``inputs``, to their
            losses (n, 1).
        inputs: tensors that broadcast to (B, T), each handed to ``token_loss`` as (n, 1); None stays None.
        divisors: (B, 1) or (B, T), of every token's loss before the sum (`pspo.losses.token_divisors`).

    Returns:
        The loss, a scalar; the log-probs, (B, T), bit for bit those of `token_logprobs`; the entropies, (B, T). All
        without gradient; the model's gradient is that of `token_logprobs` and ``backward()``, to rounding.
    """
    hidden = hidden_states(model, prompt_ids, prompt_mask, completion_ids, completion_mask)[completion_mask]  # (N, H)
    chunk = chunk_tokens(model)
    states = hidden.detach().split(chunk)
    mask, values = completion_mask, (completion_ids, divisors, *inputs)
    values = [x if x is None else x.expand_as(mask)[mask][:, None] for x in values]  # (N, 1) each
    loss, pieces, gradients = torch.zeros((), device=hidden.device), [], []  # pieces: log-probs and entropies (n, 2)
    for i, (h, nucleus) in enumerate(zip(states, nucleus_by_chunk(nucleus_ids, chunk, len(states)), strict=True)):
        target, divisor, *chunk_inputs = (x if x is None else x[i * chunk : (i + 1) * chunk] for x in values)
        logits = head_logits(model, h.requires_grad_(), temperature)  # (n, V)
        probs = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        if nucleus is not None:
            probs.masked_fill_(outside(*nucleus, probs), -torch.inf)
        logprobs = probs.gather(1, target)  # (n, 1)
        peak = probs.amax(dim=1, keepdim=True)
        weighted = exp_(probs.sub_(peak))  # (n, 1), sum of p log p of the unnormalised p
        total = probs.sum(dim=1, keepdim=True)
        entropies = (total.log() - weighted / total).requires_grad_()
        logprobs = (logprobs - (total.log() + peak)).requires_grad_()
        chunk_loss = (token_loss(logprobs, entropies, *chunk_inputs) / divisor).sum()
        slopes, entropy_slopes = torch.autograd.grad(chunk_loss, (logprobs, entropies), allow_unused=True)
        if entropy_slopes is None:
            probs.mul_(-slopes / total)
        else:
            add_entropy_slopes_(probs.div_(total), slopes, entropy_slopes, entropies.detach())
        d_logits = probs.scatter_add_(1, target, slopes.to(probs.dtype))  # dlogprob / dlogits = one-hot - probs
        with torch.autocast(h.device.type, enabled=False):
            logits.backward(d_logits.to(logits.dtype))
        loss = loss + chunk_loss.detach()
        pieces.append(torch.cat([logprobs, entropies], dim=1).detach())
        gradients.append(h.grad)
    with torch.autocast(hidden.device.type, enabled=False):
        hidden.backward(torch.cat(gradients))
    return loss, *(unflatten(values, completion_mask) for values in torch.cat(pieces).unbind(dim=1))


def exp_(logits: Tensor) -> Tensor:
    """Exponentiate logits (n, V) in place; returns the sums of exp(x) x, (n, 1). Some rows at a time fit the cache."""
    sums = []
    for rows in logits.split(cached_rows(logits)):
        x = rows.nan_to_num(nan=torch.nan, neginf=torch.finfo(rows.dtype).min)  # exp is 0 there, and 0 times it is
        sums.append(x.mul_(rows.exp_()).sum(dim=1, keepdim=True))
    return torch.cat(sums)
