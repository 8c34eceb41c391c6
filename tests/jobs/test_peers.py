"""Stop requests, failures, deaths and hangs in real jobs of two processes."""

import re
import signal

import pytest

from qkattn.jobs.signals import EXIT_CONFIG, EXIT_REQUEUE
from tests.lanes import slow_except
from tests.processes import start_job, wait_for_results

# The main function of a script: `stage` is where the processes are when something happens.
JOB = """
    import hashlib, os, sys, time
    import jax, numpy as np
    from jax.experimental import multihost_utils
    from qkattn.jobs import agreement, bootstrap
    from qkattn.errors import ConfigError, Stopped
    from qkattn.jobs import cli, signals

    stage, failure = sys.argv[1:]
    bootstrap.HEARTBEAT = 8

    def native():
        hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)

    def fail():
        if failure == 'raise':
            raise ValueError('of one')
        if failure == 'config':
            raise ConfigError('a file of one host')
        if failure == 'exit':
            os._exit(0)
        native()

    @signals.exit_on_signal()
    @bootstrap.in_job
    def main():
        rank = bootstrap.start().process_id
        print('ready', flush=True, file=sys.__stdout__)
        if stage == 'compiling':
            fail() if rank else native()
        with signals.StopRequest() as stop:
            if stage == 'arriving' and rank:
                native()
            stop.defer_exit()
            print('holding', flush=True, file=sys.__stdout__)
            print('a result')
            if stage == 'collective' and rank:
                fail()
            if stage == 'collective':
                multihost_utils.process_allgather(np.arange(3))
            if stage == 'agreement':
                fail() if rank else agreement.barrier('there')
            for step in range(2, 10**6, 2):
                time.sleep(0.01 * (rank + 1))
                if stop.should_stop(step):
                    agreement.barrier('saving')
                    time.sleep(1)
                    raise Stopped(f'stopped at step {step}')
                if step % 100 == 0:
                    agreement.barrier('in step')

    sys.argv[1:] = []
    cli.run(main)
"""


def start_job_until(line, stage, failure='none'):
    """Starts two processes of a job and returns them once each has printed this line."""
    processes = start_job(JOB, 2, stage, failure, PYTHONUNBUFFERED='')
    for process in processes:
        assert f'{line}\n' in process.stdout, process.stderr.read()
    return processes


STOPS = [([1], signal.SIGTERM), ([0], signal.SIGINT), ([0, 1, 1], signal.SIGTERM)]


@pytest.mark.parametrize(('to', 'number'), slow_except(STOPS[:1], STOPS))
def test_a_signal_to_any_process_stops_all_at_the_same_step(to, number):
    # Process 1 is slower: its steps last 0.02 s, those of process 0 0.01 s.
    processes = start_job_until('holding', 'loop')
    for rank in to:
        processes[rank].send_signal(number)
    results = wait_for_results(processes)
    assert [code for code, _, _ in results] == [EXIT_REQUEUE] * 2, results
    errors = ''.join(error for _, _, error in results)
    assert len(set(re.findall(r'stopped at step (\d+)', errors))) == 1, results
    assert [out for _, out, _ in results] == ['a result\n', '']  # process 0 alone prints results


@pytest.mark.slow
def test_a_process_that_exits_while_it_looks_at_the_others_exits_with_0():
    # Each process looks at the others all the time.
    source = """
        import time
        from qkattn.jobs import bootstrap, peers
        peers._INTERVAL = 0.0
        bootstrap.start()
        time.sleep(0.2)
    """
    assert wait_for_results(start_job(source, 2)) == [(0, '', '')] * 2


@pytest.mark.slow
@pytest.mark.parametrize('stage', ['compiling', 'arriving'])
@pytest.mark.parametrize('to', [[0], [1], [0, 1]])
def test_a_stop_before_the_first_step_ends_all_processes_at_once(stage, to):
    processes = start_job_until('ready', stage)
    for rank in to:
        processes[rank].send_signal(signal.SIGTERM)
    results = wait_for_results(processes)
    assert [code for code, _, _ in results] == [EXIT_REQUEUE] * 2, results
    assert all('nothing to save' in error for _, _, error in results)


@pytest.mark.slow
@pytest.mark.parametrize('stage', ['compiling', 'collective', 'agreement'])
@pytest.mark.parametrize(
    ('failure', 'code', 'words'),
    [
        ('raise', 1, 'process 1 has ended with code 1: ValueError: of one'),
        ('config', EXIT_CONFIG, 'process 1 has ended with code 2: a file of one host'),
        ('exit', 1, 'heartbeats): 1'),  # jax names it
        (signal.SIGKILL, 1, 'heartbeats): 1'),
        (signal.SIGSTOP, 1, 'heartbeats): 1'),
    ],
)
def test_process_0_ends_and_says_why_where_process_1_fails(stage, failure, code, words):
    line = 'ready' if stage == 'compiling' else 'holding'
    processes = start_job_until(line, stage, getattr(failure, 'name', failure))
    if not isinstance(failure, str):
        processes[1].send_signal(failure)
    ((exit_code, _, error),) = wait_for_results(processes[:1], timeout=60)
    processes[1].kill()
    assert (exit_code, words in ' '.join(error.split())) == (code, True), error


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGSTOP])
def test_process_1_ends_where_the_coordinator_dies_or_hangs(number):
    processes = start_job_until('ready', 'compiling')
    processes[0].send_signal(number)
    ((exit_code, _, error),) = wait_for_results(processes[1:], timeout=60)
    processes[0].kill()
    assert (exit_code, 'another one died or hangs' in error) == (1, True), error
