"""Leases with processes that race and are paused, and with clocks set by hand.

Expiries are long, heartbeats frequent and ages written to the files, so that a busy machine does
not change what is seen.
"""

import contextlib
import errno
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from qkattn.errors import ConfigError, DiskError, RunDirectoryError
from qkattn.storage import leases
from tests.processes import start_python

HOUR = 3600.0
EXPIRY = 60.0

# Every worker that is about to create a file waits until all of them are.
RACE = """
    import os, sys, time
    from qkattn.storage import leases
    directory, barrier, workers, *runs = sys.argv[1:]
    create = leases._create
    def meet(name, wait):
        open(f'{barrier}/{name}-{os.getpid()}', 'x').close()
        while sum(other.startswith(name + '-') for other in os.listdir(barrier)) < int(workers):
            wait()
    def create_together(path, content):
        meet(path.name, lambda: None)
        create(path, content)
    leases._create = create_together
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


def wait_until(condition, seconds: float = 120.0):
    """Returns the first true value of `condition`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, 'nothing happened'
        time.sleep(0.01)
    return value


def set_age(path: Path, seconds: float) -> None:
    modified = time.time() - seconds
    os.utime(path, (modified, modified))


def write_lease(directory: Path, name: str, age: float = 0.0, expiry: float = EXPIRY) -> Path:
    path = directory / name
    about = {'host': 'far', 'pid': 12, 'started': '2026-01-01T00:00:00+00:00', 'expiry': expiry}
    path.write_text(json.dumps(about))
    set_age(path, age)
    return path


def test_of_racing_processes_exactly_one_acquires_each_run(tmp_path, tmp_path_factory):
    fresh, expired = [[f'{kind}{i}' for i in range(5)] for kind in ('fresh', 'expired')]
    for run in expired:
        write_lease(tmp_path, f'{run}.0', age=HOUR)
        write_lease(tmp_path, f'{run}.1', age=HOUR)
    barrier = tmp_path_factory.mktemp('barrier')
    workers = [start_python(RACE, tmp_path, barrier, 3, *fresh, *expired) for _ in range(3)]
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


def test_the_run_of_a_process_that_stops_is_taken_over_when_its_lease_expired_not_before(tmp_path):
    process, path = start_python(HOLD, tmp_path), tmp_path / 'run.0'
    try:
        assert process.stdout.readline() == 'holding\n', process.stderr.read()
        set_age(path, HOUR)
        wait_until(lambda: time.time() - path.stat().st_mtime < HOUR / 2)  # a heartbeat
        assert leases.acquire(tmp_path, 'run') is None
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped
        assert leases.acquire(tmp_path, 'run') is None
        set_age(path, EXPIRY + 1)
        with leases.acquire(tmp_path, 'run') as taken:
            assert taken.path.name == 'run.1'
            process.send_signal(signal.SIGCONT)
            assert process.communicate(timeout=120)[0] == 'left\n'
            # The process that was late has left the run alone.
            assert leases.acquire(tmp_path, 'run') is None
            assert not taken.lost
    finally:
        process.kill()
        process.communicate()


def test_a_holder_without_a_heartbeat_loses_its_run_although_nobody_took_it(
    tmp_path, monkeypatch, clock
):
    read = leases._read

    def slow_read(path):
        clock[0] += 0.8 * EXPIRY
        return read(path)

    with leases.acquire(tmp_path, 'run', expiry=EXPIRY) as held:
        clock[0] = 0.1 * EXPIRY
        assert not held.lost
        monkeypatch.setattr(leases, '_read', slow_read)
        held._beat()
        # 0.8 of the expiry since this heartbeat began, but 0.9 since the one before: lost before
        # the lease expires, so that nobody can hold the run at the same time, and for good.
        assert held.lost
        clock[0] = 0.0
        assert held.lost


