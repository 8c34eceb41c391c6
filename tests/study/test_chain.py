"""A study that repeats another one: what its ledger declares, and what is refused."""

import dataclasses
import json
import shutil

import pytest

from qkattn.config import TuningConfig
from qkattn.errors import ReportError
from qkattn.storage import ledger
from qkattn.storage.records import read_json
from qkattn.study import chain, declaration
from qkattn.study.arm_key import SAME_SHAPE, ArmKey
from qkattn.study.arms import build_arms
from tests.refusals import refused
from tests.study.test_plan import STUDY, study_with

FRESH = (20, 21, 22, 23)


def repeat_of(name, **changes):
    """STUDY with fresh seeds, which repeats the study `name`."""
    return study_with(STUDY, trials={'seeds': FRESH}, repeats=name, **changes)


def declare(path, study):
    """Declares a study in a directory, like its first worker. Returns its ledger."""
    declaration.declare(path, study, build_arms(study))
    return ledger.read(path / ledger.NAME)


@pytest.fixture(scope='module')
def directory_of_studies(tmp_path_factory):
    """A directory with a study named first, and a repeat of it named second."""
    path = tmp_path_factory.mktemp('chain')
    declare(path / 'first', STUDY)
    declare(path / 'second', repeat_of('first'))
    return path


@pytest.fixture
def copied_studies(directory_of_studies, tmp_path):
    """A copy of `directory_of_studies`, whose files may be changed."""
    shutil.copytree(directory_of_studies, tmp_path, dirs_exist_ok=True)
    return tmp_path


def names_of_earlier_studies(path):
    """The names of the studies that a study repeats, directly or indirectly, the latest first."""
    study_ledger = ledger.read(path / ledger.NAME)
    declared = read_json(path / 'study.json', {})
    return [study.name for study in chain.earlier_studies(path, study_ledger, declared)]


def test_a_repeat_declares_the_end_of_the_other_ledger(directory_of_studies):
    first = ledger.read(directory_of_studies / 'first' / ledger.NAME)
    second = ledger.read(directory_of_studies / 'second' / ledger.NAME)
    assert list(second.repeats) == [ledger.Repeat('first', first.last)]

    declared = read_json(directory_of_studies / 'second/study.json', {})
    assert declared['repeats'] == 'first'


def test_repeats_of_repeats_are_one_chain(copied_studies):
    third = study_with(trials={'seeds': (30, 31, 32)}, repeats='second')
    declare(copied_studies / 'third', third)
    assert names_of_earlier_studies(copied_studies / 'third') == ['second', 'first']


def test_a_repeat_goes_on_when_the_other_ledger_has_grown(copied_studies):
    first = copied_studies / 'first'
    second = copied_studies / 'second'
    before = (second / ledger.NAME).read_bytes()

    # `second` has named the entry that was the last before this one.
    ledger.append(first / ledger.NAME, 'accepted', code='commits', why='docs')

    assert names_of_earlier_studies(second) == ['first']
    declare(second, repeat_of('first'))
    assert (second / ledger.NAME).read_bytes() == before


def test_a_study_that_is_repeated_twice_is_listed_once(copied_studies):
    """Two repeats of `first` declare different entries, because its ledger grows in between."""
    first = copied_studies / 'first'
    ledger.append(first / ledger.NAME, 'accepted', code='commits', why='docs')
    last = ledger.read(first / ledger.NAME).last
    repeats = {'study': 'first', 'entry': last, 'retrospective': True, 'why': 'x'}
    third = copied_studies / 'third'
    declare(third, study_with(trials={'seeds': (30, 31, 32)}, repeats='second'))
    ledger.append(third / ledger.NAME, 'repeats', **repeats)

    assert names_of_earlier_studies(third) == ['second', 'first']


def test_a_second_repeat_of_an_arm_is_refused(copied_studies):
    """Both `second` and this study would train the same arm of `first` again for another verdict.

    An arm may have only one such second look, or its error rate would be spent twice.
    """
    third = study_with(trials={'seeds': (30, 31, 32)}, repeats='first')
    message = r"/second already repeats shared_qk/vo \[d_model\] of the study 'first'; repeat"
    with refused(message):
        declare(copied_studies / 'third', third)
    assert not (copied_studies / 'third/study.json').exists()


def test_a_second_repeat_of_other_arms_is_declared(tmp_path):
    """Two studies may repeat `first` if they share no arm except the baseline, qk/vo.

    `declare` would refuse `third` if `second` already had its arm.
    """
    all_variants = ('qk/vo', 'shared_qk/vo', 'qk/vo?num_heads=1')
    declare(tmp_path / 'first', study_with(variants=all_variants))

    second = study_with(
        trials={'seeds': (20, 21, 22)}, repeats='first', variants=('qk/vo', 'shared_qk/vo')
    )
    third = study_with(
        trials={'seeds': (30, 31, 32)}, repeats='first', variants=('qk/vo', 'qk/vo?num_heads=1')
    )
    declare(tmp_path / 'second', second)
    declare(tmp_path / 'third', third)

    # Both repeat `first`, and `third` does not repeat `second`.
    assert names_of_earlier_studies(tmp_path / 'second') == ['first']
    assert names_of_earlier_studies(tmp_path / 'third') == ['first']


