import math

import numpy as np
import pytest

from qkattn.data.tokenizers.tokenizer import ByteTokenizer
from qkattn.data.tokens import PairDataset, TokenDataset, entropy
from tests.data.datasets import token_dataset
from tests.data.refusals import refused

TEXT = np.frombuffer(b'aab\0c\0d', np.uint8)


def test_what_an_info_leaves_out_is_counted(monkeypatch):
    dataset = token_dataset('letters', ByteTokenizer(), {'train': TEXT, 'test': TEXT[:0]})
    assert dataset.unigram_nats('train') == math.log(7) and dataset.bytes_per_token('train') == 2
    for field in ('num_bytes', 'unigram_nats_per_token'):
        object.__setattr__(dataset.info('train'), field, None)
    monkeypatch.setattr('qkattn.data.shard_files.BLOCK', 3)
    # Frequencies 2, 1, 2, 1, 1 of 7.
    nats = 4 / 7 * math.log(7 / 2) + 3 / 7 * math.log(7)
    assert dataset.unigram_nats('train') == pytest.approx(nats, rel=1e-12)
    assert dataset.bytes_per_token('train') == 1
    # A document without a separator ends with the split.
    assert dataset.document_ends('train').tolist() == [4, 6, 7]
    assert dataset.document_ends('test').tolist() == [] and entropy(np.zeros(3)) == 0
    assert dataset.document_names('train') == ['0', '1', '2']
    with refused("split='val' is not in dataset 'letters'; valid: 'train', 'test'"):
        dataset.split('val')


def test_an_id_that_is_not_in_the_vocabulary_is_refused():
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = 100
    dataset = token_dataset('letters', tokenizer, {'train': TEXT})
    assert dataset.windows('train', np.array([0, 2]), 2).tolist() == [[97, 97], [98, 0]]
    with refused("split 'train' of letters holds the id 100, but its tokenizer bytes has 100; set"):
        dataset.windows('train', np.array([0, 5]), 2)


def test_identity_tells_data_apart():
    def identity(name='a', version='1', split='train', carved=None):
        dataset = token_dataset(name, ByteTokenizer(), {split: TEXT, 'test': TEXT})
        infos = {split: dataset.info(split) for split in dataset.splits}
        return TokenDataset(name, version, ByteTokenizer(), dataset.files, infos, carved).identity()

    assert identity(carved={'test': 0.1}) == {
        'name': 'a',
        'version': '1',
        'tokenizer': 'bytes',
        'fingerprints': {'test': 'atest', 'train': 'atrain'},
        'carved': {'test': 0.1},
    }
    assert list(identity()['fingerprints']) == ['test', 'train'] and 'carved' not in identity()
    source, target = (token_dataset(n, ByteTokenizer(), {'train': TEXT[:6]}) for n in 'ab')
    pairs = PairDataset(source, target)
    assert pairs.identity() == {'source': source.identity(), 'target': target.identity()}
    assert [ids.tobytes() for ids in pairs.sentences('train')[0]] == [b'aab', b'c']
