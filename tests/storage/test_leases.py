"""Leases and locks, on a disk and in a bucket: processes that race and pause, clocks set by hand.

Expiries are long, heartbeats frequent and ages written to the files, so that a busy machine does
not change what is seen.
"""

import contextlib
import dataclasses
import datetime
import errno
import json
import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from qkattn.errors import ConfigError, DiskError, RunDirectoryError
from qkattn.storage import leases
from qkattn.storage.files import make_directory
from qkattn.storage.leases import locked
from tests.processes import start_python

HOUR = 3600.0
EXPIRY = 60.0

# Every worker that is about to create a file waits until all of them are.
RACE = """
    import os, sys, time
    from qkattn.storage import leases
    directory, barrier, workers, *runs = sys.argv[1:]
    take = leases._File.take
    def meet(name, wait):
        open(f'{barrier}/{name}-{os.getpid()}', 'x').close()
        while sum(other.startswith(name + '-') for other in os.listdir(barrier)) < int(workers):
            wait()
    def take_together(entry, content):
        meet(f'{entry.run}.{entry.number}', lambda: None)
        take(entry, content)
    leases._File.take = take_together
    meet('started', lambda: time.sleep(0.005))
    held = [lease for run in runs if (lease := leases.acquire(directory, run))]
    print(*(lease.path.name for lease in held), flush=True)
    sys.stdin.read()
"""

HOLD = """
    import sys, time
    from qkattn.storage import leases
    leases._BEATS = 1200
    with leases.acquire(sys.argv[1], 'run', expiry=60.0) as lease:
        print('holding', flush=True)
        while not lease.lost:
            time.sleep(0.01)
    print('left', flush=True)
"""

HOLD_LOCK = """
    import time
    from qkattn.storage.leases import locked
    with locked('gs://runs/a/lock', wait=False):
        print('holding', flush=True)
        time.sleep(600)
"""


@dataclasses.dataclass
class Storage:
    """A directory of leases, on a disk or, with its server, in a bucket."""

    directory: Path
    server: Any = None

    def write(self, run: str, age: float = 0.0, expiry: float = EXPIRY, number: int = 0) -> Path:
        """A lease of another machine."""
        about = {'host': 'far', 'pid': 12, 'started': '2026-01-01T00:00:00+00:00', 'expiry': expiry}
        return self.put(run, json.dumps(about).encode(), age, number)

    def put(self, run: str, content: bytes, age: float = 0.0, number: int = 0) -> Path:
        if self.server:
            self.server.put('runs', f'a/{run}', content, age)
            return self.directory / run
        path = self.directory / f'{run}.{number}'
        path.write_bytes(content)
        self.set_age(path, age)
        return path

    def set_age(self, path: Path, age: float) -> None:
        if self.server:
            self.server.set_age('runs', f'a/{path.name}', age)
        else:
            os.utime(path, (time.time() - age,) * 2)


@pytest.fixture
def disk(tmp_path):
    return Storage(tmp_path)


@pytest.fixture(params=['disk', 'bucket'])
def storage(request, tmp_path):
    if request.param == 'disk':
        return Storage(tmp_path)
    server = request.getfixturevalue('bucket')
    return Storage(make_directory('gs://runs/a'), server)


@pytest.fixture
def frequent(monkeypatch):
    """A heartbeat every 50 ms of leases that expire in a minute."""
    monkeypatch.setattr(leases, '_BEATS', 1200)


@pytest.fixture
def clock(monkeypatch):
    """A list whose only number is added to the holder's clock, in seconds."""
    skipped, seconds = [0.0], leases.seconds
    monkeypatch.setattr(leases, 'seconds', lambda: seconds() + skipped[0])
    return skipped


