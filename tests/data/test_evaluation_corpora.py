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
    """A directory of texts; see `write_texts`."""
    return write_texts(tmp_path / 'texts')


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    """config_of(*evaluate, **data): a run on a corpus of 200 numbered lines."""
    lines = [f'line {number} of the corpus\n'.encode() for number in range(200)]
    split_texts = {'train': lines[:120], 'validation': lines[120:160], 'test': lines[160:]}
    register(monkeypatch, 'lines', split_texts)

    def make(*evaluate, model=None, **data):
        fields = {'name': 'lines', 'data_dir': str(tmp_path / 'cache'), 'evaluate': evaluate}
        return Config(
            model=ModelConfig(context=16, **(model or {})), data=DataConfig(**(fields | data))
        )

    return make


def corpora_of(config):
    return open_corpora(config, rows_of(config))


def tokens_of(corpus):
    """The ids that an evaluation on a corpus predicts, in order."""
    batches = eval_batches(corpus.rows, corpus.split, batch_size=1)
    return np.concatenate([batch['targets_BT'][0] for batch in batches])


@pytest.mark.parametrize(
    ('text', 'expected', 'split'),
    [
        ('stdlib', {'name': 'stdlib'}, 'validation'),
        ('stdlib@test', {'name': 'stdlib'}, 'test'),
        ('text:/a/b.txt@train', {'name': 'text', 'path': '/a/b.txt'}, 'train'),
        ('text:me@home.txt', {'name': 'text', 'path': 'me@home.txt'}, 'validation'),
        ('tokens:DIR', {'name': 'tokens', 'path': 'DIR'}, 'validation'),
        ('tfds:lm1b/subwords8k', {'name': 'tfds:lm1b/subwords8k'}, 'validation'),
        ('hf:a/b/c?feature=content@test', {'name': 'hf:a/b/c', 'feature': 'content'}, 'test'),
        (
            'tokens:DIR?documents=id=50256&token_dtype=uint32',
            {'name': 'tokens', 'path': 'DIR', 'documents': 'id=50256', 'token_dtype': 'uint32'},
            'validation',
        ),
    ],
)
def test_an_entry_names_a_corpus_with_settings_and_a_split(config_of, text, expected, split):
    config = config_of(text, tokenizer='bpe', tokenizer_size=300, lowercase=True)
    (entry,) = entries(config)
    of_run = {'data_dir': config.data.data_dir, 'lowercase': True}
    of_run |= {'tokenizer': 'bpe', 'tokenizer_size': 300}
    assert entry.text == text
    assert entry.split == split
    assert entry.data == DataConfig(**expected, **of_run)


def test_the_test_split_is_carved_as_in_the_run(config_of):
    config = config_of('stdlib', 'stdlib@train', 'stdlib@test', carve_test=True)
    assert [entry.data.carve_test for entry in entries(config)] == [False, True, True]


def test_a_split_of_the_run_itself_is_not_opened_again(config_of):
    config = config_of('@train', '@test', shift_windows=True)
    rows = rows_of(config)
    train, test = open_corpora(config, rows)
    assert test.rows.dataset.split('test') is rows.dataset.split('test')
    # Windows of an evaluation are never shifted.
    assert rows.shift
    assert not train.rows.shift
    ids = rows.dataset.split('train')
    expected = ids[1 : 1 + 16 * train.rows.count('train')]
    assert tokens_of(train).tolist() == expected.tolist()


