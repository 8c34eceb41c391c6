"""The written report: a self-contained page, figures with something in them, the command line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from qkattn.errors import ReportError
from qkattn.report import find, load_study, write_report
from qkattn.report.figures.plots import figures
from qkattn.report.figures.style import HUES, HUES_DARK, SVG_COLOURS, short, styles
from tests.studies import trial_record, write_study

from .pages import Page, assert_drawn

ROOT = Path(__file__).parents[2]


def grid(variants, sizes=(64, 128), seeds=(0, 1)):
    return [
        trial_record(v, f'd_model={d}', s, val_loss=2 + 0.02 * i + 0.01 * s - d / 512, d_model=d)
        for d in sizes
        for i, v in enumerate(variants)
        for s in seeds
    ]


@pytest.fixture(scope='module')
def report(tmp_path_factory):
    records = grid(['qk/vo', 'merged_qk/vo', 'qk/vo?num_kv_heads=1'])
    records.append(trial_record('qk/vo', 'd_model=64', 2, val_loss=None, d_model=64))
    path = tmp_path_factory.mktemp('report') / 'study'
    return write_report(write_study(path, records, declared=[('qk/merged_vo', 'd_model=64')]))


def test_page_is_self_contained(report):
    html = report.read_text()
    page = Page(html)
    names = {tag for tag, _ in page.tags}
    assert not names & {'script', 'link', 'img', 'iframe', 'object'}
    for _, attrs in page.tags:
        for name, value in attrs.items():
            if name in ('src', 'href', 'xlink:href', 'action'):
                assert value.startswith('#'), value
    assert 'http' not in html and '@import' not in html
    assert all(target.startswith('#') for target in re.findall(r'url\((.*?)\)', html))
    assert sum(tag == 'svg' for tag, _ in page.tags) == 5
    assert len(page.ids) == len(set(page.ids))


def test_references_inside_figures_resolve(report):
    page = Page(report.read_text())
    wanted = {attrs['xlink:href'][1:] for tag, attrs in page.tags if tag == 'use'}
    wanted |= set(re.findall(r'url\(#(.*?)\)', report.read_text()))
    assert wanted and wanted <= set(page.ids)


def test_page_shows_facts_table_and_missing_runs(report):
    text = ' '.join(' '.join(Page(report.read_text()).text).split())
    study = load_study(report.parent)
    assert 'Does attention need all four matrices' in text
    assert '6 of 7 runs, 13 trials' in text and 'stdlib 3.11.7' in text and '2 x cpu' in text
    row = next(row for row in find(study).arms if row.variant == 'merged_qk/vo')
    bits = row.over_seeds('val_bits_per_byte')
    assert f'{bits.mean:.4f} ± {bits.sd:.4f}' in text
    assert f'{row.example.parameters["total"]:,}' in text and 'abc1234' in text
    assert 'qk_merged_vo-d_model_64-12 qk/merged_vo d_model=64 not started' in text


def test_figures_follow_the_theme(report):
    html = report.read_text()
    svg = html[html.index('<svg') :]
    assert 'var(--ink)' in svg and 'var(--hue-0)' in svg
    for colour in SVG_COLOURS:
        assert colour not in svg
    for name in SVG_COLOURS.values():
        assert html.count(f'--{name}:#') == 3  # light, dark, print


def test_hostile_names_are_escaped(study_dir):
    hostile = '<script>alert("x")</script>--><b>&amp;$\\frac$'
    records = grid(['qk/vo', hostile], sizes=(64,))
    changes = {'question': '<img src=x onerror=alert(1)>', 'name': '</title><script>1</script>'}
    path = write_report(write_study(study_dir, records, **changes))
    page = Page(path.read_text())
    assert not {tag for tag, _ in page.tags} & {'script', 'b', 'img'}
    assert hostile in page.text and changes['question'] in page.text


def test_pngs_are_drawn(report):
    plots = sorted((report.parent / 'plots').glob('*.png'))
    names = ['curves_1', 'curves_2', 'differences', 'loss_parameters', 'losses']
    assert [path.stem for path in plots] == names
    drawn = sorted(path.name for path in (report.parent / 'plots').iterdir())
    assert drawn == sorted(f'{name}.{kind}' for name in names for kind in ('png', 'svg'))
    for path in plots:
        assert path.read_bytes().startswith(b'\x89PNG\r\n\x1a\n')
        assert_drawn(path, least=0.01)


def test_files_are_whole_and_alone(report):
    names = sorted(path.name for path in report.parent.iterdir() if path.is_file())
    expected = ['plan.jsonl', 'report.html', 'results.jsonl', 'study.json']
    expected += ['table.csv', 'table.md', 'table.tex', 'table.txt']
    assert names == expected


def test_same_files_give_the_same_report(report):
    before = report.read_bytes()
    assert write_report(report.parent).read_bytes() == before


def test_every_seed_is_drawn(report):
    html = report.read_text()
    # One collection of dots for each variant and size, with one mark for each seed.
    dots = re.findall(r'<g id="losses-PathCollection_\d+">(.*?)</g>\s*</g>', html, re.DOTALL)
    assert [group.count('<use') for group in dots] == [2] * 6


@pytest.mark.parametrize('matched', ['total', 'non_embedding', None])
def test_target_line_only_where_the_axis_counts_it(study_dir, matched):
    records = grid(['qk/vo', 'b/vo'], sizes=(64,))
    html = write_report(write_study(study_dir, records, matched=matched)).read_text()
    assert ('The dashed line marks the target count' in html) == (matched == 'total')


def test_many_variants_get_their_own_panels(study_dir):
    variants = ['qk/vo'] + [f'variant_{index}/vo' for index in range(29)]
    study = load_study(write_study(study_dir, grid(variants, sizes=(64,)), num_evals=4))
    drawn = {figure.stem: figure for figure in figures(study, find(study))}
    path = study_dir / 'curves.png'
    path.write_bytes(drawn['curves'].png)
    assert_drawn(path, least=0.01)
    look = styles(study.variants, study.baseline)
    assert len({(style.colour, style.marker) for style in look.values()}) == 30


def test_all_diverged_still_reports(study_dir):
    records = [trial_record('qk/vo', val_loss=None), trial_record('b/vo', val_loss=None)]
    path = write_report(write_study(study_dir, records))
    text = ' '.join(' '.join(Page(path.read_text()).text).split())
    assert 'No trial has finished.' in text and 'diverged 2 of 2 trials' in text


@pytest.mark.parametrize('baseline', [None, 'absent/vo'])
def test_without_a_baseline_result(study_dir, baseline):
    changes = {'variants': ['absent/vo', 'b/vo', 'c/vo']}
    write_study(study_dir, grid(['b/vo', 'c/vo'], sizes=(64,)), baseline=baseline, **changes)
    html = write_report(study_dir).read_text()
    assert 'Difference to the baseline' not in html
    said = 'No difference at d_model=64: the baseline absent/vo has no finished trial there.'
    assert (said in html) == (baseline is not None)


def test_provenance_is_flat_and_short(study_dir):
    records = [
        trial_record(
            f'v{index}/vo',
            provenance={
                'started': f'12:0{index}',
                'git': {'commit': 'abc', 'dirty': False},
                'devices': {'platform': 'gpu', 'kind': 'H200', 'count': 8},
            },
        )
        for index in range(5)
    ]
    text = ' '.join(Page(write_report(write_study(study_dir, records)).read_text()).text)
    text = ' '.join(text.split())
    assert 'device 8 x H200' in text and 'git: commit abc' in text
    assert '12:02 (1 of 5 runs) and 2 more' in text and '12:03' not in text


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(('hues', 'surface'), [(HUES, '#fffffe'), (HUES_DARK, '#15181d')])
def test_hues_stand_out_from_the_page(hues, surface):
    for hue in hues:
        low, high = sorted((luminance(hue), luminance(surface)))
        assert (high + 0.05) / (low + 0.05) >= 3


def test_long_names_keep_both_ends():
    name = 'my_package.my_module:MyScore/my_package.other:MyValue?num_kv_heads=1'
    assert len(short(name)) <= 34
    assert short(name).startswith('my_package') and short(name).endswith('kv_heads=1')


def run_command(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, '-m', 'experiments.report', *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_command_prints_table_and_path(study_dir):
    write_study(study_dir, grid(['qk/vo', 'b/vo'], sizes=(64,)))
    done = run_command(f'--study={study_dir}')
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f'report: {study_dir / "report.html"}'
    assert 'b/vo' in done.stdout and '+0.0200 [' in done.stdout


@pytest.mark.parametrize(
    ('made', 'said'), [(False, 'does not exist.'), (True, 'has no results yet')]
)
def test_command_fails_in_one_sentence(study_dir, made, said):
    if made:
        write_study(study_dir, [], declared=[('qk/vo', 'd_model=64')])
    done = run_command(f'--study={study_dir}')
    assert done.returncode == 2
    assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_write_report_leaves_nothing_when_it_fails(study_dir):
    study_dir.mkdir()
    with pytest.raises(ReportError):
        write_report(study_dir)
    assert list(study_dir.iterdir()) == []
