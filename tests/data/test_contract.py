"""What every dataset, tokenizer and task keeps, registered or from outside.

`--dataset=module:function`, `--tokenizer=module:Class` and `--task=module:Class` name one.
"""

import contextlib
import dataclasses
import json

import numpy as np
import pytest

from qkattn.config import Config, DataConfig, ModelConfig
from qkattn.data.corpora.corpus_registry import find
from qkattn.data.load import load_text, tokenizer_of
from qkattn.data.tasks.rows import Rows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.data.tokenizers.vocabulary import KINDS
from qkattn.errors import ConfigError
from qkattn.metrics import PREFIXES, result_fields, with_outside
from tests.data.datasets import documents, read_rows
from tests.fixtures import chosen
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures('outside')


def pytest_generate_tests(metafunc):
    chosen(metafunc, 'dataset', ['fables:fables', 'fables:fables(count=30)'])
    kinds = [kind for kind in KINDS if kind not in ('PATH.json', 'tiktoken:NAME')]
    chosen(metafunc, 'tokenizer', [*kinds, 'nibbles:Nibbles', 'nibbles:Nibbles(high_first=False)'])
    chosen(metafunc, 'task', ['language', 'masked', 'ahead:Ahead', 'ahead:Ahead(distance=3)'])


@pytest.fixture
def data(tmp_path):
    return DataConfig(name='fables:fables', data_dir=str(tmp_path / 'cache'))


def test_a_dataset_gives_the_same_documents_each_time(dataset, data):
    corpus = find(dataclasses.replace(data, name=dataset))
    assert corpus.splits[:2] == ('train', 'validation')
    sizes = []
    for language in corpus.languages or (None,):
        first = documents(corpus, language)
        assert documents(corpus, language) == first
        for text in sum(first.values(), []):
            assert isinstance(text, bytes)
            assert text.decode() is not None
        sizes.append({split: len(first[split]) for split in corpus.splits})
    # The sides of parallel text have as many lines each.
    assert all(counts == sizes[0] for counts in sizes)
    assert all(sizes[0].values())
    if corpus.names:
        assert all(len(set(corpus.names(s))) == count for s, count in sizes[0].items())


def test_a_tokenizer_counts_the_bytes_of_what_it_encodes(tokenizer, data):
    size = {'tokenizer_size': 260} if tokenizer == 'bpe' else {}
    named = dataclasses.replace(data, tokenizer=tokenizer, **size)
    first = tokenizer_of(named)
    again = tokenizer_of(named)
    assert first.name == again.name
    assert first.vocab_size > first.separator >= 0

    # Equal text, as str or bytes and in either object, has equal ids, none of them the separator.
    for text in ('', 'a line\nand another', 'naïve \N{SNOWMAN} 🤝\t', 'x' * 300):
        ids = first.encode(text)
        assert ids.ndim == 1
        assert ids.dtype.kind == 'u'
        for same in (first.encode(text.encode()), again.encode(text)):
            assert np.array_equal(ids, same)
        assert np.all(ids < first.vocab_size)
        assert first.separator not in ids
        assert first.num_bytes(ids) <= len(text.encode())
        with_end = np.append(ids, [first.separator])
        assert first.num_bytes(with_end) == first.num_bytes(ids) + 1

    # A document of the corpus is decoded to itself.
    text = next(iter(find(data).documents(None)['train']))
    assert first.num_bytes(first.encode(text)) == len(text)
    assert first.decode(first.encode(text)).encode() == text


def config_and_rows(task: str, data: DataConfig) -> tuple[Config, Rows]:
    """A config of the kind of model that the task trains, and its rows."""
    for kind in ('decoder', 'encoder'):
        model = ModelConfig(kind=kind, context=12, vocab_size=300)
        config = Config(model=model, data=dataclasses.replace(data, task=task))
        with contextlib.suppress(ConfigError):
            return config, rows_of(config)
    raise AssertionError(f'{task} trains neither a decoder nor an encoder on text')


def test_a_task_reads_rows_of_the_stated_shape_that_depend_on_their_draws_alone(task, data):
    config, rows = config_and_rows(task, data)
    for split in rows.splits:
        # The first row, the last row, and the first again.
        count = rows.count(split)
        numbers_B = [0, count - 1, 0]
        batch = read_rows(rows, split, numbers_B)
        again = read_rows(rows, split, numbers_B)

        # Shapes and dtypes are those stated, a row without its batch dimension.
        shapes = {name: (array.shape[1], array.dtype) for name, array in batch.items()}
        assert shapes == rows.array_shapes(config.model)

        # Rows are the same when read again, or read as a part of the batch.
        for name, array in batch.items():
            np.testing.assert_array_equal(array, again[name])
            row = read_rows(rows, split, [count - 1], first_place=1)
            np.testing.assert_array_equal(array[1:2], row[name])

        # Every row has targets, ids are within the vocabulary, and rows know their documents.
        assert np.all(batch['loss_weights_BT'].sum(axis=1) > 0)
        ids = np.stack([batch['tokens_BT'], batch['targets_BT']])
        assert np.all((ids >= 0) & (ids < rows.vocab_size))
        if rows.documents(split) is not None:
            names, document_R = rows.documents(split)
            assert len(document_R) == count
            assert np.all(document_R < len(names))
    json.dumps(rows.identity())


