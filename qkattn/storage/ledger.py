"""The ledger of a study: what was declared, added, looked at and accepted, and when.

ledger.jsonl has a line {event, time, ..., previous, hash} per event. `hash` is the SHA-256 of its
other fields, `previous` the hash of the line before: an edited, moved or missing line breaks the
chain, a missing last one shows in the files it describes. It protects from mistakes, not fraud.

    declared     declaration (SHA-256 of study.json without its command), family, arms, seeds,
                 margin, post_hoc (false); repeats ({study, entry}) of a study that repeats another:
                 its name, and the hash of the last line of its ledger; again where a field that may
                 change does, such as the question
    repeats      study, entry: as above, declared in retrospect (retrospective: true), and why. A
                 study that is not kept is named as lost: its commit, seeds and arms
    arms_added   arms, family, post_hoc (whether a look came before verdicts), declaration
    looked       look (1, 2, ...), files: `digests`; runs: `seen`
    accepted     code of what would withhold every verdict, and why it does not

An arm is {variant, size, corpus, control}; the family is the number of primary arms (control null)
but the baseline. What a look has seen of a run does not change. Writers hold the study's lock.
"""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qkattn.errors import ReportError
from qkattn.metrics import result_fields
from qkattn.storage.files import Files, Readable, read_whole, run_path, write_atomic
from qkattn.storage.leases import locked
from qkattn.storage.records import ARM_KEY, OUTSIDE, check, metrics_of, parse_json, to_jsonable

NAME = 'ledger.jsonl'
ADVICE = 'restore it from a copy, or run the study in a new directory'
# The events of entries.
DECLARED = 'declared'
ARMS_ADDED = 'arms_added'
LOOKED = 'looked'
ACCEPTED = 'accepted'
REPEATS = 'repeats'
# What may be accepted: runs with uncommitted changes, or of different commits.
ACCEPTABLE = ('uncommitted', 'commits')
YARDSTICKS = 'yardsticks.json'
# Holds the SHA-256 of a documents.json that a stored study leaves out of a run.
DOCUMENTS_SHA256 = 'documents.sha256'
# The fields of a result that a look sees besides its metrics; times are not among them.
_SEEN = ('trial', 'status', 'diverged_at', 'num_steps', OUTSIDE)

