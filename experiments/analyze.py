"""Measures the attention of a model: rank, symmetry and patterns, by layer and head.

python -m experiments.analyze runs/small --out=runs/small/analysis
python -m experiments.analyze runs/small --text='def main(' --out=runs/analysis
python -m experiments.analyze gpt2/model.safetensors --tokens='464 3290 318'
python -m experiments.analyze runs/merged --reference=runs/small

The source is any that experiments.convert reads. Attention patterns are those of the text or
tokens; without either, of validation rows of a run. Induction is measured on random tokens.
With --reference, drift is that of A[n] and B[n] from those of another model. --out receives
analysis.csv, analysis.json and figures; for a text or tokens, also the attention maps.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from absl import flags

from qkattn.analysis.analyze import Analysis, analyze
from qkattn.analysis.patterns import attention_patterns
from qkattn.convert import loading
from qkattn.data.pipeline import eval_batches
from qkattn.data.tasks.task_registry import rows_of
from qkattn.data.tokenizers.vocabulary import use_recorded_tokenizers
from qkattn.errors import ConfigError
from qkattn.jobs import cli
from qkattn.jobs.output import text_table
from qkattn.model import EncoderDecoder
from qkattn.model.transformer import Transformer
from qkattn.report.figures.attention_figure import attention_maps, heat_maps, singular_values
from qkattn.report.figures.style import render, style_sheet
from qkattn.report.prose import counted
from qkattn.report.tables import csv_text
from qkattn.storage.files import absolute, check_directory, make_directory, write_atomic
from qkattn.storage.records import write_json
from qkattn.train import exported
from qkattn.train.checkpoint import recorded_tokenizers
from qkattn.train.program_cache import keep_programs

SOURCE = cli.define_path('source', None, 'Model to measure; --source= may be left out.')
TRIAL = cli.define_trial()
IMPORTS = cli.define_imports()
REFERENCE = cli.define_path(
    'reference',
    None,
    'Model from which drift is measured; of a run, the trial that --source was converted from, or '
    'else the same trial.',
)
TEXT = flags.DEFINE_string('text', None, 'Text that the model reads.')
TOKENS = flags.DEFINE_string('tokens', None, 'Token ids that the model reads, as in "12 7 301".')
DATA = cli.define_data()
OUT = cli.define_path('out', None, 'Directory for numbers and figures.')

# Columns of the printed table: (heading, quantity, subject).
COLUMNS = (
    ('rank|of A', 'effective_rank', 'A'),
    ('symmetric|share of A', 'symmetric_share', 'A'),
    ('direc-|tionality', 'directionality', 'A'),
    ('rank|of B', 'effective_rank', 'B'),
    ('drift|of A', 'drift', 'A'),
    ('drift|of B', 'drift', 'B'),
    ('entropy,|nats', 'entropy', 'pattern'),
    ('self', 'diagonal_mass', 'pattern'),
    ('previous|token', 'previous_token_mass', 'pattern'),
    ('induction|(best head)', 'induction_score', 'pattern'),
    ('logit|deviation', 'logit_deviation', 'pattern'),
)
NUM_ROWS = 8  # validation rows that a run reads


def main() -> None:
    """Measures a model, prints a table, and writes numbers and figures to --out."""
    keep_programs()
    if TEXT.value is not None and TOKENS.value is not None:
        raise ConfigError('--text and --tokens exclude each other')
    out = None if OUT.value is None else check_directory(cli.required(OUT), name='--out')
    if out is not None and (out / 'analysis.json').exists():
        raise ConfigError(f'{out} already holds an analysis; give another directory')
    measured = Subject.load(SOURCE)
    reference = None
    reference_model = None
    if REFERENCE.value is not None:
        # The trial that --source was converted from, or else the trial with the same number.
        trial = exported.origin(measured.source.path).get('trial', measured.trial)
        reference = Subject.load(REFERENCE, trial)
        reference_model = reference.model

    batch = None  # what the model reads
    ids: list[int] = []
    tokens: list[str] = []
    if TEXT.value is not None or TOKENS.value is not None:
        ids, tokens = tokens_of_flag(measured.source, measured.model)
        batch = {'tokens_BT': np.array([ids], np.int32)}
    elif measured.source.config is not None:  # a run, which has data
        batch = validation_rows(measured.source)
    analysis = analyze(measured.model, batch, reference=reference_model)
    print_analysis(analysis, measured, reference)

    if out is not None:
        make_directory(out)
        write_numbers(out, analysis, measured, reference)
        draw(out, analysis)
        if tokens:
            draw_maps(out, measured.model, ids, tokens)
        print(f'wrote {out}')


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and its source."""

    source: loading.Loaded
    trial: int
    model: Transformer

    @classmethod
    def load(cls, flag: flags.FlagHolder, trial: int | None = None) -> 'Subject':
        """Loads a trial of the source that a flag names.

        Args:
            flag: The flag, SOURCE or REFERENCE.
            trial: The trial, by default --trial. A source with a single model ignores it.
        """
        source = loading.load(cli.required(flag), imports=IMPORTS.value)
        if trial is None:
            trial = source.check_trial(TRIAL.value)
        elif len(source.models) == 1:
            trial = 0
        model = source.models[source.check_trial(trial)]
        return cls(source, trial, model)

    def __str__(self) -> str:
        """Path, trial of a run, and variant."""
        trial = '' if self.source.config is None else f', trial {self.trial}'
        return f'{self.source.path}{trial}: {self.source.model_config.variant}'

    def record(self) -> dict[str, Any]:
        """Returns the description of the model in analysis.json."""
        return {
            'source': str(self.source.path),
            'trial': self.trial,
            'step': self.source.step,
            'model': self.model.config,
        }


