"""Token files of nanoGPT, llm.c and Megatron-LM: how they are read, and which are refused."""

import struct
from pathlib import Path

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
from tests.refusals import refused

END = 300  # the id that separates documents


def ids_of_documents(seed, num_documents=60, end_last=True):
    """The random ids of documents, as one array.

    A document has 5 to 39 ids from 1 to 299. END follows each document. With end_last=False, END
    precedes each document.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(num_documents):
        length = rng.integers(5, 40)
        document = rng.integers(1, END, length)
        if end_last:
            parts.append(np.append(document, END))
        else:
            parts.append(np.append(END, document))
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
    header[0] = magic
    header[1] = version
    header[2] = len(ids) if num_ids is None else num_ids
    path.write_bytes(header.tobytes() + ids.tobytes())


def write_megatron(path, documents, code=8, dtype=np.uint16):
    """Writes documents in the format of Megatron-LM, as its IndexedDatasetBuilder does.

    The ids are in PATH.bin. The index in PATH.idx says where sequences and documents begin.

    Args:
        path: The path of both files, without suffix.
        documents: Each is a list of sequences, which are lists of ids.
        code: Megatron's number of the dtype. 8 is uint16.
        dtype: The dtype of an id.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sequences = [np.asarray(ids, dtype) for document in documents for ids in document]
    path.with_suffix('.bin').write_bytes(b''.join(ids.tobytes() for ids in sequences))

    # The length of each sequence, its first byte in PATH.bin, and the first sequence of each
    # document.
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    sizes = lengths.astype(np.int64) * np.dtype(dtype).itemsize
    first_bytes = np.append(0, np.cumsum(sizes)[:-1]).astype(np.int64)
    sequences_per_document = [len(document) for document in documents]
    document_bounds = np.cumsum([0, *sequences_per_document]).astype(np.int64)

    version = 1
    header = struct.pack('<QBQQ', version, code, len(lengths), len(document_bounds))
    index = b'MMIDIDX\x00\x00' + header
    index += lengths.tobytes() + first_bytes.tobytes() + document_bounds.tobytes()
    path.with_suffix('.idx').write_bytes(index)


@pytest.fixture
def config_of_tokens(tmp_path):
    """config_of_tokens(**fields): settings that read the tokens in `directory`."""

    def settings(**fields):
        defaults = {'path': str(tmp_path / 'files'), 'data_dir': str(tmp_path / 'cache')}
        return DataConfig(name='tokens', **(defaults | fields))

    return settings


@pytest.fixture
def directory(tmp_path):
    """The directory that `config_of_tokens` reads."""
    return tmp_path / 'files'


def test_shards_read_as_one_array(tmp_path):
    """Shards are the files of a split. They are sliced as if they were one array."""
    whole = np.arange(20, dtype=np.uint16)
    # Shards of 7, 1 and 12 ids.
    shards = Shards([Shard(tmp_path, part) for part in np.split(whole, [7, 8])])

    assert len(shards) == 20
    for start in range(20):
        for end in range(start, 21):
            assert shards[start:end].tolist() == whole[start:end].tolist()

    # As in an array, a slice may end after the last id.
    assert shards[18:25].tolist() == [18, 19]


def test_a_cut_of_shards_keeps_their_documents(tmp_path):
    # Each shard has 10 ids. Its three documents end before the positions 3, 6 and 10.
    ids = np.arange(10)
    document_ends = np.array([3, 6, 10])
    first_shard = Shard(tmp_path, ids, document_ends)
    second_shard = Shard(tmp_path, ids, document_ends)
    shards = Shards([first_shard, second_shard])

    # The cut is after the first document of the second shard.
    cut_position = len(ids) + 3
    before, after = shards.cut([cut_position])

    # Before the cut are the whole first shard and one document of the second shard.
    assert len(before) == 13
    ends_before_cut = [shard.document_ends.tolist() for shard in before.shards]
    assert ends_before_cut == [[3, 6, 10], [3]]

    # After the cut are the other two documents. Their ends are counted from the cut.
    assert len(after) == 7
    ends_after_cut = [shard.document_ends.tolist() for shard in after.shards]
    assert ends_after_cut == [[6 - 3, 10 - 3]]


