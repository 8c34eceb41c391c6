"""Every rule that a verdict has to keep: broken once, reported, and the verdict withheld."""

import json
import re
import shutil

import numpy as np
import pytest

from qkattn.errors import ReportError
from qkattn.report.prose import clause
from qkattn.study.place import Place
from qkattn.verdict import Decision, ReasonCode, Remark, RemarkCode, find, load_study
from tests.studies import (
    RATES,
    SCREENING_SEEDS,
    VERDICT_SEEDS,
    edit_plan,
    run_name,
    trial_record,
    tuned_arm,
    write_lines,
    write_study,
    write_tuned,
)

BASE = 2 + 0.05 * np.arange(8)
SEEDS = VERDICT_SEEDS
SIZE = 'd_model=128'
B = Place('b/vo', SIZE, 'stdlib')
VERDICT = {v: run_name(v, SIZE, 'verdict') for v in ('qk/vo', 'b/vo', 'c/vo')}
WORSE, NO_VERDICT = Decision.WORSE, Decision.NO_VERDICT
JUDGED = {'b/vo': WORSE, 'c/vo': WORSE}
WITHHELD = {'b/vo': NO_VERDICT, 'c/vo': WORSE}
ALL_WITHHELD = {'b/vo': NO_VERDICT, 'c/vo': NO_VERDICT}
EVALUATION = {'tokens': (65536,), 'rows': (512,), 'test_tokens': (32768,), 'documents': (100,)}


def records_of(stage='verdict', variant='b/vo', **changes):
    """Three arms; `changes` are of the trials of one of them at one stage (None: at all)."""
    records = [
        record
        for place, name in enumerate(VERDICT)
        for record in tuned_arm(name, losses=list(BASE + 0.02 * place))
    ]
    for record in records:
        if record['variant'] == variant and stage in (None, record['stage']):
            record |= changes
    return records


def two(**second):
    """The baseline and b/vo, 0.02 nats worse."""
    return tuned_arm('qk/vo', losses=list(BASE)) + tuned_arm(
        'b/vo', **{'losses': list(BASE + 0.02)} | second
    )


def checked(directory):
    """The findings, the decisions by variant, and the remarks but for that on the evaluation."""
    found = find(load_study(directory))
    decisions = {arm.variant: arm.verdict.decision for arm in found.arms if arm.verdict}
    remarks = [r for r in found.remarks if r.code is not RemarkCode.EVALUATION]
    return found, decisions, remarks


def blocking(code, arm=B, **data):
    return Remark(code, data, True, arm)


def data_of(remarks, code):
    """The data of the only remark of this code."""
    (remark,) = [remark for remark in remarks if remark.code is code]
    return remark.data


def test_a_clean_study_has_nothing_but_its_evaluation_to_report(study_dir):
    found, decisions, remarks = checked(write_tuned(study_dir, records_of()))
    assert decisions == JUDGED and remarks == []
    assert found.remarks == (Remark(RemarkCode.EVALUATION, EVALUATION),)


def differs(name, most, one, harmless=False):
    values = {most: ('qk/vo', 'c/vo'), one: ('b/vo',)}
    data = {'name': name, 'size': None, 'corpus': None, 'values': values, 'harmless': harmless}
    return Remark(RemarkCode.DIFFERS, data)


def unlike(name, most, one):
    data = {'name': name, 'value': one, 'baseline': most}
    return blocking(RemarkCode.DIFFERS_FROM_BASELINE, **data)


def not_annealed(schedule, final_fraction=None):
    data = {'schedule': schedule, 'final_fraction': final_fraction, 'limit': 0.1}
    return blocking(RemarkCode.NOT_ANNEALED, **data)


def other_seeds(stage, actual, declared):
    return blocking(RemarkCode.OTHER_SEEDS, stage=stage, actual=actual, declared=declared)


SHORT = {'stopped': 8, 'trials': 8, 'step': 400, 'num_steps': 800}
SCREENED = (*SCREENING_SEEDS, 102)
OTHER_DATA = {'name': 'stdlib', 'version': '3.12', 'unigram_bits_per_byte': 4.53}


