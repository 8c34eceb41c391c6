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
DECLARED = 'declared'
ARMS_ADDED = 'arms_added'
LOOKED = 'looked'
ACCEPTED = 'accepted'
REPEATS = 'repeats'
ACCEPTABLE = ('uncommitted', 'commits')  # runs with uncommitted changes, or of different commits
YARDSTICKS = 'yardsticks.json'
DOCUMENTS_SHA256 = 'documents.sha256'  # of a documents.json that a stored study leaves out
_SEEN = ('trial', 'status', 'diverged_at', 'num_steps', OUTSIDE)  # and metrics, but no times

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
        return max(e['family'] for e in self.entries if 'family' in e)

    @functools.cached_property
    def arms(self) -> ArmKeys:
        """Every arm ever declared."""
        return frozenset(arm_key(a) for e in self.entries if 'arms' in e for a in e['arms'])

    @functools.cached_property
    def post_hoc(self) -> ArmKeys:
        """The arms that were added after the first look.

        None of a study without tuning, which has no verdicts.
        """
        later = [e for e in self.entries if e.get('post_hoc')]
        return frozenset(arm_key(a) for e in later for a in e['arms'])

    @functools.cached_property
    def repeats(self) -> tuple[Repeat, ...]:
        """The studies that it repeats, in the order of their entries."""
        declared = [e['repeats'] for e in self.entries if e['event'] == DECLARED and 'repeats' in e]
        repeats = {of['study']: Repeat(of['study'], of['entry']) for of in declared}
        return (*repeats.values(), *map(_in_retrospect, self._all(REPEATS)))

    def _all(self, event: str) -> list[Entry]:
        return [entry for entry in self.entries if entry['event'] == event]

    @property
    def last(self) -> str:
        """Hash of the last line."""
        return self.entries[-1]['hash']

    @property
    def declaration(self) -> str:
        """Hash of the study as it was declared last."""
        return [e['declaration'] for e in self.entries if 'declaration' in e][-1]

    @property
    def first_look(self) -> str | None:
        """Time of the first look; None before it."""
        return next((e['time'] for e in self.entries if e['event'] == LOOKED), None)

    @property
    def looked_files(self) -> dict[str, str | None]:
        """`digests` at the last look; empty before the first."""
        return next((e['files'] for e in reversed(self.entries) if e['event'] == LOOKED), {})

    def altered(self, runs: Mapping[str, str]) -> dict[str, int]:
        """The first look at each run that it saw otherwise than `runs`, which are as `seen`."""
        looks: dict[str, tuple[str, int]] = {}
        for entry in reversed(self.entries):
            if entry['event'] == LOOKED and 'runs' in entry:
                looks |= {run: (seen, entry['look']) for run, seen in entry['runs'].items()}
        return {run: look for run, (seen, look) in looks.items() if runs.get(run) != seen}

    @property
    def accepted(self) -> dict[str, str]:
        """Why each accepted code was accepted."""
        return {e['code']: e['why'] for e in self.entries if e['event'] == ACCEPTED}


def read(path: Path) -> Ledger:
    """Reads a ledger; ReportError where a line is missing, damaged, edited or out of place."""
    entries: list[Entry] = []
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
        if entry['previous'] != (entries[-1]['hash'] if entries else None):
            raise ReportError(f'{path}, line {number} does not follow the line before; {ADVICE}')
        entries.append(entry)
    if not entries or entries[0]['event'] != DECLARED:
        raise ReportError(f'{path} does not exist, or declares no study; {ADVICE}')
    return Ledger(tuple(entries))


def append(path: Path, event: str, **data: Any) -> None:
    """Appends a line, to a new ledger if there is none; raises as `read`."""
    entries = read(path).entries if path.exists() else ()
    entry = {
        'event': event,
        'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        **to_jsonable(data),
        'previous': entries[-1]['hash'] if entries else None,
    }
    entry['hash'] = digest_of_entry(entry)
    before = read_whole(path) if entries else b''
    write_atomic(path, before + json.dumps(entry).encode() + b'\n')