@pytest.fixture
def nanogpt_files(directory):
    """Files of nanoGPT: 60 documents in train.bin and 30 in val.bin. END follows each document."""
    write_nanogpt(directory / 'train.bin', ids_of_documents(seed=0))
    write_nanogpt(directory / 'val.bin', ids_of_documents(seed=1, num_documents=30))


def test_nanogpt_files_are_the_splits(config_of_tokens, nanogpt_files):
    dataset = load_text(config_of_tokens(documents=f'id={END}'))
    assert dataset.splits == ('train', 'validation')
    validation_ids = ids_of_documents(seed=1, num_documents=30)
    assert dataset.split('validation')[:].tolist() == validation_ids.tolist()
    assert dataset.vocab_size == END + 1
    # No text is known.
    assert dataset.bytes_per_token('validation') is None


def test_an_id_divides_nanogpt_files_into_documents(config_of_tokens, nanogpt_files):
    dataset = load_text(config_of_tokens(documents=f'id={END}'))

    validation_ids = ids_of_documents(seed=1, num_documents=30)
    expected_ends = np.flatnonzero(validation_ids == END) + 1
    assert dataset.document_ends('validation').tolist() == expected_ends.tolist()
    assert dataset.info('validation').num_documents == 30
    assert dataset.tokenizer.separator == END
    assert dataset.vocab_size == END + 1


def test_rows_of_nanogpt_files_are_read_as_from_other_datasets(config_of_tokens, nanogpt_files):
    model = ModelConfig(context=16, vocab_size=END + 1)
    rows = rows_of(Config(model=model, data=config_of_tokens()))
    batch = train_batch(rows, seed=0, step=3, batch_size=4)
    assert np.array_equal(batch['tokens_BT'][:, 1:], batch['targets_BT'][:, :-1])


def test_shards_of_llm_c_are_one_split_in_order_of_their_names(config_of_tokens, directory):
    """llm.c writes a split as several numbered files, here two of train."""
    train_ids = ids_of_documents(seed=0, end_last=False)
    write_llm_c(directory / 'fineweb_train_000002.bin', train_ids[500:])
    write_llm_c(directory / 'fineweb_train_000001.bin', train_ids[:500])
    write_llm_c(directory / 'fineweb_val_000000.bin', train_ids)

    dataset = load_text(config_of_tokens(documents=f'id={END}'))

    assert dataset.split('train')[:].tolist() == train_ids.tolist()

    # The first file has 500 ids, so the window from 490 to 510 is in both files.
    windows_BT = dataset.windows('train', np.array([490, 0]), 20)
    assert windows_BT.dtype == np.int32
    assert windows_BT.tolist() == [train_ids[490:510].tolist(), train_ids[:20].tolist()]


def test_documents_of_llm_c_begin_with_the_separator(config_of_tokens, directory):
    """llm.c writes the id END before each document, not after it."""
    validation_ids = ids_of_documents(seed=1, num_documents=30, end_last=False)
    write_llm_c(directory / 'fineweb_train_000000.bin', ids_of_documents(seed=0, end_last=False))
    write_llm_c(directory / 'fineweb_val_000000.bin', validation_ids)

    dataset = load_text(config_of_tokens(documents=f'id={END}'))

    # Each document but the last ends where the next one begins.
    starts = np.flatnonzero(validation_ids == END)
    ends = dataset.document_ends('validation')
    assert ends[:-1].tolist() == starts[1:].tolist()
    assert dataset.info('validation').num_documents == 30


def test_tokens_of_llama_3_are_uint32(config_of_tokens, directory):
    ids = np.array([70000, 1, 2, 3] * 20, np.uint32)
    write_llm_c(directory / 'a_train_0.bin', ids, magic=20240801, version=7)
    write_llm_c(directory / 'a_val_0.bin', ids, magic=20240801, version=7)
    dataset = load_text(config_of_tokens())
    assert dataset.vocab_size == 70001
    assert dataset.split('train')[:4].tolist() == [70000, 1, 2, 3]


@pytest.fixture
def megatron_files(directory):
    """Files of Megatron: 80 documents in train and 4 in validation. One in four is empty."""
    documents = [[[1, 2], [3, 4, END]], [[5, 6]], [], [[7]]]
    write_megatron(directory / 'train_text_document', documents * 20)
    write_megatron(directory / 'valid_text_document', documents)


