"""A private Slurm of two nodes on loopback, for one user, without an installation of its own.

The controller and one daemon per node run as this user, without munge, cgroups or accounting.
Nodes are named by their addresses, 127.0.0.1 and so on: JAX takes the name of a job's first node
for the address of the coordinator.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from getpass import getuser
from pathlib import Path
from typing import NamedTuple

from tests.launch.launchers import LAUNCH
from tests.processes import free_port, wait_until

SEARCHED = os.pathsep.join([os.environ.get('PATH', ''), '/usr/sbin', '/sbin'])
NAMES = ('slurmctld', 'slurmd', 'slurmstepd', 'sbatch', 'srun', 'scontrol', 'squeue', 'scancel')
# The path of each program, or None if it is not installed.
PROGRAMS = {name: shutil.which(name, path=SEARCHED) for name in NAMES}
NODES = ('127.0.0.1', '127.0.0.2')

CONF = """\
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
SlurmctldPort={port}
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=2
FirstJobId={port}
KillWait=60
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""
NODE = 'NodeName={node} NodeHostname={host} NodeAddr={node} Port={port} CPUs=2\n'


def slurm_conf(root: Path) -> str:
    """The text of slurm.conf for a cluster of NODES on this machine."""
    host = socket.gethostname().partition('.')[0]
    text = CONF.format(root=root, host=host, port=free_port(), user=getuser())
    # If packages were only unpacked, their plugins are in the same folder as their programs.
    for plugins in Path(PROGRAMS['slurmctld']).parents[1].glob('lib/*/slurm-wlm'):
        text += f'PluginDir={plugins}\n'
    for node in NODES:
        text += NODE.format(node=node, host=host, port=free_port())
    return text


