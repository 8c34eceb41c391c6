"""What the processes of real jobs agree on, and processes that do not come together."""

import json
import socket
from unittest import mock

import pytest

from qkattn.errors import ProcessError
from qkattn.jobs import agreement, bootstrap
from tests.processes import environments, start_job, start_python, wait_for_results

# Each process prints {name of a check: what the process got}. Most checks are one call of a
# function, whose error is printed as [class, message].
AGREEING_PROCESS = """
    import json, time
    from jax._src import distributed
    from qkattn import errors
    from qkattn.jobs import agreement, bootstrap

    rank = bootstrap.start().process_id
    assert bootstrap.start().process_id == rank
    assert agreement.is_process_0() == (rank == 0)
    seen = {}
    calls = []  # what was called in this process

    def attempt(function):
        try:
            return function()
        except Exception as error:
            return [type(error).__name__, str(error)]

    def return_value():
        calls.append('value')
        return [rank, 'value']

    def fail_with(error, message):
        calls.append(message)
        raise error(message)

    seen['gathered'] = agreement.gather_from_processes({'rank': rank, 'none': None})
    seen['value'] = agreement.call_in_process_0(return_value)

    # Errors of process 0. `Damaged` is a class that other processes do not know.
    def be_in_use():
        fail_with(errors.InUseError, 'held')

    def have_a_bug():
        fail_with(KeyError, 'bug')

    class Damaged(errors.ConfigError):
        pass

    def be_damaged():
        fail_with(Damaged, 'x')

    seen['in use'] = attempt(lambda: agreement.make_in_process_0(be_in_use))
    seen['bug'] = attempt(lambda: agreement.call_in_process_0(have_a_bug))
    seen['damaged'] = attempt(lambda: agreement.call_in_process_0(be_damaged))
    seen['any'] = [agreement.any_process(rank == 1), agreement.any_process(False)]

    # The object that other processes get has every method, and hides no error of a block.
    def make():
        calls.append('made')
        return calls

    made = agreement.make_in_process_0(make)

    def fail_in_block():
        if rank == 0:
            return 'not called'
        with made as entered:
            entered.metrics.append(1)
            raise ValueError('stays')

    seen['error in block'] = attempt(fail_in_block)
    seen['process 0 first'] = agreement.run_in_process_0_first(lambda: f'made by {rank}')

    agreement.require_same('seed', '0')
    value = 'a' if rank == 0 else 'b'
    seen['different values'] = attempt(lambda: agreement.require_same('hash', value))
    for _ in range(50):
        agreement.call_in_process_0(lambda: 'x' * 1000)
        agreement.barrier('here')
    name = 'other' if rank == 0 else 'one'
    seen['different barriers'] = attempt(lambda: agreement.barrier(name))
    if rank == 2:
        time.sleep(3)
    seen['late'] = attempt(lambda: agreement.barrier('late', limit=1))
    agreement.barrier('end')
    client = distributed.global_state.client
    seen['number of keys'] = len(client.key_value_dir_get('qkattn/agreed'))
    seen['calls'] = calls
    print(json.dumps(seen))
"""


