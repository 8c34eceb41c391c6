"""Processes that do not come together."""

import socket

import pytest

from qkattn.errors import ProcessError
from qkattn.jobs import bootstrap
from tests.processes import ended, environments, start_python

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


def test_a_process_that_waits_in_vain_says_so():
    first, _ = environments(2)
    ((code, _, error),) = ended([start_python(JOIN, QKATTN_CONNECT_SECONDS='3', **first)])
    assert code == 1 and error.endswith('within 3 s\n'), error
    assert (
        f'not all 2 processes reached the coordinator {first["JAX_COORDINATOR_ADDRESS"]}' in error
    )


@pytest.mark.slow
def test_processes_that_disagree_on_their_number():
    first, second = environments(2)
    second['JAX_NUM_PROCESSES'] = '3'
    results = ended([start_python(JOIN, **environment) for environment in (first, second)])
    assert [code for code, _, _ in results] == [2, 2], results
    assert all('number of processes of process 1 differs' in error for *_, error in results)
