"""Any text or translation set of the tfds catalogue: 'tfds:NAME' or 'tfds:NAME/CONFIG'."""

import difflib
import glob
import importlib.util
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import IO

import tensorflow_datasets as tfds
import tensorflow_datasets.text
import tensorflow_datasets.translate

from qkattn.config import DataConfig
from qkattn.data.cache import data_root
from qkattn.data.corpora import tfds_prepare
from qkattn.data.corpora.corpus import Corpus, find_splits, parse_languages
from qkattn.errors import ConfigError


def _open(path: str, mode: str = 'r') -> IO:
    return open(path, mode, encoding=None if 'b' in mode else 'utf-8')


# The functions on files of TensorFlow that sets of text use, without TensorFlow.
FILES = {'GFile': _open, 'glob': glob.glob, 'isdir': os.path.isdir}
WITHOUT = types.SimpleNamespace(io=types.SimpleNamespace(gfile=types.SimpleNamespace(**FILES)))
# How the source of a builder shows that it cannot prepare without a package.
PACKAGES = {
    'apache_beam': r'\bapache_beam\b|BeamBasedBuilder',
    'tensorflow': rf'\btf\.(?!io\.gfile\.({"|".join(FILES)})\b)[a-z_]+\.\w',
}


def corpus(config: DataConfig) -> Corpus:
    """The corpus of a catalogue set, prepared under `config.data_dir` the first time.

    Raises:
      ConfigError: for an unknown set, config, language or feature; for a set that cannot be
        prepared here; for one without a train split.
    """
    languages = parse_languages(config) if config.languages else ()
    data_dir = data_root(config.data_dir)
    create = _creator(config.name, str(data_dir))
    name = config.name.removeprefix('tfds:').partition('/')[0]
    advice = (
        'prepare it on a machine that can (file_format=array_record) and copy '
        f'{str(data_dir / name)!r} from there'
    )
    try:
        builder = create()
    except ImportError as error:
        raise ConfigError(tfds_prepare.needs_package(config.name, error, advice)) from error
    if not tfds_prepare.is_prepared(builder):
        _check_preparable(builder, config, advice)
    feature = _text_feature(builder, languages, config)
    builder = tfds_prepare.prepare(
        create, data_dir=data_dir, manual_dir=config.manual_dir, advice=advice
    )
    found = find_splits(builder.info.splits, f'data.name={config.name!r}')

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        path = feature if language is None else (*feature, language)
        return {split: tfds_prepare.texts(builder, name, *path) for split, name in found.items()}

    parts = ('tfds', config.name.removeprefix('tfds:'), *(languages or feature))
    return Corpus(
        name=re.sub(r'[^\w.-]', '-', '-'.join(parts)),
        version=str(builder.version),
        languages=languages,
        splits=tuple(found),
        documents=documents,
    )


def has(name: str) -> bool:
    """Whether the catalogue has a set of this name."""
    try:
        return bool(re.fullmatch(r'[^\W\d]\w*', name) and tfds.builder_cls(name))
    except tfds.core.DatasetNotFoundError:
        return False


