"""A study as the planner plans it, with made-up results: what is planned is read and judged."""

import dataclasses
import json
import math

import numpy as np
import pytest

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
from qkattn.storage import ledger
from qkattn.storage.records import to_jsonable
from qkattn.study import plan
from qkattn.study.arms import build_arms
from qkattn.study.place import EQUAL_SHAPE, LONGER
from qkattn.verdict import Decision, RemarkCode, find, load_study
from tests.studies import trial_record, write_documents, write_yardsticks

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
    place, model = run.arm.place, run.config.model
    found = []
    for trial in run.config.trials.trials():
        random = np.random.default_rng([trial['seed'], len(place.variant), len(place.corpus)])
        loss = 2 + 0.01 * trial['seed'] + 0.1 * math.log(trial['learning_rate'] / 2e-3) ** 2
        if place.variant != STUDY.baseline:
            loss += EFFECTS[place.control] + random.normal(0, 0.0005)
        record = trial_record(place.variant, val_loss=loss, corpus=place.corpus)
        record = {name: value for name, value in record.items() if name not in FIELDS}
        record.pop('target_parameters')
        shape = {'d_model': model.d_model, 'd_ff': model.mlp_width, 'num_layers': model.num_layers}
        own = {'trial': trial, 'num_steps': run.config.train.num_steps, 'config_hash': run.id}
        own |= {'parameters': cost.count(model), 'config': shape}
        own |= {'data': {'name': place.corpus, 'version': '1'}}
        found.append(record | own)
    return found


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
    path, arms = tmp_path_factory.mktemp('planned'), build_arms(STUDY)
    declared = to_jsonable(plan.declaration(STUDY, arms))
    ledger.declare(path, declared)
    (path / 'study.json').write_text(json.dumps(declared))
    runs = plan.runs(STUDY, arms, results_of)
    (path / 'plan.jsonl').write_text(plan.lines(STUDY, runs))
    (path / 'results.jsonl').write_text(plan.result_lines(STUDY, runs, results_of))
    for run in runs:
        (path / run.directory).mkdir(parents=True)
        write_documents(path / run.directory, results_of(run))
    results = (path / 'results.jsonl').read_text().splitlines()
    write_yardsticks(path, [json.loads(line) for line in results])
    return path


def test_what_is_planned_is_read_and_judged(directory):
    study = load_study(directory)
    assert study.problems == () and study.missing == () and study.looks == (3, 6)
    found = find(study)
    assert not [remark for remark in found.remarks if remark.blocks]
    assert {r.code for r in found.remarks} <= {RemarkCode.EVALUATION, RemarkCode.FEW_SEEDS}
    words = {a.corpus: a.verdict for a in found.arms if a.verdict}
    assert [verdict.decision for verdict in words.values()] == [Decision.BETTER] * 2
    assert found.num_comparisons == 2 and {v.num_comparisons for v in words.values()} == {2}
    (overall,) = found.overall
    assert overall.verdict.decision is Decision.BETTER and len(overall.arms) == 2
    assert len(overall.comparison.differences) == 6


def test_every_control_that_is_planned_becomes_a_part(directory):
    found = find(load_study(directory))
    assert [parts.place.corpus for parts in found.decomposition] == ['stdlib', 'packages']
    for parts in found.decomposition:
        means = [part.difference.mean for part in (parts.removing, parts.reinvesting)]
        assert means == pytest.approx([-0.02, -0.01], abs=0.002)
        assert parts.longer.difference.mean == pytest.approx(-0.04, abs=0.002)
        assert list(parts.longer.differences) == [20, 21, 22, 23]
    longer = [a for a in found.controls if a.control == LONGER]
    assert {a.example.planned_steps for a in longer} == {40} and len(longer) == 4


def test_a_study_that_is_not_finished_has_the_words_of_its_looks(directory):
    """With the results of a first look alone, words are those of that look."""
    study = load_study(directory)
    later = {run.name for run in study.runs if run.stage == 'verdict' and 5 in run.seeds}
    runs = tuple(
        dataclasses.replace(run, trials=() if run.name in later else run.trials)
        for run in study.runs
        if run.place.control != LONGER
    )
    found = find(dataclasses.replace(study, runs=runs))
    assert {a.verdict.num_seeds for a in found.arms if a.verdict} == {3}
    (remark,) = [r for r in found.remarks if r.code is RemarkCode.LOOK_IN_PROGRESS]
    assert (remark.data['look'], remark.data['reached']) == (2, 0)
