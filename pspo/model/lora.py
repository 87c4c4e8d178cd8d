"""LoRA: a frozen model, and trained low-rank matrices A and B beside its linear layers, by PEFT (see `pspo.hub`)."""

import torch
from transformers import PreTrainedModel


def has_adapters(policy: PreTrainedModel) -> bool:
    return getattr(policy, "_hf_peft_config_loaded", False)


class StartingAdapters:
    """Reference model of a policy with adapters, in a `with` block: the same model with the adapters it has now."""

    def __init__(self, policy: PreTrainedModel):
        self.policy = policy
        self.adapters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.start = [parameter.detach().clone() for parameter in self.adapters]

    def __enter__(self) -> PreTrainedModel:
        self.swap()
        return self.policy

    def __exit__(self, *_: object) -> None:
        self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the policy's adapters and the kept ones."""
        for adapter, other in zip(self.adapters, self.start, strict=True):
            kept = adapter.clone()
            adapter.copy_(other)
            other.copy_(kept)
        torch.clear_autocast_cache()  # which holds bf16 copies of the adapters
