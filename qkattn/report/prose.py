"""Formats numbers, names and codes as text, and renders the templates of a report.

A template ends each sentence with `{{ end }}`. Sentences are plain text, which pages escape.
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

# The text of a cell without a value.
NONE = '-'
# The significant digits of stored derived numbers.
DIGITS = 6
NOT_RECORDED = 'not recorded'
# The character that ends each sentence of a template.
END = '\x1f'
HASH = re.compile(r'[0-9a-f]{32,}')
# Where a long name may break into lines: low_rank(|rank=8)/|vo?|num_kv_heads=1.
_BREAK = re.compile(r'(?<=[/(,?&:])')
# Split names by prefix: 'validation' for 'val'.
SPLITS = {prefix: split for split, prefix in PREFIXES.items()}
# The quantities that a study may match, in the plural.
QUANTITIES = {
    'total': 'total parameters',
    'non_embedding': 'non-embedding parameters',
    'flops': 'FLOPs per token',
    'cache': 'cache floats per token',
}


def rounded(value: Any) -> Any:
    """Rounds a float to DIGITS significant digits. Whole numbers and text do not change."""
    if not isinstance(value, float) or value.is_integer():
        return value
    if abs(value) >= 10 ** (DIGITS - 1):
        # Keep all digits before the point, as the value may be a mean of counts.
        return round(value, 1)
    return float(f'{value:.{DIGITS - 1}e}')


def si(value: float | None) -> str:
    """Formats a number with three significant digits and an SI prefix: 1234567 -> '1.23M'."""
    if value is None:
        return NONE
    scientific = f'{value:.2e}'  # '1.23e+06'
    rounded_value = float(scientific)
    exponent = int(scientific.partition('e')[2])

    prefixes = ('', 'k', 'M', 'G', 'T', 'P', 'E')  # for 1000^0, 1000^1, ...
    power_of_1000 = min(exponent // 3, len(prefixes) - 1)
    if power_of_1000 <= 0:
        return f'{rounded_value:.3g}'
    # '#' keeps trailing zeros, as in '1.20', but gives '123.' for 123.
    number = f'{rounded_value / 1000**power_of_1000:#.3g}'.rstrip('.')
    return number + prefixes[power_of_1000]


def mean_sd(value: Estimate | None, decimals: int, scale: float = 1.0) -> str:
    """Formats a mean and its standard deviation, times `scale`: '2.1000 ± 0.0300'."""
    if value is None:
        return NONE
    mean = f'{scale * value.mean:.{decimals}f}'
    if value.sd is None:  # a single value has no standard deviation
        return mean
    return f'{mean} ± {scale * value.sd:.{decimals}f}'


def interval(difference: Difference | None) -> str:
    """Formats a difference and its interval: '+0.0500 [-0.0245, +0.1245]'."""
    if difference is None:
        return NONE
    mean = f'{difference.mean:+.4f}'
    if difference.low is None:
        return mean
    return f'{mean} [{difference.low:+.4f}, {difference.high:+.4f}]'


def marked(number: str, is_short: bool) -> str:
    """Adds a dagger to the first number of a text if `is_short`.

    The dagger marks an arm that falls short of its yardstick. For example,
    '+0.0500 [-0.0245, +0.1245]' becomes '+0.0500† [-0.0245, +0.1245]'.
    """
    if not is_short or number == NONE:
        return number
    first, space, rest = number.partition(' ')
    return f'{first}†{space}{rest}'


def length_words(settling: Settling | None) -> str:
    """Says whether a difference lasts in longer training; '' if that is unknown.

    The text is one of these:

        settled                     (longer training confirms the difference)
        at this length              (there is no longer training)
        at this length: shrinks to +0.0120 at 4 times the steps, towards better
    """
    if settling is None:
        return ''
    if settling.code in (Length.SETTLED, Length.ONE_LENGTH):
        return settling.code.value
    verb = settling.code.value  # 'shrinks'
    change = f'{verb} to {settling.longer:+.4f}'
    steps = f'at {settling.times:g} times the steps'
    return f'{Length.ONE_LENGTH.value}: {change} {steps}, towards {settling.towards}'


def verdict(arm: TrainedArm) -> str:
    """Formats an arm's verdict: 'undecided', 'worse, settled', 'worse at this length'."""
    return decision_at_length(arm.verdict.decision.value, length_words(arm.settling))


