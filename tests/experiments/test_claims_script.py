"""The script that decides claims."""

import dataclasses
import shutil
from typing import NamedTuple

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
# fair_small supports the first expectation and refutes the second. The third needs another study.
SUPPORTED = Expectation('fair_small', 'qk/k_is_v', 'not_better')
REFUTED = Expectation('fair_small', 'qk/k_is_v', 'worse')
UNTRAINED = Expectation('masked_lm', 'shared_qk/vo', 'worse')


def check_that_holds_on_the_left():
    """Returns two rows. The first, of side='left', has the expected value."""
    return [
        exact_row('one', value=1, expected=1, side='left'),
        exact_row('one', value=2, expected=1, side='right'),
    ]


CLAIMS_HERE = {
    'E7': Claim(
        name='E7',
        **TEXTS,
        checks=(check_that_holds_on_the_left,),
        conditions={'side: left': 'one is left'},  # in words, for 'holds only if ...'
        meanings={'side: left': 'one can be left out on the left'},
    ),
    'E8': Claim(name='E8', **TEXTS, expectations=(SUPPORTED,)),
    'E9': Claim(name='E9', **TEXTS, expectations=(REFUTED, UNTRAINED)),
}


@pytest.fixture
def workdir(files, tmp_path, monkeypatch):
    """A directory with the committed study fair_small. Only the claims in `CLAIMS_HERE` exist."""
    study = shutil.copytree(RESULTS / 'fair_small', tmp_path / 'runs/fair_small')
    beat_yardsticks(study)
    (study / 'report.html').touch()
    monkeypatch.setattr('experiments.claims.declared.claims', lambda: CLAIMS_HERE)
    return tmp_path / 'runs'


@pytest.fixture
def export_directory(tmp_path):
    return tmp_path / 'exported'


class Exported(NamedTuple):
    lines: list  # what the script has printed
    directories_of_pages: list  # where it has written a page


@pytest.fixture
def exported(printed, workdir, export_directory, monkeypatch):
    """Decides the claims in `CLAIMS_HERE`, and exports them with their studies.

    The study lm_scaling, a copy of fair_small, belongs to no claim, but is also exported.
    """
    directories_of_pages = []
    monkeypatch.setattr(pages, 'write_page', directories_of_pages.append)
    shutil.copytree(workdir / 'fair_small', workdir / 'lm_scaling')
    text = printed('claims', '--notrain', f'--workdir={workdir}', f'--export={export_directory}')
    return Exported(text.splitlines(), directories_of_pages)


def test_claims_are_decided_and_printed_with_their_reasons(exported):
    """Each claim has a line with its verdict and its statement, 'One is one.', then its reasons."""
    # The check of E7 is true only for side='left', which E7 describes as 'one is left'.
    assert 'E7  holds only if  One is one.' in exported.lines
    assert '      only if one is left' in exported.lines
    assert '      means: one can be left out on the left' in exported.lines

    # The study fair_small supports E8. It has models of one size.
    assert 'E8  holds in this setting One is one.' in exported.lines

    # fair_small refutes one expectation of E9. The other needs masked_lm, which is not trained.
    assert 'E9  undecided      One is one.' in exported.lines
    assert any('study masked_lm has no results' in line for line in exported.lines)


def test_claims_are_exported_with_their_studies(exported, export_directory):
    assert exported.directories_of_pages == [str(export_directory)]
    assert (export_directory / 'fair_small/study.json').exists()
    assert (export_directory / 'lm_scaling/study.json').exists()


