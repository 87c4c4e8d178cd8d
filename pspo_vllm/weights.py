"""The policy's weights as its files would hold them, which vLLM loads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

import torch
import transformers
from torch import Tensor

from pspo import distributed as dist
from pspo.model.adapters import merged_weights


@torch.no_grad()
def weights_of_files(policy: transformers.PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """`merged_weights`, gathered, under the names and in the shapes of files: the library fuses experts, say.

    A weight that is tied to another one comes under both names: without its own, vLLM draws from another head.
    """
    from transformers.core_model_loading import revert_weight_conversion  # takes a second to import

    def layer_prefix(named_weight: tuple[str, Tensor]) -> str:
        return re.match(r"(.*?\.\d+\.)?", named_weight[0])[0]

    for _, layer in groupby(merged_weights(policy), layer_prefix):
        weights = {name: dist.full_tensor(weight) for name, weight in layer}
        yield from revert_weight_conversion(policy, weights).items()
