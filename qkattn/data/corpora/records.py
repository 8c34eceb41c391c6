"""Reads files of records: JSON lines and Parquet. One field of a record is the text of a document.

Records are read one at a time, so files may be larger than the memory.
"""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from qkattn.config.imports import load_extra
from qkattn.config.paths import open_regular
from qkattn.data.corpora.corpus import explain_read_errors
from qkattn.errors import ConfigError
from qkattn.storage import buckets
from qkattn.storage.records import parse_json

# The default of data.feature.
FIELD = 'text'
# Rows of a Parquet file that are decoded at a time.
ROWS_PER_READ = 1024
# Exceptions of the libraries for damaged files, besides OSError.
DAMAGED = (EOFError, zlib.error, ValueError)


def is_records(path: Path) -> bool:
    """Whether a file has the suffix of a file of records."""
    return path.name.lower().endswith(tuple(SUFFIXES))


def texts(path: Path, field: str) -> Iterator[bytes]:
    """Yields the text field of each record in a file. Empty and null texts are left out.

    Raises:
        ConfigError: The file cannot be read, or the field is missing or not text.
    """
    for suffix, read_texts in SUFFIXES.items():  # such as '.jsonl'
        if path.name.lower().endswith(suffix):
            yield from read_texts(path, field)
            return


def _json_lines(path: Path, field: str) -> Iterator[bytes]:
    """Yields the texts of a file with one JSON object per line."""
    name = f'data.path: {str(path)!r}'
    with explain_read_errors(name, 'copy it again', *DAMAGED), open_decompressed(path) as file:
        for line_number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            line_name = f'data.path: line {line_number:,} of {str(path)!r}'
            text = _text_of_line(line, field, line_name)
            if text:
                yield _encode_utf8(text, line_name)


def _text_of_line(line: bytes, field: str, line_name: str) -> str | None:
    """Returns the text in a field of a JSON object; None for null.

    Raises ConfigError if there is no such text. The message begins with `line_name`.
    """
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ConfigError(f'{line_name} cannot be read: {error}') from error
    if not isinstance(record, dict):
        raise ConfigError(f'{line_name} is no JSON object but {record!r:.40}')
    advice = _advice(fields=list(record))
    if field not in record:
        raise ConfigError(f'{line_name} has no field {field!r}; {advice}')
    text = record[field]
    if text is not None and not isinstance(text, str):
        raise ConfigError(
            f'{line_name} has {text!r:.40} in the field {field!r}, which is no text; {advice}'
        )
    return text


def _parquet(path: Path, field: str) -> Iterator[bytes]:
    """Yields the texts in a column of a Parquet file."""
    parquet = _import_arrow('pyarrow.parquet', path)
    types = _import_arrow('pyarrow.types', path)
    name = f'data.path: {str(path)!r}'
    with (
        # pyarrow raises many kinds of exceptions for damaged files.
        explain_read_errors(name, 'copy it again', Exception),
        open_binary(path) as file,
        parquet.ParquetFile(file) as table,
    ):
        type_of_column = {column.name: column.type for column in table.schema_arrow}
        advice = _advice(fields=list(type_of_column))
        if field not in type_of_column:
            raise ConfigError(f'{name} has no column {field!r}; {advice}')
        column_type = type_of_column[field]
        is_text = types.is_string(column_type) or types.is_large_string(column_type)
        if not is_text:
            raise ConfigError(
                f'data.path: column {field!r} of {str(path)!r} holds {column_type}, which is no '
                f'text; {advice}'
            )
        if table.metadata.num_rows == 0:
            raise ConfigError(f'{name} has no rows; it must hold text')

        for batch in table.iter_batches(ROWS_PER_READ, columns=[field]):
            column = batch.column(0)
            for text in column.to_pylist():
                if text:
                    yield text.encode()


# By suffix, the function (path, field) that yields the texts of a file.
SUFFIXES: dict[str, Callable[[Path, str], Iterator[bytes]]] = {
    '.jsonl': _json_lines,
    '.jsonl.gz': _json_lines,
    '.jsonl.zst': _json_lines,
    '.ndjson': _json_lines,
    '.ndjson.gz': _json_lines,
    '.ndjson.zst': _json_lines,
    '.parquet': _parquet,
}


def _advice(fields: list[str]) -> str:
    """Returns the end of an error message, which lists the fields."""
    return f'set data.feature to one of {", ".join(fields) or "its fields, of which it has none"}'


def _encode_utf8(text: str, line_name: str) -> bytes:
    """Encodes a text from JSON. Raises ConfigError for a lone surrogate, which UTF-8 lacks."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f'{line_name} has text that is not Unicode ({error.reason})') from error


def open_binary(path: Path) -> BinaryIO:
    """Opens a regular file, or an object in a bucket, for reading."""
    if buckets.is_url(path):
        return cast(BinaryIO, path.open('rb'))
    return open_regular(path)


def open_decompressed(path: Path) -> BinaryIO:
    """Opens a file for reading, and decompresses '.gz' and '.zst'."""
    suffix = path.suffix.lower()
    if suffix == '.gz':
        return cast(BinaryIO, gzip.open(open_binary(path)))
    if suffix == '.zst':
        pyarrow = _import_arrow('pyarrow', path)
        stream = pyarrow.input_stream(open_binary(path), compression='zstd')
        return io.BufferedReader(stream)
    return open_binary(path)


def _import_arrow(module: str, path: Path) -> Any:
    """Imports a module of pyarrow. Raises ConfigError, which names `path`, without pyarrow."""
    try:
        return load_extra(module, extra='datasets')
    except ConfigError as error:
        raise ConfigError(f'data.path: {str(path)!r} cannot be read: {error}') from error
