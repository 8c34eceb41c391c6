import json
import math

import numpy as np
import pytest

from qkattn.data.tokenizers.tokenizer import ByteTokenizer
from qkattn.data.tokens import open_dataset
from tests.data.refusals import refused

TEXTS = {'train': [b'aab', b'c'], 'validation': [b'abcd'], 'test': []}


def opened(tmp_path, texts=TEXTS, names=None):
    """A dataset of `texts`; None if they must not be asked for."""
    return open_dataset(
        tmp_path,
        name='letters',
        version='1.2',
        tokenizer=ByteTokenizer(),
        documents=lambda: texts or pytest.fail('texts are read'),
        names=names,
    )


def test_documents_end_with_a_separator(tmp_path):
    dataset = opened(tmp_path)
    train = dataset.split('train')
    assert (train.tobytes(), train.dtype, train.flags.writeable) == (b'aab\0c\0', np.uint8, False)
    assert dataset.split('validation').tobytes() == b'abcd\0'
    assert len(dataset.split('test')) == 0
    info = dataset.info('train')
    assert (info.num_documents, info.num_tokens, info.num_bytes) == (2, 6, 6)
    # Frequencies 2, 1, 1, 2 of 6.
    entropy = 2 * (2 / 6) * math.log(6 / 2) + 2 * (1 / 6) * math.log(6)
    assert info.unigram_nats_per_token == pytest.approx(entropy, rel=1e-12)
    assert dataset.document_ends('train').tolist() == [4, 6]
    assert dataset.document_ends('test').tolist() == []
    assert dataset.document_names('train') == ['0', '1']
    with refused("split='val' .* valid: 'train', 'validation', 'test'"):
        dataset.split('val')


def test_identity_is_json_and_tells_data_apart(tmp_path, warnings):
    identity = opened(tmp_path).identity()
    assert opened(tmp_path, None).identity() == identity and not warnings
    assert json.loads(json.dumps(identity)) == identity
    fingerprints = identity.pop('fingerprints')
    assert identity == {'name': 'letters', 'version': '1.2', 'tokenizer': 'bytes'}
    assert set(fingerprints) == set(TEXTS)
    assert len(set(fingerprints.values())) == 3


def test_documents_of_evaluation_splits_keep_their_names(tmp_path, warnings):
    names = {'train': ['a', 'b'], 'validation': ['c'], 'test': []}
    opened(tmp_path, names=names.__getitem__)
    again = opened(tmp_path, None)
    assert again.info('train').document_names is None and not warnings
    assert again.document_names('validation') == ['c'] and again.document_names('test') == []
    path = tmp_path / 'tokens' / 'letters' / '1.2' / 'bytes' / 'validation.json'
    path.write_text(path.read_text().replace('"c"', '"c", "d"'))
    assert opened(tmp_path, names=names.__getitem__).document_names('validation') == ['c']
    assert warnings == [f"'{path}' is damaged: it names 2 of 1 documents. It is prepared again."]


@pytest.mark.parametrize(
    ('file', 'damaged', 'says'),
    [
        ('train.bin', lambda data: b'b' + data[1:], 'its sha256 is'),
        ('validation.bin', lambda data: data[:-1], 'its sha256 is'),
        ('train.bin', None, 'it cannot be read'),
        ('train.json', None, 'it cannot be read'),
        ('train.json', lambda data: b'{', 'it cannot be read'),
        ('train.json', lambda data: b'[' * 200_000, 'it cannot be read (it is nested too deeply)'),
        ('train.json', lambda data: data.replace(b': 6,', b': "6",'), 'it cannot be read'),
        ('train.json', lambda data: b'[]', 'it cannot be read'),
        ('train.json', lambda data: b'{"version": "1.2"}', 'it cannot be read'),
        ('train.json', lambda data: data.replace(b'"1.2"', b'"1.1"'), "version is '1.1', not '1.2"),
    ],
)
def test_a_damaged_cache_is_named_and_written_again(tmp_path, warnings, file, damaged, says):
    identity = opened(tmp_path).identity()
    path = tmp_path / 'tokens' / 'letters' / '1.2' / 'bytes' / file
    path.write_bytes(damaged(path.read_bytes())) if damaged else path.unlink()
    after = opened(tmp_path)
    assert after.identity() == identity
    assert after.split('train').tobytes() == b'aab\0c\0'
    (warning,) = warnings
    assert warning.startswith(f"'{path}' is damaged: {says}") and '\n' not in warning
    assert warning.endswith('. It is prepared again.')


def test_an_interrupted_write_is_finished_by_the_next(tmp_path, warnings):
    def interrupted():
        yield b'aab'
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opened(tmp_path, TEXTS | {'train': interrupted()})
    assert opened(tmp_path).split('train').tobytes() == b'aab\0c\0'
    assert not list(tmp_path.rglob('*.tmp'))
    assert not warnings
