"""Further corpora of an evaluation: what data.evaluate names, in the ids of the run."""

import dataclasses

import numpy as np
import pytest

from qkattn.config import Config, DataConfig, ModelConfig
from qkattn.data.cache import NotPrepared, nothing_prepared
from qkattn.data.evaluation_corpora import entries, identity_with, open_corpora
from qkattn.data.load import load_text, prepare
from qkattn.data.pipeline import eval_batches
from qkattn.data.tasks.task_registry import rows_of
from tests.data.datasets import register, write_texts
from tests.data.test_token_files import write_vocabulary
from tests.data.test_token_formats import ids_of_documents, write_nanogpt
from tests.refusals import refused


@pytest.fixture
def texts(tmp_path):
    """The directory of texts that `write_texts` writes."""
    return write_texts(tmp_path / 'texts')


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    """A function config_of(*evaluate, model=None, **data), which returns the config of a run.

    The run is evaluated on the corpora `evaluate`, such as 'stdlib@test'. `model` and `data` are
    other settings. By default, the run trains a decoder on 'lines', a corpus of 200 numbered lines.
    A row has 16 tokens.
    """
    lines = [f'line {number} of the corpus\n'.encode() for number in range(200)]
    split_texts = {'train': lines[:120], 'validation': lines[120:160], 'test': lines[160:]}
    register(monkeypatch, 'lines', split_texts)

    def make(*evaluate, model=None, **data):
        model_fields = {'context': 16} | (model or {})
        data_fields = {'name': 'lines', 'data_dir': str(tmp_path / 'cache'), 'evaluate': evaluate}
        data_fields |= data
        return Config(model=ModelConfig(**model_fields), data=DataConfig(**data_fields))

    return make


def corpus_of(config):
    """Opens the only corpus of data.evaluate."""
    corpora = open_corpora(config, rows_of(config))
    assert len(corpora) == 1
    return corpora[0]


def tokens_of(corpus):
    """The ids that an evaluation on a corpus predicts, in order."""
    batches = eval_batches(corpus.rows, corpus.split, batch_size=1)
    return np.concatenate([batch['targets_BT'][0] for batch in batches])


@pytest.mark.parametrize(
    ('text', 'fields', 'split'),
    [
        pytest.param('stdlib', {'name': 'stdlib'}, 'validation', id='name'),
        pytest.param('stdlib@test', {'name': 'stdlib'}, 'test', id='split'),
        pytest.param(
            'text:/a/b.txt@train', {'name': 'text', 'path': '/a/b.txt'}, 'train', id='path'
        ),
        pytest.param(
            'text:me@home.txt',
            {'name': 'text', 'path': 'me@home.txt'},
            'validation',
            id='path with an @',
        ),
        pytest.param(
            'tokens:DIR', {'name': 'tokens', 'path': 'DIR'}, 'validation', id='path of tokens'
        ),
        pytest.param(
            'tfds:lm1b/subwords8k',
            {'name': 'tfds:lm1b/subwords8k'},
            'validation',
            id='name with a colon',
        ),
        pytest.param(
            'hf:a/b/c?feature=content@test',
            {'name': 'hf:a/b/c', 'feature': 'content'},
            'test',
            id='setting and split',
        ),
        pytest.param(
            'tokens:DIR?documents=id=50256&token_dtype=uint32',
            {'name': 'tokens', 'path': 'DIR', 'documents': 'id=50256', 'token_dtype': 'uint32'},
            'validation',
            id='two settings',
        ),
    ],
)
def test_an_entry_names_a_corpus_with_settings_and_a_split(config_of, text, fields, split):
    """An entry of data.evaluate has the form NAME[:PATH][?FIELD=VALUE&...][@SPLIT].

    It names a corpus on which a run is evaluated. The default split is validation.
    """
    # These settings of the run also apply to the corpus.
    fields_of_run = {'tokenizer': 'bpe', 'tokenizer_size': 300, 'lowercase': True}
    config = config_of(text, **fields_of_run)

    parsed_entries = entries(config)

    assert len(parsed_entries) == 1
    entry = parsed_entries[0]
    assert entry.text == text
    assert entry.split == split
    data_dir = config.data.data_dir
    assert entry.data == DataConfig(**fields, **fields_of_run, data_dir=data_dir)


def test_the_test_split_is_carved_as_in_the_run(config_of):
    config = config_of('stdlib', 'stdlib@train', 'stdlib@test', carve_test=True)
    validation, train, test = entries(config)
    # The validation split is the same with and without a test split.
    assert not validation.data.carve_test
    assert train.data.carve_test
    assert test.data.carve_test


