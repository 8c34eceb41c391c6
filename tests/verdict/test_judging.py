"""What a word needs beside its test: both splits, documents, looks, a declared arm, known code."""

import itertools
import json

import numpy as np
import pytest
from scipy import stats

from qkattn.stats import decision, inference
from qkattn.storage import ledger
from qkattn.study.place import EXPECTED, LONGER, Place
from qkattn.verdict import Decision, ReasonCode, Remark, RemarkCode, find, load_study
from tests.studies import (
    edit_plan,
    run_name,
    trial_record,
    tuned_arm,
    write_documents,
    write_lines,
    write_study,
    write_tuned,
)

SIZE = 'd_model=128'
BASE = 2 + 0.05 * np.arange(8)
NOISE = 0.001 * np.array([3, -1, 2, 0, -2, 1, -3, 1])
ERROR = NOISE.std(ddof=1) / 8**0.5
B = Place('b/vo', SIZE, 'stdlib')


def arm(variant, delta, validation=None, noise=NOISE, **keywords):
    """Verdict losses that are `delta` above the baseline's on test, `validation` on validation."""
    records = tuned_arm(variant, losses=list(BASE + delta + noise * (delta != 0)), **keywords)
    for record in records:
        if validation is not None and record['stage'] == 'verdict':
            record['val_loss'] += validation - delta
    return records


def verdicts(directory):
    found = find(load_study(directory))
    return {a.variant: a.verdict for a in found.arms if a.verdict}


def words(directory):
    return {variant: verdict.decision for variant, verdict in verdicts(directory).items()}


def codes(reasons):
    return [reason.code for reason in reasons]


@pytest.mark.parametrize(
    ('test', 'validation', 'word'),
    [
        (-0.03, -0.001, Decision.BETTER),
        (-0.03, 0.001, None),
        (-0.003, -0.001, Decision.BETTER_BELOW_MARGIN),
        (-0.003, 0.001, None),
        (0.03, 0.001, Decision.WORSE),
        (0.03, -0.001, None),
        (0.0004, -0.004, Decision.EQUIVALENT),
        (0.0004, -0.006, None),
    ],
)
def test_a_word_is_that_of_the_test_split_and_validation_supports_it(
    study_dir, test, validation, word
):
    noise = (1.5 if test == -0.003 else 1.0) * (NOISE - NOISE.mean())
    records = arm('qk/vo', 0) + arm('b/vo', test, validation, noise)
    found = find(load_study(write_tuned(study_dir, records)))
    (verdict,) = [a.verdict for a in found.arms if a.verdict]
    compared = found.arms[1].comparison
    assert compared.difference.mean == pytest.approx(test) and found.split == 'test'
    assert compared.validation == pytest.approx(validation)
    assert verdict.decision is (word or Decision.UNDECIDED)
    if word is None:
        reason = verdict.reasons[-1]
        assert reason.code is ReasonCode.SPLITS_DISAGREE
        means = {'test': compared.difference.mean, 'validation': compared.validation}
        assert {name: reason.data[name] for name in means} == means
        assert reason.data['decision'].value.startswith(
            'equivalent' if test == 0.0004 else 'better' if test < 0 else 'worse'
        )


@pytest.mark.parametrize(
    ('delta', 'passes'),
    [
        (0.03, {'worse', 'not better'}),
        (-0.03, {'better', 'not worse'}),
        (0.0, {'not better', 'not worse'}),
        (None, set()),
    ],
)
def test_a_positive_control_passes_with_the_expected_verdict(study_dir, delta, passes):
    noise = 40 * NOISE if delta is None else NOISE - NOISE.mean()
    records = arm('qk/vo', 0) + arm('b/vo', delta or 1e-9, noise=noise) + arm('c/vo', 0.02)
    expected = [f'b/vo is {word}' for word in EXPECTED]
    found = find(load_study(write_tuned(study_dir, records, expected=expected)))
    assert {of.expected.word for of in found.positive if of.passed} == passes
    assert [of.passed is None for of in found.positive] == [False] * 4
    assert {of.verdict.num_comparisons for of in found.positive} == {4}


