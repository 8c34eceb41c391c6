"""The ledger of a study: what was declared, added, looked at and accepted, and when.

    ledger.jsonl   a line per event: {event, time, ..., previous, hash}

`hash` is the SHA-256 of the line's other fields, `previous` the hash of the line before it, so a
line that is edited, moved or left out breaks the chain. A missing last line does not: it shows in
the files that the last line describes. A ledger that is rewritten as a whole is not
noticed: it protects from mistakes, not from fraud.

    declared     declaration (SHA-256 of study.json without its command), family, arms, seeds,
                 looks, margin; again where a field that may change, such as the question, does
    arms_added   arms, family, post_hoc (whether a look came before), declaration
    changed      changes (settings and their old and new values), and as arms_added with all arms
    looked       look (1, 2, ...), files: SHA-256 of study.json, plan.jsonl, results.jsonl and
                 yardsticks.json, if it is recorded, and of the logs (evaluations and
                 documents.json) of all planned runs together; runs: of the metrics and logs of each
                 run with results
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
from qkattn.storage.files import as_path, write_atomic
from qkattn.storage.leases import locked
from qkattn.storage.records import ARM_KEY, parse_json, to_jsonable

NAME = 'ledger.jsonl'
DECLARED, ARMS_ADDED, CHANGED = 'declared', 'arms_added', 'changed'
LOOKED, ACCEPTED = 'looked', 'accepted'
FIELDS = {
    DECLARED: ('declaration', 'family', 'arms', 'seeds', 'looks', 'margin'),
    ARMS_ADDED: ('arms', 'family', 'post_hoc', 'declaration'),
    CHANGED: ('changes', 'arms', 'family', 'post_hoc', 'declaration'),
    LOOKED: ('look', 'files', 'runs'),
    ACCEPTED: ('code', 'why'),
}
_LATER = {'runs'}  # fields that lines of earlier versions lack
# What may be accepted: runs of a checkout with uncommitted changes, runs of different commits.
ACCEPTABLE = ('uncommitted', 'commits')
YARDSTICKS = 'yardsticks.json'
# In place of documents.json where a stored study leaves that out: its SHA-256.
DOCUMENTS_SHA256 = 'documents.sha256'
# The fields of a result that were seen; times may be measured again.
_SEEN = ('trial', 'status', 'diverged_at', 'num_steps', *result_fields())

Entry = Mapping[str, Any]
ArmKeys = frozenset[tuple[str | None, ...]]


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
        return _arm_keys([e for e in self.entries if 'arms' in e])

    @functools.cached_property
    def post_hoc(self) -> ArmKeys:
        """The arms that were added, or whose settings changed, after the first look."""
        return _arm_keys([e for e in self.entries if e.get('post_hoc')])

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
        """The first look at each run that it has seen otherwise than `runs`, which are as `seen`.

        A run is gone for a reason only where the settings of the study have changed.
        """
        looks: dict[str, tuple[str, int]] = {}
        for entry in reversed(self.entries):
            if entry['event'] == LOOKED and 'runs' in entry:
                looks |= {run: (seen, entry['look']) for run, seen in entry['runs'].items()}
        may_go = any(entry['event'] == CHANGED for entry in self.entries)
        return {
            run: look
            for run, (seen, look) in looks.items()
            if runs.get(run, seen if may_go else None) != seen
        }

    @property
    def accepted(self) -> dict[str, str]:
        """Why each accepted code was accepted."""
        return {e['code']: e['why'] for e in self.entries if e['event'] == ACCEPTED}


def read(path: str | Path) -> Ledger:
    """Reads a ledger.

    Raises:
      ReportError: there is none, or a line of it is missing, damaged, edited or out of place.
    """
    path = as_path(path)
    if not path.is_file():
        why = 'is not a file' if path.exists() else 'does not exist'
        raise ReportError(
            f'{path} {why}, so what this study declared is not known; '
            'restore it from a copy, or run the study in a new directory'
        )
    entries: list[Entry] = []
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if problem := _problem(line, entries):
            raise _broken(path, number, problem)
    if not entries:
        raise _broken(path, 1, 'is missing')
    return Ledger(tuple(entries))


def append(path: str | Path, event: str, **data: Any) -> None:
    """Appends a line of FIELDS[event], to a new ledger if there is none; raises as `read`."""
    path = as_path(path)
    entries = read(path).entries if path.exists() else ()
    if data.keys() != set(FIELDS[event]):
        raise ValueError(f'{event} needs {FIELDS[event]}, not {tuple(data)}')
    entry = {
        'event': event,
        'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        **{name: to_jsonable(data[name]) for name in FIELDS[event]},
        'previous': entries[-1]['hash'] if entries else None,
    }
    entry['hash'] = digest_of_entry(entry)
    text = path.read_text(encoding='utf-8') if entries else ''
    write_atomic(path, text + json.dumps(entry) + '\n')


def declare(directory: Path, declared: Mapping[str, Any], changes: Sequence[str] = ()) -> None:
    """Enters a study, or how it has changed since its last line, under the study's lock.

    Args:
      declared: the content of study.json.
      changes: of settings, as 'name: old -> new'.
    """
    path = directory / NAME
    before = read(path) if path.exists() else None
    if before is not None and before.declaration == digest(declared) and not changes:
        return
    arms = declared['arms']
    primary = [arm for arm in arms if arm['control'] is None]
    common = {
        'declaration': digest(declared),
        'family': sum(arm['variant'] != declared['baseline'] for arm in primary),
    }
    added = [arm for arm in arms if before is not None and arm_key(arm) not in before.arms]
    post_hoc = before is not None and before.first_look is not None
    if changes:
        append(path, CHANGED, changes=changes, arms=arms, post_hoc=post_hoc, **common)
    elif added:
        append(path, ARMS_ADDED, arms=added, post_hoc=post_hoc, **common)
    else:
        rest = {name: declared[name] for name in ('arms', 'seeds', 'looks', 'margin')}
        append(path, DECLARED, **common, **rest)


def look(directory: Path, logs: Path | None = None) -> bool:
    """Enters a look at the study's results, whose files are in `logs`, and returns True.

    None is entered if the files are those of the last one, or not what a look saw of a run.
    """
    path = directory / NAME
    logs = directory if logs is None else logs
    files, runs = digests(logs), seen(logs)
    kept = read(path)
    if files == kept.looked_files or kept.altered(runs):
        return False  # before a lock is made, so that a kept copy of a study stays as it is
    with locked(directory / 'lock'):
        kept = read(path)
        if files != kept.looked_files:  # nobody was quicker
            number = sum(entry['event'] == LOOKED for entry in kept.entries) + 1
            append(path, LOOKED, look=number, files=files, runs=runs)
    return True


def accept(directory: Path, code: str, why: str) -> None:
    """Enters that verdicts are given although `code` holds of the results.

    Raises:
      ReportError: a code that is not in ACCEPTABLE, or no reason; as `read`.
    """
    if code not in ACCEPTABLE or not why.strip():
        raise ReportError(
            f'accept={code!r} with the reason {why!r}: it takes {" or ".join(ACCEPTABLE)}, and a '
            'reason that is not empty'
        )
    path = directory / NAME
    if (code, why) in read(path).accepted.items():
        return
    with locked(directory / 'lock'):
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


def digests(directory: Path) -> dict[str, str | None]:
    """SHA-256 of the files of a study that a look sees, and one of the logs of all planned runs.

    Of metrics.jsonl all lines count but those of training, which copies of a study leave out.
    """
    names = ('study.json', 'plan.jsonl', 'results.jsonl', YARDSTICKS)
    files = {name: _file_sha256(directory / name) for name in names}
    if files[YARDSTICKS] is None:  # not every study has them
        del files[YARDSTICKS]
    logs = {planned['directory']: hashes for planned, hashes in _logs(directory)}
    return files | {'logs': _sha256(logs)}


def seen(directory: Path) -> dict[str, str]:
    """SHA-256 of what a look sees of each planned run with results: metrics and logs."""
    results: dict[str, list[dict[str, Any]]] = {}
    for line in _lines(directory / 'results.jsonl'):
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a report names the line
            result = parse_json(line)
            fields = {name: result[name] for name in _SEEN if name in result}
            if fields not in (trials := results.setdefault(result['run'], [])):
                trials.append(fields)
    logs = {planned.get('run'): hashes for planned, hashes in _logs(directory)}
    return {
        run: _sha256({'results': trials, 'logs': logs[run]})
        for run, trials in results.items()
        if run in logs
    }


def _logs(directory: Path) -> Iterator[tuple[dict[str, Any], list[str | None]]]:
    """Each line of the plan with the hashes of the run's documents.json and evaluations."""
    for line in _lines(directory / 'plan.jsonl'):
        # A report names a line that has no directory.
        with contextlib.suppress(ValueError, TypeError, KeyError, OSError):
            run = directory / (planned := parse_json(line))['directory']
            evaluations = hashlib.sha256()
            for record in _lines(run / 'metrics.jsonl'):
                if not is_training(record):
                    evaluations.update(record)
            documents = left_out_documents(run) or _file_sha256(run / 'documents.json')
            yield planned, [documents, evaluations.hexdigest()]


