"""`pspo.train` by ranks that share one GPU, which NCCL refuses, by gloo: README.md has the command."""

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