def decision_at_length(decision: str, length: str) -> str:
    """Joins a decision and the text of `length_words`: 'worse, settled'.

    A decision other than better, worse and equivalent does not get the text.
    """
    is_decided = decision in [decided.value for decided in DECIDED]
    if not is_decided or not length:
        return decision
    if length == Length.SETTLED.value:
        return f'{decision}, {length}'
    return f'{decision} {length}'


def optimum(sweep: Sweep | None) -> str:
    """Formats the interval of a sweep's optimum: '[0.0038, 0.0047]'; '' without an interval."""
    if sweep is None or sweep.optimum_low is None:
        return ''
    return f'[{sweep.optimum_low:.3g}, {sweep.optimum_high:.3g}]'


def p_value(p: float | None) -> str:
    """Formats a p value: '0.021', '< 0.001'."""
    if p is None:
        return NONE
    return '< 0.001' if p < 0.001 else f'{p:.3f}'


def listed(names: Iterable[object]) -> str:
    """Joins names as in a sentence: 'a', 'a and b', 'a, b and c'."""
    texts = [str(name) for name in names]
    if len(texts) < 2:
        return ''.join(texts)
    all_but_last = ', '.join(texts[:-1])
    return f'{all_but_last} and {texts[-1]}'


def counted(number: int | Sized, noun: str) -> str:
    """Formats a count, or the length of a collection, with a noun: '1 seed', '8 seeds'."""
    count = number if isinstance(number, int) else len(number)
    if count == 1:
        return f'1 {noun}'
    return f'{count:,} {noun}s'


def span(numbers: Iterable[int]) -> str:
    """Formats the range of numbers: '4-8', '8' if all are equal, 'no' if there are none."""
    all_numbers = list(numbers)
    if not all_numbers:
        return 'no'
    lowest = min(all_numbers)
    highest = max(all_numbers)
    if lowest == highest:
        return str(lowest)
    return f'{lowest}-{highest}'


def words(name: str) -> str:
    """Writes a field name as text: 'learning_rate' -> 'learning rate'."""
    is_text = ' ' in name  # such as 'after W_Q'
    return name if is_text else name.replace('_', ' ')


def control_words(control: str) -> str:
    """Writes a control's name as text."""
    return 'same shape' if control == SAME_SHAPE else words(control)


def one_line(text: str) -> str:
    """Replaces line breaks and repeated spaces by single spaces."""
    return ' '.join(text.split())


def clause(
    statement: Remark | Reason | Problem,
    comparisons: int = 0,
    study: TrainedStudy | None = None,
    intervals: bool = False,
    look: int = 1,
) -> str:
    """Writes a remark, a reason or a problem as a clause: '2 of 8 trials diverged'.

    Args:
        statement: Its class and code choose a macro of templates/clauses.j2, and its data are the
            macro's arguments.
        comparisons: The number of comparisons for which the p value in the clause is corrected.
        study: The study, if the clause depends on it.
        intervals: Whether the report shows intervals of differences.
        look: The number of studies of the same question, for which p values are also corrected.
    """
    # For example, 'reason_diverged'.
    macro_name = f'{type(statement).__name__}_{statement.code.name}'.lower()
    context = {
        'comparisons': comparisons,
        'study': study,
        'intervals': intervals,
        'look': look,
    }
    texts = macro('clauses.j2', macro_name, context, **statement.data)
    return texts[0]  # a clause is one sentence


def arm_title(key: ArmKey, study: TrainedStudy | None) -> str:
    """Formats an arm's key: 'b/vo at d_model=128', 'b/vo at d_model=128 (same shape)'."""
    has_several_corpora = study is not None and len(study.corpora) > 1
    title = f'{key.variant} at {key.size}'
    if has_several_corpora:
        title += f' on {key.corpus}'
    if key.control:
        title += f' ({control_words(key.control)})'
    return title


