"""Rollout dumps of verl (its trainer.rollout_data_dir) as runs: a folder with a file STEP.jsonl for every step."""

import json
from numbers import Real
from pathlib import Path
from typing import Any

from pspo.cli.files import named_damage, read_jsonl
from pspo.tasks.files import plain

Record = dict[str, Any]


def is_dump(file: Path) -> bool:
    """True if a step's completions have such a name."""
    return file.suffix == ".jsonl" and file.stem.isdecimal()


def read_dump(folder: Path) -> list[Record]:
    """The completions as lines of ``samples.jsonl`` have them, those of a prompt in a step as a group.

    Their order in verl's files is that of its workers. Numbers that a reward returned beside its score are rewards.
    """
    samples = []
    problems: dict[str, int] = {}
    for file in sorted(filter(is_dump, folder.iterdir()), key=lambda file: int(file.stem)):
        groups: dict[str, list[Record]] = {}
        for record in read_jsonl(file):
            with named_damage(file):
                groups.setdefault(str(record["input"]), []).append(record)
        for prompt, records in groups.items():
            problem = problems.setdefault(prompt, len(problems))
            for sample, record in enumerate(records):
                gold = record.get("gts")
                numbers = {name: plain(float(value)) for name, value in record.items() if isinstance(value, Real)}
                samples.append({
                    "step": int(file.stem),
                    "problem": problem,
                    "sample": sample,
                    "prompt": prompt,
                    "gold": gold if isinstance(gold, str | None) else json.dumps(gold),
                    "completion": str(record.get("output", "")),
                    "reward": numbers.get("score"),
                    "rewards": {name: number for name, number in numbers.items() if name != "step"},
                })  # fmt: skip
    return samples