@pytest.mark.parametrize(
    ('changes', 'remark'),
    [
        ({'train__num_steps': 800}, blocking(RemarkCode.STOPPED_EARLY, **SHORT)),
        ({'optimizer__schedule': 'inverse_sqrt'}, not_annealed('inverse_sqrt')),
        ({'optimizer__schedule': 'constant'}, not_annealed('constant')),
        ({'optimizer__final_fraction': 0.2}, not_annealed('linear', 0.2)),
        ({'trials__seeds': [*SEEDS, 8]}, other_seeds('verdict', (*SEEDS, 8), SEEDS)),
        ({'screened': SCREENED}, other_seeds('screening', SCREENED, SCREENING_SEEDS)),
        ({'train__num_steps': 200}, unlike('train.num_steps', '400', '200')),
        ({'train__init_from': 'runs/a'}, unlike('train.init_from', 'None', 'runs/a')),
        ({'optimizer__beta2': 0.5}, unlike('optimizer.beta2', '0.99', '0.5')),
        ({'model__positions': 'rope'}, unlike('model.positions', 'learned', 'rope')),
        # A score scale or weight decay that is not tuned is no arm's own.
        ({'model__score_scale': 2.0}, unlike('model.score_scale', '1.0', '2.0')),
        ({'trials__weight_decays': [1]}, unlike('trials.weight_decays', '[0.1]', '[1]')),
        ({'data__lowercase': True}, unlike('data.lowercase', 'False', 'True')),
        ({'data': OTHER_DATA}, unlike('data.version', '3.11.7', '3.12')),
        ({'eval_tokens': 4096}, unlike('eval_tokens', '65536', '4096')),
    ],
)
def test_an_arm_that_breaks_a_rule_or_is_unlike_the_baseline_gets_no_verdict(
    study_dir, changes, remark
):
    of_results = {name: changes[name] for name in changes if name in ('data', 'eval_tokens')}
    of_plan = {name: value for name, value in changes.items() if '__' in name}
    write_tuned(study_dir, records_of(**of_results))
    edit_plan(study_dir, VERDICT['b/vo'], **of_plan)
    screening = run_name('b/vo', SIZE, 'screening', 'learning_rate')
    edit_plan(study_dir, screening, trials__seeds=changes.get('screened', SCREENING_SEEDS))
    found, decisions, remarks = checked(study_dir)
    blocks = found.arms[1].blocks
    assert decisions == WITHHELD and found.arms[1].verdict.reasons == blocks
    assert remarks[: len(blocks)] == list(blocks) == [r for r in remarks if r.blocks]
    assert remark in blocks
    assert (found.arms[1].chosen == ()) == (remark.code is RemarkCode.STOPPED_EARLY)
    if remark.code is RemarkCode.DIFFERS_FROM_BASELINE:
        name, one, most = remark.data.values()
        assert differs(name, most, one) in remarks


@pytest.mark.parametrize(
    ('runs', 'changes', 'listed'),
    [
        (VERDICT, {'optimizer__final_fraction': 0.1}, []),
        (['b/vo'], {'model__d_ff': 600, 'model__num_heads': 8, 'model__head_size': 3}, []),
        (['b/vo'], {'model__score': 'x', 'model__value': 'y', 'model__d_model': 96}, []),
        (['b/vo'], {'trials__learning_rates': [1.0], 'model__num_layers': 9}, []),
        (['b/vo'], {'data__data_dir': '/elsewhere', 'mesh__fsdp': 4}, []),
        (
            ['b/vo'],
            {'train__lifting': 'vmap'},
            [differs('train.lifting', 'auto', 'vmap', harmless=True)],
        ),
    ],
)
def test_what_may_differ_or_anneals_enough_is_judged(study_dir, runs, changes, listed):
    write_tuned(study_dir, records_of())
    for variant in runs:
        edit_plan(study_dir, VERDICT[variant], **changes)
    assert checked(study_dir)[1:] == (JUDGED, listed)