def print_analysis(analysis: Analysis, measured: Subject, reference: Subject | None) -> None:
    """Prints the models, the table of quantities, and the layers that lack a matrix A or B."""
    print(f'{measured}, {counted(measured.model.config.num_layers, "layer")}')
    if reference is not None:
        print(f'drift from {reference}')
    print(table(analysis))
    for matrix, reason in (('A', 'not bilinear'), ('B', 'not linear in the values')):
        layers = [f'{site} {layer}' for site, layer, name in analysis.missing if name == matrix]
        if layers:
            print(f'{", ".join(layers)}: {reason}, so there is no matrix {matrix}[n]')


def validation_rows(source: loading.Loaded) -> dict[str, np.ndarray]:
    """Returns the first validation rows of a run, as one batch."""
    # A tokenizer.json is opened in the way that the run recorded.
    tokenizers = recorded_tokenizers(absolute(source.path), source.config.data)
    with use_recorded_tokenizers(*tokenizers):
        rows = rows_of(source.config)
    num_rows = min(NUM_ROWS, rows.count('validation'))
    batches = eval_batches(rows, 'validation', batch_size=num_rows, max_rows=num_rows)
    return next(batches)


def tokens_of_flag(source: loading.Loaded, model: Transformer) -> tuple[list[int], list[str]]:
    """Returns the token ids of --text or --tokens, and the text of each token."""
    flag = TEXT if TOKENS.value is None else TOKENS
    context = model.config.context
    if isinstance(model, EncoderDecoder):
        raise ConfigError(
            f'--{flag.name} is for a decoder or encoder; an encoder_decoder reads rows of its run'
        )
    if flag is TOKENS:
        ids = cli.token_ids(flag, source.model_config.vocab_size)
        tokens = [str(token_id) for token_id in ids]
    else:
        tokenizer = loading.tokenizer_for(source, DATA.value, '--tokens')
        try:
            ids = tokenizer.encode(flag.value).tolist()
        except ValueError as error:
            raise ConfigError(f'--text cannot be encoded: {error}') from error
        texts = [tokenizer.decode([token_id]) for token_id in ids]
        tokens = [text.replace('\n', '\\n') for text in texts]
    if not 2 <= len(ids) <= context:
        length = counted(ids, 'token')
        raise ConfigError(f'--{flag.name} has {length}; the model reads 2 to {context}')
    return ids, tokens


