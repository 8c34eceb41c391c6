"""The rules for every dataset, tokenizer and task, registered or from outside.

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
    """Runs each test on these objects, unless the command line names others."""
    # These two kinds need a file or a download.
    kinds = [kind for kind in KINDS if kind not in ('PATH.json', 'tiktoken:NAME')]
    chosen(metafunc, 'dataset', ['fables:fables', 'fables:fables(count=30)'])
    chosen(metafunc, 'tokenizer', [*kinds, 'nibbles:Nibbles', 'nibbles:Nibbles(high_first=False)'])
    chosen(metafunc, 'task', ['language', 'masked', 'ahead:Ahead', 'ahead:Ahead(distance=3)'])


@pytest.fixture
def data(tmp_path):
    return DataConfig(name='fables:fables', data_dir=str(tmp_path / 'cache'))


def test_a_dataset_gives_the_same_documents_each_time(dataset, data):
    """`dataset` is a value of the setting data.name, such as 'fables:fables'.

    'fables:fables' is the function fables of the module fables, which returns a corpus.
    """
    corpus = find(dataclasses.replace(data, name=dataset))

    # If a corpus has no validation split, `find` carves it from train.
    assert corpus.splits[:2] == ('train', 'validation')
    # A corpus that is not a translation is read with the language None.
    for language in corpus.languages or (None,):
        texts_by_split = documents(corpus, language)
        assert documents(corpus, language) == texts_by_split
        for texts in texts_by_split.values():
            for text in texts:
                assert isinstance(text, bytes)
                text.decode()  # fails if the text is not UTF-8


def test_the_splits_of_a_dataset_hold_documents_in_every_language(dataset, data):
    """Every split of a corpus has documents, and the same number in each language.

    `dataset` is a value of the setting data.name, such as 'fables:fables'.
    """
    corpus = find(dataclasses.replace(data, name=dataset))

    # A corpus that is not a translation is read with the language None.
    counts_by_language = []
    for language in corpus.languages or (None,):
        texts_by_split = documents(corpus, language)
        counts_by_language.append({split: len(texts_by_split[split]) for split in corpus.splits})

    first_counts = counts_by_language[0]
    for counts in counts_by_language:
        assert counts == first_counts

    for split, count in first_counts.items():
        assert count > 0
        # If documents have names, each has its own.
        if corpus.names:
            assert len(set(corpus.names(split))) == count


def open_on_fables(tokenizer, data):
    """Opens a tokenizer by its name. A learned tokenizer learns from the corpus fables."""
    size = {'tokenizer_size': 260} if tokenizer == 'bpe' else {}
    return tokenizer_of(dataclasses.replace(data, tokenizer=tokenizer, **size))


def test_a_tokenizer_counts_the_bytes_of_what_it_encodes(tokenizer, data):
    """A tokenizer turns a text into ids below `vocab_size`, none of which is the separator.

    `tokenizer` is a value of the setting data.tokenizer, such as 'bytes' or 'nibbles:Nibbles'.
    """
    opened = open_on_fables(tokenizer, data)
    assert opened.separator >= 0
    assert opened.separator < opened.vocab_size

    for text in ('', 'a line\nand another', 'naïve \N{SNOWMAN} 🤝\t', 'x' * 300):
        ids = opened.encode(text)
        assert ids.ndim == 1
        assert ids.dtype.kind == 'u'  # unsigned integers
        assert np.all(ids < opened.vocab_size)
        assert opened.separator not in ids

        # The ids count as many bytes as the text has, or as fewer: a character that is not in the
        # vocabulary may count as fewer bytes than it has.
        num_bytes = opened.num_bytes(ids)
        assert num_bytes <= len(text.encode())

        # A separator counts as one byte.
        ids_and_separator = np.append(ids, [opened.separator])
        assert opened.num_bytes(ids_and_separator) == num_bytes + 1

        # Encoding the text as bytes gives the same ids.
        assert np.array_equal(opened.encode(text.encode()), ids)


def test_a_tokenizer_that_is_opened_again_gives_the_same_ids(tokenizer, data):
    first = open_on_fables(tokenizer, data)
    second = open_on_fables(tokenizer, data)

    assert first.name == second.name
    for text in ('', 'a line\nand another', 'naïve \N{SNOWMAN} 🤝\t', 'x' * 300):
        assert np.array_equal(second.encode(text), first.encode(text))


def test_a_tokenizer_decodes_a_document_of_its_corpus(tokenizer, data):
    opened = open_on_fables(tokenizer, data)

    # Every character of the corpus is in the vocabulary, so nothing is lost.
    training_documents = find(data).documents(None)['train']
    document = next(iter(training_documents))
    ids = opened.encode(document)
    assert opened.num_bytes(ids) == len(document)
    assert opened.decode(ids).encode() == document


def config_and_rows(task: str, data: DataConfig) -> tuple[Config, Rows]:
    """The config of a decoder or encoder, whichever the task trains, and the rows of the task."""
    for kind in ('decoder', 'encoder'):
        model = ModelConfig(kind=kind, context=12, vocab_size=300)
        config = Config(model=model, data=dataclasses.replace(data, task=task))
        with contextlib.suppress(ConfigError):  # the task trains the other kind
            return config, rows_of(config)
    raise AssertionError(f'{task} trains neither a decoder nor an encoder on text')


def test_a_task_reads_rows_of_the_stated_shape(task, data):
    """A task cuts a text into rows of one length and says what is predicted in them.

    `task` is a value of the setting data.task, such as 'language' or 'ahead:Ahead'.
    """
    config, rows = config_and_rows(task, data)

    for split in rows.splits:
        last = rows.count(split) - 1
        batch = read_rows(rows, split, [0, last, 0])

        # `array_shapes` has (length, dtype) of one row of each array.
        shapes = {}
        for name, array_BT in batch.items():
            _, length = array_BT.shape
            shapes[name] = (length, array_BT.dtype)
        assert shapes == rows.array_shapes(config.model)

        # Every row has targets, and all ids are within the vocabulary.
        assert np.all(batch['loss_weights_BT'].sum(axis=1) > 0)
        for ids in (batch['tokens_BT'], batch['targets_BT']):
            assert np.all(ids >= 0)
            assert np.all(ids < rows.vocab_size)


def test_a_row_of_a_task_is_the_same_in_every_batch(task, data):
    """A row of a task depends only on its split, its number and its random seed.

    Masks of tokens, for example, are drawn from the seed.
    """
    _, rows = config_and_rows(task, data)

    for split in rows.splits:
        last = rows.count(split) - 1
        batch = read_rows(rows, split, [0, last, 0])
        again = read_rows(rows, split, [0, last, 0])
        # The last row is at place 1 of the batch. Read it by itself with the seed of place 1.
        alone = read_rows(rows, split, [last], first_place=1)
        for name, array in batch.items():
            np.testing.assert_array_equal(array, again[name])
            np.testing.assert_array_equal(array[1:2], alone[name])


def test_a_task_names_the_document_of_each_row(task, data):
    _, rows = config_and_rows(task, data)

    for split in rows.splits:
        documents_of_split = rows.documents(split)
        if documents_of_split is not None:
            names, document_R = documents_of_split
            assert len(document_R) == rows.count(split)
            assert np.all(document_R < len(names))


def test_the_identity_of_a_task_is_json(task, data):
    _, rows = config_and_rows(task, data)
    json.dumps(rows.identity())


class TwoTrainedTrials:
    """Two trained trials: the first is never right, the second always."""

    def __init__(self, config: Config):
        self.config = config

    def sums(self, read):
        """Sums over the targets of each row, arrays [rows, trials].

        In the first trial, each target has loss 5 and accuracy 0. In the second trial, it has loss
        0 and accuracy 1. `read` returns the batches of rows.
        """
        batches = read(batch_size=8, part=None)
        weights_RT = np.concatenate([batch['loss_weights_BT'] for batch in batches])
        num_targets_R = weights_RT.sum(axis=1)
        nothing_R = np.zeros_like(num_targets_R)
        return {
            'loss': np.stack([5 * num_targets_R, nothing_R], axis=1),
            'accuracy': np.stack([nothing_R, num_targets_R], axis=1),
            'weight': np.stack([num_targets_R, num_targets_R], axis=1),
        }


def test_a_task_measures_declared_metrics_of_every_trial(task, data):
    """When training ends, a task may measure further metrics of the trained trials.

    Each has to be a metric of the package or one that the task declares.
    """
    config, rows = config_and_rows(task, data)
    both_finished = np.array([True, True])

    measured = rows.end_metrics(TwoTrainedTrials(config), both_finished)

    declared_fields = result_fields(with_outside(rows.metrics))
    assert measured.keys() <= declared_fields.keys()
    for values in measured.values():
        num_trials = len(values)
        assert num_trials == 2

    # The task ahead:Ahead measures how often a trial predicts the next token. The first trial never
    # does, and the second always does.
    if task.startswith('ahead'):
        assert measured['val_nearer'].tolist() == [0, 1]


def test_a_task_says_what_to_beat_on_every_evaluated_split(task, data):
    """A yardstick is the loss of a simple model of counts. Trained models should have less."""
    config, rows = config_and_rows(task, data)

    yardsticks = rows.yardsticks(config)

    # Results call the splits 'val' and 'test'.
    evaluated_splits = rows.splits[1:]  # the first one is 'train'
    assert yardsticks.losses.keys() == {PREFIXES[split] for split in evaluated_splits}

    # Each split has at least one yardstick.
    for losses in yardsticks.losses.values():
        assert losses
        for loss in losses.values():
            assert loss > 0

    # The task ahead:Ahead has only one yardstick, a guess by the frequencies of tokens.
    if task.startswith('ahead'):
        assert yardsticks.losses['val'] == {'frequencies': rows.unigram_nats('validation')}


# Tasks that break the interface: `Opened` takes no config, `Short` cuts its targets, `Shifted` has
# ids outside of the vocabulary, and `Halved` ids that are not whole. `Renamed` has a split of
# another name. `Unweighted` predicts nothing, and `Negative` has loss weights below 0.
MISREAD = """
from qkattn.data.tasks.language import LanguageRows
class Opened(LanguageRows):
    @classmethod
    def open(cls): pass
