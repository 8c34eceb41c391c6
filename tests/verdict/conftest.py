"""A directory for a synthetic study."""

from pathlib import Path

import pytest


@pytest.fixture
def study_dir(tmp_path: Path) -> Path:
    return tmp_path / 'study'
