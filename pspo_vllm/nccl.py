"""Weights to a vLLM server by NCCL, from GPU to GPU, with vLLM's own classes on both sides.

It has never been run: it takes two GPUs. The tests only hold it to vLLM's interfaces.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import transformers
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
from vllm.utils.network_utils import get_ip, get_open_port

from pspo import distributed as dist
from pspo_vllm.weights import meta_tensor, weights_of_files


@dataclass(frozen=True)
class PolicyWeights:
    """The policy's weights as a file would hold them: a WeightSource of vLLM."""

    policy: transformers.PreTrainedModel

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return weights_of_files(self.policy)

    def metadata(self) -> list[ParamMeta]:
        weights = weights_of_files(self.policy, gather=meta_tensor)
        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in weights]


def send(policy: transformers.PreTrainedModel, url: str, gpus: int, timeout: float) -> None:
    """Send the weights to a server with so many GPUs, in a group of this push alone; every rank must call it."""
    group = NCCLTrainerInitInfo(get_ip(), get_open_port(), 1 + gpus, rank=dist.rank())
    client = HTTPVLLMWeightSyncClient(url, timeout)
    trainer = NCCLTrainerWeightTransferEngine.trainer_init(group, client=client, source=PolicyWeights(policy))
    trainer.send_weights()
    trainer.shutdown()
    if trainer.is_sender:
        client.shutdown_weight_transfer_engine()
