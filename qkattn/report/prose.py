"""Text from codes and numbers: every sentence of a report stands in `templates/`.

A template of sentences ends each with `{{ end }}`, so that its lines may be wrapped. Sentences are
plain text, which pages escape.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import jinja2
import jinja2.runtime
import markupsafe

from qkattn.config.calls import parse_call
from qkattn.config.variant import Variant, split_pattern
from qkattn.metrics import PREFIXES
from qkattn.report.plain_names import plain_name
from qkattn.stats.decision import DECIDED, Decision
from qkattn.stats.inference import Difference, Estimate
from qkattn.stats.scaling import Problem
from qkattn.stats.sweep import Sweep
from qkattn.study import variant_tables
from qkattn.study.arm_key import SAME_SHAPE, ArmKey
from qkattn.verdict.codes import SHORT_ARM, Reason, Remark, RemarkCode
from qkattn.verdict.settling import Length, Settling
from qkattn.verdict.trained_arm import TrainedArm
from qkattn.verdict.trained_study import TrainedStudy

NONE = '-'  # in a cell without a value
DIGITS = 6  # significant ones, of a derived number that is stored
NOT_RECORDED = 'not recorded'
END = '\x1f'  # follows each sentence of a template
HASH = re.compile(r'[0-9a-f]{32,}')
# Behind these a long name may go on in a next line: low_rank(|rank=8)/|vo?|num_kv_heads=1.
_BREAK = re.compile(r'(?<=[/(,?&:])')
# The splits as words.
SPLITS = {prefix: split for split, prefix in PREFIXES.items()}
# What a study matches, as a noun in the plural.
QUANTITIES = {
    'total': 'total parameters',
    'non_embedding': 'non-embedding parameters',
    'flops': 'FLOPs per token',
    'cache': 'cache floats per token',
}


def rounded(value: Any) -> Any:
    """A number as it is stored: to DIGITS significant digits, whole ones and text as they are."""
    if not isinstance(value, float) or value.is_integer():
        return value
    if abs(value) >= 10 ** (DIGITS - 1):  # digits before the point stay: it may be a count
        return round(value, 1)
    return float(f'{value:.{DIGITS - 1}e}')


def si(value: float | None) -> str:
    """Three significant digits and a decimal prefix, 1234567 -> '1.23M'."""
    if value is None:
        return NONE
    digits = f'{value:.2e}'  # '1.23e+06'
    exponent = int(digits.partition('e')[2])
    thousands = min(max(exponent // 3, 0), 6)
    if thousands == 0:
        return f'{float(digits):.3g}'
    prefix = ' kMGTPE'[thousands]
    number = f'{float(digits) / 1000**thousands:#.3g}'  # '#' keeps zeros, as in 1.20M
    return number.rstrip('.') + prefix


def mean_sd(value: Estimate | None, decimals: int, scale: float = 1.0) -> str:
    """'2.1000 ± 0.0300', without the sd where there is one value only; both times `scale`."""
    if value is None:
        return NONE
    mean = f'{scale * value.mean:.{decimals}f}'
    return mean if value.sd is None else f'{mean} ± {scale * value.sd:.{decimals}f}'


def interval(difference: Difference | None) -> str:
    """'+0.0500 [-0.0245, +0.1245]', without the interval where there is none."""
    if difference is None:
        return NONE
    mean = f'{difference.mean:+.4f}'
    if difference.low is None:
        return mean
    return f'{mean} [{difference.low:+.4f}, {difference.high:+.4f}]'


def marked(number: str, is_short: bool) -> str:
    """With a dagger after the first number where an arm falls short of its yardstick."""
    if not is_short or number == NONE:
        return number
    first, space, rest = number.partition(' ')
    return f'{first}†{space}{rest}'


def length(settling: Settling | None) -> str:
    """'settled', 'at this length', 'at this length: shrinks to +0.0120 at 4 times the steps'."""
    if settling is None:
        return ''
    if settling.code in (Length.SETTLED, Length.ONE_LENGTH):
        return settling.code.value
    moves = f'{settling.code.value} to {settling.longer:+.4f} at {settling.times:g} times the steps'
    return f'{Length.ONE_LENGTH.value}: {moves}, towards {settling.towards}'


def verdict(arm: TrainedArm) -> str:
    """The decision on an arm with a verdict, and whether it is settled or holds at this length."""
    return lasting(arm.verdict.decision.value, length(arm.settling))


def lasting(decision: str, length: str) -> str:
    """'worse, settled', 'worse at this length'; a decision without a verdict as it is."""
    if not length or decision not in [decided.value for decided in DECIDED]:
        return decision
    if length == Length.SETTLED.value:
        return f'{decision}, {length}'
    return f'{decision} {length}'


def optimum(sweep: Sweep | None) -> str:
    """'[0.0038, 0.0047]', the interval of the optimum; '' where nothing bounds it."""
    if sweep is None or sweep.optimum_low is None:
        return ''
    return f'[{sweep.optimum_low:.3g}, {sweep.optimum_high:.3g}]'


def p_value(p: float | None) -> str:
    """'0.021', '< 0.001'."""
    if p is None:
        return NONE
    return '< 0.001' if p < 0.001 else f'{p:.3f}'


def listed(names: Iterable[object]) -> str:
    """'a', 'a and b', 'a, b and c', ''."""
    texts = [str(name) for name in names]
    if len(texts) < 2:
        return ''.join(texts)
    return f'{", ".join(texts[:-1])} and {texts[-1]}'


def counted(number: int | Sized, noun: str) -> str:
    """'1 seed', '8 seeds'; of a sequence the number of its elements."""
    count = number if isinstance(number, int) else len(number)
    if count == 1:
        return f'1 {noun}'
    return f'{count:,} {noun}s'


def span(numbers: Iterable[int]) -> str:
    """'4-8' from the smallest to the largest, '8' if they are equal, 'no' if there are none."""
    ordered = sorted(numbers)
    if not ordered:
        return 'no'
    if ordered[0] == ordered[-1]:
        return str(ordered[0])
    return f'{ordered[0]}-{ordered[-1]}'


def words(name: str) -> str:
    """A field name as text: 'learning_rate' -> 'learning rate'; 'after W_Q' is unchanged."""
    return name if ' ' in name else name.replace('_', ' ')


def control_words(control: str) -> str:
    """The kind of a control as text."""
    return 'same shape' if control == SAME_SHAPE else words(control)


def one_line(text: str) -> str:
    return ' '.join(text.split())


def clause(
    code: Remark | Reason | Problem,
    comparisons: int = 0,
    study: TrainedStudy | None = None,
    intervals: bool = False,
    look: int = 1,
) -> str:
    """A code with its data as text; p is corrected for the `comparisons` and the `look`.

    `intervals` says whether the report shows intervals of differences.
    """
    name = f'{type(code).__name__.lower()}_{code.code.name.lower()}'
    about = {
        'comparisons': comparisons,
        'study': study,
        'intervals': intervals,
        'look': look,
    }
    return macro('clauses.j2', name, about, **code.data)[0]


def placed(key: ArmKey, study: TrainedStudy | None) -> str:
    """'b/vo at d_model=128', 'b/vo at d_model=128 (same shape)', with the corpus if several."""
    kind = f' ({control_words(key.control)})' if key.control else ''
    corpus = f' on {key.corpus}' if study and len(study.corpora) > 1 else ''
    return f'{key.variant} at {key.size}{corpus}{kind}'


def where(study: TrainedStudy, group: Any) -> str:
    """The size and corpus of a group of arms, as far as the study has several of them.

    'd_model=128', 'stdlib', 'd_model=128, stdlib', ''.
    """
    names = []
    if len(study.sizes) > 1:
        names.append(group.size)
    if len(study.corpora) > 1:
        names.append(group.corpus)
    return ', '.join(names)


def remark(code: Remark, study: TrainedStudy, intervals: bool = False) -> str:
    """A whole sentence, with the arm that it is about; `intervals` as in `clause`."""
    text = clause(code, study=study, intervals=intervals)
    if code.arm:
        return f'{placed(code.arm, study)}: {text}.'
    if code.every_arm:
        return f'every arm: {text}.'
    return f'{text[0].upper()}{text[1:]}.'


def reasons(judged: Any) -> str:
    """Why an arm, or what a claim compares, has its verdict."""
    verdict = judged.verdict
    clauses = [clause(why, verdict.num_comparisons, look=verdict.look) for why in verdict.reasons]
    return '; '.join(clauses)


def sentences(template: str, **values: Any) -> list[str]:
    """The sentences of a template, each on one line."""
    text = environment(html=False).get_template(template).render(**values)
    lines = [tidy(part) for part in text.split(END)]
    return [line for line in lines if line]


def macro(template: str, name: str, about: Mapping[str, Any], /, **values: Any) -> list[str]:
    """The sentences of a macro as plain text; `about` are values that all its macros see."""
    module = environment(html=False).get_template(template).make_module(dict(about))
    return [tidy(part) for part in getattr(module, name)(**values).split(END)]


def tidy(text: str) -> str:
    """On one line, without spaces before commas and the like."""
    return re.sub(r' ([,;:.)])(?=[ ,;.)]|$)', r'\1', one_line(text))


def device(provenance: Mapping[str, Any]) -> str:
    """'2 x cpu'."""
    devices = provenance.get('devices')
    return f'{devices["count"]} x {devices["kind"]}' if devices else NOT_RECORDED


def by_where(arms: Iterable[TrainedArm], study: TrainedStudy) -> dict[str, list[TrainedArm]]:
    """Arms by size and corpus, in their order."""
    groups = itertools.groupby(arms, key=lambda arm: where(study, arm))
    return {name: list(group) for name, group in groups}


def forms(model: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Each variant in a model with all options, and the equations of A[n] and B[n].

    'shared_qk(self_mask=False)/vo', 'encoder variant: qk/no_v'; an equation is NONE for a class
    outside the package.
    """
    variants = [('', f'{model["score"]}/{model["value"]}')]
    for site in ('encoder_variant', 'cross_variant', 'pattern'):
        texts = [text for text in split_pattern(model.get(site) or '') if text]
        variants += [(f'{words(site)}: ', text) for text in dict.fromkeys(texts)]
    for site, variant in variants:
        parsed = Variant.parse(variant)
        score, score_equation = _form(parsed.score, 'Score')
        value, value_equation = _form(parsed.value, 'Value')
        yield f'{site}{score}/{value}', score_equation, value_equation


