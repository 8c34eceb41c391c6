"""A ledger that was rewritten is found in the history of its repository."""

import json
import shutil

import pytest

from qkattn.errors import ReportError
from qkattn.report.ledger_history import REASONS, check_ledgers
from tests.processes import ROOT, git

FIRST, SECOND, OTHER = ({'event': name, 'hash': name} for name in ('first', 'second', 'other'))
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


def commit(results, *ledgers, removed=()):
    """A commit of ledgers, each a study and its entries, without the studies `removed`."""
    for study in removed:
        shutil.rmtree(results / study)
    for ledger in ledgers:
        write_ledger(results, *ledger)
    git(results, 'add', '-A')
    git(results, 'commit', '-m', 'A commit', '--allow-empty')


@pytest.fixture
def results(tmp_path):
    """Studies whose ledger has grown by a line."""
    directory = tmp_path / 'repository/results'
    directory.mkdir(parents=True)
    git(directory.parent, 'init')
    commit(directory, (STUDY, FIRST))
    commit(directory, (STUDY, FIRST, SECOND))
    return directory


def declare_anew(results):
    commit(results, (STUDY, OTHER))


def remove_and_declare_anew(results):
    commit(results, removed=[STUDY])
    commit(results, (STUDY, OTHER))


def declare_anew_elsewhere(results):
    commit(results, ('a', OTHER), removed=[STUDY])


def drop_last_line(results):
    commit(results, (STUDY, FIRST))


def rewrite_without_commit(results):
    write_ledger(results, STUDY, OTHER)


def rewrite_in_a_merge(results):
    """Merges a branch on which the ledger of the study begins otherwise."""
    git(results, 'checkout', '-b', 'branch')
    commit(results, (STUDY, OTHER))
    git(results, 'checkout', 'main')
    commit(results, ('b', FIRST))
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
    commit(results, ('a', FIRST, SECOND), removed=[STUDY])


def remove_and_restore(results):
    commit(results, removed=[STUDY])
    commit(results, (STUDY, FIRST, SECOND, OTHER))


def grow_without_commit(results):
    write_ledger(results, STUDY, FIRST, SECOND, OTHER)


def add_a_second_scale(results):
    commit(results, ('claims/gpu/a', OTHER))


def add_without_commit(results):
    write_ledger(results, 'b', FIRST)


def remove(results):
    commit(results, removed=[STUDY])


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
    commit(results, (STUDY, FIRST))  # another one
    with pytest.raises(ReportError, match='was rewritten'):
        check_ledgers(results)


@pytest.mark.parametrize(
    'text', ['[[rewritten', '[[rewritten]]\nledger = "a"', REASON[:-16] + '""']
)
def test_a_bad_list_of_reasons_is_one_sentence(results, text):
    (results / REASONS).write_text(text)
    with pytest.raises(ReportError, match=REASONS) as raised:
        check_ledgers(results)
    assert '\n' not in str(raised.value)


def test_a_shallow_clone_and_a_missing_history_are_reported(results, tmp_path):
    declare_anew(results)
    url = f'file://{results.parent}'
    git(tmp_path, 'clone', '--depth=1', url, 'shallow')
    assert 'the clone is shallow' in check_ledgers(tmp_path / 'shallow/results')
    shutil.rmtree(results.parent / '.git')
    assert 'has no git history' in check_ledgers(results)


def test_the_committed_ledgers_keep_what_earlier_commits_had():
    assert check_ledgers(ROOT / 'experiments/results').startswith('ledgers: ')