def test_a_split_of_the_run_itself_is_not_opened_again(config_of):
    config = config_of('@test')
    rows = rows_of(config)
    corpora = open_corpora(config, rows)
    assert corpora[0].rows.dataset.split('test') is rows.dataset.split('test')


def test_windows_of_an_evaluation_are_not_shifted(config_of):
    """With `shift_windows`, the windows of each training epoch begin at another token.

    An evaluation always begins at the first token, even on the train split.
    """
    # '@train' is the train split of the run itself.
    config = config_of('@train', shift_windows=True)
    rows = rows_of(config)
    corpus = open_corpora(config, rows)[0]

    assert rows.shift
    assert not corpus.rows.shift

    # The first token is never predicted.
    num_predicted = config.model.context * corpus.rows.count('train')
    expected_ids = rows.dataset.split('train')[1 : 1 + num_predicted]
    assert tokens_of(corpus).tolist() == expected_ids.tolist()


@pytest.mark.parametrize('tokenizer', ['bytes', 'characters', 'bpe'])
def test_text_is_encoded_by_the_tokenizer_of_the_run(config_of, texts, tokenizer):
    """The tokenizer of the run encodes the text of a corpus on which the run is evaluated.

    Tokenizers of characters and bpe are learned from the run's own text.
    """
    size = {'tokenizer_size': 262} if tokenizer == 'bpe' else {}
    config = config_of(f'text:{texts}@test', tokenizer=tokenizer, model={'vocab_size': 300}, **size)
    rows = rows_of(config)

    corpus = open_corpora(config, rows)[0]

    # The first file of the split is its first document.
    first_text = (texts / 'test/000.txt').read_bytes()
    first_ids = rows.dataset.tokenizer.encode(first_text)
    assert corpus.rows.dataset.split('test')[: len(first_ids)].tolist() == first_ids.tolist()
    assert corpus.rows.vocab_size == rows.vocab_size

    # The version is a hash of the texts, which this test does not check.
    identity = corpus.identity()
    del identity['version']
    assert identity == {
        'name': 'text',
        'tokenizer': rows.dataset.tokenizer.name,
        'fingerprints': {'test': corpus.rows.dataset.info('test').fingerprint},
    }

    # Only the test split was tokenized.
    cache = texts.parent / 'cache/tokens/text'
    assert [path.name for path in cache.rglob('*.bin')] == ['test.bin']


def test_a_split_that_is_tokenized_alone_has_the_same_tokens(config_of, texts):
    config = config_of(f'text:{texts}@test')
    corpus = corpus_of(config)
    test_alone = corpus.rows.dataset

    data = DataConfig(name='text', path=str(texts), data_dir=config.data.data_dir)
    all_splits = load_text(data)

    assert test_alone.split('test').tolist() == all_splits.split('test').tolist()
    assert test_alone.info('test') == all_splits.info('test')


def test_a_carved_split_is_named_as_one(config_of, texts):
    # This folder has no split folders, so validation is carved from its texts.
    folder = texts / 'train'

    validation = corpus_of(config_of(f'text:{folder}'))
    assert validation.identity()['carved'] == {'validation': 0.1}

    train = corpus_of(config_of(f'text:{folder}@train'))
    assert 'carved' not in train.identity()


def test_prepared_tokens_of_the_same_tokenizer_are_read(config_of, texts, tmp_path):
    """Evaluating on the tokens that `prepare` writes is the same as evaluating on the text.

    The first argument of `config_of` is the corpus to evaluate on. The others describe the run.
    """
    vocabulary = str(write_vocabulary(tmp_path / 'words.json'))
    model = {'vocab_size': 401}  # the vocabulary has 401 ids
    tokens = str(tmp_path / 'made')
    text = DataConfig(
        name='text', path=str(texts), tokenizer=vocabulary, data_dir=str(tmp_path / 'cache')
    )
    prepare(text, tokens)

    # This run trains on the corpus 'lines' with the vocabulary. It is evaluated on the validation
    # split of the tokens, because no split is named.
    run_with_vocabulary = config_of(f'tokens:{tokens}', tokenizer=vocabulary, model=model)
    from_tokens = corpus_of(run_with_vocabulary)
    assert from_tokens.identity()['fingerprints'].keys() == {'validation'}

    # This run trains on the tokens. It is evaluated on the text, encoded with their tokenizer.
    run_on_tokens = config_of(f'text:{texts}', name='tokens', path=tokens, model=model)
    from_text = corpus_of(run_on_tokens)
    assert tokens_of(from_text).tolist() == tokens_of(from_tokens).tolist()


