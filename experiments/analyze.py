"""Measures the attention of a model: rank, symmetry, patterns, norms, by layer and head.

python -m experiments.analyze runs/small --out=runs/small/analysis
python -m experiments.analyze runs/small --text='def main(' --out=analysis
python -m experiments.analyze gpt2/model.safetensors --tokens='464 3290 318'
python -m experiments.analyze runs/merged --reference=runs/small

The source is any that experiments.convert reads. Attention patterns and gradients are those of the
text or tokens; without either, of validation rows of a run. Induction is measured on random tokens.
With --reference, drift is that of A[n] and B[n] from those of another model. --out receives
analysis.csv, analysis.json, figures, and for a text or tokens the probabilities, maps.csv.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pandas as pd
from absl import flags

from qkattn.analysis.analyze import Analysis, analyze, next_token_batch
from qkattn.analysis.patterns import attention_patterns
from qkattn.config import DataConfig
from qkattn.convert import loading
from qkattn.data.pipeline import eval_batches
from qkattn.data.tasks.task_registry import rows_of
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.errors import ConfigError
from qkattn.jobs import cli
from qkattn.model import EncoderDecoder
from qkattn.model.transformer import Transformer
from qkattn.report.figures import attention_figure
from qkattn.report.figures.style import Drawing, render, style_sheet
from qkattn.report.tables import text_table
from qkattn.storage.files import as_path, make_directory, write_atomic
from qkattn.storage.records import write_json
from qkattn.train.program_cache import keep_programs

SOURCE = flags.DEFINE_string('source', None, 'Model to measure; also without --source=.')
TRIAL = flags.DEFINE_integer(
    'trial', None, 'Index of the trial of a run; default: the first that has not diverged.'
)
REFERENCE = flags.DEFINE_string(
    'reference', None, 'Model from which drift is measured; of a run, the same trial.'
)
TEXT = flags.DEFINE_string('text', None, 'Text that the model reads; the source of a translation.')
FILE = flags.DEFINE_string('file', None, 'File with the text.')
TARGET = flags.DEFINE_string('target', None, 'Translation of --text that an encoder_decoder reads.')
TOKENS = flags.DEFINE_string('tokens', None, 'Token ids that the model reads, as in "12 7 301".')
DATA = flags.DEFINE_string(
    'data', DataConfig.name, 'Dataset of the tokenizer, for a source that is not a run.'
)
NUM_ROWS = flags.DEFINE_integer('num_rows', 8, 'Validation rows of a run that are read.')
NUM_HEADS = flags.DEFINE_integer('num_heads', None, 'Heads of published files without a config.')
OUT = flags.DEFINE_string('out', None, 'Directory for numbers and figures.')

# Columns of the printed table: heading, quantity, what it is of; means over heads.
COLUMNS = (
    ('rank|of A', 'effective_rank', 'A'),
    ('symmetric|share of A', 'symmetric_share', 'A'),
    ('direc-|tionality', 'directionality', 'A'),
    ('definite-|ness', 'definiteness', 'A'),
    ('rank|of B', 'effective_rank', 'B'),
    ('drift|of A', 'drift', 'A'),
    ('drift|of B', 'drift', 'B'),
    ('entropy,|nats', 'entropy', 'pattern'),
    ('self', 'diagonal_mass', 'pattern'),
    ('previous|token', 'previous_token_mass', 'pattern'),
    ('induction|(best head)', 'induction_score', 'pattern'),
    ('logit|deviation', 'logit_deviation', 'pattern'),
)
FIGURES = {
    'matrices': {
        'A': ('effective_rank', 'symmetric_share', 'directionality', 'definiteness', 'drift')
    },
    'ov_matrices': {'B': ('effective_rank', 'symmetric_share', 'definiteness', 'norm', 'drift')},
    'patterns': {
        'pattern': ('entropy', 'diagonal_mass', 'previous_token_mass', 'induction_score')
        + ('logit_deviation',)
    },
}
# Query tokens and key tokens of a site.
Words = tuple[list[str], list[str]]
# Most lines of maps.csv, about 100 MB.
MAX_LINES = 2_000_000
# Most probabilities of a layer that are held at once, 256 MiB; the default of --num_rows is always
# taken.
MAX_PROBABILITIES = 2**26


def main() -> None:
    keep_programs()
    if SOURCE.value is None:
        raise ConfigError(
            '--source=DIRECTORY is required, or the directory alone, as in analyze runs/small'
        )
    if NUM_ROWS.value < 1:
        raise ConfigError(f'--num_rows={NUM_ROWS.value} must be at least 1')
    if sum(flag.value is not None for flag in (TEXT, FILE, TOKENS)) > 1:
        raise ConfigError('--text, --file and --tokens exclude each other')
    out = None if OUT.value is None else as_path(OUT.value)
    if out is not None and (out / 'analysis.json').exists():
        raise ConfigError(f'{out} already holds an analysis; give another directory')
    source = loading.load(SOURCE.value, num_heads=NUM_HEADS.value)
    trial = source.check_trial(TRIAL.value)
    model, about = chosen(source, trial)
    reference, about['reference'] = None, None
    if REFERENCE.value is not None:
        other = loading.load(REFERENCE.value, num_heads=NUM_HEADS.value)
        reference, about['reference'] = chosen(other, trial if len(other.models) > 1 else 0)
    batch, words = batch_of(source, model)
    analysis = analyze(model, batch, reference=reference)
    config = model.config
    print(f'{SOURCE.value}: {config.variant}, {config.num_layers} layers')
    if reference is not None:
        print(f'drift from {REFERENCE.value}: {reference.config.variant}')
    print(table(analysis))
    for circuit, why in (('A', 'not bilinear'), ('B', 'not linear in the values')):
        places = [f'{site} {layer}' for site, layer, name in analysis.missing if name == circuit]
        if places:
            print(f'{", ".join(places)}: {why}, so there is no matrix {circuit}[n]')
    if out is None:
        return
    make_directory(out)
    write(out, analysis, about)
    maps = {} if words is None else maps_of(model, batch)
    if maps:
        write_maps(out, maps, words)
    for stem, figure in figures(analysis, maps, words).items():
        write_atomic(out / f'{stem}.png', figure)
    print(f'wrote {out}')


def chosen(source: loading.Loaded, trial: int) -> tuple[Transformer, dict[str, Any]]:
    """A trial of a run, or the one model of another source, and what it is."""
    model = source.models[source.check_trial(trial)]
    about = {'source': str(source.path), 'trial': trial, 'step': source.step}
    return model, about | {'model': model.config}


def batch_of(
    source: loading.Loaded, model: Transformer
) -> tuple[dict[str, Any] | None, dict[str, Words] | None]:
    """What the model reads, and its tokens by site where they are a text or tokens."""
    if TOKENS.value is not None or TEXT.value is not None or FILE.value is not None:
        return given(source, model)
    if source.config is None:
        return None, None
    rows = rows_of(source.config)
    available = rows.count('validation')
    count = min(NUM_ROWS.value, available)
    most = MAX_PROBABILITIES // (model.config.num_heads * model.config.context**2)
    if count > (most := max(most, NUM_ROWS.default)):
        raise ConfigError(
            f'--num_rows={NUM_ROWS.value} must be at most {most:,} for this model; the run has '
            f'{available:,} validation rows'
        )
    return next(eval_batches(rows, 'validation', batch_size=count, max_rows=count)), None


def given(source: loading.Loaded, model: Transformer) -> tuple[dict[str, Any], dict[str, Words]]:
    """The text or the tokens of the flags, as a batch of one row."""
    translates = isinstance(model, EncoderDecoder)
    if translates != (TARGET.value is not None) or (translates and TOKENS.value is not None):
        raise ConfigError(
            'an encoder_decoder reads --text (or --file) and --target, and no other model reads '
            '--target'
        )
    if TOKENS.value is not None:
        try:
            ids = [int(word) for word in TOKENS.value.split()]
        except ValueError as error:
            raise ConfigError(f'--tokens={TOKENS.value!r} must be whole numbers') from error
        words = [str(number) for number in ids]
    else:
        tokenizer = loading.tokenizer_for(source, DATA.value, '--tokens')
        ids, words = encoded(tokenizer, cli.text_of(TEXT, FILE), '--text')
    check_ids('--text' if TOKENS.value is None else '--tokens', ids, model)
    if not translates:
        return next_token_batch(model, np.array([ids], np.int32)), {'attention': (words, words)}
    targets, target_words = encoded(tokenizer, TARGET.value, '--target')
    check_ids('--target', targets, model)
    of_sites = {
        'attention': (target_words, target_words),
        'encoder/attention': (words, words),
        'cross_attention': (target_words, words),
    }
    batch = {'tokens_BT': np.array([targets], np.int32), 'source_BS': np.array([ids], np.int32)}
    return batch, of_sites


def encoded(tokenizer: Tokenizer, text: str, flag: str) -> tuple[list[int], list[str]]:
    """Ids and words of a text."""
    try:
        ids = tokenizer.encode(text).tolist()
    except ValueError as error:
        raise ConfigError(f'{flag} cannot be encoded: {error}') from error
    return ids, [tokenizer.decode([number]).replace('\n', '\\n') for number in ids]


def check_ids(flag: str, ids: list[int], model: Transformer) -> None:
    config = model.config
    context = config.context
    if flag == '--text' and isinstance(model, EncoderDecoder):
        context = config.encoder.context
    if not 2 <= len(ids) <= context:
        raise ConfigError(f'{flag} has {len(ids)} tokens, and the model reads 2 to {context}')
    if not 0 <= min(ids) <= max(ids) < config.vocab_size:
        raise ConfigError(f'{flag} must hold ids in [0, {config.vocab_size})')


def table(analysis: Analysis) -> str:
    """A line for every attention layer; means over heads, of induction the best head."""
    places = dict.fromkeys((row.site, row.layer) for row in analysis.rows if row.head is not None)
    cells: dict[tuple[str, int | None], list[str]] = {place: [] for place in places}
    titles = [('layer', True)]
    for heading, quantity, of in COLUMNS:
        over = np.max if quantity == 'induction_score' else np.mean
        values: dict[tuple[str, int | None], list[float]] = {}
        for row in analysis.rows:
            if (row.quantity, row.of) == (quantity, of):
                values.setdefault((row.site, row.layer), []).append(row.value)
        if values:
            titles.append((heading, False))
            for place, cell in cells.items():
                cell.append(f'{over(values[place]):.3g}' if place in values else '-')
    lines = [[f'{site} {layer}', *cells[site, layer]] for site, layer in places]
    return text_table(titles, lines)


def write(out: Any, analysis: Analysis, about: Mapping[str, Any]) -> None:
    """analysis.csv and analysis.json."""
    rows = pd.DataFrame([dataclasses.asdict(row) for row in analysis.rows], dtype=object)
    write_atomic(out / 'analysis.csv', rows.to_csv(index=False, lineterminator='\n'))
    spectra = [
        {'site': site, 'layer': layer, 'of': of, 'singular_values': s_ND}
        for (site, layer, of), s_ND in analysis.spectra.items()
    ]
    missing = [{'site': site, 'layer': layer, 'of': of} for site, layer, of in analysis.missing]
    write_json(
        out / 'analysis.json',
        {**about, 'rows': analysis.rows, 'spectra': spectra, 'missing': missing},
        indent=None,
    )


def maps_of(model: Transformer, batch: Mapping[str, Any]) -> dict[str, dict[int, np.ndarray]]:
    """Probabilities p_NTS of the first row, NaN at masked keys, by site and layer."""
    inputs = {name: batch[name] for name in ('tokens_BT', 'source_BS') if name in batch}
    maps: dict[str, dict[int, np.ndarray]] = {}
    for (site, layer), pattern in jax.jit(attention_patterns)(model, inputs).items():
        p_NTS = np.asarray(pattern.probabilities_BNTS[0], np.float32)
        maps.setdefault(site, {})[layer] = np.where(pattern.mask_BTS[0], p_NTS, np.nan)
    return maps


def write_maps(
    out: Any, maps: Mapping[str, Mapping[int, np.ndarray]], words: Mapping[str, Words]
) -> None:
    """maps.csv: a line for each head, query, and key that it may attend to."""
    count = sum(np.isfinite(p_NTS).sum() for layers in maps.values() for p_NTS in layers.values())
    if count > MAX_LINES:
        print(f'maps.csv would have {count:,} lines, more than {MAX_LINES:,}; give a shorter text')
        return
    tables = []
    for site, layers in maps.items():
        queries, keys = (np.array(tokens, object) for tokens in words[site])
        for layer, p_NTS in layers.items():
            n, t, s = np.nonzero(np.isfinite(p_NTS))
            places = {'site': site, 'layer': layer, 'head': n, 'query': t, 'key': s}
            tokens = {'query_token': queries[t], 'key_token': keys[s]}
            tables.append(pd.DataFrame({**places, **tokens, 'probability': p_NTS[n, t, s]}))
    text = pd.concat(tables).to_csv(index=False, lineterminator='\n', float_format='%.6g')
    write_atomic(out / 'maps.csv', text)


def figures(
    analysis: Analysis,
    maps: Mapping[str, Mapping[int, np.ndarray]],
    words: Mapping[str, Words] | None,
) -> dict[str, bytes]:
    """PNG by name: of every site singular values and quantities, and maps of a text."""
    drawn = {}
    with style_sheet():
        spectra: dict[tuple[str, str], dict[int, np.ndarray]] = {}
        for (site, layer, of), s_ND in analysis.spectra.items():
            spectra.setdefault((site, of), {})[layer] = s_ND
        for (site, of), layers in spectra.items():
            figure = attention_figure.singular_values(layers, f'{of}[n]')
            drawn[f'singular_values_{of}{suffix(site)}'] = figure
        for site in dict.fromkeys(row.site for row in analysis.rows if row.head is not None):
            for name, chosen in FIGURES.items():
                present = {}
                for of, quantities in chosen.items():
                    measured = {
                        row.quantity for row in analysis.rows if (row.site, row.of) == (site, of)
                    }
                    present |= {
                        quantity.replace('_', ' '): analysis.values(quantity, of, site)
                        for quantity in quantities
                        if quantity in measured
                    }
                if present:
                    drawn[name + suffix(site)] = attention_figure.heat_maps(present)
        for site, layers in maps.items():
            drawn[f'maps{suffix(site)}'] = attention_figure.attention_maps(layers, *words[site])
        return {stem: render(Drawing(figure, stem)).png for stem, figure in drawn.items()}


def suffix(site: str) -> str:
    """What the names of a site's figures end in."""
    return '' if site == 'attention' else '_' + site.removesuffix('attention').strip('/_')


if __name__ == '__main__':
    cli.run(main, positional=SOURCE)
