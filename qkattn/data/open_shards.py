"""Opens token shards: those of `qkattn prepare_data` and of the cache, of nanoGPT and of llm.c.

Opening reads the index, or the head of each file, and compares sizes; the tokens are read where a
row needs them. `index.json` states what was tokenized how, and the shards of each split; it is
written first as a plan, without splits, then with all of them. A learned vocabulary, or that of a
file, lies beside it, `tokenizer.json`.
"""

import dataclasses
import fnmatch
import hashlib
import itertools
import json
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from qkattn.config import DataConfig
from qkattn.data.cache import DamagedData
from qkattn.data.corpora.corpus import SHARE, SPLITS, Corpus
from qkattn.data.shard_files import Files, Shard, ShardTokens, files_at, shard_of
from qkattn.data.tokenizers.subwords import FileTokenizer
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokenizers.vocabulary import restored
from qkattn.data.tokens import SplitInfo, TokenDataset
from qkattn.errors import ConfigError
from qkattn.storage.records import check, parse_json, read

INDEX = 'index.json'
MODEL = 'tokenizer.json'
# Changes whenever an index that is stored would be read differently.
SCHEMA = 1
# Of the files without an index, which go into their fingerprint.
HEAD = 1 << 16
# The name of a set in that of a file, the word that says its split, and the number of the shard.
NAMED = re.compile(r'(?:(.*)[_.-])?(train|validation|valid|val|dev|test)(?:[_.-]?(\d+))?\.bin')
ALIASES = dict.fromkeys(('val', 'valid', 'dev'), 'validation')
# Vocabulary and separator of shards without an index: GPT-2's, and Llama 3's.
VOCABULARIES = {
    'uint8': 'bytes',
    'uint16': 'ids',
    'uint32': 'ids(vocab_size=128256, separator=128000)',
}
# How far from its boundary a split that is carved looks for the end of a document.
REACH = 1 << 20

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """What `index.json` holds: corpus, tokenizer, layout, and when it is complete the splits.

    Attributes:
      tokenizer: as in data.tokenizer; of a file without its directory.
      model_sha256: of `tokenizer.json`; None where there is none.
      dtype: of an id, uint16 or uint32, and in the cache uint8.
      shard_tokens: tokens at which a shard is closed, behind the document that reaches them.
    """

    schema: int
    name: str
    version: str
    carved: Mapping[str, float]
    tokenizer: str
    tokenizer_name: str
    vocab_size: int
    separator: int
    model_sha256: str | None
    dtype: str
    shard_tokens: int
    complete: bool
    splits: Mapping[str, SplitInfo]

    def text(self) -> str:
        """The file, which states the dtype once."""
        record = dataclasses.asdict(self)
        for split in record['splits'].values():
            for shard in split['shards']:
                del shard['dtype'], shard['offset']
        return json.dumps(record, indent=1) + '\n'

    def differences(self, plan: 'Index') -> Iterator[tuple[str, object, object]]:
        """(field, value here, value there) of all that says how text is tokenized and cut."""
        for field in dataclasses.fields(self):
            here, there = getattr(self, field.name), getattr(plan, field.name)
            if field.name not in ('complete', 'splits') and here != there:
                yield field.name, here, there


def planned(kind: str, corpus: Corpus, tokenizer: Tokenizer, **layout: Any) -> Index:
    """The index, without splits, of text that is to be written.

    Args:
      kind: data.tokenizer.
      layout: dtype and shard_tokens.
    """
    model = model_of(tokenizer)
    return Index(
        schema=SCHEMA,
        name=corpus.name,
        version=corpus.version,
        carved=dict(corpus.carved),
        tokenizer=_without_directory(kind),
        tokenizer_name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        separator=tokenizer.separator,
        model_sha256=None if model is None else hashlib.sha256(model).hexdigest(),
        complete=False,
        splits={},
        **layout,
    )


def model_of(tokenizer: Tokenizer) -> bytes | None:
    """The vocabulary of a tokenizer that is learned or read from a file."""
    return tokenizer.model() if hasattr(tokenizer, 'model') else None


def _without_directory(kind: str) -> str:
    return kind.rpartition('/')[2] if kind.endswith('.json') else kind


def read_index(files: Files) -> Index:
    """The index of a directory; its splits may be missing.

    Raises:
      DamagedData: there is none, or it contradicts itself or is of another schema.
    """
    where = f'{files.where}/{INDEX}'
    try:
        (content,) = files.read([INDEX])
        record = parse_json(content)
        check(record, {'schema': int, 'dtype': str, 'splits': {}})
        if record['schema'] != SCHEMA:
            raise DamagedData(
                f'{where} has schema {record["schema"]}, but this version of qkattn reads schema '
                f'{SCHEMA}'
            )
        splits = {}
        for split, entry in record['splits'].items():
            check(entry, {'shards': list})
            shards = tuple(read(Shard, s, dtype=record['dtype']) for s in entry['shards'])
            splits[split] = info = read(SplitInfo, entry, shards=shards)
            named = info.document_names is None or len(info.document_names) == info.num_documents
            if not named or sum(shard.num_tokens for shard in shards) != info.num_tokens:
                raise ValueError(f'counts of split {split!r} contradict each other')
        return read(Index, record, splits=splits)
    except ValueError as error:
        raise DamagedData(f'{where} is damaged ({error})') from error


