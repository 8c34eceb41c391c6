import numpy as np

from qkattn.data import tokens
from qkattn.data.tokenizers.tokenizer import ByteTokenizer
from qkattn.data.tokens import PairDataset, ShardTokens, TokenDataset
from tests.data.datasets import token_dataset
from tests.refusals import refused


def test_windows_go_over_the_ends_of_shards(monkeypatch):
    ids, first_B = np.arange(100, dtype=np.uint16), np.array([0, 6, 9, 10, 83])
    monkeypatch.setattr(tokens, 'BLOCK', 12)
    for arrays in ([ids], [ids[:10], ids[10:15], ids[15:]]):
        split = ShardTokens(arrays)
        windows_BT = split.windows(first_B, 17)
        assert windows_BT.dtype == np.int32 and len(split) == 100
        assert (windows_BT == first_B[:, None] + np.arange(17)).all()
        assert np.array_equal(np.concatenate(list(split.blocks())), ids)
        assert max(map(len, split.blocks())) == 12
        assert np.array_equal(np.asarray(split), ids) and np.asarray(split).dtype == ids.dtype


def test_identity_and_documents_of_datasets_and_pairs(monkeypatch):
    monkeypatch.setattr(tokens, 'BLOCK', 3)
    text = {'train': np.frombuffer(b'aab\0c\0', np.uint8)}
    source, target = (token_dataset(name, ByteTokenizer(), text) for name in 'ab')
    assert source.document_ends('train').tolist() == [4, 6]
    assert source.document_names('train') == ['0', '1'] and source.bytes_per_token('train') == 2
    with refused("split='val' is not in dataset 'a'; valid: 'train'"):
        source.split('val')
    infos = {'train': source.info('train'), 'test': target.info('train')}
    carved = TokenDataset('a', '1', ByteTokenizer(), infos, {}, {'test': 0.1}).identity()
    fingerprints = carved.pop('fingerprints')
    assert list(fingerprints.items()) == [('test', 'btrain'), ('train', 'atrain')]
    assert carved == {'name': 'a', 'version': '1', 'tokenizer': 'bytes', 'carved': {'test': 0.1}}
    assert 'carved' not in source.identity()
    pairs = PairDataset(source, target)
    assert pairs.identity() == {'source': source.identity(), 'target': target.identity()}
    assert [ids.tobytes() for ids in pairs.sentences('train')[0]] == [b'aab', b'c']