@pytest.mark.parametrize('tokenizer', ['bytes', 'characters', 'bpe'])
def test_text_is_encoded_by_the_tokenizer_of_the_run(config_of, texts, tokenizer):
    size = {'tokenizer_size': 262} if tokenizer == 'bpe' else {}
    config = config_of(f'text:{texts}@test', tokenizer=tokenizer, model={'vocab_size': 300}, **size)
    rows = rows_of(config)
    (corpus,) = open_corpora(config, rows)
    text = (texts / 'test/000.txt').read_bytes()
    ids = rows.dataset.tokenizer.encode(text)
    assert corpus.rows.dataset.split('test')[: len(ids)].tolist() == ids.tolist()
    assert corpus.rows.vocab_size == rows.vocab_size
    # Of all splits, one is tokenized.
    written = [path.name for path in (texts.parent / 'cache/tokens/text').rglob('*.bin')]
    assert written == ['test.bin']
    assert corpus.identity() | {'version': None} == {
        'name': 'text',
        'version': None,
        'tokenizer': rows.dataset.tokenizer.name,
        'fingerprints': {'test': corpus.rows.dataset.info('test').fingerprint},
    }


def test_the_tokens_of_a_split_alone_are_those_among_all_splits(config_of, texts):
    config = config_of(f'text:{texts}@test')
    (corpus,) = corpora_of(config)
    data = DataConfig(name='text', path=str(texts), data_dir=config.data.data_dir)
    dataset = load_text(data)
    assert corpus.rows.dataset.split('test').tolist() == dataset.split('test').tolist()
    assert corpus.rows.dataset.info('test') == dataset.info('test')


def test_a_carved_split_is_named_as_one(config_of, texts):
    flat = texts / 'train'
    (corpus,) = corpora_of(config_of(f'text:{flat}'))
    assert corpus.identity()['carved'] == {'validation': 0.1}
    (corpus,) = corpora_of(config_of(f'text:{flat}@train'))
    assert 'carved' not in corpus.identity()


def test_prepared_tokens_of_the_same_tokenizer_are_read(config_of, texts, tmp_path):
    words = str(write_vocabulary(tmp_path / 'words.json'))
    text = DataConfig(name='text', path=str(texts), tokenizer=words)
    prepare(dataclasses.replace(text, data_dir=str(tmp_path / 'cache')), str(tmp_path / 'made'))
    config = config_of(f'tokens:{tmp_path}/made', tokenizer=words, model={'vocab_size': 401})
    (corpus,) = corpora_of(config)
    assert corpus.identity()['fingerprints'].keys() == {'validation'}
    # Where the run itself reads prepared tokens, text is encoded by their tokenizer too.
    run = {'name': 'tokens', 'path': f'{tmp_path}/made', 'model': {'vocab_size': 401}}
    (of_text,) = corpora_of(config_of(f'text:{texts}', **run))
    assert tokens_of(of_text).tolist() == tokens_of(corpus).tolist()


@pytest.fixture
def config_of_ids(config_of, tmp_path):
    """config_of_ids(*evaluate, **fields): a run on ids up to 300 without a vocabulary."""
    write_nanogpt(tmp_path / 'own/train.bin', ids_of_documents(0))
    write_nanogpt(tmp_path / 'own/val.bin', ids_of_documents(1, 30))

    def make(*evaluate, model=None, **data):
        model = {'vocab_size': 310} | (model or {})
        fields = {'name': 'tokens', 'path': str(tmp_path / 'own'), 'documents': 'id=300'}
        return config_of(*evaluate, model=model, **(fields | data))

    return make


def test_ids_without_a_vocabulary_have_to_be_ids_of_the_model(config_of_ids, tmp_path):
    other = tmp_path / 'other'
    write_nanogpt(other / 'train.bin', ids_of_documents(2))
    write_nanogpt(other / 'val.bin', np.append(ids_of_documents(3, 30), 305).astype(np.uint16))
    config = config_of_ids(f'tokens:{other}', cross_documents=False)
    (corpus,) = corpora_of(config)
    assert corpus.rows.vocab_size == 301
    # The separator is that of the run.
    batch = corpus.rows.read('validation', np.arange(9), np.zeros((9, 2), np.uint64))
    assert batch['segments_BT'].max() > 1
    with refused(r"evaluate='tokens:\S+': it has the id 305, but the model has ids from 0 to 304"):
        corpora_of(config_of_ids(f'tokens:{other}', model={'vocab_size': 305}))
    encoder = {'kind': 'encoder', 'vocab_size': 310}
    with refused('it has the id 305, but the model has ids from 0 to 300 '):
        corpora_of(config_of_ids(f'tokens:{other}', model=encoder))
    with refused("evaluate='lines': text needs a vocabulary, .* set data.tokenizer to the"):
        corpora_of(config_of_ids('lines'))