def test_one_trial_that_stopped_early_is_left_out(study_dir):
    records = records_of()
    next(r for r in records if r['run'] == VERDICT['b/vo'])['num_steps'] = 100
    write_tuned(study_dir, records)
    edit_plan(study_dir, VERDICT['b/vo'], train__num_steps=400)
    found, decisions, remarks = checked(study_dir)
    assert decisions == JUDGED and found.arms[1].difference.n == 7
    data = {'stopped': 1, 'trials': 8, 'step': 100, 'num_steps': 400}
    assert remarks == [Remark(RemarkCode.STOPPED_EARLY, data, arm=B)]


def test_what_blocks_the_baseline_blocks_every_arm(study_dir):
    write_tuned(study_dir, records_of())
    edit_plan(study_dir, VERDICT['qk/vo'], optimizer__schedule='constant')
    found, decisions, _ = checked(study_dir)
    assert decisions == ALL_WITHHELD
    reason = found.arms[1].verdict.reasons[-1]
    assert reason.code is ReasonCode.BASELINE_BLOCKED
    assert reason.data == {'baseline': 'qk/vo', 'remarks': found.arms[0].blocks}


def test_what_holds_for_every_arm_is_one_remark_and_leaves_no_scaling_law(study_dir):
    records = tuned_arm('qk/vo', 's64', BASE, d_model=64) + tuned_arm('qk/vo', 's128', BASE)
    records += tuned_arm('b/vo', 's64', BASE, d_model=64) + tuned_arm('b/vo', 's128', BASE)
    write_tuned(study_dir, records)
    assert len(checked(study_dir)[0].scaling) == 2
    for run in {record['run'] for record in records if record['stage'] == 'verdict'}:
        edit_plan(study_dir, run, optimizer__schedule='constant')
    found, decisions, (remark,) = checked(study_dir)
    assert decisions == {'b/vo': NO_VERDICT} and found.scaling == ()
    assert found.blocks == (remark,) == found.arms[1].verdict.reasons
    assert remark.code is RemarkCode.NOT_ANNEALED and remark.arm is None and remark.every_arm


def test_fields_of_a_variant_and_tuned_knobs_may_differ(study_dir):
    records = records_of(stage=None, variant='b/vo', changed=True)
    for record in records:
        if record.pop('changed', False):
            record['variant'] = 'b/vo?norm=rmsnorm&num_kv_heads=1 [d_ff]'
    write_tuned(study_dir, records)
    edit_plan(study_dir, VERDICT['b/vo'], model__norm='rmsnorm', model__num_kv_heads=1)
    assert checked(study_dir)[2] == []


def test_values_that_differ_are_of_one_size(study_dir):
    records = [
        record
        for size, d_model in (('s64', 64), ('s128', 128))
        for variant in ('qk/vo', 'b/vo')
        for record in tuned_arm(variant, size, BASE, d_model=d_model, eval_tokens=d_model)
    ]
    write_tuned(study_dir, records)
    edit_plan(study_dir, run_name('b/vo', 's64', 'verdict'), train__lifting='vmap')
    _, _, (remark,) = checked(study_dir)
    assert (remark.data['name'], remark.data['size']) == ('train.lifting', 's64')


def test_software_that_differs_is_named_and_its_code_blocks(study_dir):
    provenance = trial_record('x')['provenance']
    provenance |= {'git': {'commit': 'f' * 40, 'dirty': True}, 'versions': {'jax': '0.12.0'}}
    _, decisions, remarks = checked(write_tuned(study_dir, records_of(provenance=provenance)))
    assert decisions == ALL_WITHHELD and [remark.blocks for remark in remarks] == [1, 1, 0]
    commit, dirty, jax = remarks
    assert (commit.code, dirty.code) == (
        RemarkCode.SOFTWARE_DIFFERS,
        RemarkCode.UNCOMMITTED_CHANGES,
    )
    assert (commit.data['name'], jax.data['name']) == ('git.commit', 'versions.jax')
    assert commit.data['values']['f' * 40] == ((B, 'verdict'),)
    assert (B, 'screening') in jax.data['values']['0.10.2']


