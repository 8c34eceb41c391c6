"""A ledger that was rewritten is found in the history of its repository."""

import json
import shutil

import pytest

from qkattn.errors import ReportError
from qkattn.report.ledger_history import REASONS, check_ledgers
from tests.processes import ROOT, git

FIRST = {'event': 'first', 'hash': 'first'}
SECOND = {'event': 'second', 'hash': 'second'}
OTHER = {'event': 'other', 'hash': 'other'}
STUDY = 'claims/cpu/a'
REASON = f'''
[[rewritten]]
ledger = "{STUDY}/ledger.jsonl"
replaced = "second"
why = "Declared anew."
'''


def write_ledger(results, study, *entries):
    path = results / study / 'ledger.jsonl'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps(entry) + '\n' for entry in entries))


def commit_all(results):
    git(results, 'add', '-A')
    git(results, 'commit', '-m', 'A commit', '--allow-empty')


def commit_ledger(results, study, *entries):
    """Commits a ledger of these entries, together with what has changed in the directory."""
    write_ledger(results, study, *entries)
    commit_all(results)


def commit_removal(results, study):
    shutil.rmtree(results / study)
    commit_all(results)


@pytest.fixture
def results(tmp_path):
    """A directory of results in a git repository. Its last commit adds a line to STUDY's ledger."""
    directory = tmp_path / 'repository/results'
    directory.mkdir(parents=True)
    git(directory.parent, 'init')
    commit_ledger(directory, STUDY, FIRST)
    commit_ledger(directory, STUDY, FIRST, SECOND)
    return directory


def declare_anew(results):
    commit_ledger(results, STUDY, OTHER)


def remove_and_declare_anew(results):
    commit_removal(results, STUDY)
    commit_ledger(results, STUDY, OTHER)


def declare_anew_elsewhere(results):
    shutil.rmtree(results / STUDY)
    commit_ledger(results, 'a', OTHER)


def drop_last_line(results):
    commit_ledger(results, STUDY, FIRST)


def rewrite_without_commit(results):
    write_ledger(results, STUDY, OTHER)


def rewrite_in_a_merge(results):
    """Merges a branch on which the ledger of STUDY has another first line."""
    git(results, 'checkout', '-b', 'branch')
    commit_ledger(results, STUDY, OTHER)
    git(results, 'checkout', 'main')
    commit_ledger(results, 'b', FIRST)
    git(results, 'merge', 'branch')


@pytest.mark.parametrize(
    'rewrite',
    [
        declare_anew,
        remove_and_declare_anew,
        declare_anew_elsewhere,
        drop_last_line,
        rewrite_without_commit,
        rewrite_in_a_merge,
    ],
)
def test_a_ledger_that_was_rewritten_is_named(results, rewrite):
    rewrite(results)
    with pytest.raises(ReportError, match=r'a/ledger.jsonl was rewritten: in (commit|the working)'):
        check_ledgers(results)


def move(results):
    shutil.rmtree(results / STUDY)
    commit_ledger(results, 'a', FIRST, SECOND)


def remove_and_restore(results):
    commit_removal(results, STUDY)
    commit_ledger(results, STUDY, FIRST, SECOND, OTHER)


def grow_without_commit(results):
    write_ledger(results, STUDY, FIRST, SECOND, OTHER)


def add_a_second_scale(results):
    commit_ledger(results, 'claims/gpu/a', OTHER)


def add_without_commit(results):
    write_ledger(results, 'b', FIRST)


def remove(results):
    commit_removal(results, STUDY)


@pytest.mark.parametrize(
    'change',
    [move, remove_and_restore, grow_without_commit, add_a_second_scale, add_without_commit, remove],
)
def test_a_ledger_may_grow_move_or_be_removed(results, change):
    change(results)
    assert 'compared with git, 0 rewritten' in check_ledgers(results)


def test_a_rewrite_with_a_reason_is_counted(results):
    (results / REASONS).write_text(REASON)
    declare_anew(results)
    assert check_ledgers(results).endswith('1 rewritten for a stated reason')

    # A second rewrite has no reason.
    commit_ledger(results, STUDY, FIRST)
    with pytest.raises(ReportError, match='was rewritten'):
        check_ledgers(results)


@pytest.mark.parametrize(
    'text',
    [
        pytest.param('[[rewritten', id='no TOML'),
        pytest.param('[[rewritten]]\nledger = "a"', id='missing fields'),
        pytest.param(REASON.replace('"Declared anew."', '"""'), id='an open string'),
        pytest.param(REASON.replace('Declared anew.', ''), id='an empty reason'),
    ],
)
def test_a_bad_list_of_reasons_is_one_sentence(results, text):
    (results / REASONS).write_text(text)
    with pytest.raises(ReportError, match=REASONS) as raised:
        check_ledgers(results)
    assert '\n' not in str(raised.value)


def test_a_shallow_clone_is_reported(results, tmp_path):
    declare_anew(results)
    url = f'file://{results.parent}'
    git(tmp_path, 'clone', '--depth=1', url, 'shallow')
    assert 'the clone is shallow' in check_ledgers(tmp_path / 'shallow/results')


def test_a_missing_history_is_reported(results):
    declare_anew(results)
    shutil.rmtree(results.parent / '.git')
    assert 'has no git history' in check_ledgers(results)


def test_the_committed_ledgers_keep_what_earlier_commits_had():
    assert check_ledgers(ROOT / 'experiments/results').startswith('ledgers: ')