def test_documents_of_megatron_are_those_of_its_index(config_of_tokens, megatron_files):
    dataset = load_text(config_of_tokens())
    assert dataset.split('validation')[:].tolist() == [1, 2, 3, 4, END, 5, 6, 7]
    # The empty document is left out.
    assert dataset.document_ends('validation').tolist() == [5, 7, 8]
    assert dataset.info('train').num_documents == 60


def test_documents_of_megatron_may_end_at_an_id_instead(config_of_tokens, megatron_files):
    by_index = load_text(config_of_tokens())
    by_id = load_text(config_of_tokens(documents=f'id={END}'))
    # [1, 2, 3, 4, END] and [5, 6, 7].
    assert by_id.document_ends('validation').tolist() == [5, 8]
    assert by_id.identity()['version'] != by_index.identity()['version']


@pytest.mark.parametrize('name', ['all', 'all.bin'])
def test_splits_are_carved_from_one_file_at_ends_of_documents(config_of_tokens, directory, name):
    """A single file of tokens is cut between documents into train, validation and test."""
    # 200 documents of 3 to 7 ids. All ids of a document are its number.
    documents = [np.full(3 + number % 5, number) for number in range(200)]
    # In Megatron's format, a document is a list of sequences. Here each document has one.
    write_megatron(directory / 'all', [[document] for document in documents])

    dataset = load_text(config_of_tokens(path=str(directory / name)))

    # The splits follow each other in the file.
    assert dataset.identity()['carved'] == {'validation': 0.1, 'test': 0.1}
    train = dataset.split('train')[:]
    validation = dataset.split('validation')[:]
    test = dataset.split('test')[:]
    all_ids = np.concatenate([train, validation, test])
    assert all_ids.tolist() == np.concatenate(documents).tolist()

    # Validation begins with the document after train, and test with the one after validation.
    assert validation[0] == train[-1] + 1
    assert test[0] == validation[-1] + 1

    # Each split ends at the end of a document.
    for split in dataset.splits:
        assert dataset.document_ends(split)[-1] == len(dataset.split(split))

    # Ends of documents count from the start of the split.
    first_test_document = documents[test[0]]
    assert dataset.document_ends('test')[0] == len(first_test_document)


def test_a_test_split_is_carved_if_asked(config_of_tokens, nanogpt_files):
    """If there is a validation split, a test split is cut off train only with `carve_test`."""
    without_test = load_text(config_of_tokens(documents=f'id={END}'))
    assert without_test.splits == ('train', 'validation')

    with_test = load_text(config_of_tokens(documents=f'id={END}', carve_test=True))
    assert with_test.splits == ('train', 'validation', 'test')

    # END follows each document, so train ends with a whole document.
    assert with_test.split('train')[:][-1] == END

    # Validation is the file that `nanogpt_files` has written.
    validation_ids = ids_of_documents(seed=1, num_documents=30)
    assert with_test.split('validation')[:].tolist() == validation_ids.tolist()


@pytest.fixture
def hundred_ids(directory):
    """Files of nanoGPT whose validation split has 100 ids, and no separator."""
    write_nanogpt(directory / 'train.bin', ids_of_documents(seed=0))
    write_nanogpt(directory / 'val.bin', np.arange(1, 101, dtype=np.uint16))


def test_a_split_without_a_separator_is_one_document_or_blocks(config_of_tokens, hundred_ids):
    one_document = load_text(config_of_tokens())
    assert one_document.document_ends('validation').tolist() == [100]

    blocks = load_text(config_of_tokens(documents='tokens=40'))
    assert blocks.document_ends('validation').tolist() == [40, 80, 100]


def test_blocks_of_tokens_are_evaluation_clusters(config_of_tokens, hundred_ids):
    data = config_of_tokens(documents='tokens=40')
    rows = rows_of(Config(model=ModelConfig(context=10, vocab_size=301), data=data))

    _, cluster_R = clusters(rows, 'validation')

    # A row belongs to the block of its middle token. A block of 40 has 40 / 10 = 4 rows.
    assert cluster_R.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def write_words(directory):
    """Writes 'word1 word2' and 'word3' 40 times into both splits, as ids. Returns the ids."""
    ids = np.array([1, 2, 400, 3, 400] * 40, np.uint16)
    write_nanogpt(directory / 'train.bin', ids)
    write_nanogpt(directory / 'val.bin', ids)
    return ids


