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
OTHER = 'qk/vo?num_heads=2'  # a variant that the first study does not have


def repeat_of(name, **changes):
    return study_with(STUDY, trials={'seeds': FRESH}, repeats=name, **changes)


def declare(path, study):
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


def earlier_studies(path):
    kept = ledger.read(path / ledger.NAME)
    return chain.earlier_studies(path, kept, read_json(path / 'study.json', {}))


def test_a_repeat_declares_the_end_of_the_other_ledger(copied_studies):
    last = ledger.read(copied_studies / 'first' / ledger.NAME).last
    assert read_json(copied_studies / 'second/study.json', {})['repeats'] == 'first'
    (repeat,) = ledger.read(copied_studies / 'second' / ledger.NAME).repeats
    assert repeat == ledger.Repeat('first', last)


def test_repeats_of_repeats_are_one_chain(copied_studies):
    declare(copied_studies / 'third', study_with(trials={'seeds': (30, 31, 32)}, repeats='second'))
    assert [study.name for study in earlier_studies(copied_studies / 'third')] == [
        'second',
        'first',
    ]


def test_a_repeat_goes_on_when_the_other_ledger_has_grown(copied_studies):
    ledger.append(copied_studies / 'first' / ledger.NAME, 'accepted', code='commits', why='docs')
    assert [study.name for study in earlier_studies(copied_studies / 'second')] == ['first']
    entries = (copied_studies / 'second' / ledger.NAME).read_bytes()
    declare(copied_studies / 'second', repeat_of('first'))
    assert (copied_studies / 'second' / ledger.NAME).read_bytes() == entries


@pytest.mark.parametrize(
    ('study', 'says'),
    [
        (repeat_of('none'), "no study 'none' in .*give the name of a study beside the workdir"),
        (repeat_of('../first'), 'is no name of a directory'),
        (repeat_of('new'), 'a study does not repeat itself'),
        (repeat_of('first', margin=0.02), 'differs in margin: 0.005 -> 0.02; a repeat may differ'),
        (repeat_of('first', train={'num_steps': 1200}), 'base.train.num_steps: .* -> 1200'),
        (repeat_of('first', variants=('qk/vo', OTHER)), 'compares none of the variants'),
        (study_with(repeats='first'), r"'first', .* have the seeds .* be others"),
        (repeat_of('second'), r"'second', .* have the seeds \(20, 21, 22, 23\), too"),
    ],
)
def test_a_repeat_that_is_not_possible_is_refused_before_anything_is_written(
    directory_of_studies, study, says
):
    arms = build_arms(study)
    with refused(f'repeats={study.repeats!r}: .*{says}'):
        declaration.require_chain(directory_of_studies / 'new', study, arms)
    assert not (directory_of_studies / 'new').exists()


def test_a_repeat_without_tuning_is_refused():
    study = dataclasses.replace(repeat_of('first'), tuning=TuningConfig())
    with refused("repeats='first' needs tuning.seeds"):
        build_arms(study)


def replace_first_study(path):
    """Another study in the directory of the first one."""
    shutil.rmtree(path / 'first')
    declare(path / 'first', study_with(STUDY, margin=0.02))


def close_a_circle(path):
    last = ledger.read(path / 'second' / ledger.NAME).last
    repeats = {'study': 'second', 'entry': last, 'retrospective': True, 'why': 'x'}
    ledger.append(path / 'first' / ledger.NAME, 'repeats', **repeats)


def repeat_without_declaration(path):
    file = path / 'first/study.json'
    file.write_text(json.dumps(read_json(file, {}) | {'repeats': 'second'}))


@pytest.mark.parametrize(
    ('damage', 'name', 'says'),
    [
        (lambda path: shutil.rmtree(path / 'first'), 'second', "repeats the study 'first', which"),
        (replace_first_study, 'second', "repeats 'first' as of the entry .* does not have"),
        (close_a_circle, 'second', 'closes a circle of repeats: second -> first -> second'),
        (repeat_without_declaration, 'first', "repeats 'second', which .* does not declare"),
    ],
)
def test_a_chain_whose_ledgers_disagree_is_refused(copied_studies, damage, name, says):
    damage(copied_studies)
    with refused(says, ReportError):
        earlier_studies(copied_studies / name)


@pytest.mark.parametrize(
    ('key', 'matched', 'destinations', 'expected'),
    [
        (('qk/vo', None), 'total', ['d_model'], ('qk/vo', None)),
        (('a/vo', None), 'total', ['d_model'], ('a/vo [d_model]', None)),
        (('a/vo [d_ff]', None), 'total', ['d_model', 'd_ff'], ('a/vo [d_ff]', None)),
        (('a/vo', SAME_SHAPE), 'total', ['d_model'], ('a/vo', SAME_SHAPE)),
        (('a/vo', None), None, ['d_model'], ('a/vo', SAME_SHAPE)),
    ],
)
def test_a_question_is_the_same_in_every_study_that_asks_it(key, matched, destinations, expected):
    declared = {'baseline': 'qk/vo', 'matched': matched, 'destinations': destinations}
    variant, control = key
    question = chain.question(ArmKey(variant, 'd_model=32', 'stdlib', control), declared)
    assert (question.variant, question.control) == expected
