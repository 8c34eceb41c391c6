"""Differences that a longer training leaves as they are, and those that it moves."""

import json

import numpy as np
import pytest

from experiments.claims.protocol import language_model
from qkattn.report import tables
from qkattn.storage import ledger
from qkattn.verdict import find, load_study, longer
from qkattn.verdict.settling import Length, Settling, Trained, settle
from tests.studies import VERDICT_SEEDS, tuned_arm, write_tuned

MARGIN = 0.01
ERROR = 0.001
BASE_LOSSES = 2.0 + 0.002 * np.arange(8)
NOISE = 1e-4 * np.sin(np.arange(8))
FRESH_SEEDS = tuple(range(56, 64))
OTHER_DATA = {'name': 'stdlib', 'version': '3.14.0', 'unigram_bits_per_byte': 4.53}
SHORT_STEPS = 400
LONG_STEPS = 4 * SHORT_STEPS


@pytest.mark.parametrize(
    # `short` and `long` are the differences from the baseline after a short and a long training, in
    # nats/token. Below zero is better. Each has the standard error `error`. `equivalent` tells
    # whether the verdict after the short training is 'equivalent'.
    ('short', 'long', 'error', 'equivalent', 'code', 'towards'),
    [
        # The limit of a change is the margin of 0.01. Three errors, 3 * sqrt(2) * 0.001, are less.
        (0.05, 0.05 - 0.01 + 1e-6, 0.001, False, Length.SETTLED, 'better'),
        (0.05, 0.05 - 0.01 - 1e-6, 0.001, False, Length.SHRINKS, 'better'),
        (0.05, 0.05 + 0.01 + 1e-6, 0.001, False, Length.GROWS, 'worse'),
        (-0.05, -0.05 - 0.01 - 1e-6, 0.001, False, Length.GROWS, 'better'),
        # The change of -0.025 is within the limit of three errors, 3 * sqrt(2) * 0.009 = 0.038.
        (0.05, 0.025, 0.009, False, Length.SETTLED, 'better'),
        # The sign changes, so the small size of the change does not matter.
        (0.003, -0.001, 0.001, False, Length.TURNS, 'better'),
        # The sign does not matter for an equivalent arm, but it has to stay within the margin.
        (0.003, -0.001, 0.001, True, Length.SETTLED, 'better'),
        (0.003, 0.011, 0.001, True, Length.GROWS, 'worse'),
        # The sign changes, so the large errors do not matter.
        (0.05, -0.05, 1.0, False, Length.TURNS, 'better'),
    ],
)
def test_a_difference_is_settled_if_longer_training_leaves_it_within_the_limit(
    short, long, error, equivalent, code, towards
):
    """A settled difference keeps its sign, and changes by at most a limit.

    The limit is max(margin, 3 * error_of_change). A difference that is not settled TURNS if it
    changes its sign, SHRINKS if it comes closer to 0, and GROWS otherwise.
    """
    margin = 0.01

    settling = settle(
        Trained(steps=400, mean=short, error=error),
        Trained(steps=4 * 400, mean=long, error=error),
        margin,
        equivalent=equivalent,
    )

    assert settling.code == code
    # Longer training moves the difference down, towards 'better', or up, towards 'worse'.
    assert settling.towards == towards
    assert settling.times == 4  # of the steps
    error_of_change = np.sqrt(error**2 + error**2)
    assert settling.limit == pytest.approx(max(margin, 3 * error_of_change))


@pytest.mark.parametrize('long', [None, Trained(LONG_STEPS - 1, 0.05, ERROR)])
def test_a_difference_is_not_settled_without_a_training_four_times_as_long(long):
    short = Trained(SHORT_STEPS, 0.05, ERROR)
    assert settle(short, long, MARGIN) == Settling(Length.ONE_LENGTH)


def test_a_difference_after_long_training_alone_is_not_settled():
    long = Trained(LONG_STEPS, 0.05, ERROR)
    assert settle(None, long, MARGIN) == Settling(Length.ONE_LENGTH)


def short_records(**changes):
    """Records of qk/vo, and of b/vo, which is worse by about 0.05."""
    baseline = tuned_arm('qk/vo', losses=list(BASE_LOSSES), **changes)
    arm = tuned_arm('b/vo', losses=list(BASE_LOSSES + 0.05 + NOISE), **changes)
    return baseline + arm


