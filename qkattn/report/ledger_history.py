"""Checks with git that the ledgers of committed studies are append-only.

Every version of a ledger has to begin with the version before it. The hashes in a ledger do not
show this, because a rewrite can compute all of them again. A study may move to another directory
with the same name. A ledger that comes back has to begin with the removed version.

Accepted rewrites are listed with their reasons in rewritten_ledgers.toml beside the studies:

    [[rewritten]]
    ledger = "claims/cpu/NAME/ledger.jsonl"
    replaced = "..."      # `hash` of the last line of the version that was replaced
    why = "..."
"""

import dataclasses
import itertools
import json
import os
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from qkattn.errors import ReportError
from qkattn.report.prose import counted
from qkattn.storage import ledger

REASONS = 'rewritten_ledgers.toml'
# The keys of each entry of that file.
_ENTRY_KEYS = ('ledger', 'replaced', 'why')


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of a ledger by a commit."""

    commit: str
    path: str  # relative to the directory of the studies
    blob: str | None  # git hash of the new content; None if the commit removed the ledger


@dataclasses.dataclass(frozen=True)
class Version:
    """A version of a ledger."""

    place: str  # where the version is found: 'commit 3f2a...' or 'the working tree'
    content: bytes


def check_ledgers(results: Path) -> str:
    """Checks with git that the ledgers below a directory are append-only.

    Args:
        results: The directory of the studies.

    Returns:
        A sentence that says how many ledgers were compared, or why none could be.

    Raises:
        ReportError: A ledger was rewritten, and rewritten_ledgers.toml gives no reason.
    """
    obstacle = _obstacle(results)
    if obstacle is not None:
        return f'ledgers: not compared with earlier commits, as {obstacle}'

    accepted_rewrites = _accepted_rewrites(results / REASONS)
    ledger_files = sorted(results.glob(f'**/{ledger.NAME}'))
    paths = [file.relative_to(results).as_posix() for file in ledger_files]
    versions_by_path = _versions_by_path(results, paths)
    num_versions = 0
    num_rewritten = 0
    for path, versions in versions_by_path.items():
        num_versions += len(versions)
        for before, after in _rewrites(versions):
            # Accepted rewrites name the replaced version by the hash in its last line.
            replaced_hash = _last_hash(before.content)
            if (path, replaced_hash) not in accepted_rewrites:
                raise ReportError(
                    f'{results / path} was rewritten: in {after.place} it does not begin with what '
                    f'it was in {before.place}; restore it, or name it in {results / REASONS} with '
                    'the reason'
                )
            num_rewritten += 1
    versions_text = counted(num_versions, 'version')
    ledgers_text = counted(versions_by_path, 'ledger')
    return (
        f'ledgers: {versions_text} of {ledgers_text} compared with git, '
        f'{num_rewritten} rewritten for a stated reason'
    )


def _rewrites(versions: Iterable[Version]) -> Iterator[tuple[Version, Version]]:
    """Yields the versions (before, after) of each change that does more than append lines."""
    for before, after in itertools.pairwise(versions):
        is_appended = after.content.startswith(before.content)
        if not is_appended:
            yield before, after


def _git(directory: Path, *arguments: str, standard_input: str = '') -> bytes:
    """Runs a git command in a directory; returns its output.

    Raises:
        CalledProcessError: The command fails.
    """
    # By default, git escapes paths that are not ASCII.
    no_escapes = ('-c', 'core.quotePath=false')
    command = ['git', '-C', str(directory), *no_escapes, *arguments]
    # Without optional locks, other git commands may run at the same time.
    environment = {**os.environ, 'GIT_OPTIONAL_LOCKS': '0'}
    process = subprocess.run(
        command,
        check=True,
        capture_output=True,
        input=standard_input.encode(),
        env=environment,
        timeout=60,
    )
    return process.stdout


def _obstacle(results: Path) -> str | None:
    """Returns why git has no complete history; None if it has one."""
    try:
        is_shallow = _git(results, 'rev-parse', '--is-shallow-repository').strip() == b'true'
        _git(results, 'rev-parse', '--verify', 'HEAD')
    except (OSError, subprocess.SubprocessError):
        return f'{results} has no git history'
    if is_shallow:
        return 'the clone is shallow: git fetch --unshallow completes it'
    return None


def _accepted_rewrites(path: Path) -> set[tuple[str, str]]:
    """Reads rewritten_ledgers.toml, if it exists.

    Returns:
        Pairs of a ledger and the last hash of its replaced version, such as
        ('cpu/NAME/ledger.jsonl', '3f2a...').

    Raises:
        ReportError: The file is malformed.
    """
    if not path.is_file():
        return set()
    try:
        document = tomllib.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise ReportError(f'{path} cannot be read: {error}') from error

    rewrites = set()
    entries = document.get('rewritten', [])
    for entry_number, entry in enumerate(entries, start=1):
        has_all_keys = sorted(entry) == sorted(_ENTRY_KEYS)  # 'ledger', 'replaced' and 'why'
        is_valid = has_all_keys and all(str(value).strip() for value in entry.values())
        if not is_valid:
            keys = ', '.join(_ENTRY_KEYS)
            raise ReportError(f'{path}, entry {entry_number} must have {keys}, none empty')
        rewrites.add((entry['ledger'], entry['replaced']))
    return rewrites


def _last_hash(content: bytes) -> str | None:
    """Returns the hash in a ledger's last line; None if there is none."""
    try:
        last_line = content.splitlines()[-1]
        return json.loads(last_line)['hash']
    except (ValueError, LookupError, TypeError):
        return None


