"""Tiny Shakespeare: 1.1 MB of plays in one file, the usual first text of a language model.

Source: Karpathy, "The Unreasonable Effectiveness of Recurrent Neural Networks" (2015). Split as in
nanoGPT: the first 90 % of the characters train, the rest validate.
"""

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import Corpus
from qkattn.data.corpora.downloads import SourceFile, fetch

VERSION = '1.0.0'
FILE = SourceFile(
    'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
    '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed',
)


def corpus(config: DataConfig) -> Corpus:
    """The corpus; its file is fetched when documents are read."""

    def documents(language: str | None) -> dict[str, list[bytes]]:
        (path,) = fetch('tiny_shakespeare', [FILE], config)
        text = path.read_bytes().decode()
        cut = int(0.9 * len(text))
        return {'train': [text[:cut].encode()], 'validation': [text[cut:].encode()]}

    return Corpus(
        name='tiny_shakespeare',
        version=VERSION,
        languages=(),
        splits=('train', 'validation'),
        documents=documents,
    )