def size_and_corpus(study: TrainedStudy, arm: TrainedArm | ArmKey) -> str:
    """Formats an arm's size and corpus, where the study has several: 'd_model=128, stdlib'."""
    names = []
    if len(study.sizes) > 1:
        names.append(arm.size)
    if len(study.corpora) > 1:
        names.append(arm.corpus)
    return ', '.join(names)


def remark(statement: Remark, study: TrainedStudy, intervals: bool = False) -> str:
    """Writes a remark as a sentence that begins with the arm, if the remark has one.

    `intervals` is whether the report shows intervals of differences.
    """
    text = clause(statement, study=study, intervals=intervals)
    if statement.arm:
        return f'{arm_title(statement.arm, study)}: {text}.'
    if statement.every_arm:
        return f'every arm: {text}.'
    return f'{text[0].upper()}{text[1:]}.'


def reasons(judged: Any) -> str:
    """Formats the reasons for the verdict of an arm, or of a claim's comparison."""
    verdict = judged.verdict
    clauses = []
    for reason in verdict.reasons:
        clauses.append(clause(reason, comparisons=verdict.num_comparisons, look=verdict.look))
    return '; '.join(clauses)


def sentences(template: str, **values: Any) -> list[str]:
    """Renders a template with values; returns its sentences, each on one line."""
    text = environment(html=False).get_template(template).render(**values)
    lines = [tidy(part) for part in text.split(END)]
    return [line for line in lines if line]


def macro(template: str, name: str, context: Mapping[str, Any], /, **values: Any) -> list[str]:
    """Calls a macro of a template; returns its sentences as plain text.

    Args:
        template: The file name of the template.
        name: The macro, which has `{{ end }}` between its sentences.
        context: Global values of the template.
        values: The arguments of the macro.
    """
    module = environment(html=False).get_template(template).make_module(dict(context))
    call_macro = getattr(module, name)
    text = call_macro(**values)
    return [tidy(sentence) for sentence in text.split(END)]


def tidy(text: str) -> str:
    """Puts text on one line, without spaces before punctuation marks."""
    tidied = re.sub(r' ([,;:.)])(?=[ ,;.)]|$)', r'\1', one_line(text))
    # Escaped text stays Markup, so that a page does not escape it again.
    return markupsafe.Markup(tidied) if isinstance(text, markupsafe.Markup) else tidied


def device(provenance: Mapping[str, Any]) -> str:
    """Formats the devices of a trial: '2 x cpu'."""
    devices = provenance.get('devices')
    if not devices:
        return NOT_RECORDED
    return f'{devices["count"]} x {devices["kind"]}'


def by_size_and_corpus(
    arms: Iterable[TrainedArm], study: TrainedStudy
) -> dict[str, list[TrainedArm]]:
    """Groups arms by size and corpus: {'d_model=128, stdlib': [...], ...}.

    The arms have to be sorted by size and corpus.
    """
    groups = itertools.groupby(arms, key=lambda arm: size_and_corpus(study, arm))
    return {name: list(group) for name, group in groups}


