"""Tiny Shakespeare: 1.1 MB of plays in one file, the usual first text of a language model.

Source: Karpathy, "The Unreasonable Effectiveness of Recurrent Neural Networks" (2015). Split as in
nanoGPT: the first 90 % of the characters train, the rest validate.
"""

from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

from qkattn.config import DataConfig
from qkattn.data.cache import data_root
from qkattn.data.corpora import builders
from qkattn.data.corpora.corpus import Corpus

FILE = builders.SourceFile(
    'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
    '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed',
    1115394,
)
SPLITS = ('train', 'validation')


# Not registered, because tfds has a dataset of this name, split differently.
class TinyShakespeareText(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The plays as one document per split: {'text': the characters}."""

    VERSION = tfds.core.Version('1.0.0')
    RELEASE_NOTES = {'1.0.0': 'First 90 % of the characters for training, the rest to validate.'}

    @property
    def url_infos(self) -> dict[str, object]:
        return builders.url_infos([FILE])

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict({'text': tfds.features.Text()}),
            disable_shuffling=True,
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
        text = Path(dl_manager.download(FILE.url)).read_bytes().decode()
        cut = int(0.9 * len(text))
        parts = {'train': text[:cut], 'validation': text[cut:]}
        return {split: self._generate_examples(part) for split, part in parts.items()}

    def _generate_examples(self, text: str) -> Iterator[tuple[int, dict[str, str]]]:
        yield 0, {'text': text}


def corpus(config: DataConfig) -> Corpus:
    """The corpus; its files are prepared when documents are asked for."""

    def documents(language: None) -> dict[str, Iterator[bytes]]:
        data_dir = data_root(config.data_dir)
        builder = builders.prepare(
            lambda: TinyShakespeareText(data_dir=data_dir),
            data_dir=data_dir,
            files=[FILE],
            manual_dir=config.manual_dir,
            advice=builders.by_hand([FILE]),
        )
        return {split: builders.texts(builder, split, 'text') for split in SPLITS}

    return Corpus(
        name='tiny_shakespeare',
        version=str(TinyShakespeareText.VERSION),
        languages=(),
        splits=SPLITS,
        documents=documents,
    )
