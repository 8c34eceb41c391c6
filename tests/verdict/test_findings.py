"""Arms, sweeps, scaling fits and the parts of a difference."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats

from qkattn.config import (
    Config,
    ControlsConfig,
    ModelConfig,
    OptimizerConfig,
    Study,
    TrainConfig,
    TrialsConfig,
    TuningConfig,
)
from qkattn.model import cost
from qkattn.stats.sweep import fit
from qkattn.storage import ledger
from qkattn.storage.records import to_jsonable
from qkattn.study import plan
from qkattn.study.arm_key import EQUAL_SHAPE, LONGER
from qkattn.study.arms import build_arms
from qkattn.study.tuning import KNOBS, tune
from qkattn.verdict import Decision, NotScaled, RemarkCode, find, judging, load_study
from tests.studies import (
    RATES,
    edit_plan,
    run_name,
    trial_record,
    tuned_arm,
    write_documents,
    write_study,
    write_tuned,
    write_yardsticks,
)

SIZE = 'd_model=128'
BASE = 2 + 0.05 * np.arange(8)
NOISE = 0.001 * np.array([3, -1, 2, 0, -2, 1, -3, 1])
PARTS = ('removing', 'reinvesting', 'longer')


def arm(variant, delta, **keywords):
    return tuned_arm(variant, losses=list(BASE + delta + NOISE * (delta != 0)), **keywords)


def found_in(directory):
    return find(load_study(directory))


def seeds_of(variant, losses, **changes):
    return [trial_record(variant, seed=s, val_loss=v, **changes) for s, v in losses.items()]


# Arms


def test_means_and_intervals_over_shared_seeds(study_dir):
    # The other variant's seeds come in another order than the baseline's.
    base, other = {0: 2.00, 1: 2.10, 2: 2.30}, {2: 2.38, 0: 2.05, 1: 2.12, 9: 1.0}
    records = seeds_of('qk/vo', base) + seeds_of('b/vo', other)
    records += seeds_of('dead/vo', {0: None, 1: None})
    baseline, arm, dead = found_in(write_study(study_dir, records)).arms
    assert baseline.is_baseline and baseline.difference is None
    assert baseline.val_loss.mean == pytest.approx(6.4 / 3) and arm.verdict is None
    assert baseline.over_seeds('val_bits_per_byte').mean == pytest.approx(6.4 / 3 / math.log(2))
    # Differences 0.05, 0.02, 0.08: mean 0.05, sd 0.03.
    assert arm.differences == pytest.approx((0.05, 0.02, 0.08))
    assert (arm.difference.mean, arm.difference.sd) == pytest.approx((0.05, 0.03))
    half = stats.t.ppf(0.975, 2) * 0.03 / math.sqrt(3)
    assert (arm.difference.low, arm.difference.high) == pytest.approx((0.05 - half, 0.05 + half))
    correlation = np.corrcoef([2.0, 2.1, 2.3], [2.05, 2.12, 2.38])[0, 1]
    assert arm.comparison.correlation == pytest.approx(correlation)
    assert dead.val_loss is dead.learning_rate is dead.difference is None
    assert dead.num_diverged == 2


def test_best_learning_rate_by_mean_val_loss(study_dir):
    records = seeds_of('b/vo', {0: 9.0, 1: 9.0}) + seeds_of('b/vo', {0: 2.4}, learning_rate=3e-2)
    for rate, values in {1e-3: (2.0, 2.4), 3e-3: (2.1, 2.2), 1e-2: (1.0, None)}.items():
        records += seeds_of('qk/vo', dict(enumerate(values)), learning_rate=rate)
    arm, other = found_in(write_study(study_dir, records)).arms
    # 1e-3 holds the lowest single loss that finished everywhere, 1e-2 a lucky seed: neither wins.
    assert arm.learning_rate == 3e-3 and arm.val_loss.mean == pytest.approx(2.15)
    assert arm.learning_rates == (1e-3, 3e-3, 1e-2)
    assert not arm.at_edge and arm.num_diverged == 1
    assert other.at_edge and other.difference.mean == pytest.approx(0.3)


def test_only_trials_of_the_stage_that_decides_count(study_dir):
    records = tuned_arm('qk/vo', losses=[2.0 + 0.01 * seed for seed in range(8)])
    for record in records[:10]:
        record['val_loss'] = 0.5  # far below the verdict's
    records += seeds_of('qk/vo', dict.fromkeys(range(8), 1.0))  # of no screening and no verdict
    (arm,) = found_in(write_tuned(study_dir / 'a', records)).arms
    assert {trial.stage for trial in arm.chosen} == {'verdict'} and len(arm.trials) == 26
    assert arm.val_loss.mean == pytest.approx(2.035) and arm.of_runs('train_seconds') == [12.5]
    (arm,) = found_in(write_study(study_dir / 'b', records)).arms
    assert arm.val_loss.mean == 1.0 and len(arm.chosen) == len(arm.verdict_trials) == 8
    (arm,) = found_in(write_tuned(study_dir / 'c', records[:10])).arms
    assert arm.chosen == arm.verdict_trials == () and arm.val_loss is None


# Sweeps


TUNED = {'learning_rate': RATES, 'weight_decay': (0.05, 0.1, 0.2), 'score_scale': (0.5, 1.0, 2.0)}
GRIDS = dict.fromkeys(KNOBS, (1.0,)) | TUNED
OPTIMA = (4e-3, 0.3, 1.25)


def test_sweeps_and_settings_are_those_of_the_plan(study_dir):
    """A rate on the grid is chosen, so that one trial belongs to the sweeps of two knobs."""
    limits = TuningConfig(seeds=(100, 101), max_points=5, max_seeds=2)
    runs, measured, records = {}, {}, []
    while (tuned := tune(GRIDS, limits, measured)).knob:
        for at in map(tuned.at, tuned.values):
            away = sum(np.log(value / best) ** 2 for value, best in zip(at, OPTIMA, strict=False))
            measured[at] = {seed: 2 + 0.1 * away + 0.01 * seed for seed in (100, 101)}
            runs[at] = tuned.knob, measured[at]
    runs[tuned.settings] = None, dict(enumerate(BASE))
    for at, (knob, losses) in runs.items():
        about = {'stage': 'screening' if knob else 'verdict', 'knob': knob, 'run': f'run {at}'}
        for seed, loss in losses.items():
            trial = {'seed': seed, 'learning_rate': at[0], 'weight_decay': at[1]}
            records.append(trial_record('qk/vo', val_loss=loss, trial=trial, **about))
    grids = {f'tuning__{knob}s': values for knob, values in GRIDS.items()}
    write_tuned(study_dir, records, **grids)
    for at in runs:
        edit_plan(study_dir, f'run {at}', model__score_scale=at[2])
    (arm,) = found_in(study_dir).arms
    assert arm.sweeps == tuned.sweeps and list(arm.sweeps) == list(TUNED)
    assert arm.sweeps['weight_decay'].values == (0.05, 0.1, 0.2, 0.4, 0.8)
    assert tuned.settings[:3] == pytest.approx(OPTIMA, rel=1e-2) and tuned.settings[0] == 4e-3
    assert arm.blocks == arm.not_bracketed == ()


@pytest.mark.parametrize(
    ('seeds', 'trial'),
    [
        # Knobs that are tuned later are at the middle of their grids.
        ((100, 101), {'learning_rate': 32e-3, 'weight_decay': 0.3}),
        # A seed that was not declared.
        ((102,), {'learning_rate': 1e-3, 'weight_decay': 0.1}),
    ],
)
def test_trials_at_other_settings_or_seeds_enter_no_sweep(study_dir, seeds, trial):
    other = {'stage': 'screening', 'knob': 'learning_rate', 'val_loss': 0.1, 'run': 'x'}
    records = [trial_record('qk/vo', trial=trial | {'seed': s}, **other) for s in seeds]
    found = found_in(write_tuned(study_dir, arm('qk/vo', 0) + records))
    sweep = found.arms[0].sweeps['learning_rate']
    assert sweep.values == RATES and sweep.best == 4e-3


@pytest.mark.parametrize(
    ('whose', 'delta', 'decided'),
    [
        ('arm', -0.003, Decision.BETTER_BELOW_MARGIN),
        ('baseline', -0.003, Decision.EQUIVALENT),
        ('arm', 0.003, Decision.EQUIVALENT),
        ('baseline', 0.003, Decision.WORSE_BELOW_MARGIN),
    ],
)
def test_the_interval_includes_what_tuning_may_have_missed(study_dir, whose, delta, decided):
    records = {'baseline': arm('qk/vo', 0), 'arm': arm('b/vo', delta)}
    noisy, losses = records[whose], {}
    for record, extra in zip(
        noisy[:10], np.random.default_rng(4).normal(0, 0.012, 10), strict=True
    ):
        record['val_loss'] += extra
        trial = record['trial']
        losses.setdefault(trial['learning_rate'], {})[trial['seed']] = record['val_loss']
    sweep = fit(losses)
    for record in noisy[10:]:
        record['trial']['learning_rate'] = sweep.chosen
    assert sweep.bracketed and 0.001 < sweep.at_worst < 0.01
    found = found_in(write_tuned(study_dir, records['baseline'] + records['arm']))
    other = next(a for a in found.arms if a.is_baseline == (whose == 'arm'))
    errors = [sweep.at_worst, other.sweeps['learning_rate'].at_worst]
    low, high = errors if whose == 'arm' else errors[::-1]
    difference = found.arms[1].difference
    assert (difference.tuning_low, difference.tuning_high) == pytest.approx((low, high))
    half = stats.t.ppf(0.975, 7) * NOISE.std(ddof=1) / 8**0.5
    mean = delta + NOISE.mean()
    interval = mean - low - half, mean + high + half
    assert (difference.low, difference.high) == pytest.approx(interval)
    assert found.arms[1].verdict.decision is decided


# Scaling


def scaled(widths, loose=None):
    """Two arms by width on a scaling law; the baseline is not bracketed at the `loose` one."""
    records = []
    for d, (variant, worth) in itertools.product(widths, (('qk/vo', 1.0), ('b/vo', 1.5))):
        parameters = trial_record('qk/vo', d_model=d)['parameters']['total']
        law = 1.5 + 40 * (worth * parameters) ** -0.4
        losses = list(law + 0.0002 * (np.arange(8) - 3.5))
        optimum = 16e-3 if (variant, d) == ('qk/vo', loose) else 4e-3
        records += tuned_arm(variant, f's{d}', losses, optimum, d_model=d)
    return records


def test_scaling_over_sizes_that_are_bracketed_and_trained_enough(study_dir):
    records = scaled((32, 64, 128, 256, 512), loose=128)
    found = found_in(write_tuned(study_dir, records))
    base, other = found.scaling
    assert (len(base.fit.sizes), len(other.fit.sizes)) == (4, 5) and found.num_comparisons == 5
    assert base.fit.problem is None and base.multiplier is None
    assert base.fit.a.value == pytest.approx(0.4, rel=0.01)
    assert other.multiplier.value == pytest.approx(1.5, rel=0.01)
    (left_out,) = [a for a in found.arms if a.not_scaled]
    assert (left_out.size, left_out.not_scaled) == ('s128', NotScaled.NOT_BRACKETED)
    worst = max(a.loss.mean for a in found.arms if a.is_baseline)
    write_yardsticks(study_dir, records, losses={'test': {'5-gram': worst - 1e-6}})
    assert [len(scaling.fit.sizes) for scaling in found_in(study_dir).scaling] == [3, 4]
    diverged = [r for d in (64, 128) for r in tuned_arm('qk/vo', f's{d}', [None, 2.0], d_model=d)]
    none = found_in(write_tuned(study_dir / 'none', diverged))
    assert none.scaling == () and none.lacks_scaling


def test_why_an_arm_is_left_out_of_scaling_fits(study_dir):
    records = arm('qk/vo', 0) + tuned_arm('b/vo', losses=[None, *BASE[1:]])
    records += arm('d/vo', 0.1)[:10] + arm('e/vo', 0.1, learning_rate=1e-3)
    assert [a.not_scaled for a in found_in(write_tuned(study_dir, records)).arms] == [
        None,
        NotScaled.DIVERGED,
        NotScaled.NO_LOSSES,
        NotScaled.BLOCKED,
    ]


# Parts of a difference


def controlled(removing=-0.02, total=-0.03, longer=-0.01):
    """A baseline, an arm with both of its controls, and the baseline trained longer."""
    rates = {'rates': (2e-3, 4e-3, 8e-3), 'control': LONGER, 'num_steps': 1600}
    same_shape = arm('b/vo', removing, control=EQUAL_SHAPE)
    for record in same_shape:
        parameters = round(0.93 * record['target_parameters'])
        record['parameters'] = record['parameters'] | {'total': parameters}
        record['residual'] = parameters / record['target_parameters'] - 1
    records = arm('qk/vo', 0) + arm('b/vo', total) + same_shape
    records += tuned_arm('qk/vo', losses=list(BASE - 0.3), **rates)
    return records + tuned_arm('b/vo', losses=list(BASE - 0.3 + longer + 2 * NOISE), **rates)


def test_the_difference_is_the_sum_of_removing_and_reinvesting(study_dir):
    found = found_in(write_tuned(study_dir, controlled()))
    (parts,) = found.decomposition
    removing, reinvesting = parts.removing, parts.reinvesting
    assert removing.difference.mean == pytest.approx(-0.02 + NOISE.mean())
    assert reinvesting.difference.mean == pytest.approx(-0.01, abs=1e-12)
    sums = np.add(*(list(part.differences.values()) for part in (removing, reinvesting)))
    assert sums.tolist() == pytest.approx(found.arms[1].differences)
    interval = stats.t.interval(0.95, 7, np.mean(2 * NOISE) - 0.01, stats.sem(2 * NOISE))
    longer = parts.longer.difference
    assert (longer.low, longer.high) == pytest.approx(interval)
    # Controls get no verdict, and their residual and steps are their own.
    assert found.num_comparisons == 1 and not any(a.verdict for a in found.controls)
    assert [a.key.control for a in found.controls] == [EQUAL_SHAPE, LONGER, LONGER]
    assert [a.is_baseline for a in found.controls] == [False, True, False]
    codes = {remark.code for remark in found.remarks}
    assert codes == {RemarkCode.EVALUATION}
    # A longer arm is tuned around the rate of the primary one.
    assert [len(a.sweeps['learning_rate'].values) for a in found.controls] == [5, 3, 3]
    # Baselines that are not trained enough leave parts without a verdict.
    write_yardsticks(study_dir, controlled(), losses={'test': {'5-gram': 1.0}})
    found = found_in(study_dir)
    assert found.arms[1].verdict.decision is Decision.NO_VERDICT
    assert None not in [getattr(found.decomposition[0], name) for name in PARTS]


@pytest.mark.parametrize(
    ('variant', 'control', 'lost'),
    [
        ('b/vo', EQUAL_SHAPE, {'removing', 'reinvesting'}),
        ('qk/vo', LONGER, {'longer'}),
        ('b/vo', None, {'reinvesting'}),
        (None, None, set(PARTS)),
    ],
)
def test_an_arm_that_breaks_a_rule_is_no_part(study_dir, variant, control, lost):
    write_tuned(study_dir, controlled())
    one = run_name(variant, SIZE, 'verdict', control=control) if variant else None
    for run in load_study(study_dir).runs if one is None else ():
        edit_plan(study_dir, run.name, optimizer__schedule='constant')
    if one is not None:
        edit_plan(study_dir, one, optimizer__schedule='constant')
    found = found_in(study_dir)
    (parts,) = found.decomposition
    assert {name for name in PARTS if getattr(parts, name) is None} == lost
    decided = Decision.NO_VERDICT if control is None else Decision.BETTER
    assert found.arms[1].verdict.decision is decided


def test_an_arm_that_is_known_badly_is_a_part(study_dir):
    records = controlled()
    for record in records:
        if record['control'] == EQUAL_SHAPE:
            if record['stage'] == 'screening':
                record['val_loss'] = 2 - record['trial']['learning_rate']
            else:
                record['trial']['learning_rate'] = 16e-3
    found = found_in(write_tuned(study_dir, records))
    assert [r.code for r in found.controls[0].blocks] == [RemarkCode.NOT_BRACKETED]
    mean = found.decomposition[0].removing.difference.mean
    assert mean == pytest.approx(-0.02 + NOISE.mean())


def test_arms_of_several_destinations_share_a_control_of_equal_shape(study_dir):
    records = [*arm('qk/vo', 0), *arm('b/vo', -0.02, control=EQUAL_SHAPE)]
    for destination, delta in (('d_model', -0.03), ('d_ff', -0.01)):
        records += arm(f'b/vo [{destination}]', delta)
    write_tuned(study_dir, records, destinations=['d_model', 'd_ff'])
    first, second = found_in(study_dir).decomposition
    assert first.reinvesting.difference.mean == pytest.approx(-0.01)
    assert second.reinvesting.difference.mean == pytest.approx(0.01)
    assert first.removing.difference.mean == second.removing.difference.mean


# A study as the planner plans it, with made-up results

STUDY = Study(
    name='planned',
    base=Config(
        model=ModelConfig(num_layers=1, num_heads=2, context=16),
        optimizer=OptimizerConfig(warmup_steps=2),
        train=TrainConfig(num_steps=20, eval_every=10, checkpoint_every=10),
        trials=TrialsConfig(seeds=tuple(range(6)), learning_rates=(1e-3, 2e-3, 4e-3)),
    ),
    variants=('qk/vo', 'shared_qk/vo'),
    sizes=('d_model=32',),
    corpora=('stdlib', 'packages'),
    tolerance=1e-2,
    tuning=TuningConfig(seeds=(10, 11), max_points=6, max_seeds=4),
    controls=ControlsConfig(equal_shape=True, longer=2, longer_seeds=(20, 21, 22, 23)),
    looks=(3, 6),
)
EFFECTS = {None: -0.03, EQUAL_SHAPE: -0.02, LONGER: -0.04}
FIELDS = ('variant', 'size', 'corpus', 'control', 'stage', 'knob', 'run', 'study', 'residual')


def results_of(run):
    """Trials whose loss is a parabola in ln(learning rate) with a level and noise per seed."""
    key, model, results = run.arm.key, run.config.model, []
    for trial in run.config.trials.trials():
        random = np.random.default_rng([trial['seed'], len(key.variant), len(key.corpus)])
        loss = 2 + 0.01 * trial['seed'] + 0.1 * math.log(trial['learning_rate'] / 2e-3) ** 2
        if key.variant != STUDY.baseline:
            loss += EFFECTS[key.control] + random.normal(0, 0.0005)
        record = trial_record(key.variant, val_loss=loss, corpus=key.corpus)
        for name in (*FIELDS, 'target_parameters'):
            del record[name]
        shape = {'d_model': model.d_model, 'd_ff': model.mlp_width, 'num_layers': model.num_layers}
        record |= {'trial': trial, 'num_steps': run.config.train.num_steps, 'config_hash': run.id}
        record |= {'parameters': cost.count(model), 'config': shape}
        results.append(record | {'data': {'name': key.corpus, 'version': '1'}})
    return results


def test_what_is_planned_is_read_and_judged(tmp_path):
    arms = build_arms(STUDY)
    declared = to_jsonable(plan.declaration(STUDY, arms))
    ledger.declare(tmp_path, declared)
    (tmp_path / 'study.json').write_text(json.dumps(declared))
    runs = plan.runs(STUDY, arms, results_of)
    (tmp_path / 'plan.jsonl').write_text(plan.lines(STUDY, runs))
    (tmp_path / 'results.jsonl').write_text(plan.result_lines(STUDY, runs, results_of))
    for run in runs:
        (tmp_path / run.directory).mkdir(parents=True)
        write_documents(tmp_path / run.directory, results_of(run))
    results = (tmp_path / 'results.jsonl').read_text().splitlines()
    write_yardsticks(tmp_path, [json.loads(line) for line in results])
    study = load_study(tmp_path)
    assert study.problems == () and study.missing == () and study.looks == (3, 6)
    found = find(study)
    assert {r.code for r in found.remarks} <= {RemarkCode.EVALUATION, RemarkCode.FEW_SEEDS}
    verdicts = [a.verdict for a in found.arms if a.verdict]
    assert {(v.decision, v.num_comparisons) for v in verdicts} == {(Decision.BETTER, 2)}
    (overall,) = found.overall
    assert overall.verdict.decision is Decision.BETTER and len(overall.arms) == 2
    assert [parts.key.corpus for parts in found.decomposition] == ['stdlib', 'packages']
    for parts in found.decomposition:
        means = [getattr(parts, name).difference.mean for name in PARTS]
        assert means == pytest.approx([-0.02, -0.01, -0.04], abs=0.002)
        assert list(parts.longer.differences) == [20, 21, 22, 23]
    longer = [a for a in found.controls if a.control == LONGER]
    assert {a.example.planned_steps for a in longer} == {40} and len(longer) == 4
    baseline = next(a for a in longer if a.is_baseline)
    arm = next(a for a in longer if not a.is_baseline and a.corpus == baseline.corpus)
    verdict = judging.pair(study, arm, baseline, (), 1)
    assert (verdict.decision, verdict.num_seeds) == (Decision.BETTER, 4)
    # With the results of a first look alone, verdicts are those of that look.
    later = {run.name for run in study.runs if run.stage == 'verdict' and 5 in run.seeds}
    of_look = tuple(
        dataclasses.replace(run, trials=() if run.name in later else run.trials)
        for run in study.runs
        if run.key.control != LONGER
    )
    found = find(dataclasses.replace(study, runs=of_look))
    assert {a.verdict.num_seeds for a in found.arms if a.verdict} == {3}
    (remark,) = [r for r in found.remarks if r.code is RemarkCode.LOOK_IN_PROGRESS]
    assert (remark.data['look'], remark.data['reached']) == (2, 0)