def test_an_export_is_checked_by_deciding_it_again(exported, export_directory):
    """`check` decides the exported claims again, and raises an error if the files differ."""
    # The check of E7 gives two rows. E8 and E9 have three rows each: the difference at equal
    # parameter count, and its two parts, removing parameters and spending them elsewhere.
    stored = read_claims(export_directory)
    assert [claim.name for claim in stored] == ['E7', 'E8', 'E9']
    assert [len(claim.rows) for claim in stored] == [2, 3, 3]

    # `check` returns the number of rows that it has compared.
    num_rows = 2 + 3 + 3
    assert export.check(export_directory) == num_rows

    # The stored verdict on E7 is changed to FAILS.
    failed = dataclasses.replace(stored[0], verdict=ClaimVerdict.FAILS)
    write(export_directory, CLAIMS, [failed, *stored[1:]])
    with pytest.raises(ReportError, match="verdict of E7 is 'fails', but its checks and .*"):
        export.check(export_directory)

    # E9 is removed from the stored claims, but is still declared.
    write(export_directory, CLAIMS, stored[:2])
    with pytest.raises(ReportError, match='is declared: E9'):
        export.check(export_directory)

    # A stored answer does not follow from the studies.
    write(export_directory, CLAIMS, stored)
    write(export_directory, ANSWERS, [Answer('drop W_Q', 'query_free/vo', -0.25)])
    with pytest.raises(ReportError, match='is declared: drop W_Q'):
        export.check(export_directory)


@pytest.mark.parametrize('train', ['--train', '--notrain'])
def test_the_directory_of_a_study_is_refused_as_a_workdir(train, refusal, workdir):
    files_before = sorted(workdir.rglob('*'))

    sentence = refusal('claims', 'E7', train, f'--workdir={workdir}/fair_small')

    assert 'is the directory of a study or run; claims need a directory of their own' in sentence
    assert sorted(workdir.rglob('*')) == files_before


@pytest.mark.parametrize('train', ['--train', '--notrain'])
def test_studies_of_another_scale_are_refused(train, refusal, workdir):
    """The directory masked_lm is a copy of fair_small, so its sizes belong to another scale."""
    shutil.copytree(workdir / 'fair_small', workdir / 'masked_lm')
    files_before = sorted(workdir.rglob('*'))

    sentence = refusal('claims', 'E9', train, f'--workdir={workdir}')

    assert 'masked_lm has the sizes d_model=48, but at scale cpu the study has' in sentence
    assert sorted(workdir.rglob('*')) == files_before


@pytest.mark.parametrize('train', ['--train', '--notrain'])
def test_a_study_that_is_neither_shipped_nor_trained_is_named(train, refusal, workdir, monkeypatch):
    misspelled = Expectation('lm_dropt', 'qk/no_v', 'worse')
    claim = Claim(name='E6', **TEXTS, expectations=(misspelled,))
    monkeypatch.setitem(CLAIMS_HERE, 'E6', claim)

    sentence = refusal('claims', 'E6', train, f'--workdir={workdir}')

    assert "claim E6: configs/claims has no study 'lm_dropt', and " in sentence
    assert f'{workdir} has only fair_small of experiments.ablate' in sentence


def test_the_list_of_claims_has_their_titles(printed):
    assert 'E3  Positive control: one matrix' in printed('claims', '--list')


def test_the_cost_is_printed_before_studies_train(printed, workdir, monkeypatch):
    """The study masked_lm of claim E9 is one of configs/claims, so it would be trained."""
    monkeypatch.setattr('experiments.claims.studies.train', lambda *_: print('training starts'))

    before_training, _, _ = printed('claims', 'E9', f'--workdir={workdir}').partition('training')

    names = [line.split()[0] for line in before_training.splitlines()]
    assert names[0] == 'study'
    assert 'masked_lm' in names
    assert names[-1] == 'total'


def test_a_plan_has_a_line_for_each_study(printed):
    """A dry run of a claim prints the numbers of runs and trials of each study.

    Claim B7 has the study lm_rank, and lm_rank_12 repeats a part of this study. A run trains one or
    more trials.
    """
    text = printed('claims', 'B7', '--scale=gpu', '--dry_run')

    # The lines are a header, a rule, one line for each study, and the total.
    header, _, *rows = text.splitlines()
    assert header.startswith('study')
    names = []
    runs = []
    trials = []
    for row in rows:
        # The first three cells are the name, the number of runs and the number of trials.
        cells = row.split()
        names.append(cells[0])
        runs.append(int(cells[1]))
        trials.append(int(cells[2]))

    assert names == ['lm_rank', 'lm_rank_12', 'total']
    assert runs[0] + runs[1] == runs[2]
    assert trials[0] + trials[1] == trials[2]