def _form(circuit: str, kind: str) -> tuple[str, str]:
    """A score or value with all its options, defaults among them, and its equation.

    'shared_qk' is 'shared_qk(self_mask=False)'; a class outside the package stays as it is.
    """
    entry = variant_tables.stored()[kind].get(circuit.partition('(')[0])
    if entry is None:
        return circuit, NONE
    name, options = parse_call(circuit, kind)
    every_option = entry['options'] | options
    if every_option:
        name += f'({", ".join(f"{key}={option!r}" for key, option in every_option.items())})'
    return name, entry['equation']


@jinja2.pass_context
def _arm_title(context: jinja2.runtime.Context, arm: Any) -> str:
    return placed(arm if isinstance(arm, ArmKey) else arm.key, context.get('study'))


def _details(measure: Any, arms: Iterable[TrainedArm]) -> dict[str, list]:
    """The recorded details of how a metric was measured, each value once."""
    trials = [trial for arm in arms for trial in arm.chosen]
    details = dict[str, list]()
    for name in measure.metric.details:
        values = dict.fromkeys(trial.metrics[f'{measure.split}_{name}'] for trial in trials)
        details[name] = [value for value in values if value is not None]
    return details


def _by_difference(arms: Iterable[TrainedArm]) -> list[TrainedArm]:
    """Arms with the lowest difference first; one without a comparison counts as 0."""
    return sorted(arms, key=lambda arm: arm.comparison.difference.mean if arm.comparison else 0.0)