def test_a_named_vocabulary_decodes_the_tokens(config_of_tokens, directory, tmp_path):
    vocabulary = write_vocabulary(tmp_path / 'words.json')
    ids = write_words(directory)  # the documents 'word1 word2' and 'word3', 40 times

    dataset = load_text(config_of_tokens(tokenizer=str(vocabulary)))

    assert dataset.tokenizer.decode([1, 2]) == 'word1 word2'
    assert dataset.info('validation').num_documents == 40 * 2

    # The separator after each document counts as one byte.
    num_bytes = 40 * len('word1 word2\0word3\0')
    assert dataset.bytes_per_token('validation') == num_bytes / len(ids)


def test_ids_beyond_a_named_vocabulary_are_refused(config_of_tokens, directory, tmp_path):
    vocabulary = write_vocabulary(tmp_path / 'words.json')  # of 401 ids
    ids = write_words(directory)
    ids[7] = 401
    write_nanogpt(directory / 'val.bin', ids)
    with refused('val.bin holds id 401 at token 7, but .* has ids from 0 to 400'):
        load_text(config_of_tokens(tokenizer=str(vocabulary)))


def test_a_vocabulary_is_not_learned_from_tokens(config_of_tokens, nanogpt_files):
    with refused("data.tokenizer='bpe' is learned from text, which tokens have not"):
        load_text(config_of_tokens(tokenizer='bpe'))


def test_counts_of_ids_are_cached_until_a_file_changes(
    config_of_tokens, directory, nanogpt_files, monkeypatch
):
    """The ids of token files are counted and hashed once, when the files are first opened.

    The identity of a dataset contains the hash of each split as its fingerprint.
    """
    first = load_text(config_of_tokens()).identity()

    # Counting again would call None and fail.
    with monkeypatch.context() as patch:
        patch.setattr('qkattn.data.token_formats.in_place._count', None)
        assert load_text(config_of_tokens()).identity() == first

    # A changed validation file is counted again.
    write_nanogpt(directory / 'val.bin', ids_of_documents(seed=2))
    second = load_text(config_of_tokens()).identity()
    assert second['fingerprints']['train'] == first['fingerprints']['train']
    assert second['fingerprints']['validation'] != first['fingerprints']['validation']


def test_counts_of_ids_are_made_again_if_an_index_changes(config_of_tokens, megatron_files):
    """The second index of the same ids says that the sequences [5, 6] and [7] are one document."""
    data = config_of_tokens()
    validation_index = Path(data.path) / 'valid_text_document.idx'
    assert load_text(data).info('validation').num_documents == 3

    # The last bounds of documents are 2, 3, 3 and 4, where 4 is the number of sequences.
    content = validation_index.read_bytes()
    bounds = np.frombuffer(content, '<i8', count=5, offset=len(content) - 5 * 8)
    assert bounds.tolist() == [0, 2, 3, 3, 4]
    joined_bounds = np.array([0, 2, 4, 4, 4])
    validation_index.write_bytes(content[: -5 * 8] + joined_bounds.astype('<i8').tobytes())

    # [1, 2, 3, 4, END] and [5, 6, 7].
    dataset = load_text(data)
    assert dataset.document_ends('validation').tolist() == [5, 8]
    assert dataset.info('validation').num_documents == 2


@pytest.mark.parametrize(
    ('kind', 'vocab_size'),
    [
        pytest.param('decoder', 301, id='decoder'),
        pytest.param('encoder', 302, marks=pytest.mark.slow, id='encoder, with a mask'),
    ],
)
def test_a_model_trains_on_tokens_without_a_vocabulary(
    kind, vocab_size, tiny, config_of_tokens, directory, tmp_path
):
    """Token files are enough to train on, without the tokenizer that made them."""
    # The ids are 1 to 300. END, which separates documents, is 300.
    write_nanogpt(directory / 'train.bin', ids_of_documents(seed=0))
    write_nanogpt(directory / 'val.bin', ids_of_documents(seed=1))
    write_nanogpt(directory / 'test.bin', ids_of_documents(seed=2))
    model = {'kind': kind, 'num_layers': 1, 'vocab_size': vocab_size}
    config = tiny(model=model, data=vars(config_of_tokens(documents=f'id={END}')))

    results = train(config, tmp_path / 'run')

    # The name stands for the 301 ids from 0 to the largest id, 300.
    assert results[0]['data']['tokenizer'] == 'ids-301'
    assert np.isfinite(results[0]['test_loss'])