def test_studies_of_a_chain_have_different_names(directory_of_studies, tmp_path, monkeypatch):
    """Results are pooled by name. Committed studies may have the name of a new study."""
    shutil.copytree(directory_of_studies, tmp_path / 'committed/cpu')
    monkeypatch.setattr(chain, 'COMMITTED', tmp_path / 'committed')
    runs = tmp_path / 'runs'
    third = study_with(trials={'seeds': (30, 31, 32)}, repeats='second')

    message = 'runs/first and .*cpu/first are in one chain .* directories of different names'
    with refused(message):
        declare(runs / 'first', third)
    declare(runs / 'third', third)

    # A ledger may also declare the repeat of a study of the same name in retrospect.
    declare(runs / 'first', study_with(trials={'seeds': (40, 41, 42)}))
    last = ledger.read(runs / 'first' / ledger.NAME).last
    repeats = {'study': 'first', 'entry': last, 'retrospective': True, 'why': 'x'}
    ledger.append(runs / 'third' / ledger.NAME, 'repeats', **repeats)
    message = 'runs/first and .*cpu/first are in one chain'
    with refused(message, ReportError):
        names_of_earlier_studies(runs / 'third')


@pytest.mark.parametrize(
    ('study', 'message'),
    [
        pytest.param(
            repeat_of('none'),
            "there is no study 'none' in .*give the name of a study beside the workdir",
            id='no such study',
        ),
        pytest.param(
            repeat_of('../first'), "'../first' is no name of a directory", id='a relative path'
        ),
        pytest.param(repeat_of('new'), 'a study does not repeat itself', id='itself'),
        pytest.param(
            repeat_of('first', margin=0.02),
            'differs in margin: 0.005 -> 0.02; a repeat may differ',
            id='another margin',
        ),
        pytest.param(
            repeat_of('first', train={'num_steps': 1200}),
            'differs in base.train.num_steps: .* -> 1200',
            id='other steps',
        ),
        pytest.param(
            repeat_of('first', variants=('qk/vo', 'qk/vo?num_heads=2')),
            'compares none of the variants',
            id='no common variant',
        ),
        pytest.param(
            study_with(repeats='first'),
            r"the verdicts of 'first', .* have the seeds .* must be others",
            id='the same seeds',
        ),
        pytest.param(
            repeat_of('second'),
            r"the verdicts of 'second', .* have the seeds \(20, 21, 22, 23\), too",
            id='the seeds of another repeat',
        ),
    ],
)
def test_a_wrong_repeat_is_refused_before_anything_is_written(directory_of_studies, study, message):
    new = directory_of_studies / 'new'
    arms = build_arms(study)
    with refused(f'repeats={study.repeats!r}: .*{message}'):
        declaration.require_chain(new, study, arms)
    assert not new.exists()


def test_a_repeat_without_tuning_is_refused():
    study = dataclasses.replace(repeat_of('first'), tuning=TuningConfig())
    with refused("repeats='first' needs tuning.seeds"):
        build_arms(study)


def remove_first_study(path):
    shutil.rmtree(path / 'first')


def replace_first_study(path):
    """Declares a study with another margin in the directory of the first study."""
    shutil.rmtree(path / 'first')
    declare(path / 'first', study_with(STUDY, margin=0.02))


def repeat_the_second_in_the_first(path):
    second = ledger.read(path / 'second' / ledger.NAME)
    repeats = {'study': 'second', 'entry': second.last, 'retrospective': True, 'why': 'x'}
    ledger.append(path / 'first' / ledger.NAME, 'repeats', **repeats)


def repeat_the_second_without_a_ledger_entry(path):
    file = path / 'first/study.json'
    declared = read_json(file, {}) | {'repeats': 'second'}
    file.write_text(json.dumps(declared))


@pytest.mark.parametrize(
    ('damage', 'name', 'message'),
    [
        (remove_first_study, 'second', "repeats the study 'first', which is neither at"),
        (replace_first_study, 'second', "repeats 'first' as of the entry .* does not have"),
        (
            repeat_the_second_in_the_first,
            'second',
            'closes a circle of repeats: second -> first -> second',
        ),
        (
            repeat_the_second_without_a_ledger_entry,
            'first',
            "repeats 'second', which .* does not declare",
        ),
    ],
)
def test_a_chain_whose_ledgers_disagree_is_refused(copied_studies, damage, name, message):
    damage(copied_studies)
    with refused(message, ReportError):
        names_of_earlier_studies(copied_studies / name)


@pytest.mark.parametrize(
    # `arm` is the (variant, control) of an arm in a study. `matched` is the cost that is equal in
    # that study, and `destinations` are the dimensions that grow. `expected` is the key by which
    # the arm is compared with the arms of other studies.
    ('arm', 'matched', 'destinations', 'expected'),
    [
        pytest.param(('qk/vo', None), 'total', ['d_model'], ('qk/vo', None), id='the baseline'),
        pytest.param(
            ('a/vo', None),
            'total',
            ['d_model'],
            ('a/vo [d_model]', None),
            id='the only destination is added',
        ),
        pytest.param(
            ('a/vo [d_ff]', None),
            'total',
            ['d_model', 'd_ff'],
            ('a/vo [d_ff]', None),
            id='one of several destinations',
        ),
        pytest.param(
            ('a/vo', SAME_SHAPE),
            'total',
            ['d_model'],
            ('a/vo', SAME_SHAPE),
            id='a control at the same shape',
        ),
        pytest.param(
            ('a/vo', None),
            None,
            ['d_model'],
            ('a/vo', SAME_SHAPE),
            id='an arm of an unmatched study has the same shape',
        ),
    ],
)
def test_arms_of_several_studies_are_compared_by_one_key(arm, matched, destinations, expected):
    variant, control = arm
    key = ArmKey(variant, 'd_model=32', 'stdlib', control)
    declared = {'baseline': 'qk/vo', 'matched': matched, 'destinations': destinations}

    question = chain.question(key, declared)

    assert (question.variant, question.control) == expected
