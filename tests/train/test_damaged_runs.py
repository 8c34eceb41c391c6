"""Damaged files of runs: one sentence that names the file, or no difference."""

import shutil

import pytest

from qkattn.errors import CheckpointError, ConfigError
from qkattn.train import train
from tests import damages
from tests.train.test_resume import outcome

FILES = ('config.json', 'provenance.json', 'lifting.json', 'metrics.jsonl', 'result.json')


@pytest.mark.usefixtures('programs_kept')
@pytest.mark.parametrize('every', damages.SOME)
@pytest.mark.parametrize('name', FILES)
def test_a_run_with_a_damaged_file_refuses_or_ends_as_it_would_have(
    small_run, tmp_path, name, every
):
    config, source = small_run
    sound = (source / name).read_bytes()
    cases = [*damages.whole(sound), *(() if name == 'metrics.jsonl' else damages.fields(sound))]
    for label, content in damages.some(cases, name, every):
        path = shutil.copytree(source, tmp_path / 'run')
        if name != 'result.json':  # the run is resumed at its end
            (path / 'result.json').unlink()
        damages.replace(path / name, content)
        try:
            train(config, path)
        except (ConfigError, CheckpointError) as error:
            assert name in str(error) and '\n' not in str(error)
            left = None if (path / name).is_dir() else (path / name).read_bytes()
            assert left == content
            assert (path / 'result.json').exists() == (name == 'result.json')
        else:
            assert name == 'metrics.jsonl' or label == '0: without crc32', label
            assert outcome(path) == outcome(source)
        shutil.rmtree(path)
