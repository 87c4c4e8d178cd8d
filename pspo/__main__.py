"""pspo {version}: reinforcement learning for language models. Each command has --help.

pspo train       train a model
pspo evaluate    evaluate a model on a data set
pspo export      merge LoRA adapters into their model
pspo view        a page to look inside runs: curves, groups, tokens, findings
pspo report      tables and figures of runs
pspo sweep       train and evaluate methods, settings and seeds as one file lists them
pspo compare     compare two evaluations, paired by problem
pspo plan        will a run fit, and how long will it take
pspo serve       start a vLLM server that draws rollouts
"""

import importlib
import sys

from pspo import __version__

MODULES = {
    "train": "pspo.train",
    "evaluate": "pspo.evaluate.__main__",
    "export": "pspo.run.export",
    "view": "pspo_lab.view_command",
    "report": "pspo_lab.report_command",
    "sweep": "pspo_lab.sweep_command",
    "compare": "pspo_lab.compare",
    "plan": "pspo_lab.plan_command",
    "serve": "pspo_vllm.serve",
}


def main() -> None:
    command, *args = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(__doc__.format(version=__version__))
    elif command == "--version":
        print(__version__)
    elif command in MODULES:
        from pspo.distributed import run_main

        module = importlib.import_module(MODULES[command])
        run_main(lambda: module.main(args))
    else:
        print(f"pspo: error: {command} is no command; pspo --help lists them", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
