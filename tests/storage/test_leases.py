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
from tests.processes import file_size_limit, start_python, until

HOUR = 3600.0
EXPIRY = leases.EXPIRY

HOLD = """
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
        """A lease of another machine."""
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
def disk(tmp_path):
    return Storage(tmp_path)


@pytest.fixture
def far(bucket):
    return Storage(make_directory('gs://runs/a'), bucket)


@pytest.fixture(params=['disk', 'far'])
def storage(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def frequent(monkeypatch):
    """A heartbeat every 50 ms."""
    monkeypatch.setattr(leases, '_BEATS', 20 * EXPIRY)


@pytest.fixture
def clock(monkeypatch):
    """A list whose only number is added to the clock of holders and waiters, in seconds."""
    skipped = [0.0]
    seconds = leases.seconds
    monkeypatch.setattr(leases, 'seconds', lambda: seconds() + skipped[0])
    return skipped


@pytest.mark.parametrize('here', [False, True], ids=['far', 'here'])
@pytest.mark.parametrize('before', [None, HOUR], ids=['none', 'expired'])
def test_of_two_that_find_a_lease_free_the_first_acquires_it(storage, monkeypatch, before, here):
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
    assert storage.acquire() is None and raced[1] is not None
    assert storage.holders()['run'].startswith(f'process {os.getpid() if here else 12} on ')
    if here:
        raced[1].release()


def test_a_holder_gives_up_before_its_lease_expires(disk, clock):
    with disk.acquire() as held:
        for age, lost in ((0.87, False), (0.88, True), (0.0, True)):
            clock[0] = age * EXPIRY
            assert held.lost is lost


def test_failed_heartbeats_are_retried_until_they_are_late(disk, monkeypatch, clock, frequent):
    renew = leases._File.renew
    calls = Counter()
    does = 'work'

    def renewal(lease):
        calls[does] += 1
        if does == 'fail':
            raise OSError(errno.EIO, 'Input/output error')
        clock[0] += 0.2 * EXPIRY * (does == 'come late')
        return renew(lease)

    monkeypatch.setattr(leases._File, 'renew', renewal)
    with disk.acquire() as held:
        # Every 0.9 is counted from the last heartbeat that worked, none from one that failed.
        for does, later in (('fail', 0.5), ('work', 0.9), ('work', 0.0), ('fail', 0.9)):
            until(lambda does=does, end=calls[does] + 3: calls[does] >= end)
            clock[0] += later * EXPIRY
            assert not held.lost
        does = 'come late'
        until(lambda: held.lost)
    assert not held._thread.is_alive() and disk.holders() == {}


@pytest.mark.parametrize('change', ['taken over', 'deleted'])
def test_a_holder_sees_at_its_next_heartbeat_what_happened_to_its_lease(storage, frequent, change):
    with storage.acquire() as held:
        assert not held.lost
        if change == 'taken over':
            storage.write('run', number=1)
        else:
            (storage.directory / ('run' if storage.server else 'run.0')).unlink()
        until(lambda: held.lost)
    # Another holder's lease is not released, a deleted one not created again.
    expected = {'run': 'process 12 on far'} if change == 'taken over' else {}
    assert held.lost and storage.holders() == expected


@pytest.mark.parametrize('error', [None, SystemExit])
def test_leaving_releases_the_lease(storage, error):
    with contextlib.suppress(SystemExit), storage.acquire() as held:
        assert held._thread.is_alive() and storage.acquire() is None
        assert list(storage.holders()) == ['run']
        if error:
            raise error
    assert not held._thread.is_alive() and not held.lost and storage.holders() == {}
    with storage.acquire():
        held.release()
        assert storage.acquire() is None
    # Nothing but leases is left behind, and no object of a released one.
    if storage.server:
        assert storage.server.names('runs') == []
    else:
        assert sorted(os.listdir(storage.directory)) == ['run.0', 'run.1']


def test_the_lease_of_a_killed_process_is_free_at_once(storage):
    process = start_python(HOLD, storage.directory)
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
    """On the clock of the storage, whatever that of this host says."""
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


def test_a_lease_that_a_full_disk_cuts_holds_nothing(disk):
    with file_size_limit(0), pytest.raises(DiskError, match='larger than this process may write'):
        disk.acquire()
    assert disk.holders() == {}


@pytest.mark.parametrize('content', [b'', b'[]', b'{"host": "fa'])
def test_a_damaged_lease_holds_for_the_usual_time(disk, content):
    path = disk.directory / 'run.0'
    path.write_bytes(content)
    assert disk.acquire() is None
    assert disk.holders() == {'run': 'an unknown process'}
    disk.set_age(path, EXPIRY + 1)
    assert not disk.holders()


def test_a_lock_excludes_others_which_wait(storage):
    lock = storage.directory / 'lock'
    counter = [0]

    def add_one(_):
        with locked(lock):
            count = counter[0]
            time.sleep(0.01)
            counter[0] = count + 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add_one, range(4)))
    assert counter == [4]


def test_a_lock_names_its_holder_to_who_does_not_wait(storage, frequent):
    lock = storage.directory / 'lock'
    holder = f'^process {os.getpid()} on '
    with locked(lock, wait=False) as lost:
        with pytest.raises(BlockingIOError, match=holder), locked(lock, wait=False):
            pass
        assert not lost()
        if storage.server:  # a lease, which another one may take over
            storage.write('lock')
            until(lost)
    if storage.server:
        assert lock.read_bytes().startswith(b'{"host": "far"')


@pytest.mark.parametrize('alive', [True, False])
def test_only_an_expired_lock_of_another_is_taken_over(far, caplog, monkeypatch, clock, alive):
    path = far.write('lock', age=5.0)
    polls = []
    waiting = threading.current_thread()
    really_sleep = time.sleep

    def sleep(seconds):
        if threading.current_thread() is not waiting:  # a heartbeat that has not ended yet
            return really_sleep(seconds)
        polls.append(seconds)
        clock[0] += 90.0
        far.write('lock', 5.0) if alive else far.set_age(path, 5.0 + 90.0 * len(polls))

    monkeypatch.setattr(leases.time, 'sleep', sleep)
    refused = pytest.raises(BlockingIOError, match='^process 12 on far$')
    with refused if alive else contextlib.nullcontext(), locked(path, wait=False):
        pass
    assert len(polls) == 2
    (record,) = caplog.records
    assert 'is held by process 12 on far; waiting' in record.getMessage()
