"""Files of records, of which one field is the text of a document: JSON lines and Parquet.

They are read a record at a time, so that a corpus may be larger than the memory.
"""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from qkattn.config.imports import load_extra
from qkattn.config.paths import open_regular
from qkattn.data.corpora.corpus import readable
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
    """Whether a file holds records, by its suffixes."""
    return path.name.lower().endswith(tuple(SUFFIXES))


def texts(path: Path, field: str) -> Iterator[bytes]:
    """The texts in a field of the records of a file, in their order, without empty and null ones.

    ConfigError, which names the line or row, where a record lacks the field or it is not text.
    """
    for suffix, read in SUFFIXES.items():
        if path.name.lower().endswith(suffix):
            yield from read(path, field)
            return


def _json_lines(path: Path, field: str) -> Iterator[bytes]:
    """The texts of a file with a JSON object in each line; blank lines are left out."""
    damaged = readable(f'data.path: {str(path)!r}', 'copy it again', *DAMAGED)
    with damaged, open_decompressed(path) as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            place = f'data.path: line {number:,} of {str(path)!r}'
            text = _text_of_line(line, field, place)
            if text:
                yield _encoded(text, place)


def _text_of_line(line: bytes, field: str, place: str) -> str | None:
    """The text in a field of a JSON object; ConfigError, which names `place`, where it has none."""
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ConfigError(f'{place} cannot be read: {error}') from error
    if not isinstance(record, dict):
        raise ConfigError(f'{place} is no JSON object but {record!r:.40}')
    if field not in record:
        raise ConfigError(f'{place} has no field {field!r}; {_advice(list(record))}')
    text = record[field]
    if text is not None and not isinstance(text, str):
        raise ConfigError(
            f'{place} has {text!r:.40} in the field {field!r}, which is no text; '
            f'{_advice(list(record))}'
        )
    return text


def _parquet(path: Path, field: str) -> Iterator[bytes]:
    """The texts in a column of a Parquet file."""
    parquet = _arrow('pyarrow.parquet', path)
    types = _arrow('pyarrow.types', path)
    # The library raises exceptions of many kinds.
    damaged = readable(f'data.path: {str(path)!r}', 'copy it again', Exception)
    with damaged, opened(path) as stored, parquet.ParquetFile(stored) as file:
        columns = {column.name: column.type for column in file.schema_arrow}
        if field not in columns:
            raise ConfigError(
                f'data.path: {str(path)!r} has no column {field!r}; {_advice(list(columns))}'
            )
        kind = columns[field]
        if not types.is_string(kind) and not types.is_large_string(kind):
            raise ConfigError(
                f'data.path: column {field!r} of {str(path)!r} holds {kind}, which is no text; '
                f'{_advice(list(columns))}'
            )
        if not file.metadata.num_rows:
            raise ConfigError(f'data.path: {str(path)!r} has no rows; it must hold text')
        for batch in file.iter_batches(ROWS_PER_READ, columns=[field]):
            for text in batch.column(0).to_pylist():
                if text:
                    yield text.encode()


# By suffix: reads the texts in a field of a file.
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
    """Which fields data.feature may name."""
    return f'set data.feature to one of {", ".join(fields) or "its fields, of which it has none"}'


def _encoded(text: str, place: str) -> bytes:
    """The text in UTF-8; ConfigError for half a character, which JSON can write."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f'{place} has text that is not Unicode ({error.reason})') from error


def opened(path: Path) -> BinaryIO:
    """A file on a disk or in a bucket, opened to be read."""
    if buckets.is_url(path):
        return cast(BinaryIO, path.open('rb'))
    return open_regular(path)


def open_decompressed(path: Path) -> BinaryIO:
    """As `opened`; a file that ends in '.gz' or '.zst' gives what was compressed."""
    suffix = path.suffix.lower()
    if suffix == '.gz':
        return cast(BinaryIO, gzip.open(opened(path)))
    if suffix == '.zst':
        stream = _arrow('pyarrow', path).input_stream(opened(path), compression='zstd')
        return io.BufferedReader(stream)
    return opened(path)


def _arrow(module: str, path: Path) -> Any:
    """A module of pyarrow, which comes with the extra `datasets`; ConfigError without it."""
    try:
        return load_extra(module, 'datasets')
    except ConfigError as error:
        raise ConfigError(f'data.path: {str(path)!r} cannot be read: {error}') from error
