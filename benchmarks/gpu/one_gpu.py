"""Ranks that share one GPU, which NCCL refuses, by gloo: what one GPU can show of several.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.gpu.one_gpu \\
        --distributed.strategy ddp --run.output_dir runs/two

The switches are those of `pspo.train`.
"""

import os

import torch.distributed

from pspo.distributed import run_main
from pspo.train import main

init_process_group = torch.distributed.init_process_group


def init_by_gloo(backend: str, **options: object) -> None:
    init_process_group("gloo", **options)


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    torch.distributed.init_process_group = init_by_gloo
    run_main(main)
