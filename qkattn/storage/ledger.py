"""The ledger of a study: a log of its declarations and of the looks at its results.

ledger.jsonl has one line {event, time, ..., previous, hash} per event. `hash` is the SHA-256 of the
line's other fields, and `previous` is the hash of the previous line. Editing, moving or removing an
inner line breaks this hash chain. The ledger protects from mistakes, not from fraud.

    event        meaning, and the further fields of the line
    declared     The study is declared, or its declaration changes.
                 declaration (SHA-256 of study.json without its command), family, arms, seeds,
                 margin, post_hoc (false), repeats (optional: {study, entry}, the name of a repeated
                 study and the hash of the last line of its ledger)
    repeats      The study is found to repeat another study after results are known.
                 study, entry, retrospective (true), why, lost (optional: the commit, seeds and
                 arms of a repeated study that is not kept)
    arms_added   Arms are added to the study.
                 arms, family, declaration, post_hoc (whether the arms may be chosen by results)
    looked       Somebody reads a report on results other than screening.
                 look (1, 2, ...), files (`file_digests`), runs (`run_digests`)
    accepted     A problem that withholds all verdicts is accepted.
                 code (the problem), why

An arm is {variant, size, corpus, control}. `family` is the number of arms that are compared with
the baseline; controls do not count. Writers hold the study's lock.
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
from qkattn.storage.files import Files, Readable, read_whole, run_path, write_atomic
from qkattn.storage.leases import locked
from qkattn.storage.records import ARM_KEY, OUTSIDE, check, metric_fields, parse_json, to_jsonable

NAME = 'ledger.jsonl'
ADVICE = 'restore it from a copy, or run the study in a new directory'
# Values of the field `event`.
DECLARED = 'declared'
ARMS_ADDED = 'arms_added'
LOOKED = 'looked'
ACCEPTED = 'accepted'
REPEATS = 'repeats'
# Problems that withhold all verdicts until a person accepts them: runs of uncommitted code, and
# runs of different commits.
ACCEPTABLE = ('uncommitted', 'commits')
YARDSTICKS = 'yardsticks.json'
# A file with the SHA-256 of a documents.json that a stored study does not keep.
DOCUMENTS_SHA256 = 'documents.sha256'
# Fields of a result, besides its metrics, that enter its digest. Times differ in each repetition.
_DIGESTED_FIELDS = ('trial', 'status', 'diverged_at', 'num_steps', OUTSIDE)

Entry = Mapping[str, Any]
ArmKeys = frozenset[tuple[str | None, ...]]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A study's declaration that it repeats another study."""

    study: str  # directory name of the repeated study
    entry: str  # hash of the last line of the repeated study's ledger
    retrospective: bool = False  # whether results were known at the declaration
    # The fields below describe a repeated study that is not kept.
    commit: str | None = None  # a commit that contains the repeated study
    seeds: tuple[int, ...] = ()  # the seeds of its verdicts
    arms: ArmKeys = frozenset()

    @property
    def is_lost(self) -> bool:
        """Whether the repeated study is not kept."""
        return self.commit is not None


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The checked lines of a ledger; the first line declares the study."""

    entries: tuple[Entry, ...]

    @functools.cached_property
    def family(self) -> int:
        """The largest family ever declared."""
        return max(entry['family'] for entry in self.entries if 'family' in entry)

    @functools.cached_property
    def arms(self) -> ArmKeys:
        """Every arm ever declared."""
        keys: set[tuple[str | None, ...]] = set()
        for entry in self.entries:
            keys.update(arm_key(arm) for arm in entry.get('arms', []))
        return frozenset(keys)

    @functools.cached_property
    def post_hoc(self) -> ArmKeys:
        """Arms added after the first look; empty for a study without verdicts."""
        keys: set[tuple[str | None, ...]] = set()
        for entry in self.entries:
            if entry.get('post_hoc'):
                keys.update(arm_key(arm) for arm in entry['arms'])
        return frozenset(keys)

    @functools.cached_property
    def repeats(self) -> tuple[Repeat, ...]:
        """The studies that this study repeats; those declared in advance come first."""
        declared_by_study: dict[str, Repeat] = {}
        for entry in self._entries_of(DECLARED):
            if 'repeats' in entry:
                fields = entry['repeats']  # {'study': name, 'entry': hash of a line}
                repeat = Repeat(study=fields['study'], entry=fields['entry'])
                # The last declaration of each repeated study counts.
                declared_by_study[repeat.study] = repeat
        retrospective = [_retrospective_repeat(entry) for entry in self._entries_of(REPEATS)]
        return (*declared_by_study.values(), *retrospective)

    def _entries_of(self, event: str) -> list[Entry]:
        return [entry for entry in self.entries if entry['event'] == event]

    @property
    def last(self) -> str:
        """Hash of the last line."""
        return self.entries[-1]['hash']

    @property
    def declaration(self) -> str:
        """Hash of the latest declaration."""
        declarations = [entry['declaration'] for entry in self.entries if 'declaration' in entry]
        return declarations[-1]

    @property
    def first_look(self) -> str | None:
        """Time of the first look, or None."""
        looks = self._entries_of(LOOKED)
        return looks[0]['time'] if looks else None

    @property
    def looked_files(self) -> dict[str, str | None]:
        """`file_digests` at the last look; empty if there is no look."""
        looks = self._entries_of(LOOKED)
        return looks[-1]['files'] if looks else {}

    def altered(self, runs: Mapping[str, str]) -> dict[str, int]:
        """Finds runs that were changed or deleted after somebody looked at their results.

        Args:
            runs: The present digest of every run, from `run_digests`.

        Returns:
            {run: number (1, 2, ...) of its first look} for each altered run.
        """
        # Iterate in reverse, so that the first look at each run wins.
        first_digests: dict[str, str] = {}
        first_looks: dict[str, int] = {}
        for entry in reversed(self._entries_of(LOOKED)):
            for run, digest in entry.get('runs', {}).items():
                first_digests[run] = digest
                first_looks[run] = entry['look']

        altered = {}
        for run, first_digest in first_digests.items():
            if runs.get(run) != first_digest:
                altered[run] = first_looks[run]
        return altered

    @property
    def accepted(self) -> dict[str, str]:
        """The accepted problems: {code from ACCEPTABLE: why it was accepted}."""
        return {entry['code']: entry['why'] for entry in self._entries_of(ACCEPTED)}


def _retrospective_repeat(entry: Entry) -> Repeat:
    """Converts a ledger line with the event REPEATS to a `Repeat`."""
    lost_study = entry.get('lost')  # describes a repeated study that is not kept
    if lost_study is None:
        return Repeat(study=entry['study'], entry=entry['entry'], retrospective=True)
    return Repeat(
        study=entry['study'],
        entry=entry['entry'],
        retrospective=True,
        commit=lost_study['commit'],
        seeds=tuple(lost_study['seeds']),
        arms=frozenset(arm_key(arm) for arm in lost_study['arms']),
    )


def read(path: Path) -> Ledger:
    """Reads a ledger, and checks its hash chain.

    Raises:
        ReportError: There is no ledger, or the named line is damaged, edited or out of place.
    """
    entries: list[Entry] = []
    previous_hash = None
    for number, line in enumerate(_lines(path, keepends=True), start=1):
        try:
            entry = parse_json(line)
            check(entry, {'event': str, 'time': str, 'previous': str | None, 'hash': str})
        except ValueError as error:
            raise ReportError(f'{path}, line {number} is damaged ({error}); {ADVICE}') from error

        has_right_hash = entry['hash'] == digest_of_entry(entry)
        is_cut_off = not line.endswith(b'\n')
        if is_cut_off or not has_right_hash:
            raise ReportError(
                f'{path}, line {number} was edited: its hash does not match; {ADVICE}'
            )
        if entry['previous'] != previous_hash:
            raise ReportError(f'{path}, line {number} does not follow the line before; {ADVICE}')

        previous_hash = entry['hash']
        entries.append(entry)

    declares_study = bool(entries) and entries[0]['event'] == DECLARED
    if not declares_study:  # a missing file has no lines
        raise ReportError(f'{path} does not exist, or declares no study; {ADVICE}')
    return Ledger(tuple(entries))


def append(path: Path, event: str, **data: Any) -> None:
    """Appends a line with the fields `data` to a ledger, which is created if needed.

    Raises:
        ReportError: The ledger is damaged.
    """
    earlier_lines = b''
    previous_hash = None
    if path.exists():
        previous_hash = read(path).last
        earlier_lines = read_whole(path)
    entry = {
        'event': event,
        'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        **to_jsonable(data),
        'previous': previous_hash,
    }
    entry['hash'] = digest_of_entry(entry)
    line = json.dumps(entry).encode() + b'\n'
    write_atomic(path, earlier_lines + line)


def declare(
    directory: Path, declared: Mapping[str, Any], repeats: Mapping[str, str] | None = None
) -> None:
    """Records a new or changed declaration of a study in its ledger.

    If arms were added, records only these arms. The caller holds the study's lock.

    Args:
        directory: Directory of the study.
        declared: Content of study.json.
        repeats: For a study that repeats an earlier study, {'study': name of the earlier study,
            'entry': hash of the last line of its ledger}.
    """
    path = directory / NAME
    declaration = declaration_digest(declared)
    common_fields = {'declaration': declaration, 'family': _count_compared_arms(declared)}
    if path.exists():
        ledger = read(path)
        if ledger.declaration == declaration:  # nothing has changed
            return
        added_arms = [arm for arm in declared['arms'] if arm_key(arm) not in ledger.arms]
        if added_arms:
            # After a look at verdicts, the results may have led to these arms.
            has_looked = ledger.first_look is not None
            has_verdicts = declared['tuning'] is not None  # untuned arms get no verdicts
            is_post_hoc = has_looked and has_verdicts
            append(path, ARMS_ADDED, arms=added_arms, post_hoc=is_post_hoc, **common_fields)
            return

    fields = {name: declared[name] for name in ('arms', 'seeds', 'margin')}
    if repeats is not None:
        fields['repeats'] = repeats
    append(path, DECLARED, **common_fields, **fields, post_hoc=False)


def _count_compared_arms(declared: Mapping[str, Any]) -> int:
    """Counts the arms in study.json that are compared with the baseline."""
    num_compared = 0
    for arm in declared['arms']:
        is_control = arm['control'] is not None
        is_baseline = arm['variant'] == declared['baseline']
        if not is_control and not is_baseline:
            num_compared += 1
    return num_compared


def record_look(directory: Path, logs: Files | None = None) -> bool:
    """Records in the ledger that somebody looks at the results of a study.

    Call it before showing a report on more than screening. The ledger line has digests of the
    results, which reveal later changes.

    Args:
        directory: Directory of the study and its ledger.
        logs: Directory of the plan, results and logs, if it is not `directory`. A stored study has
            an archive of them.

    Returns:
        Whether the look was recorded. A look is not recorded if nothing has changed since the last
        look, or if a run has changed since the first look at this run.
    """
    path = directory / NAME
    if logs is None:
        logs = directory
    files = file_digests(logs)
    runs = run_digests(logs)

    # Check before locking, because locking creates a file, even in a copy of a study.
    ledger = read(path)
    is_unchanged = files == ledger.looked_files
    if is_unchanged or ledger.altered(runs):
        return False

    with locked(directory / 'lock'):
        ledger = read(path)
        # Another process may have recorded this look before the lock was taken.
        if files != ledger.looked_files:
            earlier_looks = [entry for entry in ledger.entries if entry['event'] == LOOKED]
            append(path, LOOKED, look=len(earlier_looks) + 1, files=files, runs=runs)
    return True


def accept(directory: Path, codes: Sequence[str], why: str) -> None:
    """Records in the ledger that problems of a study's runs are accepted.

    A study with such a problem has no verdicts until the problem is accepted.

    Args:
        directory: Directory of the study.
        codes: The problems: 'uncommitted' for runs of uncommitted code, 'commits' for runs of
            different commits.
        why: Why the problems do not affect the verdicts.

    Raises:
        ReportError: A code is unknown, `why` is blank, or there is no valid ledger.
    """
    for code in codes:
        if code not in ACCEPTABLE:
            raise ReportError(f'accept={code!r} must be {" or ".join(ACCEPTABLE)}')
    if not why.strip():
        raise ReportError(f'accept={",".join(codes)} needs a reason, why={why!r}')
    path = directory / NAME
    read(path)  # raises if there is no ledger, before locking creates the directory
    with locked(directory / 'lock'):
        for code in codes:
            if read(path).accepted.get(code) != why:
                append(path, ACCEPTED, code=code, why=why)


def arm_key(arm: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Returns the tuple (variant, size, corpus, control) of an arm in study.json."""
    return tuple(arm[name] for name in ARM_KEY)


