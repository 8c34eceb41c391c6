"""Every rule that a verdict has to keep: broken once, named, and the verdict withheld."""

import json
import types

import numpy as np
import pytest

from qkattn.report import find, load_study, sentences
from tests.studies import (
    edit_plan,
    run_name,
    trial_record,
    tuned_arm,
    write_lines,
    write_study,
    write_tuned,
)

BASE = 2 + 0.05 * np.arange(8)
SIZE = 'd_model=128'
VERDICT = {v: run_name(v, SIZE, 'verdict') for v in ('qk/vo', 'b/vo', 'c/vo')}


def records_of(**changes):
    """Three arms; `changes` are of the verdict trials of b/vo."""
    records = [
        record
        for place, variant in enumerate(VERDICT)
        for record in tuned_arm(variant, losses=list(BASE + 0.02 * place))
    ]
    for record in records:
        if record['run'] == VERDICT['b/vo']:
            record |= changes
    return records


def checked(directory):
    """The findings, the words by variant, and all remarks as one text."""
    study = load_study(directory)
    found = find(study)
    words = {arm.variant: arm.verdict.decision.value for arm in found.arms if arm.verdict}
    said = '\n'.join(map(sentences.remark_text, found.remarks))
    found = types.SimpleNamespace(
        **vars(found),
        sentences=sentences.found_in(study, found),
        held_equal=sentences.held_equal(study, found),
    )
    return found, words, said


def test_a_clean_study_has_nothing_but_its_evaluation_to_say(study_dir):
    found, words, said = checked(write_tuned(study_dir, records_of()))
    assert words == {'b/vo': 'worse', 'c/vo': 'worse'}
    assert said == (
        'Val losses are over 65,536 tokens in 512 rows, which leaves each a sampling error of '
        '0.013 nats/token (standard error over rows). All arms are evaluated on the same tokens, '
        'so most of it cancels in a difference; intervals are over seeds and do not hold what is '
        'left of it.'
    )
    assert not any(remark.blocks for remark in found.remarks)


def test_trials_that_stopped_early_get_no_verdict(study_dir):
    write_tuned(study_dir, records_of())
    edit_plan(study_dir, VERDICT['b/vo'], train__num_steps=800)
    found, words, said = checked(study_dir)
    assert words == {'b/vo': 'no verdict', 'c/vo': 'worse'}
    assert (
        'b/vo at d_model=128: 8 trials of 8 stopped at step 400 of 800 and are no part of a '
        'verdict.' in said
    )
    assert found.arms[1].chosen == ()


def test_one_trial_that_stopped_early_is_left_out(study_dir):
    records = records_of()
    next(r for r in records if r['run'] == VERDICT['b/vo'])['num_steps'] = 100
    write_tuned(study_dir, records)
    edit_plan(study_dir, VERDICT['b/vo'], train__num_steps=400)
    found, words, said = checked(study_dir)
    assert words['b/vo'] == 'worse' and found.arms[1].difference.n == 7
    assert '1 trial of 8 stopped at step 100 of 400' in said


@pytest.mark.parametrize(
    ('changes', 'clause'),
    [
        (
            {'optimizer__schedule': 'inverse_sqrt'},
            'the inverse sqrt schedule does not anneal the learning rate',
        ),
        ({'optimizer__schedule': 'constant'}, 'the constant schedule does not anneal'),
        ({'optimizer__final_fraction': 0.2}, 'the learning rate ends at 0.2 of its peak'),
    ],
)
def test_trainings_that_are_not_annealed_get_no_verdict(study_dir, changes, clause):
    write_tuned(study_dir, records_of())
    edit_plan(study_dir, VERDICT['b/vo'], **changes)
    _, words, said = checked(study_dir)
    assert words == {'b/vo': 'no verdict', 'c/vo': 'worse'}
    assert f'b/vo at d_model=128: {clause}' in said


def test_a_final_fraction_of_a_tenth_is_annealed(study_dir):
    write_tuned(study_dir, records_of())
    for run in VERDICT.values():
        edit_plan(study_dir, run, optimizer__final_fraction=0.1)
    assert checked(study_dir)[1] == {'b/vo': 'worse', 'c/vo': 'worse'}


