"""Where the coordinator of a job listens."""

import pytest

from qkattn.jobs import bootstrap
from qkattn.jobs.detection import Job
from tests.processes import environments, start_python, wait_for_results


@pytest.mark.parametrize(
    ('coordinator', 'listens'),
    [
        ('127.0.0.1:8476', '127.0.0.1:8476'),
        ('127.1.2.3:8476', '127.1.2.3:8476'),
        ('localhost:8476', 'localhost:8476'),
        ('[::1]:8476', '[::1]:8476'),
        ('10.0.0.1:8476', None),
        ('0.0.0.0:8476', None),
        ('host-0.jobs.svc:8476', None),
        ('localhost.example.com:8476', None),
    ],
)
def test_the_coordinator_of_a_local_job_is_bound_to_loopback(coordinator, listens, monkeypatch):
    monkeypatch.delenv('JAX_COORDINATOR_BIND_ADDRESS', raising=False)
    job = Job(2, 0, 'explicit', coordinator)
    assert bootstrap.bind_address(job) == listens
    monkeypatch.setenv('JAX_COORDINATOR_BIND_ADDRESS', '0.0.0.0:8476')
    assert bootstrap.bind_address(job) is None


PRINT_LISTENING_ADDRESSES = """
    from pathlib import Path
    from qkattn.jobs import bootstrap

    port = int(bootstrap.start().coordinator.rpartition(':')[2])
    for table in ('tcp', 'tcp6'):
        for line in Path('/proc/net', table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, local_port = local.split(':')
            if state == '0A' and int(local_port, 16) == port:
                print(address)
"""


def test_a_local_job_listens_on_loopback_alone():
    """The address is 127.0.0.1 as /proc/net/tcp writes it in hexadecimal, or ::ffff:127.0.0.1."""
    (environment,) = environments(1)
    ((code, addresses, errors),) = wait_for_results(
        [start_python(PRINT_LISTENING_ADDRESSES, **environment)]
    )
    assert code == 0, errors
    (address,) = addresses.split()
    assert address in ('0100007F', '0000000000000000FFFF00000100007F')
