"""The printed tables: every number recomputed from the records, and the notes under them."""

import csv
import io
import math
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest

from qkattn.report import find, headline, load_study, report_text, write_report
from qkattn.report.csvfile import csv_table
from qkattn.report.notes import notes
from qkattn.report.sentences import found_in, held_equal
from qkattn.report.tables import markdown_table, si, text_table
from tests.studies import (
    edit_plan,
    probe_record,
    translation_record,
    trial_record,
    tuned_arm,
    write_study,
    write_tuned,
)

QUICKSTART = Path(__file__).parents[2] / 'experiments/results/quickstart'

LOSSES = {'qk/vo': (2.00, 2.10, 2.30), 'merged_qk/vo': (2.05, 2.12, 2.38)}


@pytest.fixture
def study(study_dir):
    records = [
        trial_record(variant, seed=seed, val_loss=loss)
        for variant, losses in LOSSES.items()
        for seed, loss in enumerate(losses)
    ]
    records.append(trial_record('merged_qk/vo', seed=3, learning_rate=3e-3, val_loss=None))
    declared = [('qk/merged_vo', 'd_model=128')]
    return load_study(write_study(study_dir, records, declared=declared))


def of(study):
    return find(study)


def runs(line):
    return [run.strip() for run in line.strip('|').split(' | ')]


def test_every_number_of_the_table(study):
    lines = markdown_table(of(study)).splitlines()
    printed = dict(zip(runs(lines[0]), runs(lines[3]), strict=True))
    record = trial_record('merged_qk/vo')
    bits = [loss / 0.6931471805599453 for loss in LOSSES['merged_qk/vo']]
    test_bits = [(loss + 0.1) / 0.6931471805599453 for loss in LOSSES['merged_qk/vo']]
    parameters = record['parameters']
    assert printed == {
        'variant': 'merged_qk/vo',
        'size': 'd_model=128',
        'val bits/byte mean ± sd': f'{statistics.mean(bits):.4f} ± {statistics.stdev(bits):.4f}',
        # Differences 0.05, 0.02, 0.08; half width 4.3027 * 0.03 / sqrt(3).
        'difference in val loss, nats/token [95 % t interval]': '+0.0500 [-0.0245, +0.1245]',
        'test bits/byte mean ± sd': (
            f'{statistics.mean(test_bits):.4f} ± {statistics.stdev(test_bits):.4f}'
        ),
        'seeds': '3',
        'learning rate': '0.001*',
        'parameters': f'{parameters["total"]:,}',
        'residual %': f'{100 * record["residual"]:+.3f}',
        'attention parameters': f'{parameters["attention"]:,}',
        'd_model': '128',
        'd_ff': '512',
        'FLOPs /token': f'{6 * parameters["total"] / 1e6:.2f}M',
        'cache floats/token': '1.02k',
        'tokens /s': '123k',
        'run s': '12.5',
        'diverged': '1/4',
    }


def test_the_quickstart_prints_as_committed(tmp_path):
    for name in ('study.json', 'plan.jsonl', 'results.jsonl'):
        shutil.copy(QUICKSTART / name, tmp_path)
    write_report(tmp_path)
    for name in ('table.md', 'table.csv'):
        assert (tmp_path / name).read_bytes() == (QUICKSTART / name).read_bytes(), name


def found(table):
    """Headings and runs between the names and the number of seeds, of the last row."""
    lines = [runs(line) for line in table.splitlines()]
    end = lines[0].index('seeds')
    return dict(zip(lines[0][2:end], lines[-1][2:end], strict=True))


@pytest.fixture
def translation(study_dir):
    records = [
        translation_record(variant, bleu, seed=seed)
        for variant, scores in (('qk/vo', (30, 32)), ('b/vo', (20.5, 21.5)))
        for seed, bleu in enumerate(scores)
    ]
    return load_study(write_study(study_dir, [*records, translation_record('b/vo', None, seed=2)]))


def test_translation_table(translation):
    assert found(markdown_table(of(translation))) == {
        'test BLEU mean ± sd': '21.00 ± 0.71',
        'test chrF mean ± sd': '41.00 ± 0.71',
        'test exact match, % mean ± sd': '10.50 ± 0.35',
        'val bits/byte mean ± sd': '2.8854 ± 0.0000',
        'difference in val loss, nats/token [95 % t interval]': '+0.0000 [+0.0000, +0.0000]',
        'test bits/byte mean ± sd': '3.0297 ± 0.0000',
    }


