"""Compares the ledgers of committed studies with those of earlier commits: a ledger only grows.

The hashes in a ledger show that a line was edited, but not that all lines were written again. Git
keeps the version of each commit. Every version of a ledger has to begin with the version before it.
A ledger may be removed, and come back at its path or in another directory of the same name. Then it
has to begin with the version that was removed.

There is one exception: a study may be declared anew under the name of an earlier one. The file
rewritten_ledgers.toml beside the studies lists such ledgers with the reasons:

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
from collections.abc import Sequence
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
    blob: str | None  # git's name of the content after the commit; None if it removed the ledger


@dataclasses.dataclass(frozen=True)
class Version:
    """A version of a ledger."""

    place: str  # the commit or directory that has it, in words
    content: bytes


def check_ledgers(results: Path) -> str:
    """Checks the ledgers below a directory of studies; returns a sentence about what was compared.

    Raises ReportError, with the ledger and the commit, if a ledger was rewritten and
    rewritten_ledgers.toml gives no reason. Without a whole git history nothing is compared. The
    sentence then says why.
    """
    obstacle = _obstacle(results)
    if obstacle is not None:
        return f'ledgers: not compared with earlier commits, as {obstacle}'

    accepted_rewrites = _accepted_rewrites(results / REASONS)
    ledger_files = sorted(results.glob(f'**/{ledger.NAME}'))
    paths = [file.relative_to(results).as_posix() for file in ledger_files]
    histories = _histories(results, paths)
    num_versions = 0
    num_rewritten = 0
    for path, versions in histories.items():
        num_versions += len(versions)
        for before, after in itertools.pairwise(versions):
            has_only_grown = after.content.startswith(before.content)
            if has_only_grown:
                continue
            rewrite = (path, _last_hash(before.content))
            if rewrite not in accepted_rewrites:
                raise ReportError(
                    f'{results / path} was rewritten: in {after.place} it does not begin with what '
                    f'it was in {before.place}; restore it, or name it in {results / REASONS} with '
                    'the reason'
                )
            num_rewritten += 1
    text = f'{counted(num_versions, "version")} of {counted(histories, "ledger")}'
    return f'ledgers: {text} compared with git, {num_rewritten} rewritten for a stated reason'


def _git(directory: Path, *arguments: str, standard_input: str = '') -> bytes:
    """Returns the output of a git command in a directory.

    The command takes no optional locks, so another git command may run at the same time. Raises
    CalledProcessError if it fails.
    """
    command = ['git', '-C', str(directory), '-c', 'core.quotePath=false', *arguments]
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
    """Returns why ledgers cannot be compared with git; None if they can."""
    try:
        is_shallow = _git(results, 'rev-parse', '--is-shallow-repository').strip() == b'true'
        _git(results, 'rev-parse', '--verify', 'HEAD')
    except (OSError, subprocess.SubprocessError):
        return f'{results} has no git history'
    if is_shallow:
        return 'the clone is shallow: git fetch --unshallow completes it'
    return None


def _accepted_rewrites(path: Path) -> set[tuple[str, str]]:
    """Returns the ledger rewrites that rewritten_ledgers.toml accepts.

    Without a rewrite, a ledger only grows.

    Returns:
      Pairs such as ('cpu/NAME/ledger.jsonl', '3f2a...'): the path of a ledger, and the last hash of
      the replaced version. Empty if the file does not exist.

    Raises:
      ReportError: the file is malformed.
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
        has_all_keys = sorted(entry) == sorted(_ENTRY_KEYS)
        is_complete = has_all_keys and all(str(value).strip() for value in entry.values())
        if not is_complete:
            keys = ', '.join(_ENTRY_KEYS)
            raise ReportError(f'{path}, entry {entry_number} must have {keys}, none empty')
        rewrites.add((entry['ledger'], entry['replaced']))
    return rewrites


def _last_hash(content: bytes) -> str | None:
    """Returns the hash of the last line of a ledger; None if it has none."""
    try:
        return json.loads(content.splitlines()[-1])['hash']
    except (ValueError, LookupError, TypeError):
        return None


def _histories(results: Path, paths: Sequence[str]) -> dict[str, list[Version]]:
    """Returns the versions of each ledger by its path, the oldest first.

    The last version is the file itself. Ledgers that were never committed are left out. `paths` are
    relative to `results`.
    """
    changes_by_path = _changes_by_path(results, paths)
    # Read the contents of all commits at once.
    blobs = set[str]()
    for changes in changes_by_path.values():
        blobs.update(change.blob for change in changes)
    content_by_blob = _contents(results, sorted(blobs))

    histories = {}
    for path, changes in changes_by_path.items():
        if not changes:
            continue
        versions = []
        for change in changes:
            place = f'commit {change.commit[:12]}'
            versions.append(Version(place, content_by_blob[change.blob]))
        versions.append(Version('the working tree', (results / path).read_bytes()))
        histories[path] = versions
    return histories


def _changes_by_path(results: Path, paths: Sequence[str]) -> dict[str, list[Change]]:
    """Returns the changes of each ledger by its path, the oldest first, without removals.

    A study keeps its history when its directory moves. For example, cpu/a/ledger.jsonl is removed
    and gpu/a/ledger.jsonl appears. Both are ledgers of the study `a`, so the result for the second
    path has the changes of both.
    """
    changes_by_path: dict[str, list[Change]] = {}
    # The changes of removed ledgers, by study, until the study has a ledger again.
    removed_by_study: dict[str, list[Change]] = {}
    for change in _changes(results):
        study = Path(change.path).parent.name
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
            # No commit has a ledger at this path. The study may have moved here since the last one.
            study = Path(path).parent.name
            changes = removed_by_study.get(study, [])
        changes_of_paths[path] = changes
    return changes_of_paths


def _changes(results: Path) -> list[Change]:
    """Returns every change of a ledger by a commit, the oldest first.

    Within a commit, removals come first, so that a moved ledger is removed before it appears. A
    merge counts as one commit, with all that it brings into the branch of its first parent.
    """
    order = ('--reverse', '--first-parent', '-m')
    form = ('--raw', '--no-abbrev', '--no-renames', '--relative', '--format=commit %H')
    output = _git(results, 'log', *order, *form, '--', f':(glob)**/{ledger.NAME}')
    commit = ''
    changes = []
    for line in output.decode().splitlines():
        if line.startswith('commit '):
            commit = line.removeprefix('commit ')
        elif line.startswith(':'):
            # ':100644 100644 <blob before> <blob after> M<tab>claims/cpu/a/ledger.jsonl'
            description, path = line.split('\t')
            _, _, _, blob_after, status = description.split()
            is_removal = status == 'D'
            changes.append(Change(commit, path, None if is_removal else blob_after))

    ordered_changes = list[Change]()
    for _, changes_of_commit in itertools.groupby(changes, key=lambda change: change.commit):
        # False, which stands for a removal, sorts before True.
        ordered_changes += sorted(changes_of_commit, key=lambda change: change.blob is not None)
    return ordered_changes


def _contents(results: Path, blobs: Sequence[str]) -> dict[str, bytes]:
    """Returns the content of each blob. One git process reads them all."""
    output = _git(results, 'cat-file', '--batch', standard_input='\n'.join(blobs))
    content_by_blob = {}
    for blob in blobs:
        # The answer to a blob is a line '<blob> blob <size>', the content, and a newline.
        header, _, output = output.partition(b'\n')
        size = int(header.split()[-1])
        content_by_blob[blob] = output[:size]
        output = output[size + 1 :]
    return content_by_blob
