"""The script that decides claims."""

import dataclasses
import shutil

import pytest

from experiments.claims import export, pages
from experiments.claims.claim import Claim, ClaimVerdict, Expectation, exact_row
from experiments.claims.export import ANSWERS, CLAIMS, Answer, read_claims, write
from qkattn.errors import ReportError
from tests.studies import RESULTS, beat_yardsticks

TEXTS = {
    'title': 'One is one.',
    'statement': 'One is one.',
    'source': 'One is one.',
    'rule': 'One is one.',
}
# What the study fair_small supports and refutes, and what needs an absent study.
SUPPORTED = Expectation('fair_small', 'qk/k_is_v', 'not_better')
REFUTED = Expectation('fair_small', 'qk/k_is_v', 'worse')
UNTRAINED = Expectation('masked_lm', 'shared_qk/vo', 'worse')


def true_on_the_left_alone():
    return [
        exact_row('one', value=1, expected=1, side='left'),
        exact_row('one', value=2, expected=1, side='right'),
    ]


CLAIMS_HERE = {
    'E7': Claim(
        name='E7',
        **TEXTS,
        checks=(true_on_the_left_alone,),
        conditions={'side: left': 'one is left'},
    ),
    'E8': Claim(name='E8', **TEXTS, expectations=(SUPPORTED,)),
    'E9': Claim(name='E9', **TEXTS, expectations=(REFUTED, UNTRAINED)),
}


@pytest.fixture
def workdir(files, tmp_path, monkeypatch):
    """A directory with the committed study fair_small; `CLAIMS_HERE` are all claims there are."""
    study = shutil.copytree(RESULTS / 'fair_small', tmp_path / 'runs/fair_small')
    beat_yardsticks(study)
    (study / 'report.html').touch()
    monkeypatch.setattr('experiments.claims.declared.claims', lambda: CLAIMS_HERE)
    return tmp_path / 'runs'


def test_an_export_is_checked_by_deciding_it_again(printed, workdir, tmp_path, monkeypatch):
    pages_of = []
    monkeypatch.setattr(pages, 'write_page', pages_of.append)
    shutil.copytree(workdir / 'fair_small', workdir / 'lm_scaling')  # belongs to no claim
    kept = tmp_path / 'kept'

    text = printed('claims', '--notrain', f'--workdir={workdir}', f'--export={kept}')

    assert 'E7  holds' in text
    assert ' only if one is left\n' in text
    assert 'holds for' not in text
    assert 'E8  holds' in text
    assert 'E9  undecided' in text
    assert 'study masked_lm has no results' in text
    assert pages_of == [str(kept)]
    assert (kept / 'fair_small/study.json').exists()
    assert (kept / 'lm_scaling/study.json').exists()

    # `check` returns the number of rows: E7 has 2, and E8 and E9 have 3 each.
    stored = read_claims(kept)
    assert [claim.name for claim in stored] == ['E7', 'E8', 'E9']
    assert [len(claim.rows) for claim in stored] == [2, 3, 3]
    assert export.check(kept) == 8

    failed = dataclasses.replace(stored[0], verdict=ClaimVerdict.FAILS)
    write(kept, CLAIMS, [failed, *stored[1:]])
    with pytest.raises(ReportError, match="verdict of E7 is 'fails', but its checks and .*"):
        export.check(kept)

    write(kept, CLAIMS, stored[:2])
    with pytest.raises(ReportError, match='is declared: E9'):
        export.check(kept)

    write(kept, CLAIMS, stored)
    write(kept, ANSWERS, [Answer('drop W_Q', 'query_free/vo', -0.25)])
    with pytest.raises(ReportError, match='is declared: drop W_Q'):
        export.check(kept)


@pytest.mark.parametrize('train', ['--train', '--notrain'])
def test_the_directory_of_a_study_is_refused_as_a_workdir(train, refusal, workdir):
    files_before = sorted(workdir.rglob('*'))

    sentence = refusal('claims', 'E7', train, f'--workdir={workdir}/fair_small')

    assert 'is the directory of a study or run; claims need a directory of their own' in sentence
    assert sorted(workdir.rglob('*')) == files_before


@pytest.mark.parametrize('train', ['--train', '--notrain'])
def test_studies_of_another_scale_are_refused(train, refusal, workdir):
    """The study masked_lm has the sizes of fair_small."""
    shutil.copytree(workdir / 'fair_small', workdir / 'masked_lm')
    files_before = sorted(workdir.rglob('*'))

    sentence = refusal('claims', 'E9', train, f'--workdir={workdir}')

    assert 'masked_lm has the sizes d_model=48, but at scale cpu the study has' in sentence
    assert sorted(workdir.rglob('*')) == files_before


def test_a_study_that_is_neither_shipped_nor_trained_is_named(refusal, workdir, monkeypatch):
    misspelled = Expectation('lm_dropt', 'qk/no_v', 'worse')
    claim = Claim(name='E6', **TEXTS, expectations=(misspelled,))
    monkeypatch.setitem(CLAIMS_HERE, 'E6', claim)

    sentence = refusal('claims', 'E6', f'--workdir={workdir}')

    assert "claim E6: configs/claims has no study 'lm_dropt', and no " in sentence


def test_the_list_of_claims_has_their_titles(printed):
    assert 'E3  Positive control: one matrix' in printed('claims', '--list')


def test_a_plan_has_a_line_for_each_study(printed):
    text = printed('claims', 'B7', '--scale=gpu', '--dry_run')

    # A header, a rule, a line for each study, and the total.
    lines = text.splitlines()
    assert lines[0].startswith('study')
    names = []
    runs = []
    trials = []
    for line in lines[2:]:
        cells = line.split()
        names.append(cells[0])
        runs.append(int(cells[1]))
        trials.append(int(cells[2]))
    assert names == ['lm_rank', 'lm_rank_12', 'total']
    assert runs[0] + runs[1] == runs[2]
    assert trials[0] + trials[1] == trials[2]