def test_a_positive_control_may_be_at_equal_shape_and_waits_for_results(study_dir):
    at_shape = arm('b/vo', 0.03, control='equal_shape')
    records = arm('qk/vo', 0) + arm('b/vo', -0.03) + at_shape
    expected = ['b/vo is worse at equal shape', 'b/vo is worse']
    write_tuned(study_dir, records, expected=expected)
    first, second = find(load_study(study_dir)).positive
    assert (first.passed, first.arm.control) == (True, 'equal_shape')
    assert (second.passed, second.arm.control) == (False, None)
    run = run_name('b/vo', SIZE, 'verdict')
    write_tuned(study_dir, [r for r in records if r['run'] != run], expected=expected)
    assert [of.passed for of in find(load_study(study_dir)).positive] == [True, None]


def test_without_test_losses_there_is_no_word(study_dir):
    records = arm('qk/vo', 0) + arm('b/vo', 0.03)
    for record in records:
        record['test_loss'] = record['test_bits_per_byte'] = None
    found = find(load_study(write_tuned(study_dir, records)))
    assert found.split == 'val' and found.arms[1].difference.mean == pytest.approx(0.030125)
    assert found.arms[1].verdict.decision is Decision.NO_VERDICT
    assert found.blocks == (Remark(RemarkCode.NO_TEST, {}, True, every_arm=True),)


def shifted(directory, variant, split, sd):
    """Adds differences by document to one arm, of mean zero; returns them and the tokens."""
    line = run_name(variant, SIZE, 'verdict')
    records = [json.loads(x) for x in (directory / 'results.jsonl').read_text().splitlines()]
    own = [record for record in records if record['run'] == line]
    shifts = np.random.default_rng(0).normal(0, sd, 100)
    write_documents(directory / line, own, 100, {split: shifts})
    content = json.loads((directory / line / 'documents.json').read_text())
    return shifts, np.array(content[split]['tokens'])


@pytest.mark.parametrize(('sd', 'word'), [(0.02, Decision.BETTER), (0.3, Decision.UNDECIDED)])
def test_documents_add_their_error_to_the_difference(study_dir, sd, word):
    write_tuned(study_dir, arm('qk/vo', 0) + arm('b/vo', -0.03))
    shifts, tokens = shifted(study_dir, 'b/vo', 'test', sd)
    found = find(load_study(study_dir))
    compared = found.arms[1].comparison
    difference, share = compared.difference, tokens / tokens.sum()
    own = shifts - share @ shifts
    expected = np.sqrt(np.sum(share**2 * own**2 / (1 - share)))
    assert difference.mean == pytest.approx(-0.03 + NOISE.mean())
    assert difference.error_evaluation == pytest.approx(expected, rel=1e-6)
    assert difference.error_seeds == pytest.approx(ERROR) and compared.num_documents == 100
    assert difference.df == pytest.approx(
        (ERROR**2 + expected**2) ** 2
        / (ERROR**4 / 7 + expected**4 / (np.sum(share**2) ** 2 / np.sum(share**4) - 1))
    )
    assert found.arms[1].verdict.decision is word


def test_errors_of_the_validation_documents_do_not_count(study_dir):
    write_tuned(study_dir, arm('qk/vo', 0) + arm('b/vo', -0.03))
    shifted(study_dir, 'b/vo', 'validation', 0.3)
    (_, other) = find(load_study(study_dir)).arms
    assert other.difference.error_evaluation == pytest.approx(0, abs=1e-9)
    assert other.verdict.decision is Decision.BETTER


def test_unlike_or_missing_documents_give_no_word(study_dir):
    write_tuned(study_dir, arm('qk/vo', 0) + arm('b/vo', -0.03) + arm('c/vo', -0.03))
    path = study_dir / run_name('b/vo', SIZE, 'verdict') / 'documents.json'
    content = json.loads(path.read_text())
    content['test']['documents'][0] = 'another'
    path.write_text(json.dumps(content))
    (study_dir / run_name('c/vo', SIZE, 'verdict') / 'documents.json').unlink()
    for verdict in verdicts(study_dir).values():
        assert verdict.decision is Decision.NO_VERDICT
        assert codes(verdict.reasons) == [ReasonCode.NO_DOCUMENTS]