@contextlib.contextmanager
def started(source: str, *arguments: object):
    """A process that has printed its first line, 'holding'."""
    process = start_python(source, *arguments)
    try:
        assert process.stdout.readline() == 'holding\n', process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(condition, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'nothing happened'
        time.sleep(0.01)


def test_of_racing_processes_exactly_one_acquires_each_run(disk, tmp_path_factory):
    fresh, expired = [[f'{kind}{i}' for i in range(5)] for kind in ('fresh', 'expired')]
    for run in expired:
        disk.write(run, HOUR, number=0)
        disk.write(run, HOUR, number=1)
    barrier = tmp_path_factory.mktemp('barrier')
    workers = [start_python(RACE, disk.directory, barrier, 3, *fresh, *expired) for _ in range(3)]
    try:
        won = [worker.stdout.readline().split() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert sorted(sum(won, [])) == sorted(
        [f'{run}.0' for run in fresh] + [f'{run}.2' for run in expired]
    )
    assert len(list(barrier.iterdir())) == 3 * (1 + 10)


@pytest.mark.parametrize('before', [None, HOUR], ids=['none', 'expired'])
def test_of_two_that_find_a_lease_free_the_first_acquires_it(storage, monkeypatch, before):
    if before is not None:
        storage.write('run', before)
    name = '_Object' if storage.server else '_File'
    take, raced = getattr(leases, name).take, []

    def take_second(*args):
        if not raced:
            raced.append(storage.write('run', number=0 if before is None else 1))
        take(*args)

    monkeypatch.setattr(getattr(leases, name), 'take', take_second)
    assert leases.acquire(storage.directory, 'run') is None and raced
    assert leases.holders(storage.directory)['run'].name == 'process 12 on far'


def test_a_process_that_stops_is_replaced_when_its_lease_expired_and_not_before(disk):
    path = disk.directory / 'run.0'
    with started(HOLD, disk.directory) as process:
        disk.set_age(path, HOUR)
        wait_until(lambda: time.time() - path.stat().st_mtime < HOUR / 2)  # a heartbeat
        assert leases.acquire(disk.directory, 'run') is None
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped
        assert leases.acquire(disk.directory, 'run') is None
        disk.set_age(path, EXPIRY + 1)
        with leases.acquire(disk.directory, 'run') as taken:
            assert taken.path.name == 'run.1'
            process.send_signal(signal.SIGCONT)
            assert process.communicate(timeout=120)[0] == 'left\n'
            # The process that was late has left the run alone.
            assert leases.acquire(disk.directory, 'run') is None and not taken.lost


def test_a_holder_without_a_heartbeat_loses_its_run_although_nobody_took_it(
    disk, monkeypatch, clock
):
    with leases.acquire(disk.directory, 'run', expiry=EXPIRY) as held:
        clock[0] = 0.1 * EXPIRY
        assert not held.lost

        def slow_renewal(_):
            clock[0] += 0.8 * EXPIRY
            return True

        monkeypatch.setattr(held._entry, 'renew', slow_renewal)
        held._beat()
        # 0.8 of the expiry since this heartbeat began, but 0.9 since the one before: lost before
        # the lease expires, so that nobody can hold the run at the same time, and for good.
        assert held.lost
        clock[0] = 0.0
        assert held.lost


@pytest.mark.parametrize('change', ['taken over', 'deleted', 'replaced'])
def test_a_holder_sees_at_its_next_heartbeat_what_happened_to_its_lease(storage, frequent, change):
    with leases.acquire(storage.directory, 'run', expiry=EXPIRY) as held:
        assert not held.lost
        if change == 'taken over':
            storage.write('run', number=1)
        elif change == 'deleted':
            held.path.unlink()
        elif storage.server:
            storage.write('run')
        else:
            os.replace(storage.write('other'), held.path)
        wait_until(lambda: held.lost)
    assert held.lost
    # Another holder's lease is not released, a deleted one not created again.
    names = [holder.name for holder in leases.holders(storage.directory).values()]
    assert names == ([] if change == 'deleted' else ['process 12 on far'])


def test_a_heartbeat_that_fails_is_retried_until_the_expiry(disk, monkeypatch, clock, frequent):
    failing, failed, touched, touch = [True], [], [], os.utime
    before = threading.active_count()

    def utime(*args):
        (failed if failing[0] else touched).append(args)
        if failing[0]:
            raise OSError(errno.EIO, 'Input/output error')
        touch(*args)

    monkeypatch.setattr(leases.os, 'utime', utime)
    with leases.acquire(disk.directory, 'run', expiry=EXPIRY) as held:
        wait_until(lambda: len(failed) >= 3)
        clock[0] = 0.5 * EXPIRY
        assert not held.lost
        failing[0] = False
        wait_until(lambda: len(touched) >= 2)  # the first has been counted
        # More than the expiry since the last heartbeat before the failures.
        clock[0] = 1.3 * EXPIRY
        assert not held.lost
        failing[0] = True
        clock[0] = 3 * EXPIRY
        assert held.lost
    assert threading.active_count() == before, 'released although the file system fails'


@pytest.mark.parametrize('error', [None, SystemExit])
def test_leaving_frees_the_run_at_once_and_stops_the_heartbeat(storage, error):
    with contextlib.suppress(SystemExit), leases.acquire(storage.directory, 'run') as held:
        assert held._thread.is_alive()
        assert leases.acquire(storage.directory, 'run') is None
        if error:
            raise error
    assert not held._thread.is_alive() and not held.lost
    assert leases.holders(storage.directory) == {}
    with leases.acquire(storage.directory, 'run') as again:
        held.release()
        assert leases.acquire(storage.directory, 'run') is None
        assert again.path.name == ('run' if storage.server else 'run.1')


def test_a_release_frees_although_a_heartbeat_is_in_progress(disk, monkeypatch, frequent):
    touching, touch = threading.Event(), os.utime

    def utime(*args):
        if threading.current_thread() is not threading.main_thread():
            touching.set()
            time.sleep(0.2)
        touch(*args)

    monkeypatch.setattr(leases.os, 'utime', utime)
    held = leases.acquire(disk.directory, 'run', expiry=EXPIRY)
    assert touching.wait(120)
    held.release()
    time.sleep(0.3)
    assert leases.holders(disk.directory) == {}


def test_a_forked_child_holds_nothing_and_an_unreleased_lease_keeps_no_process_alive(disk):
    process = start_python(
        """
        import os, sys
        from qkattn.storage import leases
        with leases.acquire(sys.argv[1], 'left') as lease:
            child = os.fork()
            if child == 0:
                print('child', lease.lost, flush=True)
                lease.__exit__(None, None, None)
                os._exit(0)
            os.waitpid(child, 0)
            print('parent', lease.lost, *leases.holders(sys.argv[1]), flush=True)
        kept = leases.acquire(sys.argv[1], 'kept')
        print('end', flush=True)
        """,
        disk.directory,
    )
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output.splitlines() == ['child True', 'parent False left', 'end']
    assert not leases.holders(disk.directory)  # its process is gone


@pytest.mark.parametrize(
    ('ages', 'taken'),
    [
        ({0: (0, EXPIRY)}, None),
        ({0: (EXPIRY + 1, EXPIRY)}, 1),
        ({0: (-HOUR, EXPIRY)}, None),
        ({0: (HOUR, 2 * HOUR)}, None),  # the expiry is what the holder wrote
        # The highest number is in force, also where files in between are gone.
        ({**dict.fromkeys(range(10), (0, EXPIRY)), 10: (HOUR, EXPIRY)}, 11),
        ({10: (HOUR, EXPIRY), 20: (0, EXPIRY)}, None),
    ],
    ids=['held', 'expired', 'future', 'its expiry', 'numbers', 'gap'],
)
def test_the_last_lease_holds_a_run_until_it_expires(storage, monkeypatch, ages, taken):
    """On the clock of the storage, whatever that of this host says."""
    if storage.server:
        storage.server.skew = datetime.timedelta(hours=10)
        make_directory(storage.directory)  # reads the clock
    for number, (age, expiry) in ages.items():
        storage.write('run', age, expiry, number)
    now = time.time
    monkeypatch.setattr(time, 'time', lambda: now() + HOUR)
    lease = leases.acquire(storage.directory, 'run', expiry=12.5)
    assert (lease is None) == (taken is None)
    if lease:
        about = json.loads(lease.path.read_bytes())
        assert (about['pid'], about['expiry']) == (os.getpid(), 12.5)
        assert storage.server or lease.path.name == f'run.{taken}'
        lease.release()


@pytest.mark.parametrize(
    'content',
    [
        *(b'', b'\x80', b'[' * 100_000, b'[]', b'{"host": "fa', b'{"pid": 1, "host": "x"}'),
        *(b'{"pid": 1, "host": "x", "expiry": %s}' % text for text in (b'"9"', b'1e999', b'-1')),
        b'{"pid": 1, "host": "x", "expiry": ' + b'9' * 400 + b'}',
    ],
    ids=range(10),
)
def test_a_damaged_lease_holds_for_the_usual_time(disk, content):
    path = disk.put('run', content, age=1.0)
    assert leases.acquire(disk.directory, 'run', expiry=EXPIRY) is None
    (holder,) = leases.holders(disk.directory, expiry=EXPIRY).values()
    assert holder.name == 'an unknown process' and 0 < holder.free_in < EXPIRY
    disk.set_age(path, EXPIRY + 1)
    assert not leases.holders(disk.directory, expiry=EXPIRY)


def test_a_stale_listing_of_the_directory_does_no_harm(disk, monkeypatch):
    disk.write('run', HOUR, number=0)
    unseen = disk.write('run', number=1)
    stale = lambda directory, run: {run: leases._File(directory, run, 0)}  # noqa: E731
    monkeypatch.setattr(leases, '_entries', stale)
    assert leases.acquire(disk.directory, 'run') is None
    disk.set_age(unseen, HOUR)
    with leases.acquire(disk.directory, 'run') as taken:
        assert taken.path.name == 'run.2'


def test_holders_are_the_live_ones_and_when_their_leases_expire(storage):
    assert leases.holders(storage.directory / 'none') == {}
    storage.write('a', HOUR, expiry=3 * HOUR, number=1)
    storage.write('b', HOUR)
    with leases.acquire(storage.directory, 'c'):
        held = leases.holders(storage.directory)
        assert list(held) == ['a', 'c']
        assert held['a'].age == pytest.approx(HOUR, abs=100)
        assert held['a'].free_in == pytest.approx(2 * HOUR, abs=100)
        assert held['c'].name.startswith(f'process {os.getpid()} on ')
        assert str(dataclasses.replace(held['a'], age=35.2)) == 'process 12 on far, 35 s ago'
    # Nothing but leases is left behind, and no object of a released one.
    left = ['a', 'b'] if storage.server else ['a.1', 'b.0', 'c.0']
    assert sorted(path.name for path in storage.directory.iterdir()) == left


@pytest.mark.parametrize('expiry', [0, -1, float('nan'), float('inf')])
def test_an_impossible_expiry_is_refused(tmp_path, expiry):
    with pytest.raises(ConfigError, match=f'^expiry={expiry} must be'):
        leases.acquire(tmp_path / 'leases', 'run', expiry=expiry)
    assert not (tmp_path / 'leases').exists()


def test_a_directory_that_cannot_hold_leases_is_refused(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(RunDirectoryError, match=r'file/leases cannot be used \(Not a directory'):
        leases.acquire(tmp_path / 'file' / 'leases', 'run')
    with pytest.raises(RunDirectoryError, match=r'file cannot hold leases \(Not a directory'):
        leases.holders(tmp_path / 'file')


def test_a_lease_that_a_full_disk_cannot_take_is_free_at_once(disk, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(DiskError):
        patch.setattr(leases.os, 'write', full)
        leases.acquire(disk.directory, 'run')
    assert not leases.holders(disk.directory)
    with leases.acquire(disk.directory, 'run') as lease:
        assert lease.path.name == 'run.1'


# Locks


def test_a_lock_excludes_others(tmp_path):
    path = tmp_path / 'count'
    path.write_text('0')

    def add_one(_):
        with locked(tmp_path / 'new' / 'lock'):
            count = int(path.read_text())
            time.sleep(0.01)
            path.write_text(str(count + 1))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add_one, range(8)))
    assert path.read_text() == '8'
    with locked(path), pytest.raises(BlockingIOError), locked(path, wait=False):
        pass
    with locked(path, wait=False) as lost:
        assert not lost()


def test_a_lock_below_a_file_is_refused(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(ConfigError, match='file/below cannot be written .*workdir'):
        locked(tmp_path / 'file/below/lock').__enter__()


@pytest.fixture
def far(bucket):
    return Storage(make_directory('gs://runs/a'), bucket)


def test_a_lock_in_a_bucket_is_refused_and_taken_over_at_once_from_a_killed_process(far):
    lock = far.directory / 'lock'
    with started(HOLD_LOCK) as process:
        with pytest.raises(BlockingIOError, match=f'^process {process.pid} on '):
            locked(lock, wait=False).__enter__()
        process.send_signal(signal.SIGKILL)
        process.wait()
        with locked(lock, wait=False) as lost:
            assert not lost()
    assert not lock.exists()


def test_a_lock_of_another_machine_is_taken_over_when_it_expired_and_not_before(
    far, caplog, monkeypatch
):
    path, polls = far.write('lock', age=59.0), []

    def sleep(seconds):
        polls.append(seconds)
        if len(polls) == 3:
            assert path.read_bytes().startswith(b'{"host": "far"')
            far.set_age(path, 61.0)

    monkeypatch.setattr(leases.time, 'sleep', sleep)
    with caplog.at_level(logging.WARNING, 'qkattn'), locked(path, wait=False):
        assert len(polls) == 3
    (record,) = caplog.records
    assert 'is held by process 12 on far, 59 s ago; going on in 1 s' in record.getMessage()


def test_a_lock_of_another_machine_that_is_renewed_is_refused(far, monkeypatch):
    path, renewals = far.write('lock', age=5.0), [True, False]
    monkeypatch.setattr(leases.time, 'sleep', lambda _: renewals.pop() and far.write('lock'))
    with pytest.raises(BlockingIOError, match='^process 12 on far$'):
        locked(path, wait=False).__enter__()


def test_a_lock_in_a_bucket_is_renewed_and_lost_to_who_takes_it_over(far, monkeypatch):
    monkeypatch.setattr(leases, '_BEATS', 12_000)
    path = far.directory / 'lock'
    with locked(path) as lost:
        far.set_age(path, 110.0)
        wait_until(lambda: len([c for c in far.server.log if 'ifGenerationMatch' in c]) > 3)
        assert not lost()
        far.write('lock')
        wait_until(lost)
    assert path.read_bytes().startswith(b'{"host": "far"')