def test_an_import_path_with_two_sources_blocks(study_dir):
    records = records_of(stage=None)
    for record in records:  # the arm c/vo uses nothing from outside
        if record['variant'] in ('qk/vo', 'b/vo'):
            source = '1' if record['variant'] == 'qk/vo' else '2'
            record['provenance'] = record['provenance'] | {'imported': {'x:y': source, 'x:z': '1'}}
    _, decisions, (remark,) = checked(write_tuned(study_dir, records))
    assert decisions == ALL_WITHHELD and remark.blocks
    assert (remark.code, remark.data['name']) == (RemarkCode.SOFTWARE_DIFFERS, 'imported.x:y')


def lose(directory, run, **changes):
    """Changes one result of a run."""
    path = directory / 'results.jsonl'
    records = [json.loads(line) for line in path.read_text().splitlines()]
    [record for record in records if record['run'] == run][-1].update(changes)
    write_lines(path, records)


@pytest.mark.parametrize('loss', [float('nan'), None])
@pytest.mark.parametrize(('variant', 'decisions'), [('b/vo', WITHHELD), ('qk/vo', ALL_WITHHELD)])
def test_a_finished_trial_without_a_loss_withholds_the_verdict(study_dir, variant, decisions, loss):
    """Dropped, it would leave the mean of the others: those that did well."""
    write_tuned(study_dir, records_of())
    lose(study_dir, VERDICT[variant], val_loss=loss)
    _, judged, remarks = checked(study_dir)
    data = {'readable': 7, 'planned': 8, 'stage': 'verdict', 'run': VERDICT[variant]}
    assert judged == decisions
    assert remarks == [Remark(RemarkCode.MISSING_RESULTS, data, True, B._replace(variant=variant))]


def test_training_losses_are_not_read(study_dir):
    write_tuned(study_dir, records_of())
    before = checked(study_dir)[0]
    for path in study_dir.glob('*/metrics.jsonl'):
        path.write_text(re.sub('"loss": [^]]*]', '"loss": [0.0]', path.read_text()))
    after = checked(study_dir)[0]
    for number in ('difference', 'val_loss'):
        assert [getattr(a, number) for a in after.arms] == [getattr(a, number) for a in before.arms]


TARGET = trial_record('b/vo')['target_parameters']
RESIDUAL = trial_record('b/vo')['residual']
LARGE = round(1.004 * TARGET)
EDGE = {'knob': 'learning_rate', 'low': 0.001, 'high': 0.016, 'best': 0.016}
NOT_TUNED = {'actual': 0.2, 'expected': 0.1, 'tuned': False}
OTHER_DECAY = {'trial': {'seed': 7, 'learning_rate': 4e-3, 'weight_decay': 0.2}}


def sized(total):
    return trial_record('b/vo')['parameters'] | {'total': total}


def at_rate(rate):
    data = {'actual': rate, 'expected': 4e-3, 'tuned': True}
    return blocking(RemarkCode.OTHER_SETTING, knob='learning_rate', **data)


@pytest.mark.parametrize(
    ('records', 'expected'),
    [
        (
            two(parameters=sized(LARGE), residual=LARGE / TARGET - 1),
            blocking(
                RemarkCode.OVER_TOLERANCE,
                matched='total',
                residual=LARGE / TARGET - 1,
                tolerance=1e-3,
            ),
        ),
        (
            two(parameters=sized(900000)),
            blocking(
                RemarkCode.OTHER_PARAMETER_COUNT,
                parameters=900000,
                target=TARGET,
                residual=RESIDUAL,
            ),
        ),
        (two(learning_rate=8e-3), at_rate(8e-3)),
        (two(learning_rate=4.000001e-3), at_rate(4.000001e-3)),
        (
            two()[:18] + two()[28:],
            blocking(RemarkCode.SCREENING_INCOMPLETE, knob='learning_rate', values=RATES),
        ),
        ([*two()[:-1], two()[-1] | OTHER_DECAY], blocking(RemarkCode.SEVERAL_SETTINGS)),
        (
            two()[:-8] + [r | {'trial': r['trial'] | {'weight_decay': 0.2}} for r in two()[-8:]],
            blocking(RemarkCode.OTHER_SETTING, knob='weight_decay', **NOT_TUNED),
        ),
        (two(optimum=16e-3), blocking(RemarkCode.NOT_BRACKETED, **EDGE)),
        (
            two(losses=[2.0] * 4 + [None] * 4),
            Remark(RemarkCode.FEW_SEEDS, {'counts': (4,), 'enough': 5, 'arms': (B,)}),
        ),
        (
            two(losses=[None, *(BASE[1:] + 0.02)], diverged_rates=(16e-3,)),
            Remark(
                RemarkCode.DIVERGED,
                {'arms': ((B, (('screening', 2, 10, ()), ('verdict', 1, 8, ()))),)},
            ),
        ),
    ],
)
def test_results_that_break_a_rule(study_dir, records, expected):
    _, decisions, remarks = checked(write_tuned(study_dir, records))
    assert expected in remarks
    assert (decisions == {'b/vo': NO_VERDICT}) == expected.blocks
    # Of another weight decay, the plan differs from the baseline's too.
    if expected.code is not RemarkCode.SEVERAL_SETTINGS and expected.data.get('tuned', True):
        assert [remark for remark in remarks if remark.blocks] == [expected] * expected.blocks


