"""Tokenizers read from a tokenizer.json of the Hugging Face library."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from qkattn.config import DataConfig
from qkattn.data.load import load
from qkattn.data.tokenizers.bpe import BPETokenizer
from qkattn.data.tokenizers.file import FileTokenizer
from tests.data.refusals import refused

TEXT = 'the fox saw the grapes\nthe fox left the gräpes'


@pytest.fixture
def words(tmp_path):
    """A lossy vocabulary of words that marks the ends of texts and cuts them off."""
    vocabulary = {'[UNK]': 0, '[CLS]': 1, 'the': 2, 'fox': 3, 'saw': 7}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token='[UNK]'))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(['[UNK]', '[CLS]'])
    tokenizer.post_processor = processors.TemplateProcessing('[CLS] $A', None, [('[CLS]', 1)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / 'words.json'))
    return str(tmp_path / 'words.json')


def test_a_lossless_file_gives_the_text_back(tmp_path):
    path = tmp_path / 'bpe.json'
    learned = BPETokenizer.train([TEXT.encode()], 270)
    path.write_bytes(learned.model())
    tokenizer = FileTokenizer(str(path))
    assert tokenizer.name == f'file-{learned.name[-12:]}'
    assert (tokenizer.vocab_size, tokenizer.separator) == (271, 270)
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.uint16 and np.array_equal(ids, learned.encode(TEXT))
    assert np.array_equal(tokenizer.encode(TEXT.encode()), ids)
    assert tokenizer.decode(ids) == TEXT and tokenizer.num_bytes(ids) == len(TEXT.encode())
    two = np.concatenate([ids, [270], ids, [270]])
    assert tokenizer.decode(two) == f'{TEXT}\0{TEXT}\0'
    assert tokenizer.num_bytes(two) == 2 * len(TEXT.encode()) + 2


def test_nothing_is_added_cut_or_counted_that_is_not_text(words):
    tokenizer = FileTokenizer(words)
    ids = tokenizer.encode('The fox saw [CLS] the grapes')
    assert ids.dtype == np.uint8 and tokenizer.separator == 8
    assert ids[:3].tolist() == [2, 3, 7] and ids[-2:].tolist() == [2, 0] and 1 not in ids
    assert tokenizer.num_bytes(ids) == len('the fox saw the')


def test_tokens_are_cached_by_the_content_of_the_file(tmp_path, words):
    (tmp_path / 'text.txt').write_text('the fox\n' * 100)
    config = DataConfig(
        name='text', path=str(tmp_path / 'text.txt'), tokenizer=words, data_dir=str(tmp_path)
    )
    dataset = load(config)
    assert dataset.identity()['tokenizer'] == FileTokenizer(words).name
    assert dataset.split('train')[:4].tolist() == [2, 3, 2, 3]
    tokenizer = Tokenizer.from_file(words)
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(words)
    assert load(config).identity()['tokenizer'] != dataset.identity()['tokenizer']


def test_what_is_no_tokenizer_is_one_sentence(tmp_path):
    with refused(r"data.tokenizer='.*absent.json' cannot be read \(No such file"):
        FileTokenizer(str(tmp_path / 'absent.json'))
    for content in ('', '{}', '[1]', '{"version": "1.0", "model": {"type": "None"}}'):
        (tmp_path / 'a.json').write_text(content)
        with refused('a.json. is not a tokenizer.json of the Hugging Face tokenizers library'):
            FileTokenizer(str(tmp_path / 'a.json'))
