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


def write(results, study, *entries):
    path = results / study / 'ledger.jsonl'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps(entry) + '\n' for entry in entries))


def commit(results, *ledgers, removed=()):
    """A commit of ledgers, each a study and its entries, without the studies `removed`."""
    for study in removed:
        shutil.rmtree(results / study)
    for ledger in ledgers:
        write(results, *ledger)
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


def declared_anew(results):
    commit(results, (STUDY, OTHER))


def removed_and_declared_anew(results):
    commit(results, removed=[STUDY])
    commit(results, (STUDY, OTHER))


def declared_anew_elsewhere(results):
    commit(results, ('a', OTHER), removed=[STUDY])


def lost_its_last_line(results):
    commit(results, (STUDY, FIRST))


def rewritten_and_not_committed(results):
    write(results, STUDY, OTHER)


def rewritten_in_a_merge(results):
    git(results, 'checkout', '-b', 'branch')
    commit(results, (STUDY, OTHER))
    git(results, 'checkout', 'main')
    commit(results, ('b', FIRST))
    git(results, 'merge', 'branch')


@pytest.mark.parametrize(
    'rewrite',
    [
        declared_anew,
        removed_and_declared_anew,
        declared_anew_elsewhere,
        lost_its_last_line,
        rewritten_and_not_committed,
        rewritten_in_a_merge,
    ],
)
def test_a_ledger_that_was_rewritten_is_named(results, rewrite):
    rewrite(results)
    with pytest.raises(ReportError, match=r'a/ledger.jsonl was rewritten: in (commit|the working)'):
        check_ledgers(results)


def moved(results):
    commit(results, ('a', FIRST, SECOND), removed=[STUDY])


def removed_and_restored(results):
    commit(results, removed=[STUDY])
    commit(results, (STUDY, FIRST, SECOND, OTHER))


def grown_and_not_committed(results):
    write(results, STUDY, FIRST, SECOND, OTHER)


def of_two_scales(results):
    commit(results, ('claims/gpu/a', OTHER))


def never_committed(results):
    write(results, 'b', FIRST)


def left(results):
    commit(results, removed=[STUDY])


@pytest.mark.parametrize(
    'change',
    [moved, removed_and_restored, grown_and_not_committed, of_two_scales, never_committed, left],
)
def test_a_ledger_may_grow_move_or_leave(results, change):
    change(results)
    assert 'compared with git, 0 rewritten' in check_ledgers(results)


def test_a_rewrite_with_a_reason_is_counted(results):
    (results / REASONS).write_text(REASON)
    declared_anew(results)
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


def test_without_a_whole_history_a_line_says_so(results, tmp_path):
    declared_anew(results)
    url = f'file://{results.parent}'
    git(tmp_path, 'clone', '--depth=1', url, 'shallow')
    assert 'the clone is shallow' in check_ledgers(tmp_path / 'shallow/results')
    shutil.rmtree(results.parent / '.git')
    assert 'has no git history' in check_ledgers(results)


def test_the_committed_ledgers_keep_what_earlier_commits_had():
    assert check_ledgers(ROOT / 'experiments/results').startswith('ledgers: ')