def test_what_blocks_the_baseline_blocks_every_arm(study_dir):
    write_tuned(study_dir, records_of())
    edit_plan(study_dir, VERDICT['qk/vo'], optimizer__schedule='constant')
    found, words, _ = checked(study_dir)
    assert words == {'b/vo': 'no verdict', 'c/vo': 'no verdict'}
    assert 'the baseline qk/vo: the constant schedule' in sentences.reason(found.arms[1].verdict)


def test_what_holds_for_every_arm_is_said_once(study_dir):
    write_tuned(study_dir, records_of())
    for run in VERDICT.values():
        edit_plan(study_dir, run, optimizer__schedule='constant')
    found, words, said = checked(study_dir)
    assert words == {'b/vo': 'no verdict', 'c/vo': 'no verdict'}
    assert said.count('anneal') == 1 and said.startswith('every arm: the constant schedule')
    assert found.sentences == (f'No verdict: {sentences.clause(found.remarks[0])}.',)


def test_losses_that_no_verdict_may_use_give_no_law_of_size(study_dir):
    records = tuned_arm('qk/vo', 's64', BASE, d_model=64) + tuned_arm('qk/vo', 's128', BASE)
    write_tuned(study_dir, records)
    assert len(checked(study_dir)[0].scaling) == 1
    for size in ('s64', 's128'):
        edit_plan(study_dir, run_name('qk/vo', size, 'verdict'), optimizer__schedule='constant')
    assert checked(study_dir)[0].scaling == ()


@pytest.mark.parametrize(
    ('changes', 'name', 'values'),
    [
        ({'train__num_steps': 200}, 'train.num_steps', '400 (qk/vo, c/vo), 200 (b/vo)'),
        ({'train__init_from': 'runs/a'}, 'train.init_from', 'None (qk/vo, c/vo), runs/a (b/vo)'),
        ({'optimizer__beta2': 0.5}, 'optimizer.beta2', '0.99 (qk/vo, c/vo), 0.5 (b/vo)'),
        ({'model__positions': 'rope'}, 'model.positions', 'learned (qk/vo, c/vo), rope (b/vo)'),
        # A score scale or weight decay that is not tuned is no arm's own.
        ({'model__score_scale': 2.0}, 'model.score_scale', '1.0 (qk/vo, c/vo), 2.0 (b/vo)'),
        ({'trials__weight_decays': [1]}, 'trials.weight_decays', '[0.1] (qk/vo, c/vo), [1] (b/vo)'),
        ({'data__lowercase': True}, 'data.lowercase', 'False (qk/vo, c/vo), True (b/vo)'),
    ],
)
def test_settings_that_differ_are_listed_and_block(study_dir, changes, name, values):
    write_tuned(study_dir, records_of())
    edit_plan(study_dir, VERDICT['b/vo'], **changes)
    found, words, said = checked(study_dir)
    assert f'{name} differs between arms: {values}.' in said
    assert words == {'b/vo': 'no verdict', 'c/vo': 'worse'}
    assert found.held_equal.count(f'but for {name};') == 1


@pytest.mark.parametrize(
    'changes',
    [
        {'model__d_ff': 600, 'model__num_heads': 8, 'model__head_size': 3, 'model__num_layers': 9},
        {'model__score': 'other', 'model__value': 'other', 'model__d_model': 96},
        {'trials__learning_rates': [1.0]},
        {'data__data_dir': '/elsewhere', 'mesh__fsdp': 4},
    ],
)
def test_declared_factors_and_places_may_differ(study_dir, changes):
    write_tuned(study_dir, records_of())
    edit_plan(study_dir, VERDICT['b/vo'], **changes)
    _, words, said = checked(study_dir)
    assert 'differs' not in said and words == {'b/vo': 'worse', 'c/vo': 'worse'}


def test_fields_of_a_variant_and_tuned_knobs_may_differ(study_dir):
    records = records_of()
    for record in records:
        if record['variant'] == 'b/vo':
            record['variant'] = 'b/vo?norm=rmsnorm&num_kv_heads=1 [d_ff]'
    write_tuned(study_dir, records)
    edit_plan(study_dir, VERDICT['b/vo'], model__norm='rmsnorm', model__num_kv_heads=1)
    assert 'differs' not in checked(study_dir)[2]