def test_unmatched_parameters_are_judged(study_dir):
    records = records_of()
    for record in records:
        record |= {'target_parameters': None, 'residual': None}
    assert checked(write_tuned(study_dir, records, matched=None))[1:] == (JUDGED, [])


@pytest.mark.parametrize(
    ('stage', 'old', 'new', 'declared'),
    [('screening', 101, 7, [100, 7]), ('screening', 100, 3, [100, 101]), ('verdict', 3, 101, None)],
)
def test_seeds_of_both_screening_and_verdict_give_no_verdict(study_dir, stage, old, new, declared):
    """Whether the study declares them or only the results share them."""
    records = records_of()
    for record in records:
        if record['stage'] == stage and record['trial']['seed'] == old:
            record['trial']['seed'] = new
    write_tuned(study_dir, records, tuning__seeds=declared or SCREENING_SEEDS)
    found, decisions, _ = checked(study_dir)
    shared = Remark(RemarkCode.SHARED_SEEDS, {'seeds': (new,)}, True)
    assert decisions == ALL_WITHHELD and shared in found.blocks
    assert shared in found.arms[1].verdict.reasons


def test_a_learning_rate_grid_of_one_value_is_not_tuned(study_dir):
    grids = {'tuning__learning_rates': [4e-3], 'tuning__weight_decays': [0.1, 0.2]}
    found, decisions, _ = checked(write_tuned(study_dir, records_of(), **grids))
    assert decisions == ALL_WITHHELD
    data = {'learning_rates': (4e-3,)}
    assert found.blocks[0] == Remark(RemarkCode.LEARNING_RATE_NOT_TUNED, data, True)


def test_a_verdict_before_its_tuning_has_ended_is_none(study_dir):
    records = two(optimum=16e-3)
    _, decisions, remarks = checked(write_tuned(study_dir, records, tuning__max_points=9))
    assert decisions == {'b/vo': NO_VERDICT}
    data = {'knob': 'learning_rate', 'values': (0.032,)}
    assert Remark(RemarkCode.SCREENING_INCOMPLETE, data, True, B) in remarks
    without_verdict = write_tuned(study_dir / 'b', records[:-8], tuning__max_points=9)
    assert [r.code for r in checked(without_verdict)[2]] == [RemarkCode.NOT_BRACKETED]


@pytest.mark.parametrize(('seeds', 'few'), [(4, True), (5, False)])
def test_few_seeds_are_a_remark(study_dir, seeds, few):
    records = [r for r in two() if r['stage'] == 'screening' or r['trial']['seed'] < seeds]
    _, decisions, remarks = checked(write_tuned(study_dir, records, seeds=list(range(seeds))))
    assert decisions == {'b/vo': WORSE}
    data = {'counts': (seeds,), 'enough': 5, 'arms': None}
    assert remarks == ([Remark(RemarkCode.FEW_SEEDS, data)] if few else [])