@pytest.mark.parametrize(('number', 'few'), [(99, True), (100, False)])
def test_few_documents_of_text_give_no_word(study_dir, number, few):
    records = arm('qk/vo', 0) + arm('b/vo', -0.03)
    found = find(load_study(write_tuned(study_dir, records, num_documents=number)))
    data = {'documents': number, 'needed': 100}
    expected = [
        Remark(RemarkCode.FEW_DOCUMENTS, {'split': split} | data, True, every_arm=True)
        for split in ('val', 'test')
    ]
    assert list(found.blocks) == expected * few
    assert found.arms[1].verdict.decision is (Decision.NO_VERDICT if few else Decision.BETTER)
    for record in records:
        record |= {'val_bits_per_byte': None, 'test_bits_per_byte': None}
    probe = write_tuned(study_dir / 'probe', records, num_documents=number)
    assert words(probe) == {'b/vo': Decision.BETTER}


def test_a_single_document_leaves_no_error_over_documents(study_dir):
    untuned = [trial_record(v, seed=seed) for v in ('qk/vo', 'b/vo') for seed in range(3)]
    write_study(study_dir, untuned, num_documents=1)
    compared = find(load_study(study_dir)).arms[1].comparison
    assert (compared.num_documents, compared.difference.error_evaluation) == (None, 0.0)
    records = arm('qk/vo', 0) + arm('b/vo', -0.03)
    for record in records:
        record |= {'val_bits_per_byte': None, 'test_bits_per_byte': None}
    probe = write_tuned(study_dir / 'probe', records, num_documents=1)
    assert codes(verdicts(probe)['b/vo'].reasons) == [ReasonCode.NO_DOCUMENTS]


def at_looks(directory, losses, looks=(4, 8), results=None):
    """A study whose verdict runs hold the seeds of one look each, as many as have `results`."""
    records = []
    for variant, own in losses.items():
        screened, finished = tuned_arm(variant)[:10], tuned_arm(variant, losses=own)[10:]
        records += screened
        for number, (start, end) in enumerate(itertools.pairwise((0, *looks))):
            if number < (results or {}).get(variant, len(looks)):
                name = f'{variant[0]}{number}'
                own_run = {'run': name, 'config_hash': name}
                records += [record | own_run for record in finished[start:end]]
    return write_tuned(directory, records, looks=list(looks))


def test_the_first_look_that_decides_decides(study_dir):
    """b is decided at the first look, which later seeds do not change; c at the second one."""
    late = np.where(np.arange(8) < 4, NOISE * 20, 0.03 + NOISE)
    losses = {'qk/vo': BASE, 'b/vo': BASE - 0.05 + NOISE / 50, 'c/vo': BASE + late}
    losses['b/vo'][4:] = BASE[4:] + 0.4
    found = verdicts(at_looks(study_dir, losses))
    first, second = decision.spending((4, 8))
    assert first < 0.006 and first + second == pytest.approx(0.05)
    assert found['b/vo'].decision is Decision.BETTER
    assert (found['b/vo'].num_seeds, found['b/vo'].alpha) == (4, first)
    assert (found['c/vo'].num_seeds, found['c/vo'].alpha) == (8, second)
    difference = inference.paired((losses['b/vo'] - BASE)[:4].tolist(), 0.005)
    assert found['b/vo'].p_holm <= 2 * difference.p * (1 + 1e-9) <= first


def test_a_look_is_tested_at_its_own_level(study_dir):
    """A p value between the first look's level and 0.05 decides without looks, not at the look."""
    small = NOISE.copy()
    small[:4] = 0.001 * np.array([1, -1, 1, -1])
    delta = -0.0035
    losses = {'qk/vo': BASE, 'b/vo': BASE + delta + small}
    one = inference.paired((delta + small[:4]).tolist(), 0.005)
    assert decision.spending((4, 8))[0] < one.p < 0.05
    only_first = {'b/vo': 1, 'qk/vo': 1}
    verdict = verdicts(at_looks(study_dir, losses, results=only_first))['b/vo']
    assert (verdict.decision, verdict.num_seeds) == (Decision.UNDECIDED, 4)


