import numpy as np
import pytest

from qkattn.config import DataConfig
from qkattn.data.documents import check_documents, clusters
from qkattn.data.tasks.language import LanguageRows, MaskedRows
from qkattn.data.tasks.probe_tasks import CausalProbeRows, find
from qkattn.data.tokenizers.tokenizer import ByteTokenizer
from tests.data.datasets import token_dataset
from tests.data.refusals import refused


@pytest.fixture
def letters():
    """Documents of 9, 3 and 8 tokens, their separators included."""
    text = np.frombuffer(b'aaaaaaaa\0bb\0ccccccc\0', np.uint8)
    return token_dataset('letters', ByteTokenizer(), {'train': text, 'validation': text})


@pytest.mark.parametrize('task', [LanguageRows, MaskedRows])
def test_a_row_belongs_to_the_document_of_its_middle(letters, task):
    rows = task(letters, 4)
    names, document_R = rows.documents('validation')
    assert names == ['0', '1', '2']
    # Rows aaaa aaaa 0bb0 cccc, and of masked tokens one more, ccc0.
    assert document_R.tolist() == [0, 0, 1, 2, 2][: rows.count('validation')]
    _, chosen_R = clusters(rows, 'validation', 2)
    assert chosen_R.tolist() == [0, 1]


def test_rows_without_documents_are_dealt_out():
    rows = CausalProbeRows(*find('recall(pairs=2)'))
    names, cluster_R = clusters(rows, 'test', 200)
    assert names == [str(number) for number in range(128)]
    assert cluster_R.tolist() == [*range(128), *range(72)]
    names, cluster_R = clusters(rows, 'test', 5)
    assert names == ['0', '1', '2', '3', '4'] and cluster_R.tolist() == [0, 1, 2, 3, 4]
    check_documents(rows, DataConfig(), 1000)


def test_too_few_documents_are_one_sentence(letters, stdlib):
    rows = LanguageRows(letters, 4)
    letters_data = DataConfig(name='letters')
    with refused("data.name='letters' has no test split, .*; set data.carve_test=True to carve"):
        check_documents(rows, letters_data, 3)
    says = (
        "split 'validation' of data.name='letters' has 3 documents, .* at least 4; choose a corpus"
    )
    with refused(says):
        check_documents(rows, letters_data, 4)
    one = token_dataset('one', ByteTokenizer(), dict.fromkeys(('train', 'test'), np.ones(9, 'u1')))
    with refused("split 'test' of data.name='text', data.path='a.txt', has 1 document, "):
        check_documents(LanguageRows(one, 4), DataConfig(name='text', path='a.txt'), 2)
    check_documents(LanguageRows(stdlib, 128), DataConfig())
    with refused('data.eval_sequences=64 evaluates 46 of 111 documents .* at least 100; raise it'):
        check_documents(LanguageRows(stdlib, 128), DataConfig(eval_sequences=64))
