"""Leases and locks, on a disk and in a bucket: processes that race and pause, clocks set by hand.

The tests write ages to the files, with long expiries and frequent heartbeats. A busy machine then
does not change the outcome.
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
from collections.abc import Callable
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
EXPIRY = leases.EXPIRY  # seconds

ACQUIRE_AND_WAIT = """
    import sys, time
    from qkattn.storage import files, leases
    leases.acquire(files.as_path(sys.argv[1]), 'run')
    print('holding', flush=True)
    time.sleep(60)
"""


@dataclasses.dataclass
class Storage:
    """A directory of leases, on a disk or in a bucket."""

    directory: Path
    server: Any = None  # of the bucket

    @property
    def in_bucket(self) -> bool:
        return self.server is not None

    def write_lease(
        self, run: str, age: float = 0.0, expiry: float = EXPIRY, number: int = 0
    ) -> Path:
        """Writes a lease of process 12 on the machine `far`, and returns its path.

        A lease is a lock file, which expires unless its holder renews it by heartbeats.

        Args:
            run: Name of the run that the holder may train.
            age: Seconds since the last heartbeat.
            expiry: Seconds after a heartbeat at which the lease expires.
            number: N of the file RUN.N on a disk, where the highest N of a run counts. A bucket
                has only the object RUN.
        """
        # This machine cannot see whether process 12 is alive, so only the age counts.
        content = {'host': 'far', 'process': None, 'pid': 12, 'expiry': expiry}
        name = run if self.in_bucket else f'{run}.{number}'
        path = self.directory / name
        write_atomic(path, json.dumps(content))
        self.set_age(path, age)
        return path

    def set_age(self, path: Path, age: float) -> None:
        if self.in_bucket:
            self.server.set_age('runs', f'a/{path.name}', age)
        else:
            modified = time.time() - age
            os.utime(path, (modified, modified))

    def acquire(self) -> leases.Lease | None:
        return leases.acquire(self.directory, 'run')

    def holders(self) -> dict[str, str]:
        return leases.holders(self.directory)


@pytest.fixture
def disk_storage(tmp_path):
    return Storage(tmp_path)


@pytest.fixture
def bucket_storage(bucket):
    return Storage(make_directory('gs://runs/a'), server=bucket)


@pytest.fixture(params=['disk_storage', 'bucket_storage'], ids=['disk', 'bucket'])
def storage(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def frequent_heartbeats(monkeypatch):
    """A heartbeat every 50 ms."""
    heartbeats_per_second = 20
    monkeypatch.setattr(leases, '_BEATS', heartbeats_per_second * EXPIRY)


@dataclasses.dataclass
class Clock:
    seconds_ahead: float = 0.0


@pytest.fixture
def clock(monkeypatch):
    """Sets the clock of leases ahead, for example by `clock.seconds_ahead += 90.0`."""
    clock = Clock()
    seconds = leases.seconds
    monkeypatch.setattr(leases, 'seconds', lambda: seconds() + clock.seconds_ahead)
    return clock


def call_before_the_next_take(
    monkeypatch: pytest.MonkeyPatch, storage: Storage, race: Callable[[], None]
) -> None:
    """Makes the next `acquire` call `race` between finding the lease free and taking the lease."""
    lease_class = leases._Object if storage.in_bucket else leases._File
    take = lease_class.take

    def race_and_take(lease):
        """Replaces `take`: restores the real `take`, calls `race`, and then takes the lease."""
        monkeypatch.setattr(lease_class, 'take', take)
        race()
        take(lease)

    monkeypatch.setattr(lease_class, 'take', race_and_take)


def write_expired_leases(storage: Storage) -> None:
    storage.write_lease('run', age=HOUR, number=9)
    storage.write_lease('run', age=HOUR, number=10)


@pytest.mark.parametrize('before', ['no lease', 'expired leases'])
def test_two_processes_on_one_machine_do_not_both_take_a_lease(storage, monkeypatch, before):
    """Two callers find the same lease (a lock file) free, and only the faster one gets the lease.

    `acquire` returns None to the slower caller.
    """
    if before == 'expired leases':
        write_expired_leases(storage)
    leases_of_first_caller = []

    def take_lease_first():
        leases_of_first_caller.append(storage.acquire())

    # The first caller takes the lease after the second caller has found the lease free.
    call_before_the_next_take(monkeypatch, storage, take_lease_first)
    lease_of_second_caller = storage.acquire()

    assert lease_of_second_caller is None
    (lease_of_first_caller,) = leases_of_first_caller
    assert lease_of_first_caller is not None
    # Both callers are in this process, so this process is the holder.
    assert storage.holders()['run'].startswith(f'process {os.getpid()} on ')
    lease_of_first_caller.release()


@pytest.mark.parametrize('before', ['no lease', 'expired leases'])
def test_processes_on_two_machines_do_not_both_take_a_lease(storage, monkeypatch, before):
    """This process finds the lease (a lock file) free, but another machine takes the lease first.

    `acquire` then returns None.
    """
    next_number = 0
    if before == 'expired leases':
        # On a disk, leases of a run are numbered. The expired leases have the numbers 9 and 10.
        write_expired_leases(storage)
        next_number = 11
    leases_of_other_machine = []

    def let_other_machine_take_lease():
        """Writes the lease that process 12 on another machine takes."""
        leases_of_other_machine.append(storage.write_lease('run', number=next_number))

    # The other machine takes the lease after this process has found the lease free.
    call_before_the_next_take(monkeypatch, storage, let_other_machine_take_lease)
    lease_of_this_process = storage.acquire()

    assert lease_of_this_process is None
    assert len(leases_of_other_machine) == 1
    assert storage.holders()['run'].startswith('process 12 on ')


def test_a_holder_gives_up_before_its_lease_expires(disk_storage, clock):
    with disk_storage.acquire() as held:
        clock.seconds_ahead = 0.87 * EXPIRY
        assert held.lost is False
        clock.seconds_ahead = 0.88 * EXPIRY  # more than 7/8 of the expiry
        assert held.lost is True
        clock.seconds_ahead = 0.0
        assert held.lost is True  # a lost lease stays lost


def test_failed_heartbeats_are_retried_until_they_are_late(
    disk_storage, monkeypatch, clock, frequent_heartbeats
):
    """A lease is lost when no heartbeat has worked for about EXPIRY seconds.

    The test makes heartbeats fail, work again, fail again, and come late.
    """
    renew = leases._File.renew
    behavior = 'work'
    counts = Counter()  # heartbeats of each behavior

    def renew_with_behavior(lease):
        """Replaces a heartbeat: renews the lease, fails, or comes late, as `behavior` says."""
        counts[behavior] += 1
        if behavior == 'fail':
            raise OSError(errno.EIO, 'Input/output error')
        if behavior == 'come late':
            clock.seconds_ahead += 0.2 * EXPIRY
        return renew(lease)

    def wait_for_three_heartbeats():
        """Waits until three more heartbeats have begun with this behavior."""
        end = counts[behavior] + 3
        wait_until(lambda: counts[behavior] >= end)

    monkeypatch.setattr(leases._File, 'renew', renew_with_behavior)
    with disk_storage.acquire() as held:
        # The last heartbeat that worked was 0.5 * EXPIRY seconds ago.
        behavior = 'fail'
        wait_for_three_heartbeats()
        clock.seconds_ahead += 0.5 * EXPIRY
        assert not held.lost

        # Heartbeats work again. Otherwise, the lease's age would be (0.5 + 0.9) * EXPIRY.
        behavior = 'work'
        wait_for_three_heartbeats()
        clock.seconds_ahead += 0.9 * EXPIRY
        assert not held.lost

        wait_for_three_heartbeats()
        assert not held.lost

        # The last heartbeat that worked was 0.9 * EXPIRY seconds ago.
        behavior = 'fail'
        wait_for_three_heartbeats()
        clock.seconds_ahead += 0.9 * EXPIRY
        assert not held.lost

        # A heartbeat takes 0.2 * EXPIRY seconds, so the lease's age is (0.9 + 0.2) * EXPIRY.
        behavior = 'come late'
        wait_until(lambda: held.lost)

    # The end of the block stops the heartbeats and frees the lease.
    assert not held._thread.is_alive()
    assert disk_storage.holders() == {}


def test_a_holder_sees_that_its_lease_was_taken_over(storage, frequent_heartbeats):
    with storage.acquire() as held:
        assert not held.lost
        storage.write_lease('run', number=1)
        wait_until(lambda: held.lost)

    # The lease of the new holder is not released.
    assert held.lost
    assert storage.holders() == {'run': 'process 12 on far'}


def test_a_holder_sees_that_its_lease_was_deleted(storage, frequent_heartbeats):
    with storage.acquire() as held:
        assert not held.lost
        name = 'run' if storage.in_bucket else 'run.0'
        (storage.directory / name).unlink()
        wait_until(lambda: held.lost)

    # The lease is not created again.
    assert held.lost
    assert storage.holders() == {}


@pytest.mark.parametrize('error', [None, SystemExit])
def test_the_end_of_a_block_releases_the_lease(storage, error):
    """The lease (a lock file) is released whether the block ends normally or by an error.

    `holders` returns {run: process}.
    """
    with contextlib.suppress(SystemExit), storage.acquire() as held:
        # In the block, a thread renews the lease, and a second caller does not get the lease.
        assert held._thread.is_alive()
        assert storage.acquire() is None
        assert list(storage.holders()) == ['run']
        if error:
            raise error

    # After the block, the thread has ended and the run is free. A released lease is not lost.
    assert not held._thread.is_alive()
    assert not held.lost
    assert storage.holders() == {}


@pytest.mark.parametrize('error', [None, SystemExit])
def test_a_released_lease_cannot_release_a_later_one(storage, error):
    """Each lease (a lock file) is released once, and a second release of it changes nothing.

    The block of the first lease ends normally or by an error.
    """
    with contextlib.suppress(SystemExit), storage.acquire() as first:
        if error:
            raise error

    # The first lease is released again while the second lease holds the run.
    with storage.acquire():
        first.release()
        assert storage.acquire() is None

    # In a bucket, a released lease is deleted. On a disk, the file of each lease stays.
    if storage.in_bucket:
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
    ('age', 'expiry', 'is_held'),
    [
        pytest.param(0, EXPIRY, True, id='new'),
        pytest.param(EXPIRY + 1, EXPIRY, False, id='expired'),
        pytest.param(-HOUR, EXPIRY, True, id='from the future'),
        pytest.param(HOUR, 1.2 * HOUR, True, id='old with a long expiry'),
    ],
)
def test_a_lease_holds_a_run_until_it_expires(storage, monkeypatch, age, expiry, is_held):
    """A lease is free if its last renewal was more than `expiry` seconds ago.

    The last renewal was `age` seconds ago on the storage's clock. A negative age means a renewal in
    the future. This machine's clock must not matter: a disk is an hour behind it, and a bucket nine
    hours ahead.
    """
    if storage.in_bucket:
        storage.server.skew = datetime.timedelta(hours=10)
    storage.write_lease('run', age, expiry)  # of a process on another machine

    true_time = time.time
    monkeypatch.setattr(time, 'time', lambda: true_time() + HOUR)  # of this machine

    lease = storage.acquire()

    # `acquire` returns None if another process holds the lease.
    if is_held:
        assert lease is None
    else:
        assert lease is not None
        lease.release()


def test_a_lease_that_a_full_disk_cuts_holds_nothing(disk_storage):
    message = 'larger than this process may write'
    with file_size_limit(0), pytest.raises(DiskError, match=message):
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
    """Four threads each add one to a counter under a lock, so the counter ends at four."""
    lock = storage.directory / 'lock'
    counter = 0

    def add_one(_):
        """Reads the counter, and writes the increased value 10 ms later."""
        nonlocal counter
        with locked(lock):
            count = counter
            time.sleep(0.01)
            counter = count + 1

    # Without the lock, all threads would read 0 and write 1.
    with ThreadPoolExecutor(max_workers=4) as pool:
        list(pool.map(add_one, range(4)))
    assert counter == 4


def test_a_lock_that_is_held_is_refused_without_waiting(storage, frequent_heartbeats):
    lock = storage.directory / 'lock'
    holder = f'^process {os.getpid()} on '

    with locked(lock, wait=False) as lost:
        with pytest.raises(BlockingIOError, match=holder), locked(lock, wait=False):
            pass
        assert not lost()


def test_a_lock_in_a_bucket_can_be_lost(bucket_storage, frequent_heartbeats):
    lock = bucket_storage.directory / 'lock'

    with locked(lock, wait=False) as lost:
        bucket_storage.write_lease('lock')
        wait_until(lost)

    # The lock of the new holder stays.
    assert lock.read_bytes().startswith(b'{"host": "far"')


def skip_sleep(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: float, after: Callable[[], None]
) -> None:
    """Makes `sleep` of the calling thread return at once, and set the clock ahead instead.

    Args:
        monkeypatch: Replaces `sleep` for the test.
        clock: The clock of leases.
        seconds: How far each sleep sets the clock ahead, whatever its duration.
        after: Function that each sleep calls at its end.
    """
    this_thread = threading.current_thread()
    really_sleep = time.sleep

    def sleep(duration):
        """Replaces `time.sleep`: sets the clock ahead in this thread, and sleeps in others."""
        if threading.current_thread() is this_thread:
            clock.seconds_ahead += seconds
            after()
        else:  # the thread of an earlier lease
            really_sleep(duration)

    monkeypatch.setattr(leases.time, 'sleep', sleep)


def assert_waiting_is_logged(caplog):
    assert len(caplog.records) == 1
    assert 'is held by process 12 on far; waiting' in caplog.records[0].getMessage()


def test_a_lock_of_another_machine_is_refused_while_it_is_renewed(
    bucket_storage, caplog, monkeypatch, clock
):
    """A lock in a bucket expires 180 s after its last renewal.

    This process waits for 180 s. Meanwhile, process 12 on the machine `far` renews the lock.
    """
    lock = bucket_storage.write_lease('lock', age=5.0)
    renewals = []

    def renew():
        renewals.append(bucket_storage.write_lease('lock', age=5.0))

    # Each wait of this process counts as 90 s, and then the other machine renews the lock.
    skip_sleep(monkeypatch, clock, seconds=90.0, after=renew)

    # `wait=False` refuses a lock that is held, and names its holder.
    holder = '^process 12 on far$'
    with pytest.raises(BlockingIOError, match=holder), locked(lock, wait=False):
        pass
    # After two waits, 180 s have passed.
    assert len(renewals) == 2
    assert_waiting_is_logged(caplog)


def test_a_lock_of_another_machine_is_taken_over_when_expired(
    bucket_storage, caplog, monkeypatch, clock
):
    """A lock in a bucket expires 180 s after its last renewal.

    Process 12 on the machine `far` does not renew its lock, so this process gets the lock.
    """
    lock = bucket_storage.write_lease('lock', age=5.0)
    ages = [5.0]

    def grow_older():
        age = ages[-1] + 90.0
        ages.append(age)
        bucket_storage.set_age(lock, age)

    # Each wait of this process counts as 90 s, and makes the lock 90 s older.
    skip_sleep(monkeypatch, clock, seconds=90.0, after=grow_older)

    # A lock that is still held would be refused with an error.
    with locked(lock, wait=False):
        pass
    # At an age of 95 s, the lock was still held. At 185 s, the lock had expired.
    assert ages == [5.0, 95.0, 185.0]
    assert_waiting_is_logged(caplog)