def _in_retrospect(entry: Entry) -> Repeat:
    lost = entry.get('lost')
    if lost is None:
        return Repeat(entry['study'], entry['entry'], True)
    arms = frozenset(map(arm_key, lost['arms']))
    return Repeat(entry['study'], entry['entry'], True, lost['commit'], tuple(lost['seeds']), arms)


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
    primary = [arm for arm in arms if arm['control'] is None]
    common = {
        'declaration': digest(declared),
        'family': sum(arm['variant'] != declared['baseline'] for arm in primary),
    }
    added = [arm for arm in arms if before is not None and arm_key(arm) not in before.arms]
    if before is not None and added:
        # They depend on results if there are verdicts, and a look came before.
        late = before.first_look is not None and declared['tuning'] is not None
        append(path, ARMS_ADDED, arms=added, post_hoc=late, **common)
    else:
        rest = {name: declared[name] for name in ('arms', 'seeds', 'margin')}
        if repeats is not None:
            rest['repeats'] = repeats
        append(path, DECLARED, **common, **rest, post_hoc=False)


def look(directory: Path, logs: Files | None = None) -> bool:
    """Enters a look at the files in `logs`; False if unchanged, or if runs were altered."""
    path = directory / NAME
    logs = directory if logs is None else logs
    files = digests(logs)
    runs = seen(logs)
    kept = read(path)
    if files == kept.looked_files or kept.altered(runs):
        return False  # before a lock is made, so that a kept copy of a study stays as it is
    with locked(directory / 'lock'):
        kept = read(path)
        if files != kept.looked_files:  # nobody was quicker
            number = sum(entry['event'] == LOOKED for entry in kept.entries) + 1
            append(path, LOOKED, look=number, files=files, runs=runs)
    return True


def accept(directory: Path, codes: Sequence[str], why: str) -> None:
    """Enters why `codes` withhold no verdict; ReportError, and no entry, if one is not ACCEPTABLE.

    ReportError without why as well.
    """
    for code in codes:
        if code not in ACCEPTABLE:
            raise ReportError(f'accept={code!r} must be {" or ".join(ACCEPTABLE)}')
    if not why.strip():
        raise ReportError(f'accept={",".join(codes)} needs a reason, why={why!r}')
    read(directory / NAME)  # a lock makes its directory
    with locked(directory / 'lock'):
        known = read(directory / NAME).accepted
        for code in dict.fromkeys(codes):
            if known.get(code) != why:
                append(directory / NAME, ACCEPTED, code=code, why=why)


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
    """SHA-256 of the files that a look sees, and of all planned runs' logs without training."""
    names = ('study.json', 'plan.jsonl', 'results.jsonl', YARDSTICKS)
    files = {name: _file_sha256(directory / name) for name in names}
    if files[YARDSTICKS] is None:  # not every study has them
        del files[YARDSTICKS]
    logs = {planned['directory']: hashes for planned, hashes in _logs(directory)}
    return files | {'logs': _sha256(logs)}


def seen(directory: Files) -> dict[str, str]:
    """SHA-256 of what a look sees of each planned run with results: metrics and logs."""
    results: dict[str, list[dict[str, Any]]] = {}
    for line in _lines(directory / 'results.jsonl'):
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a report names the line
            result = parse_json(line)
            names = (*_SEEN, *result_fields(metrics_of(result)))
            fields = {name: result[name] for name in names if name in result}
            if fields not in (trials := results.setdefault(result['run'], [])):
                trials.append(fields)
    logs = {planned.get('run'): hashes for planned, hashes in _logs(directory)}
    return {
        run: _sha256({'results': trials, 'logs': logs[run]})
        for run, trials in results.items()
        if run in logs
    }


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
    return hashlib.sha256(read_whole(path)).hexdigest() if path.is_file() else None


def _lines(path: Readable, keepends: bool = False) -> list[bytes]:
    return read_whole(path).splitlines(keepends) if path.is_file() else []


def _sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(to_jsonable(values), sort_keys=True).encode()).hexdigest()