def test_translation_notes_say_once_how_scores_were_made(translation):
    text = report_text(translation, of(translation))
    bleu = 'BLEU: test split, from 0 to 100, 1,000 sentences, signature '
    assert text.count(f'{bleu}nrefs:1|case:lc|tok:13a|version:2.5.1.\n') == 1
    assert text.count('signature nrefs:1|case:lc|nc:6|version:2.5.1.\n') == 1
    assert 'Accuracy' not in text and '!' not in text


def test_translation_csv_is_in_the_units_of_the_records(translation):
    row = list(csv.DictReader(io.StringIO(csv_table(of(translation)))))[1]
    assert (row['test_bleu_mean'], row['test_exact_match_mean']) == ('21.0', '0.105')
    assert not any(name.startswith(('val_bleu', 'test_accuracy', 'test_loss')) for name in row)


def test_probe_table(study_dir):
    records = [
        probe_record(variant, accuracy) for variant, accuracy in (('qk/vo', 0.75), ('b/vo', 0.5))
    ]
    study = load_study(write_study(study_dir, records))
    assert found(markdown_table(of(study))) == {
        'test accuracy, % mean ± sd': '50.00',
        'test solved, % mean ± sd': '12.50',
        'val loss, nats/token mean ± sd': '0.5000',
        'difference in val loss, nats/token': '+0.2500',
        'test loss, nats/token mean ± sd': '0.6000',
    }
    assert 'Accuracy: the part of the targets' in ' '.join(notes(study, of(study)))
    row = next(csv.DictReader(io.StringIO(csv_table(of(study)))))
    assert row['test_accuracy_mean'] == '0.75' and 'val_bits_per_byte_mean' not in row


def test_csv_holds_unrounded_numbers(study):
    first, second = csv.DictReader(io.StringIO(csv_table(of(study))))
    assert first['is_baseline'] == '1' and first['difference_mean'] == ''
    assert float(second['difference_mean']) == pytest.approx(0.05)
    assert float(second['val_loss_mean']) == statistics.fmean(LOSSES['merged_qk/vo'])
    assert float(second['compile_seconds']) == 3.25
    assert second['seeds'] == '0 1 2'
    assert second['learning_rates_run'] == '0.001 0.003'


def test_text_is_aligned_and_fits_a_wide_terminal(study):
    lines = text_table(of(study)).splitlines()
    assert len(lines) == 5 and max(map(len, lines)) <= 210
    end = lines[2].index('  ', lines[2].index('  ') + 2)
    assert all(line[end : end + 2] == '  ' for line in lines)
    assert 'baseline' in lines[3]


def test_notes(study):
    said = ' '.join(notes(study, of(study)))
    assert 'Intervals (95 %, Student t) over 3 seeds are descriptive' in said
    assert 'never averaged: merged_qk/vo at d_model=128 1 of 4 trials.' in said
    assert 'Missing, 1: qk/merged_vo at d_model=128 (not started).' in said
    assert 'lowest mean val loss, of 0.001, 0.003' in said
    assert 'Not tuned, one learning rate only: qk/vo at d_model=128.' in said
    assert 'Matched between arms: total parameters; the largest residual is 0.015 %.' in said


def test_single_seed_prints_no_interval(study_dir):
    records = [trial_record('qk/vo'), trial_record('b/vo', val_loss=2.25)]
    study = load_study(write_study(study_dir, records, matched=None))
    text = report_text(study, of(study))
    assert '+0.2500' in text and '[' not in text and ' ± 0' not in text
    assert 'One seed: no interval can be given' in text
    assert 'not tuned per arm: each ran at one only (0.001)' in text
    assert 'Parameters are not matched' in text


def test_problems_are_printed(study_dir):
    write_study(study_dir, [trial_record('qk/vo')])
    with (study_dir / 'results.jsonl').open('a') as file:
        file.write('nonsense\n')
    study = load_study(study_dir)
    assert '! results.jsonl:2 is not JSON' in report_text(study, of(study))


def test_markdown_escapes_pipes(study_dir):
    study = load_study(write_study(study_dir, [trial_record('a|b')], baseline=None))
    assert markdown_table(of(study)).splitlines()[2].startswith('| a\\|b | ')


