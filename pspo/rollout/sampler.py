"""Draw completions: the `Sampler` of a run, and `generate`, which makes a rollout of a decoder's completions."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StopStringCriteria

from pspo import distributed as dist
from pspo.config import AlgorithmConfig, Decoder, RolloutConfig
from pspo.model import autocast, default_max_rows, is_out_of_memory, stop_token_ids, takes_visible_columns
from pspo.model.exactness import check_exactness
from pspo.model.find import check_token_ids, token_ids
from pspo.model.shared_prompts import has_plain_cache
from pspo.rollout.decode import decode, generate_by_library
from pspo.rollout.drawing import Generators, random_numbers, set_torch_states, torch_states
from pspo.rollout.graphs import decode_by_graphs
from pspo.rollout.prompts import Prompts
from pspo.rollout.types import Completions, Padded, Rollout, Sampling, join
from pspo.signals import StopSignals

DECODERS = {"pspo": decode, "graphs": decode_by_graphs, "hf": generate_by_library}


@dataclass(frozen=True)
class How:
    """How a rollout is drawn."""

    sampling: Sampling  # greedy at temperature 0
    model: PreTrainedModel | None = None  # the model that draws; None for a run's engine
    generators: Generators | None = None  # states for sampling; None for torch's global generators


class Sampler(Protocol):
    """Draws rollouts: by the policy, an engine or an environment; `pspo.run.run.Run` chooses one at its start."""

    def draw(self, prompts: Prompts, group_size: int, how: How) -> Rollout:
        """Draw ``group_size`` completions of each prompt. A sharded model's weights must be gathered."""


@contextmanager
def interruptible(signals: StopSignals) -> Iterator[None]:
    """Raise Stopped in a `with` block that draws, as soon as a first signal comes, or has come before."""
    signals.is_drawing = True
    try:
        if signals.error is not None:
            raise signals.error
        yield
    finally:
        signals.is_drawing = False