def long_records(difference, seeds=FRESH_SEEDS, learning_rate=None, **changes):
    """Records of qk/vo, and of b/vo with this difference, trained for 4 * 400 steps.

    The verdict run of b/vo trains at `learning_rate`. None means the tuned rate.
    """
    changes |= {'seeds': seeds, 'num_steps': LONG_STEPS, 'num_tokens': LONG_STEPS * 768}
    baseline = tuned_arm('qk/vo', losses=list(BASE_LOSSES), **changes)
    losses = list(BASE_LOSSES + difference + NOISE)
    arm = tuned_arm('b/vo', losses=losses, learning_rate=learning_rate, **changes)
    return baseline + arm


def write_study_of_length(path, records, seeds, num_steps, **changes):
    """Writes a tuned study whose arms train for `num_steps` steps."""
    write_tuned(path, records, seeds=list(seeds), **changes)
    base = json.loads((path / 'study.json').read_text())['base']
    base['train']['num_steps'] = num_steps
    write_tuned(path, records, seeds=list(seeds), base=base, **changes)


@pytest.fixture
def short_study(tmp_path):
    """A study of 400 steps in which b/vo is worse by about 0.05."""
    path = tmp_path / 'short'
    write_study_of_length(path, short_records(), VERDICT_SEEDS, SHORT_STEPS)
    return path


def settling_of_b(path):
    findings = find(load_study(path))
    return next(arm.settling for arm in findings.arms if arm.variant == 'b/vo')


@pytest.mark.parametrize(
    # `difference` is the loss of b/vo minus the loss of qk/vo in the longer study.
    # It is 0.05 in the short study. The limit of a change is the margin of 0.005.
    ('difference', 'code'),
    [
        pytest.param(0.052, Length.SETTLED, id='changes by less than the limit'),
        pytest.param(0.02, Length.SHRINKS, id='comes closer to 0 by more than the limit'),
        pytest.param(-0.05, Length.TURNS, id='changes its sign'),
    ],
)
def test_a_longer_study_beside_it_says_whether_a_difference_is_settled(
    short_study, tmp_path, difference, code
):
    """A study in the same directory may train the same arms four times as long.

    Its differences show whether the differences of the short study are settled, that is, whether
    they last.
    """
    long_study = tmp_path / 'long'
    write_study_of_length(long_study, long_records(difference), FRESH_SEEDS, LONG_STEPS)

    settling = settling_of_b(short_study)

    assert settling.code is code
    # The settling also has the difference after the longer training.
    assert settling.longer == pytest.approx(difference, abs=1e-3)
    # No study trains longer than the long study.
    assert settling_of_b(long_study).code is Length.ONE_LENGTH


@pytest.mark.parametrize(
    # `seeds`, `num_steps` and the changes describe the longer study. Each case breaks one
    # condition under which it would settle the difference.
    ('seeds', 'num_steps', 'changes_of_arms', 'changes_of_study'),
    [
        pytest.param(VERDICT_SEEDS, LONG_STEPS, {}, {}, id='the same seeds'),
        pytest.param(FRESH_SEEDS, LONG_STEPS - 1, {}, {}, id='too few steps'),
        pytest.param(FRESH_SEEDS, LONG_STEPS, {'size': 'd_model=64'}, {}, id='another size'),
        pytest.param(FRESH_SEEDS, LONG_STEPS, {'corpus': 'text'}, {}, id='another corpus'),
        pytest.param(
            FRESH_SEEDS, LONG_STEPS, {'data': OTHER_DATA}, {}, id='another version of the corpus'
        ),
        pytest.param(
            FRESH_SEEDS,
            LONG_STEPS,
            {'learning_rate': 1e-3},
            {},
            id='a learning rate other than the tuned one',
        ),
        pytest.param(FRESH_SEEDS, LONG_STEPS, {}, {'matched': 'flops'}, id='another match'),
        pytest.param(FRESH_SEEDS, LONG_STEPS, {}, {'fill': None}, id='no fill'),
    ],
)
def test_an_unlike_longer_study_settles_no_difference(
    short_study, tmp_path, seeds, num_steps, changes_of_arms, changes_of_study
):
    records = long_records(0.052, seeds, **changes_of_arms)
    write_study_of_length(tmp_path / 'long', records, seeds, num_steps, **changes_of_study)

    assert settling_of_b(short_study).code is Length.ONE_LENGTH
    assert settling_of_b(tmp_path / 'long').code is Length.ONE_LENGTH