def test_text_is_in_lower_case_if_the_tokens_of_the_run_are(config_of, tmp_path):
    """A run on prepared tokens in lower case leaves data.lowercase at its default."""
    text = tmp_path / 'text.txt'
    text.write_text('To be, or NOT to be\n' * 99)
    tokens = str(tmp_path / 'made')
    run_on_text = config_of(f'tokens:{tokens}', lowercase=True)
    prepare(dataclasses.replace(run_on_text.data, evaluate=()), tokens)

    from_text = corpus_of(config_of(f'text:{text}', name='tokens', path=tokens))
    characters = bytes(tokens_of(from_text).tolist())
    assert characters.startswith(b'o be, or not to be\nto be')

    # A run on text in lower case may be evaluated on these tokens.
    assert len(tokens_of(corpus_of(run_on_text))) > 0


@pytest.fixture
def config_of_ids(config_of, tmp_path):
    """A function like `config_of`, for a run on token files without a vocabulary.

    The run reads ids up to 300 from the directory 'own'. 300 separates documents. By default, the
    model has 310 ids.
    """
    write_nanogpt(tmp_path / 'own/train.bin', ids_of_documents(seed=0))
    write_nanogpt(tmp_path / 'own/val.bin', ids_of_documents(seed=1, num_documents=30))

    def make(*evaluate, model=None, **data):
        model_fields = {'vocab_size': 310} | (model or {})
        data_fields = {'name': 'tokens', 'path': str(tmp_path / 'own'), 'documents': 'id=300'}
        data_fields |= data
        return config_of(*evaluate, model=model_fields, **data_fields)

    return make


@pytest.fixture
def tokens_with_id_305(tmp_path):
    """A directory of tokens without a vocabulary. The last id is 305, all others are below 301."""
    directory = tmp_path / 'other'
    validation_ids = np.append(ids_of_documents(seed=3, num_documents=30), 305)
    write_nanogpt(directory / 'train.bin', ids_of_documents(seed=2))
    write_nanogpt(directory / 'val.bin', validation_ids.astype(np.uint16))
    return directory


def test_ids_without_a_vocabulary_are_read_as_those_of_the_run(config_of_ids, tokens_with_id_305):
    config = config_of_ids(f'tokens:{tokens_with_id_305}', cross_documents=False)

    corpus = corpus_of(config)

    # The run has the ids 0 to 300.
    assert corpus.rows.vocab_size == 301

    # The run's separator also divides this corpus, so a row has segments of several documents.
    # `read` gets the numbers of nine rows and their random seeds, which are pairs of zeros.
    batch = corpus.rows.read('validation', np.arange(9), np.zeros((9, 2), np.uint64))
    assert batch['segments_BT'].max() > 1


def test_ids_without_a_vocabulary_have_to_be_ids_of_the_model(config_of_ids, tokens_with_id_305):
    corpus = f'tokens:{tokens_with_id_305}'
    with refused(r"evaluate='tokens:\S+': it has the id 305, but the model has ids from 0 to 304"):
        corpus_of(config_of_ids(corpus, model={'vocab_size': 305}))

    # The mask of an encoder is 301, the id after the ids of the run, 0 to 300.
    with refused('it has the id 305, but the model has ids from 0 to 300 '):
        corpus_of(config_of_ids(corpus, model={'kind': 'encoder', 'vocab_size': 310}))


def test_text_needs_a_vocabulary(config_of_ids):
    with refused("evaluate='lines': text needs a vocabulary, .* set data.tokenizer to the"):
        corpus_of(config_of_ids('lines'))