class Short(LanguageRows):
    def read(self, split, rows_B, draws_B2):
        batch = super().read(split, rows_B, draws_B2)
        return batch | {'targets_BT': batch['targets_BT'][:, :15]}


class Shifted(LanguageRows):
    def read(self, split, rows_B, draws_B2):
        batch = super().read(split, rows_B, draws_B2)
        return batch | {'tokens_BT': batch['tokens_BT'] + 256}
class Halved(LanguageRows):
    def read(self, split, rows_B, draws_B2):
        batch = super().read(split, rows_B, draws_B2)
        return batch | {'targets_BT': batch['targets_BT'] / 2}
class Renamed(LanguageRows):
    @property
    def splits(self): return ('train', 'valid')
    @splits.setter
    def splits(self, names): pass
    def count(self, split): return 1
class Unweighted(LanguageRows):
    def read(self, split, rows_B, draws_B2):
        batch = super().read(split, rows_B, draws_B2)
        return batch | {'loss_weights_BT': 0 * batch['loss_weights_BT']}
class Negative(LanguageRows):
    def read(self, split, rows_B, draws_B2):
        batch = super().read(split, rows_B, draws_B2)
        return batch | {'loss_weights_BT': -batch['loss_weights_BT']}
"""


# Probes that break the interface: `Unfinished` lacks its methods, `Paired` gives two arrays,
# `Longer` has more targets than tokens, and the separator of `Outside` is not in its vocabulary.
# `Halves` has ids that are not whole, and `Targetless` predicts nothing.
MISMADE = """
from qkattn.data.tasks.probe_tasks import Probe, Sizes
from sorting import Sorting
class Unfinished(Probe): pass
class Paired(Sorting):
    def make(self, u_BU):
        return super().make(u_BU)[:2]