@pytest.mark.parametrize('change', ['taken over', 'deleted', 'replaced'])
def test_a_holder_sees_at_its_next_heartbeat_what_happened_to_its_file(tmp_path, frequent, change):
    other = tmp_path / 'run.0'
    with leases.acquire(tmp_path, 'run', expiry=EXPIRY) as held:
        assert not held.lost
        if change == 'taken over':
            other = write_lease(tmp_path, 'run.1')
        elif change == 'deleted':
            held.path.unlink()
        else:
            os.replace(write_lease(tmp_path, 'other'), other)
        wait_until(lambda: held.lost)
    assert held.lost
    # Another holder's lease is not released, a deleted one not created again.
    assert other.exists() == (change != 'deleted')
    if change != 'deleted':
        assert leases.holders(tmp_path)['run'].name == 'process 12 on far'


def test_a_heartbeat_that_fails_is_retried_until_the_expiry(tmp_path, monkeypatch, clock, frequent):
    failing, failed, touched, touch = [True], [], [], os.utime
    before = threading.active_count()

    def utime(*args):
        (failed if failing[0] else touched).append(args)
        if failing[0]:
            raise OSError(5, 'Input/output error')
        touch(*args)

    monkeypatch.setattr(leases.os, 'utime', utime)
    with leases.acquire(tmp_path, 'run', expiry=EXPIRY) as held:
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
def test_leaving_frees_the_run_at_once_and_stops_the_heartbeat(tmp_path, error):
    before = threading.active_count()
    with contextlib.suppress(SystemExit), leases.acquire(tmp_path, 'run') as held:
        assert threading.active_count() == before + 1
        assert leases.acquire(tmp_path, 'run') is None
        if error:
            raise error
    assert threading.active_count() == before
    assert not held.lost
    assert leases.holders(tmp_path) == {}
    with leases.acquire(tmp_path, 'run') as again:
        held.release()
        assert leases.acquire(tmp_path, 'run') is None
        assert again.path.name == 'run.1'


def test_a_release_frees_although_a_heartbeat_is_in_progress(tmp_path, monkeypatch, frequent):
    touching, touch = threading.Event(), os.utime

    def utime(*args):
        if threading.current_thread() is not threading.main_thread():
            touching.set()
            time.sleep(0.2)
        touch(*args)

    monkeypatch.setattr(leases.os, 'utime', utime)
    held = leases.acquire(tmp_path, 'run', expiry=EXPIRY)
    assert touching.wait(120)
    held.release()
    time.sleep(0.3)
    assert leases.holders(tmp_path) == {}


def test_a_forked_child_holds_nothing_and_an_unreleased_lease_keeps_no_process_alive(tmp_path):
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
        tmp_path,
    )
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output.splitlines() == ['child True', 'parent False left', 'end']
    assert not leases.holders(tmp_path)  # its process is gone


@pytest.mark.parametrize(
    ('ages', 'taken'),
    [
        ({'run.0': (0, EXPIRY)}, None),
        ({'run.0': (EXPIRY + 1, EXPIRY)}, 'run.1'),
        ({'run.0': (-HOUR, EXPIRY)}, None),
        # The expiry is what the holder wrote.
        ({'run.0': (HOUR, 2 * HOUR)}, None),
        # The highest number is in force, also where files in between are gone.
        ({**{f'run.{i}': (0, EXPIRY) for i in range(10)}, 'run.10': (HOUR, EXPIRY)}, 'run.11'),
        ({'run.10': (HOUR, EXPIRY), 'run.20': (0, EXPIRY)}, None),
    ],
    ids=['held', 'expired', 'future', 'own expiry', 'numbers', 'gap'],
)
def test_the_last_lease_holds_a_run_until_it_expires(tmp_path, monkeypatch, ages, taken):
    """On the clock of the file system, whatever that of this host says."""
    for name, (age, expiry) in ages.items():
        write_lease(tmp_path, name, age, expiry)
    now = time.time
    monkeypatch.setattr(time, 'time', lambda: now() + HOUR)
    found = leases.acquire(tmp_path, 'run', expiry=12.5)
    assert (found and found.path.name) == taken
    if found:
        about = json.loads(found.path.read_text())
        assert (about['pid'], about['expiry']) == (os.getpid(), 12.5)
        found.release()


