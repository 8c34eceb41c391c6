"""Yardsticks: a baseline that is not trained enough withholds the words of its size and corpus."""

import json

import numpy as np
import pytest

from qkattn.storage import ledger
from qkattn.study.place import Place
from qkattn.verdict import Decision, ReasonCode, Remark, RemarkCode, find, load_study
from qkattn.verdict.trained import standings
from tests.studies import (
    VERDICT_SEEDS,
    translation_record,
    tuned_arm,
    write_tuned,
    write_yardsticks,
)

BASE = 2 + 0.05 * np.arange(8)
MEAN = float(BASE.mean()) + 0.1  # of the test split
SIZE = 'd_model=128'
WORSE, NO_VERDICT = Decision.WORSE, Decision.NO_VERDICT


def records_of(**changes):
    return [
        record
        for place, name in enumerate(('qk/vo', 'b/vo', 'c/vo'))
        for record in tuned_arm(name, losses=list(BASE + 0.02 * place), **changes)
    ]


def judged(directory):
    """Decisions by variant (and corpus), and the blocking remarks."""
    found = find(load_study(directory))
    several = len({arm.corpus for arm in found.arms}) > 1
    decisions = {
        (arm.variant, arm.corpus) if several else arm.variant: arm.verdict.decision
        for arm in found.arms
        if arm.verdict
    }
    return decisions, [remark for remark in found.remarks if remark.blocks]


def blocks(code, variant='qk/vo', corpus='stdlib', **data):
    return Remark(code, data, True, Place(variant, SIZE, corpus))


def losses(test):
    return {'val': {'5-gram': 1.0}, 'test': {'4-gram': test + 0.3, '5-gram': test}}


def trial(early=2.0, late=1.8, loss=1.9, shuffled=None):
    return {
        'seed': 0,
        'loss': loss,
        'positions': {'1': 2.6, '5-8': None},
        'early': early,
        'late': late,
        'shuffled': shuffled,
    }


def test_a_baseline_above_its_yardstick_withholds_every_word(study_dir):
    directory = write_tuned(study_dir, records_of(), yardsticks={'losses': losses(MEAN + 1e-6)})
    assert judged(directory) == ({'b/vo': WORSE, 'c/vo': WORSE}, [])
    write_yardsticks(directory, records_of(), losses=losses(MEAN - 1e-6))
    data = {'split': 'test', 'loss': pytest.approx(MEAN), 'name': '5-gram', 'tokens': 307200}
    remark = blocks(RemarkCode.BELOW_YARDSTICK, yardstick=MEAN - 1e-6, **data)
    assert judged(directory) == ({'b/vo': NO_VERDICT, 'c/vo': NO_VERDICT}, [remark])
    (_, b, _) = find(load_study(directory)).arms
    (reason,) = b.verdict.reasons
    assert reason.code is ReasonCode.BASELINE_BLOCKED and reason.data['remarks'] == (remark,)
    assert b.comparison.difference.mean == pytest.approx(0.02)  # without a word


def test_a_corpus_is_measured_by_its_own_yardstick(study_dir):
    records = records_of() + records_of(corpus='packages')
    directory = write_tuned(study_dir, records)
    content = json.loads((directory / ledger.YARDSTICKS).read_text())
    content['groups'][1]['losses'] = losses(1.5)
    (directory / ledger.YARDSTICKS).write_text(json.dumps(content))
    decisions, (remark,) = judged(directory)
    assert remark.code is RemarkCode.BELOW_YARDSTICK and remark.arm.corpus == 'packages'
    assert decisions == {
        (variant, corpus): WORSE if corpus == 'stdlib' else NO_VERDICT
        for variant in ('b/vo', 'c/vo')
        for corpus in ('stdlib', 'packages')
    }


@pytest.mark.parametrize(
    ('changes', 'own', 'expected'),
    [
        ({}, trial(early=2.0, late=1.9 + 1e-6), [('LITTLE_CONTEXT', {'gain': 0.1, 'needed': 0.1})]),
        ({}, trial(early=2.0, late=1.9 - 1e-6), []),
        ({}, trial(early=None, late=None), []),
        ({'task': 'masked'}, trial(early=2.0, late=2.0), []),
    ],
)
def test_a_language_model_gains_from_its_context(changes, own, expected, study_dir):
    yardsticks = {'trials': {'qk/vo': [own], 'b/vo': [trial(early=2.0, late=2.0)]}} | changes
    _, remarks = judged(write_tuned(study_dir, records_of(), yardsticks=yardsticks))
    assert [(r.code.name, r.data) for r in remarks] == [
        (name, {key: pytest.approx(value, abs=1e-5) for key, value in data.items()})
        for name, data in expected
    ]


