"""The script that decides claims."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from qkattn.claims import export, pages
from qkattn.claims.claim import Claim, ClaimVerdict, Expectation, exact
from qkattn.claims.export import ANSWERS, CLAIMS, Answer, read_claims, write
from qkattn.errors import ReportError
from tests.studies import beat_yardsticks

ROOT = Path(__file__).parents[2]


TEXTS = dict.fromkeys(('title', 'statement', 'source', 'rule'), 'One is one.')
HOLDS = Expectation('fair_small', 'qk/k_is_v', 'not_better')
FAILS = Expectation('fair_small', 'qk/k_is_v', 'worse')
LACKS = Expectation('masked', 'shared_qk/vo', 'worse')
KNOWN = {
    'E7': Claim(name='E7', **TEXTS, checks=(lambda: [exact('one', 1, 1)],)),
    'E8': Claim(name='E8', **TEXTS, expectations=(HOLDS,)),
    'E9': Claim(name='E9', **TEXTS, expectations=(FAILS, LACKS)),
}


@pytest.fixture
def workdir(files, tmp_path, monkeypatch):
    """A directory with the committed study fair_small; the claims are those above."""
    shutil.copytree(ROOT / 'experiments/results/fair_small', tmp_path / 'runs/fair_small')
    beat_yardsticks(tmp_path / 'runs/fair_small')
    (tmp_path / 'runs/fair_small/report.html').touch()
    monkeypatch.setattr('qkattn.claims.declared.claims', lambda: KNOWN)
    return tmp_path / 'runs'


def test_claims_are_listed(printed):
    assert 'E3  Positive control: one matrix' in printed('claims', '--list')


def test_a_study_that_is_no_config_has_to_be_trained_before(refusal, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    texts = "name='Z', title='z', statement='Z.', source='z', rule='z'"
    claim = f"Claim({texts}, expectations=(Expectation('mine', 'qk/vo', 'worse'),))"
    imports = 'from qkattn.claims.claim import Claim, Expectation'
    (tmp_path / 'my_claim.py').write_text(f'{imports}\nCLAIM = {claim}\n')
    sentence = refusal('claims', 'my_claim:CLAIM', '--workdir=w')
    assert "study 'mine' is none of configs/claims" in sentence
    assert not (tmp_path / 'w').exists()


def test_partial_results_are_decided_and_what_is_missing_is_named(printed, workdir):
    text = printed('claims', '--notrain', f'--workdir={workdir}')
    for part in (
        *('E7  holds', 'E8  holds', 'E9  undecided'),
        'study masked has no results',
        '1 of 2 studies have results; none: masked',
    ):
        assert part in text
    verdicts = [claim.verdict for claim in read_claims(workdir)]
    assert verdicts == [ClaimVerdict.HOLDS, ClaimVerdict.HOLDS, ClaimVerdict.UNDECIDED]


def test_an_export_is_decided_again_and_a_changed_verdict_is_found(
    printed, workdir, tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr(pages, 'write_page', drawn.append)
    kept = tmp_path / 'kept'
    shutil.copytree(workdir / 'fair_small', workdir / 'scaling')  # belongs to no claim
    arguments = ['--notrain', f'--workdir={workdir}', f'--export={kept}']
    printed('claims', 'E7', 'E8', *arguments)
    assert drawn == [str(kept)]
    assert all((kept / name / 'study.json').exists() for name in ('fair_small', 'scaling'))
    stored = read_claims(kept)
    assert [claim.name for claim in stored] == ['E7', 'E8', 'E9']
    assert export.check(kept) == sum(len(claim.rows) for claim in stored) == 1 + 3 + 3
    one, two, three = stored
    failed = dataclasses.replace(one, verdict=ClaimVerdict.FAILS)
    rows = (dataclasses.replace(two.rows[0], value=0.0), *two.rows[1:])
    answer = Answer('drop W_Q', 'query_free/vo', -0.25)
    for file, values, message in (
        (CLAIMS, [failed, two, three], "verdict of E7 is 'fails', but its checks and .*"),
        (CLAIMS, [one, dataclasses.replace(two, rows=rows), three], 'value of row 0 of E8 is 0.0'),
        (CLAIMS, [one, two], 'E9 differ'),
        (ANSWERS, [answer], 'drop W_Q differ'),
    ):
        write(kept, file, values)
        with pytest.raises(ReportError, match=message):
            export.check(kept)
        write(kept, CLAIMS, stored)


def test_a_workdir_of_something_else_is_refused_and_kept(refusal, printed, workdir):
    """One study, claims of another scale, damaged claims."""
    study, claims = workdir / 'fair_small', workdir / 'claims.json'
    printed('claims', 'E7', f'--workdir={workdir}')
    kept, files = claims.read_bytes(), sorted(study.iterdir())
    for flags, directory, sentence in (
        (['--train'], study, 'is the directory of one study; claims need another'),
        (['--notrain'], study, f'workdir={study} is the directory of one study'),
        (['--scale=smoke'], workdir, 'holds claims at scale cpu; give another'),
    ):
        assert sentence in refusal('claims', 'E7', *flags, f'--workdir={directory}')
    assert claims.read_bytes() == kept and sorted(study.iterdir()) == files
    claims.write_text('[{"name": "E7"}]')
    sentence = refusal('claims', 'E7', f'--workdir={workdir}')
    assert f'{claims} is damaged' in sentence and 'move it away: the studies beside' in sentence
    assert claims.read_text() == '[{"name": "E7"}]'


def test_a_plan_has_a_line_for_each_study(printed):
    lines = printed('claims', 'B7', '--scale=gpu', '--dry_run').splitlines()
    assert [line.split()[0] for line in lines] == ['study', '-----', 'rank', 'total']
    assert lines[2].split()[:2] == ['rank', 'B7'] and lines[2].split()[2:] == lines[3].split()[1:]
