"""Pages of studies and runs: structure, escaping, nothing from elsewhere; the command."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qkattn.config import Config, TrainConfig, TrialsConfig, fingerprint, to_json
from qkattn.errors import ReportError
from qkattn.report import documents, show_run_report, write_report
from qkattn.report.page import load_run, loss_curves, trial_table
from qkattn.storage.records import write_json
from qkattn.verdict import load_study
from tests.report.conftest import BASE, HOSTILE, Page, read, scaled
from tests.studies import (
    result_record,
    translation_record,
    trial_record,
    tuned_arm,
    write_study,
    write_tuned,
)

ROOT = Path(__file__).parents[2]


def quick(path):
    """The page of a study without figures."""
    return documents(*read(path), (), {})['report.html']


def part(html, anchor):
    """The text of one section."""
    (section,) = re.findall(rf'<section id="{anchor}">.*?</section>', html, re.DOTALL)
    return Page(section).text


def test_a_report_is_complete_well_formed_and_self_contained(study_dir):
    records = [trial_record(variant, seed=s) for variant in ('qk/vo', 'b/vo') for s in (0, 1)]
    write_study(study_dir, records)
    command = [sys.executable, '-m', 'experiments.report', f'--study={study_dir}']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f'report: {study_dir / "report.html"}'
    files = {path.name for path in study_dir.iterdir()}
    assert files >= {'report.html', 'table.md', 'table.csv', 'table.tex', 'trials.csv', 'plots'}
    html = (study_dir / 'report.html').read_text()
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {'script', 'link', 'iframe', 'object'}
    attributes = [pair for _, attrs in page.tags for pair in attrs.items()]
    links = {value for name, value in attributes if name in ('src', 'href', 'action')}
    assert all(link.startswith(('#', 'data:image/svg+xml;base64,')) for link in links)
    assert {link[1:] for link in links if link[0] == '#'} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids)) and 'http' not in html and '@import' not in html
    assert [tag for tag, _ in page.tags].count('img') == len(list(study_dir.glob('plots/*.png')))
    before = {path: path.read_bytes() for path in study_dir.glob('**/*') if path.is_file()}
    assert write_report(study_dir).read_text() == html
    assert before == {path: path.read_bytes() for path in before}


def test_hostile_names_are_escaped(study_dir):
    records = [trial_record(variant) for variant in ('qk/vo', HOSTILE)]
    changes = {'question': '<img src=x onerror=alert(1)>', 'name': '</title><script>1</script>'}
    page = Page(quick(write_study(study_dir, records, **changes)))
    assert not {tag for tag, _ in page.tags} & {'script', 'b', 'img'}
    assert HOSTILE.split('\n')[0] in page.text and changes['question'] in page.text


def test_what_blocks_stands_after_the_verdict(study_dir):
    records = [
        r for v in ('qk/vo', 'b/vo') for r in tuned_arm(v, losses=BASE, seeds=range(95, 103))
    ]
    html = quick(write_tuned(study_dir, records, seeds=list(range(95, 103))))
    box = html.index('In the way of a verdict')
    assert html.index('class="verdict"') < box < html.index('<nav>')
    assert 'share seeds 100 and 101' in html[box : html.index('<nav>')]


def test_scaling_prints_numbers_or_the_reason(study_dir):
    html = quick(write_tuned(study_dir, scaled(1.2)))
    assert re.search(r'b/vo 1\.\d{3} \[.*\] .* 1\.(19|20)\d \[1\.', part(html, 'laws'))
    few = [r for r in scaled(1.2) if r['size'] in ('d_model=32', 'd_model=64')]
    html = quick(write_tuned(study_dir / 'few', few))
    assert 'a scaling law needs 4 sizes or more, there are 2' in part(html, 'laws')
    lost = [
        trial_record(v, s, val_loss=None) for s in ('small', 'large') for v in ('qk/vo', 'b/vo')
    ]
    html = quick(write_study(study_dir / 'lost', lost))
    assert 'No scaling law: no arm has a size' in part(html, 'table')
    assert 'diverged 4 of 4 trials' in Page(html).text


@pytest.mark.parametrize('baseline', [None, 'absent/vo'])
def test_without_a_baseline_result(study_dir, baseline):
    records = [trial_record(variant) for variant in ('b/vo', 'c/vo')]
    variants = ['absent/vo', 'b/vo', 'c/vo']
    html = quick(write_study(study_dir, records, baseline=baseline, variants=variants))
    text = 'No difference at d_model=128: the baseline absent/vo has no finished trial there.'
    assert (text in html) == (baseline is not None)


def test_provenance_is_flat_and_short(study_dir):
    devices = {'platform': 'gpu', 'kind': 'H200', 'count': 8}
    records = [
        translation_record(f'v{i}/vo', provenance={'started': f'12:0{i}', 'devices': devices})
        for i in range(5)
    ]
    text = Page(quick(write_study(study_dir, records))).text
    assert 'device 8 x H200' in text and 'devices: count 8' in text
    assert 'data pairs-de-en/de → pairs-de-en/en 1.0.0 parameters' in text
    assert '12:02 (1 run); and 2 more' in text and '12:03' not in text


def test_a_report_that_fails_leaves_nothing(study_dir):
    study_dir.mkdir()
    with pytest.raises(ReportError, match='does not exist'):
        write_report(study_dir)
    assert list(study_dir.iterdir()) == []


def test_reports_need_no_jax():
    code = 'import sys, qkattn.report, qkattn.report.verify; assert "jax" not in sys.modules'
    subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)


CONFIG = Config(train=TrainConfig(num_steps=400), trials=TrialsConfig(seeds=(3, 4)))


def written(path, steps=400, finished=True):
    """A run of two trials, the second of which diverges after step 200."""
    path.mkdir()
    write_json(path / 'config.json', {'hash': fingerprint(CONFIG), 'config': to_json(CONFIG)})
    start = {'command': ['qkattn', 'train'], 'git': {'commit': 'abc<d>'}, 'python': '3.11'}
    write_json(path / 'provenance.json', {'starts': [start | {'versions': {}, 'devices': {}}]})
    records = []
    for step in range(100, steps + 1, 100):
        second = 6 - step / 100 if step <= 200 else None
        records.append({'kind': 'train', 'step': step, 'loss': [5 - step / 100, second]})
        if step % 200 == 0:
            records.append({'kind': 'eval', 'step': step, 'val_loss': [5.5 - step / 100, second]})
    (path / 'metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records))
    if finished:
        trials = CONFIG.trials.trials()
        ended = result_record(trial=trials[0], val_loss=1.5, test_loss=1.625)
        diverged = result_record(trial=trials[1], val_loss=None, test_loss=None)
        result = [ended, diverged | {'status': 'diverged', 'diverged_at': 201}]
        data = {'name': 'own', 'version': '1-carved-test', 'carved': {'test': 0.1}}
        common = {'train_seconds': 61.0, 'data': data}
        write_json(path / 'result.json', [r | common for r in result])
    return path


def test_a_finished_run_has_curves_numbers_settings_and_provenance(tmp_path, monkeypatch):
    monkeypatch.setenv('COLUMNS', '100')
    lines = show_run_report(written(tmp_path / 'run')).splitlines()
    assert max(map(len, lines[:-1])) <= 100
    assert lines[3].split()[:5] == ['seed', '3', 'finished', '1.5000', '1.6250']
    assert lines[4].split()[:7] == ['seed', '4', 'diverged', 'at', 'step', '201', '-']
    html = (tmp_path / 'run/report.html').read_text()
    page = Page(html)
    assert [tag for tag, _ in page.tags].count('img') == 1 and 'http' not in html
    for shown in ('1.6250', 'diverged at step 201', 'train.num_steps', 'git.commit abc<d>', '61 s'):
        assert shown in page.text
    assert 'own 1-carved-test (10 % of train carved as test split)' in page.text
    with pytest.raises(ReportError, match='is the directory of a run; give it as --run'):
        load_study(tmp_path / 'run')


def test_the_curves_are_those_of_the_log(tmp_path):
    (axes,) = loss_curves(load_run(written(tmp_path / 'run'))).axes
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    train = [[100, 5], [200, 4], [300, np.nan], [400, np.nan]]
    np.testing.assert_array_equal(lines['seed 4, training'], train)
    np.testing.assert_array_equal(lines['seed 3, validation'], [[200, 3.5], [400, 1.5]])


def test_an_unfinished_run_shows_its_last_losses(tmp_path):
    path = written(tmp_path / 'run', steps=300, finished=False)
    titles, rows = trial_table(load_run(path))
    assert [title.split()[0] for title, _ in titles[2:]] == ['training', 'val']
    assert rows == [
        ['seed 3', 'unfinished', '2.0000', '3.5000'],
        ['seed 4', 'unfinished', '-', '4.0000'],
    ]
    show_run_report(path)
    assert '300 of 400' in (path / 'report.html').read_text()


@pytest.mark.parametrize(
    ('steps', 'sentence'), [(None, 'not a run directory'), (0, 'no logged step yet')]
)
def test_what_is_no_run_with_a_log_is_refused(steps, sentence, tmp_path):
    if steps is not None:
        written(tmp_path / 'run', steps, finished=False)
    with pytest.raises(ReportError, match=sentence):
        show_run_report(tmp_path / 'run')
