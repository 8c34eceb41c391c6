"""Losses by document: what is read, and what contradicts a result."""

import json

import pytest

from qkattn.verdict import load_study
from tests.studies import run_name, trial_record, write_study

NAME = run_name('qk/vo', 'd_model=128')


def changed(directory, change):
    """The problems of a study of two trials whose documents.json is changed."""
    write_study(directory, [trial_record('qk/vo', seed=0), trial_record('qk/vo', seed=1)])
    path = directory / NAME / 'documents.json'
    content = json.loads(path.read_text())
    content = change(content) or content
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    study = load_study(directory)
    assert [trial.documents for trial in study.trials] == [{}, {}]
    return study.problems


def test_every_trial_has_its_documents_on_both_splits(study_dir):
    losses = (2.0, None, 3.0)
    records = [trial_record('qk/vo', seed=s, val_loss=loss) for s, loss in enumerate(losses)]
    first, diverged, last = load_study(write_study(study_dir, records)).trials
    assert diverged.documents == {} and first.documents.keys() == {'val', 'test'}
    assert first.documents['test'].loss == pytest.approx(2.1)
    assert last.documents['val'].loss == pytest.approx(3.0)
    assert len(first.documents['val'].names) == 100
    assert first.documents['val'].alike(last.documents['val'])
    assert not first.documents['val'].alike(first.documents['test'])


def test_a_study_may_have_no_test_split_and_no_documents(study_dir):
    without = {f'test_{name}': None for name in ('loss', 'bits_per_byte')}
    study = load_study(write_study(study_dir, [trial_record('qk/vo', **without)]))
    assert study.problems == () and study.trials[0].documents.keys() == {'val'}
    (study_dir / NAME / 'documents.json').unlink()
    study = load_study(study_dir)
    assert study.problems == () and study.trials[0].documents == {}


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda of: '{', 'it is not JSON'),
        (lambda of: of.pop('validation') and None, "field 'validation' is missing"),
        (lambda of: of['test'].pop('tokens') and None, "field 'tokens' is missing"),
        (lambda of: of['test']['nats'].pop() and None, "'test' has nats of 1 trials, not of 2"),
        (lambda of: of['test']['nats'][1].pop() and None, 'one number for each of its documents'),
        (lambda of: of['test']['tokens'].append(1), 'one number for each of its documents'),
        (lambda of: of['test'].update(nats=[None, None]), "0 of split 'test' has a loss of None"),
        (lambda of: of['test']['nats'][1].append(of['test']['nats'][1].pop() + 1), 'its result'),
        (lambda of: of['test']['documents'].__setitem__(0, 'test/1.py'), 'repeats a document'),
        (lambda of: of['test']['tokens'].__setitem__(0, 0), 'or has one without targets'),
        (lambda of: of['test']['tokens'].__setitem__(0, None), "field 'tokens' is [None"),
    ],
)
def test_what_is_wrong_is_named_and_left_out(study_dir, change, message):
    (problem,) = changed(study_dir, change)
    assert problem.startswith(f'{NAME}/documents.json was left out: ') and message in problem