@pytest.mark.parametrize(
    ('difference', 'sentence'),
    [
        (0.052, 'is worse than qk/vo by more than the margin, settled'),
        (0.02, 'is worse than qk/vo by more than the margin at this length'),
    ],
)
def test_the_summary_says_how_long_a_verdict_holds(short_study, tmp_path, difference, sentence):
    records = long_records(difference)
    write_study_of_length(tmp_path / 'long', records, FRESH_SEEDS, LONG_STEPS)

    summary = tables.summary(find(load_study(short_study)))

    assert sentence in summary[0]


def test_a_difference_without_a_longer_study_holds_at_its_length(short_study, tmp_path):
    """A study that cannot be read is not a longer study."""
    damaged = tmp_path / 'damaged'
    damaged.mkdir()
    (damaged / 'study.json').write_text('{')
    assert settling_of_b(short_study).code is Length.ONE_LENGTH


@pytest.mark.parametrize(
    ('longer_seeds', 'code'),
    [
        pytest.param(FRESH_SEEDS, Length.SETTLED, id='fresh seeds'),
        pytest.param(VERDICT_SEEDS, Length.ONE_LENGTH, id='verdict seeds'),
        pytest.param((), Length.ONE_LENGTH, id='none, which means the verdict seeds'),
    ],
)
def test_a_control_trained_longer_needs_fresh_seeds(tmp_path, longer_seeds, code):
    # b/vo is worse by about 0.05, and by 0.052 when trained longer. So only the seeds decide.
    longer_records = long_records(0.052, longer_seeds or VERDICT_SEEDS, control='longer')
    records = short_records() + longer_records
    controls = {'equal_shape': True, 'longer': 4, 'longer_seeds': list(longer_seeds)}
    path = tmp_path / 'short'

    write_study_of_length(path, records, VERDICT_SEEDS, SHORT_STEPS, controls=controls)

    assert settling_of_b(path).code is code


@pytest.mark.parametrize(
    ('longer_seeds', 'code'),
    [
        pytest.param(FRESH_SEEDS, Length.SETTLED, id='fresh seeds'),
        pytest.param(tuple(range(30, 38)), Length.ONE_LENGTH, id='seeds of the repeated study'),
    ],
)
def test_a_control_trained_longer_needs_other_seeds_than_the_pooled_ones(
    tmp_path, longer_seeds, code
):
    """A repeat pools its difference with the repeated study, which has the seeds 30 to 37."""
    first_seeds = tuple(range(30, 38))
    first_records = short_records(seeds=first_seeds)
    write_study_of_length(tmp_path / 'first', first_records, first_seeds, SHORT_STEPS)

    # b/vo is worse by about 0.05, and by 0.052 when trained longer. So only the seeds decide.
    records = short_records() + long_records(0.052, longer_seeds, control='longer')
    controls = {'equal_shape': True, 'longer': 4, 'longer_seeds': list(longer_seeds)}
    path = tmp_path / 'short'
    write_study_of_length(path, records, VERDICT_SEEDS, SHORT_STEPS, controls=controls)
    last_entry = ledger.read(tmp_path / 'first' / ledger.NAME).last
    ledger.append(
        path / ledger.NAME,
        ledger.REPEATS,
        study='first',
        entry=last_entry,
        retrospective=True,
        why='left open',
    )

    findings = find(load_study(path))

    arm = next(arm for arm in findings.arms if arm.variant == 'b/vo')
    assert arm.comparison.pooled == {'first': 8}
    # The seeds of `first` are in the difference, so longer training with them is not fresh.
    assert arm.settling.code is code


def test_a_longer_study_may_differ_in_the_length_of_training_alone():
    short = language_model('cpu')
    # Other seeds and evaluations are allowed too.
    long = language_model('cpu', seeds=6, first_seed=56, evaluations=8, times_as_long=4)
    rope = language_model('cpu', positions='rope')
    # How many layers of a loop are compiled as one changes no model.
    unrolled = language_model('cpu', scan_unroll=1)

    settings = longer._settings_to_compare(short)

    assert longer._settings_to_compare(long) == settings
    assert longer._settings_to_compare(unrolled) == settings
    assert longer._settings_to_compare(rope) != settings
