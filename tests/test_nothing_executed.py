"""Whatever is loaded is data: neither a pickle nor a module in the place of any file is run.

Ruff's rules S refuse calls that execute what they read. `tests.damages.PICKLE` stands in the place
of every file of runs, studies, checkpoints and exported models in their tests of damages.
"""

import json
import pickle
import sys
from types import SimpleNamespace

import pytest

from qkattn import report
from qkattn.config import ModelConfig
from qkattn.convert import loading
from qkattn.convert.published import load_nanogpt
from qkattn.errors import ConfigError, ReportError, SpecError
from qkattn.report import verify
from qkattn.study import yardsticks
from qkattn.train import exported
from qkattn.train.initial_parameters import InitialParameters
from tests import studies
from tests.damages import PICKLE
from tests.experiments.conftest import save_model
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


def test_torch_checkpoints_are_loaded_as_weights_alone(tmp_path, monkeypatch):
    def torch_load(file, map_location, weights_only):
        assert weights_only is True
        raise pickle.UnpicklingError('Weights only load failed')

    monkeypatch.setitem(sys.modules, 'torch', SimpleNamespace(load=torch_load))
    (tmp_path / 'ckpt.pt').write_bytes(PICKLE)
    with refused('cannot be read as a torch checkpoint: Weights only'):
        load_nanogpt(tmp_path / 'ckpt.pt')


@pytest.fixture
def evil_name(tmp_path, monkeypatch):
    """The name of a class in a module that raises SystemExit when it is imported."""
    (tmp_path / 'evil.py').write_text('raise SystemExit')
    monkeypatch.syspath_prepend(tmp_path)
    return 'evil:Name'


def test_exported_parameters_import_only_what_the_user_names(tiny, evil_name, tmp_path):
    config = ModelConfig(d_model=16, num_layers=2, num_heads=2, context=8)
    save_model(tmp_path / 'w', config)
    # The exported description, without the checksum, which would notice the change.
    about = json.loads((tmp_path / 'w' / exported.ABOUT).read_text())
    del about['crc32']
    for field in ('score', 'value', 'pattern'):
        named = f'qk/vo,{evil_name}/vo' if field == 'pattern' else f'{evil_name}(a=1)'
        model = about['model'] | {field: named}
        (tmp_path / 'w' / exported.ABOUT).write_text(json.dumps(about | {'model': model}))
        says = 'qkattn.json names evil:Name, code that is imported only if you name it too; '

        # Loading and training refuse; a user who names the code runs it (it exits).
        with refused(f'{says}if you trust it, give --imports=evil:Name'):
            loading.load(tmp_path / 'w')
        with refused(f"{says}name it in the model's settings too"):
            InitialParameters(tiny(train={'init_from': str(tmp_path / 'w')})).load()
        with pytest.raises(SystemExit):
            loading.load(tmp_path / 'w', imports=[evil_name])


def test_a_study_is_read_without_importing_what_it_names(evil_name, tmp_path):
    """Metrics from outside are read as data, and yardsticks open only data that the user names."""
    records = [
        studies.outside_record(variant, corpus=evil_name)
        for variant in ('qk/vo', f'{evil_name}/vo')
    ]
    path = studies.write_study(tmp_path / 'study', records)
    outside = {
        'train__metrics': [evil_name],
        'data__tokenizer': evil_name,
        'optimizer__name': evil_name,
    }
    for record in records:
        studies.edit_plan(path, record['run'], **outside)
    report.show_report(path)
    with refused('plan.jsonl is not the hash of its config', ReportError):  # which was edited
        verify.check_study(path)
    with refused(
        'plan.jsonl names evil:Name, code that is .*; if you trust it, give --imports=evil'
    ):
        yardsticks.record(path, [])
    with pytest.raises(SystemExit):
        yardsticks.record(path, [evil_name])