def _creator(full_name: str, data_dir: str) -> Callable[[], tfds.core.DatasetBuilder]:
    """A function that makes the builder of 'tfds:NAME/CONFIG'."""
    match = re.fullmatch(r'tfds:([^\W\d]\w*)(?:/([\w.+-]+))?', full_name)
    if match is None:
        raise ConfigError(
            f"data.name={full_name!r} is not of the form 'tfds:NAME' or 'tfds:NAME/CONFIG'."
        )
    name, wanted = match.groups()

    def create() -> tfds.core.DatasetBuilder:
        return tfds.builder(f'{name}/{wanted}' if wanted else name, data_dir=data_dir)

    try:
        cls = tfds.builder_cls(name)
    except tfds.core.DatasetNotFoundError as error:
        try:
            # A set that was prepared elsewhere needs no code, only its files.
            create()
        except tfds.core.DatasetNotFoundError:
            close = difflib.get_close_matches(name, tfds.core.registered.list_imported_builders())
            hint = f'; did you mean {", ".join(map(repr, close))}?' if close else '.'
            raise ConfigError(
                f'data.name={full_name!r}: the tfds catalogue has no {name!r} and there is none in '
                f'{data_dir!r}{hint}'
            ) from error
        return create
    names = list(dict.fromkeys(c.name for c in cls.BUILDER_CONFIGS))
    if wanted is None and len(names) > 1:
        raise ConfigError(
            f'data.name={full_name!r} has several configs; name one, as in '
            f'{f"{full_name}/{names[0]}"!r}; valid: {_some(names, wanted)}.'
        )
    if wanted is not None and wanted not in names:
        raise ConfigError(
            f'data.name={full_name!r}: {name!r} has no config {wanted!r}; valid: '
            f'{_some(names, wanted) or "none"}.'
        )
    return create


def _some(names: list[str], wanted: str | None) -> str:
    """At most ten of the names, those like `wanted` first."""
    close = difflib.get_close_matches(wanted or '', names, 10)
    chosen = list(dict.fromkeys([*close, *names]))[:10]
    return ', '.join(chosen) + (' and others' if len(names) > 10 else '')


def _text_feature(
    builder: tfds.core.DatasetBuilder, languages: tuple[str, ...], config: DataConfig
) -> tuple[str, ...]:
    """Where the text is in an example: (feature,), or () for a set that is one Translation."""
    features = builder.info.features
    if any(isinstance(f, tfds.features.TranslationVariableLanguages) for f in features.values()):
        raise ConfigError(
            f'data.name={config.name!r}: its languages vary from example to example; choose a set '
            'with the same languages in every example.'
        )
    translations: dict[tuple[str, ...], tfds.features.Translation]
    if isinstance(features, tfds.features.Translation):
        translations = {(): features}
    else:
        translations = {
            (name,): f for name, f in features.items() if isinstance(f, tfds.features.Translation)
        }
    if languages:
        if config.feature is not None:
            raise ConfigError(
                f'data.feature={config.feature!r} is for text in one language; leave it None for a '
                'translation set.'
            )
        for path, feature in translations.items():
            if set(languages) <= set(feature.keys()):
                return path
        known = [language for feature in translations.values() for language in feature]
        raise ConfigError(
            f'data.languages={config.languages!r} are not in {config.name!r}; valid: '
            f'{", ".join(map(repr, known)) or "none, it is not a translation set"}.'
        )
    texts = [name for name, f in features.items() if isinstance(f, tfds.features.Text)]
    if translations:
        first = ', '.join(map(repr, next(iter(translations.values())).keys()))
        raise ConfigError(
            f'data.languages=None: {config.name!r} is a translation set; give source and target, '
            f'two of {first}.'
        )
    if config.feature in texts:
        return (config.feature,)
    if config.feature is None and len(texts) == 1:
        return (texts[0],)
    raise ConfigError(
        f'data.feature={config.feature!r} does not name one text feature of {config.name!r}; '
        f'valid: {", ".join(map(repr, texts)) or "none, it has no text feature"}.'
    )


def _check_preparable(builder: tfds.core.DatasetBuilder, config: DataConfig, advice: str) -> None:
    """Raises ConfigError before a download of gigabytes for what would stop the preparation."""
    names = {cls.__module__ for cls in type(builder).__mro__}
    modules = [sys.modules[n] for n in names if re.match(r'tensorflow_datasets\.(?!core\b)', n)]
    source = '\n'.join(map(inspect.getsource, modules))
    for package, pattern in PACKAGES.items():
        if re.search(pattern, source) and importlib.util.find_spec(package) is None:
            raise ConfigError(tfds_prepare.needs_package(config.name, package, advice))
    if importlib.util.find_spec('tensorflow') is None:
        for module in modules:
            if 'tf' in vars(module):
                vars(module)['tf'] = WITHOUT