def translations(bleu):
    records = records_of()
    for record in records:
        record |= {
            name: value
            for name, value in translation_record('qk/vo', bleu).items()
            if 'bleu' in name or 'chrf' in name
        }
    return records


@pytest.mark.parametrize(
    ('bleu', 'shuffled', 'expected'),
    [
        (15.0, 2.4 + 1e-6, []),
        (14.9, 2.4 + 1e-6, [('LOW_BLEU', {'bleu': 14.9, 'needed': 15.0})]),
        (20.0, 2.4 - 1e-6, [('SOURCES_UNUSED', {'cost': 0.5, 'needed': 0.5})]),
        (20.0, None, []),
    ],
)
def test_a_translation_reads_its_sources(bleu, shuffled, expected, study_dir):
    own = {'qk/vo': [trial(shuffled=shuffled)]}
    yardsticks = {'task': 'translation', 'losses': {}, 'tokens': None, 'trials': own}
    decisions, remarks = judged(write_tuned(study_dir, translations(bleu), yardsticks=yardsticks))
    assert [(r.code.name, r.data) for r in remarks] == [
        (name, {key: pytest.approx(value, abs=1e-5) for key, value in data.items()})
        for name, data in expected
    ]
    assert set(decisions.values()) == {NO_VERDICT if expected else WORSE}


def test_without_yardsticks_there_is_no_word(study_dir):
    directory = write_tuned(study_dir, records_of())
    (directory / ledger.YARDSTICKS).unlink()
    remark = Remark(RemarkCode.NO_YARDSTICK, {}, blocks=True)
    assert judged(directory) == ({'b/vo': NO_VERDICT, 'c/vo': NO_VERDICT}, [remark])
    assert standings(load_study(directory), find(load_study(directory)).arms) == []


def test_yardsticks_of_other_runs_are_none(study_dir):
    directory = write_tuned(study_dir, records_of(), yardsticks={'run': 'another'})
    decisions, remarks = judged(directory)
    assert remarks == [blocks(RemarkCode.NO_YARDSTICK)]
    assert set(decisions.values()) == {NO_VERDICT}


def test_a_damaged_file_is_named(study_dir):
    directory = write_tuned(study_dir, records_of(), yardsticks={'losses': {'test': {'a': 'x'}}})
    study = load_study(directory)
    (problem,) = study.problems
    assert problem.startswith("yardsticks.json is damaged: field 'losses' is")
    assert study.yardsticks is None


@pytest.mark.parametrize('variant', ['b/vo', 'qk/vo'])
def test_seeds_that_end_far_apart_withhold_the_word_of_their_arm(variant, study_dir):
    """Two of eight seeds stay on a plateau: of the baseline, that leaves no word to any arm."""
    records = records_of()
    records += tuned_arm('d/vo', losses=list(BASE + 0.06))
    for record in records:
        if record['variant'] == variant and record['trial']['seed'] in VERDICT_SEEDS[:2]:
            record['test_loss'] += 2.0
    decisions, remarks = judged(write_tuned(study_dir, records))
    (bimodal,) = [r for r in remarks if r.code is RemarkCode.BIMODAL_SEEDS]
    assert bimodal.arm.variant == variant and bimodal.data['sd'] > 3 * bimodal.data['usual']
    withheld = {v for v, decision in decisions.items() if decision is NO_VERDICT}
    assert withheld == ({'b/vo'} if variant == 'b/vo' else {'b/vo', 'c/vo', 'd/vo'})


def test_no_law_is_fitted_over_sizes_that_are_not_trained_enough(study_dir):
    sizes = {f'd_model={d}': d for d in (32, 64, 96, 128)}
    records = [
        record
        for size, d in sizes.items()
        for variant in ('qk/vo', 'b/vo')
        for record in tuned_arm(variant, size, losses=list(BASE + 20 / d), d_model=d)
    ]
    directory = write_tuned(study_dir, records)
    assert [len(of.fit.sizes) for of in find(load_study(directory)).scaling] == [4, 4]
    write_yardsticks(directory, records, losses=losses(MEAN + 0.3))  # of 64 alone it is above
    assert [len(of.fit.sizes) for of in find(load_study(directory)).scaling] == [2, 2]