def test_a_study_without_tuning_is_checked_too(study_dir):
    records = [trial_record('qk/vo', seed=seed) for seed in (0, 1)]
    changes = {'eval_tokens': 4096, 'val_loss': None}
    records += [trial_record('b/vo', seed=seed, **changes) for seed in (0, 1)]
    write_study(study_dir, records)
    lose(study_dir, run_name('qk/vo', SIZE), val_loss=None)
    remarks = checked(study_dir)[2]
    lost = {'readable': 1, 'planned': 2, 'stage': None, 'run': run_name('qk/vo', SIZE)}
    assert Remark(RemarkCode.MISSING_RESULTS, lost, arm=B._replace(variant='qk/vo')) in remarks
    values = {'65536': ('qk/vo',), '4096': ('b/vo',)}
    assert data_of(remarks, RemarkCode.DIFFERS)['values'] == values
    assert data_of(remarks, RemarkCode.DIVERGED) == {'arms': ((B, ((None, 2, 2, ()),)),)}


DOCUMENTS, LOG = (f'{VERDICT["b/vo"]}/{name}' for name in ('documents.json', 'metrics.jsonl'))
SCREENED_DOCUMENTS = f'{run_name("b/vo", SIZE, "screening", "learning_rate")}/documents.json'


def of_test(change):
    """A damage of the test split of documents.json."""

    def damage(content):
        documents = json.loads(content)
        change(documents['test'])
        return json.dumps(documents).encode()

    return damage


def merge(documents):
    """Two documents become one, whose sums are theirs."""
    documents['documents'].pop()
    for values in (documents['tokens'], *documents['nats']):
        last = values.pop()
        values[-1] += last


def without_last_line(content):
    return b''.join(content.splitlines(keepends=True)[:-1])


def without_run(content):
    return b''.join(
        line for line in content.splitlines(keepends=True) if VERDICT['b/vo'].encode() not in line
    )


@pytest.fixture(scope='module')
def sound(tmp_path_factory):
    return write_tuned(tmp_path_factory.mktemp('sound'), records_of(), num_documents=101)


