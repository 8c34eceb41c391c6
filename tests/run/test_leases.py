"""Claims with real processes that race, are killed and are paused, and with clocks set by hand."""

import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from qkattn.errors import ConfigError, RunDirectoryError
from qkattn.run import leases
from tests.processes import start_python

HOUR = 3600.0

RACE = """
    import os, sys, time
    from qkattn.run import leases
    directory, runs = sys.argv[1], sys.argv[2:]
    print('ready', flush=True)
    while not os.path.exists(directory + '/go'):
        pass
    held = [claim for run in runs if (claim := leases.claim(directory, run, expiry=60))]
    print(*(claim.path.name for claim in held), flush=True)
    time.sleep(60)
"""

HOLD = """
    import sys, time
    from qkattn.run import leases
    with leases.claim(sys.argv[1], 'run', expiry=float(sys.argv[2])) as claim:
        print('holding', flush=True)
        end = time.monotonic() + 20
        while not claim.lost and time.monotonic() < end:
            time.sleep(0.01)
        print('lost' if claim.lost else 'kept', flush=True)
    print('left', flush=True)
    time.sleep(60)
"""


@pytest.fixture
def hold(tmp_path):
    """Starts a process that holds 'run' of tmp_path until it lost it."""
    started = []

    def start(expiry: float):
        process = start_python(HOLD, tmp_path, expiry)
        started.append(process)
        assert process.stdout.readline() == 'holding\n', process.stderr.read()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_until(condition, seconds: float = 10.0):
    """Returns what `condition` returned at last; fails where that stays false."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, 'nothing happened'
        time.sleep(0.01)
    return value


def set_age(path: Path, seconds: float) -> None:
    modified = time.time() - seconds
    os.utime(path, (modified, modified))


def write_claim(directory: Path, name: str, age: float = 0.0, expiry: float = 60.0) -> Path:
    path = directory / name
    about = {'host': 'far', 'pid': 12, 'started': '2026-01-01T00:00:00+00:00', 'expiry': expiry}
    path.write_text(json.dumps(about))
    set_age(path, age)
    return path


def test_of_many_racing_processes_exactly_one_gets_each_run(tmp_path):
    unclaimed = [f'unclaimed{i}' for i in range(40)]
    expired = [f'expired{i}' for i in range(40)]
    for run in expired:
        write_claim(tmp_path, f'{run}.0', age=HOUR)
        write_claim(tmp_path, f'{run}.1', age=HOUR)
    workers = [start_python(RACE, tmp_path, *unclaimed, *expired) for _ in range(3)]
    try:
        for worker in workers:
            assert worker.stdout.readline() == 'ready\n', worker.stderr.read()
        (tmp_path / 'go').touch()
        won = [worker.stdout.readline().split() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert sorted(sum(won, [])) == sorted(
        [f'{run}.0' for run in unclaimed] + [f'{run}.2' for run in expired]
    )
    assert sum(bool(names) for names in won) > 1, 'nobody raced'


def test_the_cell_of_a_killed_process_is_taken_over_when_its_claim_expired_not_before(
    tmp_path, hold
):
    expiry = 1.0
    holder = hold(expiry)
    # Longer than the expiry: heartbeats keep the claim.
    end = time.monotonic() + 1.5 * expiry
    while time.monotonic() < end:
        assert leases.claim(tmp_path, 'run', expiry=expiry) is None
        time.sleep(0.05)
    holder.kill()
    holder.wait()
    last_beat = (tmp_path / 'run.0').stat().st_mtime
    with wait_until(lambda: leases.claim(tmp_path, 'run', expiry=expiry)) as taken:
        waited = taken.path.stat().st_mtime - last_beat
        assert taken.path.name == 'run.1'
        assert expiry < waited < expiry + 1
        assert not taken.lost


def test_a_paused_holder_sees_that_its_cell_was_taken_and_leaves_it_alone(tmp_path, hold):
    holder = hold(1.0)
    holder.send_signal(signal.SIGSTOP)
    with wait_until(lambda: leases.claim(tmp_path, 'run', expiry=20)) as taken:
        holder.send_signal(signal.SIGCONT)
        assert holder.stdout.readline() == 'lost\n'
        assert holder.stdout.readline() == 'left\n'
        assert leases.claim(tmp_path, 'run', expiry=20) is None
        assert not taken.lost


def test_a_holder_that_paused_too_long_lost_its_cell_although_nobody_took_it(tmp_path, monkeypatch):
    with leases.claim(tmp_path, 'run', expiry=1.0) as held:
        skipped = 0.0
        clock = leases._seconds
        monkeypatch.setattr(leases, '_seconds', lambda: clock() + skipped)
        assert not held.lost
        # Before the claim's expiry, so that nobody can hold the run at the same time.
        skipped = 0.95
        assert held.lost
        skipped = 0.0
        assert held.lost


def test_a_heartbeat_that_took_too_long_does_not_keep_the_run(tmp_path, monkeypatch):
    skipped, clock, read = 0.0, leases._seconds, leases._read

    def slow_read(path):
        nonlocal skipped
        skipped += 0.8
        return read(path)

    monkeypatch.setattr(leases, '_seconds', lambda: clock() + skipped)
    with leases.claim(tmp_path, 'run', expiry=1.0) as held:
        monkeypatch.setattr(leases, '_read', slow_read)
        wait_until(lambda: skipped)
        time.sleep(0.05)
        # 0.8 s since that heartbeat began, but more than the expiry allows since the one before.
        assert held.lost


@pytest.mark.parametrize('change', ['taken over', 'deleted', 'replaced'])
def test_a_holder_sees_at_its_next_heartbeat_what_happened_to_its_file(tmp_path, change):
    other = tmp_path / 'run.0'
    with leases.claim(tmp_path, 'run', expiry=2.0) as held:
        start = time.monotonic()
        assert not held.lost
        if change == 'taken over':
            other = write_claim(tmp_path, 'run.1')
        elif change == 'deleted':
            held.path.unlink()
        else:
            other = write_claim(tmp_path, 'run.0')
        wait_until(lambda: held.lost)
        assert time.monotonic() - start < 1.0
    assert held.lost
    # What is somebody else's is not freed on leaving, nor made again.
    assert other.exists() == (change != 'deleted')
    if change != 'deleted':
        assert str(leases.holders(tmp_path)['run']).startswith('process 12 on far, ')


def test_a_heartbeat_that_fails_is_tried_again_until_the_expiry(tmp_path, monkeypatch):
    fails, calls, touch = True, [], os.utime

    def utime(*args):
        calls.append(args)
        if fails:
            raise OSError(5, 'Input/output error')
        touch(*args)

    monkeypatch.setattr(leases.os, 'utime', utime)
    with leases.claim(tmp_path, 'run', expiry=1.0) as held:
        wait_until(lambda: len(calls) >= 3)
        assert not held.lost
        fails = False
        # Long after the expiry it still holds, by the heartbeats that succeeded.
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            assert not held.lost
            time.sleep(0.05)
        fails, start = True, time.monotonic()
        wait_until(lambda: held.lost)
        assert 0.4 < time.monotonic() - start < 2.0


@pytest.mark.parametrize('error', [None, ValueError, KeyboardInterrupt, SystemExit])
def test_leaving_frees_the_cell_at_once_and_ends_the_heartbeat(tmp_path, error):
    before = threading.active_count()
    try:
        with leases.claim(tmp_path, 'run', expiry=60) as held:
            assert threading.active_count() == before + 1
            assert leases.claim(tmp_path, 'run', expiry=60) is None
            if error:
                raise error
    except (ValueError, KeyboardInterrupt, SystemExit):
        pass
    assert threading.active_count() == before
    assert not held.lost
    assert leases.holders(tmp_path) == {}
    with leases.claim(tmp_path, 'run', expiry=60) as again:
        held.release()
        assert leases.claim(tmp_path, 'run', expiry=60) is None
        assert again.path.name == 'run.1'


def test_a_release_frees_although_a_heartbeat_is_under_way(tmp_path, monkeypatch):
    touching, touch = threading.Event(), os.utime

    def utime(*args):
        if threading.current_thread() is not threading.main_thread():
            touching.set()
            time.sleep(0.2)
        touch(*args)

    monkeypatch.setattr(leases.os, 'utime', utime)
    held = leases.claim(tmp_path, 'run', expiry=2.0)
    assert touching.wait(10)
    held.release()
    time.sleep(0.3)
    assert leases.holders(tmp_path) == {}


def test_a_failing_file_system_does_not_stop_the_release(tmp_path, monkeypatch):
    def utime(*args):
        raise OSError(5, 'Input/output error')

    monkeypatch.setattr(leases.os, 'utime', utime)
    before = threading.active_count()
    with leases.claim(tmp_path, 'run', expiry=60):
        pass
    assert threading.active_count() == before


def test_a_forked_child_holds_nothing_and_an_unreleased_claim_keeps_no_process_alive(tmp_path):
    process = start_python(
        """
        import os, sys
        from qkattn.run import leases
        with leases.claim(sys.argv[1], 'left', expiry=60) as claim:
            child = os.fork()
            if child == 0:
                print('child', claim.lost, flush=True)
                claim.__exit__(None, None, None)
                os._exit(0)
            os.waitpid(child, 0)
            print('parent', claim.lost, *leases.holders(sys.argv[1]), flush=True)
        kept = leases.claim(sys.argv[1], 'kept', expiry=60)
        print('end', flush=True)
        """,
        tmp_path,
    )
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert output.splitlines() == ['child True', 'parent False left', 'end']
    assert list(leases.holders(tmp_path)) == ['kept']


def test_ages_are_those_of_the_file_system_not_of_this_host(tmp_path, monkeypatch):
    write_claim(tmp_path, 'fresh.0', age=50)
    write_claim(tmp_path, 'old.0', age=70)
    write_claim(tmp_path, 'future.0', age=-HOUR)

    now = time.time
    monkeypatch.setattr(time, 'time', lambda: now() + HOUR)
    assert leases.claim(tmp_path, 'fresh', expiry=60) is None
    assert leases.claim(tmp_path, 'future', expiry=60) is None
    with leases.claim(tmp_path, 'old', expiry=60) as taken:
        assert taken.path.name == 'old.1'


def test_a_claim_goes_by_the_expiry_that_its_holder_wrote(tmp_path):
    write_claim(tmp_path, 'run.0', age=50, expiry=60)
    assert leases.claim(tmp_path, 'run', expiry=10) is None
    set_age(tmp_path / 'run.0', 70)
    with leases.claim(tmp_path, 'run', expiry=1000) as taken:
        about = json.loads(taken.path.read_text())
    assert (about['pid'], about['expiry']) == (os.getpid(), 1000)


@pytest.mark.parametrize('content', ['', '{"host": "fa', '[]', '{"pid": 1}'])
def test_a_claim_without_its_content_holds_until_it_expires(tmp_path, content):
    path = tmp_path / 'run.0'
    path.write_text(content)
    assert leases.claim(tmp_path, 'run', expiry=60) is None
    assert str(leases.holders(tmp_path, expiry=60)['run']) == 'an unknown process, 0 s ago'
    set_age(path, 70)
    assert leases.holders(tmp_path, expiry=60) == {}
    with leases.claim(tmp_path, 'run', expiry=60) as taken:
        assert taken.path.name == 'run.1'


def test_the_highest_number_counts(tmp_path):
    for number in range(10):
        write_claim(tmp_path, f'run.{number}')
    write_claim(tmp_path, 'run.10', age=HOUR)
    with leases.claim(tmp_path, 'run') as taken:
        assert taken.path.name == 'run.11'
    # Also where somebody deleted files in between.
    write_claim(tmp_path, 'run.20')
    assert leases.claim(tmp_path, 'run') is None


def test_an_old_listing_of_the_directory_does_no_harm(tmp_path, monkeypatch):
    write_claim(tmp_path, 'run.0', age=HOUR)
    unseen = write_claim(tmp_path, 'run.1')
    monkeypatch.setattr(leases, '_highest', lambda directory: {'run': 0})
    assert leases.claim(tmp_path, 'run') is None
    set_age(unseen, HOUR)
    with leases.claim(tmp_path, 'run') as taken:
        assert taken.path.name == 'run.2'


def test_holders_names_who_is_alive_and_when_the_cell_could_become_free(tmp_path):
    assert leases.holders(tmp_path / 'none') == {}
    write_claim(tmp_path, 'a.0', age=HOUR)
    write_claim(tmp_path, 'a.1', age=35)
    write_claim(tmp_path, 'b.0', age=HOUR)
    with leases.claim(tmp_path, 'c') as held:
        found = leases.holders(tmp_path)
        assert list(found) == ['a', 'c']
        assert f'{found["a"]}' == 'process 12 on far, 35 s ago'
        assert found['a'].free_in == pytest.approx(25, abs=1)
        assert str(found['c']).startswith(f'process {os.getpid()} on ')
        assert found['c'].free_in == pytest.approx(leases.EXPIRY, abs=1)
        assert held.path == tmp_path / 'c.0'
    # Nothing but claims is left behind.
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a.0', 'a.1', 'b.0', 'c.0']


@pytest.mark.parametrize('expiry', [0, -1, float('nan'), float('inf')])
def test_an_expiry_that_makes_no_sense_is_refused(tmp_path, expiry):
    with pytest.raises(ConfigError, match=rf'expiry={expiry} must be a positive number') as refusal:
        leases.claim(tmp_path / 'leases', 'run', expiry=expiry)
    assert '\n' not in str(refusal.value)
    assert not (tmp_path / 'leases').exists()


def test_a_directory_that_cannot_be_written_is_refused_in_one_sentence(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(RunDirectoryError, match=r'file/claims cannot be used \(Not a directory'):
        leases.claim(tmp_path / 'file' / 'leases', 'run')
    with pytest.raises(RunDirectoryError, match=r'file cannot hold claims \(Not a directory'):
        leases.holders(tmp_path / 'file')
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o555)
        if user == 0:
            # The superuser may write anywhere; nobody may not.
            os.seteuid(65534)
        try:
            with pytest.raises(RunDirectoryError) as refusal:
                leases.claim(directory, 'run')
        finally:
            os.seteuid(user)
        assert str(refusal.value) == (
            f'workdir={directory} cannot be used (Permission denied); '
            'give a directory that this user can write to.'
        )
