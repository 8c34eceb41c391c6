"""The script that decides claims."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from qkattn.claims import export, pages
from qkattn.claims.claim import Claim, ClaimVerdict, Expectation, exact
from qkattn.claims.export import ANSWERS, CLAIMS, Answer, read_claims, write
from qkattn.claims.studies import study_of
from qkattn.config import fingerprint
from qkattn.errors import ReportError
from qkattn.storage.records import write_json
from tests.studies import beat_yardsticks

ROOT = Path(__file__).parents[2]


def check():
    return [exact('one', 1, 1)]


TEXTS = dict.fromkeys(('title', 'statement', 'source', 'rule'), 'One is one.')
EXACT = Claim(name='E7', **TEXTS, checks=(check,))
EMPIRICAL = Claim(
    name='E8', **TEXTS, expectations=(Expectation('fair_small', 'qk/k_is_v', 'not_better'),)
)
OTHER = Claim(
    name='E9',
    **TEXTS,
    expectations=(
        Expectation('fair_small', 'qk/k_is_v', 'worse'),
        Expectation('masked', 'shared_qk/vo', 'worse'),
    ),
)


@pytest.fixture
def workdir(files, tmp_path, monkeypatch):
    """A directory with the committed study fair_small; the claims are those above."""
    shutil.copytree(ROOT / 'experiments/results/fair_small', tmp_path / 'runs/fair_small')
    beat_yardsticks(tmp_path / 'runs/fair_small')
    (tmp_path / 'runs/fair_small/report.html').touch()
    known = {claim.name: claim for claim in (EXACT, EMPIRICAL, OTHER)}
    monkeypatch.setattr('qkattn.claims.declared.claims', lambda: known)
    return tmp_path / 'runs'


def test_claims_are_listed(script_here):
    done = script_here('claims', '--list')
    assert done.returncode == 0 and 'E3  Positive control: one matrix' in done.stdout


@pytest.mark.parametrize(
    ('arguments', 'part'),
    [
        (['E33'], "unknown claim 'E33', did you mean 'E3'?"),
        (['E3'], '--workdir=DIRECTORY is required for E3'),
        (['E3', '--scale=tpu'], 'scale'),
        (['E3', '--workers=two'], '--workers=two must be auto or a number'),
        (['--claims='], '--claims is empty; give names as in B2,C1'),
        (['A2', '--export=kept'], '--export takes the studies of --workdir=DIRECTORY'),
        (['A2', '--workdir=gs://a/b'], 'workdir=gs://a/b is in a bucket; claims need a directory'),
        (['A2', '--workdir=nowhere', '--notrain'], 'workdir=nowhere does not exist'),
        (['A2', f'--workdir={__file__}'], f'workdir={__file__} is a file; give a directory'),
    ],
)
def test_bad_input_is_one_sentence(script_here, arguments, part):
    done = script_here('claims', *arguments)
    assert done.returncode == 2 and part in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_study_that_is_no_config_has_to_be_trained_before(script_here, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    texts = "name='Z', title='z', statement='Z.', source='z', rule='z'"
    claim = f"Claim({texts}, expectations=(Expectation('mine', 'qk/vo', 'worse'),))"
    imports = 'from qkattn.claims.claim import Claim, Expectation'
    (tmp_path / 'my_claim.py').write_text(f'{imports}\nCLAIM = {claim}\n')
    done = script_here('claims', 'my_claim:CLAIM', '--workdir=w')
    assert done.returncode == 2 and "study 'mine' is none of configs/claims" in done.stderr
    assert not (tmp_path / 'w').exists()


def test_partial_results_are_decided_and_what_is_missing_is_said(script_here, workdir):
    done = script_here('claims', '--notrain', f'--workdir={workdir}')
    assert done.returncode == 0, done.stderr
    for part in (
        'E7  holds',
        'E8  holds',
        'E9  undecided',
        'study masked has no results; python -m experiments.claims E9 --scale=cpu',
        '1 of 2 studies have results; none: masked',
    ):
        assert part in done.stdout
    verdicts = [claim.verdict for claim in read_claims(workdir)]
    assert verdicts == [ClaimVerdict.HOLDS, ClaimVerdict.HOLDS, ClaimVerdict.UNDECIDED]


def test_an_export_is_decided_again_and_a_changed_verdict_is_found(
    script_here, workdir, tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr(pages, 'write_page', drawn.append)
    kept = tmp_path / 'kept'
    shutil.copytree(workdir / 'fair_small', workdir / 'scaling')  # belongs to no claim
    arguments = ['--notrain', f'--workdir={workdir}', f'--export={kept}']
    done = script_here('claims', 'E7', 'E8', *arguments)
    assert done.returncode == 0, done.stderr
    assert drawn == [str(kept)]
    assert all((kept / name / 'study.json').exists() for name in ('fair_small', 'scaling'))
    stored = read_claims(kept)
    assert [claim.name for claim in stored] == ['E7', 'E8', 'E9']
    assert export.check(kept) == sum(len(claim.rows) for claim in stored) == 1 + 4 + 4
    write(kept, CLAIMS, [dataclasses.replace(stored[0], verdict=ClaimVerdict.FAILS), *stored[1:]])
    with pytest.raises(ReportError, match="verdict of E7 is 'fails', but its checks and .*"):
        export.check(kept)
    rows = (dataclasses.replace(stored[1].rows[0], value=0.0), *stored[1].rows[1:])
    write(kept, CLAIMS, [stored[0], dataclasses.replace(stored[1], rows=rows), stored[2]])
    with pytest.raises(ReportError, match='value of row 0 of E8 is 0.0'):
        export.check(kept)
    write(kept, CLAIMS, stored)
    write(kept, ANSWERS, [Answer('drop W_Q', 'query_free/vo', -0.25)])
    with pytest.raises(ReportError, match='drop W_Q differ'):
        export.check(kept)
    write(kept, CLAIMS, stored[:2])
    with pytest.raises(ReportError, match='E9 differ'):
        export.check(kept)


def test_a_workdir_of_another_scale_is_refused(script_here, tmp_path):
    path = tmp_path / 'runs/masked/study.json'
    path.parent.mkdir(parents=True)
    write_json(path, {'base_hash': fingerprint(study_of('masked', 'smoke').base)})
    done = script_here('claims', 'E3', '--scale=cpu', f'--workdir={tmp_path / "runs"}')
    assert done.returncode == 2
    assert (
        'holds study masked at scale smoke; give another workdir, or --scale=smoke' in done.stderr
    )


def test_the_directory_of_one_study_is_refused_and_kept(script_here, workdir):
    study = workdir / 'fair_small'
    kept = sorted(study.iterdir())
    for trains in ('--train', '--notrain'):
        done = script_here('claims', 'E7', trains, f'--workdir={study}')
        assert done.returncode == 2
        assert f'workdir={study} is the directory of one study; claims need another' in done.stderr
    assert sorted(study.iterdir()) == kept


def test_claims_of_another_scale_are_refused_and_kept(script_here, workdir):
    assert script_here('claims', 'E7', f'--workdir={workdir}').returncode == 0
    kept = (workdir / 'claims.json').read_bytes()
    done = script_here('claims', 'E7', '--scale=smoke', f'--workdir={workdir}')
    assert done.returncode == 2 and 'holds claims at scale cpu; give another' in done.stderr
    assert (workdir / 'claims.json').read_bytes() == kept


def test_damaged_claims_of_a_workdir_are_kept(script_here, workdir):
    path = workdir / 'claims.json'
    path.write_text('[{"name": "E7"}]')
    done = script_here('claims', 'E7', f'--workdir={workdir}')
    assert done.returncode == 2 and path.read_text() == '[{"name": "E7"}]'
    assert f'{path} is damaged' in done.stderr and 'move it away: the studies beside' in done.stderr


def test_a_plan_has_hours_for_a_given_speed(script_here):
    asked = ['A6', '--scale=gpu', '--dry_run']
    done = script_here('claims', *asked)
    assert done.returncode == 0, done.stderr
    head, line, total = done.stdout.splitlines()
    assert line.split()[:2] == ['full_heads', 'A6'] and not line.endswith(' h')
    assert ' h' in script_here('claims', *asked, '--flops_per_second=1e14').stdout.splitlines()[2]
