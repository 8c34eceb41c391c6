"""Reads files of records, JSON lines and Parquet. One field of a record is the text of a document.

Records are read one at a time, so a corpus may be larger than the memory.
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

# The field that holds the text unless data.feature names another.
FIELD = 'text'
# Rows of a Parquet file that are decoded at a time.
ROWS_PER_READ = 1024
# What the libraries raise for a file that is damaged, besides OSError.
DAMAGED = (EOFError, zlib.error, ValueError)


def is_records(path: Path) -> bool:
    """Whether a file holds records, which its suffix tells."""
    return path.name.lower().endswith(tuple(SUFFIXES))


def texts(path: Path, field: str) -> Iterator[bytes]:
    """Yields the text in one field of each record of a file. Empty and null texts are left out.

    Raises ConfigError if the file cannot be read, or if a record lacks the field or holds something
    else than text in it.
    """
    for suffix, read in SUFFIXES.items():
        if path.name.lower().endswith(suffix):
            yield from read(path, field)
            return


def _json_lines(path: Path, field: str) -> Iterator[bytes]:
    """Yields the texts of a file with a JSON object in each line; see `texts`."""
    name = f'data.path: {str(path)!r}'
    with explain_read_errors(name, 'copy it again', *DAMAGED), open_decompressed(path) as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            line_name = f'data.path: line {number:,} of {str(path)!r}'
            text = _text_of_line(line, field, line_name)
            if text:
                yield _encode_utf8(text, line_name)


def _text_of_line(line: bytes, field: str, line_name: str) -> str | None:
    """Returns the text in a field of a JSON object, or None if the field is null.

    Raises ConfigError, which begins with `line_name`, if the line is no object with such a field.
    """
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ConfigError(f'{line_name} cannot be read: {error}') from error
    if not isinstance(record, dict):
        raise ConfigError(f'{line_name} is no JSON object but {record!r:.40}')
    if field not in record:
        raise ConfigError(f'{line_name} has no field {field!r}; {_advice(list(record))}')
    text = record[field]
    if text is not None and not isinstance(text, str):
        raise ConfigError(
            f'{line_name} has {text!r:.40} in the field {field!r}, which is no text; '
            f'{_advice(list(record))}'
        )
    return text


def _parquet(path: Path, field: str) -> Iterator[bytes]:
    """Yields the texts in a column of a Parquet file; see `texts`."""
    parquet = _import_arrow('pyarrow.parquet', path)
    types = _import_arrow('pyarrow.types', path)
    name = f'data.path: {str(path)!r}'
    # For a damaged file, the library raises exceptions of many kinds.
    errors_as_config_error = explain_read_errors(name, 'copy it again', Exception)
    with errors_as_config_error, open_binary(path) as file, parquet.ParquetFile(file) as table:
        # Check that the column exists and holds text.
        type_of_column = {column.name: column.type for column in table.schema_arrow}
        advice = _advice(list(type_of_column))
        if field not in type_of_column:
            raise ConfigError(f'{name} has no column {field!r}; {advice}')
        column_type = type_of_column[field]
        if not types.is_string(column_type) and not types.is_large_string(column_type):
            raise ConfigError(
                f'data.path: column {field!r} of {str(path)!r} holds {column_type}, which is no '
                f'text; {advice}'
            )
        if not table.metadata.num_rows:
            raise ConfigError(f'{name} has no rows; it must hold text')

        for batch in table.iter_batches(ROWS_PER_READ, columns=[field]):
            for text in batch.column(0).to_pylist():
                if text:
                    yield text.encode()


# The function that reads a file with this suffix: from its path and a field to the texts.
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
    """Returns the end of a message: which fields data.feature may name."""
    return f'set data.feature to one of {", ".join(fields) or "its fields, of which it has none"}'


def _encode_utf8(text: str, line_name: str) -> bytes:
    """Returns a text of JSON in UTF-8.

    Raises ConfigError for half a surrogate pair, which JSON can write and UTF-8 cannot.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f'{line_name} has text that is not Unicode ({error.reason})') from error


def open_binary(path: Path) -> BinaryIO:
    """Opens a file on a disk or in a bucket for reading."""
    if buckets.is_url(path):
        return cast(BinaryIO, path.open('rb'))
    return open_regular(path)


def open_decompressed(path: Path) -> BinaryIO:
    """Opens a file for reading, and decompresses it if its name ends in '.gz' or '.zst'."""
    suffix = path.suffix.lower()
    if suffix == '.gz':
        return cast(BinaryIO, gzip.open(open_binary(path)))
    if suffix == '.zst':
        stream = _import_arrow('pyarrow', path).input_stream(open_binary(path), compression='zstd')
        return io.BufferedReader(stream)
    return open_binary(path)


def _import_arrow(module: str, path: Path) -> Any:
    """Imports a module of pyarrow to read `path`.

    Raises ConfigError if pyarrow, which the extra `datasets` installs, is missing.
    """
    try:
        return load_extra(module, 'datasets')
    except ConfigError as error:
        raise ConfigError(f'data.path: {str(path)!r} cannot be read: {error}') from error
