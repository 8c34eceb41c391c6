"""Text and translation sets of the tfds catalogue that are prepared: 'tfds:NAME[/CONFIG]'."""

import re
from collections.abc import Iterator

import tensorflow_datasets as tfds

from qkattn.config import DataConfig
from qkattn.data.cache import data_root
from qkattn.data.corpora.corpus import Corpus, find_feature, find_splits, parse_languages
from qkattn.errors import ConfigError

# Examples; a few, because an example may be a book.
READ_TOGETHER = 128


def corpus(config: DataConfig) -> Corpus:
    """The newest version of a set that is prepared under `config.data_dir`; needs no code of it.

    Raises:
      ConfigError: a set that is not prepared, or has no train split; a language or feature that it
        does not have.
    """
    match = re.fullmatch(r'tfds:([^\W\d]\w*(?:/[\w.+-]+)?)', config.name)
    if match is None:
        raise ConfigError(
            f"data.name={config.name!r} is not of the form 'tfds:NAME' or 'tfds:NAME/CONFIG'."
        )
    name, where = match[1], f'data.name={config.name!r}'
    directory = data_root(config.data_dir)
    versions = [
        path.parent
        for path in (directory / name).glob('*/dataset_info.json')
        if tfds.core.Version.is_valid(path.parent.name)
    ]
    if not versions:
        raise ConfigError(
            f'{where} is not prepared; run `tfds build {name} --data_dir={directory} '
            '--file_format=array_record`, which needs TensorFlow, or copy the set from a machine '
            'that has it.'
        )
    builder = tfds.builder_from_directory(
        max(versions, key=lambda path: tfds.core.Version(path.name))
    )
    languages = parse_languages(config) if config.languages else ()
    features = dict(builder.info.features.items())
    texts = [key for key, f in features.items() if isinstance(f, tfds.features.Text)]
    translations = {
        key: list(f.keys())
        for key, f in features.items()
        if isinstance(f, tfds.features.Translation)
    }
    feature = find_feature(texts, translations, languages, config, where)
    splits = find_splits(builder.info.splits, where)

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        keys = [key for key in (feature, language) if key is not None]
        return {split: _texts(builder, name, keys) for split, name in splits.items()}

    parts = ('tfds', name, *(languages or (str(feature),)))
    return Corpus(
        name=re.sub(r'[^\w.-]', '-', '-'.join(parts)),
        version=str(builder.version),
        languages=languages,
        splits=tuple(splits),
        documents=documents,
    )


def _texts(builder: tfds.core.DatasetBuilder, split: str, keys: list[str]) -> Iterator[bytes]:
    """The text under these keys of every example of a split, in the order on disk."""
    try:
        source = builder.as_data_source(split)
        for start in range(0, len(source), READ_TOGETHER):
            numbers = range(start, min(start + READ_TOGETHER, len(source)))
            # One by one takes four times as long.
            for value in source.__getitems__(numbers):
                for key in keys:
                    value = value[key]
                yield value
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f'The prepared set at {str(builder.data_dir)!r} cannot be read '
            f'({" ".join(str(error).split())}): it is damaged, or not in the format array_record; '
            'delete that directory and prepare it again.'
        ) from error
