"""A private Slurm of several nodes on loopback, for one user, without an installation of its own.

The controller and one daemon per node run as this user, without munge, cgroups or accounting.
Nodes are named by their addresses, 127.0.0.1 and so on: JAX takes the name of a job's first node
for the address of the coordinator.
"""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from getpass import getuser
from pathlib import Path

from tests.jobs.jobs import free_port
from tests.launch.launchers import LAUNCH, until

PROGRAMS = ('slurmctld', 'slurmd', 'slurmstepd', 'sbatch', 'srun', 'scontrol', 'squeue', 'scancel')
NODES = 2
SEARCHED = os.pathsep.join([os.environ.get('PATH', ''), '/usr/sbin', '/sbin'])

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
NODE = 'NodeName=127.0.0.{n} NodeHostname={host} NodeAddr=127.0.0.{n} Port={port} CPUs=2\n'


def missing() -> list[str]:
    """The programs of Slurm that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]


class Cluster:
    """A started cluster of nodes with 2 CPUs; a context that stops it with all that runs on it."""

    def __init__(self, root: Path):
        self.root = root
        self.environment = {
            **{n: v for n, v in os.environ.items() if not n.startswith(('SLURM', 'SBATCH'))},
            'PATH': SEARCHED,
            'SLURM_CONF': str(root / 'slurm.conf'),
        }
        self.daemons: list[subprocess.Popen] = []
        self.let_go: set[tuple[object, str]] = set()

    def __enter__(self) -> 'Cluster':
        root, host = self.root, socket.gethostname().partition('.')[0]
        (root / 'state').mkdir(parents=True)
        port, *ports = (free_port() for _ in range(1 + NODES))
        text = CONF.format(root=root, host=host, port=port, user=getuser())
        controller = Path(str(shutil.which('slurmctld', path=SEARCHED)))
        # Packages that were unpacked and not installed have their plugins beside their programs.
        for plugins in controller.parents[1].glob('lib/*/slurm-wlm'):
            text += f'PluginDir={plugins}\n'
        for n, of_node in enumerate(ports, 1):
            text += NODE.format(n=n, host=host, port=of_node)
        (root / 'slurm.conf').write_text(text)
        self._start('slurmctld', '-D', '-i')
        stepd = str(shutil.which('slurmstepd', path=SEARCHED))
        for n in range(1, 1 + NODES):
            (root / f'spool-127.0.0.{n}').mkdir()
            self._start('slurmd', '-D', '-d', stepd, '-N', f'127.0.0.{n}')
        idle = ['sinfo', '-h', '-p', 'low', '-t', 'idle', '-o', '%D']
        try:
            until(lambda: self.call(*idle, check=False).strip() == str(NODES), 60, self.logs)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, program: str, *arguments: str) -> None:
        # A test run that is killed takes its daemons with it.
        tied = ['setpriv', '--pdeathsig', 'TERM'] if shutil.which('setpriv') else []
        with open(self.root / 'daemons.out', 'ab') as out:
            command = [*tied, str(shutil.which(program, path=SEARCHED)), *arguments]
            streams = {'stdin': subprocess.DEVNULL, 'stdout': out, 'stderr': out}
            self.daemons.append(subprocess.Popen(command, env=self.environment, **streams))

    def __exit__(self, *exc_info: object) -> None:
        jobs = self.call('squeue', '-h', '-o', '%A', check=False).split()
        if jobs:
            self.call('scancel', '--signal=KILL', '--full', *jobs, check=False)
            self.call('scancel', *jobs, check=False)
            until(lambda: not self.call('squeue', '-h', check=False).strip(), 30, self.logs)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait()

    def call(self, *command: object, check: bool = True, **keywords: object) -> str:
        """What a program prints, with this cluster as the one that Slurm's programs talk to."""
        done = subprocess.run(
            [str(part) for part in command],
            **{'env': self.environment, 'capture_output': True, 'text': True} | keywords,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def job(self, job: object) -> dict[str, str]:
        """The fields of a job, or of a task of an array as in '7_1'."""
        text = self.call('scontrol', '-o', 'show', 'job', job)
        return dict(re.findall(r'(\w+)=(.*?)(?= \w+=|$)', text))

    def wait(self, job: object, condition: Callable[[dict[str, str]], object]) -> dict[str, str]:
        """The fields of a job once they satisfy a condition.

        A requeued job would wait two minutes before it may start; here it starts after two seconds:
        daemons refuse one that starts in the second in which it was ended.
        """

        def met() -> object:
            fields = self.job(job)
            start = (job, fields['Restarts'])
            if fields['Reason'] == 'BeginTime' and start not in self.let_go:
                self.let_go.add(start)
                self.call('scontrol', 'update', f'JobId={job}', 'StartTime=now+2', check=False)
            return condition(fields)

        until(met, 900, lambda: f'{self.job(job)}\n{self.logs()}')
        return self.job(job)

    def end(self, job: object) -> tuple[str, str, int]:
        """State, exit code and number of restarts of a job that has come to its end."""
        ended = ('COMPLETED', 'FAILED', 'CANCELLED', 'TIMEOUT', 'NODE_FAIL')
        fields = self.wait(job, lambda f: f['JobState'] in ended)
        return fields['JobState'], fields['ExitCode'], int(fields['Restarts'])

    def logs(self) -> str:
        """The last lines of every daemon's log."""
        files = sorted([*self.root.glob('*.log'), self.root / 'daemons.out'])
        texts = {p.name: p.read_text(errors='replace') for p in files if p.exists()}
        return '\n'.join('\n'.join([n, *text.splitlines()[-15:]]) for n, text in texts.items())


class Jobs:
    """Submits the project's script from a directory of its own, where logs and results lie."""

    def __init__(self, cluster: Cluster, directory: Path, venv: Path):
        self.cluster, self.directory = cluster, directory
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

    def preempt(self, job: str) -> None:
        """Runs a job of the higher partition, which takes all nodes, until `job` is requeued."""
        command = ['sbatch', '--parsable', '-p', 'high', '--exclusive', '--nodes=2']
        command += ['--output=/dev/null', '--wrap=srun sleep 600']
        high = self.cluster.call(*command, cwd=self.directory).strip()
        self.cluster.wait(job, lambda fields: fields['JobState'] == 'PENDING')
        self.cluster.call('scancel', high)
