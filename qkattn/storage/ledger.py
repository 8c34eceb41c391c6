"""The ledger of a study: what was declared, added, looked at and accepted, and when.

ledger.jsonl has a line {event, time, ..., previous, hash} per event. `hash` is the SHA-256 of the
line's other fields, and `previous` is the hash of the line before. So a line that was edited, moved
or removed breaks the chain; if the last line is missing, the files that it describes show it. The
ledger protects from mistakes, not from fraud. The events and their fields:

    declared     A study is declared, or a field that may change has changed, such as the question.
                 declaration (SHA-256 of study.json without its command), family, arms, seeds,
                 margin, post_hoc (false). If the study repeats another one: repeats ({study,
                 entry}), the other study's name and the hash of the last line of its ledger.
    repeats      A repeat is declared after results are known. study and entry as above,
                 retrospective (true), why. If the other study is not kept: lost, its commit, seeds
                 and arms.
    arms_added   Arms are added. arms, family, declaration, post_hoc (whether a look came before
                 and the study has verdicts).
    looked       A report on more than screening is made. look (1, 2, ...), files
                 (`file_digests`), runs (`run_digests`).
    accepted     A reason to withhold every verdict is accepted. code (which reason), why.

An arm is {variant, size, corpus, control}. The family is the number of arms that are compared with
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
# The events of entries.
DECLARED = 'declared'
ARMS_ADDED = 'arms_added'
LOOKED = 'looked'
ACCEPTED = 'accepted'
REPEATS = 'repeats'
# Reasons to withhold every verdict of a study that a person may accept: its runs had uncommitted
# changes, or are of different commits.
ACCEPTABLE = ('uncommitted', 'commits')
YARDSTICKS = 'yardsticks.json'
# Holds the SHA-256 of a documents.json that a stored study leaves out of a run.
DOCUMENTS_SHA256 = 'documents.sha256'
# The fields of a result that a look records besides its metrics. Times are left out, since they
# differ when a run is repeated.
_SEEN = ('trial', 'status', 'diverged_at', 'num_steps', OUTSIDE)

Entry = Mapping[str, Any]
ArmKeys = frozenset[tuple[str | None, ...]]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A study's declaration that it repeats another study."""

    study: str  # the name of the repeated study's directory
    entry: str  # hash of the last line of the repeated study's ledger at that time
    retrospective: bool = False  # whether results were known when the repeat was declared
    # If the repeated study is not kept: the commit that had it, the seeds of its verdicts, and its
    # arms.
    commit: str | None = None
    seeds: tuple[int, ...] = ()
    arms: ArmKeys = frozenset()

    @property
    def is_lost(self) -> bool:
        """Whether the repeated study is not kept."""
        return self.commit is not None


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The lines of a ledger that `read` has checked; the first line declares the study."""

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
        """The arms that were added after the first look.

        Empty for a study without tuning, which has no verdicts that a look could bias.
        """
        keys: set[tuple[str | None, ...]] = set()
        for entry in self.entries:
            if entry.get('post_hoc'):
                keys.update(arm_key(arm) for arm in entry['arms'])
        return frozenset(keys)

    @functools.cached_property
    def repeats(self) -> tuple[Repeat, ...]:
        """The studies that this study repeats, in the order of their entries."""
        declared: dict[str, Repeat] = {}
        for entry in self._entries_of(DECLARED):
            if 'repeats' in entry:
                repeated = entry['repeats']
                # A later declaration of the same study replaces an earlier one.
                declared[repeated['study']] = Repeat(repeated['study'], repeated['entry'])
        retrospective = [_retrospective_repeat(line) for line in self._entries_of(REPEATS)]
        return (*declared.values(), *retrospective)

    def _entries_of(self, event: str) -> list[Entry]:
        return [entry for entry in self.entries if entry['event'] == event]

    @property
    def last(self) -> str:
        """Hash of the last line."""
        return self.entries[-1]['hash']

    @property
    def declaration(self) -> str:
        """Hash of the study as it was declared last."""
        declarations = [entry['declaration'] for entry in self.entries if 'declaration' in entry]
        return declarations[-1]

    @property
    def first_look(self) -> str | None:
        """Time of the first look; None before it."""
        looks = self._entries_of(LOOKED)
        return looks[0]['time'] if looks else None

    @property
    def looked_files(self) -> dict[str, str | None]:
        """`file_digests` at the last look; empty before the first."""
        looks = self._entries_of(LOOKED)
        return looks[-1]['files'] if looks else {}

    def altered(self, runs: Mapping[str, str]) -> dict[str, int]:
        """Finds the runs that have changed, or are gone, since the first look at them.

        Args:
          runs: the digest of every run as it is on disk, from `run_digests`.

        Returns {run: number (1, 2, ...) of the first look at it} for these runs.
        """
        # For each run, its digest at the first look at it, and the number of this look. The looks
        # are read from the last to the first, so that earlier looks overwrite later ones.
        first_digests: dict[str, str] = {}
        first_looks: dict[str, int] = {}
        for entry in reversed(self._entries_of(LOOKED)):
            for run, run_digest in entry.get('runs', {}).items():
                first_digests[run] = run_digest
                first_looks[run] = entry['look']

        altered = {}
        for run, first_digest in first_digests.items():
            if runs.get(run) != first_digest:
                altered[run] = first_looks[run]
        return altered

    @property
    def accepted(self) -> dict[str, str]:
        """{code: why it was accepted}; the codes are those of ACCEPTABLE."""
        return {entry['code']: entry['why'] for entry in self._entries_of(ACCEPTED)}


def _retrospective_repeat(line: Entry) -> Repeat:
    """Reads a line of the event REPEATS: this study turned out to repeat an earlier study.

    Its field `study` names the earlier study, and `entry` is the hash of the last line of that
    study's ledger. If the earlier study is not kept, the line describes it in the field `lost`.
    """
    lost_study = line.get('lost')
    if lost_study is None:
        return Repeat(study=line['study'], entry=line['entry'], retrospective=True)
    return Repeat(
        study=line['study'],
        entry=line['entry'],
        retrospective=True,
        commit=lost_study['commit'],
        seeds=tuple(lost_study['seeds']),
        arms=frozenset(arm_key(arm) for arm in lost_study['arms']),
    )


def read(path: Path) -> Ledger:
    """Reads a ledger, and checks that no line is missing, damaged, edited or out of place.

    Raises ReportError, which names the first line that fails.
    """
    entries: list[Entry] = []
    previous_hash = None
    for number, line in enumerate(_lines(path, keepends=True), start=1):
        try:
            entry = parse_json(line)
            check(entry, {'event': str, 'time': str, 'previous': str | None, 'hash': str})
        except ValueError as error:
            raise ReportError(f'{path}, line {number} is damaged ({error}); {ADVICE}') from error

        is_unchanged = entry['hash'] == digest_of_entry(entry)
        is_whole = line.endswith(b'\n')
        if not (is_unchanged and is_whole):
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
    """Appends a line with the fields `data`, and creates the ledger if there is none.

    Raises ReportError as `read` does.
    """
    lines = b''
    previous_hash = None
    if path.exists():
        ledger = read(path)  # raises if a line is damaged
        previous_hash = ledger.last
        lines = read_whole(path)
    entry = {
        'event': event,
        'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
        **to_jsonable(data),
        'previous': previous_hash,
    }
    entry['hash'] = digest_of_entry(entry)
    line = json.dumps(entry).encode() + b'\n'
    write_atomic(path, lines + line)


def declare(
    directory: Path, declared: Mapping[str, Any], repeats: Mapping[str, str] | None = None
) -> None:
    """Enters into the ledger what a study compares; called each time that the study starts.

    The first start declares the study. A later start enters only the arms that were added since,
    such as 'qk/no_o'. It declares the study again if no arm was added but another field has
    changed, and enters nothing if nothing has changed. The caller holds the study's lock.

    Args:
      directory: the study's directory.
      declared: the content of study.json.
      repeats: if the study asks an earlier study's question again, {'study': the name of the
        earlier one, 'entry': the hash of the last line of its ledger}.
    """
    path = directory / NAME
    common_fields = {'declaration': declaration_digest(declared), 'family': _family(declared)}
    if path.exists():
        ledger = read(path)
        if ledger.declaration == declaration_digest(declared):
            return
        added_arms = [arm for arm in declared['arms'] if arm_key(arm) not in ledger.arms]
        if added_arms:
            # Once somebody has looked at verdicts, the results may have led to these arms.
            has_looked = ledger.first_look is not None
            has_verdicts = declared['tuning'] is not None
            is_post_hoc = has_looked and has_verdicts
            append(path, ARMS_ADDED, arms=added_arms, post_hoc=is_post_hoc, **common_fields)
            return

    # The first start, or something else than an added arm has changed.
    fields = {name: declared[name] for name in ('arms', 'seeds', 'margin')}
    if repeats is not None:
        fields['repeats'] = repeats
    append(path, DECLARED, **common_fields, **fields, post_hoc=False)


def _family(declared: Mapping[str, Any]) -> int:
    """Returns the number of arms in study.json that are compared with the baseline."""
    family = 0
    for arm in declared['arms']:
        is_control = arm['control'] is not None
        is_baseline = arm['variant'] == declared['baseline']
        if not is_control and not is_baseline:
            family += 1
    return family


def record_look(directory: Path, logs: Files | None = None) -> bool:
    """Enters a look into the ledger: that somebody reads a report on the results of a study.

    Reports on screening do not count. Call this before the report is made. The entry has digests of
    the files that the report is made from, so that later changes are noticed.

    Args:
      directory: the study's directory, which has the ledger.
      logs: the directory with the plan, results and logs; by default `directory`. A stored study
        keeps its logs in an archive.

    Returns False, and enters nothing, if the files are those of the last look, or if a run has
    changed since the first look at it. Returns True otherwise.
    """
    path = directory / NAME
    if logs is None:
        logs = directory
    files = file_digests(logs)
    runs = run_digests(logs)

    # Return before locking if there is nothing to enter. Locking creates a file, and a directory
    # with a mere copy of a study should stay as it is.
    ledger = read(path)
    if files == ledger.looked_files:
        return False
    if ledger.altered(runs):
        return False

    with locked(directory / 'lock'):
        # Another process may have entered the same look before this one got the lock.
        ledger = read(path)
        if files != ledger.looked_files:
            earlier_looks = [entry for entry in ledger.entries if entry['event'] == LOOKED]
            append(path, LOOKED, look=len(earlier_looks) + 1, files=files, runs=runs)
    return True


def accept(directory: Path, codes: Sequence[str], why: str) -> None:
    """Enters into the ledger that a person accepts a problem of a study's runs.

    Without that, the study gets no verdicts. Each code is entered once with the same `why`.

    Args:
      directory: the study's directory.
      codes: the problems, such as 'uncommitted' for runs of code with uncommitted changes.
      why: why the problems do not matter for the verdicts.

    Raises ReportError, and enters nothing, if a code is not among ACCEPTABLE or if `why` is blank.
    """
    for code in codes:
        if code not in ACCEPTABLE:
            raise ReportError(f'accept={code!r} must be {" or ".join(ACCEPTABLE)}')
    if not why.strip():
        raise ReportError(f'accept={",".join(codes)} needs a reason, why={why!r}')
    path = directory / NAME
    read(path)  # raises if there is no ledger, before the lock creates its directory
    with locked(directory / 'lock'):
        for code in codes:
            if read(path).accepted.get(code) != why:
                append(path, ACCEPTED, code=code, why=why)


def arm_key(arm: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Returns (variant, size, corpus, control) of an arm of study.json."""
    return tuple(arm[name] for name in ARM_KEY)


