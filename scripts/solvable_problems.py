"""Make a training set of the problems that a model can come near to solving: those whose gold value it wrote.

    python -m pspo.evaluate --eval.split train --run.output_dir before-train ...
    python scripts/solvable_problems.py before-train/completions.jsonl problems/train.jsonl
    python -m pspo.train --data.name file --data.path problems ...

A group of completions that are all wrong teaches nothing and costs as much as any other. A problem is kept if at least
one completion contains the gold value (the paper's true accuracy), whatever it ended with.
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("completions", type=Path, help="completions.jsonl of pspo.evaluate")
    parser.add_argument("problems", type=Path, help="file to write: prompt and answer of each problem, a line each")
    args = parser.parse_args()
    with args.completions.open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    kept = {record["problem"]: record for record in records if record["contains_gold"]}
    args.problems.parent.mkdir(parents=True, exist_ok=True)
    with args.problems.open("w", encoding="utf-8") as file:
        for record in kept.values():
            file.write(json.dumps({"prompt": record["prompt"], "answer": record["gold"]}, ensure_ascii=False) + "\n")
    print(f"{len(kept):,} of {len({record['problem'] for record in records}):,} problems: {args.problems}")


if __name__ == "__main__":
    main()
