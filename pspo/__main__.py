"""pspo {version}: reinforcement learning for language models. Each command has --help.

python -m pspo.train       train a model
python -m pspo.evaluate    evaluate a model on a data set
python -m pspo.sweep       train and evaluate methods, settings and seeds as one file lists them
python -m pspo.report      tables and figures of runs
python -m pspo.view        a page to look inside runs: curves, groups, tokens, findings
python -m pspo.export      merge LoRA adapters into their model
python -m pspo.serve       start a vLLM server that draws rollouts
"""

import argparse

from pspo import __version__


def main() -> None:
    text = __doc__.format(version=__version__)
    parser = argparse.ArgumentParser("python -m pspo", description=text, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--version", action="version", version=__version__)
    _, words = parser.parse_known_args()
    if words and f"python -m pspo.{words[0]} " in text:
        parser.error(f"it is python -m pspo.{words[0]}, with a dot")
    parser.parse_args()
    parser.print_help()


if __name__ == "__main__":
    main()