GONE, DIRECTORY = (lambda content: None), (lambda content: ())
HALF, GARBAGE = (lambda content: content[: len(content) // 2]), (lambda content: b'\x80\x00')
NAN = lambda content: content.replace(b'2.02', b'NaN')  # noqa: E731
C_WITHHELD = {'b/vo': WORSE, 'c/vo': NO_VERDICT}


@pytest.mark.parametrize(
    ('file', 'damage', 'said', 'decisions'),
    [
        ('study.json', GONE, r'study\.json.* does not exist, so this is not a study', None),
        ('study.json', DIRECTORY, r'study\.json.* cannot be read: Is a directory', None),
        ('study.json', HALF, r'study\.json.* cannot be read: it is not JSON', None),
        ('study.json', GARBAGE, r'study\.json.* cannot be read: it is not JSON', None),
        ('study.json', lambda c: c.replace(b'0.005', b'NaN'), "'margin' is nan", None),
        ('ledger.jsonl', GONE, r'ledger\.jsonl does not exist', None),
        ('ledger.jsonl', DIRECTORY, r'ledger\.jsonl does not exist, or', None),
        ('ledger.jsonl', HALF, r'ledger\.jsonl, line 1 is damaged', None),
        ('ledger.jsonl', GARBAGE, r'ledger\.jsonl, line 1 is damaged', None),
        ('plan.jsonl', GONE, r'no results yet \(plan\.jsonl cannot be read', None),
        ('plan.jsonl', DIRECTORY, r'no results yet \(plan\.jsonl cannot be read', None),
        ('plan.jsonl', GARBAGE, r'no results yet \(plan\.jsonl:1 was left out', None),
        ('plan.jsonl', lambda c: c[:-99], r'plan\.jsonl:6 was left out', C_WITHHELD),
        ('plan.jsonl', without_run, 'is not in plan.jsonl', WITHHELD),
        ('results.jsonl', GONE, r'no results yet \(results\.jsonl cannot be read', None),
        ('results.jsonl', DIRECTORY, r'no results yet \(results\.jsonl cannot be read', None),
        ('results.jsonl', GARBAGE, r'no results yet \(results\.jsonl:1 was left out', None),
        ('results.jsonl', lambda c: c[:-99], r'results\.jsonl:54 was left out', C_WITHHELD),
        ('results.jsonl', without_last_line, '7 of its 8 verdict trials', C_WITHHELD),
        ('results.jsonl', NAN, "'val_loss' is nan", WITHHELD),
        ('results.jsonl', without_run, r'results\.jsonl lacks the results of b_vo', WITHHELD),
        (LOG, GONE, r'verdict-4 has results, but metrics\.jsonl is missing', JUDGED),
        (LOG, DIRECTORY, r'metrics\.jsonl cannot be read \(Is a directory', JUDGED),
        (LOG, lambda c: c[:-99], r'metrics\.jsonl:21 was left out', JUDGED),
        (LOG, without_last_line, r'metrics\.jsonl has no final record', JUDGED),
        (LOG, HALF, r'metrics\.jsonl:\d+ was left out', JUDGED),
        (LOG, NAN, "metrics.jsonl:20 was left out: field 'val_loss' is .*nan", JUDGED),
        (DOCUMENTS, GONE, r'verdict-4 has results, but documents\.json is missing', WITHHELD),
        (DOCUMENTS, DIRECTORY, r'documents\.json was left out: Is a directory', WITHHELD),
        (DOCUMENTS, HALF, r'documents\.json was left out: it is not JSON', WITHHELD),
        (DOCUMENTS, GARBAGE, r'documents\.json was left out: it is not JSON', WITHHELD),
        (DOCUMENTS, lambda c: b'[' * 10**6, 'left out: it is nested too deeply', WITHHELD),
        (DOCUMENTS, lambda c: c.replace(b'"test": ', b'"t": '), "'test' is missing", WITHHELD),
        (DOCUMENTS, of_test(lambda of: of['nats'].pop()), 'nats of 7 trials', WITHHELD),
        (DOCUMENTS, of_test(merge), '101 with 32,768 targets .* 100 with 32,768', WITHHELD),
        (DOCUMENTS, of_test(lambda of: of['nats'][0].__setitem__(0, 1e999)), 'inf', WITHHELD),
        (SCREENED_DOCUMENTS, GONE, r'but documents\.json is missing', JUDGED),
    ],
)  # fmt: skip
def test_evidence_that_is_damaged_is_named_and_what_rests_on_it_is_withheld(
    sound, study_dir, file, damage, said, decisions
):
    """No decisions: the study cannot be read. Without documents an interval would be narrower."""
    path = shutil.copytree(sound, study_dir) / file
    damaged = damage(path.read_bytes())
    path.unlink()
    if damaged == ():
        path.mkdir()
    elif damaged is not None:
        path.write_bytes(damaged)
    if decisions is None:
        with pytest.raises(ReportError, match=said):
            load_study(study_dir)
        return
    study = load_study(study_dir)
    found = find(study)
    remarks = [clause(remark) for remark in found.remarks if remark.blocks]
    assert re.search(said, '\n'.join([*study.problems, *remarks]))
    assert {a.variant: a.verdict.decision for a in found.arms if a.verdict} == decisions
    is_known = {a.variant: a.difference.low is not None for a in found.arms if a.difference}
    assert is_known.pop('b/vo', False) == (decisions['b/vo'] is WORSE)
    if file == DOCUMENTS:
        assert [why.code for why in found.arms[1].verdict.reasons] == [ReasonCode.NO_DOCUMENTS]


def test_without_documents_an_arm_of_an_untuned_study_has_no_interval(study_dir):
    records = [trial_record(v, seed=s, val_loss=2 + s / 9) for v in VERDICT for s in range(3)]
    write_study(study_dir, records)
    lows = [arm.difference.low for arm in find(load_study(study_dir)).arms[1:]]
    assert None not in lows
    (study_dir / run_name('b/vo', SIZE) / 'documents.json').unlink()
    _, b, c = find(load_study(study_dir)).arms
    assert (b.difference.low, c.difference.low) == (None, lows[1]) and b.difference.n == 3
    for path in study_dir.glob('*/documents.json'):  # as a version without them leaves a study
        path.unlink()
    study = load_study(study_dir)
    assert study.problems == () and find(study).arms[1].difference.low == pytest.approx(lows[0])
