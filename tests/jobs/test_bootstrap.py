"""Processes that meet, and those that do not; threads stand for processes."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

from qkattn.errors import ConfigError
from qkattn.jobs.bootstrap import meet
from qkattn.jobs.detection import Job
from tests.processes import free_port, until


def meeting(*ranks, count=3, port=None, seconds=20.0, delay=0.0):
    """The error of each process of a job, or None; a rank may be (rank, another count)."""
    address = f'127.0.0.1:{port or free_port()}'

    def take_part(i, rank):
        rank, own = rank if isinstance(rank, tuple) else (rank, count)
        time.sleep(delay * i)
        try:
            meet(Job(own, rank, 'explicit', address), seconds)
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(take_part, range(len(ranks)), ranks))


def test_all_meet_in_any_order_without_strangers_and_killed_processes():
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meeting, 0, port=port)
        address = ('127.0.0.1', port)
        until(lambda: socket.socket().connect_ex(address) == 0)  # a stranger that says nothing
        for hello in (b'GET / HTTP/1.1', b'1 3'):  # the second is killed
            with socket.create_connection(address) as stranger:
                stranger.sendall(hello)
        assert meeting(2, 1, port=port, delay=0.3) == [None] * 2
    assert first.result() == [None] and meeting(2, 1, 0, delay=0.3) == [None] * 3


def test_the_missing_and_an_unreachable_coordinator_are_named():
    first, third = meeting(0, 2, count=4, seconds=1)
    assert first.startswith('processes 1, 3 of 4 ') and third.startswith('process 2 does not reach')
    (error,) = meeting(1, port=(port := free_port()), seconds=0.5)
    assert f'127.0.0.1:{port}' in error and 'Connection refused' in error


def test_processes_that_disagree_on_their_number():
    errors = meeting((0, 2), (1, 3))
    assert errors == ['process 1 is one of 3 processes, but process 0 one of 2'] * 2


def test_a_port_in_use():
    with socket.create_server(('', 0)) as other:
        port = other.getsockname()[1]
        (error,) = meeting(0, port=port, seconds=0.5)
    assert f'port {port} (Address already in use)' in error
