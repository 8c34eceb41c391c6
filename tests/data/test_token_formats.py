"""Tokens of nanoGPT, llm.c and Megatron-LM, read where they are, and what is refused of them."""

import struct

import numpy as np
import pytest

from qkattn.config import Config, DataConfig, ModelConfig
from qkattn.data.load import load_text
from qkattn.data.pipeline import clusters, train_batch
from qkattn.data.tasks.task_registry import rows_of
from qkattn.data.token_formats.shards import Shard, Shards
from qkattn.data.tokenizers.tokenizer import IdTokenizer
from qkattn.train.loop import train
from tests.data.test_token_files import write_vocabulary
from tests.lanes import slow_except
from tests.refusals import refused

END = 300  # the id that separates documents


def ids_of_documents(seed, num_documents=60, end_last=True):
    """Documents of 5 to 40 ids below END, each with END after it, or before it."""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(num_documents):
        document = rng.integers(1, END, rng.integers(5, 40))
        parts.append(np.append(document, END) if end_last else np.append(END, document))
    return np.concatenate(parts).astype(np.uint16)


def write_nanogpt(path, ids):
    """Writes ids as data/openwebtext/prepare.py of nanoGPT does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.memmap(path, ids.dtype, mode='w+', shape=(len(ids),))
    array[:] = ids
    array.flush()


def write_llm_c(path, ids, magic=20240520, version=1, num_ids=None):
    """Writes ids as dev/data/data_common.py of llm.c does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = np.zeros(256, np.int32)
    header[:3] = (magic, version, len(ids) if num_ids is None else num_ids)
    path.write_bytes(header.tobytes() + ids.tobytes())


