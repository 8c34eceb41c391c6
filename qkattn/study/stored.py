"""A study in a few files, from which its directory is restored byte for byte.

    study.json, ledger.jsonl, yardsticks.json   as in the study's directory
    runs.jsonl      what runs share, then a line per run: its plan, results and evaluations
    documents.npz   nats by document, of all trials but those of screening

A line omits what is stored elsewhere: settings in study.json, provenance and data (given by
index), evaluation columns that its results have. Of the documents.json of a screening run only the
SHA-256 is kept, which the ledger needs.
"""

import atexit
import functools
import hashlib
import io
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qkattn.errors import ReportError
from qkattn.storage.files import as_path, write_atomic
from qkattn.storage.ledger import DOCUMENTS_SHA256, is_training, left_out_documents
from qkattn.storage.records import ARM_KEY, parse_json, write_json
from qkattn.study.tuning import SCREENING

RUNS, DOCUMENTS = 'runs.jsonl', 'documents.npz'
_DOCUMENTS = 'documents.json'  # of a run
WHOLE_FILES = ('study.json', 'ledger.jsonl', 'yardsticks.json')
STORED = (RUNS, DOCUMENTS, *WHOLE_FILES)
_INDEXED = ('provenance', 'data')
# What a line of results.jsonl has beside an entry of result.json.
_OF_STUDY = ('study', 'run', *ARM_KEY, 'stage', 'knob', 'target_parameters', 'residual')
_FORMAT = 1
Record = dict[str, Any]


def opened(directory: str | Path) -> Path:
    """The directory of a study as training leaves it: of a stored one, a temporary copy.

    Raises ReportError if the stored study is damaged.
    """
    path = as_path(directory)
    if not (path / RUNS).is_file():
        return path
    digests = {name: _sha256(content) for name, content in _read(path, STORED).items()}
    return _copy(path, _sha256(repr(digests).encode()))


@functools.lru_cache(maxsize=64)
def _copy(path: Path, digest: str) -> Path:
    directory = Path(tempfile.mkdtemp(prefix=f'qkattn-{digest[:8]}-'))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    unpack(path, directory)
    return directory


def pack(study: Path, destination: Path) -> None:
    """Writes the stored form of the directory of a study.

    It has no checkpoints, no training records, and no provenance.json, which names machines and
    users. ReportError for a file that would not be the same when it is unpacked.
    """
    files: dict[str, bytes] = {}  # that have to come back
    shared: dict[str, list[Any]] = {name: [] for name in (*_INDEXED, 'documents')}
    arrays: dict[str, Any] = {}

    def lines_of(name: str) -> list[Record]:
        """The whole lines of a file, without those of training."""
        lines = (study / name).read_bytes().splitlines(True) if (study / name).is_file() else []
        kept = [line for line in lines if line.endswith(b'\n') and not is_training(line)]
        files[name] = b''.join(kept)
        try:
            return list(map(parse_json, kept))
        except ValueError as error:
            raise ReportError(f'{study / name} cannot be stored: {error}') from error

    def packed(run: Record, trials: list[Record]) -> Record:
        """The line of a run."""
        columns = _columns(trials)
        same = {name for name, column in columns.items() if all(v == column[0] for v in column)}
        template = {name: column[0] if name in same else None for name, column in columns.items()}
        for name in template.keys() & set(_INDEXED):
            template[name] = _index(shared[name], columns[name][0])
        line: Record = {
            'plan': run | {'config': _changed(run['config'], base)},
            'result': template,
            'trials': {name: columns[name] for name in columns if name not in same},
            'log': None,
        }
        log, documents = (f'{run["directory"]}/{name}' for name in ('metrics.jsonl', _DOCUMENTS))
        if (study / log).is_file():
            line['log'] = [
                {n: None if n in columns and columns[n] == v else [v] for n, v in record.items()}
                for record in lines_of(log)
            ]
        if (study / documents).is_file():
            content = (study / documents).read_bytes()
            line['documents'] = {'sha256': _sha256(content)}
            if run['stage'] != SCREENING:
                files[documents] = content
                record = parse_json(content)
                line['documents'] |= _pack_documents(run['run'], record, shared, arrays)
        elif digest := left_out_documents(study / run['directory']):
            line['documents'] = {'sha256': digest}
        return line

    base = parse_json((study / 'study.json').read_bytes())['base']
    results: dict[str, list[Record]] = {}
    for result in lines_of('results.jsonl'):
        results.setdefault(result['run'], []).append(result)
    lines = [packed(run, results.get(run['run'], [])) for run in lines_of('plan.jsonl')]
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    made = _read(study, WHOLE_FILES)  # written first: they name the study to the next export
    made |= {RUNS: _text([{'format': _FORMAT} | shared, *lines]), DOCUMENTS: buffer.getvalue()}
    for name, content in _files(made):
        if files.get(name, content) != content:
            raise ReportError(f'{study / name} cannot be stored: it would not come back as it is')
    for name, content in made.items():
        write_atomic(destination / name, content)