def test_the_tokenizer_has_to_be_that_of_the_run(config_of, config_of_ids, texts, tmp_path):
    words = str(write_vocabulary(tmp_path / 'words.json'))
    data = DataConfig(name='text', path=str(texts), data_dir=str(tmp_path / 'cache'))
    prepare(dataclasses.replace(data, tokenizer=words), str(tmp_path / 'words'))
    says = 'it has the tokenizer file-[0-9a-f]{12}-end400, but the run has '
    with refused(f'{says}bytes; give tokens of the same'):
        corpora_of(config_of(f'tokens:{tmp_path}/words'))
    with refused(f'{says}ids-301'):
        corpora_of(config_of_ids(f'tokens:{tmp_path}/words'))
    with refused(r"evaluate='tokens:\S+': it has the tokenizer ids-301, but the run has bytes"):
        corpora_of(config_of(f'tokens:{tmp_path}/own'))


@pytest.mark.parametrize(
    ('text', 'says'),
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
        ('text:/absent', "data.evaluate='text:/absent': data.path: '/absent' does not exist"),
        ('two', "data.evaluate='two': two has no split 'test'; valid: train, validation"),
        ('empty', "data.evaluate='empty': split 'test' of empty has no document"),
        ('short', "evaluate='short': model.context=16 is too long for split 'test' of short; it"),
    ],
)
def test_a_corpus_that_cannot_be_evaluated_is_refused(config_of, monkeypatch, text, says):
    # Corpora without a test split, with an empty one, and with one of a single byte.
    some = [b'some text of a corpus\n']
    register(monkeypatch, 'two', {'train': some, 'validation': some})
    register(monkeypatch, 'empty', {'train': some, 'validation': some, 'test': []})
    register(monkeypatch, 'short', {'train': some, 'validation': some, 'test': [b'a']})
    if text in ('two', 'empty', 'short'):
        with refused(says.replace(f"evaluate='{text}'", f"evaluate='{text}@test'")):
            corpora_of(config_of(f'{text}@test'))
        return
    with refused(says):
        corpora_of(config_of(text))


@pytest.mark.parametrize(
    ('model', 'data'),
    [
        ({'kind': 'encoder_decoder'}, {'name': 'cldr', 'languages': 'en-de'}),
        ({}, {'name': 'recall(pairs=2)'}),
    ],
)
def test_models_of_translation_or_probes_have_no_further_corpora(config_of, model, data):
    with refused(r"data.evaluate=\('stdlib',\) needs a model of text in one language, but model."):
        entries(config_of('stdlib', model=model, **data))


def test_an_encoder_restores_the_same_share_of_masked_tokens(config_of):
    config = config_of('@test', model={'kind': 'encoder', 'vocab_size': 257}, mask_rate=0.25)
    (corpus,) = corpora_of(config)
    batch = next(eval_batches(corpus.rows, 'test', batch_size=4))
    assert batch['loss_weights_BT'].sum(1).tolist() == [4] * 4
    assert corpus.identity()['masking'] == {'version': 1, 'rate': 0.25}


def test_data_without_further_corpora_keep_their_identity(config_of):
    config = config_of('@test')
    rows = rows_of(config)
    assert identity_with(rows, ()) == rows.identity()
    corpora = open_corpora(config, rows)
    identity = rows.identity() | {'evaluate': {'@test': corpora[0].identity()}}
    assert identity_with(rows, corpora) == identity


def test_a_dry_run_says_that_a_corpus_is_not_prepared(config_of):
    config = config_of('stdlib')
    rows = rows_of(config)
    with nothing_prepared(), refused(r"evaluate='stdlib': \S+ is prepared by the", NotPrepared):
        open_corpora(config, rows)
