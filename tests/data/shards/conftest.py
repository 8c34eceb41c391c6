import pytest

from qkattn.config import DataConfig
from tests.data.shards.examples import write_texts


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    """A folder of texts as a dataset."""
    root = tmp_path_factory.mktemp('text')
    return DataConfig(
        name='text', path=str(write_texts(root / 'files')), data_dir=str(root / 'cache')
    )