def test_any_id_may_replace_a_masked_token_if_none_is_a_separator(config_of_tokens, directory):
    """A random id in place of a masked token is never a separator.

    These tokens have no separator, so any id from 0 to 3 may be chosen.
    """
    ids = np.arange(4000, dtype=np.uint16) % 4
    write_nanogpt(directory / 'train.bin', ids)
    write_nanogpt(directory / 'val.bin', ids)
    model = ModelConfig(kind='encoder', context=100, vocab_size=5)
    rows = rows_of(Config(model=model, data=config_of_tokens()))

    batch = train_batch(rows, seed=0, step=0, batch_size=64)

    # The mask is 4.
    is_masked_BT = batch['loss_weights_BT'] > 0
    is_replaced_BT = is_masked_BT & (batch['tokens_BT'] != batch['targets_BT'])
    assert set(batch['tokens_BT'][is_replaced_BT]) == {0, 1, 2, 3, 4}


def test_ids_are_written_as_numbers():
    tokenizer = IdTokenizer(301, None)
    assert tokenizer.encode('7 300').tolist() == [7, 300]
    assert tokenizer.decode([7, 300]) == '7 300'
    with pytest.raises(ValueError, match='id 301 is outside of 0 .. 300'):
        tokenizer.encode('301')


IDS = ids_of_documents(seed=0)


@pytest.mark.parametrize(
    ('header', 'message'),
    [
        pytest.param({'num_ids': 9999}, 'a.bin holds .* 9,999', id='number of ids'),
        pytest.param({'version': 2}, 'has version 2 of .* valid is 1', id='version'),
        pytest.param({'magic': 7}, 'whose magic number is 7; those of llm.c', id='magic number'),
    ],
)
def test_a_wrong_header_of_llm_c_is_named(config_of_tokens, directory, header, message):
    write_llm_c(directory / 'a.bin', IDS, **header)
    with refused(message):
        load_text(config_of_tokens())


def test_another_type_than_that_of_the_header_is_refused(config_of_tokens, directory):
    write_llm_c(directory / 'a.bin', IDS)
    with refused("data.token_dtype='uint32' does not fit .*a.bin, whose header states uint16"):
        load_text(config_of_tokens(token_dtype='uint32'))


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'documents': 'blank_line'}, "must be 'id=N', the"),
        ({'documents': 'tokens=0'}, "must be 'id=N', the"),
        ({'lowercase': True}, 'lowercase=True has no effect'),
        ({}, 'a.bin has too few documents for the splits'),
    ],
)
def test_settings_that_do_not_fit_tokens_are_refused(config_of_tokens, directory, fields, message):
    write_nanogpt(directory / 'a.bin', IDS)
    with refused(message):
        load_text(config_of_tokens(**fields))


def test_documents_without_a_known_separator_cannot_bound_attention(
    config_of_tokens, megatron_files, tmp_path
):
    def open_rows(**fields):
        data = config_of_tokens(cross_documents=False, **fields)
        return rows_of(Config(model=ModelConfig(context=7, vocab_size=401), data=data))

    # An index tells where documents end, but no id does.
    with refused('data.cross_documents=False needs the id that separates documents'):
        open_rows()

    # The separator of this vocabulary is 400, so rows would have no bound at END.
    vocabulary = str(write_vocabulary(tmp_path / 'words.json'))
    with refused(f"data.documents='id={END}' separates documents, but .* the separator 400"):
        open_rows(documents=f'id={END}', tokenizer=vocabulary)

    # The input [1, 2, 3, 4, END, 5, 6] has a document before END, and one from END on.
    rows = open_rows(documents=f'id={END}')
    batch = rows.read('validation', np.arange(1), np.zeros((1, 2), np.uint64))
    assert batch['segments_BT'][0].tolist() == [1, 1, 1, 1, 2, 2, 2]


def test_a_file_of_wider_ids_is_named(config_of_tokens, directory):
    write_nanogpt(directory / 'a.bin', IDS.astype(np.uint32))
    with refused(
        "every other id of .*a.bin is below 16 in uint16, .* set data.token_dtype to 'uint32'"
    ):
        load_text(config_of_tokens())


def test_a_file_whose_last_id_is_cut_is_named(config_of_tokens, directory):
    write_nanogpt(directory / 'a.bin', np.full(9, 7, np.uint8))
    with refused('a.bin has 9 bytes of ids, which is no multiple of the 2 bytes'):
        load_text(config_of_tokens())


