"""A run that somebody else has taken over is let go."""

import pytest

from qkattn.errors import Lost
from qkattn.run.records import read_metrics
from qkattn.train import train


def test_a_lost_run_saves_nothing_more_and_can_be_gone_on_with(tiny, tmp_path):
    asked = []

    def lost():
        asked.append(None)
        return len(asked) == 7  # dispatches of one step; checkpoints are every four

    with pytest.raises(Lost, match='taken over at step 7'):
        train(tiny(), tmp_path / 'run', lost=lost)
    assert not (tmp_path / 'run/result.json').exists()
    assert sorted(p.name for p in (tmp_path / 'run/checkpoints').iterdir()) == ['4']

    again = train(tiny(), tmp_path / 'run')
    whole = train(tiny(), tmp_path / 'whole')
    assert [r['val_loss'] for r in again] == [r['val_loss'] for r in whole]
    steps = [r['step'] for r in read_metrics(tmp_path / 'run/metrics.jsonl')]
    assert steps == sorted(steps) and steps.count(5) == 1