def forms(model: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields the form and the equations of each variant of a model.

    The form is the variant with all its options. Variants of an encoder, cross-attention or a
    pattern have a prefix, as in 'pattern: qk/vo'.

    Args:
        model: The model settings in a run's config.

    Yields:
        The form, the score equation and the value equation for head n, such as
        ('low_rank(rank=8)/vo', 'W_Q[n] W_K[n]^T, rank R', 'W_V[n] W_O[n]'). A class from outside
        the package has the equation '-'.
    """
    main_variant = f'{model["score"]}/{model["value"]}'
    prefixes_and_variants = [('', main_variant)]
    for setting in ('encoder_variant', 'cross_variant', 'pattern'):
        variant_names = model.get(setting)
        if not variant_names:
            continue
        prefix = f'{words(setting)}: '
        # A pattern such as 'qk/vo, qk/no_v, qk/vo' repeats variants.
        unique_variants = dict.fromkeys(split_pattern(variant_names))
        for variant in unique_variants:
            prefixes_and_variants.append((prefix, variant))

    for prefix, variant in prefixes_and_variants:
        score, value = Variant.parse(variant)
        score_form, score_equation = _form(score, kind='Score')
        value_form, value_equation = _form(value, kind='Value')
        yield f'{prefix}{score_form}/{value_form}', score_equation, value_equation


def _form(circuit: str, kind: str) -> tuple[str, str]:
    """Returns the form and the equation of a score or value.

    The form has all options: that of 'shared_qk' is 'shared_qk(self_mask=False)'. `kind` is 'Score'
    or 'Value'.
    """
    name, _, _ = circuit.partition('(')  # without options
    catalogue = variant_tables.stored()[kind]
    if name not in catalogue:
        # A class from outside the package, whose options and equation are unknown.
        return circuit, NONE

    default_options = catalogue[name]['options']
    _, given_options = parse_call(circuit, kind)
    options = default_options | given_options
    form = name
    if options:
        arguments = ', '.join(f'{option}={value!r}' for option, value in options.items())
        form = f'{name}({arguments})'
    return form, catalogue[name]['equation']


@jinja2.pass_context
def _arm_title(context: jinja2.runtime.Context, arm: Any) -> str:
    """Formats an arm or an arm's key as `arm_title` does, for the template's study."""
    key = arm if isinstance(arm, ArmKey) else arm.key
    return arm_title(key, context.get('study'))


@jinja2.pass_context
def _arm_name(context: jinja2.runtime.Context, arm: TrainedArm) -> str:
    """Returns an arm's variant, with size and corpus if the study has several of either."""
    study = context['study']
    has_one_size_and_corpus = not size_and_corpus(study, arm)
    if has_one_size_and_corpus:
        return arm.variant
    key_without_control = arm.key._replace(control=None)
    return arm_title(key_without_control, study)


def _details(measure: Any, arms: Iterable[TrainedArm]) -> dict[str, list]:
    """Returns the distinct recorded values of each detail of a metric, by the detail's name."""
    trials = [trial for arm in arms for trial in arm.chosen]
    values_by_detail = dict[str, list]()
    for detail in measure.metric.details:
        field = f'{measure.split}_{detail}'  # such as 'test_bleu_signature'
        unique_values = dict.fromkeys(trial.metrics[field] for trial in trials)
        values_by_detail[detail] = [value for value in unique_values if value is not None]
    return values_by_detail


def _by_difference(arms: Iterable[TrainedArm]) -> list[TrainedArm]:
    """Sorts arms by their difference from the baseline, lowest first; 0 without a comparison."""

    def difference(arm: TrainedArm) -> float:
        return arm.comparison.difference.mean if arm.comparison else 0.0

    return sorted(arms, key=difference)


def _withholding(remarks: Iterable[Remark]) -> list[Remark]:
    """Returns the remarks that withhold a verdict. Controls have no verdicts."""
    withholding = []
    for remark in remarks:
        is_on_control = remark.arm and remark.arm.control
        if remark.blocks and not is_on_control:
            withholding.append(remark)
    return withholding


def _rates(arms: Iterable[TrainedArm]) -> list[float]:
    """Returns the distinct learning rates of arms in ascending order."""
    return sorted({rate for arm in arms for rate in arm.learning_rates})


def breakable(name: str) -> markupsafe.Markup:
    """Returns a name as HTML with line break opportunities between its parts."""
    return markupsafe.Markup('<wbr>').join(_BREAK.split(name))


FILTERS = {
    'arm_name': _arm_name,
    'arm_title': _arm_title,
    'breakable': breakable,
    'by_difference': _by_difference,
    'by_size_and_corpus': by_size_and_corpus,
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
    """Returns the Jinja environment of the templates; `html` turns on HTML escaping."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader('qkattn.report'),
        autoescape=html,
        undefined=jinja2.StrictUndefined,  # an undefined value raises an error
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= FILTERS
    templates.globals |= {
        'end': END,
        'DECIDED': DECIDED,
        'Decision': Decision,
        'RemarkCode': RemarkCode,
        'SHORT_ARM': SHORT_ARM,
    }
    return templates