def test_the_tokenizer_has_to_be_that_of_the_run(config_of, config_of_ids, texts, tmp_path):
    """A model can be evaluated only on tokens of its own tokenizer.

    The tokenizer of a vocabulary file whose id 400 ends a text has the name 'file-HASH-end400'. For
    the ids 0 to 300 without a vocabulary, the name is 'ids-301'.
    """
    text = DataConfig(name='text', path=str(texts), data_dir=str(tmp_path / 'cache'))
    vocabulary = str(write_vocabulary(tmp_path / 'words.json'))
    prepare(dataclasses.replace(text, tokenizer=vocabulary), str(tmp_path / 'words'))
    tokens_of_words = f'tokens:{tmp_path}/words'
    # The fixture `config_of_ids` has written these ids without a vocabulary.
    tokens_of_ids = f'tokens:{tmp_path}/own'

    # A run on bytes cannot be evaluated on words.
    with refused(
        'it has the tokenizer file-[0-9a-f]{12}-end400, but the run has bytes; '
        'give tokens of the same'
    ):
        corpus_of(config_of(tokens_of_words))

    # A run on ids cannot be evaluated on words.
    with refused('it has the tokenizer file-[0-9a-f]{12}-end400, but the run has ids-301'):
        corpus_of(config_of_ids(tokens_of_words))

    # A run on bytes cannot be evaluated on ids.
    with refused(r"evaluate='tokens:\S+': it has the tokenizer ids-301, but the run has bytes"):
        corpus_of(config_of(tokens_of_ids))


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('lins', "data.evaluate='lins': unknown data.name 'lins', did you mean 'lines'?"),
        ('lines@tset', "unknown data.name 'lines@tset', did you mean"),
        ('text', "data.evaluate='text': data.name='text' needs data.path"),
        ('text:', "data.path='' must be Unicode text"),
        ('multi30k', "data.evaluate='multi30k': data.name='multi30k' needs data.languages"),
        ('recall(pairs=2)', "evaluate='recall\\(pairs=2\\)': unknown data.name 'recall'"),
        ('hf:', "data.name='hf:' must be written 'tfds:NAME'"),
        ('lines?feature=a', "data.feature='a' has no effect on data.name='lines'"),
        ('lines?languages=en-de', "'languages=en-de' must be a setting of a corpus, one of path, "),
        ('tokens:a?token_dtype=int8', "data.token_dtype='int8' must be one of uint8, uint16"),
        ('text:a?path=b', "data.evaluate='text:a\\?path=b': it has two paths"),
        ('text:a?feature=b&feature=c', 'it sets feature twice'),
        ('text:/absent\n', r"data.evaluate='text:/absent\\n': data.path: "),
        ('text:/absent', "data.evaluate='text:/absent': data.path: '/absent' does not exist"),
    ],
)
def test_an_entry_that_names_no_corpus_is_refused(config_of, text, message):
    with refused(message):
        corpus_of(config_of(text))


TEXT = b'some text of a corpus\n'


@pytest.mark.parametrize(
    ('test_texts', 'message'),
    [
        pytest.param(
            {},
            "data.evaluate='own@test': own has no split 'test'; valid: train, validation",
            id='missing',
        ),
        pytest.param(
            {'test': []},
            "data.evaluate='own@test': split 'test' of own has no document",
            id='empty',
        ),
        pytest.param(
            {'test': [b'a']},
            "evaluate='own@test': model.context=16 is too long for split 'test' of own; it",
            id='too short',
        ),
    ],
)
def test_a_split_that_cannot_be_evaluated_is_refused(config_of, monkeypatch, test_texts, message):
    register(monkeypatch, 'own', {'train': [TEXT], 'validation': [TEXT], **test_texts})
    with refused(message):
        corpus_of(config_of('own@test'))


@pytest.mark.parametrize(
    ('model', 'data'),
    [
        pytest.param(
            {'kind': 'encoder_decoder'}, {'name': 'cldr', 'languages': 'en-de'}, id='translation'
        ),
        pytest.param({'kind': 'decoder'}, {'name': 'recall(pairs=2)'}, id='probe'),
    ],
)
def test_models_of_translation_or_probes_have_no_further_corpora(config_of, model, data):
    with refused(r"data.evaluate=\('stdlib',\) needs a model of text in one language, but model."):
        entries(config_of('stdlib', model=model, **data))


def test_an_encoder_is_evaluated_at_the_mask_rate_of_the_run(config_of):
    config = config_of('@test', model={'kind': 'encoder', 'vocab_size': 257}, mask_rate=0.25)

    corpus = corpus_of(config)

    # In a row, 0.25 * 16 = 4 tokens are masked.
    batch = next(eval_batches(corpus.rows, 'test', batch_size=4))
    assert batch['loss_weights_BT'].sum(axis=1).tolist() == [4, 4, 4, 4]
    assert corpus.identity()['masking'] == {'version': 1, 'rate': 0.25}


def test_further_corpora_are_added_to_the_identity_of_the_data(config_of):
    config = config_of('@test')
    rows = rows_of(config)
    corpora = open_corpora(config, rows)

    assert identity_with(rows, ()) == rows.identity()
    with_corpora = rows.identity() | {'evaluate': {'@test': corpora[0].identity()}}
    assert identity_with(rows, corpora) == with_corpora


def test_a_dry_run_says_that_a_corpus_is_not_prepared(config_of):
    config = config_of('stdlib')
    rows = rows_of(config)
    with nothing_prepared(), refused(r"evaluate='stdlib': \S+ is prepared by the", NotPrepared):
        open_corpora(config, rows)