class Longer(Sorting):
    def make(self, u_BU):
        tokens_BT, targets_BT, weights_BT = super().make(u_BU)
        return tokens_BT, targets_BT.repeat(2, axis=1), weights_BT
class Outside(Sorting):
    sizes = Sizes(vocabulary=10, answers=10, draws=64)
class Halves(Sorting):
    def make(self, u_BU):
        tokens_BT, targets_BT, weights_BT = super().make(u_BU)
        return tokens_BT / 2, targets_BT, weights_BT
class Targetless(Sorting):
    def make(self, u_BU):
        tokens_BT, targets_BT, weights_BT = super().make(u_BU)
        return tokens_BT, targets_BT, 0 * weights_BT
"""


@pytest.fixture
def wrong_modules(outside):
    """Modules on the path whose corpora and tasks break the interface, each in one way.

    Most are the valid module fables with a piece of its source replaced.
    """
    fables = (outside / 'fables.py').read_text()
    sources = {
        # The function returns a list instead of a corpus.
        'listed': "def listed(config):\n    return ['a']\n",
        # Documents are str instead of bytes.
        'strings': fables.replace('.encode()', ''),
        # A split has an unknown name.
        'valid': fables.replace("('train',)", "('train', 'valid')"),
        # A split has no documents.
        'lacking': fables.replace("('train',)", "('train', 'test')"),
        # The function of the documents returns the same generator in each call, or for each split.
        'spent': fables.replace('texts = [', 'texts = (').replace(']\n', ')\n'),
        'shared': fables.replace("('train',)", "('train', 'validation')").replace(
            "{'train': texts}", "dict.fromkeys(('train', 'validation'), iter(texts))"
        ),
        # The function of the documents returns no dict, or an empty one.
        'undivided': fables.replace("{'train': texts}", 'texts'),
        'empty': fables.replace("{'train': texts}", '{}'),
        # The names of the splits are a generator.
        'generated': fables.replace("('train',)", "(name for name in ['train'])"),
        # The function of the documents does not take a language.
        'argued': fables.replace('lambda _:', 'lambda:'),
        # The file of the corpus is not named, so pathlib fails.
        'pathless': 'from pathlib import Path\ndef read(config):\n    Path(config.path)\n',
        # The classes of tasks and probes are wrong.
        'misread': MISREAD,
        'mismade': MISMADE,
    }
    for name, source in sources.items():
        (outside / f'{name}.py').write_text(source)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        pytest.param(
            {'name': 'recal(pairs=2)'},
            "unknown data.name 'recal', did you mean 'recall'",
            id='misspelt probe',
        ),
        pytest.param(
            {'name': 'fables:none'},
            "data.name='fables:none': fables has no 'none'",
            id='missing function',
        ),
        pytest.param(
            {'name': 'fables:fables(count="a")'},
            'fails, TypeError in .*fables.py, line 6: ',
            id='wrong type of an option',
        ),
        pytest.param(
            {'name': 'listed:listed'},
            r"'listed:listed' must return a Corpus, not \['a'\]",
            id='a list for a corpus',
        ),
        pytest.param(
            {'name': 'strings:fables'},
            "'strings:fables': a document must be bytes, not 'The 0th",
            id='documents of str',
        ),
        pytest.param(
            {'name': 'valid:fables'},
            "split 'valid' is none of train, validation, test",
            id='unknown split',
        ),
        pytest.param(
            {'name': 'lacking:fables'},
            "splits names 'test', but documents has only train",
            id='split without documents',
        ),
        pytest.param(
            {'name': 'spent:fables'},
            "'spent:fables': split 'train' has no document; .* it was used up before: make a fresh",
            id='a generator in each call',
        ),
        pytest.param(
            {'name': 'shared:fables'},
            "'shared:fables': split 'validation' has no document; .* it was used up before",
            id='a generator for each split',
        ),
        pytest.param(
            {'name': 'undivided:fables'},
            "'undivided:fables': documents must return a dict of documents by split, not ",
            id='documents without splits',
        ),
        pytest.param(
            {'name': 'empty:fables'},
            "'empty:fables': splits names 'train', but documents has no split",
            id='no documents',
        ),
        pytest.param(
            {'name': 'generated:fables'},
            "'generated:fables': splits must be a tuple, not <generator",
            id='a generator of splits',
        ),
        pytest.param(
            {'name': 'argued:fables'},
            "'argued:fables' fails, TypeError in .*takes 0 positional",
            id='documents takes no language',
        ),
        pytest.param(
            {'tokenizer': 'fables:fables'},
            "='fables:fables' is not a class with encode, decode",
            id='a function for a tokenizer',
        ),
        pytest.param(
            {'task': 'nibbles:Nibbles'},
            "data.task='nibbles:Nibbles' is not a class with the attributes of .*Rows: kind, data,",
            id='a tokenizer for a task',
        ),
        pytest.param(
            {'task': 'causal_probe'},
            'causal probe, but .* is text in one language',
            id='a probe on text',
        ),
        pytest.param(
            {'task': 'ahead:Ahead', 'cross_documents': False},
            "data.cross_documents=False has no effect on data.task='ahead:Ahead', whose rows have",
            id='a task without segments',
        ),
        pytest.param(
            {'task': 'misread:Opened'},
            "data.task='misread:Opened' fails, TypeError in .*open",
            id='open takes no config',
        ),
        pytest.param(
            {'task': 'misread:Short'},
            r"read of data.task='misread:Short' gives .*targets_BT \(1, 15",
            id='arrays of another shape',
        ),
        pytest.param(
            {'task': 'misread:Shifted'},
            "tokens_BT of data.task='misread:Shifted' holds ids .* in split 'train'; they must be "
            'at least 0 and below vocab_size=256',
            id='ids outside of the vocabulary',
        ),
        pytest.param(
            {'task': 'misread:Halved'},
            "targets_BT of data.task='misread:Halved' holds float64; it must be of an integer type",
            id='ids that are not whole',
        ),
        pytest.param(
            {'task': 'misread:Renamed'},
            r"splits=\('train', 'valid'\) of data.task='misread:Renamed' must be one of \('train'",
            id='a split of another name',
        ),
        pytest.param(
            {'task': 'misread:Unweighted'},
            "loss_weights_BT of data.task='misread:Unweighted' are 0 in .* rows of split 'train', "
            'so nothing is predicted',
            id='rows without targets',
        ),
        pytest.param(
            {'task': 'misread:Negative'},
            "loss_weights_BT of data.task='misread:Negative' are from -1.0 to .* in split 'train'; "
            'they must be finite and at least 0',
            id='negative loss weights',
        ),
        pytest.param(
            {'name': 'pathless:read'},
            "data.name='pathless:read' fails, TypeError in .*pathless.py, line 3: expected str",
            id='failure in the standard library',
        ),
        pytest.param(
            {'name': 'mismade:Unfinished'},
            "data.name='mismade:Unfinished' fails, TypeError in .*abstract",
            id='probe without its methods',
        ),
        pytest.param(
            {'name': 'mismade:Paired(length=64)'},
            r"data.name='mismade:Paired\(length=64\)' fails, ValueError in .*expected 3, got 2",
            id='probe of two arrays',
        ),
        pytest.param(
            {'name': 'mismade:Longer(length=64)'},
            r"data.name='mismade:Longer\(length=64\)' gives .*targets_BT \(1, 256\)",
            id='arrays of a probe of another shape',
        ),
        pytest.param(
            {'name': 'mismade:Outside(length=64)'},
            r"tokens_BT of data.name='mismade:Outside\(length=64\)' holds ids from 0 to 10 in "
            "split 'train'; they must be at least 0 and below vocab_size=10",
            id='ids of a probe outside of the vocabulary',
        ),
        pytest.param(
            {'name': 'mismade:Halves(length=64)'},
            r"data.name='mismade:Halves\(length=64\)' fails, TypeError in .*: tokens_BT holds "
            'float64; it must be of an integer type',
            id='ids of a probe that are not whole',
        ),
        pytest.param(
            {'name': 'mismade:Targetless(length=64)'},
            r"loss_weights_BT of data.name='mismade:Targetless\(length=64\)' are 0 in .* rows",
            id='rows of a probe without targets',
        ),
    ],
)
def test_an_object_of_the_wrong_kind_is_refused(data, wrong_modules, fields, message):
    """A function or class that a setting names is checked before it is used.

    fables:fables is a valid corpus, and nibbles:Nibbles a valid tokenizer. `wrong_modules` writes
    the other modules.
    """
    with refused(message):
        rows_of(Config(data=dataclasses.replace(data, **fields)))


def test_a_corpus_may_name_its_splits_in_any_order(data, outside):
    fables = (outside / 'fables.py').read_text()
    source = fables.replace("('train',)", "('test', 'validation', 'train')")
    all_splits = "{'train': texts, 'validation': texts, 'test': texts}"
    source = source.replace("{'train': texts}", all_splits)
    (outside / 'reversed_fables.py').write_text(source)

    rows = rows_of(Config(data=dataclasses.replace(data, name='reversed_fables:fables')))

    # The splits after the first are evaluated, and train is not.
    assert rows.splits == ('train', 'validation', 'test')


def test_languages_of_a_corpus_in_one_language_are_refused(data):
    with refused("languages='en-de', but 'fables:fables' returns text in one language"):
        find(dataclasses.replace(data, languages='en-de'))


def test_an_option_changes_the_identity_of_a_tokenizer(data):
    default = dataclasses.replace(data, tokenizer='nibbles:Nibbles')
    changed = dataclasses.replace(data, tokenizer='nibbles:Nibbles(high_first=False)')

    default_identity = load_text(default).identity()
    changed_identity = load_text(changed).identity()

    assert changed_identity['tokenizer'] != default_identity['tokenizer']


def test_an_edited_module_changes_the_identity_of_the_data(outside, data):
    """The identity of the data has hashes of the source code that makes the tokens.

    Here it is the code of two modules: fables defines the corpus, and nibbles the tokenizer.
    """
    data = dataclasses.replace(data, tokenizer='nibbles:Nibbles')
    before = load_text(data).identity()

    for module in ('nibbles', 'fables'):
        path = outside / f'{module}.py'
        path.write_text(path.read_text() + '\n# edited\n')
    after = load_text(data).identity()

    assert after['version'] != before['version']  # of the corpus
    assert after['tokenizer'] != before['tokenizer']
    # Fingerprints are hashes of the tokens, which a comment does not change.
    assert after['fingerprints'] == before['fingerprints']