Entry = Mapping[str, Any]
ArmKeys = frozenset[tuple[str | None, ...]]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """The declaration of a study that it repeats another one."""

    study: str  # the name of the directory of the repeated study
    entry: str  # hash of the last line of its ledger at that time
    retrospective: bool = False  # whether it was declared when results were known
    # Of a study that is not kept: where it was, the seeds of its verdicts, and its arms.
    commit: str | None = None
    seeds: tuple[int, ...] = ()
    arms: ArmKeys = frozenset()

    @property
    def is_lost(self) -> bool:
        """Whether the repeated study is not kept."""
        return self.commit is not None


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The lines of a ledger whose chain is whole, the first one a declaration."""

    entries: tuple[Entry, ...]

    @functools.cached_property
    def family(self) -> int:
        """Widest family ever declared."""
        return max(entry['family'] for entry in self.entries if 'family' in entry)

    @functools.cached_property
    def arms(self) -> ArmKeys:
        """Every arm ever declared."""
        return frozenset(arm_key(arm) for entry in self.entries for arm in entry.get('arms', []))

    @functools.cached_property
    def post_hoc(self) -> ArmKeys:
        """The arms that were added after the first look.

        None of a study without tuning, which has no verdicts.
        """
        late_entries = [entry for entry in self.entries if entry.get('post_hoc')]
        return frozenset(arm_key(arm) for entry in late_entries for arm in entry['arms'])

    @functools.cached_property
    def repeats(self) -> tuple[Repeat, ...]:
        """The studies that it repeats, in the order of their entries."""
        declared: dict[str, Repeat] = {}
        for entry in self._entries_of(DECLARED):
            if 'repeats' in entry:  # of several declarations of a study the last one counts
                repeated = entry['repeats']
                declared[repeated['study']] = Repeat(repeated['study'], repeated['entry'])
        in_retrospect = [_repeat_in_retrospect(entry) for entry in self._entries_of(REPEATS)]
        return (*declared.values(), *in_retrospect)

    def _entries_of(self, event: str) -> list[Entry]:
        return [entry for entry in self.entries if entry['event'] == event]

    @property
    def last(self) -> str:
        """Hash of the last line."""
        return self.entries[-1]['hash']

    @property
    def declaration(self) -> str:
        """Hash of the study as it was declared last."""
        declarations = [e['declaration'] for e in self.entries if 'declaration' in e]
        return declarations[-1]

    @property
    def first_look(self) -> str | None:
        """Time of the first look; None before it."""
        looks = self._entries_of(LOOKED)
        return looks[0]['time'] if looks else None

    @property
    def looked_files(self) -> dict[str, str | None]:
        """`digests` at the last look; empty before the first."""
        looks = self._entries_of(LOOKED)
        return looks[-1]['files'] if looks else {}

    def altered(self, runs: Mapping[str, str]) -> dict[str, int]:
        """The runs that are not as a look saw them, each with the number of its first look.

        `runs` are the runs as they are, {run: digest} as `seen` gives them.
        """
        first_looks: dict[str, tuple[str, int]] = {}  # {run: (digest, number of the look)}
        for entry in reversed(self._entries_of(LOOKED)):
            for run, seen_digest in entry.get('runs', {}).items():
                first_looks[run] = (seen_digest, entry['look'])  # in place of a later look
        altered = {}
        for run, (seen_digest, number) in first_looks.items():
            if runs.get(run) != seen_digest:
                altered[run] = number
        return altered

    @property
    def accepted(self) -> dict[str, str]:
        """Why each accepted code was accepted."""
        return {entry['code']: entry['why'] for entry in self._entries_of(ACCEPTED)}


def _repeat_in_retrospect(entry: Entry) -> Repeat:
    """The repeat that a line with the event REPEATS declares."""
    lost = entry.get('lost')
    if lost is None:
        return Repeat(entry['study'], entry['entry'], retrospective=True)
    return Repeat(
        entry['study'],
        entry['entry'],
        retrospective=True,
        commit=lost['commit'],
        seeds=tuple(lost['seeds']),
        arms=frozenset(arm_key(arm) for arm in lost['arms']),
    )


def read(path: Path) -> Ledger:
    """Reads a ledger; ReportError where a line is missing, damaged, edited or out of place."""
    entries: list[Entry] = []
    previous_hash = None
    for number, line in enumerate(_lines(path, keepends=True), start=1):
        try:
            entry = parse_json(line)
            check(entry, {'event': str, 'time': str, 'previous': str | None, 'hash': str})
        except ValueError as error:
            raise ReportError(f'{path}, line {number} is damaged ({error}); {ADVICE}') from error
        if entry['hash'] != digest_of_entry(entry) or not line.endswith(b'\n'):
            raise ReportError(
                f'{path}, line {number} was edited: its hash does not match; {ADVICE}'
            )
        if entry['previous'] != previous_hash:
            raise ReportError(f'{path}, line {number} does not follow the line before; {ADVICE}')
        previous_hash = entry['hash']
        entries.append(entry)
    if not entries or entries[0]['event'] != DECLARED:
        raise ReportError(f'{path} does not exist, or declares no study; {ADVICE}')
    return Ledger(tuple(entries))


def append(path: Path, event: str, **data: Any) -> None:
    """Appends a line, to a new ledger if there is none; raises as `read`."""
    lines = b''
    previous_hash = None
    if path.exists():
        previous_hash = read(path).last
        lines = read_whole(path)
    entry = {
        'event': event,
        'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        **to_jsonable(data),
        'previous': previous_hash,
    }
    entry['hash'] = digest_of_entry(entry)
    write_atomic(path, lines + json.dumps(entry).encode() + b'\n')


def declare(
    directory: Path, declared: Mapping[str, Any], repeats: Mapping[str, str] | None = None
) -> None:
    """Enters a study (as in study.json), or what was added to it, under its lock.

    `repeats` is {study, entry} of the study that it repeats.
    """
    path = directory / NAME
    before = read(path) if path.exists() else None
    if before is not None and before.declaration == digest(declared):
        return
    arms = declared['arms']
    # The family: every arm that is compared with the baseline, and is no control.
    compared = [
        arm for arm in arms if arm['control'] is None and arm['variant'] != declared['baseline']
    ]
    common = {'declaration': digest(declared), 'family': len(compared)}
    if before is not None:
        added = [arm for arm in arms if arm_key(arm) not in before.arms]
        if added:
            # They depend on results if there are verdicts, and a look came before.
            late = before.first_look is not None and declared['tuning'] is not None
            append(path, ARMS_ADDED, arms=added, post_hoc=late, **common)
            return
    fields = {name: declared[name] for name in ('arms', 'seeds', 'margin')}
    if repeats is not None:
        fields['repeats'] = repeats
    append(path, DECLARED, **common, **fields, post_hoc=False)


def look(directory: Path, logs: Files | None = None) -> bool:
    """Enters a look, a report on more than screening, at the files in `logs`.

    They are those of the study itself, or of a stored one, whose logs are in an archive. Enters
    nothing and returns False if they are as at the last look, or if a run is not as a look saw it.
    """
    path = directory / NAME
    if logs is None:
        logs = directory
    files = digests(logs)
    runs = seen(logs)
    ledger = read(path)
    # Asked before a lock is made, so that a kept copy of a study stays as it is.
    if files == ledger.looked_files or ledger.altered(runs):
        return False
    with locked(directory / 'lock'):
        ledger = read(path)
        if files != ledger.looked_files:  # nobody was quicker
            number = sum(entry['event'] == LOOKED for entry in ledger.entries) + 1
            append(path, LOOKED, look=number, files=files, runs=runs)
    return True


def accept(directory: Path, codes: Sequence[str], why: str) -> None:
    """Enters why remarks that would withhold every verdict, by their codes, do not.

    A code that was accepted for the same reason is not entered again. ReportError, and no entry, if
    a code is not ACCEPTABLE or `why` is blank.
    """
    for code in codes:
        if code not in ACCEPTABLE:
            raise ReportError(f'accept={code!r} must be {" or ".join(ACCEPTABLE)}')
    if not why.strip():
        raise ReportError(f'accept={",".join(codes)} needs a reason, why={why!r}')
    path = directory / NAME
    read(path)  # raises where there is none: a lock would make its directory
    with locked(directory / 'lock'):
        for code in codes:
            if read(path).accepted.get(code) != why:
                append(path, ACCEPTED, code=code, why=why)


def arm_key(arm: Mapping[str, Any]) -> tuple[str | None, ...]:
    """(variant, size, corpus, control) of an arm of study.json."""
    return tuple(arm[name] for name in ARM_KEY)


def digest(declared: Mapping[str, Any]) -> str:
    """SHA-256 of the content of study.json without its command."""
    return _sha256({name: value for name, value in declared.items() if name != 'command'})


def digest_of_entry(entry: Entry) -> str:
    """SHA-256 of a line without its hash."""
    return _sha256({name: value for name, value in entry.items() if name != 'hash'})


def digests(directory: Files) -> dict[str, str | None]:
    """SHA-256 of the files that a look sees, None for one that is missing.

    'logs' stands for the logs of all planned runs, without training. Not every study has
    yardsticks; they are left out where they are missing.
    """
    digest_by_name: dict[str, str | None] = {}
    for name in ('study.json', 'plan.jsonl', 'results.jsonl', YARDSTICKS):
        digest_by_name[name] = _file_sha256(directory / name)
    if digest_by_name[YARDSTICKS] is None:
        del digest_by_name[YARDSTICKS]
    logs = {planned['directory']: hashes for planned, hashes in _logs(directory)}
    digest_by_name['logs'] = _sha256(logs)
    return digest_by_name


def seen(directory: Files) -> dict[str, str]:
    """{run: SHA-256} of what a look sees of each planned run with results: metrics and logs."""
    results_by_run: dict[str, list[dict[str, Any]]] = {}
    for line in _lines(directory / 'results.jsonl'):
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a report names the line
            result = parse_json(line)
            names = (*_SEEN, *result_fields(metrics_of(result)))
            fields = {name: result[name] for name in names if name in result}
            results = results_by_run.setdefault(result['run'], [])
            if fields not in results:
                results.append(fields)
    logs_by_run = {planned.get('run'): hashes for planned, hashes in _logs(directory)}
    digest_by_run = {}
    for run, results in results_by_run.items():
        if run in logs_by_run:
            digest_by_run[run] = _sha256({'results': results, 'logs': logs_by_run[run]})
    return digest_by_run


def _logs(directory: Files) -> Iterator[tuple[dict[str, Any], list[str | None]]]:
    """Each line of the plan with the hashes of the run's documents.json and evaluations."""
    for line in _lines(directory / 'plan.jsonl'):
        # A report names a line that has no directory.
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, OSError):
            planned = parse_json(line)
            run = run_path(directory, planned['directory'])
            evaluations = hashlib.sha256()
            for record in _lines(run / 'metrics.jsonl'):
                if not is_training(record):
                    evaluations.update(record)
            documents = left_out_documents(run) or _file_sha256(run / 'documents.json')
            yield planned, [documents, evaluations.hexdigest()]


def left_out_documents(run: Files) -> str | None:
    """SHA-256 of the documents.json that the stored form of a study leaves out of a run."""
    path = run / DOCUMENTS_SHA256
    return read_whole(path).decode().strip() if path.is_file() else None


def is_training(line: bytes) -> bool:
    """Whether a line of metrics.jsonl is one of those that exports and `digests` leave out."""
    return b'"kind": "train"' in line


def _file_sha256(path: Readable) -> str | None:
    """The SHA-256 of a file; None where there is none."""
    return hashlib.sha256(read_whole(path)).hexdigest() if path.is_file() else None


def _lines(path: Readable, keepends: bool = False) -> list[bytes]:
    """The lines of a file; [] where there is none."""
    return read_whole(path).splitlines(keepends) if path.is_file() else []


def _sha256(values: Mapping[str, Any]) -> str:
    """The SHA-256 of values as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(to_jsonable(values), sort_keys=True).encode()).hexdigest()
