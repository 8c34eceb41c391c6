"""The script that decides claims."""

import dataclasses
import shutil

import pytest

from experiments.claims import export, pages
from experiments.claims.claim import Claim, ClaimVerdict, Expectation, exact_row
from experiments.claims.export import ANSWERS, CLAIMS, Answer, read_claims, write
from qkattn.errors import ReportError
from tests.studies import RESULTS, beat_yardsticks

TEXTS = dict.fromkeys(('title', 'statement', 'source', 'rule'), 'One is one.')
HOLDS = Expectation('fair_small', 'qk/k_is_v', 'not_better')
FAILS = Expectation('fair_small', 'qk/k_is_v', 'worse')
LACKS = Expectation('masked_lm', 'shared_qk/vo', 'worse')


def true_on_the_left_alone():
    return [exact_row('one', 1, 1, side='left'), exact_row('one', 2, 1, side='right')]


CLAIMS_HERE = {
    'E7': Claim(
        name='E7',
        **TEXTS,
        checks=(true_on_the_left_alone,),
        conditions={'side: left': 'one is left'},
    ),
    'E8': Claim(name='E8', **TEXTS, expectations=(HOLDS,)),
    'E9': Claim(name='E9', **TEXTS, expectations=(FAILS, LACKS)),
}


@pytest.fixture
def workdir(files, tmp_path, monkeypatch):
    """A directory with the committed study fair_small; the claims are KNOWN."""
    study = shutil.copytree(RESULTS / 'fair_small', tmp_path / 'runs/fair_small')
    beat_yardsticks(study)
    (study / 'report.html').touch()
    monkeypatch.setattr('experiments.claims.declared.claims', lambda: CLAIMS_HERE)
    return tmp_path / 'runs'


def test_an_export_is_checked_by_deciding_it_again(printed, workdir, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(pages, 'write_page', drawn.append)
    kept = tmp_path / 'kept'
    shutil.copytree(workdir / 'fair_small', workdir / 'lm_scaling')  # belongs to no claim
    text = printed('claims', '--notrain', f'--workdir={workdir}', f'--export={kept}')
    for part in ('E7  holds', 'E8  holds', 'E9  undecided', 'study masked_lm has no results'):
        assert part in text
    assert ' only if one is left\n' in text
    assert 'holds for' not in text
    assert drawn == [str(kept)]
    assert all((kept / name / 'study.json').exists() for name in ('fair_small', 'lm_scaling'))

    # The check counts the rows of the three claims.
    stored = read_claims(kept)
    assert [claim.name for claim in stored] == ['E7', 'E8', 'E9']
    assert export.check(kept) == sum(len(claim.rows) for claim in stored) == 2 + 3 + 3

    # A changed verdict, a missing claim, and an answer that nobody declared are refused.
    failed = dataclasses.replace(stored[0], verdict=ClaimVerdict.FAILS)
    answer = Answer('drop W_Q', 'query_free/vo', -0.25)
    for file, values, message in (
        (CLAIMS, [failed, *stored[1:]], "verdict of E7 is 'fails', but its checks and .*"),
        (CLAIMS, stored[:2], 'is declared: E9'),
        (ANSWERS, [answer], 'is declared: drop W_Q'),
    ):
        write(kept, file, values)
        with pytest.raises(ReportError, match=message):
            export.check(kept)
        write(kept, CLAIMS, stored)


@pytest.mark.parametrize('train', ['--train', '--notrain'])
def test_the_directory_of_a_study_is_refused_as_a_workdir(train, refusal, workdir):
    files = sorted(workdir.rglob('*'))
    sentence = refusal('claims', 'E7', train, f'--workdir={workdir}/fair_small')
    assert 'is the directory of a study or run; claims need a directory of their own' in sentence
    assert sorted(workdir.rglob('*')) == files


@pytest.mark.parametrize('train', ['--train', '--notrain'])
def test_studies_of_another_scale_are_refused(train, refusal, workdir):
    shutil.copytree(workdir / 'fair_small', workdir / 'masked_lm')
    files = sorted(workdir.rglob('*'))
    sentence = refusal('claims', 'E9', train, f'--workdir={workdir}')
    assert 'masked_lm has the sizes d_model=48, but at scale cpu the study has' in sentence
    assert sorted(workdir.rglob('*')) == files


def test_a_study_that_is_neither_shipped_nor_trained_is_named(refusal, workdir, monkeypatch):
    mine = Claim(name='E6', **TEXTS, expectations=(Expectation('lm_dropt', 'qk/no_v', 'worse'),))
    monkeypatch.setitem(CLAIMS_HERE, 'E6', mine)
    sentence = refusal('claims', 'E6', f'--workdir={workdir}')
    assert "claim E6: configs/claims has no study 'lm_dropt', and no " in sentence


def test_the_list_of_claims_has_their_titles(printed):
    assert 'E3  Positive control: one matrix' in printed('claims', '--list')


def test_a_plan_has_a_line_for_each_study(printed):
    lines = printed('claims', 'B7', '--scale=gpu', '--dry_run').splitlines()
    names, runs, trials = zip(*(line.split()[:3] for line in lines[2:]), strict=True)
    assert names == ('lm_rank', 'lm_rank_12', 'total')
    assert lines[0].startswith('study')
    for first, second, total in (map(int, runs), map(int, trials)):
        assert first + second == total