def test_a_look_in_progress_is_a_remark(study_dir):
    losses = {'qk/vo': BASE, 'b/vo': BASE - 0.002 + 3 * NOISE, 'c/vo': BASE - 0.002 + 3 * NOISE}
    found = find(load_study(at_looks(study_dir, losses, results={'c/vo': 1})))
    assert [a.verdict.num_seeds for a in found.arms[1:]] == [8, 4]
    data = {'look': 2, 'looks': 2, 'seeds': 8, 'reached': 2, 'arms': 3}
    (remark,) = [r for r in found.remarks if r.code is RemarkCode.LOOK_IN_PROGRESS]
    assert remark.data == data and not remark.blocks
    assert not any(r.code is RemarkCode.OTHER_SEEDS for r in found.remarks)


def test_seeds_between_looks_are_not_those_declared(study_dir):
    losses = {'qk/vo': BASE, 'b/vo': BASE - 0.03}
    records = [r for v, own in losses.items() for r in tuned_arm(v, losses=own[:6])]
    found = find(load_study(write_tuned(study_dir, records, looks=[4, 8])))
    assert {r.code for r in found.blocks} == {RemarkCode.OTHER_SEEDS}
    assert found.arms[1].verdict.decision is Decision.NO_VERDICT


def declared_later(directory, variant, looked):
    """The study, declared without one of its arms, perhaps looked at, and then with it."""
    study = json.loads((directory / 'study.json').read_text())
    without = study | {'arms': [a for a in study['arms'] if a['variant'] != variant]}
    (directory / ledger.NAME).unlink()
    ledger.declare(directory, without)
    if looked:
        ledger.look(directory)
    ledger.declare(directory, study)


@pytest.mark.parametrize('looked', [False, True])
def test_an_arm_that_was_added_after_a_look_gets_no_word(study_dir, looked):
    records = arm('qk/vo', 0) + arm('b/vo', -0.03) + arm('c/vo', 0.03)
    records += arm('qk/vo', 0, control=LONGER) + arm('b/vo', -0.03, control=LONGER)
    write_tuned(study_dir, records)
    declared_later(study_dir, 'b/vo', looked)
    found = find(load_study(study_dir))
    expected = {'b/vo': Decision.NO_VERDICT if looked else Decision.BETTER}
    assert words(study_dir) == expected | {'c/vo': Decision.WORSE}
    post_hoc = [remark for remark in found.remarks if remark.code is RemarkCode.POST_HOC]
    assert [remark.arm for remark in post_hoc] == [B, B._replace(control=LONGER)] * looked
    assert found.arms[1].difference.mean == pytest.approx(-0.029875)


def test_the_family_is_the_widest_that_was_declared(study_dir):
    """Arms that are deleted from a study later on are corrected for, and withhold its words."""
    records = arm('qk/vo', 0) + arm('b/vo', 0.003) + arm('c/vo', 0.03)
    write_tuned(study_dir, records)
    before = verdicts(study_dir)['b/vo']
    kept = [record for record in records if record['variant'] != 'c/vo']
    entries = (study_dir / ledger.NAME).read_bytes()
    write_tuned(study_dir, kept)
    (study_dir / ledger.NAME).write_bytes(entries)
    found = find(load_study(study_dir))
    assert found.num_comparisons == before.num_comparisons == 2
    assert found.blocks == (Remark(RemarkCode.OTHER_DECLARATION, {}, True),)
    ledger.declare(study_dir, json.loads((study_dir / 'study.json').read_text()))
    verdict = verdicts(study_dir)['b/vo']
    assert verdict.num_comparisons == 2
    assert verdict.p_holm == pytest.approx(2 * found.arms[1].difference.p)


def test_a_margin_that_is_widened_later_withholds_every_word(study_dir):
    write_tuned(study_dir, arm('qk/vo', 0) + arm('b/vo', 0.03))
    declared = json.loads((study_dir / 'study.json').read_text())
    (study_dir / 'study.json').write_text(json.dumps(declared | {'margin': 0.1}))
    assert words(study_dir) == {'b/vo': Decision.NO_VERDICT}
    (study_dir / 'study.json').write_text(json.dumps(declared | {'command': 'another'}))
    assert words(study_dir) == {'b/vo': Decision.WORSE}