def table(analysis: Analysis) -> str:
    """Returns a table with a line for each attention layer and a column for each quantity.

    The values are means over heads, except for induction, whose value is the maximum.
    """
    rows = pd.DataFrame(analysis.rows)  # a row for each quantity, subject, site, layer and head
    values_of_heads = rows.groupby(['quantity', 'subject', 'site', 'layer'])['value']
    means = values_of_heads.mean(skipna=False)
    maxima = values_of_heads.max(skipna=False)

    titles = [('layer', True)]  # (title, whether the column is aligned to the left)
    cells_by_layer: dict[tuple[str, int], list[str]] = {}  # by (site, layer number)
    for row in analysis.rows:
        cells_by_layer[row.site, row.layer] = [f'{row.site} {row.layer}']
    for heading, quantity, subject in COLUMNS:
        values = maxima if quantity == 'induction_score' else means
        if (quantity, subject) not in values.index:
            continue
        titles.append((heading, False))
        value_by_layer = values[quantity, subject]  # by (site, layer number)
        for site_and_layer, cells in cells_by_layer.items():
            value = value_by_layer.get(site_and_layer)
            cells.append('-' if value is None else f'{value:.3g}')
    return text_table(titles, list(cells_by_layer.values()))


def write_numbers(
    out: Path, analysis: Analysis, measured: Subject, reference: Subject | None
) -> None:
    """Writes analysis.csv, and analysis.json with the models and all singular values."""
    write_atomic(out / 'analysis.csv', csv_text(map(dataclasses.asdict, analysis.rows)))
    spectra = []
    for (site, layer, circuit), s_ND in analysis.spectra.items():
        spectrum = {'site': site, 'layer': layer, 'circuit': circuit, 'singular_values': s_ND}
        spectra.append(spectrum)
    content = {
        **measured.record(),
        'reference': None if reference is None else reference.record(),
        'rows': analysis.rows,
        'spectra': spectra,
    }
    write_json(out / 'analysis.json', content, indent=None)


def draw(out: Path, analysis: Analysis) -> None:
    """Writes PNG figures of each attention site, such as 'cross_attention'.

    A site has a figure of singular values for each of A and B, and a figure of heat maps for each
    subject.
    """
    # By site and circuit ('A' or 'B'), then by layer.
    spectra: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for (site, layer, circuit), s_ND in analysis.spectra.items():
        spectra.setdefault((site, circuit), {})[layer] = s_ND
    for (site, circuit), spectrum_by_layer in spectra.items():
        stem = f'singular_values_{circuit}{suffix(site)}'
        save(out, stem, singular_values, spectrum_by_layer, f'{circuit}[n]')

    measured = sorted({(row.site, row.subject, row.quantity) for row in analysis.rows})
    # By site and subject, then by title.
    heat_map_values: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for site, subject, quantity in measured:
        title = quantity.replace('_', ' ')
        values_by_title = heat_map_values.setdefault((site, subject), {})
        values_by_title[title] = analysis.values(quantity, subject, site)
    for (site, subject), values_by_title in heat_map_values.items():
        save(out, f'heads_{subject}{suffix(site)}', heat_maps, values_by_title)


def draw_maps(out: Path, model: Transformer, ids: list[int], tokens: list[str]) -> None:
    """Writes maps.png: the probabilities of each layer, blank where a query may not attend."""
    inputs = {'tokens_BT': np.array([ids], np.int32)}
    pattern_by_site_and_layer = jax.jit(attention_patterns)(model, inputs)
    map_by_layer = {}
    for (_, layer), pattern in pattern_by_site_and_layer.items():
        may_attend_TS = pattern.mask_BTS[0]
        map_by_layer[layer] = np.where(may_attend_TS, pattern.probabilities_BNTS[0], np.nan)
    # The tokens label the queries and the keys.
    save(out, 'maps', attention_maps, map_by_layer, tokens, tokens)


def save(out: Path, stem: str, function: Any, *arguments: Any) -> None:
    """Draws a figure with a function, and writes it to out/stem.png."""
    with style_sheet():
        figure = function(*arguments)
        write_atomic(out / f'{stem}.png', render(figure, 'png'))


def suffix(site: str) -> str:
    """Returns the suffix of a site's files: '' for 'attention', '_cross' for 'cross_attention'."""
    if site == 'attention':
        return ''
    name = site.removesuffix('attention').strip('/_')
    return f'_{name}'


if __name__ == '__main__':
    cli.run(main, positional=SOURCE)