def _versions_by_path(results: Path, paths: Sequence[str]) -> dict[str, list[Version]]:
    """Returns the committed versions of each ledger, oldest first, and then the file itself.

    Ledgers that were never committed are left out.

    Args:
        results: The directory of the studies.
        paths: The ledgers, relative to `results`.
    """
    changes_by_path = _changes_by_path(results, paths)
    # One git process reads the contents of all versions.
    blobs = set[str]()
    for changes in changes_by_path.values():
        blobs.update(change.blob for change in changes)
    content_by_blob = _contents(results, sorted(blobs))

    versions_by_path = {}
    for path, changes in changes_by_path.items():
        if not changes:
            continue
        versions = []
        for change in changes:
            place = f'commit {change.commit[:12]}'
            versions.append(Version(place, content_by_blob[change.blob]))
        versions.append(Version('the working tree', (results / path).read_bytes()))
        versions_by_path[path] = versions
    return versions_by_path


def _changes_by_path(results: Path, paths: Sequence[str]) -> dict[str, list[Change]]:
    """Returns the committed changes of each ledger, oldest first, without removals.

    A study keeps its history when its directory moves, as from cpu/a/ledger.jsonl to
    gpu/a/ledger.jsonl.
    """
    changes_by_path: dict[str, list[Change]] = {}
    # The changes of ledgers that are removed and not yet back at another path.
    removed_by_study: dict[str, list[Change]] = {}
    for change in _changes(results):
        study = Path(change.path).parent.name  # 'a' for cpu/a/ledger.jsonl
        is_removal = change.blob is None
        if is_removal:
            removed_by_study[study] = changes_by_path.pop(change.path, [])
        elif change.path in changes_by_path:
            changes_by_path[change.path].append(change)
        else:
            earlier_changes = removed_by_study.pop(study, [])
            changes_by_path[change.path] = [*earlier_changes, change]

    changes_of_paths = {}
    for path in paths:
        changes = changes_by_path.get(path)
        if changes is None:
            # The study may have moved to this path after the last commit.
            study = Path(path).parent.name
            changes = removed_by_study.get(study, [])
        changes_of_paths[path] = changes
    return changes_of_paths


def _changes(results: Path) -> list[Change]:
    """Returns all committed changes of ledgers, oldest first.

    Within a commit, removals come first. A merge counts as one commit on its first parent.
    """
    changes = []
    commit = ''
    for line in _log_of_ledgers(results):
        if line.startswith('commit '):
            commit = line.removeprefix('commit ')
        elif line.startswith(':'):
            # ':100644 100644 <old blob> <new blob> M<tab>cpu/a/ledger.jsonl'
            modes_blobs_status, path = line.split('\t')
            _, _, _, new_blob, status = modes_blobs_status.split()
            is_removal = status == 'D'
            changes.append(Change(commit, path, blob=None if is_removal else new_blob))

    # A moved ledger has to be removed from its old path before it appears at the other.
    ordered_changes = list[Change]()
    for _, changes_of_commit in itertools.groupby(changes, key=lambda change: change.commit):
        # Sorting puts False before True, and keeps the order of changes that are alike.
        ordered_changes += sorted(changes_of_commit, key=lambda change: change.blob is not None)
    return ordered_changes


def _log_of_ledgers(results: Path) -> list[str]:
    """Returns the lines of git's log of all ledgers, oldest commit first.

    A line 'commit <hash>' is followed by a line for each ledger that the commit changes, such as
    ':100644 100644 <old blob> <new blob> M<tab>cpu/a/ledger.jsonl'.
    """
    order_of_commits = ('--reverse', '--first-parent', '-m')
    form_of_commits = ('--format=commit %H',)
    form_of_changes = ('--raw', '--no-abbrev', '--no-renames', '--relative')
    options = (*order_of_commits, *form_of_commits, *form_of_changes)
    all_ledgers = f':(glob)**/{ledger.NAME}'
    return _git(results, 'log', *options, '--', all_ledgers).decode().splitlines()


def _contents(results: Path, blobs: Sequence[str]) -> dict[str, bytes]:
    """Returns the content of each blob, read by one git process."""
    remaining = _git(results, 'cat-file', '--batch', standard_input='\n'.join(blobs))
    content_by_blob = {}
    for blob in blobs:
        # For each blob, git prints '<blob> blob <size>\n<content>\n'.
        header, _, remaining = remaining.partition(b'\n')
        size = int(header.split()[-1])
        content_by_blob[blob] = remaining[:size]
        remaining = remaining[size + 1 :]  # without the line break behind the content
    return content_by_blob