def test_settings_of_the_program_are_listed_and_do_not_block(study_dir):
    write_tuned(study_dir, records_of())
    edit_plan(study_dir, VERDICT['b/vo'], train__lifting='vmap')
    found, words, said = checked(study_dir)
    assert 'train.lifting differs between arms: auto (qk/vo, c/vo), vmap (b/vo).' in said
    assert words == {'b/vo': 'worse', 'c/vo': 'worse'} and 'but for' not in found.held_equal


@pytest.mark.parametrize(
    ('changes', 'clause'),
    [
        (
            {'data': {'name': 'stdlib', 'version': '3.12', 'unigram_bits_per_byte': 4.53}},
            "data.version is 3.12, the baseline's 3.11.7",
        ),
        ({'eval_tokens': 4096}, "eval_tokens is 4096, the baseline's 65536"),
    ],
)
def test_other_data_gets_no_verdict(study_dir, changes, clause):
    found, words, said = checked(write_tuned(study_dir, records_of(**changes)))
    assert words == {'b/vo': 'no verdict', 'c/vo': 'worse'}
    assert (
        tuple(map(sentences.clause, found.arms[1].blocks)) == (clause,)
        and f'b/vo at d_model=128: {clause}.' in said
    )


def test_software_that_differs_is_named_and_does_not_block(study_dir):
    provenance = trial_record('x')['provenance']
    provenance |= {'git': {'commit': 'f' * 40, 'dirty': True}, 'versions': {'jax': '0.12.0'}}
    _, words, said = checked(write_tuned(study_dir, records_of(provenance=provenance)))
    assert 'git.commit differs between runs: ' in said and 'ffffffffffff… (b/vo at' in said
    assert 'versions.jax differs between runs: ' in said
    assert 'a working tree with changes that no commit holds' in said
    assert words == {'b/vo': 'worse', 'c/vo': 'worse'}


def test_results_of_other_settings_are_refused(study_dir):
    write_tuned(study_dir, records_of())
    path = study_dir / 'results.jsonl'
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[-1]['config_hash'] = 'other'
    write_lines(path, records)
    (study_dir / VERDICT['c/vo'] / 'result.json').unlink()
    study = load_study(study_dir)
    assert "its config_hash 'other' is not that of the planned run" in study.problems[0]
    _, words, said = checked(study_dir)
    assert words == {'b/vo': 'worse', 'c/vo': 'no verdict'}
    assert '7 of 8 verdict trials of run c_vo-d_model_128-verdict-4 have readable results' in said


def lose(directory, run, **changes):
    """`changes` one result of a run in both places where it stands."""
    for path, is_list in ((directory / 'results.jsonl', False), (directory / run, True)):
        path = path / 'result.json' if is_list else path
        text = path.read_text()
        records = json.loads(text) if is_list else list(map(json.loads, text.splitlines()))
        of_run = [record for record in records if record['config_hash'] == run]
        of_run[-1] |= changes
        path.write_text(json.dumps(records)) if is_list else write_lines(path, records)


@pytest.mark.parametrize('changes', [{'val_loss': float('nan')}, {'val_loss': None}])
@pytest.mark.parametrize(
    ('variant', 'words'),
    [
        ('b/vo', {'b/vo': 'no verdict', 'c/vo': 'worse'}),
        ('qk/vo', {'b/vo': 'no verdict', 'c/vo': 'no verdict'}),
    ],
)
def test_a_finished_trial_without_a_loss_withholds_the_verdict(study_dir, variant, words, changes):
    """Dropped, it would leave the mean of the others: those that did well."""
    write_tuned(study_dir, records_of())
    lose(study_dir, VERDICT[variant], **changes)
    found, judged, said = checked(study_dir)
    assert judged == words
    clause = f'7 of 8 verdict trials of run {VERDICT[variant]} have readable results'
    assert f'{variant} at d_model=128: {clause}.' in said
    assert clause in sentences.reason(found.arms[1].verdict)


def test_results_that_a_descriptive_study_lacks_are_a_remark(study_dir):
    write_study(study_dir, [trial_record('qk/vo', seed=seed) for seed in (0, 1)])
    lose(study_dir, run_name('qk/vo', SIZE), val_loss=None)
    (remark,) = [r for r in checked(study_dir)[0].remarks if 'readable' in sentences.clause(r)]
    assert (
        sentences.remark_text(remark).startswith('qk/vo at d_model=128: 1 of 2 trials')
        and not remark.blocks
    )


