"""Compares the ledgers of committed studies with those of earlier commits: a ledger only grows.

The hashes in a ledger show that a line was edited, not that all of them were written again. Git
keeps what each commit had: of a ledger, every version has to begin with the one before it. A ledger
that was removed and comes back, at its place or in another directory of the same name, goes on from
the version that was removed.

A study that was declared anew under the name of an earlier one is named, with the reason, in
rewritten_ledgers.toml beside the studies:

    [[rewritten]]
    ledger = "claims/cpu/NAME/ledger.jsonl"
    replaced = "..."      # `hash` of the last line of the version that was replaced
    why = "..."
"""

import dataclasses
import json
import os
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from qkattn.errors import ReportError
from qkattn.report.prose import counted
from qkattn.storage import ledger

REASONS = 'rewritten_ledgers.toml'
# The keys of each entry there.
_REASON = ('ledger', 'replaced', 'why')
_WORKING_TREE = 'the working tree'


@dataclasses.dataclass(frozen=True)
class Change:
    """A ledger after a commit; `blob` is None where the commit removed it."""

    commit: str
    path: str  # relative to the directory of the studies
    blob: str | None


@dataclasses.dataclass(frozen=True)
class Version:
    """The content of a ledger, and the commit or place that has it."""

    place: str
    content: bytes


def check_ledgers(results: Path) -> str:
    """Checks the ledgers below a directory of studies; returns a sentence about what was compared.

    ReportError names a ledger that was rewritten without a reason in rewritten_ledgers.toml, and
    the commit. Without a whole git history nothing is compared, which the sentence says.
    """
    obstacle = _obstacle(results)
    if obstacle is not None:
        return f'ledgers: not compared with earlier commits, as {obstacle}'
    reasons = _reasons(results / REASONS)
    ledgers = sorted(results.glob(f'**/{ledger.NAME}'))
    histories = _histories(results, [path.relative_to(results).as_posix() for path in ledgers])
    num_versions = 0
    num_rewritten = 0
    for path, versions in histories.items():
        num_versions += len(versions)
        for before, after in pairwise(versions):
            if after.content.startswith(before.content):
                continue
            if (path, _last_hash(before.content)) not in reasons:
                raise ReportError(
                    f'{results / path} was rewritten: in {after.place} it does not begin with what '
                    f'it was in {before.place}; restore it, or name it in {results / REASONS} with '
                    'the reason'
                )
            num_rewritten += 1
    text = f'{counted(num_versions, "version")} of {counted(histories, "ledger")}'
    return f'ledgers: {text} compared with git, {num_rewritten} rewritten for a stated reason'


def _git(directory: Path, *arguments: str, given: str = '') -> bytes:
    """The output of a git command in a directory, with `given` on its standard input.

    CalledProcessError if it fails. It takes no lock, so that it works beside another git command.
    """
    command = ['git', '-C', str(directory), '-c', 'core.quotePath=false', *arguments]
    environment = {**os.environ, 'GIT_OPTIONAL_LOCKS': '0'}
    finished = subprocess.run(
        command, check=True, capture_output=True, input=given.encode(), env=environment, timeout=60
    )
    return finished.stdout


def _obstacle(results: Path) -> str | None:
    """Why ledgers cannot be compared with git; None if they can."""
    try:
        shallow = _git(results, 'rev-parse', '--is-shallow-repository').strip() == b'true'
        _git(results, 'rev-parse', '--verify', 'HEAD')
    except (OSError, subprocess.SubprocessError):
        return f'{results} has no git history'
    if shallow:
        return 'the clone is shallow: git fetch --unshallow completes it'
    return None


def _reasons(path: Path) -> set[tuple[str, str]]:
    """The ledgers that may be rewritten, and the last hash of the version that was replaced."""
    if not path.is_file():
        return set()
    try:
        entries = tomllib.loads(path.read_text(encoding='utf-8')).get('rewritten', [])
    except (OSError, ValueError) as error:
        raise ReportError(f'{path} cannot be read: {error}') from error
    for number, entry in enumerate(entries, start=1):
        is_complete = sorted(entry) == sorted(_REASON)
        if not is_complete or not all(str(value).strip() for value in entry.values()):
            raise ReportError(f'{path}, entry {number} must have {", ".join(_REASON)}, none empty')
    return {(entry['ledger'], entry['replaced']) for entry in entries}


def _last_hash(content: bytes) -> str | None:
    """The hash of the last line of a ledger; None where it has none."""
    try:
        return json.loads(content.splitlines()[-1])['hash']
    except (ValueError, LookupError, TypeError):
        return None


def _histories(results: Path, ledgers: Sequence[str]) -> dict[str, list[Version]]:
    """The versions of each committed ledger by its path, the oldest first, the file itself last.

    A ledger that appears goes on from the last one that was removed from a directory of its name.
    """
    changes_by_path: dict[str, list[Change]] = {}
    removed_by_study: dict[str, list[Change]] = {}
    for change in _changes(results):
        study = Path(change.path).parent.name
        if change.blob is None:
            removed_by_study[study] = changes_by_path.pop(change.path, [])
        elif change.path in changes_by_path:
            changes_by_path[change.path].append(change)
        else:
            earlier = removed_by_study.pop(study, [])
            changes_by_path[change.path] = [*earlier, change]

    committed: dict[str, list[Change]] = {}
    for path in ledgers:
        moved_and_not_committed = removed_by_study.get(Path(path).parent.name, [])
        committed[path] = changes_by_path.get(path) or moved_and_not_committed
    blobs = _blobs(results, (change.blob for changes in committed.values() for change in changes))
    histories = {}
    for path, changes in committed.items():
        versions = [
            Version(f'commit {change.commit[:12]}', blobs[change.blob])
            for change in changes
            if change.blob
        ]
        if versions:
            file = Version(_WORKING_TREE, (results / path).read_bytes())
            histories[path] = [*versions, file]
    return histories


def _changes(results: Path) -> Iterator[Change]:
    """Every change of a ledger, the oldest first; within a commit, what it removed first.

    Of a merge, those from its first parent: the history of the branch that it was merged into.
    """
    order = ('--reverse', '--first-parent', '-m')
    form = ('--raw', '--no-abbrev', '--no-renames', '--relative', '--format=commit %H')
    output = _git(results, 'log', *order, *form, '--', f':(glob)**/{ledger.NAME}')
    commit = ''
    of_commit = list[Change]()
    for line in output.decode().splitlines():
        if line.startswith('commit '):
            yield from sorted(of_commit, key=lambda change: change.blob is not None)
            commit = line.removeprefix('commit ')
            of_commit = []
        elif line.startswith(':'):
            # ':100644 100644 <blob before> <blob after> M<tab>claims/cpu/a/ledger.jsonl'
            description, path = line.split('\t')
            _, _, _, blob, status = description.split()
            of_commit.append(Change(commit, path, None if status == 'D' else blob))
    yield from sorted(of_commit, key=lambda change: change.blob is not None)


def _blobs(results: Path, names: Iterable[str | None]) -> dict[str, bytes]:
    """The content of blobs by name, all from one process."""
    wanted = sorted({name for name in names if name})
    output = _git(results, 'cat-file', '--batch', given='\n'.join(wanted))
    contents = {}
    for name in wanted:
        # The answer to a name is a line '<name> blob <size>', the content, and a newline.
        header, _, output = output.partition(b'\n')
        size = int(header.split()[-1])
        contents[name] = output[:size]
        output = output[size + 1 :]
    return contents
