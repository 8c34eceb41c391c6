"""What the processes of real jobs agree on, and processes that do not come together."""

import json
import socket
from unittest import mock

import pytest

from qkattn.errors import ProcessError
from qkattn.jobs import agreement, bootstrap
from tests.processes import environments, start_job, start_python, wait_for_results

# Each process prints, by name of a check, what it got; `called` lists what ran in it.
AGREEING_PROCESS = """
    import json, time
    from jax._src import distributed
    from qkattn import errors
    from qkattn.jobs import agreement, bootstrap

    rank = bootstrap.start().process_id
    assert bootstrap.start().process_id == rank and agreement.is_process_0() == (rank == 0)
    seen = {}
    called = []

    def says(error, text):
        called.append(text)
        raise error(text)

    def attempt(call):
        try:
            return call()
        except Exception as error:
            return [type(error).__name__, str(error)]

    seen['all'] = agreement.gather_from_processes({'rank': rank, 'none': None})
    seen['owner'] = agreement.call_in_process_0(lambda: called.append('value') or [rank, 'value'])
    seen['refused'] = attempt(
        lambda: agreement.make_in_process_0(lambda: says(errors.InUseError, 'held'))
    )
    seen['bug'] = attempt(lambda: agreement.call_in_process_0(lambda: says(KeyError, 'bug')))
    damaged = type('Damaged', (errors.ConfigError,), {})  # as of another module
    seen['kind'] = attempt(lambda: agreement.call_in_process_0(lambda: says(damaged, 'x')))
    seen['any'] = [agreement.any_process(rank == 1), agreement.any_process(False)]

    def use(made):
        with made as entered:
            entered.metrics.append(1)
            raise ValueError('stays')

    made = agreement.make_in_process_0(lambda: called.append('made') or called)
    seen['stays'] = attempt(lambda: rank and use(made))
    seen['first'] = agreement.run_in_process_0_first(lambda: f'made by {rank}')
    agreement.require_same('seed', '0')
    seen['differs'] = attempt(lambda: agreement.require_same('hash', 'ab'[rank > 0]))
    for _ in range(50):
        agreement.call_in_process_0(lambda: 'x' * 1000)
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


def test_three_processes_agree_on_values_errors_and_barriers():
    results = wait_for_results(start_job(AGREEING_PROCESS, 3))
    assert [code for code, _, _ in results] == [0, 0, 0], results
    # What each process got, by the name of a check in `AGREEING_PROCESS`.
    reported = [json.loads(out) for _, out, _ in results]
    from_process_0 = reported[0]
    assert from_process_0['all'] == [{'rank': rank, 'none': None} for rank in range(3)]

    # Only process 0 calls a function; the others get its value or its error.
    assert [by_rank['called'] for by_rank in reported] == [
        ['value', 'held', 'bug', 'x', 'made'],
        [],
        [],
    ]
    bugs = [['KeyError', "'bug'"], *[['ProcessError', "process 0 raised KeyError: 'bug'"]] * 2]
    assert [by_rank['bug'] for by_rank in reported] == bugs
    assert [by_rank['kind'] for by_rank in reported] == [
        ['Damaged', 'x'],
        *[['ConfigError', 'x']] * 2,
    ]
    assert [by_rank['first'] for by_rank in reported] == ['made by 0', 'made by 1', 'made by 2']
    assert [by_rank['stays'] for by_rank in reported] == [0, *[['ValueError', 'stays']] * 2]

    # Checks with the same outcome in all processes.
    late = ['ProcessError', 'process 2 did not arrive within 1 s, while the others waited']
    for by_rank in reported:
        assert (by_rank['owner'], by_rank['any']) == ([0, 'value'], [True, False])
        assert (by_rank['all'], by_rank['refused']) == (
            from_process_0['all'],
            ['InUseError', 'held'],
        )
        kind, text = by_rank['differs']
        assert kind == 'ConfigError'
        assert text.startswith('hash of processes 1, 2 differs')
        assert (by_rank['places'][0], by_rank['late']) == ('ProcessError', late)
        assert by_rank['keys'] < 10  # messages are deleted once they are read


def test_a_single_process_gets_the_values_of_json():
    assert agreement.call_in_process_0(lambda: {1: (2,)}) == {'1': [2]}


def test_process_0_may_arrive_as_late_as_it_then_waits_itself(monkeypatch):
    waits = []

    def get(key, limit):
        waits.append(limit)
        return json.dumps({'missing': [], 'values': [1, 2]})

    # Process 1 waits for more than twice the limit, as process 0 waits itself after it arrives.
    monkeypatch.setattr(agreement.distributed.global_state, 'process_id', 1)
    monkeypatch.setattr(agreement, 'client', mock.MagicMock())
    monkeypatch.setattr(agreement, '_wait_for_key', get)
    assert agreement.gather_from_processes(2, limit=60.0) == [1, 2]
    assert waits[0] > 120


# Processes that do not come together.

JOIN = """
    from qkattn.jobs import bootstrap, cli
    cli.run(bootstrap.in_job(lambda: print('joined')))
"""


def test_a_coordinator_whose_port_is_in_use_names_it(monkeypatch):
    with socket.create_server(('', 0)) as other:
        port = other.getsockname()[1]
        job = environments(2)[0] | {'JAX_COORDINATOR_ADDRESS': f'localhost:{port}'}
        for name, value in job.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ProcessError, match=rf'port {port} \(Address already in use\)'):
            bootstrap.start.__wrapped__()  # what it keeps for a process is left aside


def test_a_process_that_waits_in_vain_for_the_others_names_the_coordinator():
    from_process_0, _ = environments(2)
    ((code, _, error),) = wait_for_results(
        [start_python(JOIN, QKATTN_CONNECT_SECONDS='3', **from_process_0)]
    )
    assert code == 1 and error.endswith('within 3 s\n'), error
    assert (
        f'not all 2 processes reached the coordinator {from_process_0["JAX_COORDINATOR_ADDRESS"]}'
        in error
    )


@pytest.mark.slow
def test_processes_that_disagree_on_their_number():
    from_process_0, second = environments(2)
    second['JAX_NUM_PROCESSES'] = '3'
    results = wait_for_results(
        [start_python(JOIN, **environment) for environment in (from_process_0, second)]
    )
    assert [code for code, _, _ in results] == [2, 2], results
    assert all('number of processes of process 1 differs' in error for *_, error in results)
