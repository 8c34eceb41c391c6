"""The page and the written files: structure, escaping, and nothing from elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from qkattn.errors import ReportError
from qkattn.report import documents, write_report
from qkattn.report.figures import figures
from qkattn.report.figures.style import DARK, HUES, INK, LIGHT, colour, distinct, short, styles
from qkattn.verdict import find, load_study
from tests.report.conftest import BASE, HOSTILE, LONG, Page, arms, scaled, shifted
from tests.studies import (
    probe_record,
    translation_record,
    trial_record,
    tuned_arm,
    write_study,
    write_tuned,
)

ROOT = Path(__file__).parents[2]
FILES = ['table.csv', 'table.md', 'table.tex', 'table.txt', 'trials.csv']
LATE = ('late/vo', 'd_model=128', 'screening', 'learning_rate')


def grid(variants, sizes=(64,), seeds=(0, 1)):
    return [
        trial_record(v, f'd_model={d}', s, val_loss=2 + 0.02 * i + 0.01 * s - d / 512, d_model=d)
        for d in sizes
        for i, v in enumerate(variants)
        for s in seeds
    ]


@pytest.fixture(scope='module')
def report(tmp_path_factory):
    """A tuned study, written once with all its figures."""
    path = tmp_path_factory.mktemp('tuned') / 'study'
    records = [*arms(), *tuned_arm(LONG, losses=shifted(0.1))]
    return write_report(write_tuned(path, records, declared=[LATE], num_evals=4))


@pytest.fixture(scope='module')
def html(report):
    return report.read_text()


def quick(path):
    """The page of a study whose figures are not rendered."""
    study = load_study(path)
    found = find(study)
    return documents(study, found, figures(study, found), {})['report.html']


def part(html, anchor):
    """The text of one section."""
    (found,) = re.findall(rf'<section id="{anchor}">.*?</section>', html, re.DOTALL)
    return Page(found).text


def test_page_is_well_formed_and_self_contained(html):
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {'script', 'link', 'img', 'iframe', 'object'}
    for _, attrs in page.tags:
        for name, value in attrs.items():
            if name in ('src', 'href', 'xlink:href', 'action'):
                assert value.startswith('#'), value
    assert 'http' not in html and '@import' not in html
    targets = re.findall(r'url\((.*?)\)', html)
    assert targets and all(target.startswith('#') for target in targets)
    used = {attrs['xlink:href'] for tag, attrs in page.tags if tag == 'use'}
    anchors = {attrs['href'] for tag, attrs in page.tags if tag == 'a'}
    assert used and anchors and {x[1:] for x in used | anchors | set(targets)} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert sum(tag == 'svg' for tag, _ in page.tags) == 4
    assert f'<span class="long">{LONG}</span>' in html
    assert '<strong>better</strong> than qk/vo' in html[: html.index('<nav>')]


def test_figures_follow_the_theme(html):
    svg = html[html.index('<svg') :]
    assert 'var(--ink)' in svg and re.search(r'var\(--hue-\d\)', svg)
    for name, value in LIGHT.items():
        assert value not in svg
        assert html.count(f'--{name}:#') == 3  # light, dark, print


def test_every_seed_is_drawn(html):
    # A collection of dots for each variant, below those of the means: one mark for each seed.
    dots = re.findall(r'<g id="losses-PathCollection_\d+">(.*?)</g>\s*</g>', html, re.DOTALL)
    assert [group.count('<use') for group in dots][:6] == [8] * 6


def test_files_are_complete_and_figures_drawn(report):
    names = sorted(path.name for path in report.parent.iterdir() if path.is_file())
    inputs = ['ledger.jsonl', 'lock', 'plan.jsonl', 'report.html', 'results.jsonl', 'study.json']
    assert names == [*inputs, *FILES, 'yardsticks.json']
    stems = ['curves', 'losses', 'sweep_learning_rate', 'verdicts']
    files = sorted(path.name for path in (report.parent / 'plots').iterdir())
    kinds = ('pdf', 'png', 'svg')
    assert files == sorted(f'{stem}.{kind}' for stem in stems for kind in kinds)
    for stem in stems:
        image = imread(report.parent / 'plots' / f'{stem}.png')[..., :3]
        assert image.shape[0] > 150 and image.shape[1] > 550
        assert np.mean(np.any(image < 0.9, axis=-1)) > 0.01
        # Nothing is cut off: the outermost pixels are background.
        edge = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
        assert np.all(edge > 0.99)
        paper = (report.parent / 'plots' / f'{stem}.svg').read_text()
        assert paper.startswith('<?xml') and 'xmlns="http://www.w3.org/2000/svg"' in paper
        assert 'var(--' not in paper and 'fill="#ffffff"' in paper and 'date' not in paper
        vectors = (report.parent / 'plots' / f'{stem}.pdf').read_bytes()
        # Fonts that journals take, no bitmap, and no date.
        assert vectors.startswith(b'%PDF') and b'/CIDFontType2' in vectors
        assert not any(
            word in vectors for word in (b'/Type3', b'/Subtype /Image', b'/CreationDate')
        )


def test_same_files_give_the_same_report_and_no_other_figure_stays(report):
    plots = report.parent / 'plots'
    before = {path.name: path.read_bytes() for path in plots.iterdir()} | {'': report.read_bytes()}
    (plots / 'bowl.svg').write_text('<svg></svg>')
    page = write_report(report.parent)
    files = {path.name: path.read_bytes() for path in plots.iterdir()} | {'': page.read_bytes()}
    assert files == before


def test_hostile_names_are_escaped(study_dir):
    changes = {'question': '<img src=x onerror=alert(1)>', 'name': '</title><script>1</script>'}
    page = Page(quick(write_study(study_dir, grid(['qk/vo', HOSTILE]), **changes)))
    assert not {tag for tag, _ in page.tags} & {'script', 'b', 'img'}
    assert HOSTILE.split('\n')[0] in page.text and changes['question'] in page.text


def test_what_blocks_stands_after_the_verdict(study_dir):
    records = [
        r for v in ('qk/vo', 'b/vo') for r in tuned_arm(v, losses=BASE, seeds=range(95, 103))
    ]
    html = quick(write_tuned(study_dir, records, seeds=list(range(95, 103))))
    box = html.index('In the way of a verdict')
    assert html.index('class="verdict"') < box < html.index('<figure')
    assert 'share seeds 100 and 101' in html[box : html.index('<figure')]
    assert 'blocks a verdict: Screening and verdict share seeds' in part(html, 'hygiene')


def test_scaling_prints_numbers_or_the_reason(study_dir):
    html = quick(write_tuned(study_dir, scaled(1.2)))
    assert re.search(r'b/vo 1\.\d{3} \[.*\] .* 1\.(19|20)\d \[1\.', part(html, 'scaling'))
    few = [r for r in scaled(1.2) if r['size'] in ('d_model=32', 'd_model=64')]
    html = quick(write_tuned(study_dir / 'few', few))
    assert 'a scaling law needs 4 sizes or more, there are 2' in part(html, 'scaling')
    lost = [
        trial_record(v, s, val_loss=None) for s in ('small', 'large') for v in ('qk/vo', 'b/vo')
    ]
    html = quick(write_study(study_dir / 'lost', lost))
    assert 'No scaling law: no arm has a size' in part(html, 'table')
    assert 'No trial has finished.' in html and 'diverged 4 of 4 trials' in Page(html).text


@pytest.mark.parametrize(('cache', 'said'), [(512, '512 0.50'), (None, '- -')])
def test_costs_are_relative_to_the_baseline(study_dir, cache, said):
    records = [trial_record('qk/vo'), trial_record('b/vo')]
    for record in records[1:] if cache else records:
        record['cache_floats_per_token'] = cache
    html = quick(write_study(study_dir, records))
    assert re.search(rf'b/vo d_model=128 .* 1\.00 {said}', part(html, 'costs'))


@pytest.mark.parametrize('baseline', [None, 'absent/vo'])
def test_without_a_baseline_result(study_dir, baseline):
    changes = {'variants': ['absent/vo', 'b/vo', 'c/vo']}
    html = quick(write_study(study_dir, grid(['b/vo', 'c/vo']), baseline=baseline, **changes))
    assert 'Difference from the baseline' not in html
    said = 'No difference at d_model=64: the baseline absent/vo has no finished trial there.'
    assert (said in html) == (baseline is not None)


@pytest.mark.parametrize(
    ('record', 'data', 'heading'),
    [
        (translation_record, 'pairs-de-en/de → pairs-de-en/en 1.0.0', 'Test BLEU'),
        (probe_record, 'recall 1 (pairs=8, length=32)', 'Test accuracy'),
    ],
)
def test_pages_of_other_tasks(study_dir, record, data, heading):
    html = quick(write_study(study_dir, [record('qk/vo'), record('b/vo')]))
    text = Page(html).text
    assert f'data {data} parameters' in text and f'Results {heading} ' in text


def test_provenance_is_flat_and_short(study_dir):
    devices = {'platform': 'gpu', 'kind': 'H200', 'count': 8}
    records = [
        trial_record(f'v{i}/vo', provenance={'started': f'12:0{i}', 'devices': devices})
        for i in range(5)
    ]
    text = Page(quick(write_study(study_dir, records))).text
    assert 'device 8 x H200' in text and 'devices: count 8' in text
    assert '12:02 (1 of 5 runs) and 2 more' in text and '12:03' not in text


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize('palette', [LIGHT, DARK])
def test_hues_stand_out_from_the_page(palette):
    surface = luminance(palette['surface'])
    for index in range(len(HUES)):
        low, high = sorted((luminance(palette[f'hue-{index}']), surface))
        assert (high + 0.05) / (low + 0.05) >= 3


def test_a_variant_has_the_colour_of_its_name_unless_an_arm_before_it_has():
    # A Score or Value that is registered between others would change colours: append it.
    names = {
        'qk/vo': INK,
        'qk/no_v': HUES[4],
        'qk/no_o': HUES[5],
        'shared_qk/vo': HUES[2],
        'query_free/vo': HUES[0],
        'key_free/vo': HUES[1],
    }
    for order, baseline in ((list(names), 'qk/vo'), ([*names][::-1], 'qk/no_v')):
        look = styles(order, baseline)
        assert {name: look[name]['color'] for name in names} == names
    twins = ('key_free/vo', 'merged/vo')
    assert len({colour(name) for name in twins}) == 1
    look = styles(['qk/vo', *twins], 'qk/vo')
    assert [look[name]['color'] for name in twins] == [HUES[1], HUES[2]]
    # Options change the colour, too.
    kinds = ['shared_qk/vo', 'shared_qk(self_mask=True)/vo', 'shared_qk/vo?num_kv_heads=1']
    assert HUES[2] not in {colour(kind) for kind in kinds[1:]}


def test_variants_differ_in_colour_or_in_marker_and_dashes():
    look = styles(['qk/vo', *map(str, range(99))], 'qk/vo')
    kinds = {(x['color'], x['marker'], str(x['linestyle'])) for x in look.values()}
    assert len(kinds) == 100
    few = list(look.values())[: 1 + len(HUES)]
    assert len({style['color'] for style in few}) == len({s['marker'] for s in few}) == len(few)
    assert {style['linestyle'] for style in few} == {'solid'}


def test_long_names_keep_both_ends():
    assert len(short(LONG)) <= 34
    assert short(LONG).startswith('my_package') and short(LONG).endswith('kv_heads=1')


def test_long_names_are_cut_where_they_do_not_differ():
    names = [f'qk/vo?normalizer=mine:{n}&num_kv_heads=1&window=8' for n in ('Square', 'Cubic')]
    assert len({*map(short, names)}) == 1
    cut = distinct(names)
    assert len({*cut}) == 2 and max(map(len, cut)) <= 34 and cut[0].startswith('qk')
    assert distinct(['qk/vo', 'x' * 40]) == ['qk/vo', short('x' * 40)]
    assert distinct([names[0]] * 2) == [short(names[0])] * 2


def run_command(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, '-m', 'experiments.report', *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_command_prints_table_and_path(study_dir):
    done = run_command(f'--study={write_study(study_dir, grid(["qk/vo", "b/vo"]))}')
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f'report: {study_dir / "report.html"}'
    assert 'b/vo' in done.stdout and '+0.0200 [' in done.stdout


def test_a_report_that_fails_leaves_nothing(study_dir):
    study_dir.mkdir()
    with pytest.raises(ReportError, match='does not exist'):
        write_report(study_dir)
    assert list(study_dir.iterdir()) == []


def test_reports_need_no_jax():
    code = 'import sys, qkattn.report, qkattn.report.verify; assert "jax" not in sys.modules'
    subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)
