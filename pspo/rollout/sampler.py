"""Draw completions: the `Sampler` of a run, and `generate`, which makes a rollout of what a decoder draws."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StopStringCriteria

from pspo import distributed as dist
from pspo.model import autocast, is_out_of_memory
from pspo.model.chat import completion_texts
from pspo.model.exactness import check_exactness
from pspo.rollout.decode import decode
from pspo.rollout.generators import Generators, random_numbers, set_torch_states, torch_states
from pspo.rollout.graphs import decode_by_graphs
from pspo.rollout.library import generate_by_library
from pspo.rollout.prompts import Prompts
from pspo.rollout.types import Completions, Rollout, Sampling, join
from pspo.signals import StopSignals

DECODERS = {"pspo": decode, "graphs": decode_by_graphs, "hf": generate_by_library}


@dataclass(frozen=True)
class How:
    """How a rollout is drawn.

    Attributes:
        sampling: the distribution, greedy at temperature 0, and where completions end.
        model: draws; None for a run's engine.
        generators: whose random numbers; None for torch's global ones, which an evaluation seeds.
    """

    sampling: Sampling
    model: PreTrainedModel | None = None
    generators: Generators | None = None


class Sampler(Protocol):
    """What draws rollouts: the policy, an engine or an environment, chosen once by `pspo.run.run.Run`."""

    def draw(self, prompts: Prompts, group_size: int, how: How) -> Rollout:
        """Draw ``group_size`` completions of each prompt. Of a sharded model the weights must be gathered."""


@dataclass(frozen=True)
class PolicySampler:
    """Draws by a model, with `generate`.

    Attributes:
        autocast_mode: --model.autocast of forward passes.
        signals: one that asks the run to stop ends a drawing at once.
    """

    tokenizer: PreTrainedTokenizerBase
    autocast_mode: str = "none"
    signals: StopSignals = field(default_factory=StopSignals)

    def draw(self, prompts: Prompts, group_size: int, how: How) -> Rollout:
        with random_numbers(how.generators), autocast(self.autocast_mode, how.model.device):
            self.signals.is_drawing = True
            try:
                if self.signals.error is not None:
                    raise self.signals.error
                rollout = generate(how.model, self.tokenizer, prompts.ids, how.sampling, group_size, how.generators)
                return prompts.continued(rollout) if prompts.beginnings else rollout
            finally:
                self.signals.is_drawing = False


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    group_size: int = 1,
    generators: Generators | None = None,
) -> Rollout:
    """Draw ``group_size`` completions of each encoded prompt with torch's global generators.

    At most `Sampling.max_rows` rows are decoded at a time. If memory runs out, all are drawn again by half as many at a
    time; a run's ``generators`` keep that number for later draws.
    """
    complete = DECODERS[sampling.decoder]
    stop_strings = StopStringCriteria(tokenizer, list(sampling.stop_strings)) if sampling.stop_strings else None
    max_rows = sampling.max_rows if generators is None else min(sampling.max_rows, generators.max_rows)
    states = torch_states(model.device)
    while True:
        if max_rows < group_size:  # then each row computes its prompt itself
            prompts = [prompt for prompt in prompts for _ in range(group_size)]
            group_size = 1
        at_a_time = max(1, min(len(prompts), max_rows // group_size))
        try:
            parts = []
            for i in range(0, len(prompts), at_a_time):
                prompt_ids, prompt_mask = left_pad(prompts[i : i + at_a_time], sampling.pad_id)
                completions = complete(model, prompt_ids, prompt_mask, sampling, stop_strings, group_size)
                parts.append(make_rollout(tokenizer, prompt_ids, prompt_mask, completions, sampling))
            return parts[0] if len(parts) == 1 else join(parts, sampling.pad_id)
        except RuntimeError as error:
            if at_a_time * group_size == 1 or not is_out_of_memory(error):
                raise
        parts.clear()  # outside the except block, whose error holds the tensors of the failed pass
        max_rows = at_a_time * group_size // 2
        if generators is not None:
            generators.max_rows = max_rows
        set_torch_states(states, model.device)
        warnings.warn(f"out of memory: drawing as with --rollout.max_rows {max_rows}", stacklevel=1)


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token lists to prompt_ids (B, P) int64 and prompt_mask (B, P) bool."""
    width = max(map(len, prompts))
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def make_rollout(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completions: Completions,
    sampling: Sampling,
) -> Rollout:
    """Make a rollout of prompts (N, P) and the completions (N * group_size, T) drawn for them.

    Masks come from lengths, never from token values: a pad token may equal a stop token.
    """
    ids = completions.ids.cpu()
    n_rows, width = ids.shape
    group_size = n_rows // len(prompt_ids)
    prompt_ids = prompt_ids.repeat_interleave(group_size, dim=0)
    prompt_mask = prompt_mask.repeat_interleave(group_size, dim=0)
    is_stop = torch.isin(ids, torch.tensor(sampling.stop_ids, dtype=torch.long))
    if sampling.stop_strings:
        stop_strings = StopStringCriteria(tokenizer, list(sampling.stop_strings))
        is_stop |= torch.stack([stop_strings(ids[:, : t + 1], None) for t in range(width)], dim=1)
    terminated = is_stop.any(dim=1)
    lengths = torch.where(terminated, is_stop.long().argmax(dim=1) + 1, width)
    width = int(lengths.max())  # on a GPU tokens are drawn on until the next check
    mask = torch.arange(width) < lengths[:, None]
    ids = ids[:, :width].where(mask, sampling.pad_id)
    tokens = [row.tolist() for row in ids[mask].split(lengths.tolist())]
    texts = completion_texts(tokenizer, prompt_ids.tolist(), tokens, sampling.stop_ids)
    logprobs = completions.logprobs[:, :width].cpu().where(mask, 0.0) if sampling.logprobs else None
    nucleus = completions.nucleus.rows(torch.arange(n_rows), width) if sampling.nucleus else None
    return Rollout(prompt_ids, prompt_mask, ids, mask, terminated, texts, logprobs, nucleus)


def decode_greedily(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    prompts: Sequence[Sequence[int]],
) -> list[list[int]]:
    """The first four tokens of two greedy completions of each prompt, whatever would end them."""
    greedy = replace(sampling.greedy(), stop_ids=(), stop_strings=(), max_completion_tokens=4)
    return generate(model, tokenizer, prompts, greedy, group_size=2).completion_ids.tolist()


def check_decoding(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, prompts: Prompts, autocast_mode: str
) -> None:
    """Raise ValueError for a model that `check_exactness` refuses, tried on a few prompts."""
    with dist.unsharded(model):
        check_exactness(model, prompts.ids, partial(decode_greedily, model, tokenizer, sampling), autocast_mode)
