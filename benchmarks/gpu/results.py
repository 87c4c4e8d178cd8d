"""What was measured: rows of values with goals, results.json, and results.md for people."""

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pspo.files import read_json, write_json, write_text

NO_GPU = "none"


@dataclass(frozen=True)
class Row:
    """One value of a measurement, and whether it meets its goal, if it has one."""

    what: str
    value: float | bool
    unit: str
    goal: str
    ok: bool | None

    def cells(self) -> list[str]:
        met = "" if self.ok is None else as_text(self.ok)
        return [self.what, f"{as_text(self.value)} {self.unit}".strip(), self.goal, met]


Rows = list[Row]


def row(what: str, value: float | bool, unit: str = "", least: float | None = None, most: float | None = None) -> Row:
    sides = {"exactly": least} if least == most else {"at least": least, "at most": most}
    goal = ", ".join(f"{side} {bound:g}" for side, bound in sides.items() if bound is not None)
    met = (least is None or value >= least) and (most is None or value <= most)
    return Row(what, value, unit, goal, met if goal else None)


def as_text(value: float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1e4 else f"{value:.4g}"


@dataclass(frozen=True)
class Result:
    """The rows of a measurement, or why there are none."""

    part: str
    is_candidate: bool
    environment: dict[str, Any]
    rows: Rows
    why: str = ""
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def cells(self) -> list[list[str]]:
        """What, value, goal and whether it is met, of each row."""
        return [row.cells() for row in self.rows] or [[self.why.replace("|", "/"), "", "", ""]]


class Results:
    """Results by measurement; both files are written after each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / "results.json"
        saved = read_json(file) if file.exists() else {}
        self.saved = {
            name: Result(**result | {"rows": [Row(**row) for row in result["rows"]]}) for name, result in saved.items()
        }

    def add(self, name: str, result: Result) -> None:
        self.saved[name] = result
        write_json(self.folder / "results.json", {name: asdict(result) for name, result in self.saved.items()})
        write_text(self.folder / "results.md", report(self.saved))
        for cells in result.cells():
            print(name, *filter(None, cells), sep="  ", flush=True)


def report(results: dict[str, Result]) -> str:
    """results.md: the machines, a table for each part, and the verdict."""
    found = [result.environment for result in results.values()]
    machines = {
        f"* {e['gpu']}, driver {e['driver']}, torch {e['packages']['torch']}, transformers "
        f"{e['packages']['transformers']}, commit {e['commit']}" for e in found
    }  # fmt: skip
    lines = ["# Measured by `python -m benchmarks.gpu`", "", *sorted(machines)]
    for part in dict.fromkeys(result.part for result in results.values()):
        lines += ["", f"## {part}", "", "| measurement | what | value | goal | met |", "|---|---|---|---|---|"]
        of_part = {name: result for name, result in results.items() if result.part == part}
        lines += [f"| {name} | {' | '.join(cells)} |" for name, result in of_part.items() for cells in result.cells()]
    return "\n".join([*lines, "", verdict(results)]).rstrip() + "\n"


def verdict(results: dict[str, Result]) -> str:
    """Which candidates gain enough, with the same numbers; "" if none was measured."""
    candidates = {name: result for name, result in results.items() if result.is_candidate and result.rows}
    gained = [
        f"{name} ({result.environment['gpu']})"
        for name, result in candidates.items()
        if all(row.ok is not False for row in result.rows) and not result.environment["gpu"].startswith(NO_GPU)
    ]
    return f"Candidates that met every goal on a GPU: {', '.join(gained) or 'none'}." if candidates else ""
