"""Loading never runs code in the files that are loaded, such as a pickle or a module.

Ruff's rules S refuse calls that execute what they read. Tests of damages replace each file of runs,
studies, checkpoints and exported models by `tests.damages.PICKLE`.
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
    """A variant from outside the package is imported from sys.path, not from a run's directory."""
    config = {'hash': 'x', 'config': {'model': {'score': 'evil:Score'}}}
    (tmp_path / 'evil.py').write_text('raise SystemExit')
    (tmp_path / 'config.json').write_text(json.dumps(config))
    with refused('.', (ConfigError, SpecError)):
        exported.load(tmp_path)


def test_loading_the_pickle_of_the_tests_would_be_noticed():
    with pytest.raises(SystemExit):
        pickle.loads(PICKLE)


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
    """Exported parameters may name code. It is imported only if the user names it too.

    `evil_name` is 'evil:Name'. Importing the module `evil` raises SystemExit.
    """
    config = ModelConfig(d_model=16, num_layers=2, num_heads=2, context=8)
    weights = tmp_path / 'weights'
    save_model(weights, config)
    # A JSON file has the settings of the model.
    description_file = weights / exported.ABOUT
    description = json.loads(description_file.read_text())
    del description['crc32']  # the checksum, which would not fit the changes below
    # A score and a value may have options. A pattern has a variant for each layer.
    evil_settings = {
        'score': 'evil:Name(a=1)',
        'value': 'evil:Name(a=1)',
        'pattern': 'qk/vo,evil:Name/vo',
    }
    loading_refusal = (
        'qkattn.json names evil:Name, code that is imported only if you name it too; '
        'if you trust it, give --imports=evil:Name'
    )
    training_refusal = (
        'qkattn.json names evil:Name, code that is imported only if you name it too; '
        "name it in the model's settings too"
    )

    for field, setting in evil_settings.items():
        model = description['model'] | {field: setting}
        evil_description = description | {'model': model}
        description_file.write_text(json.dumps(evil_description))

        # Loading the parameters is refused, and so is training that begins with them.
        with refused(loading_refusal):
            loading.load(weights)
        run_config = tiny(train={'init_from': str(weights)})
        with refused(training_refusal):
            InitialParameters(run_config).load()

        # If the user names the code, it is imported, and raises SystemExit.
        with pytest.raises(SystemExit):
            loading.load(weights, imports=[evil_name])


def test_a_study_is_read_without_importing_what_it_names(evil_name, tmp_path):
    """Reading a study imports none of the code that its files name.

    `evil_name` is 'evil:Name'. Importing the module `evil` raises SystemExit. The study names it as
    corpus, variant, metric and tokenizer, and another name of the module as optimizer.
    """
    optimizer = 'evil:Optimizer'
    records = [
        studies.outside_record('qk/vo', corpus=evil_name),
        studies.outside_record(f'{evil_name}/vo', corpus=evil_name),
    ]
    path = studies.write_study(tmp_path / 'study', records)
    for record in records:
        studies.edit_plan(
            path,
            record['run'],
            train__metrics=[evil_name],
            data__tokenizer=evil_name,
            optimizer__name=optimizer,
        )

    # A report imports nothing. Nor does `check_study`, which finds that the plan was edited.
    report.show_report(path)
    with refused('plan.jsonl is not the hash of its config', ReportError):
        verify.check_study(path)

    # Yardsticks are losses of simple models on the data of the study. Reading these data imports
    # the module, which is refused unless the user gives both names.
    advice = 'code that is .*; if you trust it, give --imports=evil:Name,evil:Optimizer'
    with refused(f'study names evil:Name, evil:Optimizer, {advice}'):
        yardsticks.record(path, [])
    with refused(f'study names evil:Optimizer, {advice}'):
        yardsticks.record(path, [evil_name])
    with pytest.raises(SystemExit):
        yardsticks.record(path, [evil_name, optimizer])
