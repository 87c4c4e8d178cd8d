"""Drawing a token: scores at the temperature, the nucleus, and a draw from it; the nuclei are recorded on request."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pspo.rollout.types import Nucleus, Sampling

MAX_TRIES = 32  # of sampling by rejection: at top_p 0.5 one row in 4e9 needs more
RACE_MISS = 1e-12  # probability of a draw that `sample_race` may get wrong


def score_tokens(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Logits (b, V) at the temperature, float32; and the same with -inf below the top_k largest of each row."""
    scores = logits.float() / (sampling.temperature or 1.0)
    if sampling.top_k == 0:
        return scores, scores
    least = scores.topk(min(sampling.top_k, scores.shape[1])).values[:, -1:]
    return scores, scores.masked_fill(scores < least, -torch.inf)


def draw_tokens(scores: Tensor, temperature: float, top_p: float) -> Tensor:
    """A token (b,) of each row of scores (b, V), from its nucleus; temperature 0 takes the likeliest."""
    return sample_nucleus(scores.softmax(dim=1), top_p) if temperature > 0 else scores.argmax(dim=1)


def sample_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Draw one token a row from its nucleus: the tokens with less than top_p of the mass strictly above them.

    Takes probabilities (b, V) float32, after temperature; returns tokens (b,) int64. Equally likely tokens at the
    nucleus' edge all belong to it; the library keeps an arbitrary few of them. On a CPU a token outside the nucleus is
    drawn again; where that fails `MAX_TRIES` times, and on a GPU, `sample_race` draws.
    """
    if probs.is_cuda:  # rejection would make the CPU wait for the GPU
        return sample_race(probs, top_p)
    limit = top_p if top_p < 1 else math.inf
    cdf = probs.cumsum(dim=1, dtype=torch.float64)  # float32 would round a rare token's share by a per cent
    rows = torch.arange(len(probs))
    tokens = torch.empty_like(rows)
    for _ in range(MAX_TRIES):
        u = torch.rand(len(rows), 1, dtype=torch.float64) * cdf[:, -1:]
        candidates = torch.searchsorted(cdf, u, right=True).clamp(max=probs.shape[1] - 1)  # (len(rows), 1)
        tokens[rows] = candidates.squeeze(1)
        likelier = torch.empty_like(probs)  # 0 or 1, as floats: bools are slow to multiply
        torch.gt(probs, probs.gather(1, candidates), out=likelier)
        is_outside = likelier.mul_(probs).sum(dim=1) >= limit
        rows = rows[is_outside]
        if not len(rows):
            return tokens
        probs = probs[is_outside]
        cdf = cdf[is_outside]
    tokens[rows] = sample_race(probs, top_p)
    return tokens


def sample_race(probs: Tensor, top_p: float) -> Tensor:
    """`sample_nucleus` in a fixed number of operations, without a wait for a GPU: a CUDA graph can hold them.

    Tokens arrive at exponential times, at the rates ``probs``. Of any set of tokens the first to arrive is a draw from
    that set, so the first inside the nucleus is the token. It is looked for among the first k to arrive, which are all
    outside with a probability below `RACE_MISS`, and the likeliest token, which is inside. A bisection of these
    candidates by their probability finds the least likely one inside.
    """
    race = probs / torch.empty_like(probs).exponential_()
    if top_p >= 1:
        return race.argmax(dim=1)
    k = min(math.ceil(math.log(RACE_MISS) / math.log1p(-top_p)), probs.shape[1])
    arrivals = race.topk(k, dim=1).indices
    candidates = torch.cat([arrivals, probs.argmax(dim=1, keepdim=True)], dim=1)  # (b, k + 1)
    p = probs.gather(1, candidates)
    ordered = p.sort(dim=1, descending=True).values
    inside = torch.zeros_like(candidates[:, :1])  # place of the least likely one that is known to be inside
    for bit in reversed(range(k.bit_length())):
        place = (inside + (1 << bit)).clamp(max=k)
        above = (probs * (probs > ordered.gather(1, place))).sum(dim=1, keepdim=True)
        inside = place.where(above < top_p, inside)
    first = (p >= ordered.gather(1, inside)).long().argmax(dim=1, keepdim=True)
    return candidates.gather(1, first).squeeze(1)


def in_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The nucleus that `sample_nucleus` draws from, (b, V) bool, of probabilities (b, V) float32, which are not sorted.

    Float32 numbers in [0, 1] sort like their bits, of which 30 can be set. A bisection over these finds the largest
    number with at least top_p of the mass strictly above it; the nucleus is everything larger.
    """
    if top_p >= 1:
        return probs > 0
    bits = torch.zeros_like(probs[:, :1], dtype=torch.int32)
    for bit in reversed(range(30)):
        higher = bits + (1 << bit)
        above = (probs * (probs > higher.view(torch.float32))).sum(dim=1, keepdim=True)
        bits = higher.where(above >= top_p, bits)
    return probs >= (bits + 1).view(torch.float32)


class NucleusRecorder:
    """Keeps the nuclei that tokens are drawn from, for --algorithm.nucleus replay."""

    def __init__(self, completions: Tensor):
        self.counts = torch.zeros_like(completions)  # (B, T), tokens of each nucleus
        self.rows: list[Tensor] = []  # by step, the row of each recorded token
        self.ids: list[Tensor] = []

    def cut(self, scores: Tensor, top_p: float, live: Tensor, ended: Tensor, column: int) -> Tensor:
        """Record the nuclei of a column's rows (b,) that have not ended; returns scores (b, V), -inf outside nuclei."""
        is_inside = in_nucleus(scores.softmax(dim=1), top_p)
        recorded = is_inside & ~ended[:, None]
        rows, ids = recorded.nonzero(as_tuple=True)
        self.counts[live, column] = recorded.sum(dim=1)
        self.rows.append(live[rows])
        self.ids.append(ids)
        return scores.masked_fill(~is_inside, -torch.inf)

    def collect(self, length: int) -> Nucleus:
        """The nuclei of the first ``length`` columns."""
        ids = torch.cat(self.ids)[torch.cat(self.rows).argsort(stable=True)].cpu()
        counts = self.counts[:, :length].cpu()
        return Nucleus(list(ids.split(counts.sum(dim=1).tolist())), counts)
