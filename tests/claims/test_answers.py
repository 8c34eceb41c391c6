"""Answers: the best study of each cell, its numbers, and the file."""

import shutil

import pytest

from qkattn.claims.answers import NAME, answers, read_answers, write_answers
from qkattn.claims.decided import Kind
from qkattn.claims.results import Results
from qkattn.errors import RunDirectoryError
from qkattn.report.prose import rounded
from tests.claims.conftest import RESULTS


@pytest.fixture(scope='module')
def results(committed, tmp_path_factory):
    """One study that learned on many tokens, one on few, and one that did not."""
    directory = tmp_path_factory.mktemp('answers')
    shutil.copytree(RESULTS / 'claims/cpu/lm_stdlib', directory / 'lm_dropped')
    shutil.copytree(committed / 'claims/cpu/sharing', directory / 'sharing')
    shutil.copytree(RESULTS / 'fair_small', directory / 'decoder')
    return Results(directory)


@pytest.fixture(scope='module')
def made(results):
    return {answer.variant: answer for answer in answers(results)}


def test_a_cell_is_from_the_study_that_shows_it_best(made):
    shared, dropped = made['shared_qk/vo'], made['qk/no_o']
    studies = {
        (answer.variant, kind): answer.row('decoder', kind).study
        for answer in (shared, dropped)
        for kind in (Kind.REMOVED, Kind.MATCHED)
    }
    assert studies == {
        ('shared_qk/vo', Kind.REMOVED): 'sharing',
        ('shared_qk/vo', Kind.MATCHED): 'lm_dropped',
        ('qk/no_o', Kind.REMOVED): 'decoder',
        ('qk/no_o', Kind.MATCHED): 'lm_dropped',
    }
    words = [dropped.row('decoder', kind).word for kind in (Kind.REMOVED, Kind.MATCHED)]
    assert words == ['no verdict', 'undecided']
    assert (shared.row('decoder', Kind.REMOVED).word, shared.row('masked LM', Kind.MATCHED)) == (
        None,
        None,
    )


def test_the_numbers_are_those_of_the_study(made, results):
    study, found = results.study('lm_dropped')
    for arm in found.arms:
        if not arm.is_baseline:
            row = made[arm.variant].row('decoder', Kind.MATCHED)
            difference = arm.difference
            expected = map(rounded, (difference.mean, difference.low, difference.high))
            assert [row.value, row.low, row.high] == list(expected)
            assert row.word == arm.verdict.decision.value
            assert row.context['tokens'] == '4,096,000' and row.context['corpus'] == 'stdlib'


def test_shares_of_attention_are_those_of_the_algebra(made):
    quarter = ('query_free/vo', 'key_free/vo', 'shared_qk/vo', 'qk/no_v', 'qk/no_o', 'qk/k_is_v')
    assert {variant: answer.attention for variant, answer in made.items()} == {
        **dict.fromkeys((*quarter, 'qk/vo?num_kv_heads=2'), -1 / 4),
        'qk/vo?num_kv_heads=1': -3 / 8,
        'shared_qk/k_is_v': -1 / 2,
        'qk/vo?num_heads=1': 0.0,
    }


def test_the_file_is_read_as_it_was_written_unless_it_was_edited(made, tmp_path):
    assert read_answers(tmp_path) == ()
    path = write_answers(tmp_path, made.values())
    assert path.name == NAME and read_answers(tmp_path) == tuple(made.values())
    path.write_text(path.read_text().replace('"word": "worse"', '"word": "better"', 1))
    with pytest.raises(RunDirectoryError, match='checksum'):
        read_answers(tmp_path)