def left_out_documents(run: Path) -> str | None:
    """SHA-256 of the documents.json that the stored form of a study leaves out of a run."""
    path = run / DOCUMENTS_SHA256
    return path.read_text().strip() if path.is_file() else None


def is_training(line: bytes) -> bool:
    """Whether a line of metrics.jsonl is one of those that exports and `digests` leave out."""
    return b'"kind": "train"' in line


def _file_sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.is_file() else []


def _sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(to_jsonable(values), sort_keys=True).encode()).hexdigest()


def _problem(line: bytes, entries: list[Entry]) -> str | None:
    """What is wrong with the line after `entries`, to which it is added otherwise."""
    try:
        entry = parse_json(line)
    except ValueError:
        return 'is not JSON'
    if not line.endswith(b'\n'):
        return 'is cut off'
    if not isinstance(entry, dict) or not {'event', 'time', 'previous', 'hash'} <= entry.keys():
        return 'is not an entry of a ledger'
    if entry['hash'] != digest_of_entry(entry):
        return 'was edited: its hash is not that of its content'
    if entry['previous'] != (entries[-1]['hash'] if entries else None):
        return 'does not follow the line before it'
    if entry['event'] not in FIELDS or not set(FIELDS[entry['event']]) - _LATER <= entry.keys():
        return f'has the event {entry["event"]!r} without the fields of one that is known'
    if not entries and entry['event'] != DECLARED:
        return 'declares no study'
    entries.append(entry)
    return None


def _broken(path: Path, number: int, problem: str) -> ReportError:
    return ReportError(
        f'{path}, line {number} {problem}; restore the file from a copy, or run the study in a new '
        'directory'
    )


def _arm_keys(entries: list[Entry]) -> ArmKeys:
    return frozenset(arm_key(arm) for entry in entries for arm in entry['arms'])