def _withholding(remarks: Iterable[Remark]) -> list[Remark]:
    """The remarks that withhold a verdict; controls have none."""
    return [r for r in remarks if r.blocks and not (r.arm and r.arm.control)]


def _rates(arms: Iterable[TrainedArm]) -> list[float]:
    """The learning rates of arms, each once, in ascending order."""
    return sorted({rate for arm in arms for rate in arm.learning_rates})


def breakable(name: str) -> markupsafe.Markup:
    """A name in HTML that breaks into lines between its parts, not inside words."""
    return markupsafe.Markup('<wbr>').join(_BREAK.split(name))


FILTERS = {
    'arm_title': _arm_title,
    'breakable': breakable,
    'by_difference': _by_difference,
    'by_where': by_where,
    'clause': clause,
    'counted': counted,
    'details': _details,
    'g': lambda value, spec='g': f'{value:{spec}}',
    'integers': lambda values: [f'{value:,}' for value in values],
    'interval': interval,
    'listed': listed,
    'numbers': lambda values: ', '.join(f'{value:g}' for value in values),
    'p_value': p_value,
    'plain_name': plain_name,
    'quantity': QUANTITIES.__getitem__,
    'rates': _rates,
    'reasons': reasons,
    'remark': remark,
    'shortened': lambda text: f'{text[:12]}…' if HASH.fullmatch(text) else text,
    'si': si,
    'span': span,
    'split': SPLITS.__getitem__,
    'tidy': tidy,
    'verdict': verdict,
    'withholding': _withholding,
    'words': words,
}


@functools.cache
def environment(html: bool) -> jinja2.Environment:
    """Templates with the filters of this module; values are escaped in HTML only."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader('qkattn.report'),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= FILTERS
    templates.globals |= {
        'end': END,  # of a sentence
        'DECIDED': DECIDED,
        'Decision': Decision,
        'RemarkCode': RemarkCode,
        'SHORT_ARM': SHORT_ARM,
    }
    return templates
