"""Leases and locks, on a disk and in a bucket: processes that race and pause, clocks set by hand.

Expiries are long, heartbeats frequent and ages written to the files, so that a busy machine does
not change what is seen.
"""

import contextlib
import dataclasses
import datetime
import errno
import json
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from qkattn.errors import DiskError
from qkattn.storage import leases
from qkattn.storage.files import make_directory, write_atomic
from qkattn.storage.leases import locked
from tests.processes import file_size_limit, start_python, wait_until

HOUR = 3600.0
EXPIRY = leases.EXPIRY

ACQUIRE_AND_WAIT = """
    import sys, time
    from qkattn.storage import files, leases
    leases.acquire(files.as_path(sys.argv[1]), 'run')
    print('holding', flush=True)
    time.sleep(60)
"""


@dataclasses.dataclass
class Storage:
    """A directory of leases, on a disk or, with its server, in a bucket."""

    directory: Path
    server: Any = None

    def write(self, run: str, age: float = 0.0, expiry: float = EXPIRY, number: int = 0) -> Path:
        """Writes a lease of a process on the machine `far`, `age` seconds old; returns its path."""
        about = {'host': 'far', 'process': None, 'pid': 12, 'expiry': expiry}
        path = self.directory / (run if self.server else f'{run}.{number}')
        write_atomic(path, json.dumps(about))
        self.set_age(path, age)
        return path

    def set_age(self, path: Path, age: float) -> None:
        if self.server:
            self.server.set_age('runs', f'a/{path.name}', age)
        else:
            os.utime(path, (time.time() - age,) * 2)

    def acquire(self) -> leases.Lease | None:
        return leases.acquire(self.directory, 'run')

    def holders(self) -> dict[str, str]:
        return leases.holders(self.directory)


@pytest.fixture
def disk_storage(tmp_path):
    return Storage(tmp_path)


@pytest.fixture
def bucket_storage(bucket):
    return Storage(make_directory('gs://runs/a'), bucket)