@pytest.mark.parametrize(
    ('git', 'code', 'accepted'),
    [
        ({'commit': 'abc1234', 'dirty': True}, RemarkCode.UNCOMMITTED_CHANGES, 'uncommitted'),
        ({'commit': 'f' * 40, 'dirty': False}, RemarkCode.SOFTWARE_DIFFERS, 'commits'),
    ],
)
def test_code_that_is_not_one_commit_withholds_words_unless_accepted(
    study_dir, git, code, accepted
):
    records = arm('qk/vo', 0) + arm('b/vo', 0.03)
    for record in records[-8:]:
        record['provenance'] |= {'git': git}
    found = find(load_study(write_tuned(study_dir, records)))
    assert codes(found.blocks) == [code] == codes(found.arms[1].verdict.reasons)
    other = {'uncommitted': 'commits', 'commits': 'uncommitted'}[accepted]
    ledger.accept(study_dir, other, 'not what differs')
    assert words(study_dir) == {'b/vo': Decision.NO_VERDICT}
    ledger.accept(study_dir, accepted, 'a comment only')
    found = find(load_study(study_dir))
    assert found.arms[1].verdict.decision is Decision.WORSE and found.blocks == ()
    (remark,) = [remark for remark in found.remarks if remark.code is code]
    assert remark.data['accepted'] == 'a comment only'


def test_runs_outside_the_plan_are_a_remark(study_dir):
    write_tuned(study_dir, arm('qk/vo', 0) + arm('b/vo', 0.03))
    orphan = {'directory': 'runs/x', 'run': 'x', 'config': None, 'results': None}
    write_lines(study_dir / 'orphans.jsonl', [orphan])
    found = find(load_study(study_dir))
    assert Remark(RemarkCode.ORPHANED_RUNS, {'runs': ('runs/x',)}) in found.remarks
    assert found.arms[1].verdict.decision is Decision.WORSE


def corpora(deltas, noises=None):
    """Arms of the baseline and b/vo, a corpus each with its own difference and noise."""
    noises = noises or {}
    return [
        record
        for corpus, delta in deltas.items()
        for variant, own in (('qk/vo', 0), ('b/vo', delta))
        for record in arm(
            variant,
            own,
            noise=noises.get(corpus, NOISE),
            corpus=corpus,
            data={'name': corpus, 'version': '1'},
        )
    ]


def test_several_corpora_give_a_word_each_and_one_over_all(study_dir):
    noises = {'stdlib': NOISE, 'packages': -NOISE / 2}
    write_tuned(study_dir, corpora({'stdlib': -0.03, 'packages': 0.012}, noises))
    found = find(load_study(study_dir))
    assert {a.corpus: a.verdict.decision for a in found.arms if a.verdict} == {
        'stdlib': Decision.BETTER,
        'packages': Decision.WORSE,
    }
    assert found.num_comparisons == 2
    (overall,) = found.overall
    assert (overall.variant, overall.size) == ('b/vo', SIZE)
    assert [a.corpus for a in overall.arms] == ['stdlib', 'packages']
    means = (-0.03 + NOISE + 0.012 - NOISE / 2) / 2
    assert list(overall.comparison.differences.values()) == pytest.approx(means.tolist())
    difference = overall.comparison.difference
    assert difference.p == pytest.approx(stats.ttest_1samp(means, 0).pvalue)
    assert overall.comparison.num_documents == 200
    assert overall.verdict.decision is Decision.BETTER
    assert overall.verdict.num_comparisons == 1
    assert overall.verdict.p_holm == pytest.approx(difference.p)


def test_the_error_over_documents_of_all_corpora(study_dir):
    write_tuned(study_dir, corpora({'stdlib': -0.03, 'packages': -0.03}))
    errors = []
    for corpus in ('stdlib', 'packages'):
        line = run_name('b/vo', SIZE, 'verdict', corpus=corpus)
        records = [json.loads(x) for x in (study_dir / 'results.jsonl').read_text().splitlines()]
        own = [record for record in records if record['run'] == line]
        shifts = np.random.default_rng(len(errors)).normal(0, 0.1, 100)
        write_documents(study_dir / line, own, 100, {'test': shifts})
    found = find(load_study(study_dir))
    errors = [a.difference.error_evaluation for a in found.arms if not a.is_baseline]
    (overall,) = found.overall
    assert overall.comparison.difference.error_evaluation == pytest.approx(np.hypot(*errors) / 2)
    assert min(errors) > 0.005


