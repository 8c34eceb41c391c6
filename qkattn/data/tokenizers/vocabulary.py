"""Tokenizers by kind: trained on a corpus the first time, cached, checked whenever opened.

On disk, `<data_dir>/tokenizers/<name>/<version>/<kind>/` (bpe: `bpe-<size>`) holds the trained
model and `about.json`, which says what it is and its sha256.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from qkattn.data.tokenizers.bpe import BPETokenizer
from qkattn.data.tokenizers.characters import CharacterTokenizer
from qkattn.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from qkattn.errors import ConfigError
from qkattn.run.files import locked, write_atomic

KINDS = ('bytes', 'characters', 'bpe')

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """What a cached model is.

    Attributes:
      kind, size: as asked for; size is None where the text alone decides.
      text_sha256: of the training text.
      model_sha256: of the model file.
      trained_by: library and version, for people who look for the reason of a difference.
    """

    kind: str
    size: int | None
    text_sha256: str
    model_sha256: str
    trained_by: str


class DamagedVocabulary(Exception):
    """A cached model is not what its description says, or one of the two cannot be read.

    Attributes:
      about: the description, None where that is what cannot be read.
    """

    def __init__(self, message: str, about: About | None = None):
        super().__init__(message)
        self.about = about


def open_tokenizer(
    data_dir: Path,
    *,
    kind: str,
    size: int,
    name: str,
    version: str,
    texts: Callable[[], Iterable[bytes]],
) -> Tokenizer:
    """The tokenizer of a corpus; trains it under `data_dir` the first time.

    A damaged cache is reported (a warning) and trained again. Any number of processes may call
    this at the same time; one of them trains.

    Args:
      kind: one of KINDS. 'bytes' needs no training and touches no file.
      size: pieces, of 'bpe' only.
      name, version: of the corpus.
      texts: yields the training texts, always the same; called only to train.

    Raises:
      ConfigError: for an unknown kind; for a size that the text cannot fill; if there is something
        to train and `data_dir` cannot be written; if a damaged cache cannot be restored as it was.
      ValueError: if a training text is no valid UTF-8.
    """
    if kind == 'bytes':
        return ByteTokenizer()
    if kind not in KINDS:
        raise ConfigError(
            f'data.tokenizer={kind!r} is not a known tokenizer; valid: '
            f'{", ".join(map(repr, KINDS))}.'
        )
    asked = {'kind': kind, 'size': size if kind == 'bpe' else None}
    directory = data_dir / 'tokenizers' / name / version
    directory /= f'bpe-{size}' if kind == 'bpe' else kind
    try:
        # Without the lock first, so that a finished cache may be on a read-only disk.
        return _open(directory, asked)
    except (FileNotFoundError, DamagedVocabulary):
        with locked(directory / 'lock'):
            try:
                return _open(directory, asked)
            except FileNotFoundError:
                before = None
            except DamagedVocabulary as error:
                log.warning('%s It is trained again.', error)
                before = error.about
            log.info('Training the %s tokenizer of %s %s to %s', kind, name, version, directory)
            _train(directory, asked, texts(), before)
            return _open(directory, asked)


def _paths(directory: Path) -> tuple[Path, Path]:
    return directory / 'tokenizer.model', directory / 'about.json'


def _open(directory: Path, asked: dict[str, str | int | None]) -> Tokenizer:
    model_path, about_path = _paths(directory)
    # os.path, because Path.exists raises where a directory may not be entered.
    if not os.path.exists(about_path) and not os.path.exists(model_path):
        raise FileNotFoundError(about_path)
    damaged = f'The tokenizer cache {str(directory)!r} is damaged: '
    try:
        about = About(**json.loads(about_path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DamagedVocabulary(f'{damaged}about.json cannot be read ({error}).') from error
    for field, expected in asked.items():
        if getattr(about, field) != expected:
            raise DamagedVocabulary(
                f'{damaged}{field} is {getattr(about, field)!r}, not {expected!r}.'
            )
    try:
        model = model_path.read_bytes()
    except OSError as error:
        raise DamagedVocabulary(
            f'{damaged}{model_path.name} cannot be read ({error}).', about
        ) from error
    sha256 = hashlib.sha256(model).hexdigest()
    if sha256 != about.model_sha256:
        raise DamagedVocabulary(
            f'{damaged}the sha256 of {model_path.name} is {sha256}, not {about.model_sha256}.',
            about,
        )
    return (BPETokenizer if about.kind == 'bpe' else CharacterTokenizer).load(model)


def _train(
    directory: Path,
    asked: dict[str, str | int | None],
    texts: Iterable[bytes],
    before: About | None,
) -> None:
    digest = hashlib.sha256()
    if asked['kind'] == 'bpe':
        model = BPETokenizer.train(_hashed(texts, digest), asked['size']).model()
        trained_by = f'sentencepiece {importlib.metadata.version("sentencepiece")}'
    else:
        model = CharacterTokenizer.train(_hashed(texts, digest)).model()
        trained_by = 'qkattn'
    about = About(
        **asked,
        text_sha256=digest.hexdigest(),
        model_sha256=hashlib.sha256(model).hexdigest(),
        trained_by=trained_by,
    )
    if before is not None and about.model_sha256 != before.model_sha256:
        # Ids would mean something else than in the results and weights that exist.
        reason = (
            'the training text is not what it was'
            if about.text_sha256 != before.text_sha256
            else f'{trained_by} learns another one from the same text than {before.trained_by} did'
        )
        raise ConfigError(
            f'data.tokenizer={asked["kind"]!r}: the damaged vocabulary in {str(directory)!r} '
            f'cannot be restored, because {reason}; delete that directory to train another one.'
        )
    model_path, about_path = _paths(directory)
    write_atomic(model_path, model)
    # Last, because a description stands for a finished model.
    write_atomic(about_path, json.dumps(dataclasses.asdict(about), indent=2) + '\n')


def _hashed(texts: Iterable[bytes], digest: 'hashlib._Hash') -> Iterator[bytes]:
    """The texts, which go into `digest` as they pass."""
    for text in texts:
        # With its length, so that where one text ends and the next begins counts too.
        digest.update(len(text).to_bytes(8))
        digest.update(text)
        yield text
