"""The command ``python -m pspo.train``."""

from pspo.cli.terminal import quiet_without_reader
from pspo.distributed import run_main
from pspo.train import main

if __name__ == "__main__":
    with quiet_without_reader():
        run_main(main)
