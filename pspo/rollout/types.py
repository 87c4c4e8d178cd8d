"""Data of a rollout: the settings of sampling, tensors, rewards and advantages, and the rows that the loss takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from pspo.config import AlgorithmConfig, Decoder, RewardConfig
from pspo.losses import LossInputs
from pspo.model import Targets, to_device, token_logprobs, unflatten
from pspo.tasks import Problem, total_rewards
from pspo.tasks.scoring import Scores


def cat_padded(parts: Sequence[Tensor], value: float = 0, side: str = "right") -> Tensor:
    """The rows (b, t) of all parts, each padded with ``value`` to the widest: (B, T)."""
    return pad_sequence([*chain(*parts)], batch_first=True, padding_value=value, padding_side=side)


@dataclass(frozen=True)
class Sampling:
    """Settings of the sampled distribution and of where completions end; `make_sampling` finds the stop tokens."""

    stop_ids: Sequence[int]  # tokens that end a completion, and are part of it
    pad_id: int
    temperature: float = 0.6  # 0 decodes greedily
    top_p: float = 0.85
    top_k: int = 0
    max_completion_tokens: int = 128
    stop_strings: Sequence[str] = ()  # texts that end a completion, with the token that completes them
    max_rows: int = 256  # rows that are decoded at a time
    decoder: Decoder = "pspo"  # "pspo" (`decode`), "graphs" or "hf"; `make_sampling` chooses for "auto"
    logprobs: bool = False  # record the log-probs that tokens were drawn by; not with decoder "hf"
    nucleus: bool = False  # record nuclei, over which log-probs are renormalised; not with decoder "hf"

    def greedy(self) -> "Sampling":
        return replace(self, temperature=0.0, logprobs=False, nucleus=False)


@dataclass(frozen=True)
class Nucleus:
    """The tokens that each completion token was drawn from."""

    ids: list[Tensor]  # B tensors int64: the nuclei of a row's columns, one after the other
    counts: Tensor  # (B, T) int64, the size of each nucleus; 0 after the stop token

    def rows(self, indices: Tensor, width: int) -> "Nucleus":
        """Nuclei of the first ``width`` columns of the rows at ``indices`` (b,) int64."""
        counts = self.counts[indices, :width]
        ids = [self.ids[i][:n] for i, n in zip(indices.tolist(), counts.sum(dim=1).tolist(), strict=True)]
        return Nucleus(ids, counts)

    def select(self, rows: slice, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Ids (M,) in the nuclei of N unmasked tokens, nucleus after nucleus, and the sizes (N,) of the nuclei."""
        counts = self.counts[rows]
        is_selected = mask.flatten().repeat_interleave(counts.flatten())
        return torch.cat(self.ids[rows])[is_selected], counts[mask]


@dataclass(frozen=True)
class Completions:
    """Completions of N prompts, the rows of one prompt adjacent; log-probs and nuclei on request."""

    ids: Tensor  # (N * group_size, T) int64, padded after their stop token
    logprobs: Tensor | None = None  # (N * group_size, T) float32, at the temperature; over recorded nuclei, if any
    nucleus: Nucleus | None = None


class Padded(NamedTuple):
    """N left-padded prompts."""

    ids: Tensor  # (N, P) int64
    mask: Tensor  # (N, P) bool


# Metadata of the fields of `Rollout` with a value for each token: the side on which rows are padded.
PROMPT = {"side": "left"}
COMPLETION = {"side": "right"}