def start_daemons(root: Path, environment: dict[str, str]) -> list[subprocess.Popen]:
    """Starts the controller, and one daemon per node, which log to `root`/daemons.log."""
    # The daemons stay in the foreground (-D). The controller has no state files to read yet (-i).
    commands = [[PROGRAMS['slurmctld'], '-D', '-i']]
    for node in NODES:
        commands.append([PROGRAMS['slurmd'], '-D', '-d', PROGRAMS['slurmstepd'], '-N', node])
    # setpriv ends a daemon when this process ends, even if this process is killed.
    die_with_this_process = ['setpriv', '--pdeathsig', 'TERM'] if shutil.which('setpriv') else []

    daemons = []
    with open(root / 'daemons.log', 'ab') as log:
        for command in commands:
            daemon = subprocess.Popen(
                [*die_with_this_process, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            daemons.append(daemon)
    return daemons


@contextlib.contextmanager
def running_cluster(root: Path) -> Iterator['Cluster']:
    """A cluster of two idle nodes. The end of the block kills its jobs and its daemons."""
    cluster = Cluster(root)
    (root / 'state').mkdir(parents=True)
    for node in NODES:
        (root / f'spool-{node}').mkdir()
    (root / 'slurm.conf').write_text(slurm_conf(root))
    daemons = start_daemons(root, cluster.environment)

    def num_idle_nodes() -> str:
        # '%D' prints the number of nodes, and '-t idle' counts only idle nodes.
        sinfo = ['sinfo', '-h', '-p', 'low', '-t', 'idle', '-o', '%D']
        return cluster.call(*sinfo, check=False).strip()

    def has_no_jobs() -> bool:
        return cluster.call('squeue', '-h', check=False).strip() == ''

    try:
        wait_until(lambda: num_idle_nodes() == '2', 60, cluster.logs)
        yield cluster
    finally:
        # '%A' is the number of a job.
        jobs = cluster.call('squeue', '-h', '-o', '%A', check=False).split()
        cluster.call('scancel', '--signal=KILL', '--full', *jobs, check=False)
        cluster.call('scancel', *jobs, check=False)
        wait_until(has_no_jobs, 30, cluster.logs)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


class JobEnd(NamedTuple):
    state: str
    exit_code: str  # such as '1:0': exit code and signal
    restarts: int


class Cluster:
    """Programs of Slurm that talk to the daemons of a directory."""

    def __init__(self, root: Path):
        self.root = root
        self.environment = dict(os.environ)
        for name in os.environ:
            if name.startswith(('SLURM', 'SBATCH')):
                del self.environment[name]
        self.environment['PATH'] = SEARCHED
        self.environment['SLURM_CONF'] = str(root / 'slurm.conf')
        # (job, restarts) of each start that `wait` has already hastened.
        self._hastened: set[tuple[object, str]] = set()

    def call(self, *command: object, check: bool = True, **keywords: object) -> str:
        """Runs a program and returns its standard output."""
        keywords = {'env': self.environment, 'capture_output': True, 'text': True, **keywords}
        finished = subprocess.run([str(part) for part in command], **keywords)
        if check:
            assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    def fields_of(self, job: object) -> dict[str, str]:
        """The fields of a job, such as {'JobState': 'RUNNING', 'Restarts': '0', ...}."""
        text = self.call('scontrol', '-o', 'show', 'job', job)
        return dict(re.findall(r'(\w+)=(.*?)(?= \w+=|$)', text))

    def wait(self, job: object, condition: Callable[[dict[str, str]], object]) -> dict[str, str]:
        """Waits until the fields of a job, or of a task such as '7_1', meet a condition.

        Slurm lets a requeued job wait for two minutes. This method tells Slurm to start the job
        after two seconds instead. (Daemons refuse a job that starts in the second in which it
        ended.)

        Returns:
            The fields, such as {'JobState': 'RUNNING', 'Restarts': '0', ...}.
        """
        fields: dict[str, str] = {}

        def meets_condition() -> object:
            fields.update(self.fields_of(job))
            # A requeued job waits with the reason 'BeginTime'. Each start is hastened once.
            start = (job, fields['Restarts'])
            if fields['Reason'] == 'BeginTime' and start not in self._hastened:
                self._hastened.add(start)
                self.call('scontrol', 'update', f'JobId={job}', 'StartTime=now+2', check=False)
            return condition(fields)

        wait_until(meets_condition, 900, lambda: f'{fields}\n{self.logs()}')
        return fields

    def end(self, job: object) -> JobEnd:
        """Waits until a job has ended."""
        end_states = ('COMPLETED', 'FAILED', 'CANCELLED', 'TIMEOUT', 'NODE_FAIL')
        fields = self.wait(job, lambda fields: fields['JobState'] in end_states)
        return JobEnd(fields['JobState'], fields['ExitCode'], int(fields['Restarts']))

    def logs(self) -> str:
        """The last lines of every daemon's log."""
        lines = []
        for path in self.root.glob('*.log'):
            text = path.read_text(errors='replace')
            lines += [path.name, *text.splitlines()[-15:]]
        return '\n'.join(lines)


class Jobs:
    """Submits launch/slurm.sbatch from a directory, to which logs and results are written."""

    def __init__(self, cluster: Cluster, directory: Path, venv: Path):
        self.cluster = cluster
        self.directory = directory
        self.environment = cluster.environment | {'QKATTN_VENV': str(venv)}

    def submit(self, *arguments: object) -> str:
        """Runs the launcher, and returns the job's number."""
        command = [LAUNCH / 'slurm.py', *arguments]
        text = self.cluster.call(*command, cwd=self.directory, env=self.environment)
        assert text.startswith('Submitted batch job ')
        return text.split()[-1]

    def log(self, job: str) -> str:
        path = self.directory / f'slurm-{job}.out'
        return path.read_text() if path.exists() else ''

    def log_after(self, job: str, state: str, exit_code: str, restarts: int) -> str:
        """Waits until a job has ended, checks how, and returns its log."""
        assert self.cluster.end(job) == JobEnd(state, exit_code, restarts), self.log(job)
        return self.log(job)

    def preempt(self, job: str) -> None:
        """Lets a job of a higher priority take both nodes until `job` is requeued.

        Jobs in the partition 'high' preempt `job`: Slurm stops it and puts it back into the queue.
        Its state is then 'PENDING'.
        """
        output = self.cluster.call(
            'sbatch',
            '--parsable',
            *('-p', 'high'),
            '--exclusive',
            '--nodes=2',
            '--output=/dev/null',
            '--wrap=srun sleep 600',
            cwd=self.directory,
        )
        preempting_job = output.strip()
        self.cluster.wait(job, lambda fields: fields['JobState'] == 'PENDING')
        self.cluster.call('scancel', preempting_job)