def write_megatron(path, documents, code=8, dtype=np.uint16):
    """Writes ids as IndexedDatasetBuilder of Megatron-LM; a document is a list of sequences."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sequences = [np.asarray(ids, dtype) for document in documents for ids in document]
    path.with_suffix('.bin').write_bytes(b''.join(ids.tobytes() for ids in sequences))
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    sizes = lengths.astype(np.int64) * np.dtype(dtype).itemsize
    pointers = np.append(0, np.cumsum(sizes)[:-1])
    bounds = np.cumsum([0, *map(len, documents)])
    index = b'MMIDIDX\x00\x00' + struct.pack('<QBQQ', 1, code, len(lengths), len(bounds))
    index += lengths.tobytes() + pointers.astype(np.int64).tobytes()
    path.with_suffix('.idx').write_bytes(index + bounds.astype(np.int64).tobytes())


@pytest.fixture
def tokens(tmp_path):
    """tokens(**fields): the settings of the tokens in `files`, with other fields."""

    def settings(**fields):
        fields = {'path': str(tmp_path / 'files'), 'data_dir': str(tmp_path / 'cache')} | fields
        return DataConfig(name='tokens', **fields)

    return settings


@pytest.fixture
def files(tmp_path):
    return tmp_path / 'files'


def test_shards_read_as_one_array(tmp_path):
    whole = np.arange(20, dtype=np.uint16)
    shards = Shards([Shard(tmp_path, part) for part in np.split(whole, [7, 8])])
    for start in range(20):
        for end in range(start, 21):
            assert shards[start:end].tolist() == whole[start:end].tolist()
    assert len(shards) == 20
    assert shards[18:25].tolist() == [18, 19]


def test_a_cut_of_shards_keeps_their_documents(tmp_path):
    ends = np.array([3, 6, 10])
    shards = Shards([Shard(tmp_path, np.arange(10), ends), Shard(tmp_path, np.arange(10), ends)])
    before, after = shards.cut([13])
    assert (len(before), len(after)) == (13, 7)
    assert [shard.document_ends.tolist() for shard in before.shards] == [[3, 6, 10], [3]]
    assert [shard.document_ends.tolist() for shard in after.shards] == [[3, 7]]


def test_nanogpt_files_are_the_splits(tokens, files):
    write_nanogpt(files / 'train.bin', ids_of_documents(0))
    write_nanogpt(files / 'val.bin', ids_of_documents(1, 30))
    dataset = load_text(tokens(documents=f'id={END}'))
    assert dataset.splits == ('train', 'validation')
    assert dataset.split('validation')[:].tolist() == ids_of_documents(1, 30).tolist()

    # The end token END divides documents.
    expected_ends = np.flatnonzero(ids_of_documents(1, 30) == END) + 1
    assert dataset.document_ends('validation').tolist() == expected_ends.tolist()
    assert dataset.info('validation').num_documents == 30
    assert (dataset.vocab_size, dataset.tokenizer.separator) == (END + 1, END)
    assert dataset.bytes_per_token('validation') is None

    # Rows are read as from any other dataset.
    rows = rows_of(Config(model=ModelConfig(context=16, vocab_size=301), data=tokens()))
    batch = train_batch(rows, seed=0, step=3, batch_size=4)
    assert (batch['tokens_BT'][:, 1:] == batch['targets_BT'][:, :-1]).all()


def test_shards_of_llm_c_are_one_split_in_order_of_their_names(tokens, files):
    train_ids = ids_of_documents(0, end_last=False)
    write_llm_c(files / 'fineweb_train_000002.bin', train_ids[500:])
    write_llm_c(files / 'fineweb_train_000001.bin', train_ids[:500])
    write_llm_c(files / 'fineweb_val_000000.bin', ids_of_documents(1, 30, end_last=False))
    dataset = load_text(tokens(documents=f'id={END}'))
    assert dataset.split('train')[:].tolist() == train_ids.tolist()
    windows_BT = dataset.windows('train', np.array([490, 0]), 20)
    assert windows_BT.dtype == np.int32
    assert windows_BT.tolist() == [train_ids[490:510].tolist(), train_ids[:20].tolist()]
    # The separator stands before each document.
    starts = np.flatnonzero(ids_of_documents(1, 30, end_last=False) == END)
    assert dataset.document_ends('validation')[:-1].tolist() == starts[1:].tolist()
    assert dataset.info('validation').num_documents == 30


def test_tokens_of_llama_3_are_uint32(tokens, files):
    ids = np.array([70000, 1, 2, 3] * 20, np.uint32)
    write_llm_c(files / 'a_train_0.bin', ids, magic=20240801, version=7)
    write_llm_c(files / 'a_val_0.bin', ids, magic=20240801, version=7)
    dataset = load_text(tokens())
    assert dataset.vocab_size == 70001
    assert dataset.split('train')[:4].tolist() == [70000, 1, 2, 3]


def test_documents_of_megatron_are_those_of_its_index(tokens, files):
    documents = [[[1, 2], [3, 4, END]], [[5, 6]], [], [[7]]]
    write_megatron(files / 'train_text_document', documents * 20)
    write_megatron(files / 'valid_text_document', documents)
    dataset = load_text(tokens())
    assert dataset.split('validation')[:].tolist() == [1, 2, 3, 4, END, 5, 6, 7]
    assert dataset.document_ends('validation').tolist() == [5, 7, 8]
    assert dataset.info('train').num_documents == 60
    # Documents may instead end at an id.
    by_separator = load_text(tokens(documents=f'id={END}'))
    assert by_separator.document_ends('validation').tolist() == [5, 8]
    assert by_separator.identity()['version'] != dataset.identity()['version']


@pytest.mark.parametrize('name', ['all', 'all.bin'])
def test_splits_are_carved_at_ends_of_documents_where_one_file_has_all(tokens, files, name):
    documents = [[np.full(3 + number % 5, number)] for number in range(200)]
    write_megatron(files / 'all', documents)
    dataset = load_text(tokens(path=str(files / name)))
    parts = [dataset.split(split)[:] for split in ('train', 'validation', 'test')]
    whole = np.concatenate([document[0] for document in documents])
    assert np.concatenate(parts).tolist() == whole.tolist()
    # No document is in two splits.
    assert [part[0] - 1 for part in parts[1:]] == [part[-1] for part in parts[:-1]]
    assert dataset.identity()['carved'] == {'validation': 0.1, 'test': 0.1}
    for split in dataset.splits:
        ends = dataset.document_ends(split)
        assert np.diff(ends, prepend=0).sum() == len(dataset.split(split))
    assert dataset.document_ends('test')[0] == 3 + parts[2][0] % 5


def test_a_test_split_is_carved_where_it_is_asked_for(tokens, files):
    write_nanogpt(files / 'train.bin', ids_of_documents(0))
    write_nanogpt(files / 'val.bin', ids_of_documents(1))
    assert load_text(tokens(documents=f'id={END}')).splits == ('train', 'validation')
    dataset = load_text(tokens(documents=f'id={END}', carve_test=True))
    assert dataset.splits == ('train', 'validation', 'test')
    assert dataset.split('train')[:][-1] == END
    assert dataset.split('validation')[:].tolist() == ids_of_documents(1).tolist()


def test_blocks_of_tokens_are_evaluation_clusters_where_no_id_separates_documents(tokens, files):
    write_nanogpt(files / 'train.bin', ids_of_documents(0))
    write_nanogpt(files / 'val.bin', np.arange(1, 101, dtype=np.uint16))
    data = tokens(documents='tokens=40')
    assert load_text(data).document_ends('validation').tolist() == [40, 80, 100]
    assert load_text(tokens()).document_ends('validation').tolist() == [100]
    # A row belongs to the block of 40 in which it begins: 4 rows of 10 to a block.
    rows = rows_of(Config(model=ModelConfig(context=10, vocab_size=301), data=data))
    _, cluster_R = clusters(rows, 'validation')
    assert cluster_R.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def write_words(files):
    """Both splits of three words, with a separator behind the second and the third."""
    ids = np.array([1, 2, 400, 3, 400] * 40, np.uint16)
    write_nanogpt(files / 'train.bin', ids)
    write_nanogpt(files / 'val.bin', ids)
    return ids


def test_a_named_vocabulary_decodes_the_tokens(tokens, files, tmp_path):
    path = write_vocabulary(tmp_path / 'words.json')
    ids = write_words(files)
    dataset = load_text(tokens(tokenizer=str(path)))
    assert dataset.tokenizer.decode([1, 2]) == 'word1 word2'
    assert dataset.info('validation').num_documents == 80
    num_bytes = 40 * len('word1 word2\0word3\0')
    assert dataset.bytes_per_token('validation') == num_bytes / len(ids)


def test_a_vocabulary_that_does_not_fit_the_tokens_is_refused(tokens, files, tmp_path):
    path = write_vocabulary(tmp_path / 'words.json')
    ids = write_words(files)
    ids[7] = 401
    write_nanogpt(files / 'val.bin', ids)
    with refused('val.bin holds id 401 at token 7, but .* has ids from 0 to 400'):
        load_text(tokens(tokenizer=str(path)))
    with refused("data.tokenizer='bpe' is learned from text, which tokens have not"):
        load_text(tokens(tokenizer='bpe'))


def test_counts_of_ids_are_cached_until_a_file_changes(tokens, files, monkeypatch):
    write_nanogpt(files / 'train.bin', ids_of_documents(0))
    write_nanogpt(files / 'val.bin', ids_of_documents(1))
    first = load_text(tokens()).identity()
    with monkeypatch.context() as patch:
        # Counting again would now fail.
        patch.setattr('qkattn.data.token_formats.in_place._count', None)
        assert load_text(tokens()).identity() == first
    write_nanogpt(files / 'val.bin', ids_of_documents(2))
    second = load_text(tokens()).identity()
    assert second['fingerprints']['train'] == first['fingerprints']['train']
    assert second['fingerprints']['validation'] != first['fingerprints']['validation']


KINDS = [('decoder', 301), ('encoder', 302)]


@pytest.mark.parametrize(('kind', 'vocab_size'), slow_except(KINDS[:1], KINDS))
def test_a_model_trains_on_tokens_without_a_vocabulary(
    kind, vocab_size, tiny, tokens, files, tmp_path
):
    for split, seed in (('train', 0), ('val', 1), ('test', 2)):
        write_nanogpt(files / f'{split}.bin', ids_of_documents(seed))
    data = vars(tokens(documents=f'id={END}'))
    config = tiny(model={'kind': kind, 'num_layers': 1, 'vocab_size': vocab_size}, data=data)
    result = train(config, tmp_path / 'run')[0]
    assert result['data']['tokenizer'] == 'ids-301'
    assert np.isfinite(result['test_loss'])


def test_any_id_may_replace_a_masked_token_where_none_separates_documents(tokens, files):
    for name in ('train.bin', 'val.bin'):
        write_nanogpt(files / name, np.arange(4000, dtype=np.uint16) % 4)
    config = Config(model=ModelConfig(kind='encoder', context=100, vocab_size=5), data=tokens())
    batch = train_batch(rows_of(config), seed=0, step=0, batch_size=64)
    is_target_BT = batch['loss_weights_BT'] > 0
    # A masked token is replaced with the id 4, the mask, or a random id.
    is_random_BT = is_target_BT & (batch['tokens_BT'] != batch['targets_BT'])
    assert set(batch['tokens_BT'][is_random_BT]) == {0, 1, 2, 3, 4}


def test_ids_are_written_as_numbers():
    tokenizer = IdTokenizer(301, None)
    assert tokenizer.encode('7 300').tolist() == [7, 300]
    assert tokenizer.decode([7, 300]) == '7 300'
    with pytest.raises(ValueError, match='id 301 is outside of 0 .. 300'):
        tokenizer.encode('301')


IDS = ids_of_documents(0)


@pytest.mark.parametrize(
    ('write', 'fields', 'message'),
    [
        (
            lambda d: write_llm_c(d / 'a_train.bin', IDS, num_ids=9999),
            {},
            'a_train.bin holds .* 9,999',
        ),
        (lambda d: write_llm_c(d / 'a.bin', IDS, version=2), {}, 'has version 2 of .* valid is 1'),
        (
            lambda d: write_llm_c(d / 'a.bin', IDS, magic=7),
            {},
            'whose magic number is 7; those of llm.c',
        ),
        (
            lambda d: write_llm_c(d / 'a.bin', IDS),
            {'token_dtype': 'uint32'},
            "data.token_dtype='uint32' does not fit .*a.bin, whose header states uint16",
        ),
        (
            lambda d: write_nanogpt(d / 'a.bin', IDS.astype(np.uint32)),
            {},
            "every other id of .*a.bin is below 16 in uint16, .* set data.token_dtype to 'uint32'",
        ),
        (
            lambda d: write_nanogpt(d / 'a.bin', np.full(9, 7, np.uint8)),
            {},
            'a.bin has 9 bytes of ids, which is no multiple of the 2 bytes',
        ),
        (
            lambda d: write_nanogpt(d / 'a.bin', IDS),
            {'documents': 'blank_line'},
            "must be 'id=N', the",
        ),
        (
            lambda d: write_nanogpt(d / 'a.bin', IDS),
            {'documents': 'tokens=0'},
            "must be 'id=N', the",
        ),
        (
            lambda d: write_nanogpt(d / 'a.bin', IDS),
            {'lowercase': True},
            'lowercase=True has no effect',
        ),
        (
            lambda d: write_nanogpt(d / 'a.bin', IDS),
            {},
            'a.bin has too few documents for the splits',
        ),
        (
            lambda d: write_nanogpt(d / 'a.bin', np.array([1, 2**21] * 99, np.uint32)),
            {'token_dtype': 'uint32', 'documents': 'tokens=9'},
            'a.bin holds id 2097152 at token 1, but valid are ids from 0 to 1,048,575',
        ),
    ],
)
def test_a_file_that_does_not_fit_is_named(tokens, files, write, fields, message):
    files.mkdir()
    write(files)
    with refused(message):
        load_text(tokens(**fields))


def test_a_file_without_a_token_is_named(tokens, files):
    files.mkdir()
    (files / 'a.bin').touch()
    with refused('a.bin holds no tokens'):
        load_text(tokens())


def test_files_of_several_kinds_are_named(tokens, files):
    write_nanogpt(files / 'train.bin', IDS)
    write_llm_c(files / 'val.bin', IDS)
    with refused('several formats: .*train.bin .headerless., .*val.bin .llm.c.'):
        load_text(tokens())
    write_llm_c(files / 'train.bin', IDS.astype(np.uint32), magic=20240801, version=7)
    with refused('ids of several types: .*train.bin .uint32., .*val.bin .uint16.'):
        load_text(tokens())


@pytest.mark.parametrize(
    ('names', 'message'),
    [
        (['train.bin', 'val.bin', 'other.bin'], 'other.bin names no split, but other files'),
        (['val/train.bin'], 'val/train.bin names the splits train and validation; rename'),
        (['val.bin'], 'has no file of the split train'),
        (['train.bin', 'validation.bin'], 'is named as prepare_data names its files, but no token'),
    ],
)
def test_files_whose_split_is_not_clear_are_named(tokens, files, names, message):
    for name in names:
        write_nanogpt(files / name, IDS)
    with refused(message):
        load_text(tokens())


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (lambda index: b'x' + index[1:], "all.idx begins with b'xMIDIDX"),
        (lambda index: index[:20], 'all.idx ends inside of its header'),
        (lambda index: index[:9] + b'\2' + index[10:], 'all.idx has version 2; valid is 1'),
        (lambda index: index[:17] + b'\7' + index[18:], 'all.idx has ids of type 7; valid are'),
        (lambda index: index[:-1], 'all.idx has .* bytes, not the .* of 60 sequences'),
        (lambda index: index[:34] + b'\1' + index[35:], 'but all.idx states'),
        (lambda index: index[:274] + b'\2' + index[275:], 'has sequences that do not follow'),
        (lambda index: index[:-8] + b'\1' + index[-7:], 'has documents that do not begin'),
    ],
)
def test_a_damaged_index_of_megatron_is_named(tokens, files, damage, message):
    write_megatron(files / 'all', [[[1, 2, 3]]] * 60)
    index = files / 'all.idx'
    index.write_bytes(damage(index.read_bytes()))
    with refused(message):
        load_text(tokens(path=str(files / 'all')))
