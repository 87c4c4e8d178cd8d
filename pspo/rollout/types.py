"""The tensors of a rollout, and of its rows as the loss sees them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

Decoder = Literal["pspo", "graphs", "hf"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor; to a GPU from pinned memory, so that the CPU does not wait for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class Rollout:
    """B prompts with one completion each; the rows of one prompt are adjacent.

    Attributes:
        prompt_ids: (B, P) int64, left-padded.
        prompt_mask: (B, P) bool.
        completion_ids: (B, T) int64, right-padded.
        completion_mask: (B, T) bool, true through the first stop token inclusive.
        terminated: (B,) bool, false where the completion hit the token limit.
        texts: the completions as text, without special tokens.
        sampler_logprobs: (B, T) float32, what the tokens were sampled with, at the temperature and before the nucleus
            cut; None unless `Sampling.logprobs` asks for them. `token_logprobs` gives the same to rounding.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    terminated: Tensor
    texts: list[str]
    sampler_logprobs: Tensor | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def rows(self, indices: Tensor) -> "Rollout":
        """The rows at ``indices`` (b,) int64, without the columns that are padding in all of them."""
        prompt_mask, completion_mask = self.prompt_mask[indices], self.completion_mask[indices]
        first = self.prompt_mask.shape[1] - int(prompt_mask.sum(dim=1).max())
        width = max(int(completion_mask.sum(dim=1).max()), 1)
        return Rollout(
            self.prompt_ids[indices, first:],
            prompt_mask[:, first:],
            self.completion_ids[indices, :width],
            completion_mask[:, :width],
            self.terminated[indices],
            [self.texts[i] for i in indices.tolist()],
            None if self.sampler_logprobs is None else self.sampler_logprobs[indices, :width],
        )

    def cpu(self) -> "Rollout":
        parts = {name: value.cpu() for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **parts)

    @staticmethod
    def join(rollouts: Sequence["Rollout"]) -> "Rollout":
        """The rows of all, one rollout after the other; without `sampler_logprobs`."""
        P, T = max(r.prompt_ids.shape[1] for r in rollouts), max(r.completion_ids.shape[1] for r in rollouts)
        prompts = ([pad(part, (P - part.shape[1], 0)) for part in (r.prompt_ids, r.prompt_mask)] for r in rollouts)
        completions = (
            [pad(part, (0, T - part.shape[1])) for part in (r.completion_ids, r.completion_mask)] for r in rollouts
        )
        tensors = (*zip(*prompts, strict=True), *zip(*completions, strict=True), [r.terminated for r in rollouts])
        return Rollout(*map(torch.cat, tensors), [text for r in rollouts for text in r.texts])

    @property
    def token_ids(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """prompt_ids, prompt_mask, completion_ids, completion_mask: what `token_logprobs` takes."""
        return self.prompt_ids, self.prompt_mask, self.completion_ids, self.completion_mask

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens, padding excluded."""
        return int(self.prompt_mask.sum() + self.completion_mask.sum())


@dataclass(frozen=True)
class Batch:
    """A rollout, or some rows of one, as the loss sees it.

    Attributes:
        rollout: B rows.
        advantages: (B,) float32.
        old_logprobs: (B, T) float32 without gradient, of the policy that made the rollout; None until known.
        ref_logprobs: (B, T) float32 without gradient, of the reference model; None if beta is 0.
    """

    rollout: Rollout
    advantages: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None

    def rows(self, indices: Tensor) -> "Batch":
        """The rows at ``indices`` (b,) int64, trimmed as `Rollout.rows` trims them."""
        rollout = self.rollout.rows(indices)
        width = rollout.completion_ids.shape[1]
        old, ref = (None if part is None else part[indices, :width] for part in (self.old_logprobs, self.ref_logprobs))
        return Batch(rollout, self.advantages[indices], old, ref)

    def masked_row(self) -> "Batch":
        """One row without an unmasked token: a microbatch whose gradient is 0."""
        row = self.rows(torch.zeros(1, dtype=torch.long, device=self.advantages.device))
        masked = replace(row.rollout, completion_mask=torch.zeros_like(row.rollout.completion_mask))
        return replace(row, rollout=masked)

    def halves(self) -> list["Batch"]:
        """The first and the second half of the rows; a single row stays whole."""
        parts = torch.arange(len(self.rollout), device=self.advantages.device).tensor_split(2)
        return [self.rows(part) for part in parts if len(part)]

    @property
    def padded_tokens(self) -> int:
        """Tokens that a forward pass computes, padding included, prompts of adjacent rows once."""
        ids = self.rollout.prompt_ids
        prompts = 1 + int((ids[1:] != ids[:-1]).any(dim=1).sum())
        return prompts * ids.shape[1] + self.rollout.completion_ids.numel()