def test_three_processes_agree_on_values_errors_and_barriers():
    """Each of three processes makes the same checks, and prints what it got as {check: result}.

    An error is printed as [class, message].
    """
    results = wait_for_results(start_job(AGREEING_PROCESS, 3))
    assert [code for code, _, _ in results] == [0, 0, 0], results
    reports = [json.loads(printed) for _, printed, _ in results]

    def by_rank(check):
        """The results of a check in processes 0, 1 and 2."""
        return [report[check] for report in reports]

    # Each process passes its rank, and gets a list of what all processes passed.
    gathered = [{'rank': 0, 'none': None}, {'rank': 1, 'none': None}, {'rank': 2, 'none': None}]
    assert by_rank('gathered') == [gathered, gathered, gathered]
    # `any_process` is True if any process passes True. In the first call, process 1 does.
    assert by_rank('any') == [[True, False], [True, False], [True, False]]

    # Only process 0 calls the functions, and all processes get the value.
    assert by_rank('calls') == [['value', 'held', 'bug', 'x', 'made'], [], []]
    assert by_rank('value') == [[0, 'value'], [0, 'value'], [0, 'value']]

    # All processes raise the error of process 0. In the other processes, an error that is not
    # of qkattn becomes a ProcessError.
    in_use = ['InUseError', 'held']
    assert by_rank('in use') == [in_use, in_use, in_use]
    bug_of_process_0 = ['ProcessError', "process 0 raised KeyError: 'bug'"]
    assert by_rank('bug') == [['KeyError', "'bug'"], bug_of_process_0, bug_of_process_0]
    # Damaged is not a class of qkattn, so the other processes raise its base class ConfigError.
    assert by_rank('damaged') == [['Damaged', 'x'], ['ConfigError', 'x'], ['ConfigError', 'x']]
    # An error that processes 1 and 2 raise in a `with` block is not hidden.
    error_in_block = ['ValueError', 'stays']
    assert by_rank('error in block') == ['not called', error_in_block, error_in_block]

    # Here all processes call the function, and process 0 is the first.
    assert by_rank('process 0 first') == ['made by 0', 'made by 1', 'made by 2']

    # Different arguments and a late process are errors in all processes.
    # Process 0 has the value 'a', and the others have 'b'.
    for error, message in by_rank('different values'):
        assert error == 'ConfigError'
        assert message.startswith('hash of processes 1, 2 differs')
    for error, _ in by_rank('different barriers'):
        assert error == 'ProcessError'
    late = ['ProcessError', 'process 2 did not arrive within 1 s, while the others waited']
    assert by_rank('late') == [late, late, late]

    # More than 100 messages have been sent. They are deleted once they are read.
    for number_of_keys in by_rank('number of keys'):
        assert number_of_keys < 10


def test_a_single_process_gets_its_value_as_json():
    value = agreement.call_in_process_0(lambda: {1: (2,)})
    assert value == {'1': [2]}


def test_a_process_waits_twice_as_long_for_process_0(monkeypatch):
    """Process 0 collects the values of all processes, and sends them to the others.

    Process 0 may arrive late by `limit`, and then wait for the others for another `limit`.
    """
    waits = []

    def answer_of_process_0(key, seconds):
        """Replaces the wait for process 0: records the timeout, and returns an answer."""
        waits.append(seconds)
        return json.dumps({'missing': [], 'values': [1, 2]})

    # This process is process 1 of a job, and has the value 2.
    monkeypatch.setattr(agreement.distributed.global_state, 'process_id', 1)
    monkeypatch.setattr(agreement, 'client', mock.MagicMock())
    monkeypatch.setattr(agreement, '_wait_for_key', answer_of_process_0)

    values = agreement.gather_from_processes(2, limit=60.0)

    assert values == [1, 2]
    assert waits[0] > 2 * 60.0


# Processes that do not come together.

JOIN = """
    from qkattn.jobs import bootstrap, cli
    cli.run(bootstrap.in_job(lambda: print('joined')))
"""


def test_a_coordinator_whose_port_is_in_use_names_it(monkeypatch):
    """Process 0 of a job is its coordinator, and listens at JAX_COORDINATOR_ADDRESS."""
    # `start` is cached, because a process joins one job only.
    start_uncached = bootstrap.start.__wrapped__

    with socket.create_server(('', 0)) as other_server:
        port = other_server.getsockname()[1]
        # The variables of process 0 of a job of two processes.
        environment = environments(2)[0]
        environment['JAX_COORDINATOR_ADDRESS'] = f'localhost:{port}'
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

        with pytest.raises(ProcessError, match=rf'port {port} \(Address already in use\)'):
            start_uncached()


def test_a_process_that_waits_for_others_in_vain_names_the_coordinator():
    environment = environments(2)[0]
    coordinator = environment['JAX_COORDINATOR_ADDRESS']

    process = start_python(JOIN, QKATTN_CONNECT_SECONDS='3', **environment)
    code, _, error = wait_for_results([process])[0]

    assert code == 1, error
    assert f'not all 2 processes reached the coordinator {coordinator}' in error
    assert error.endswith('within 3 s\n')


@pytest.mark.slow
def test_processes_that_disagree_on_their_number():
    first, second = environments(2)
    second['JAX_NUM_PROCESSES'] = '3'

    processes = [start_python(JOIN, **first), start_python(JOIN, **second)]
    results = wait_for_results(processes)

    for code, _, error in results:
        assert code == 2, results
        assert 'number of processes of process 1 differs' in error
