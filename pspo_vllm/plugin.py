"""Give vLLM what this trainer needs: log-probs at the temperature, weights over HTTP, processes that end together.

`register` is an entry point of the package (``vllm.general_plugins``), which vLLM calls in each of its processes. It
does nothing unless VLLM_PLUGINS names pspo, as in servers of ``pspo serve``.
"""

from base64 import b64decode
from multiprocessing import parent_process
from typing import Any

import safetensors.torch
from torch import Tensor
from vllm import envs
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from pspo.signals import end_with_parent


def register() -> None:
    """Prepare one of vLLM's processes, if VLLM_PLUGINS names pspo."""
    if "pspo" not in (envs.VLLM_PLUGINS or ()):
        return
    if parent_process() is not None:  # a child; the server itself may outlive its shell
        end_with_parent()
    WeightTransferEngineFactory.register_engine("pspo", PushedWeights)
    return_logprobs_at_temperature()


def return_logprobs_at_temperature() -> None:
    """Let vLLM return log-probs at each row's temperature, before processors and nucleus, as `pspo.rollout.decode`."""
    forward = Sampler.forward

    def forward_at_temperature(
        self: Sampler, logits: Tensor, sampling_metadata: SamplingMetadata, **options: Any
    ) -> SamplerOutput:
        temperature = sampling_metadata.temperature  # (rows,), 0 for a greedy row; None if all are greedy
        divisor = 1.0 if temperature is None else temperature.where(temperature > 0, 1.0)[:, None]
        self.compute_logprobs = lambda logits: (logits.float() / divisor).log_softmax(dim=-1)
        return forward(self, logits, sampling_metadata, **options)

    Sampler.forward = forward_at_temperature


class PushedWeights(NCCLWeightTransferEngine):  # the base class begins and ends an update
    """Takes weights as a safetensors file in the body of ``/update_weights``."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        weights = safetensors.torch.load(b64decode(update_info["safetensors"]))
        self.model.load_weights(weights.items())
