"""Readers of local files, compressed or not: JSON lines, JSON, CSV, parquet and ASDiv's XML, as rows.

`datasets` would lose decimal digits of gold answers; here 0.1 in a JSON file is the text `0.1`.
"""

import csv
import io
import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from pspo.tasks.problem import Messages, check_chat, check_unicode

Record = dict[str, Any]  # a row of a file or hub data set: values by column
BLANKS = re.compile(r"\s*+")
COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4")  # that pyarrow reads
DAMAGE = (ValueError, NotImplementedError, OSError, RecursionError, csv.Error, ElementTree.ParseError)


class WrittenNumber(str):
    """A JSON file's number with a decimal point or exponent, as the file writes it: `1e3`."""


def nested_value(record: Record, column: str) -> Any:
    """The value of a column, or of a path such as reward_model.ground_truth in it; None if it is missing or NaN."""
    value: Any = record
    for name in [column] if column in record else column.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return None if value != value else value


def column_text(record: Record, column: str, is_optional: bool = False) -> str:
    """A column's value as text, "" if empty; ValueError if a required column is missing, or neither text nor number."""
    value = nested_value(record, column)
    if not is_optional:
        if column not in record and column.split(".")[0] not in record:
            raise ValueError(f"no column {column!r}, only {', '.join(record)}; check --data.name and --data.columns")
        if not isinstance(value, str | int | float | Decimal | None):
            raise ValueError(f"column {column!r} is a {type(value).__name__}, not text or a number")
    return "" if value is None else str(value).strip()


def read_prompt(record: Record, columns: Sequence[str]) -> str | Messages:
    """The columns as one text, a single column with its outer blanks; or the chat, if the first column holds a list."""
    value = nested_value(record, columns[0])
    if "<image>" in str(value) and (record.get("images") or record.get("image")):
        raise ValueError(f"column {columns[0]!r} has an <image>, which is not read: leave out such records")
    if isinstance(value, list):
        check_chat(value)
        return [{key: plain(part) for key, part in turn.items() if part is not None} for turn in value]
    text = " ".join([column_text(record, column) for column in columns])
    if not text:
        raise ValueError(f"column {columns[0]!r} is empty; fill in or remove this record")
    return value if len(columns) == 1 and type(value) is str else text


def without_gaps(value: Any) -> Any:
    """Drop keys whose value is None, at any depth: tables fill in such keys."""
    if isinstance(value, list):
        return [without_gaps(part) for part in value]
    if isinstance(value, dict):
        return {key: without_gaps(part) for key, part in value.items() if part is not None}
    return value


def plain(value: Any) -> Any:
    """Return decimals and numpy's numbers as Python's, those that are not finite as None, also in lists and objects."""
    if hasattr(value, "tolist"):
        value = float(str(value)) if isinstance(value, np.floating) else value.tolist()  # a float32's shortest decimal
    if isinstance(value, float | Decimal | WrittenNumber):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return {key: plain(part) for key, part in value.items()} if isinstance(value, dict) else value


def file_format(path: Path) -> str:
    """The key of `READERS` in a file's name, such as .jsonl of train.jsonl.gz; "" if it has none."""
    suffix = Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix
    return suffix if suffix in READERS else ""


def read_records(path: Path) -> Iterator[Record]:
    """Yield all records of a file; ValueError names the file, and the line or record, that is wrong."""
    try:
        for number, record in enumerate(READERS[file_format(path)](path), 1):
            if not isinstance(record, dict):
                raise ValueError(f"record {number} must be an object of columns, not a {type(record).__name__}")
            check_unicode(record, f"record {number}")
            yield record
    except DAMAGE as error:
        raise ValueError(f"{path}: {error}") from error


def read_text(path: Path) -> str:
    """The text of a file without its byte order mark; ValueError, without the path, if it is not UTF-8."""
    import pyarrow  # slow to import

    content = pyarrow.input_stream(str(path), compression="detect").read()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8, convert it: {error}") from error


def make_record(pairs: Iterable[tuple[str, Any]]) -> Record:
    """A record of columns and values; ValueError for a column that is there twice."""
    record: Record = {}
    for column, value in pairs:
        if column in record:
            raise ValueError(f"column {column!r} is there twice")
        record[column] = value
    return record


def table_records(table: Any) -> Iterator[Record]:
    """The rows of a pyarrow table, without the keys that it gives an object because other rows' objects have them."""
    info = json.loads((table.schema.metadata or {}).get(b"huggingface", "{}")).get("info") or {}
    features = info.get("features") or {}
    for row in table.to_pylist():
        values = [read_value(row[column.name], column.type, features.get(column.name)) for column in table.schema]
        yield make_record(zip(table.schema.names, map(without_gaps, values), strict=True))


def read_value(value: Any, kind: Any, feature: Any) -> Any:
    """Convert a value by pyarrow type and `datasets` feature: narrow floats to shortest decimals, labels to names."""
    import pyarrow.types as types  # slow to import

    feature = feature[0] if isinstance(feature, list) else feature or {}
    feature = feature.get("feature") if "_type" in feature and "feature" in feature else feature  # a list's items'
    if value is None:
        return None
    if types.is_floating(kind):
        return float(str(kind.to_pandas_dtype()(value)))
    if types.is_struct(kind):
        return {part.name: read_value(value[part.name], part.type, feature.get(part.name)) for part in kind}
    if isinstance(value, list) and not types.is_map(kind):
        return [read_value(part, kind.value_type, feature) for part in value]
    if feature.get("_type") == "ClassLabel":
        return feature["names"][value] if value >= 0 else None
    return value


def _read_json(path: Path) -> Iterator[Any]:
    """Yield values that follow each other, as in JSON lines, and a list's items; MATH has a file per problem."""
    text = read_text(path)
    parser = json.JSONDecoder(parse_float=WrittenNumber, parse_constant=lambda _: None, object_pairs_hook=make_record)
    start = BLANKS.match(text).end()
    while start < len(text):
        try:
            value, end = parser.raw_decode(text, start)
        except ValueError as error:
            line = text.count("\n", 0, start) + 1
            raise ValueError(f"line {line} is not valid JSON ({error})") from error
        yield from value if isinstance(value, list) else [value]
        start = BLANKS.match(text, end).end()


def _read_csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)  # by default 131,072 characters
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)  # an open quote is an error
    header = next(reader, [])
    for row in filter(None, reader):
        if len(row) != len(header):
            raise ValueError(f"line {reader.line_num} has more or fewer cells than the header; quote those with commas")
        yield make_record(zip(header, row, strict=True))


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow.parquet  # slow to import

    return table_records(pyarrow.parquet.ParquetFile(path).read())


def _read_asdiv_xml(path: Path) -> Iterator[Record]:
    for problem in ElementTree.parse(path).getroot().iter("Problem"):
        columns = {child.tag.lower().replace("-", "_"): "".join(child.itertext()) for child in problem}  # as on the hub
        yield columns | {"grade": problem.get("Grade", "")}


READERS: dict[str, Callable[[Path], Iterable[Any]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".xml": _read_asdiv_xml,
}