def test_a_file_with_a_huge_id_is_named(config_of_tokens, directory):
    write_nanogpt(directory / 'a.bin', np.array([1, 2**21] * 99, np.uint32))
    with refused('a.bin holds id 2097152 at token 1, but valid are ids from 0 to 1,048,575'):
        load_text(config_of_tokens(token_dtype='uint32', documents='tokens=9'))


def test_a_file_without_a_token_is_named(config_of_tokens, directory):
    directory.mkdir()
    (directory / 'a.bin').touch()
    with refused('a.bin holds no tokens'):
        load_text(config_of_tokens())


def test_files_of_several_formats_are_named(config_of_tokens, directory):
    write_nanogpt(directory / 'train.bin', IDS)
    write_llm_c(directory / 'val.bin', IDS)
    with refused('several formats: .*train.bin .headerless., .*val.bin .llm.c.'):
        load_text(config_of_tokens())


def test_files_of_several_types_are_named(config_of_tokens, directory):
    write_llm_c(directory / 'train.bin', IDS.astype(np.uint32), magic=20240801, version=7)
    write_llm_c(directory / 'val.bin', IDS)
    with refused('ids of several types: .*train.bin .uint32., .*val.bin .uint16.'):
        load_text(config_of_tokens())


@pytest.mark.parametrize(
    ('names', 'message'),
    [
        pytest.param(
            ['train.bin', 'val.bin', 'other.bin'],
            'other.bin names no split, but other files',
            id='no split',
        ),
        pytest.param(
            ['val/train.bin'],
            'val/train.bin names the splits train and validation; rename',
            id='two splits',
        ),
        pytest.param(['val.bin'], 'has no file of the split train', id='missing train split'),
        pytest.param(
            ['train.bin', 'validation.bin'],
            'is named as prepare_data names its files, but no token',
            id='missing index of prepare_data',
        ),
    ],
)
def test_files_whose_split_is_not_clear_are_named(config_of_tokens, directory, names, message):
    for name in names:
        write_nanogpt(directory / name, IDS)
    with refused(message):
        load_text(config_of_tokens())


NUM_SEQUENCES = 60
# The bytes at which the parts of Megatron's index begin.
VERSION_AT = 9
DTYPE_AT = 17
LENGTHS_AT = 34
POINTERS_AT = LENGTHS_AT + 4 * NUM_SEQUENCES
LAST_DOCUMENT_AT = -8


@pytest.fixture
def megatron_index(directory):
    """The index of 60 documents of Megatron, each of one sequence of 3 ids."""
    write_megatron(directory / 'all', [[[1, 2, 3]]] * NUM_SEQUENCES)
    return directory / 'all.idx'


@pytest.mark.parametrize(
    ('position', 'byte', 'message'),
    [
        pytest.param(0, ord('x'), "all.idx begins with b'xMIDIDX", id='magic number'),
        pytest.param(VERSION_AT, 2, 'all.idx has version 2; valid is 1', id='version'),
        pytest.param(DTYPE_AT, 7, 'all.idx has ids of type 7; valid are', id='dtype'),
        pytest.param(LENGTHS_AT, 1, 'but all.idx states', id='lengths'),
        pytest.param(POINTERS_AT, 2, 'has sequences that do not follow', id='pointers'),
        pytest.param(LAST_DOCUMENT_AT, 1, 'has documents that do not begin', id='documents'),
    ],
)
def test_a_wrong_byte_in_an_index_of_megatron_is_named(
    config_of_tokens, directory, megatron_index, position, byte, message
):
    content = bytearray(megatron_index.read_bytes())
    content[position] = byte
    megatron_index.write_bytes(content)
    with refused(message):
        load_text(config_of_tokens(path=str(directory / 'all')))


@pytest.mark.parametrize(
    ('end', 'message'),
    [
        pytest.param(20, 'all.idx ends inside of its header', id='in the header'),
        pytest.param(-1, 'all.idx has .* bytes, not the .* of 60 sequences', id='before its end'),
    ],
)
def test_a_cut_index_of_megatron_is_named(
    config_of_tokens, directory, megatron_index, end, message
):
    content = megatron_index.read_bytes()
    megatron_index.write_bytes(content[:end])
    with refused(message):
        load_text(config_of_tokens(path=str(directory / 'all')))
