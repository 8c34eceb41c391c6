"""How long training waits for its checkpoints, in a real run."""

from qkattn.benchmark import commands
from qkattn.benchmark.session import Session
from qkattn.benchmark.targets import TRAINING


def run(session: Session) -> None:
    parts = {'checkpoint stall': 'checkpoint_seconds'}
    commands.record(
        session,
        'real loop, seconds per step',
        lambda: commands.loop_rows(session.scale.name, parts),
        TRAINING,
    )
