"""Log-probs of completions: the one source of old, new and reference log-probs. No (B, T, V) tensor ever exists."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from pspo import distributed as dist
from pspo.model.device import to_device
from pspo.model.shared_prompts import body_states, hidden_states_of_shared_prompts, shares_prompts

CHUNK_BYTES = 2**24  # bytes of float32 logits that are held at a time on a CPU
GPU_CHUNK_SHARE = 64  # a 64th of a GPU's memory is for the logits held at a time
CHUNK_TOKENS = 256  # fewest in a chunk: each chunk costs a pass over the output embedding's gradient
CACHED_LOGITS = 2**16  # logits that stay in a CPU's cache while `TokenLogprobs` works on them


class Targets(NamedTuple):
    """Completion tokens and, to renormalise log-probs, the nucleus that each token was drawn from. On the CPU."""

    ids: Tensor  # (n,) int64
    nucleus: tuple[Tensor, Tensor] | None = None  # ids (m,), nucleus after nucleus, and nuclei's sizes (n,)

    def select(self, tokens: slice) -> Targets:
        """The targets of a slice of the tokens."""
        if self.nucleus is None:
            return Targets(self.ids[tokens])
        ids, counts = self.nucleus
        ends = torch.nn.functional.pad(counts.cumsum(dim=0), (1, 0)).tolist()
        return Targets(self.ids[tokens], (ids[ends[tokens.start] : ends[tokens.stop]], counts[tokens]))


@dist.gathers_weights
def token_logprobs(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    temperature: float = 1.0,
    nucleus_ids: tuple[Tensor, Tensor] | None = None,
    with_entropies: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """log pi(completion token | everything before it), in nats: (B, T) float32 (float64 for a float64 model).

    If there are too many logits, they are computed in chunks, and again in the backward pass.

    Args:
        prompt_ids, prompt_mask: (B, P), left-padded.
        completion_ids, completion_mask: (B, T), right-padded; masked positions get 0.
        temperature: divides the logits, as in the sampling.
        nucleus_ids: the nucleus of each unmasked token, as in `Targets`.
        with_entropies: also return the entropies (B, T) of the tokens' distributions.
    """
    ids, mask = completion_ids.cpu(), completion_mask.cpu()
    hidden = hidden_states(model, (prompt_ids.cpu(), prompt_mask.cpu(), ids, mask), shares_prompts(model))
    targets = Targets(ids[mask], nucleus_ids)
    chunks = row_chunks(model, mask)
    head = head_logprobs if len(chunks) == 1 else recomputed_logprobs
    parts = [head(model, hidden[tokens], targets.select(tokens), temperature) for _, tokens in chunks]
    logprobs, entropies = (unflatten(torch.cat(values), mask) for values in zip(*parts, strict=True))
    return (logprobs, entropies) if with_entropies else logprobs


def hidden_states(model: PreTrainedModel, token_ids: Sequence[Tensor], shared: bool) -> Tensor:
    """(N, H) last hidden states, from which the model predicts each unmasked completion token, row after row.

    ``token_ids`` are those of a `pspo.rollout.Rollout`: prompts (B, P), their mask, completions (B, T), their mask, on
    the CPU. With ``shared``, adjacent rows of one prompt compute it once.
    """
    prompt_ids, prompt_mask, completion_ids, completion_mask = token_ids
    ids = torch.cat([prompt_ids, completion_ids], dim=1)[:, :-1]  # the last token predicts nothing
    mask = torch.cat([prompt_mask, completion_mask], dim=1)[:, :-1].long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    width = prompt_ids.shape[1]
    states = hidden_states_of_shared_prompts(model, ids, mask, positions, width) if shared else None
    if states is None:
        states = body_states(model, ids, mask, positions)[:, width - 1 :]
    return states.flatten(0, 1)[token_index(completion_mask, states.device)]


def token_index(mask: Tensor, device: torch.device) -> Tensor:
    """(N,) int64 on a device: flat indices of the true elements of a mask (B, T) on the CPU, row after row."""
    return to_device(mask.flatten().nonzero().squeeze(1), device)


def row_chunks(model: PreTrainedModel, mask: Tensor) -> list[tuple[slice, slice]]:
    """Chunks whose logits are held at a time: whole rows of a mask (B, T), and their slice of the N unmasked tokens.

    A row with too many logits is a chunk by itself, which `head_logprobs` divides.
    """
    most = chunk_tokens(model)
    lengths = mask.sum(dim=1).tolist()
    ends = [0, *accumulate(lengths)]  # of the rows among the tokens
    starts = [0]
    for row in range(1, len(lengths)):
        if ends[row + 1] - ends[starts[-1]] > most:
            starts.append(row)
    return [(slice(a, b), slice(ends[a], ends[b])) for a, b in pairwise([*starts, len(lengths)])]


def head_logprobs(model: PreTrainedModel, hidden: Tensor, targets: Targets, temperature: float) -> Sequence[Tensor]:
    """Log-probs and entropies (n,) of targets by last hidden states (n, H): float32 or wider, with gradient."""
    if len(hidden) > chunk_tokens(model):
        return recomputed_logprobs(model, hidden, targets, temperature)
    head = model.get_output_embeddings()
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if softcap is None and getattr(head, "bias", None) is None:
        logits = head(hidden / temperature)  # a pass over (n, H) instead of one over (n, V)
    else:
        logits = head(hidden)
        logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    if targets.nucleus is not None:
        logits = logits.masked_fill(excluded_mask(*targets.nucleus, logits), -torch.inf)
    return TokenLogprobs.apply(logits, to_device(targets.ids, logits.device))


def recomputed_logprobs(model: PreTrainedModel, hidden: Tensor, targets: Targets, temperature: float) -> list[Tensor]:
    """`head_logprobs` in pieces of `chunk_tokens`, which are computed again in the backward pass."""
    most = chunk_tokens(model)
    pieces = []
    for start in range(0, max(1, len(hidden)), most):  # a row without a token is a piece, too
        tokens = slice(start, min(start + most, len(hidden)))
        inputs = (model, hidden[tokens], targets.select(tokens), temperature)
        pieces.append(checkpoint(head_logprobs, *inputs, use_reentrant=False))
    return [torch.cat(values) for values in zip(*pieces, strict=True)]


class TokenLogprobs(torch.autograd.Function):
    """Log-probs and entropies (n,), float32 or wider, of targets (n,) by logits (n, V), which are overwritten.

    Entropies are of the whole distribution, H = -sum_v p_v log p_v.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        probs = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        logprobs = probs.new_empty(len(probs))
        entropies = probs.new_empty(len(probs))
        n = max(1, CACHED_LOGITS // probs.shape[1]) if probs.device.type == "cpu" else max(1, len(probs))
        ctx.slices = [slice(start, start + n) for start in range(0, len(probs), n)]
        for rows in ctx.slices:
            shifted = probs[rows]  # (k, V), still logits
            shifted -= shifted.amax(dim=1, keepdim=True)
            target = shifted.gather(1, targets[rows, None]).squeeze(1)
            shifted.clamp_(min=torch.finfo(shifted.dtype).min)  # -inf would make the product below NaN
            exp = shifted.exp()
            total = exp.sum(dim=1)
            log_total = total.log()
            logprobs[rows] = target - log_total
            with torch.autocast(probs.device.type, enabled=False):  # autocast takes dot products in 16 bits on a CPU
                entropies[rows] = log_total - torch.linalg.vecdot(exp, shifted) / total
            torch.div(exp, total[:, None], out=shifted)  # now probabilities
        ctx.set_materialize_grads(False)
        ctx.logits_dtype = logits.dtype
        ctx.save_for_backward(targets, entropies, probs)  # a recomputed piece drops these until its backward pass
        return logprobs, entropies

    @staticmethod
    def backward(ctx, slopes: Tensor | None, entropy_slopes: Tensor | None) -> tuple[Tensor, None]:
        """dlogprob / dlogits = one-hot - p, dH / dlogits = -p (log p + H); probabilities are overwritten."""
        targets, entropies, gradient = ctx.saved_tensors
        slopes = torch.zeros_like(entropies) if slopes is None else slopes
        for rows in ctx.slices:
            p = gradient[rows]
            if entropy_slopes is None:
                p *= -slopes[rows, None]
            else:
                log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log_()  # finite where p is 0
                p *= -(log_p.add_(entropies[rows, None]).mul_(entropy_slopes[rows, None]).add_(slopes[rows, None]))
            p.scatter_add_(1, targets[rows, None], slopes[rows, None])
        return gradient.to(ctx.logits_dtype), None


def excluded_mask(ids: Tensor, counts: Tensor, logits: Tensor) -> Tensor:
    """(n, V) bool, true outside each row's nucleus; ``ids`` (m,) are nuclei's tokens, ``counts`` (n,) their sizes."""
    nucleus_places = torch.arange(len(counts)).repeat_interleave(counts) * logits.shape[1] + ids
    mask = torch.ones_like(logits, dtype=torch.bool)
    mask.view(-1)[to_device(nucleus_places, logits.device)] = False
    return mask


def chunk_tokens(model: PreTrainedModel) -> int:
    """Number of tokens whose logits are held at a time."""
    most = CHUNK_BYTES
    if model.device.type == "cuda":
        most = torch.cuda.get_device_properties(model.device).total_memory // GPU_CHUNK_SHARE
    return max(CHUNK_TOKENS, most // (4 * model.config.get_text_config().vocab_size))


def unflatten(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) values of the unmasked tokens, from values (N,); 0 elsewhere."""
    flat = values.new_zeros(mask.numel()).index_copy(0, token_index(mask, values.device), values)
    return flat.view(mask.shape)
