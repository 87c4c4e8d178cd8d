"""The command `pspo`: each of its subcommands is the main function of a module."""

import importlib
import os
import sys

from pspo import __version__

COMMANDS = {
    "train": ("pspo.train", "train a model"),
    "evaluate": ("pspo.evaluate.__main__", "evaluate a model on a data set"),
    "export": ("pspo.run.export", "merge LoRA adapters into their model"),
    "view": ("pspo_lab.view_command", "a page to look inside runs: curves, groups, tokens, findings"),
    "report": ("pspo_lab.report_command", "tables of runs"),
    "sweep": ("pspo_lab.sweep_command", "train and evaluate the methods, settings and seeds that a file lists"),
    "compare": ("pspo_lab.compare", "compare two evaluations, paired by problem"),
    "serve": ("pspo_vllm.serve", "start a vLLM server that draws rollouts"),
}


def main() -> None:
    """Run the command that the arguments name, or print help or the version."""
    command, *args = sys.argv[1:] or ["--help"]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a user's own losses and rewards lie there; `python -m` does the same
    if command in ("-h", "--help"):
        print(f"pspo {__version__}: reinforcement learning for language models. Each command has --help.\n")
        for name, (_, summary) in COMMANDS.items():
            print(f"pspo {name:10}  {summary}")
    elif command == "--version":
        print(__version__)
    elif command not in COMMANDS:
        raise SystemExit(f"pspo: error: {command} is no command; pspo --help lists them")
    else:
        from pspo.distributed import run_main

        name, _ = COMMANDS[command]
        module = importlib.import_module(name)
        run_main(lambda: module.main(args))


if __name__ == "__main__":
    main()