def declaration_digest(declared: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of study.json's content without its command."""
    return _sha256({name: value for name, value in declared.items() if name != 'command'})


def digest_of_entry(entry: Entry) -> str:
    """Returns the SHA-256 of a line without its hash."""
    return _sha256({name: value for name, value in entry.items() if name != 'hash'})


def file_digests(directory: Files) -> dict[str, str | None]:
    """Returns {name: SHA-256} for the files that a study's report is made from.

    A missing file has the value None; a missing yardsticks.json has no entry. The entry 'logs'
    covers the logs of all planned runs without their training records.
    """
    digest_by_name: dict[str, str | None] = {}
    for name in ('study.json', 'plan.jsonl', 'results.jsonl'):
        digest_by_name[name] = _file_sha256(directory / name)
    yardsticks_digest = _file_sha256(directory / YARDSTICKS)
    if yardsticks_digest is not None:
        digest_by_name[YARDSTICKS] = yardsticks_digest
    log_hashes_by_directory = {logs.directory: logs.hashes for logs in _hash_logs(directory)}
    digest_by_name['logs'] = _sha256(log_hashes_by_directory)
    return digest_by_name


def run_digests(directory: Files) -> dict[str, str]:
    """Returns {run: SHA-256 of its results and logs} for each planned run that has results."""
    log_hashes_by_run = {logs.run: logs.hashes for logs in _hash_logs(directory)}
    digest_by_run = {}
    for run, results in _results_by_run(directory).items():
        if run in log_hashes_by_run:
            digest_by_run[run] = _sha256({'results': results, 'logs': log_hashes_by_run[run]})
    return digest_by_run


def _results_by_run(directory: Files) -> dict[str, list[dict[str, Any]]]:
    """Reads the distinct results of each run, without fields that differ in each repetition.

    Only metrics and the fields in _DIGESTED_FIELDS, such as 'status', are kept. Damaged lines of
    results.jsonl are skipped.
    """
    results_by_run: dict[str, list[dict[str, Any]]] = {}
    for line in _lines(directory / 'results.jsonl'):
        # All errors that a damaged line can raise.
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            result = parse_json(line)
            names = (*_DIGESTED_FIELDS, *metric_fields(result))
            digested_fields = {name: result[name] for name in names if name in result}
            results = results_by_run.setdefault(result['run'], [])
            if digested_fields not in results:
                results.append(digested_fields)
    return results_by_run


@dataclasses.dataclass(frozen=True)
class _Logs:
    """The log hashes of a planned run."""

    run: str | None  # name of the run
    directory: str  # directory of the run, 'runs/NAME'
    # [SHA-256 of documents.json, SHA-256 of metrics.jsonl without its training records]. The first
    # is None if documents.json does not exist.
    hashes: list[str | None]


def _hash_logs(directory: Files) -> Iterator[_Logs]:
    """Yields the log hashes of each run in a study's plan; damaged runs are skipped."""
    for line in _lines(directory / 'plan.jsonl'):
        # All errors that a damaged plan or log can raise.
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, OSError):
            planned = parse_json(line)
            run_directory = run_path(directory, planned['directory'])

            # A stored study may keep only the hash of documents.json.
            documents_sha256 = left_out_documents(run_directory)
            if not documents_sha256:
                documents_sha256 = _file_sha256(run_directory / 'documents.json')

            # A stored study does not keep training records.
            evaluations = hashlib.sha256()
            for record in _lines(run_directory / 'metrics.jsonl'):
                if not is_training(record):
                    evaluations.update(record)

            hashes = [documents_sha256, evaluations.hexdigest()]
            yield _Logs(run=planned.get('run'), directory=planned['directory'], hashes=hashes)


def left_out_documents(run: Files) -> str | None:
    """Returns the SHA-256 of a documents.json that a stored study does not keep, or None."""
    path = run / DOCUMENTS_SHA256
    return read_whole(path).decode().strip() if path.is_file() else None


def is_training(line: bytes) -> bool:
    """Whether a line of metrics.jsonl is a training record."""
    return b'"kind": "train"' in line


def _file_sha256(path: Readable) -> str | None:
    """Returns the SHA-256 of a file, or None if it does not exist."""
    return hashlib.sha256(read_whole(path)).hexdigest() if path.is_file() else None


def _lines(path: Readable, keepends: bool = False) -> list[bytes]:
    """Returns the lines of a file, or [] if it does not exist."""
    return read_whole(path).splitlines(keepends) if path.is_file() else []


def _sha256(values: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of the values' JSON text with sorted keys."""
    text = json.dumps(to_jsonable(values), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
