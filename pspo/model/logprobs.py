"""Log-probs of completions: the one source of old, new and reference log-probs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pspo import distributed as dist
from pspo.losses import token_entropies
from pspo.model.shared_prompts import hidden_states_of_shared_prompts

CHUNK_BYTES = 2**24  # of float32 logits held at a time,
CHUNK_TOKENS = 256  # but at least these tokens': each chunk costs a pass over the output embedding's gradient


@dist.gathers_weights
def token_logprobs(
    model: transformers.PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    temperature: float = 1.0,
    nucleus_ids: tuple[Tensor, Tensor] | None = None,
    with_entropies: bool = False,
    entropy_gradient: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """log pi(completion token | everything before it).

    Logits are computed at unmasked completion positions only, in chunks of tokens that are recomputed in the
    backward pass, so that no (B, T, V) tensor ever exists.

    Args:
        prompt_ids, prompt_mask: (B, P), left-padded.
        completion_ids, completion_mask: (B, T), right-padded; masked positions get 0.
        temperature: divides the logits, as in the sampling.
        nucleus_ids: tokens (M,), one unmasked token's after the other, and how many are each's, (N,): log-probs are
            renormalised over them, the nucleus that the token was drawn from. None for all tokens.
        with_entropies: also return the entropies of the distributions that the log-probs are of.
        entropy_gradient: these have a gradient, too.

    Returns:
        (B, T) float32 (float64 for a float64 model), in nats; with entropies a pair of these.
    """
    hidden = hidden_states(model, prompt_ids, prompt_mask, completion_ids, completion_mask)[completion_mask]  # (N, H)
    chunk = chunk_tokens(model)
    states, targets = hidden.split(chunk), completion_ids[completion_mask].split(chunk)
    how = (with_entropies, entropy_gradient)
    pieces = [
        checkpoint(_chunk_logprobs, model, h, target, temperature, nucleus, *how, use_reentrant=False)
        for h, target, nucleus in zip(states, targets, nucleus_by_chunk(nucleus_ids, chunk, len(states)), strict=True)
    ]
    logprobs, *entropies = (unflatten(torch.cat(parts), completion_mask) for parts in zip(*pieces, strict=True))
    return (logprobs, *entropies) if with_entropies else logprobs


def hidden_states(
    model: transformers.PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
) -> Tensor:
    """(B, T, H): the last hidden states, from which the model predicts each completion token."""
    ids = torch.cat([prompt_ids, completion_ids], dim=1)[:, :-1]  # the last token predicts nothing
    mask = torch.cat([prompt_mask, completion_mask], dim=1)[:, :-1].long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    width = prompt_ids.shape[1]
    shared = hidden_states_of_shared_prompts(model, ids, mask, positions, width)  # the same to rounding, less work
    if shared is not None:
        return shared
    body = model.base_model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
    return body.last_hidden_state[:, width - 1 :]


def _chunk_logprobs(
    model: transformers.PreTrainedModel,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    nucleus_ids: tuple[Tensor, Tensor] | None,
    with_entropies: bool,
    entropy_gradient: bool,
) -> tuple[Tensor, ...]:
    """log pi(target) from hidden states (n, H) and targets (n,), and on request entropies: (n,), float32 or wider."""
    logits = head_logits(model, hidden, temperature)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if nucleus_ids is not None:
        logits = logits.masked_fill(outside(*nucleus_ids, logits), -torch.inf)
    logprobs = logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(dim=1)
    if not with_entropies:
        return (logprobs,)
    return logprobs, token_entropies(logits if entropy_gradient else logits.detach())


def head_logits(model: transformers.PreTrainedModel, hidden: Tensor, temperature: float = 1.0) -> Tensor:
    """(..., H) hidden states to (..., V) logits, as the model's own forward does, divided by the temperature."""
    head = model.get_output_embeddings()
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if softcap is None and getattr(head, "bias", None) is None:
        return head(hidden / temperature)  # a pass over (..., H) instead of one over (..., V)
    logits = head(hidden)
    return (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature


def nucleus_by_chunk(
    nucleus_ids: tuple[Tensor, Tensor] | None, chunk: int, chunks: int
) -> Sequence[tuple[Tensor, Tensor] | None]:
    """``nucleus_ids`` of `token_logprobs` for each chunk of tokens: ids (m,) and counts (n,), or None."""
    if nucleus_ids is None:
        return [None] * chunks
    ids, counts = nucleus_ids[0], nucleus_ids[1].split(chunk)
    return list(zip(ids.split([int(part.sum()) for part in counts]), counts, strict=True))


def outside(ids: Tensor, counts: Tensor, logits: Tensor) -> Tensor:
    """(n, V) bool, true but at the kept tokens ``ids`` (m,), of which each row of logits (n, V) has ``counts`` (n,)."""
    mask = torch.ones_like(logits, dtype=torch.bool)
    mask[torch.arange(len(counts), device=ids.device).repeat_interleave(counts), ids] = False
    return mask


def chunk_tokens(model: transformers.PreTrainedModel) -> int:
    """Number of tokens whose logits are held at a time."""
    return max(CHUNK_TOKENS, CHUNK_BYTES // (4 * model.config.get_text_config().vocab_size))


def unflatten(values: Tensor, mask: Tensor) -> Tensor:
    """(N,) values of the unmasked tokens to (B, T), 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