@dataclass(frozen=True)
class PolicySampler:
    """Draws rollouts from a model, with `generate`."""

    tokenizer: PreTrainedTokenizerBase
    autocast: str = "none"  # --model.autocast of forward passes
    signals: StopSignals = field(default_factory=StopSignals)  # a signal to stop ends a draw at once
    memory: Generators | None = None  # stores how many rows fit once memory has run out

    def draw(self, prompts: Prompts, group_size: int, how: How) -> Rollout:
        with random_numbers(how.generators), autocast(self.autocast, how.model.device), interruptible(self.signals):
            return generate(how.model, self.tokenizer, prompts.ids, how.sampling, group_size, self.memory)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    group_size: int = 1,
    memory: Generators | None = None,
) -> Rollout:
    """Draw ``group_size`` completions of each encoded prompt with torch's global generators.

    At most `Sampling.max_rows` rows are decoded at a time. If memory runs out, that number is halved, which ``memory``
    keeps, and all completions are drawn again.
    """
    stop_strings = StopStringCriteria(tokenizer, list(sampling.stop_strings)) if sampling.stop_strings else None
    max_rows = sampling.max_rows if memory is None else min(sampling.max_rows, memory.max_rows)
    if max_rows < group_size:  # then each row computes its prompt itself
        prompts = [prompt for prompt in prompts for _ in range(group_size)]
        group_size = 1
    at_a_time = max(1, min(len(prompts), max_rows // group_size))
    states = torch_states(model.device)
    parts = []
    try:
        for i in range(0, len(prompts), at_a_time):
            padded = left_pad(prompts[i : i + at_a_time], sampling.pad_id)
            completions = DECODERS[sampling.decoder](model, padded, sampling, stop_strings, group_size)
            parts.append(make_rollout(tokenizer, padded, completions, sampling))
        return parts[0] if len(parts) == 1 else join(parts, sampling.pad_id)
    except RuntimeError as error:
        halved = halve_rows(sampling, at_a_time * group_size, memory, error)
    parts.clear()  # outside the except block, whose error holds the tensors of the failed pass
    set_torch_states(states, model.device)
    return generate(model, tokenizer, prompts, halved, group_size, memory)


def halve_rows(sampling: Sampling, rows: int, memory: Generators | None, error: RuntimeError) -> Sampling:
    """Sampling of half as many rows at a time if memory ran out; raises any other ``error``, and that of one row."""
    if rows == 1 or not is_out_of_memory(error):
        raise error
    if memory is not None:
        memory.max_rows = rows // 2
    warnings.warn(f"out of memory: drawing as with --rollout.max_rows {rows // 2}", stacklevel=1)
    return replace(sampling, max_rows=rows // 2)


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> Padded:
    """Pad token lists on the left, to the longest."""
    width = max(map(len, prompts))
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts]
    return Padded(torch.tensor(ids), torch.tensor(mask))


def completion_texts(
    tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], completions: list[list[int]], stop_ids: Sequence[int]
) -> list[str]:
    """Completions as text; a `<think>` that ends the prompt, by its template, begins the text.

    Special tokens that stop, pad or begin are left out. Other special tokens stay, so that rewards see all tags.
    """
    ends = tokenizer.batch_decode([ids[-10:] for ids in prompts])  # ten tokens hold a `<think>` in any vocabulary
    added = tokenizer.added_tokens_decoder
    dropped = {i for i in stop_ids if i in added and added[i].special}
    dropped |= {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id}
    texts = tokenizer.batch_decode([[i for i in ids if i not in dropped] for ids in completions])
    opened = ["<think>" if end.rstrip().endswith("<think>") else "" for end in ends]
    return [start + text for start, text in zip(opened, texts, strict=True)]


def make_rollout(
    tokenizer: PreTrainedTokenizerBase, prompts: Padded, completions: Completions, sampling: Sampling
) -> Rollout:
    """Make a rollout of prompts (N, P) and the completions (N * group_size, T) drawn for them."""
    ids = completions.ids.cpu()
    n_rows, width = ids.shape
    prompt_ids, prompt_mask = (part.repeat_interleave(n_rows // len(part), dim=0) for part in prompts)
    is_stop = torch.isin(ids, torch.tensor(sampling.stop_ids, dtype=torch.long))
    if sampling.stop_strings:
        stop_strings = StopStringCriteria(tokenizer, list(sampling.stop_strings))
        is_stop |= torch.stack([stop_strings(ids[:, : t + 1], None) for t in range(width)], dim=1)
    terminated = is_stop.any(dim=1)
    lengths = torch.where(terminated, is_stop.long().argmax(dim=1) + 1, width)
    width = int(lengths.max())  # a GPU draws tokens beyond it until its next check
    mask = torch.arange(width) < lengths[:, None]  # not by values: a pad token may equal a stop token
    ids = ids[:, :width].where(mask, sampling.pad_id)
    tokens = [row.tolist() for row in ids[mask].split(lengths.tolist())]
    texts = completion_texts(tokenizer, prompt_ids.tolist(), tokens, sampling.stop_ids)
    logprobs = completions.logprobs[:, :width].cpu().where(mask, 0.0) if sampling.logprobs else None
    nucleus = completions.nucleus.rows(torch.arange(n_rows), width) if sampling.nucleus else None
    return Rollout(prompt_ids, prompt_mask, ids, mask, terminated, texts, logprobs, nucleus)


def check_decoding(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, prompts: Prompts, autocast_mode: str
) -> None:
    """Raise ValueError if `check_exactness`, tried on a few prompts, refuses the model."""
    greedy = replace(sampling.greedy(), stop_ids=(), stop_strings=(), max_completion_tokens=4)  # nothing ends them

    def decode_greedily(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        return generate(model, tokenizer, prompts, greedy, group_size=2).completion_ids.tolist()

    with dist.unsharded(model):
        check_exactness(model, prompts.ids, decode_greedily, autocast_mode)


def make_sampling(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    algorithm: AlgorithmConfig | None = None,
) -> Sampling:
    """Sampling as --rollout says, with the model's pad token, and its stop tokens unless --rollout.stop_tokens is set.

    Log-probs are recorded if ``algorithm`` corrects by them or forms ratios to them; nuclei, if it replays them.
    Raises ValueError if the decoder does not support the model.
    """
    algorithm = algorithm or AlgorithmConfig()
    nucleus = algorithm.nucleus == "replay"
    logprobs = algorithm.ratios_to_engine(config) or algorithm.correction_for(config) != "none"
    is_recorded = logprobs and config.engine is None  # an engine brings its log-probs
    decoder = find_decoder(model, config.decoder, is_recorded, nucleus)
    names = config.stop_tokens
    check_token_ids(model.config, tokenizer, [[tokenizer.pad_token_id]])
    return Sampling(
        stop_ids=stop_token_ids(model, tokenizer) if names is None else token_ids(tokenizer, names),
        pad_id=tokenizer.pad_token_id,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_completion_tokens=config.max_completion_tokens,
        stop_strings=config.stop_strings,
        max_rows=config.max_rows or default_max_rows(model.device),
        decoder=decoder,
        logprobs=logprobs,
        nucleus=nucleus,
    )


def find_decoder(model: PreTrainedModel, decoder: Decoder, logprobs: bool, nucleus: bool) -> Decoder:
    """The decoder that --rollout.decoder asks for; "auto": the first of graphs (on a GPU), pspo and hf that can draw.

    Prints why auto takes a slower decoder, in one line. Raises ValueError if the decoder cannot draw from the model.
    """
    can_graph = takes_visible_columns(model) and not dist.is_sharded(model) and not nucleus
    faults = {
        "graphs": "" if can_graph else "graphs need sdpa, full attention in every layer, no fsdp2, no nucleus replay",
        "pspo": "" if has_plain_cache(model) else f"pspo does not support {type(model).__name__}'s cache",
        "hf": "hf records no log-probs (--algorithm.correction) and no nucleus" if logprobs or nucleus else "",
    }
    wanted = [decoder]
    if decoder == "auto":
        wanted = ["graphs", "pspo", "hf"] if model.device.type == "cuda" else ["pspo", "hf"]
    able = [name for name in wanted if not faults[name]]
    if not able:
        reasons = "; ".join(faults[name] for name in wanted)
        raise ValueError(f"--rollout.decoder {decoder}: {reasons}; choose another decoder or model")
    if faults[wanted[0]]:
        print(f"decoder  {able[0]}: {faults[wanted[0]]}")
    return able[0]