def declaration_digest(declared: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of the content of study.json without its command."""
    return _sha256({name: value for name, value in declared.items() if name != 'command'})


def digest_of_entry(entry: Entry) -> str:
    """Returns the SHA-256 of a line without its hash."""
    return _sha256({name: value for name, value in entry.items() if name != 'hash'})


def file_digests(directory: Files) -> dict[str, str | None]:
    """Returns {name: SHA-256} for the files of a study that a report is made from.

    The value is None if a file is missing. The entry 'logs' covers the logs of all planned runs,
    without their training records. A study without yardsticks has no entry for them.
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
    """Returns {run: SHA-256 of its results and logs} for each planned run that has results.

    The ledger stores these digests when somebody looks at the results. Later, `Ledger.altered`
    compares them with the digests at that time, to find runs that have changed.
    """
    log_hashes_by_run = {logs.run: logs.hashes for logs in _hash_logs(directory)}
    digest_by_run = {}
    for run, results in _results_by_run(directory).items():
        if run in log_hashes_by_run:
            digest_by_run[run] = _sha256({'results': results, 'logs': log_hashes_by_run[run]})
    return digest_by_run


def _results_by_run(directory: Files) -> dict[str, list[dict[str, Any]]]:
    """Reads the results of each run, with those fields only that a later change should not alter.

    These are the metrics and the fields _SEEN; times, for example, may change. A line of
    results.jsonl that cannot be read is skipped: the report has a sentence about it. A line that
    repeats another one adds nothing.
    """
    results_by_run: dict[str, list[dict[str, Any]]] = {}
    for line in _lines(directory / 'results.jsonl'):
        # These are the errors of a line that is damaged in any way.
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            result = parse_json(line)
            fields = (*_SEEN, *metric_fields(result))
            seen_fields = {name: result[name] for name in fields if name in result}
            results = results_by_run.setdefault(result['run'], [])
            if seen_fields not in results:
                results.append(seen_fields)
    return results_by_run


@dataclasses.dataclass(frozen=True)
class _Logs:
    """The hashes of the logs of a planned run."""

    run: str | None  # the name of the run
    directory: str  # 'runs/NAME', inside the study
    # The SHA-256 of documents.json, or None if it is missing. Then the SHA-256 of the evaluations:
    # all lines of metrics.jsonl but the training records.
    hashes: list[str | None]


def _hash_logs(directory: Files) -> Iterator[_Logs]:
    """Yields the hashes of two files of each run in a study's plan: documents.json and its log.

    A run that cannot be read is skipped: the report has a sentence about it.
    """
    for line in _lines(directory / 'plan.jsonl'):
        # These are the errors of a plan or a log that is damaged in any way.
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, OSError):
            planned = parse_json(line)
            run_directory = run_path(directory, planned['directory'])

            # A stored study may keep only the hash of documents.json.
            documents_sha256 = left_out_documents(run_directory)
            if not documents_sha256:
                documents_sha256 = _file_sha256(run_directory / 'documents.json')

            # Training records are left out, because a stored study does not keep them.
            evaluations = hashlib.sha256()
            for record in _lines(run_directory / 'metrics.jsonl'):
                if not is_training(record):
                    evaluations.update(record)

            hashes = [documents_sha256, evaluations.hexdigest()]
            yield _Logs(planned.get('run'), planned['directory'], hashes)


def left_out_documents(run: Files) -> str | None:
    """Returns the SHA-256 of a documents.json that a stored study leaves out of a run.

    None if the run has no such note.
    """
    path = run / DOCUMENTS_SHA256
    return read_whole(path).decode().strip() if path.is_file() else None


def is_training(line: bytes) -> bool:
    """Whether a line of metrics.jsonl is a training record, which exports and digests skip."""
    return b'"kind": "train"' in line


def _file_sha256(path: Readable) -> str | None:
    """Returns the SHA-256 of a file, or None if it does not exist."""
    return hashlib.sha256(read_whole(path)).hexdigest() if path.is_file() else None


def _lines(path: Readable, keepends: bool = False) -> list[bytes]:
    """Returns the lines of a file, or [] if it does not exist."""
    return read_whole(path).splitlines(keepends) if path.is_file() else []


def _sha256(values: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of values as JSON with sorted keys."""
    text = json.dumps(to_jsonable(values), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