@pytest.mark.parametrize(
    ('stage', 'knob', 'seeds', 'clause'),
    [
        (
            'verdict',
            None,
            list(range(9)),
            'its verdict ran on seeds 0, 1, 2, 3, 4, 5, 6, 7 and 8, the study declares 0, 1, 2, 3, '
            '4, 5, 6 and 7',
        ),
        (
            'screening',
            'learning_rate',
            [100, 101, 102],
            'its screening ran on seeds 100, 101 and 102, the study declares 100 and 101',
        ),
    ],
)
def test_seeds_are_those_that_were_declared(study_dir, stage, knob, seeds, clause):
    write_tuned(study_dir, records_of())
    edit_plan(study_dir, run_name('b/vo', SIZE, stage, knob), trials__seeds=seeds)
    found, words, _ = checked(study_dir)
    assert words == {'b/vo': 'no verdict', 'c/vo': 'worse'}
    assert tuple(map(sentences.clause, found.arms[1].blocks)) == (clause,)


def test_training_losses_are_not_read(study_dir):
    write_tuned(study_dir, records_of())
    before = checked(study_dir)[0]
    for path in study_dir.glob('*/metrics.jsonl'):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        write_lines(path, [{**line, 'loss': [0.0]} for line in lines])
    after = checked(study_dir)[0]
    assert [arm.difference for arm in after.arms] == [arm.difference for arm in before.arms]
    assert [row.val_loss for row in after.arms] == [row.val_loss for row in before.arms]


def test_weights_beyond_the_tolerance_get_no_verdict(study_dir):
    records = records_of()
    for record in records:
        if record['variant'] == 'b/vo':
            record['parameters'] |= {'total': round(1.004 * record['target_parameters'])}
            record['residual'] = record['parameters']['total'] / record['target_parameters'] - 1
    found, words, said = checked(write_tuned(study_dir, records))
    assert words == {'b/vo': 'no verdict', 'c/vo': 'worse'}
    assert (
        'b/vo at d_model=128: total parameters differ by +0.4 %, above the tolerance 0.1 %: no '
        'verdict at equal total parameters.' in said
    )
    assert '(820k, within 0.1 % but for 1 arm)' in found.held_equal


def test_weights_that_contradict_the_plan_get_no_verdict(study_dir):
    records = records_of()
    for record in records:
        if record['variant'] == 'b/vo':
            record['parameters'] = record['parameters'] | {'total': 900000}
    _, words, said = checked(write_tuned(study_dir, records))
    assert words == {'b/vo': 'no verdict', 'c/vo': 'worse'}
    assert 'its results count 900,000 parameters, the plan says' in said


def test_unmatched_weights_are_said_and_judged(study_dir):
    records = records_of()
    for record in records:
        record |= {'target_parameters': None, 'residual': None}
    found, words, _ = checked(write_tuned(study_dir, records, matched=None))
    assert words == {'b/vo': 'worse', 'c/vo': 'worse'}
    assert found.held_equal.startswith('Parameters are not matched; same data')
    assert found.sentences[0].startswith('Parameters not matched, each arm at its own')


def test_screening_seeds_give_no_verdict(study_dir):
    records = [
        record
        for place, variant in enumerate(VERDICT)
        for record in tuned_arm(variant, losses=list(BASE + place), screening_seeds=(100, 7))
    ]
    found, words, _ = checked(write_tuned(study_dir, records, tuning__seeds=[100, 7]))
    assert set(words.values()) == {'no verdict'}
    assert found.sentences == (
        'No verdict: screening and verdict share seed 7, which makes the tuned settings look '
        'better than they are.',
    )


@pytest.mark.parametrize(('stage', 'old', 'new'), [('screening', 100, 3), ('verdict', 3, 101)])
def test_seeds_that_the_results_share_are_found_too(study_dir, stage, old, new):
    records = records_of()
    for record in records:
        if record['stage'] == stage and record['trial']['seed'] == old:
            record['trial']['seed'] = new
    assert f'share seed {new}' in checked(write_tuned(study_dir, records))[2]


def test_verdict_trials_at_several_settings_give_none(study_dir):
    records = records_of()
    next(r for r in records if r['run'] == VERDICT['b/vo'])['trial']['weight_decay'] = 0.2
    _, words, said = checked(write_tuned(study_dir, records))
    assert words == {'b/vo': 'no verdict', 'c/vo': 'worse'}
    assert 'b/vo at d_model=128: its verdict trials ran at more than one setting.' in said


