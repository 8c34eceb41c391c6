"""A study is reported, accepted, kept and checked from the command line."""

import json

import pytest

from qkattn.config import fingerprint_of
from qkattn.model import cost
from qkattn.report.verify import NOT_COVERED
from qkattn.storage import ledger
from tests.studies import run_config, trial_record, write_lines, write_study


@pytest.fixture
def study(tmp_path):
    """One arm whose counts are those of its config."""
    config = run_config('qk/vo', [trial_record('qk/vo')])
    parameters = cost.count(config.model)
    counts = {
        'parameters': parameters,
        'target_parameters': parameters['total'],
        'residual': 0.0,
        'flops_per_token': cost.flops_per_token(config.model),
        'cache_floats_per_token': cost.cache_floats_per_token(config.model),
    }
    records = [trial_record('qk/vo', seed=seed, **counts) for seed in (0, 1)]
    directory = write_study(tmp_path / 'study', records)
    (line,) = [json.loads(line) for line in (directory / 'plan.jsonl').read_text().splitlines()]
    line['run'] = fingerprint_of(line['config'])
    write_lines(directory / 'plan.jsonl', [line])
    named = {'run': line['run'], 'config_hash': line['run']}
    write_lines(directory / 'results.jsonl', [record | named for record in records])
    return directory


def test_a_study_is_accepted_kept_and_checked(study, script_here):
    accept = ('--accept=uncommitted,commits', '--why=docs alone differ')
    done = script_here('report', '--study=study', *accept, '--export=kept/study')
    assert done.returncode == 0, done.stderr
    entries = ledger.read(study.parent / 'kept/study/ledger.jsonl')
    assert entries.accepted == dict.fromkeys(('uncommitted', 'commits'), 'docs alone differ')
    done = script_here('verify', '--results=kept', '--pages=')
    assert done.returncode == 0, done.stderr
    assert 'numbers agree with the logs, the costs of 1 run with the configs' in done.stdout
    assert all(sentence in done.stdout for sentence in NOT_COVERED)


@pytest.mark.parametrize('name', ['parameters', 'flops_per_token', 'cache_floats_per_token'])
def test_counts_that_the_config_does_not_give_are_found(study, script_here, name):
    def other(value):
        return value | {'mlp': value['mlp'] + 1} if name == 'parameters' else value + 1

    results = [json.loads(line) for line in (study / 'results.jsonl').read_text().splitlines()]
    edited = [result | {name: other(result[name])} for result in results]
    write_lines(study / 'results.jsonl', edited)
    done = script_here('verify', '--results=.', '--pages=')
    assert done.returncode == 2
    assert f'has {name} ' in done.stderr and 'but its config gives' in done.stderr


@pytest.mark.parametrize('page', ['/', '/dev/zero', 'absent.md'])
def test_a_page_that_is_no_file_is_refused_before_the_studies_are_read(script_here, page):
    done = script_here('verify', '--results=/absent', f'--pages={page}')
    assert (done.returncode, done.stderr) == (2, f'--pages: {page!r} is not a file\n')


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--accept=commits'], "accept='commits' with the reason '': it takes"),
        (['--accept=dirty', '--why=x'], "accept='dirty' with the reason 'x': it takes uncommitted"),
    ],
)
def test_what_cannot_be_accepted_is_one_sentence(study, script_here, flags, message):
    before = (study / 'ledger.jsonl').read_bytes()
    done = script_here('report', '--study=study', *flags)
    assert done.returncode == 2 and message in done.stderr
    assert (study / 'ledger.jsonl').read_bytes() == before
