"""Whatever is loaded is data: neither a pickle nor a module in the place of any file is run.

Ruff's rules S refuse calls that execute what they read. `tests.damages.PICKLE` stands in the place
of every file of runs, studies, checkpoints and exported models in their tests of damages.
"""

import json
import pickle
import sys
from types import SimpleNamespace

import pytest

from qkattn.convert.published import load_nanogpt
from qkattn.errors import ConfigError, SpecError
from qkattn.train import exported
from tests.damages import PICKLE
from tests.refusals import refused


def test_no_module_beside_a_run_is_executed(tmp_path):
    """Variants from outside the package come from the path of the interpreter alone."""
    with pytest.raises(SystemExit):  # it would be noticed
        pickle.loads(PICKLE)
    config = {'hash': 'x', 'config': {'model': {'score': 'evil:Score'}}}
    (tmp_path / 'evil.py').write_text('raise SystemExit')
    (tmp_path / 'config.json').write_text(json.dumps(config))
    with refused('.', (ConfigError, SpecError)):
        exported.load(tmp_path)


def test_no_published_weights_are_executed(tmp_path, monkeypatch):
    def torch_load(file, map_location, weights_only):
        assert weights_only is True
        raise pickle.UnpicklingError('Weights only load failed')

    monkeypatch.setitem(sys.modules, 'torch', SimpleNamespace(load=torch_load))
    (tmp_path / 'ckpt.pt').write_bytes(PICKLE)
    with refused('cannot be read as a torch checkpoint: Weights only'):
        load_nanogpt(tmp_path / 'ckpt.pt')