def test_a_learning_rate_grid_of_one_value_is_not_tuned(study_dir):
    grids = {'tuning__learning_rates': [4e-3], 'tuning__weight_decays': [0.1, 0.2]}
    _, words, said = checked(write_tuned(study_dir, records_of(), **grids))
    assert set(words.values()) == {'no verdict'}
    assert 'the learning rate is not tuned per arm: its grid is 0.004 only.' in said


@pytest.mark.parametrize('rate', [8e-3, 4.000001e-3])
def test_the_verdict_has_to_run_at_what_the_screening_chooses(study_dir, rate):
    records = tuned_arm('qk/vo', losses=list(BASE))
    records += tuned_arm('b/vo', losses=list(BASE + 0.02), learning_rate=rate)
    _, words, said = checked(write_tuned(study_dir, records))
    assert words == {'b/vo': 'no verdict'}
    assert f'the verdict ran at learning rate {rate}, the screening trials choose 0.004.' in said


def test_the_verdict_has_to_run_at_the_settings_that_were_not_tuned(study_dir):
    records = records_of()
    for record in records:
        if record['stage'] == 'verdict':
            record['trial'] = record['trial'] | {'weight_decay': 0.2}
    _, words, said = checked(write_tuned(study_dir, records))
    assert words == {'b/vo': 'no verdict', 'c/vo': 'no verdict'}
    assert 'the verdict ran at weight decay 0.2, the screening trials ran at 0.1.' in said


def test_a_verdict_before_its_tuning_has_ended_is_none(study_dir):
    records = tuned_arm('qk/vo', losses=list(BASE))
    records += tuned_arm('b/vo', losses=list(BASE + 0.02), optimum=16e-3)
    _, words, said = checked(write_tuned(study_dir, records, tuning__max_points=9))
    assert words == {'b/vo': 'no verdict'}
    assert 'its screening of the learning rate lacks results at 0.032 to choose a value by.' in said
    verdictless = write_tuned(study_dir / 'b', records[:-8], tuning__max_points=9)
    assert 'lacks results at' not in checked(verdictless)[2]


def test_a_verdict_without_its_screening_is_none(study_dir):
    records = tuned_arm('qk/vo', losses=list(BASE)) + tuned_arm('b/vo', losses=list(BASE + 1))[10:]
    _, words, said = checked(write_tuned(study_dir, records))
    assert words == {'b/vo': 'no verdict'}
    lacking = '0.001, 0.002, 0.004, 0.008, 0.016'
    assert f'screening of the learning rate lacks results at {lacking} to choose' in said


def test_grids_without_both_ends_are_named(study_dir):
    records = tuned_arm('qk/vo', losses=list(BASE))
    records += tuned_arm('b/vo', losses=list(BASE + 0.02), optimum=16e-3)
    said = checked(write_tuned(study_dir, records))[2]
    assert (
        'b/vo at d_model=128: learning rate not bracketed, the best of 0.001 to 0.016 is 0.016.'
        in said
    )


def test_few_seeds_are_said(study_dir):
    records = tuned_arm('qk/vo', losses=BASE[:4]) + tuned_arm('b/vo', losses=BASE[:4] + 0.02)
    _, words, said = checked(write_tuned(study_dir, records, seeds=[0, 1, 2, 3]))
    assert 'Verdicts rest on 4 seeds (fewer than 5) for all arms.' in said
    assert words == {'b/vo': 'worse'}


def test_divergence_is_counted_by_arm_and_stage(study_dir):
    records = tuned_arm('qk/vo', losses=list(BASE))
    losses = [None, *(BASE[1:] + 0.02)]
    records += tuned_arm('b/vo', losses=losses, diverged_rates=(16e-3,))
    said = checked(write_tuned(study_dir, records))[2]
    assert (
        'Diverged, counted and never averaged: b/vo at d_model=128 2 of 10 screening trials and 1 '
        'of 8 verdict trials.' in said
    )


def test_a_study_without_tuning_is_checked_too(study_dir):
    records = [trial_record('qk/vo'), trial_record('b/vo', eval_tokens=4096, val_loss=None)]
    said = checked(write_study(study_dir, records))[2]
    assert 'eval_tokens differs between arms: 65536 (qk/vo), 4096 (b/vo).' in said
    assert 'b/vo at d_model=128 1 of 1 trial.' in said