@pytest.mark.parametrize(
    ('value', 'text'),
    [
        (None, '-'),
        (0, '0'),
        (12.5, '12.5'),
        (999.6, '1.00k'),
        (4921812, '4.92M'),
        (123456, '123k'),
        (0.25, '0.25'),
        (2.5e15, '2.50P'),
    ],
)
def test_si(value, text):
    assert si(value) == text


LOSSES_OF_8 = [2 + 0.01 * seed for seed in range(8)]


@pytest.fixture
def tuned(study_dir):
    records = tuned_arm('qk/vo', losses=LOSSES_OF_8)
    losses = [loss - 0.02 - 0.001 * i for i, loss in enumerate(LOSSES_OF_8)]
    records += tuned_arm('b/vo', losses=losses, optimum=3e-3)
    records += tuned_arm('c/vo', losses=[x + 0.03 - 0.001 * i for i, x in enumerate(losses)])
    for record in records:
        record |= {'val_induction_gain': 1.25, 'val_induction_accuracy': 0.5}
    return load_study(write_tuned(study_dir, records))


def test_the_table_of_a_study_with_tuning(tuned):
    lines = markdown_table(of(tuned)).splitlines()
    printed = dict(zip(runs(lines[0]), runs(lines[3]), strict=True))
    # Differences -0.020 to -0.027: mean -0.0235, sd 0.0024495, t 0.975 at 7 is 2.3646.
    assert printed['difference in val loss, nats/token [95 % t interval]'] == (
        '-0.0235 [-0.0255, -0.0215]'
    )
    assert printed['verdict'] == 'better' and printed['p after Holm'] == '< 0.001'
    bits = statistics.fmean(LOSSES_OF_8) - 0.0235
    assert printed['val bits/byte mean ± sd'].startswith(f'{bits / 0.6931471805599453:.4f} ± ')
    assert printed['induction gain, nats/token mean ± sd'] == '1.250 ± 0.000'
    assert printed['induction accuracy, % mean ± sd'] == '50.0 ± 0.0'
    assert printed['tuned learning rate [95 % interval]'] == '0.003 [0.003, 0.003]'
    # A parabola of 0.1 ln(rate / optimum)^2 on five values, above its vertex.
    ratios = [rate / 3e-3 for rate in (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)]
    mean = sum(0.1 * math.log(ratio) ** 2 for ratio in ratios) / 5
    assert printed['learning rate sensitivity'] == f'{mean:.3f}'
    assert (printed['seeds'], printed['screening diverged'], printed['diverged']) == (
        '8',
        '0/10',
        '0/8',
    )


def test_detectable_difference_is_that_after_holm(tuned):
    found = of(tuned)
    lines = markdown_table(found).splitlines()
    printed = dict(zip(runs(lines[0]), runs(lines[3]), strict=True))
    verdict = found.arms[1].verdict
    assert printed['detectable difference'] == f'{verdict.detectable:.4f}'
    assert verdict.detectable > found.arms[1].difference.detectable


def test_csv_of_a_study_with_tuning(tuned):
    found = of(tuned)
    baseline, b, _ = csv.DictReader(io.StringIO(csv_table(found)))
    assert baseline['verdict'] == '' and b['verdict'] == 'better'
    arm = found.arms[1]
    for name, value in (
        ('difference_bootstrap_low', arm.difference.bootstrap_low),
        ('difference_p', arm.difference.p),
        ('p_holm', arm.verdict.p_holm),
        ('p_equivalence_holm', arm.verdict.p_equivalence_holm),
        ('detectable', arm.difference.detectable),
        ('detectable_holm', arm.verdict.detectable),
        ('learning_rate_optimum', arm.sweeps['learning_rate'].optimum),
        ('learning_rate_at_worst', arm.sweeps['learning_rate'].at_worst),
        ('weights_mlp', 8 * 4 * 128**2),
        ('val_loss_se', 0.0125),
        ('learning_rate', 3e-3),
    ):
        assert float(b[name]) == value, name
    assert (b['learning_rate_bracketed'], b['paired'], b['margin']) == ('1', '1', '0.005')
    assert (b['screening_seeds'], b['screening_trials'], b['trials']) == ('100 101', '10', '8')