def finished_index(files: Files) -> Index:
    """The index of a directory that has all splits; else ConfigError."""
    files.sizes()  # which names a directory that cannot be read
    try:
        index = read_index(files)
    except DamagedData as error:
        raise ConfigError(f'{error}; copy it again, or prepare the shards elsewhere') from error
    if not index.complete:
        raise ConfigError(
            f'{files.where} is not finished; repeat the command qkattn prepare_data --out='
            f'{files.where}, which goes on'
        )
    return index


def problems(files: Files, index: Index, *, tokens: bool) -> Iterator[str]:
    """Names each shard that is missing or of a wrong size; with `tokens`, of a wrong sha256."""
    sizes = files.sizes()
    for shard in itertools.chain.from_iterable(split.shards for split in index.splits.values()):
        if problem := shard.problem(sizes.get(shard.file), files.where):
            yield problem
        elif tokens and ShardTokens(files, [shard]).sha256() != shard.sha256:
            yield f'{files.where}/{shard.file} is damaged: its sha256 is not that in {INDEX}'


def indexed(files: Files, index: Index, tokenizer: Tokenizer) -> TokenDataset:
    """The dataset in the shards of an index."""
    return TokenDataset(index.name, index.version, tokenizer, files, index.splits, index.carved)


def open_shards(config: DataConfig) -> TokenDataset:
    """Opens the shards at `config.path`: a directory, or `DIRECTORY/PATTERN`, or either as a URL.

    Raises:
      ConfigError: files that are missing, damaged or of an unknown layout; settings that fit
        neither the shards nor their index.
    """
    if config.lowercase:
        raise ConfigError(
            "data.lowercase=True has no effect on data.name='shards'; leave it False."
        )
    path, pattern = config.path.rstrip('/'), '*.bin'
    if re.search(r'[*?[]', path):
        path, _, pattern = path.rpartition('/')
    files = files_at(path or '.')
    sizes = files.sizes()
    if INDEX not in sizes or pattern != '*.bin':
        names = fnmatch.filter(sorted(sizes), pattern)
        return _carved(_without_index(config, files, names, sizes), config)
    index = finished_index(files)
    for problem in problems(files, index, tokens=False):
        raise ConfigError(f'{problem}; copy it again, or repeat the command that made the shards')
    if _without_directory(config.tokenizer) not in (DataConfig.tokenizer, index.tokenizer):
        raise ConfigError(
            f"data.tokenizer={config.tokenizer!r} has no effect on data.name='shards', which were "
            f'made with {index.tokenizer_name}; leave it {DataConfig.tokenizer!r}.'
        )
    model = None
    if index.model_sha256 is not None:
        (model,) = files.read([MODEL])
        if hashlib.sha256(model).hexdigest() != index.model_sha256:
            raise ConfigError(
                f'{files.where}/{MODEL} is damaged: its sha256 is not that in {INDEX}; copy it '
                'again'
            )
    tokenizer = restored(index.tokenizer, model)
    if tokenizer.name != index.tokenizer_name:
        raise ConfigError(
            f'{files.where} was tokenized with {index.tokenizer_name}, but tokenizer='
            f'{index.tokenizer!r} is {tokenizer.name}; restore its source'
        )
    return _carved(indexed(files, index, tokenizer), config)


def _without_index(
    config: DataConfig, files: Files, names: list[str], sizes: Mapping[str, int]
) -> TokenDataset:
    name, files_by_split = _splits_of(config, names)
    heads, splits = dict(zip(names, files.read(names, HEAD), strict=True)), {}
    for split, split_files in files_by_split.items():
        shards = [shard_of(file, sizes[file], heads[file], files.where) for file in split_files]
        num_tokens, digest = sum(shard.num_tokens for shard in shards), hashlib.sha256()
        for shard in shards:
            head = hashlib.sha256(heads[shard.file]).hexdigest()
            digest.update(f'{shard.file} {shard.size} {head}\n'.encode())
        splits[split] = SplitInfo(
            num_tokens=num_tokens, fingerprint=digest.hexdigest(), shards=tuple(shards)
        )
        count = f'{len(shards)} shard{"s" * (len(shards) > 1)}, {num_tokens:,} tokens'
        log.info('%s: %s of %s', name, split, count)
    dtypes = sorted({shard.dtype for info in splits.values() for shard in info.shards})
    if len(dtypes) > 1:
        raise ConfigError(
            f'data.path={config.path!r} holds shards of {" and ".join(dtypes)}, which have '
            'different vocabularies; name those of one with DIRECTORY/PATTERN.'
        )
    tokenizer = _tokenizer(config, dtypes[0])
    log.info('%s has no index: its ids are taken for those of %s', name, tokenizer.name)
    return TokenDataset(name, 'bin', tokenizer, files, splits)