@dataclass(frozen=True)
class Rollout:
    """B prompts with one completion each, on the CPU; the rows of one prompt are adjacent."""

    prompt_ids: Tensor = field(metadata=PROMPT)  # (B, P) int64
    prompt_mask: Tensor = field(metadata=PROMPT)  # (B, P) bool
    completion_ids: Tensor = field(metadata=COMPLETION)  # (B, T) int64
    completion_mask: Tensor = field(metadata=COMPLETION)  # (B, T) bool, true through the first stop token inclusive
    terminated: Tensor  # (B,) bool, false where the completion hit the token limit
    texts: list[str]  # by `completion_texts`: a `<think>` that ends the prompt begins the text
    sampler_logprobs: Tensor | None = field(default=None, metadata=COMPLETION)  # (B, T) float32, as in `Completions`
    nucleus: Nucleus | None = None  # nuclei of the tokens; recorded, as the log-probs, if `Sampling` asks
    sampled_mask: Tensor | None = field(default=None, metadata=COMPLETION)  # (B, T) bool, false at observations
    environment_rewards: list[float] | None = None  # each episode's summed rewards; `texts` then hold last turns
    behaviour_logprobs: Tensor | None = field(default=None, metadata=COMPLETION)  # (B, T), of the policy that drew

    def __len__(self) -> int:
        return len(self.texts)

    def is_of(self, prompts: Sequence[Sequence[int]], group_size: int) -> bool:
        """True if the rows complete these encoded prompts, each ``group_size`` times."""
        rows = zip(self.prompt_ids, self.prompt_mask, strict=True)
        repeated = [list(prompt) for prompt in prompts for _ in range(group_size)]
        return [ids[mask].tolist() for ids, mask in rows] == repeated

    def rows(self, indices: Tensor) -> "Rollout":
        """The rows at ``indices`` (b,) int64, without the columns that are padding in all of them."""
        first = self.prompt_mask.shape[1] - int(self.prompt_mask[indices].sum(dim=1).max())
        width = max(int(self.completion_mask[indices].sum(dim=1).max()), 1)
        kept = {"left": slice(first, None), "right": slice(width)}
        rows = {}
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, Nucleus):
                value = value.rows(indices, width)
            elif isinstance(value, list):
                value = [value[i] for i in indices.tolist()]
            elif value is not None:
                value = value[indices, kept[part.metadata["side"]]] if part.metadata else value[indices]
            rows[part.name] = value
        return Rollout(**rows)

    @property
    def loss_mask(self) -> Tensor:
        """(B, T) bool, true at the completion tokens that the model drew; the loss uses no others."""
        return self.completion_mask if self.sampled_mask is None else self.completion_mask & self.sampled_mask

    @property
    def turns(self) -> Tensor:
        """(B,) int64, the number of the model's turns."""
        mask = self.loss_mask
        return mask[:, 0].long() + (mask[:, 1:] & ~mask[:, :-1]).sum(dim=1)

    @property
    def token_ids(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """prompt_ids, prompt_mask, completion_ids, completion_mask: arguments of `token_logprobs`."""
        return self.prompt_ids, self.prompt_mask, self.completion_ids, self.completion_mask

    def targets(self, rows: slice) -> Targets:
        mask = self.completion_mask[rows]
        nucleus = None if self.nucleus is None else self.nucleus.select(rows, mask)
        return Targets(self.completion_ids[rows][mask], nucleus)

    def logprobs(self, model: PreTrainedModel, temperature: float) -> Tensor:
        """(B, T) log-probs of the completions by a model, without gradient; see `token_logprobs`."""
        with torch.no_grad():
            return token_logprobs(model, *self.token_ids, temperature, self.targets(slice(None)).nucleus)

    def score(self, problems: list[Problem], group_size: int, reward: RewardConfig, step: int, limit: int) -> Scores:
        """Rewards of B completions of B problems, ``group_size`` a group; lengths count an environment's tokens."""
        drawn = self.loss_mask.sum(dim=1).tolist()
        return total_rewards(
            reward,
            self.texts,
            problems,
            self.environment_rewards,
            group_size,
            completion_ids=[row.tolist() for row in self.completion_ids[self.loss_mask].split(drawn)],
            completion_tokens=self.completion_mask.sum(dim=1).tolist(),
            truncated=(~self.terminated).tolist(),
            step=step,
            max_completion_tokens=limit,
        )

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens, padding excluded."""
        return int(self.prompt_mask.sum() + self.completion_mask.sum())


def join(parts: Sequence[Rollout], pad_id: int = 0) -> Rollout:
    """The rows of all rollouts, one after the other; all must have the same fields."""
    joined = {}
    for part in fields(Rollout):
        values = [getattr(rollout, part.name) for rollout in parts]
        if isinstance(values[0], Nucleus):
            ids = [row for nucleus in values for row in nucleus.ids]
            joined[part.name] = Nucleus(ids, cat_padded([nucleus.counts for nucleus in values]))
        elif isinstance(values[0], list):
            joined[part.name] = [*chain(*values)]
        elif part.metadata and values[0] is not None:
            filler = pad_id if values[0].dtype == torch.long else 0
            joined[part.name] = cat_padded(values, filler, part.metadata["side"])
        elif any(value is not None for value in values):
            joined[part.name] = torch.cat(values)
    return Rollout(**joined)


def without_truncated(rollout: Rollout) -> Rollout:
    """The rollout for the loss under --algorithm.mask_truncated: all tokens of rows that hit the limit are masked."""
    return replace(rollout, completion_mask=rollout.completion_mask & rollout.terminated[:, None])


def trained_rows(rollout: Rollout, advantages: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """(B,) bool, true at rows with a signal: a token in the loss whose advantage, (B,) or (B, T), is not 0.

    Terms of the loss alone give other rows a gradient. Statistics omit them, and resampling replaces groups of them.
    """
    if algorithm.mask_truncated:
        rollout = without_truncated(rollout)
    return (rollout.loss_mask & (advantages.reshape(len(rollout.texts), -1) != 0)).any(dim=1)


@dataclass(frozen=True)
class Experience:
    """A scored rollout of B rows."""

    prompt_indices: list[int]  # of each group, its prompt's index among the training prompts
    rollout: Rollout
    rewards: Tensor  # (B,) float64, NaN if unknown
    rewards_by_name: dict[str, list[float]]  # B values for each reward function
    logged: dict[str, list[Any]] = field(default_factory=dict)  # by name, B values (or None) logged by reward functions
    advantages: Tensor | None = None  # (B,) or (B, T) float32; None until they are estimated
    reward_failed: bool = False  # a function failed for some of the completions drawn (--reward.on_error none)
    drawn_rewards: list[float] = field(default_factory=list)  # rewards of all rows drawn, if resampling replaced some
    drawn_tokens: int = 0  # prompt and completion tokens of all rows drawn, if resampling replaced some

    def has_signal(self, algorithm: AlgorithmConfig) -> list[bool]:
        """By group, True if a row has a signal (`trained_rows`); for group-relative advantages, if rewards differ."""
        rows = trained_rows(self.rollout, self.advantages, algorithm)
        return rows.view(len(self.prompt_indices), -1).any(dim=1).tolist()

    @property
    def row_advantages(self) -> list[float]:
        """B numbers: each row's advantage, or the mean of its tokens' advantages."""
        if self.advantages.dim() == 1:
            return self.advantages.tolist()
        lengths = self.rollout.loss_mask.sum(dim=1).clamp(min=1)
        return (self.advantages.sum(dim=1) / lengths).tolist()


@dataclass(frozen=True)
class Batch:
    """B rows of a rollout, with the advantages and log-probs that the loss needs."""

    rollout: Rollout
    advantages: Tensor  # (B, 1) or (B, T) float32, on the CPU
    old_logprobs: Tensor | None = None  # (B, T), denominators of ratios; None: the pass's own log-probs, so r is 1
    ref_logprobs: Tensor | None = None  # (B, T), of the reference model; None without one
    indices: Tensor | None = None  # (B,) int64, the rows' places in the whole rollout; None if all are here

    def rows(self, indices: Tensor) -> "Batch":
        """The rows at ``indices`` (b,) int64, trimmed as `Rollout.rows` trims them."""
        rollout = self.rollout.rows(indices)
        width = rollout.completion_ids.shape[1]
        values = [self.advantages, self.old_logprobs, self.ref_logprobs]
        for i, tensor in enumerate(values):
            if tensor is not None:
                values[i] = tensor[to_device(indices, tensor.device), :width]
        return Batch(rollout, *values, indices if self.indices is None else self.indices[indices])

    def loss_inputs(self, rows: slice, logprobs: Tensor, entropies: Tensor, step: int) -> LossInputs:
        """Inputs of the loss at some whole rows, from log-probs and entropies (n,) of their completion tokens."""
        completion_mask = self.rollout.completion_mask[rows]
        sampler_logprobs = self.rollout.sampler_logprobs
        logprobs = unflatten(logprobs, completion_mask)
        own = logprobs.detach()
        mask = to_device(self.rollout.loss_mask[rows], logprobs.device)
        return LossInputs(
            logprobs=logprobs,
            old_logprobs=own if self.old_logprobs is None else self.old_logprobs[rows].to(own).where(mask, own),
            advantages=to_device(self.advantages[rows], logprobs.device),
            mask=mask,
            entropies=unflatten(entropies, completion_mask),
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs[rows],
            sampler_logprobs=None if sampler_logprobs is None else to_device(sampler_logprobs[rows], logprobs.device),
            step=step,
        )