@pytest.fixture(params=['disk_storage', 'bucket_storage'], ids=['disk', 'far'])
def storage(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def frequent_heartbeats(monkeypatch):
    """A heartbeat every 50 ms."""
    monkeypatch.setattr(leases, '_BEATS', 20 * EXPIRY)


@pytest.fixture
def clock(monkeypatch):
    """[0.0]: a number of seconds that a test sets, by which the clock of leases is ahead."""
    skipped = [0.0]
    seconds = leases.seconds
    monkeypatch.setattr(leases, 'seconds', lambda: seconds() + skipped[0])
    return skipped


@pytest.mark.parametrize('here', [False, True], ids=['far', 'here'])
@pytest.mark.parametrize('before', [None, HOUR], ids=['none', 'expired'])
def test_two_that_find_a_lease_free_do_not_both_acquire_it(storage, monkeypatch, before, here):
    """The second one comes between the look at the lease and its acquisition."""
    for number in (9, 10) if before else ():
        storage.write('run', before, number=number)
    kind = leases._Object if storage.server else leases._File
    take = kind.take
    raced = []

    def take_second(lease):
        if not raced:
            raced.append(None)  # the first one, which comes here, too, if it is of this process
            number = 11 if before else 0
            raced.append(storage.acquire() if here else storage.write('run', number=number))
        take(lease)

    monkeypatch.setattr(kind, 'take', take_second)
    assert storage.acquire() is None
    assert raced[1] is not None
    assert storage.holders()['run'].startswith(f'process {os.getpid() if here else 12} on ')
    if here:
        raced[1].release()


def test_a_holder_gives_up_before_its_lease_expires(disk_storage, clock):
    with disk_storage.acquire() as held:
        for age, lost in ((0.87, False), (0.88, True), (0.0, True)):
            clock[0] = age * EXPIRY
            assert held.lost is lost


def test_failed_heartbeats_are_retried_until_they_are_late(
    disk_storage, monkeypatch, clock, frequent_heartbeats
):
    renew = leases._File.renew
    calls = Counter()
    mode = 'work'  # what heartbeats do at present

    def renewal(lease):
        calls[mode] += 1
        if mode == 'fail':
            raise OSError(errno.EIO, 'Input/output error')
        if mode == 'come late':
            clock[0] += 0.2 * EXPIRY
        return renew(lease)

    monkeypatch.setattr(leases._File, 'renew', renewal)
    with disk_storage.acquire() as held:
        # Three heartbeats of a mode, after which a share of the expiry passes at once. The 0.9
        # count from the last heartbeat that worked; failed ones change nothing.
        for mode, share in (('fail', 0.5), ('work', 0.9), ('work', 0.0), ('fail', 0.9)):
            wait_until(lambda mode=mode, end=calls[mode] + 3: calls[mode] >= end)
            clock[0] += share * EXPIRY
            assert not held.lost
        mode = 'come late'
        wait_until(lambda: held.lost)
    assert not held._thread.is_alive()
    assert disk_storage.holders() == {}


@pytest.mark.parametrize('change', ['taken over', 'deleted'])
def test_a_holder_sees_at_its_next_heartbeat_what_happened_to_its_lease(
    storage, frequent_heartbeats, change
):
    with storage.acquire() as held:
        assert not held.lost
        if change == 'taken over':
            storage.write('run', number=1)
        else:
            (storage.directory / ('run' if storage.server else 'run.0')).unlink()
        wait_until(lambda: held.lost)
    # Another holder's lease is not released, a deleted one not created again.
    expected = {'run': 'process 12 on far'} if change == 'taken over' else {}
    assert held.lost
    assert storage.holders() == expected


@pytest.mark.parametrize('error', [None, SystemExit])
def test_the_end_of_a_block_releases_the_lease(storage, error):
    with contextlib.suppress(SystemExit), storage.acquire() as held:
        assert held._thread.is_alive()
        assert storage.acquire() is None
        assert list(storage.holders()) == ['run']
        if error:
            raise error
    assert not held._thread.is_alive()
    assert not held.lost
    assert storage.holders() == {}
    with storage.acquire():
        held.release()
        assert storage.acquire() is None
    # Nothing but leases is left behind, and no object of a released one.
    if storage.server:
        assert storage.server.names('runs') == []
    else:
        assert sorted(os.listdir(storage.directory)) == ['run.0', 'run.1']


def test_the_lease_of_a_killed_process_is_free_at_once(storage):
    process = start_python(ACQUIRE_AND_WAIT, storage.directory)
    assert process.stdout.readline() == 'holding\n', process.stderr.read()
    assert storage.holders()['run'].startswith(f'process {process.pid} on ')
    process.kill()
    process.wait()
    assert storage.holders() == {}


@pytest.mark.parametrize(
    ('age', 'expiry', 'held'),
    [
        (0, EXPIRY, True),
        (EXPIRY + 1, EXPIRY, False),
        (-HOUR, EXPIRY, True),
        (HOUR, 1.2 * HOUR, True),
    ],
    ids=['held', 'expired', 'future', 'its expiry'],
)
def test_a_lease_holds_a_run_until_it_expires(storage, monkeypatch, age, expiry, held):
    """Ages are measured by the clock of the storage; the clock of this host is an hour ahead."""
    if storage.server:
        storage.server.skew = datetime.timedelta(hours=10)
        make_directory(storage.directory)  # reads the clock
    storage.write('run', age, expiry)
    now = time.time
    monkeypatch.setattr(time, 'time', lambda: now() + HOUR)
    lease = storage.acquire()
    assert (lease is None) == held
    if lease:
        lease.release()


def test_a_lease_that_a_full_disk_cuts_holds_nothing(disk_storage):
    with file_size_limit(0), pytest.raises(DiskError, match='larger than this process may write'):
        disk_storage.acquire()
    assert disk_storage.holders() == {}


@pytest.mark.parametrize('content', [b'', b'[]', b'{"host": "fa'])
def test_a_damaged_lease_holds_for_the_usual_time(disk_storage, content):
    path = disk_storage.directory / 'run.0'
    path.write_bytes(content)
    assert disk_storage.acquire() is None
    assert disk_storage.holders() == {'run': 'an unknown process'}
    disk_storage.set_age(path, EXPIRY + 1)
    assert not disk_storage.holders()


def test_a_lock_excludes_other_threads_which_wait(storage):
    lock = storage.directory / 'lock'
    counter = [0]

    def add_one(_):
        with locked(lock):
            count = counter[0]
            time.sleep(0.01)
            counter[0] = count + 1

    # Without the lock, threads would overwrite each other's count.
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add_one, range(4)))
    assert counter == [4]


def test_a_lock_that_is_held_raises_with_its_holder_unless_asked_to_wait(
    storage, frequent_heartbeats
):
    lock = storage.directory / 'lock'
    holder = f'^process {os.getpid()} on '
    with locked(lock, wait=False) as lost:
        with pytest.raises(BlockingIOError, match=holder), locked(lock, wait=False):
            pass
        assert not lost()
        if storage.server:  # a lease, which another one may take over
            storage.write('lock')
            wait_until(lost)
    if storage.server:
        assert lock.read_bytes().startswith(b'{"host": "far"')


@pytest.mark.parametrize('alive', [True, False])
def test_a_lock_of_another_machine_is_taken_over_once_it_has_expired(
    bucket_storage, caplog, monkeypatch, clock, alive
):
    """Between two looks at the lock, 90 s pass in which its holder renews it, if it is alive."""
    path = bucket_storage.write('lock', age=5.0)
    polls = []
    waiting = threading.current_thread()
    really_sleep = time.sleep

    def sleep(seconds):
        if threading.current_thread() is not waiting:  # a heartbeat that has not ended yet
            return really_sleep(seconds)
        polls.append(seconds)
        clock[0] += 90.0
        if alive:
            bucket_storage.write('lock', 5.0)
        else:
            bucket_storage.set_age(path, 5.0 + 90.0 * len(polls))

    monkeypatch.setattr(leases.time, 'sleep', sleep)
    expectation = contextlib.nullcontext()
    if alive:
        expectation = pytest.raises(BlockingIOError, match='^process 12 on far$')
    with expectation, locked(path, wait=False):
        pass
    assert len(polls) == 2
    (record,) = caplog.records
    assert 'is held by process 12 on far; waiting' in record.getMessage()