def _splits_of(config: DataConfig, names: list[str]) -> tuple[str, dict[str, list[str]]]:
    """The name of the set, and its files by split, in the order of their names."""
    files: dict[str, list[str]] = {}
    numbers: dict[str, set[int]] = {}
    prefixes = set()
    for file in names:
        if match := NAMED.fullmatch(file):
            prefixes.add(match[1] or '')
            split = ALIASES.get(match[2], match[2])
            files.setdefault(split, []).append(file)
            numbers.setdefault(split, set()).add(int(match[3] or 0))
    if 'train' not in files:
        raise ConfigError(
            f'data.path={config.path!r} holds no train shards; their names have to be like '
            f'train.bin, fineweb_train_000001.bin or fineweb_val_000000.bin'
            f'{", not " + names[0] if names else ""}.'
        )
    if len(prefixes) > 1:
        raise ConfigError(
            f'data.path={config.path!r} holds shards of {" and ".join(sorted(map(repr, prefixes)))}'
            '; name those of one set with DIRECTORY/PATTERN.'
        )
    for split, present in numbers.items():
        if absent := sorted(set(range(min(present), max(present))) - present):
            text = ', '.join(map(str, absent[:5])) + ', ...' * (len(absent) > 5)
            log.warning('%s: %s has no shards with the numbers %s', config.path, split, text)
    directory = re.sub(r'[^\w.-]', '-', config.path.rstrip('/').rsplit('/', 2)[-1])
    return prefixes.pop() or directory, {split: files[split] for split in SPLITS if split in files}


def _tokenizer(config: DataConfig, dtype: str) -> Tokenizer:
    if config.tokenizer == DataConfig.tokenizer:
        return restored(VOCABULARIES[dtype], None)
    if config.tokenizer.endswith('.json'):
        return FileTokenizer.of_shards(config.tokenizer)
    if config.tokenizer.partition('(')[0] == 'ids' or ':' in config.tokenizer:
        return restored(config.tokenizer, None)
    raise ConfigError(
        f'data.tokenizer={config.tokenizer!r} cannot be that of shards without an index; set '
        "'ids(vocab_size=N, separator=ID)' or the tokenizer.json that they were made with."
    )


def _carved(dataset: TokenDataset, config: DataConfig) -> TokenDataset:
    """The dataset with the splits that a corpus would have carved, from the end of train.

    Raises:
      ConfigError: train is too short.
    """
    missing = [split for split in ('validation', 'test') if split not in dataset.splits]
    if not missing or (missing == ['test'] and not config.carve_test):
        return dataset
    tokens, info = dataset.split('train'), dataset.info('train')
    shares = 1 - SHARE * np.arange(len(missing), -1, -1)
    bounds = [0, *(_document_end(dataset, round(share * len(tokens))) for share in shares)]
    splits = {split: dataset.info(split) for split in dataset.splits}
    for split, low, high in zip(('train', *missing), bounds[:-1], bounds[1:], strict=True):
        if low >= high:
            raise ConfigError(
                f'data.path={config.path!r} has no {missing[0]} shards, and too few tokens in '
                f'train, {len(tokens):,}, to carve one from; give it one.'
            )
        digest = hashlib.sha256(f'{info.fingerprint} {low} {high}'.encode()).hexdigest()
        shards = tokens.part(low, high)
        splits[split] = SplitInfo(num_tokens=high - low, fingerprint=digest, shards=shards)
        if split != 'train':
            share = 100 * SHARE
            log.info('%s has no %s split: %.0f %% of train are carved', dataset.name, split, share)
    return TokenDataset(
        dataset.name,
        '-'.join((dataset.version, 'carved', *missing)),
        dataset.tokenizer,
        dataset.files,
        {split: splits[split] for split in SPLITS if split in splits},
        {**dataset.carved, **dict.fromkeys(missing, SHARE)},
    )


def _document_end(dataset: TokenDataset, position: int) -> int:
    """The first end of a document at or behind `position`, or `position` if that is far."""
    tokens, before = dataset.split('train'), max(position - 1, 0)
    near = tokens.windows(np.array([before]), min(REACH, len(tokens) - before))[0]
    separators = np.flatnonzero(near == dataset.tokenizer.separator)
    return before + int(separators[0]) + 1 if separators.size else position
