import re

import pytest

from qkattn.data.cache import data_root
from qkattn.errors import ConfigError


def test_data_root_prefers_the_argument_then_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv('QKATTN_DATA', str(tmp_path / 'environment'))
    monkeypatch.setenv('HOME', str(tmp_path))
    assert data_root(tmp_path / 'argument') == tmp_path / 'argument'
    assert data_root() == tmp_path / 'environment'
    monkeypatch.delenv('QKATTN_DATA')
    assert data_root() == tmp_path / '.cache' / 'qkattn'


def test_data_root_refuses_a_bucket():
    with pytest.raises(ConfigError, match=re.escape("data_dir='gs://bucket/x' is a URL")):
        data_root('gs://bucket/x')