def test_headline(tuned):
    found = of(tuned)
    table, _, sentence = headline(tuned, found).rstrip().rpartition('\n\n')
    lines = [runs(line.removesuffix(' |')) for line in table.splitlines()]
    titles = ['arm', 'difference in val loss, nats/token [95 %]', 'verdict', 'tuned learning rate']
    assert lines[0] == titles
    assert [line[0].removeprefix('| ') for line in lines[2:]] == ['qk/vo', 'b/vo', 'c/vo']
    assert lines[3][1:] == ['-0.0235 [-0.0255, -0.0215]', 'better', '0.003']
    assert sentence == held_equal(tuned, found)


def test_headline_of_a_study_without_tuning(study):
    lines = headline(study, of(study)).splitlines()
    assert 'verdict' not in lines[0] and 'tuned' not in lines[0]
    assert lines[3] == '| merged_qk/vo | +0.0500 [-0.0245, +0.1245] |'


def test_tuned_values_that_are_not_bracketed_are_marked(study_dir):
    records = tuned_arm('qk/vo') + tuned_arm('b/vo', optimum=16e-3)
    study = load_study(write_tuned(study_dir, records))
    text = report_text(study, of(study))
    assert '0.016*' in text and '* Not bracketed: ' in text
    assert 'Undecided, b/vo at d_model=128: ' in text


def test_notes_of_a_study_with_tuning(tuned):
    said = ' '.join(notes(tuned, of(tuned)))
    assert 'corrected after Holm over all 2 comparisons of the study' in said
    assert (
        'screening seeds 100 and 101; losses and differences are over the verdict seeds 0' in said
    )
    assert 'Not bracketed' not in said and 'descriptive' not in said
    assert 'one after another' not in said


def test_what_intervals_do_not_hold_is_noted(study_dir):
    """The largest at_worst of two noisy bowls, and of a third that bounds nothing."""
    records = [r for v in ('qk/vo', 'b/vo', 'c/vo') for r in tuned_arm(v, losses=LOSSES_OF_8)]
    for place, sd in enumerate((0.01, 0.05, 2.0)):
        noise = np.random.default_rng(0).normal(0, sd, 10)
        for record, extra in zip(records[18 * place :], noise, strict=False):
            record['val_loss'] += extra
    study = load_study(write_tuned(study_dir, records))
    found = of(study)
    at_worst = [arm.sweeps['learning_rate'].at_worst for arm in found.arms]
    assert at_worst[2] is None and at_worst[1] > at_worst[0]
    assert (
        'Intervals and words are given the settings found: screening may have missed the best ones '
        f'(within the 95 % intervals of the optima) by up to {at_worst[1]:.2g} nats/token '
        '(learning rate of b/vo at d_model=128), and 1 of 3 optima by an unknown amount; screening '
        "and verdict are evaluated on the same validation rows, while the test column's rows have "
        'chosen nothing.'
    ) in notes(study, found)


def test_several_knobs_are_tuned_one_after_another(study_dir):
    grids = {'tuning__weight_decays': [0.1, 0.2], 'tuning__score_scales': [1.0, 2.0]}
    study = load_study(write_tuned(study_dir, tuned_arm('qk/vo'), **grids))
    assert (
        'They were tuned one after another (learning rate, weight decay, score scale): each with '
        'those before it at what was found for them and those behind it at the middle of their '
        'grids, and not again.'
    ) in notes(study, of(study))


def test_an_arm_that_is_only_screened_is_in_every_table(study_dir):
    records = tuned_arm('qk/vo') + tuned_arm('b/vo', optimum=3e-3)[:10]
    study = load_study(write_tuned(study_dir, records))
    line = markdown_table(of(study)).splitlines()[3]
    assert '| no verdict | - |' in line and '| 0.003 [0.003, 0.003] |' in line
    assert 'verdict not started' in report_text(study, of(study))
    assert 'b/vo,' in csv_table(of(study)) and '| b/vo | - | no verdict |' in headline(
        study, of(study)
    )


def test_first_lines_are_what_was_found(tuned):
    found = of(tuned)
    lines = report_text(tuned, found).splitlines()
    assert lines[3 : 3 + len(found_in(tuned, found))] == list(found_in(tuned, found))
    edit_plan(tuned.directory, tuned.runs[3].name, residual=0.5)
    assert load_study(tuned.directory).problems
