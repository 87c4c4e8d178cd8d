"""Several ranks, one per GPU: ``torchrun --nproc-per-node 8 -m pspo.train --distributed.strategy fsdp2 ...``.

Every rank generates, scores and trains on its own prompts, whole groups. Gradients are summed over the ranks, and so
are the counts that a loss is divided by: ranks, microbatches and gradient accumulation are interchangeable.

* ddp: every rank holds the whole model and optimizer; gradients are summed once per optimizer step.
* fsdp2: weights, gradients and optimizer state are sharded over the ranks.
"""

from pspo.distributed.ranks import (
    check_strategy,
    concat_over_ranks,
    end_with_parent,
    gather_objects,
    gather_on_main,
    init,
    is_main,
    launched_by_torchrun,
    local_device,
    max_over_ranks,
    pad_to_longest,
    rank,
    run_main,
    run_on_main,
    sum_over_ranks,
    take_rank_share,
    visible_gpus,
    world_size,
)
from pspo.distributed.shards import (
    full_state_dict,
    full_tensor,
    gathers_weights,
    is_sharded,
    load_shards,
    local_shard,
    read_weights,
    save_shards,
    set_parameter,
    shard,
    sum_gradients,
    unsharded,
)