@pytest.mark.parametrize('content', ['', '{"host": "fa', '[]', '{"pid": 1}'])
def test_a_lease_without_its_content_holds_until_it_expires(tmp_path, content):
    path = tmp_path / 'run.0'
    path.write_text(content)
    assert leases.acquire(tmp_path, 'run', expiry=EXPIRY) is None
    assert leases.holders(tmp_path, expiry=EXPIRY)['run'].name == 'an unknown process'
    set_age(path, EXPIRY + 1)
    assert leases.holders(tmp_path, expiry=EXPIRY) == {}


def test_a_stale_listing_of_the_directory_does_no_harm(tmp_path, monkeypatch):
    write_lease(tmp_path, 'run.0', age=HOUR)
    unseen = write_lease(tmp_path, 'run.1')
    monkeypatch.setattr(leases, '_highest', lambda directory: {'run': 0})
    assert leases.acquire(tmp_path, 'run') is None
    set_age(unseen, HOUR)
    with leases.acquire(tmp_path, 'run') as taken:
        assert taken.path.name == 'run.2'


def test_holders_are_the_live_ones_and_when_their_leases_expire(tmp_path):
    assert leases.holders(tmp_path / 'none') == {}
    write_lease(tmp_path, 'a.0', age=2 * HOUR)
    write_lease(tmp_path, 'a.1', age=HOUR, expiry=3 * HOUR)
    write_lease(tmp_path, 'b.0', age=HOUR)
    with leases.acquire(tmp_path, 'c') as held:
        found = leases.holders(tmp_path)
        assert list(found) == ['a', 'c'] and held.path == tmp_path / 'c.0'
        assert found['a'].age == pytest.approx(HOUR, abs=100)
        assert found['a'].free_in == pytest.approx(2 * HOUR, abs=100)
        assert found['c'].name.startswith(f'process {os.getpid()} on ')
    assert str(leases.Holder('process 12 on far', 35.2, 25.0)) == 'process 12 on far, 35 s ago'
    # Nothing but leases is left behind.
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a.0', 'a.1', 'b.0', 'c.0']


@pytest.mark.parametrize('expiry', [0, -1, float('nan'), float('inf')])
def test_an_impossible_expiry_is_refused(tmp_path, expiry):
    with pytest.raises(ConfigError, match=rf'^expiry={expiry} must be a positive'):
        leases.acquire(tmp_path / 'leases', 'run', expiry=expiry)
    assert not (tmp_path / 'leases').exists()


def test_a_directory_that_cannot_be_written_is_refused_in_one_sentence(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(RunDirectoryError, match=r'file/leases cannot be used \(Not a directory'):
        leases.acquire(tmp_path / 'file' / 'leases', 'run')
    with pytest.raises(RunDirectoryError, match=r'file cannot hold leases \(Not a directory'):
        leases.holders(tmp_path / 'file')


def test_a_lease_that_a_full_disk_cannot_take_is_free_at_once(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(DiskError, match='the disk is full'):
        patch.setattr(leases.os, 'write', full)
        leases.acquire(tmp_path, 'run')
    assert not leases.holders(tmp_path)
    with leases.acquire(tmp_path, 'run') as lease:
        assert lease.path.name == 'run.1'


@pytest.mark.parametrize(
    'content',
    [
        *(b'', b'\x80', b'[' * 100_000, b'[]', b'{"pid": 1, "host": "x"}'),
        *(b'{"pid": 1, "host": "x", "expiry": %s}' % text for text in (b'"9"', b'1e999', b'-1')),
        b'{"pid": 1, "host": "x", "expiry": ' + b'9' * 400 + b'}',
    ],
    ids=range(9),
)
def test_a_damaged_lease_holds_for_the_usual_time(tmp_path, content):
    (tmp_path / 'run.0').write_bytes(content)
    (holder,) = leases.holders(tmp_path, expiry=60.0).values()
    assert holder.name == 'an unknown process' and 0 < holder.free_in <= 60
    os.utime(tmp_path / 'run.0', (time.time() - 61,) * 2)
    assert not leases.holders(tmp_path, expiry=60.0)
