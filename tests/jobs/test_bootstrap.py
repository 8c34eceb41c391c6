"""Where the coordinator of a job listens."""

import pytest

from qkattn.jobs import bootstrap
from qkattn.jobs.detection import Job
from tests.processes import environments, start_python, wait_for_results


def job_at(coordinator: str) -> Job:
    return Job(num_processes=2, process_id=0, engine='explicit', coordinator=coordinator)


@pytest.mark.parametrize(
    'coordinator', ['127.0.0.1:8476', '127.1.2.3:8476', 'localhost:8476', '[::1]:8476']
)
def test_the_coordinator_of_a_local_job_is_bound_to_loopback(coordinator, monkeypatch):
    monkeypatch.delenv('JAX_COORDINATOR_BIND_ADDRESS', raising=False)
    assert bootstrap.bind_address(job_at(coordinator)) == coordinator


@pytest.mark.parametrize(
    'coordinator',
    ['10.0.0.1:8476', '0.0.0.0:8476', 'host-0.jobs.svc:8476', 'localhost.example.com:8476'],
)
def test_the_coordinator_of_several_machines_is_bound_by_jax(coordinator, monkeypatch):
    monkeypatch.delenv('JAX_COORDINATOR_BIND_ADDRESS', raising=False)
    assert bootstrap.bind_address(job_at(coordinator)) is None


@pytest.mark.parametrize(
    'coordinator',
    [
        '127.0.0.1:8476',
        '127.1.2.3:8476',
        'localhost:8476',
        '[::1]:8476',
        '10.0.0.1:8476',
        '0.0.0.0:8476',
        'host-0.jobs.svc:8476',
        'localhost.example.com:8476',
    ],
)
def test_a_bind_address_of_the_user_is_left_to_jax(coordinator, monkeypatch):
    monkeypatch.setenv('JAX_COORDINATOR_BIND_ADDRESS', '0.0.0.0:8476')
    assert bootstrap.bind_address(job_at(coordinator)) is None


# Prints the addresses, in hexadecimal, at which the coordinator's port is listened on.
PRINT_LISTENING_ADDRESSES = """
    from pathlib import Path
    from qkattn.jobs import bootstrap

    LISTEN = '0A'
    port = int(bootstrap.start().coordinator.rpartition(':')[2])
    for table in ('tcp', 'tcp6'):
        for line in Path('/proc/net', table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, local_port = local.split(':')
            if state == LISTEN and int(local_port, 16) == port:
                print(address)
"""


def test_a_local_job_listens_on_loopback_alone():
    """Other machines cannot reach the coordinator of a job whose processes are on one machine."""
    # The coordinator of this job of one process has an address on 127.0.0.1.
    environment = environments(1)[0]

    # The process prints the addresses at which it listens, in the hexadecimal of /proc/net.
    process = start_python(PRINT_LISTENING_ADDRESSES, **environment)
    code, printed, errors = wait_for_results([process])[0]

    assert code == 0, errors
    addresses = printed.split()
    assert len(addresses) == 1
    # Linux writes each group of four bytes in reverse order.
    ipv4_loopback = '0100007F'  # 127.0.0.1
    ipv6_loopback = '0000000000000000FFFF00000100007F'  # ::ffff:127.0.0.1
    assert addresses[0] in (ipv4_loopback, ipv6_loopback)
