"""What a rollout is made of."""

from dataclasses import dataclass

from torch import Tensor


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
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    terminated: Tensor
    texts: list[str]

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
        )

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
        ref_logprobs: (B, T) float32 without gradient, of the reference model; None where beta is 0.
    """

    rollout: Rollout
    advantages: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
