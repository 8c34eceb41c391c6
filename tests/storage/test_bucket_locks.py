"""Locks, leases and metrics in a bucket: one owner at a time, taken over when it is gone."""

import json
import logging
import signal

import pytest

from qkattn.errors import InUseError, Lost
from qkattn.storage import buckets, leases, locks
from qkattn.storage.appended import MetricsFile
from qkattn.storage.files import as_path, make_directory
from qkattn.storage.locks import locked
from qkattn.storage.records import read_metrics
from qkattn.storage.run_directory import RunDirectory
from tests.processes import start_python

HOLD = """
    import sys, time
    from qkattn.storage.locks import locked
    with locked('gs://runs/a/lock', wait=False):
        print('holding', flush=True)
        time.sleep(600)
"""


@pytest.fixture
def directory(bucket):
    return make_directory('gs://runs/a')


def write_lease(bucket, name: str, *, age: float = 0.0, expiry: float = 60.0) -> None:
    about = {'host': 'far', 'pid': 12, 'started': '2026-01-01T00:00:00+00:00', 'expiry': expiry}
    bucket.put('runs', name, json.dumps(about).encode(), age=age)


def test_a_lock_of_a_live_process_is_refused_and_that_of_a_killed_one_taken_over_at_once(directory):
    process = start_python(HOLD)
    try:
        assert process.stdout.readline() == 'holding\n', process.stderr.read()
        with (
            pytest.raises(BlockingIOError, match=f'^process {process.pid} on '),
            locked(directory / 'lock', wait=False),
        ):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with locked(directory / 'lock', wait=False) as lost:
            assert not lost()
    finally:
        process.kill()
        process.communicate()
    assert not (directory / 'lock').exists()


def test_a_lock_of_another_machine_is_taken_over_when_it_expired_and_not_before(
    bucket, directory, caplog, monkeypatch
):
    monkeypatch.setattr(locks, '_POLL', 0.01)
    write_lease(bucket, 'a/lock', age=59.0)
    polls = []

    def wait(seconds):
        polls.append(seconds)
        if len(polls) == 3:
            assert bucket.read('runs', 'a/lock').startswith(b'{"host": "far"')
            bucket.set_age('runs', 'a/lock', 61.0)

    monkeypatch.setattr(locks.time, 'sleep', wait)
    with caplog.at_level(logging.WARNING, 'qkattn'), locked(directory / 'lock', wait=False):
        assert len(polls) == 3
    assert [r.getMessage() for r in caplog.records] == [
        'gs://runs/a/lock is held by process 12 on far, 59 s ago; going on in 1 s unless it shows '
        'that it is alive'
    ]


def test_a_lock_of_another_machine_that_is_renewed_is_refused(bucket, directory, monkeypatch):
    write_lease(bucket, 'a/lock')
    renewals = [True, False]

    def renew(_):
        if renewals.pop():
            write_lease(bucket, 'a/lock')

    monkeypatch.setattr(locks.time, 'sleep', renew)
    with (
        pytest.raises(BlockingIOError, match='^process 12 on far$'),
        locked(directory / 'lock', wait=False),
    ):
        pass


def test_a_lock_is_renewed_and_lost_to_who_takes_it_over(bucket, directory, monkeypatch):
    monkeypatch.setattr(leases, '_BEATS', 12_000)
    with locked(directory / 'lock') as lost:
        bucket.set_age('runs', 'a/lock', 110.0)
        wait_until(lambda: len([c for c in bucket.log if 'ifGenerationMatch' in c]) > 3)
        assert not lost()
        write_lease(bucket, 'a/lock')
        wait_until(lost)
    assert bucket.read('runs', 'a/lock').startswith(b'{"host": "far"')


def wait_until(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        leases.threading.Event().wait(0.01)
    raise AssertionError('nothing happened')


def test_of_many_workers_one_acquires_a_lease(bucket, directory):
    first = leases.acquire(directory / 'leases', 'run')
    assert first is not None and leases.acquire(directory / 'leases', 'run') is None
    assert str(leases.holders(directory / 'leases')['run']).startswith('process ')
    assert leases.holders(directory / 'none') == {}
    first.release()
    assert leases.holders(directory / 'leases') == {}
    write_lease(bucket, 'a/leases/run', age=59.0)
    assert leases.acquire(directory / 'leases', 'run') is None
    bucket.set_age('runs', 'a/leases/run', 61.0)
    with leases.acquire(directory / 'leases', 'run') as taken:
        assert not taken.lost
    assert bucket.names('runs') == []


@pytest.mark.parametrize('before', [None, 61.0], ids=['none', 'expired'])
def test_of_two_that_find_a_lease_free_the_first_acquires_it(
    bucket, directory, monkeypatch, before
):
    if before is not None:
        write_lease(bucket, 'a/leases/run', age=before)
    write, raced = buckets.write, []

    def write_second(*args):
        if not raced:
            raced.append(write_lease(bucket, 'a/leases/run'))
        return write(*args)

    monkeypatch.setattr(buckets, 'write', write_second)
    assert leases.acquire(directory / 'leases', 'run') is None
    assert leases.holders(directory / 'leases')['run'].name == 'process 12 on far'


def test_the_clock_is_that_of_the_bucket(bucket):
    bucket.skew = 10 * bucket.skew.resolution * 3_600_000_000  # ten hours
    directory = make_directory('gs://runs/a')
    write_lease(bucket, 'a/run', age=59.0)
    assert leases.acquire(directory, 'run') is None
    bucket.set_age('runs', 'a/run', 61.0)
    with leases.acquire(directory, 'run'):
        pass


def test_metrics_reach_the_bucket_at_flush_and_are_read_back(bucket, directory):
    path = directory / 'metrics.jsonl'
    metrics = MetricsFile(path)
    for step in (1, 2):
        metrics.append({'step': step})
    assert read_metrics(path) == []
    metrics.flush()
    metrics.append({'step': 3})
    assert [record['step'] for record in read_metrics(path)] == [1, 2]
    metrics.flush()
    uploads = len(bucket.log)
    metrics.flush()
    assert len(bucket.log) == uploads
    again = MetricsFile(path)
    assert again.last_step == 3
    again.rewind(2, every=1)
    again.append({'step': 3, 'again': True})
    again.close()
    assert read_metrics(path) == [{'step': 1}, {'step': 2}, {'step': 3, 'again': True}]
    metrics.append({'step': 4})
    with pytest.raises(Lost, match='metrics.jsonl was taken over'):
        metrics.close()
    assert len(read_metrics(path)) == 3


def test_a_run_directory_in_a_bucket_has_one_owner(bucket, tiny):
    with RunDirectory.open('gs://runs/a', tiny()) as first:
        assert not first.resumed and not first.lost()
        with pytest.raises(InUseError, match='workdir=gs://runs/a is in use by process '):
            RunDirectory.open('gs://runs/a', tiny())
    with RunDirectory.open('gs://runs/a', tiny()) as again:
        assert again.resumed and as_path('gs://runs/a/lock').exists()
    assert bucket.names('runs') == ['a/config.json', 'a/metrics.jsonl', 'a/provenance.json']