class TwoTrainedTrials:
    """Two trained trials: the first is never right, the second always."""

    def __init__(self, config: Config):
        self.config = config

    def sums(self, read):
        weights_RT = np.concatenate(
            [batch['loss_weights_BT'] for batch in read(batch_size=8, part=None)]
        )
        weight_R = weights_RT.sum(axis=1)
        nothing_R = np.zeros_like(weight_R)
        return {
            'loss': np.stack([5 * weight_R, nothing_R], axis=1),
            'accuracy': np.stack([nothing_R, weight_R], axis=1),
            'weight': np.stack([weight_R, weight_R], axis=1),
        }


def test_a_task_measures_declared_metrics_of_every_trial_when_training_ends(task, data):
    config, rows = config_and_rows(task, data)
    measured = rows.end_metrics(TwoTrainedTrials(config), np.array([True, True]))
    assert measured.keys() <= result_fields(with_outside(rows.metrics)).keys()
    assert all(len(values) == 2 for values in measured.values())
    if task.startswith('ahead'):
        assert measured['val_nearer'].tolist() == [0, 1]


def test_a_task_says_what_to_beat_on_every_evaluated_split(task, data):
    config, rows = config_and_rows(task, data)
    yardsticks = rows.yardsticks(config)
    assert yardsticks.losses.keys() == {PREFIXES[split] for split in rows.splits[1:]}
    for losses in yardsticks.losses.values():
        assert losses
        assert all(loss > 0 for loss in losses.values())
    if task.startswith('ahead'):
        assert yardsticks.losses['val'] == {'frequencies': rows.unigram_nats('validation')}


MISREAD = """
from qkattn.data.tasks.language import LanguageRows
class Opened(LanguageRows):
    @classmethod
    def open(cls): pass
class Short(LanguageRows):
    def read(self, split, rows_B, draws_B2):
        batch = super().read(split, rows_B, draws_B2)
        return batch | {'targets_BT': batch['targets_BT'][:, :15]}
"""


def test_an_object_of_the_wrong_kind_is_refused_in_one_sentence(data, outside):
    # Modules whose corpus is a list, has documents of str, or has a split of an unknown name.
    (outside / 'listed.py').write_text("def listed(config):\n    return ['a']\n")
    fables = (outside / 'fables.py').read_text()
    (outside / 'strings.py').write_text(fables.replace('.encode()', ''))
    (outside / 'valid.py').write_text(fables.replace("('train',)", "('train', 'valid')"))
    (outside / 'lacking.py').write_text(fables.replace("('train',)", "('train', 'test')"))
    (outside / 'argued.py').write_text(fables.replace('lambda _:', 'lambda:'))
    (outside / 'misread.py').write_text(MISREAD)

    # Settings of the data, and what the refusal says.
    for fields, says in (
        ({'name': 'recal(pairs=2)'}, "unknown data.name 'recal', did you mean 'recall'"),
        ({'name': 'fables:none'}, "data.name='fables:none': fables has no 'none'"),
        ({'name': 'fables:fables(count="a")'}, 'fails, TypeError in .*fables.py, line 6: '),
        ({'name': 'listed:listed'}, r"'listed:listed' must return a Corpus, not \['a'\]"),
        ({'name': 'strings:fables'}, "'strings:fables': a document must be bytes, not 'The 0th"),
        ({'name': 'valid:fables'}, "split 'valid' is none of train, validation, test"),
        ({'name': 'lacking:fables'}, "splits names 'test', but documents has only train"),
        ({'name': 'argued:fables'}, "'argued:fables' fails, TypeError in .*takes 0 positional"),
        ({'tokenizer': 'fables:fables'}, "='fables:fables' is not a class with encode, decode"),
        ({'task': 'nibbles:Nibbles'}, "data.task='nibbles:Nibbles' is not a class with the attr"),
        ({'task': 'causal_probe'}, 'causal probe, but .* is text in one language'),
        ({'task': 'misread:Opened'}, "data.task='misread:Opened' fails, TypeError in .*open"),
        (
            {'task': 'misread:Short'},
            r"read of data.task='misread:Short' gives .*targets_BT \(1, 15",
        ),
    ):
        with refused(says):
            rows_of(Config(data=dataclasses.replace(data, **fields)))
    with refused("languages='en-de', but 'fables:fables' returns text in one language"):
        find(dataclasses.replace(data, languages='en-de'))


def test_a_changed_source_or_option_has_another_identity(outside, data):
    data = dataclasses.replace(data, tokenizer='nibbles:Nibbles')
    before = load_text(data).identity()
    other = dataclasses.replace(data, tokenizer='nibbles:Nibbles(high_first=False)')
    assert load_text(other).identity()['tokenizer'] != before['tokenizer']
    for module in ('nibbles', 'fables'):
        path = outside / f'{module}.py'
        path.write_text(path.read_text() + '\n# edited\n')
    after = load_text(data).identity()
    assert after['version'] != before['version']
    assert after['tokenizer'] != before['tokenizer']
    assert after['fingerprints'] == before['fingerprints']
