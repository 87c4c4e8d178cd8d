"""verl's own training worker with a loss of pspo, on a CPU, against `pspo.update`: the weights after two epochs.

    PYTHONPATH=verl-only python -m benchmarks.verl_worker  # installed as for benchmarks.conformance

FSDP2, one process, gloo, float32, SGD. verl has no platform for a CPU: `Cpu` is one, made of its base class for CUDA.
Its servers' libraries are stubs, and TRL is hidden, from which verl imports a class that is gone.
"""

import copy
import os
import sys
from functools import partial
from unittest.mock import MagicMock

import torch

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
sys.modules |= {name: MagicMock() for name in ("uvicorn", "fastapi", "starlette", "starlette.requests")}
sys.modules["trl"] = None

from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_cuda import PlatformCUDA


class Cpu(PlatformCUDA):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def communication_backend_name(self) -> str:
        return "gloo"

    def do_nothing(self, *_: object) -> None: ...

    set_device = synchronize = manual_seed = manual_seed_all = empty_cache = do_nothing


torch.cpu.max_memory_allocated = torch.cpu.max_memory_reserved = lambda: 0
platform_manager.set_platform(Cpu())

from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from pspo.config import AlgorithmConfig, ModelConfig, OptimizerConfig, RolloutConfig, RunConfig, TrainConfig
from pspo.losses import GSPO, PSPO, TOPR, Clip, Surrogate
from pspo.model import load_policy, load_tokenizer
from pspo.model.find import ASSETS
from pspo.rollout import Rollout, generate, make_sampling
from pspo.update import Learner, update
from pspo_bridge.verl import PolicyLossConfig

LR = 0.5
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -1.0, -0.5, -0.5])
PROMPTS = ["Ann has 3 apples.", "Bob buys 14 pens and loses 5 of them."]


def make_worker(surrogate: Surrogate) -> TrainingWorker:
    """The worker that verl's actor trains with, of the embedded model."""
    model = HFModelConfig(
        path=str(ASSETS / "tiny-base"), use_remove_padding=False, enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )  # fmt: skip
    engine = FSDPEngineConfig(
        strategy="fsdp2", fsdp_size=1, micro_batch_size_per_gpu=4, use_dynamic_bsz=False, use_torch_compile=False,
        model_dtype="fp32", mixed_precision=dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32"),
    )  # fmt: skip
    optimizer = FSDPOptimizerConfig(
        optimizer="SGD", optimizer_impl="torch.optim", lr=LR, weight_decay=0.0, clip_grad=1e9,
        total_training_steps=10, lr_warmup_steps=0,
    )  # fmt: skip
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model", model_config=model, engine_config=engine, optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
        )
    )  # fmt: skip
    worker.reset()
    loss = PolicyLossConfig(loss_mode=f"pspo.{type(surrogate).__name__}", arguments=vars(surrogate))
    actor = FSDPActorConfig(
        rollout_n=4, ppo_micro_batch_size_per_gpu=4, loss_agg_mode="token-mean", policy_loss=loss, fsdp_config=engine
    )
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def train_there(worker: TrainingWorker, rollout: Rollout, old_logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two epochs over the rollout; returns the weights."""
    mask = torch.cat([rollout.prompt_mask, rollout.completion_mask], dim=1).long()
    fields = {
        "input_ids": torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "prompts": rollout.prompt_ids,
        "responses": rollout.completion_ids,
        "response_mask": rollout.completion_mask.long(),
        "old_log_probs": old_logprobs,
        "advantages": ADVANTAGES[:, None].expand_as(old_logprobs).contiguous(),
    }
    data = left_right_2_no_padding(TensorDict(fields, batch_size=len(mask)))
    tensordict_utils.assign_non_tensor(
        data, mini_batch_size=8, global_batch_size=8, epochs=2, seed=0, temperature=1.0, calculate_entropy=False,
        pad_mode="no_padding", dataloader_kwargs={"shuffle": False},
    )  # fmt: skip
    worker.train_mini_batch(data)
    weights, _ = worker.engine.get_per_tensor_param()
    return {name: weight.full_tensor() if hasattr(weight, "full_tensor") else weight for name, weight in weights}


def compare(surrogate: Surrogate) -> None:
    config = TrainConfig(
        rollout=RolloutConfig(prompts=2, group_size=4, max_completion_tokens=12, temperature=1.0, top_p=1.0),
        algorithm=AlgorithmConfig(surrogate=surrogate, epochs=2),
        optimizer=OptimizerConfig(name="sgd", lr=LR, max_grad_norm=0.0),
        run=RunConfig(max_steps=2),
    )
    policy = load_policy(ModelConfig(), torch.device("cpu"))
    before = copy.deepcopy(policy.state_dict())
    tokenizer = load_tokenizer(ModelConfig())
    torch.manual_seed(0)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    rollout = generate(policy, tokenizer, prompts, make_sampling(policy, tokenizer, config.rollout), 4)
    theirs = train_there(make_worker(surrogate), rollout, rollout.logprobs(policy, temperature=1.0))
    update(Learner(policy, torch.optim.SGD(policy.parameters(), LR)), rollout, ADVANTAGES, config)
    states = (policy.state_dict(), theirs, before)
    names = sorted(theirs.keys() & before.keys())
    ours, theirs, before = (torch.cat([state[name].float().flatten() for name in names]) for state in states)
    distance = (theirs - ours).norm()
    moved = (ours - before).norm()
    print(f"| `{surrogate}` | {distance / ours.norm():.1e} | {distance / moved:.1e} |", flush=True)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    EngineRegistry.register("language_model", ["fsdp2"], "cpu", "cpu")(FSDPEngineWithLMHead)
    print("| surrogate | distance / weights | distance / what two steps move |\n|---|---|---|")
    for each in (PSPO(), Clip(), TOPR(), GSPO(0.1, 0.2)):
        compare(each)
    torch.distributed.destroy_process_group()
