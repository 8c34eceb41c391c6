import pytest

from qkattn.data.tokenizers.subwords import BPETokenizer
from qkattn.data.tokenizers.tokenizer import CharacterTokenizer
from qkattn.data.tokenizers.vocabulary import open_tokenizer
from tests.refusals import refused

TEXTS = [b'peter piper picked a peck\n' * 3, b'of pickled peppers']


def test_a_tokenizer_is_trained_once_and_again_if_it_is_damaged(tmp_path, warnings):
    def opened(kind, texts=TEXTS, size=270):
        return open_tokenizer(tmp_path, kind, size, lambda: texts or pytest.fail('texts are read'))

    assert opened('bytes', None).name == 'bytes' and not list(tmp_path.iterdir())
    letters, bpe = CharacterTokenizer.train(TEXTS), BPETokenizer.train(TEXTS, 270)
    for kind, folder, made in (('characters', 'characters', letters), ('bpe', 'byte-bpe-270', bpe)):
        assert opened(kind).name == opened(kind, None).name == made.name and not warnings
        path = tmp_path / folder / 'tokenizer.json'
        model = path.read_bytes()
        path.write_bytes(model[:-9])
        assert opened(kind).name == made.name and path.read_bytes() == model
        assert warnings.pop().startswith(f'{path} is damaged')
    assert opened('bpe', size=265).vocab_size == 265 and opened('bpe', None).vocab_size == 270
    with refused("'words'; known are bytes, characters, bpe, PATH.json, or"):
        opened('words')
