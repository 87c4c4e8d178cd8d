"""Read local files, JSON lines, JSON, parquet, CSV and ASDiv's XML, as rows that know where they stand."""

import csv
import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One record of a source, and where it stands, for the messages."""

    where: str
    record: dict[str, Any]

    def text(self, column: str) -> str:
        """The column as text; a ValueError that says where and what if it is missing, null, empty or NaN."""
        if column not in self.record:
            columns = ", ".join(map(str, self.record)) or "none"
            raise ValueError(
                f"{self.where}: no column {column!r}, it has {columns}; "
                "check --data.name, --data.prompt_column and --data.answer_column"
            )
        value = self.record[column]
        problem = None
        if value is None or (isinstance(value, str) and not value.strip()):
            problem = "is empty"
        elif isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
            problem = f"is a {type(value).__name__}, not text or a number"
        elif isinstance(value, str) and re.search("[\ud800-\udfff]", value):  # JSON can spell these, UTF-8 cannot
            problem = "holds half of a surrogate pair, which no tokenizer takes"
        elif isinstance(value, float | Decimal) and not math.isfinite(value):
            problem = f"is {value}"
        if problem:
            raise ValueError(f"{self.where}: column {column!r} {problem}; correct or remove this record")
        return str(value).strip()

    def optional(self, column: str) -> str:
        value = self.record.get(column)
        return "" if value is None or not str(value).strip() else self.text(column)


def file_rows(paths: list[Path]) -> list[Row]:
    """The records of all files; ValueError names the file and line of what is wrong with them."""
    rows = []
    for path in paths:
        if path.suffix not in READERS:
            raise ValueError(f"{path}: unknown format {path.suffix!r}; use one of {', '.join(READERS)}")
        try:
            for where, record in READERS[path.suffix](path):
                if not isinstance(record, dict):
                    raise ValueError(f"{path} {where}: expected an object of columns, found {type(record).__name__}")
                rows.append(Row(f"{path} {where}", record))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error}); check --data.path") from error
    if not rows:
        raise ValueError(f"{paths[0]} holds no problems; check --data.path")
    return rows


def _read_text(path: Path) -> str:
    with open(path, encoding="utf-8-sig", newline="") as file:  # -sig: a byte order mark is no part of the data
        return file.read()


def _parse_json(text: str, where: str) -> Any:
    def record(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twice([name for name, _ in pairs], where)
        return dict(pairs)

    try:
        return json.loads(text, parse_float=_decimal, object_pairs_hook=record)
    except RecursionError as error:
        raise ValueError(f"{where}: nested too deeply") from error
    except ValueError as error:
        if str(error).startswith(where):
            raise
        raise ValueError(f"{where}: not valid JSON ({error})") from error


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"the exponent of {text:.40} is out of range") from error


def _refuse_twice(columns: Sequence[str], where: str) -> None:
    """Of two columns of one name the last would count, silently."""
    if len(set(columns)) < len(columns) and (twice := [name for name in columns if name and columns.count(name) > 1]):
        raise ValueError(f"{where}: column {twice[0]!r} comes twice; keep one of them")


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_read_text(path).split("\n"), 1):  # splitlines would cut strings at U+2028
        if line.strip():
            yield f"line {number}", _parse_json(line, f"{path} line {number}")


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    content = _parse_json(_read_text(path), str(path))
    records = content if isinstance(content, list) else [content]  # MATH's original has one file per problem
    yield from ((f"record {number}", record) for number, record in enumerate(records, 1))


def _read_csv(path: Path) -> Iterator[tuple[str, Any]]:
    reader = csv.DictReader(io.StringIO(_read_text(path), newline=""), strict=True)
    try:
        _refuse_twice(reader.fieldnames or [], f"{path} line 1")
        for record in reader:
            if None in record:
                raise ValueError(f"{path} line {reader.line_num}: more cells than columns; quote cells with commas")
            yield f"line {reader.line_num}", record
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.reader.line_num}: not valid CSV ({error})") from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow  # comes with datasets; slow to import
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns, records = file.schema_arrow.names, file.read().to_pylist()
    except (pyarrow.ArrowException, OverflowError, ValueError) as error:  # the last two: dates that Python has not
        raise ValueError(f"{path}: not valid parquet ({error})") from error
    _refuse_twice(columns, str(path))
    yield from ((f"record {number}", record) for number, record in enumerate(records, 1))


def _read_asdiv_xml(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        root = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # the last two: of an unknown encoding
        raise ValueError(f"{path}: not valid XML ({error})") from error
    for number, problem in enumerate(root.iter("Problem"), 1):
        where = f"problem {problem.get('ID', number)}"
        columns = [child.tag.lower().replace("-", "_") for child in problem]  # the hub's names
        _refuse_twice(columns, f"{path} {where}")
        texts = ("".join(child.itertext()) for child in problem)
        yield where, dict(zip(columns, texts, strict=True)) | {"grade": problem.get("Grade", "")}


READERS = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".xml": _read_asdiv_xml,
}
