"""Processes that meet, and those that do not; threads stand for processes."""

import contextlib
import socket
import threading
import time

from qkattn.errors import ConfigError
from qkattn.jobs.bootstrap import meet
from qkattn.jobs.detection import Job
from tests.jobs.jobs import free_port


def meeting(*jobs, seconds=20.0, delay=0.0):
    """The error of each process, or None."""
    errors = [None] * len(jobs)

    def take_part(i, job):
        time.sleep(delay * i)
        try:
            meet(job, seconds)
        except ConfigError as error:
            errors[i] = str(error)

    threads = [threading.Thread(target=take_part, args=pair) for pair in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def job_of(rank, count, port):
    return Job(count, rank, 'explicit', f'127.0.0.1:{port}')


def test_all_meet_in_any_order_without_strangers_and_killed_processes():
    port = free_port()
    first = threading.Thread(target=meeting, args=(job_of(0, 3, port),))
    first.start()
    for hello in (b'GET / HTTP/1.1', b'1 3'):  # the second is killed
        with contextlib.closing(connected(port)) as stranger:
            stranger.sendall(hello)
    assert meeting(job_of(2, 3, port), job_of(1, 3, port), delay=0.3) == [None] * 2
    first.join()
    port = free_port()
    assert meeting(*(job_of(rank, 3, port) for rank in (2, 1, 0)), delay=0.3) == [None] * 3


def connected(port):
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection(('127.0.0.1', port))
        time.sleep(0.05)


def test_the_missing_and_an_unreachable_coordinator_are_named():
    port = free_port()
    first, third = meeting(job_of(0, 4, port), job_of(2, 4, port), seconds=1)
    assert first.startswith('processes 1, 3 of 4 ') and third.startswith('process 2 does not reach')
    (error,) = meeting(job_of(1, 2, port), seconds=0.5)
    assert f'127.0.0.1:{port}' in error and 'Connection refused' in error


def test_processes_that_disagree_on_their_number():
    port = free_port()
    errors = meeting(job_of(0, 2, port), job_of(1, 3, port))
    assert errors == ['process 1 is one of 3 processes, but process 0 one of 2'] * 2


def test_a_port_in_use():
    with socket.create_server(('', 0)) as other:
        port = other.getsockname()[1]
        (error,) = meeting(job_of(0, 2, port), seconds=0.5)
    assert f'port {port} (Address already in use)' in error
