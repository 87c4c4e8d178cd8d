"""A run's random numbers, and how a token is drawn: scale scores by the temperature, find the nucleus, draw from it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pspo import distributed as dist
from pspo.rollout.types import Nucleus, Sampling

MAX_TRIES = 32  # tries of rejection sampling: at top_p 0.5 one row in 4e9 needs more
RACE_MISS = 1e-12  # probability of a draw that `sample_race` may get wrong


def torch_states(device: torch.device) -> list[Tensor]:
    """The states of torch's global generators: the CPU's, and the GPU's if ``device`` is one."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_torch_states(states: list[Tensor], device: torch.device) -> None:
    """Set the states of torch's global generators; a GPU's state is skipped on a CPU."""
    torch.set_rng_state(states[0])
    if len(states) > 1 and device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


class Generators:
    """States of torch's generators for sampling alone; `random_numbers` puts them into torch's global generators.

    Users' code (a reward, an environment, a loss) may draw from Python's, numpy's and torch's global generators, or
    seed them: no completion changes. The constructor seeds both kinds, and `state_dict` saves both, for this rank.
    """

    per_rank = True

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.max_rows = math.inf  # rows decoded at a time once memory has run out; tokens drawn depend on it
        self.seed(seed)

    def seed(self, seed: int, steps: int = 0) -> None:
        """Seed all generators, differently by rank and ``steps``; at step 0, rank 0 samples from ``seed`` itself."""
        mixed = [np.random.SeedSequence((seed, dist.rank(), steps, i)).generate_state(1)[0] for i in (0, 1)]
        is_first = dist.rank() == 0 and steps == 0
        torch.manual_seed(seed if is_first else int(mixed[0]))
        self.states = torch_states(self.device)
        random.seed(int(mixed[1]))
        np.random.seed(mixed[1])  # noqa: NPY002
        torch.manual_seed(int(mixed[1]))

    def state_dict(self) -> dict[str, Any]:
        kind, keys, *position = np.random.get_state()  # noqa: NPY002 (users' code may draw from it)
        return {
            "python": random.getstate(),
            "numpy": [kind, keys.tolist(), *position],
            "torch": torch_states(self.device),
            "sampling": self.states,
            "max_rows": self.max_rows,
        }

    def fork_state(self, state: dict[str, Any], changes: dict[str, tuple[Any, Any]]) -> dict[str, Any] | None:
        """The parent run's states without its row limit, which its memory set; None if the seed has changed."""
        return None if "run.seed" in changes else state | {"max_rows": math.inf}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        kind, keys, *position = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *position))  # noqa: NPY002
        set_torch_states(state["torch"], self.device)
        self.states = state["sampling"]
        self.max_rows = state["max_rows"]


@contextmanager
def random_numbers(generators: Generators | None) -> Iterator[None]:
    """Run a `with` block on the states of ``generators``, then store the new states there; None changes nothing."""
    if generators is None:
        yield
        return
    device = generators.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        set_torch_states(generators.states, device)
        try:
            yield
        finally:
            generators.states = torch_states(device)


def draw_tokens(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens (b,), one from the nucleus of each row of logits (b, V); and scores (b, V), which give their log-probs.

    Scores are float32 logits at the temperature. Temperature 0 takes the likeliest tokens.
    """
    scores = logits.float() / (sampling.temperature or 1.0)
    if sampling.temperature == 0:
        return scores.argmax(dim=1), scores
    allowed = scores if sampling.top_k == 0 else keep_likeliest(scores, sampling.top_k)
    return sample_nucleus(allowed.softmax(dim=1), sampling.top_p), scores


def keep_likeliest(scores: Tensor, k: int) -> Tensor:
    """Scores (b, V), -inf below the k-th highest of a row."""
    least = scores.topk(min(k, scores.shape[1])).values[:, -1:]
    return scores.masked_fill(scores < least, -torch.inf)


def sample_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Draw one token (b,) a row from its nucleus: the tokens with less than top_p of the mass strictly above them.

    Takes probabilities (b, V) float32, after temperature. Equally likely tokens at the nucleus' edge all belong to it.
    On a CPU a token outside is drawn again, at most `MAX_TRIES` times. After these, and on a GPU, `sample_race` draws.
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
    """Draw as `sample_nucleus`, by a fixed number of operations that never wait for a GPU: a CUDA graph can hold them.

    Tokens arrive at exponential times, at the rates ``probs``. The first token of any set to arrive is a draw from
    that set, so the first arrival inside the nucleus is the token drawn. The candidates are the likeliest token and the
    first k arrivals, which are all outside with a probability below `RACE_MISS`. A bisection finds the nucleus' edge.
    """
    race = probs / torch.empty_like(probs).exponential_()
    if top_p >= 1:
        return race.argmax(dim=1)
    k = min(math.ceil(math.log(RACE_MISS) / math.log1p(-top_p)), probs.shape[1])
    arrivals = race.topk(k, dim=1).indices
    candidates = torch.cat([arrivals, probs.argmax(dim=1, keepdim=True)], dim=1)  # (b, k + 1)
    p = probs.gather(1, candidates)
    ordered = p.sort(dim=1, descending=True).values
    inside = torch.zeros_like(candidates[:, :1])  # place of the least likely candidate known to be inside
    for bit in reversed(range(k.bit_length())):
        place = (inside + (1 << bit)).clamp(max=k)
        above = (probs * (probs > ordered.gather(1, place))).sum(dim=1, keepdim=True)
        inside = place.where(above < top_p, inside)
    first = (p >= ordered.gather(1, inside)).long().argmax(dim=1, keepdim=True)
    return candidates.gather(1, first).squeeze(1)


def in_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """(b, V) bool, true in the nucleus that `sample_nucleus` draws from, for probabilities (b, V) float32."""
    if top_p >= 1:
        return probs > 0
    ordered = probs.sort(dim=1, descending=True).values
    above = ordered.cumsum(dim=1, dtype=torch.float64) - ordered  # right at the first of equally likely tokens
    least = ordered.masked_fill(above >= top_p, torch.inf).amin(dim=1, keepdim=True)
    return probs >= least


class NucleusRecorder:
    """Records the nuclei that tokens are drawn from, for --algorithm.nucleus replay."""

    def __init__(self, completions: Tensor):
        self.counts = torch.zeros_like(completions)  # (B, T), tokens of each nucleus
        self.rows: list[Tensor] = []  # by step, the row of each recorded token
        self.ids: list[Tensor] = []

    def cut(self, logits: Tensor, sampling: Sampling, live: Tensor, ended: Tensor, column: int) -> Tensor:
        """Logits (b, V), -inf outside nuclei; records the nuclei of the rows ``live`` (b,) that have not ended."""
        scores = logits.float() / (sampling.temperature or 1.0)
        allowed = scores if sampling.top_k == 0 else keep_likeliest(scores, sampling.top_k)
        is_inside = in_nucleus(allowed.softmax(dim=1), sampling.top_p) & (allowed > -torch.inf)
        recorded = is_inside & ~ended[:, None]
        rows, ids = recorded.nonzero(as_tuple=True)
        self.counts[live, column] = recorded.sum(dim=1)
        self.rows.append(live[rows])
        self.ids.append(ids)
        return logits.masked_fill(~is_inside, -torch.inf)

    def collect(self, length: int) -> Nucleus:
        """The nuclei of the first ``length`` columns."""
        ids = torch.cat(self.ids)[torch.cat(self.rows).argsort(stable=True)].cpu()
        counts = self.counts[:, :length].cpu()
        return Nucleus(list(ids.split(counts.sum(dim=1).tolist())), counts)
