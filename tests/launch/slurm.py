"""A private Slurm of two nodes on loopback, for one user, without an installation of its own.

The controller and one daemon per node run as this user, without munge, cgroups or accounting.
Nodes are named by their addresses, 127.0.0.1 and so on: JAX takes the name of a job's first node
for the address of the coordinator.
"""

import contextlib
import functools
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from getpass import getuser
from pathlib import Path

from tests.launch.launchers import LAUNCH
from tests.processes import free_port, wait_until

SEARCHED = os.pathsep.join([os.environ.get('PATH', ''), '/usr/sbin', '/sbin'])
NAMES = ('slurmctld', 'slurmd', 'slurmstepd', 'sbatch', 'srun', 'scontrol', 'squeue', 'scancel')
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


@contextlib.contextmanager
def running_cluster(root: Path) -> Iterator['Cluster']:
    """A cluster of two idle nodes. The end of the block kills its jobs and its daemons."""
    cluster = Cluster(root)
    host = socket.gethostname().partition('.')[0]
    (root / 'state').mkdir(parents=True)
    text = CONF.format(root=root, host=host, port=free_port(), user=getuser())
    # Packages that were unpacked and not installed have their plugins beside their programs.
    for plugins in Path(PROGRAMS['slurmctld']).parents[1].glob('lib/*/slurm-wlm'):
        text += f'PluginDir={plugins}\n'
    text += ''.join(NODE.format(node=node, host=host, port=free_port()) for node in NODES)
    (root / 'slurm.conf').write_text(text)
    commands = [('slurmctld', '-D', '-i')]
    for node in NODES:
        (root / f'spool-{node}').mkdir()
        commands.append(('slurmd', '-D', '-d', PROGRAMS['slurmstepd'], '-N', node))
    # A test run that is killed takes its daemons with it.
    die_with_this_process = ['setpriv', '--pdeathsig', 'TERM'] if shutil.which('setpriv') else []
    with open(root / 'daemons.log', 'ab') as log:
        streams = {'stdin': subprocess.DEVNULL, 'stdout': log, 'stderr': log}
        start = functools.partial(subprocess.Popen, env=cluster.environment, **streams)
        daemons = [
            start([*die_with_this_process, PROGRAMS[name], *rest]) for name, *rest in commands
        ]
    idle = ['sinfo', '-h', '-p', 'low', '-t', 'idle', '-o', '%D']
    try:
        wait_until(lambda: cluster.call(*idle, check=False).strip() == '2', 60, cluster.logs)
        yield cluster
    finally:
        jobs = cluster.call('squeue', '-h', '-o', '%A', check=False).split()
        cluster.call('scancel', '--signal=KILL', '--full', *jobs, check=False)
        cluster.call('scancel', *jobs, check=False)
        wait_until(lambda: not cluster.call('squeue', '-h', check=False).strip(), 30, cluster.logs)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


class Cluster:
    """Programs of Slurm that talk to the daemons of a directory."""

    def __init__(self, root: Path):
        self.root = root
        self.environment = {
            **{n: v for n, v in os.environ.items() if not n.startswith(('SLURM', 'SBATCH'))},
            'PATH': SEARCHED,
            'SLURM_CONF': str(root / 'slurm.conf'),
        }
        self.let_go: set[tuple[object, str]] = set()

    def call(self, *command: object, check: bool = True, **keywords: object) -> str:
        """What a program prints."""
        keywords = {'env': self.environment, 'capture_output': True, 'text': True} | keywords
        done = subprocess.run([str(part) for part in command], **keywords)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def wait(self, job: object, condition: Callable[[dict[str, str]], object]) -> dict[str, str]:
        """Waits until the fields of a job meet a condition; returns them.

        The job may be a task of an array, as in '7_1'. Slurm lets a requeued job wait for two
        minutes; here it starts after two seconds, since daemons refuse one that starts in the
        second in which it ended.
        """
        fields: dict[str, str] = {}

        def meets_condition() -> object:
            text = self.call('scontrol', '-o', 'show', 'job', job)
            fields.update(re.findall(r'(\w+)=(.*?)(?= \w+=|$)', text))
            start = (job, fields['Restarts'])
            if fields['Reason'] == 'BeginTime' and start not in self.let_go:
                self.let_go.add(start)
                self.call('scontrol', 'update', f'JobId={job}', 'StartTime=now+2', check=False)
            return condition(fields)

        wait_until(meets_condition, 900, lambda: f'{fields}\n{self.logs()}')
        return fields

    def end(self, job: object) -> tuple[str, str, int]:
        """State, exit code and number of restarts of a job that has come to its end."""
        ended = ('COMPLETED', 'FAILED', 'CANCELLED', 'TIMEOUT', 'NODE_FAIL')
        fields = self.wait(job, lambda f: f['JobState'] in ended)
        return fields['JobState'], fields['ExitCode'], int(fields['Restarts'])

    def logs(self) -> str:
        """The last lines of every daemon's log."""
        texts = {path.name: path.read_text(errors='replace') for path in self.root.glob('*.log')}
        return '\n'.join('\n'.join([n, *text.splitlines()[-15:]]) for n, text in texts.items())


class Jobs:
    """Submits the project's script from a directory of its own, where logs and results lie."""

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

    def log_after(self, job: str, *end: object) -> str:
        """The log of a job which came to this end: state, exit code, restarts."""
        assert self.cluster.end(job) == end, self.log(job)
        return self.log(job)

    def preempt(self, job: str) -> None:
        """Runs a job of the higher partition, which takes all nodes, until `job` is requeued."""
        command = ['sbatch', '--parsable', '-p', 'high', '--exclusive', '--nodes=2']
        command += ['--output=/dev/null', '--wrap=srun sleep 600']
        high = self.cluster.call(*command, cwd=self.directory).strip()
        self.cluster.wait(job, lambda fields: fields['JobState'] == 'PENDING')
        self.cluster.call('scancel', high)
