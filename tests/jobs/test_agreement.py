"""What processes agree on, in real jobs; the same calls in a process that is alone."""

import json
from unittest.mock import Mock

import pytest

from qkattn.errors import InUseError
from qkattn.jobs import agreement
from qkattn.jobs.agreement import owned, owner_first
from tests.processes import ended, start_job

JOB = """
    import json, time
    from jax._src import distributed
    from qkattn import errors
    from qkattn.jobs import agreement, bootstrap

    rank = bootstrap.start().process_id
    assert bootstrap.start().process_id == rank and agreement.owner() == (rank == 0)
    seen, called = {}, []

    def says(error, text):
        called.append(text)
        raise error(text)

    def attempt(call):
        try:
            return call()
        except Exception as error:
            return [type(error).__name__, str(error)]

    seen['all'] = agreement.from_all({'rank': rank, 'none': None})
    seen['owner'] = agreement.on_owner(lambda: called.append('value') or [rank, 'value'])
    seen['refused'] = attempt(lambda: agreement.owned(lambda: says(errors.InUseError, 'held')))
    seen['bug'] = attempt(lambda: agreement.on_owner(lambda: says(KeyError, 'bug')))
    seen['any'] = [agreement.any_process(rank == 1), agreement.any_process(False)]
    made = agreement.owned(lambda: called.append('made') or called)
    if rank:
        with made as entered:
            entered.metrics.append(1)
    seen['first'] = agreement.owner_first(lambda: f'made by {rank}')
    agreement.require_same('seed', '0')
    seen['differs'] = attempt(lambda: agreement.require_same('hash', 'ab'[rank > 0]))
    for _ in range(50):
        agreement.on_owner(lambda: 'x' * 1000)
        agreement.barrier('here')
    seen['places'] = attempt(lambda: agreement.barrier('one' if rank else 'other'))
    client = distributed.global_state.client
    time.sleep(3 * (rank == 2))
    seen['late'] = attempt(lambda: agreement.barrier('late', limit=1))
    agreement.barrier('end')
    seen['keys'] = len(client.key_value_dir_get('qkattn/agreed'))
    seen['called'] = called
    print(json.dumps(seen))
"""


def test_three_processes_agree():
    results = ended(start_job(JOB, 3))
    assert [code for code, _, _ in results] == [0, 0, 0], results
    first, *others = seen = [json.loads(out) for _, out, _ in results]
    assert first['all'] == [{'rank': rank, 'none': None} for rank in range(3)]
    assert [one['called'] for one in seen] == [['value', 'held', 'bug', 'made'], [], []]
    bugs = [['KeyError', "'bug'"], *[['ProcessError', "process 0 raised KeyError: 'bug'"]] * 2]
    assert [one['bug'] for one in seen] == bugs
    assert [one['first'] for one in seen] == ['made by 0', 'made by 1', 'made by 2']
    late = ['ProcessError', 'process 2 did not arrive within 1 s, while the others waited']
    for one in seen:
        assert (one['owner'], one['any']) == ([0, 'value'], [True, False])
        assert (one['all'], one['refused']) == (first['all'], ['InUseError', 'held'])
        kind, text = one['differs']
        assert kind == 'ConfigError' and text.startswith('hash of processes 1, 2 differs')
        assert (one['places'][0], one['late']) == ('ProcessError', late)
        assert one['keys'] < 10


def test_a_single_process_agrees_with_itself():
    assert agreement.on_owner(lambda: {1: 'as JSON'}) == {'1': 'as JSON'}
    assert (agreement.any_process(True), agreement.any_process(False)) == (True, False)
    agreement.require_same('hash', 'a')
    with pytest.raises(InUseError, match='held'):
        owned(Mock(side_effect=InUseError('held')))
    assert owner_first(lambda: 7) == 7 and owned(list) == []


def test_an_error_beside_an_object_that_does_nothing_stays_one(monkeypatch):
    monkeypatch.setattr(agreement, 'on_owner', lambda call: None)  # as in the other processes
    with pytest.raises(ValueError, match='stays'), owned(list) as nothing:
        nothing.metrics.append({'step': 1})
        raise ValueError('an error stays one')
