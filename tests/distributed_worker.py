"""What every rank of tests/test_distributed.py does: torchrun tests/distributed_worker.py CASES.pt OUT STRATEGY."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pspo.config import DistributedConfig
from pspo.distributed import (
    from_main,
    gather,
    highest,
    is_main,
    own,
    own_device,
    pool,
    rank,
    run,
    start,
    state_dict,
    whole,
)
from pspo.rollout import Rollout, generate
from pspo.run.resume import load_across_ranks
from pspo.train import rolling_out
from pspo.update import Learner, update


class Collectives(TorchDispatchMode):
    """Counts collective operations by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def rows_of_this_rank(rollout: Rollout, advantages: torch.Tensor, minibatches: int) -> tuple[Rollout, torch.Tensor]:
    """Of each minibatch an equal part."""
    parts = torch.arange(len(rollout)).chunk(minibatches)
    mine = torch.cat([own(part) for part in parts])
    return rollout.rows(mine), advantages[mine]


def trained(case: dict, strategy: str, device: torch.device) -> dict:
    """Weights after one rollout's steps, with plain SGD so that they show the gradients, and the metrics."""
    how = case["config"].distributed if strategy == "fsdp2" else DistributedConfig(strategy)
    config = replace(case["config"], distributed=replace(how, strategy=strategy))
    policy = load_across_ranks(config, config.model, device)
    reference = None
    if config.algorithm.beta > 0:
        reference = load_across_ranks(config, config.model, device).requires_grad_(False)
    optimizer = torch.optim.SGD(policy.parameters(), lr=config.optimizer.lr)
    learner = Learner(policy, reference, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
    with Collectives() as collectives:
        metrics = update(learner, *rows_of_this_rank(*case["rows"], config.algorithm.minibatches), config)
    return {
        "weights": {n: whole(p.detach()).clone() for n, p in policy.named_parameters()},
        "metrics": metrics,
        "collectives": dict(collectives.counts),
    }


def rolled_out(case: dict, strategy: str, device: torch.device) -> dict:
    """Every rank's completions, of lengths of its own, and the policy's weights as exported."""
    how = case["config"].distributed.rollout if strategy == "fsdp2" else "gathered"
    config = replace(case["config"], distributed=replace(case["config"].distributed, strategy=strategy, rollout=how))
    policy = load_across_ranks(config, config.model, device)
    sampling = replace(case["sampling"], max_completion_tokens=8 + 12 * rank() if how == "gathered" else 20)
    sampling = replace(sampling, synced=how == "synced")
    torch.manual_seed(rank())
    with rolling_out(config, policy):
        rollout = generate(policy, case["tokenizer"], case["prompts"][rank() :: 2], sampling, 2)
    exported = state_dict(policy)
    exported = {} if exported is None else {name: value.clone() for name, value in exported.items()}
    return {"completions": gather(rollout.completion_ids.tolist()), "exported": exported}


def talked() -> dict:
    """What the small functions return."""
    pooled = pool([rank()], {"a": [10 + rank()]}, torch.tensor([rank(), rank()]))
    refused = None
    try:
        from_main(lambda: int("no"))
    except (ValueError, SystemExit) as error:
        refused = type(error).__name__
    return {"pool": pooled, "highest": highest(3 * rank()), "own": gather(own(torch.arange(4)).tolist()),
            "from_main": from_main(lambda: f"rank {rank()}"), "refused": gather(refused)}  # fmt: skip


def main() -> None:
    cases, out, strategy = torch.load(sys.argv[1], weights_only=False), Path(sys.argv[2]), sys.argv[3]
    start(strategy, 60)
    device = own_device()
    torch.set_num_threads(1)
    results = {}
    for name, case in cases.items():
        results[name] = (rolled_out if "prompts" in case else trained)(case, strategy, device)
    results["talk"] = talked()
    if is_main():
        torch.save(results, out)


if __name__ == "__main__":
    run(main)