def unpack(stored: Path, destination: Path) -> None:
    """Writes the directory of a stored study; ReportError where that is damaged."""
    try:
        files = dict(_files(_read(stored, STORED)))
    except Exception as error:  # a flipped bit of an archive raises anything, as TokenError
        raise ReportError(
            f'the stored study {str(stored)!r} is damaged ({error}); restore it from a copy'
        ) from error
    for name, content in files.items():
        write_atomic(destination / name, content)


def unpack_in_place(directory: Path) -> None:
    """Turns a stored study, where there is one, into a directory in which the study can go on.

    Runs get the result.json that workers read; those without results begin anew, as nothing but
    their logs is stored. Raises ReportError if the stored study is damaged.
    """
    if not (directory / RUNS).is_file():
        return
    unpack(directory, directory)
    plan, results = ((directory / name).read_bytes() for name in ('plan.jsonl', 'results.jsonl'))
    entries: dict[str, list[Record]] = {}
    for line in map(parse_json, results.splitlines()):
        entry = {name: value for name, value in line.items() if name not in _OF_STUDY}
        entries.setdefault(line['run'], []).append(entry)
    for run in map(parse_json, plan.splitlines()):
        path = directory / run['directory']
        if run['run'] in entries:
            write_json(path / 'result.json', entries[run['run']])
        else:
            (path / 'metrics.jsonl').unlink(missing_ok=True)
    for name in (RUNS, DOCUMENTS):  # at last: until then all of this can be done again
        (directory / name).unlink()


def _read(directory: Path, names: Iterable[str]) -> dict[str, bytes]:
    """The content of those files that exist, by name."""
    return {name: (directory / name).read_bytes() for name in names if (directory / name).is_file()}


def _files(stored: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """The name and content of each file that the files of a stored study make up."""
    yield from ((name, stored[name]) for name in WHOLE_FILES if name in stored)
    base = parse_json(stored['study.json'])['base']
    shared, *lines = map(parse_json, stored[RUNS].splitlines())
    if shared['format'] != _FORMAT:
        raise ValueError(f'format {shared["format"]!r} is not {_FORMAT}')
    arrays = dict(np.load(io.BytesIO(stored[DOCUMENTS])))
    plans = [line['plan'] | {'config': _merged(line['plan']['config'], base)} for line in lines]
    yield 'plan.jsonl', _text(plans)
    results = [list(_results(line, shared)) for line in lines]
    yield 'results.jsonl', _text(itertools.chain(*results))
    for line, trials in zip(lines, results, strict=True):
        directory = line['plan']['directory']
        if line['log'] is not None:
            columns = _columns(trials)
            log = (
                {name: columns[name] if v is None else v[0] for name, v in record.items()}
                for record in line['log']
            )
            yield f'{directory}/metrics.jsonl', _text(log)
        if (documents := line.get('documents')) is None:
            continue
        if len(documents) == 1:
            yield f'{directory}/{DOCUMENTS_SHA256}', documents['sha256'].encode() + b'\n'
        else:
            record = _documents(line['plan']['run'], documents, shared['documents'], arrays)
            yield f'{directory}/{_DOCUMENTS}', _text([record])


def _results(line: Record, shared: Record) -> Iterator[Record]:
    """The lines of results.jsonl of a run."""
    template = dict(line['result'])
    for name in _INDEXED:
        if name in template:
            template[name] = shared[name][template[name]]
    number = len(next(iter(line['trials'].values()), [None] if template else []))
    for trial in range(number):
        yield template | {name: column[trial] for name, column in line['trials'].items()}


def _pack_documents(run: str, record: Record, shared: Record, arrays: dict[str, Any]) -> Record:
    """A record of documents.json without numbers, which are added to `arrays`."""
    packed = dict(record)
    for split, part in record.items():
        if isinstance(part, dict):
            rows, names = part['nats'], {n: part[n] for n in ('documents', 'tokens')}
            packed[split] = {
                'set': _index(shared['documents'], names),
                'absent': [number for number, row in enumerate(rows) if row is None],
                'trials': len(rows),
            }
            arrays[f'{run}-{split}'] = np.array([row for row in rows if row is not None], float)
    return packed


def _documents(
    run: str, packed: Record, sets: list[Any], arrays: Mapping[str, np.ndarray]
) -> Record:
    record = {split: part for split, part in packed.items() if split != 'sha256'}
    for split, part in record.items():
        if isinstance(part, dict):
            rows = iter(arrays[f'{run}-{split}'].tolist())
            nats = [None if n in part['absent'] else next(rows) for n in range(part['trials'])]
            record[split] = sets[part['set']] | {'nats': nats}
    return record


def _columns(trials: Sequence[Record]) -> dict[str, list[Any]]:
    return {name: [trial[name] for trial in trials] for name in (trials or [{}])[0]}


def _index(values: list[Any], value: Any) -> int:
    if value not in values:
        values.append(value)
    return values.index(value)


def _changed(config: Record, base: Record) -> Record:
    """The settings of a config that are not those of the base, section by section."""
    return {
        section: {name: v for name, v in fields.items() if v != base[section][name]}
        for section, fields in config.items()
    }


def _merged(changed: Record, base: Record) -> Record:
    return {section: base[section] | fields for section, fields in changed.items()}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _text(records: Iterable[Record]) -> bytes:
    return ''.join(json.dumps(record) + '\n' for record in records).encode()