def test_what_blocks_one_corpus_blocks_the_word_over_all(study_dir):
    write_tuned(study_dir, corpora({'stdlib': -0.03, 'packages': -0.03}))
    run = run_name('b/vo', SIZE, 'verdict', corpus='packages')
    edit_plan(study_dir, run, optimizer__schedule='constant')
    found = find(load_study(study_dir))
    blocked = {a.corpus: a.verdict.decision for a in found.arms if a.verdict}
    assert blocked == {'stdlib': Decision.BETTER, 'packages': Decision.NO_VERDICT}
    (overall,) = found.overall
    assert overall.verdict.decision is Decision.NO_VERDICT
    assert RemarkCode.NOT_ANNEALED in codes(overall.verdict.reasons)


def test_a_study_on_one_corpus_has_no_word_over_all(study_dir):
    found = find(load_study(write_tuned(study_dir, arm('qk/vo', 0) + arm('b/vo', 0.03))))
    assert found.overall == ()


def test_the_correlation_of_an_arm_and_its_baseline(study_dir):
    losses = BASE + 0.1 * np.array([1, -1, 1, 1, -1, -1, 1, -1])
    records = arm('qk/vo', 0) + tuned_arm('b/vo', losses=list(losses))
    found = find(load_study(write_tuned(study_dir, records)))
    assert found.arms[1].comparison.correlation == pytest.approx(np.corrcoef(BASE, losses)[0, 1])
    same = [r for v in ('qk/vo', 'b/vo') for r in tuned_arm(v, losses=[2.0] * 8)]
    found = find(load_study(write_tuned(study_dir / 'same', same)))
    assert found.arms[1].comparison.correlation is None


@pytest.mark.parametrize('seed', range(6))
def test_words_of_random_studies_keep_their_rules(study_dir, seed):
    """Whatever the losses: a word has the sign of both splits, and its p values are significant."""
    random = np.random.default_rng(seed)
    records = arm('qk/vo', 0)
    for variant in 'abcdef':
        delta, validation = random.normal(0, 0.01, 2)
        noise = random.normal(0, 10 ** random.uniform(-4, -2), 8)
        records += arm(f'{variant}/vo', delta, validation, noise)
    found = find(load_study(write_tuned(study_dir, records)))
    for one in found.arms[1:]:
        verdict, compared = one.verdict, one.comparison
        word = verdict.decision.value
        test, confirmed = compared.difference.mean, compared.validation
        assert verdict.num_comparisons == 6 and verdict.alpha == pytest.approx(0.05)
        if word.startswith(('better', 'worse')):
            assert test * confirmed > 0 and word.startswith('better') == (test < 0)
            assert verdict.p_holm <= 0.05
            assert (verdict.p_margin_holm <= 0.05) == ('below' not in word)
        elif word == 'equivalent':
            assert verdict.p_equivalence_holm <= 0.05 and abs(confirmed) < 0.005
        else:
            disagree = codes(verdict.reasons)[-1] is ReasonCode.SPLITS_DISAGREE
            assert disagree or min(verdict.p_holm, verdict.p_equivalence_holm) > 0.05


def test_a_run_that_was_altered_after_a_look_gives_no_word(study_dir):
    """Its numbers agree with each other; the arm without that run keeps its word."""
    losses = {'qk/vo': 0, 'b/vo': -0.03, 'c/vo': 0.04}
    declared = write_tuned(study_dir, [r for v, of in losses.items() for r in arm(v, of)])
    ledger.look(study_dir)
    entries = (declared / ledger.NAME).read_text()
    assert words(study_dir) == {'b/vo': Decision.BETTER, 'c/vo': Decision.WORSE}
    losses['b/vo'] = 0.05
    write_tuned(study_dir, [r for v, of in losses.items() for r in arm(v, of)])
    (declared / ledger.NAME).write_text(entries)
    found = find(load_study(study_dir))
    data = {'look': 1, 'run': run_name('b/vo', SIZE, 'verdict')}
    assert found.arms[1].blocks[-1] == Remark(RemarkCode.ALTERED, data, True, B)
    assert words(study_dir) == {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.WORSE}
    assert not ledger.look(study_dir) and (declared / ledger.NAME).read_text() == entries
