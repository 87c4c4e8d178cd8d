"""Readers of local files: JSON lines, JSON, CSV, parquet and ASDiv's XML, as rows.

Not by `datasets`, because gold answers keep their decimal digits: 0.1 in a JSON file is Decimal("0.1"), never a binary
float.
"""

import csv
import io
import json
import math
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from pspo.tasks.problem import Messages, check_chat


def local_path(path: str | Path) -> Path:
    """A path as a user wrote it, with ~ for the home folder; ValueError for bytes that no file of a run can hold."""
    expanded = os.path.expanduser(path)
    if any("\udc80" <= character <= "\udcff" for character in expanded):  # as Python reads bytes that are no UTF-8
        raise ValueError(f"the path {expanded} is not UTF-8: rename the file or folder")
    return Path(expanded)


@dataclass(frozen=True)
class Row:
    """Record of a file or hub data set, and its place there, for error messages."""

    where: str
    record: dict[str, Any]

    def text(self, column: str) -> str:
        """Return a column as text, "" if it is empty; ValueError if it is missing, or no text or number."""
        if column not in self.record:
            names = ", ".join(map(str, self.record))
            raise ValueError(f"{self.where}: no column {column!r}, only {names}; check --data.name and --data.columns")
        value = self.record[column]
        if not isinstance(value, str | int | float | Decimal | None):
            raise ValueError(f"{self.where}: column {column!r} is a {type(value).__name__}, not text or a number")
        return self.optional(column)

    def optional(self, column: str) -> str:
        """Return a column as text, "" if it is missing or empty."""
        value = self.record.get(column)
        return "" if value is None else str(value).strip()

    def prompt(self, columns: Sequence[str]) -> str | Messages:
        """Return columns as one text, a single one with its outer blanks; or the chat that it holds as a list."""
        value = self.record.get(columns[0])
        if not isinstance(value, list):
            text = " ".join(map(self.text, columns))
            if not text:
                raise ValueError(f"{self.where}: column {columns[0]!r} is empty; fill in or remove this record")
            return value if len(columns) == 1 and isinstance(value, str) else text
        try:
            check_chat(value)
        except ValueError as error:
            raise ValueError(f"{self.where}: column {columns[0]!r}: {error}") from error
        return without_gaps(value)


def without_gaps(value: Any) -> Any:
    """A chat without the keys that are None: a table gives every turn and call the keys of all the others."""
    if isinstance(value, list):
        return [without_gaps(part) for part in value]
    if isinstance(value, dict):
        return {key: without_gaps(part) for key, part in value.items() if part is not None}
    return value


def plain(value: Any) -> Any:
    """Return decimals as floats, and what is not finite as None, also inside lists and objects."""
    if isinstance(value, float | Decimal):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return {key: plain(part) for key, part in value.items()} if isinstance(value, dict) else value


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all records of a file; ValueError names the file, and the line or record, that is wrong."""
    try:
        for number, record in enumerate(READERS[path.suffix](path), 1):
            if not isinstance(record, dict):
                raise ValueError(f"record {number} must be an object of columns, not a {type(record).__name__}")
            json.dumps(record, ensure_ascii=False, default=str).encode()  # a lone surrogate is refused
            yield record
    except (
        ValueError,
        InvalidOperation,
        NotImplementedError,
        OSError,
        RecursionError,
        csv.Error,
        ElementTree.ParseError,
    ) as error:
        raise ValueError(f"{path}: {error}") from error


def read_text(path: Path) -> str:
    """The text of a file without its byte order mark; ValueError names the encoding if that is not UTF-8."""
    content = path.read_bytes()
    is_utf16 = b"\0" in content[:100]
    try:
        if not is_utf16:
            return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    encoding = "UTF-16" if is_utf16 else "Latin-1"
    raise ValueError(f"the text is not UTF-8 but probably {encoding}: iconv -f {encoding} -t UTF-8 converts it")


def _parse_json(text: str) -> Any:
    return json.loads(text, parse_float=Decimal, parse_constant=lambda constant: None)  # JSON has no NaN


def _read_jsonl(path: Path) -> Iterator[Any]:
    # Not str.splitlines, which divides texts at U+2028; utf-8-sig drops a byte order mark.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                yield _parse_json(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} is not valid JSON ({error})") from error


def _read_json(path: Path) -> list[Any]:
    content = _parse_json(read_text(path))
    return content if isinstance(content, list) else [content]  # MATH's original has one file per problem


def _read_csv(path: Path) -> Iterator[dict[str, str]]:
    csv.field_size_limit(sys.maxsize)  # by default 131,072 characters
    file = io.StringIO(read_text(path), newline="")
    reader = csv.DictReader(file, strict=True)  # a quote that stays open is an error
    for record in reader:
        if None in record:  # DictReader's key of surplus cells
            raise ValueError(f"line {reader.line_num} has more cells than columns; quote cells that hold commas")
        yield record


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet  # slow to import

    return pyarrow.parquet.ParquetFile(path).read().to_pylist()


def _read_asdiv_xml(path: Path) -> Iterator[dict[str, str]]:
    for problem in ElementTree.parse(path).getroot().iter("Problem"):
        columns = {child.tag.lower().replace("-", "_"): "".join(child.itertext()) for child in problem}  # as on the hub
        yield columns | {"grade": problem.get("Grade", "")}


READERS: dict[str, Callable[[Path], Iterable[Any]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".xml": _read_asdiv_xml,
}
