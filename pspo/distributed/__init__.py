"""Several ranks, one per GPU: ``torchrun --nproc-per-node 8 -m pspo.train --distributed.strategy fsdp2 ...``.

Every rank generates, scores and trains on its own prompts, whole groups. Gradients are summed over the ranks, and so
are the counts that a loss is divided by: ranks, microbatches and gradient accumulation are interchangeable.

* ddp: every rank holds the whole model and optimizer; gradients are summed once per optimizer step.
* fsdp2: weights, gradients and optimizer state are sharded over the ranks.
"""

from pspo.distributed.ranks import *
from pspo.distributed.shards import *
