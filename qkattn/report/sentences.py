"""The findings in plain words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qkattn.report.numbers import counted, interval, listed, si, span, words
from qkattn.stats.inference import WORDS
from qkattn.verdict.equality import QUANTITIES
from qkattn.verdict.hygiene import Remark
from qkattn.verdict.load import Study
from qkattn.verdict.summary import Row

if TYPE_CHECKING:
    from qkattn.verdict.findings import Arm

# More arms than this are counted in a sentence, not named; the table names all.
MAX_NAMED = 5
ORDER = {word: place for place, word in enumerate((*WORDS, 'no verdict'))}


def held_equal(study: Study, arms: Sequence['Arm'], remarks: Sequence[Remark]) -> str:
    """What all arms have in common, in one sentence, and what they do not."""
    steps = sorted({trial.num_steps for arm in arms for trial in arm.row.verdicts})
    trained = f' ({" or ".join(f"{number:,}" for number in steps)} steps)' if steps else ''
    rates = f'each arm at its own tuned {tuned(study)}' if study.tuning else settings(arms)
    differs = list(dict.fromkeys(remark.differs for remark in remarks if remark.differs))
    but = f', but for {listed(differs)}' if differs else ''
    return f'{budget(study, arms)}; same data, training{trained} and evaluation set{but}; {rates}.'


def budget(study: Study, arms: Sequence['Arm']) -> str:
    """'Equal total parameters (252k, within 0.1 %)'."""
    if study.matched is None:
        return 'Parameters are not matched'
    residuals = [arm.row.example.residual for arm in arms]
    beyond = sum(abs(residual) > study.tolerance for residual in residuals if residual is not None)
    but = f' but for {counted(beyond, "arm")}' if beyond else ''
    within = f'within {100 * study.tolerance:.3g} %{but}'
    return f'Equal {QUANTITIES[study.matched]} ({targets(study, arms)}, {within})'


def targets(study: Study, arms: Sequence['Arm']) -> str:
    """'252k', or with its size where there are several."""
    found = {arm.row.size: arm.row.example.target_parameters for arm in arms}
    if len(found) == 1:
        return si(*found.values())
    return ', '.join(f'{si(target)} at {size}' for size, target in found.items())


def tuned(study: Study) -> str:
    return listed(map(words, study.tuning.knobs)) or 'nothing'


def settings(arms: Sequence['Arm']) -> str:
    rates = sorted({rate for arm in arms for rate in arm.row.learning_rates})
    if len(rates) == 1:
        return f'all at learning rate {rates[0]:g}, not tuned per arm'
    return f'learning rates from {rates[0]:g} to {rates[-1]:g}, not tuned with seeds of their own'


def found(study: Study, arms: Sequence['Arm'], remarks: Sequence[Remark]) -> tuple[str, ...]:
    """What was found, in one or two sentences for each size."""
    if study.baseline is None:
        return ('No verdict: the study has no baseline to compare with.',)
    if study.tuning is None:
        return _described(study, arms)
    of_study = [remark.clause for remark in remarks if remark.blocks and remark.arm is None]
    if of_study:
        return (f'No verdict: {"; ".join(of_study)}.',)
    said = []
    for size in study.sizes:
        of_size = [arm for arm in arms if arm.row.size == size]
        judged = [arm for arm in of_size if arm.verdict is not None]
        if judged:
            said.append(f'{_setting(study, of_size)}: {_verdicts(study, judged)}.')
    return (*said, *_absent(study, bool(said)))


def _setting(study: Study, of_size: Sequence['Arm']) -> str:
    """'At equal total parameters (252k), each arm at its own tuned rate, 8 fresh seeds'."""
    size = of_size[0].row.size
    where = f' at {size}' if len(study.sizes) > 1 else ''
    equal = 'Parameters not matched'
    if study.matched is not None:
        target = si(of_size[0].row.example.target_parameters)
        equal = f'At equal {QUANTITIES[study.matched]} ({target}{where})'
    elif where:
        equal += where
    counts = {len(arm.row.chosen) for arm in of_size if arm.row.chosen}
    seeds = f'{span(counts)} fresh seed{"s" * (counts != {1})}'
    return f'{equal}, each arm at its own tuned {tuned(study)}, {seeds}'


def _verdicts(study: Study, arms: Sequence['Arm']) -> str:
    by_word: dict[str, list] = {}
    for arm in arms:
        by_word.setdefault(arm.verdict.word, []).append(arm)
    parts = [
        _word(study, word, sorted(by_word[word], key=_mean))
        for word in sorted(by_word, key=ORDER.__getitem__)
    ]
    return '; '.join(parts)


def _mean(arm: 'Arm') -> float:
    return 0.0 if arm.difference is None else arm.difference.mean


def _word(study: Study, word: str, arms: Sequence['Arm']) -> str:
    """'a (-0.034 [-0.041, -0.027]) and b (...) are better than qk/vo'."""
    several = len(arms) > 1
    verb = 'are' if several else 'is'
    if word in ('better', 'worse'):
        return f'{_names(arms)} {verb} {word} than {study.baseline}'
    if word == 'equivalent':
        margin = f'within {study.margin:g} nats/token'
        return f'{_names(arms)} {verb} equivalent to {study.baseline} ({margin})'
    reason = '' if several else f': {arms[0].verdict.reason}'
    if word == 'undecided':
        return f'{_names(arms)} {verb} undecided{reason}'
    return f'{_names(arms, plain=True)} {"get" if several else "gets"} no verdict{reason}'


def _names(arms: Sequence['Arm'], plain: bool = False) -> str:
    shown = [
        arm.row.variant if plain or arm.difference is None else f'{arm.row.variant} ({_nats(arm)})'
        for arm in arms[:MAX_NAMED]
    ]
    more = len(arms) - MAX_NAMED
    return listed(shown + ([counted(more, 'more arm')] if more > 0 else []))


def _nats(arm: 'Arm') -> str:
    return interval(arm.difference, 3)


def _absent(study: Study, some: bool) -> list[str]:
    """One sentence on the arms without a result, where there are any."""
    lacking = {(arm.variant, arm.size) for arm in study.missing}
    if not lacking and some:
        return []
    if not some and not lacking:
        return ['No verdict: no arm but the baseline has results.']
    number = counted(len(lacking), 'arm')
    verb = 'has' if len(lacking) == 1 else 'have'
    head = '' if some else 'No verdict yet: '
    return [f'{head}{number} of {len(study.arms)} {verb} no verdict trials so far.']


def _described(study: Study, arms: Sequence['Arm']) -> tuple[str, ...]:
    """A study without tuning: why it gives no verdict, and its differences all the same."""
    said = [f'No verdict: {_why(study, [arm.row for arm in arms])}.']
    for size in study.sizes:
        compared = [a for a in arms if a.row.size == size and a.difference is not None]
        if not compared:
            continue
        where = f' at {size}' if len(study.sizes) > 1 else ''
        shown = sorted(compared, key=_mean)
        said.append(
            f'Differences to {study.baseline}{where}, nats/token (descriptive, below zero is '
            f'better): {_listed_differences(shown)}.'
        )
    return tuple(said)


def _listed_differences(arms: Sequence['Arm']) -> str:
    if len(arms) > MAX_NAMED:
        return f'from {_one(arms[0])} to {_one(arms[-1])}'
    return ', '.join(map(_one, arms))


def _one(arm: 'Arm') -> str:
    return f'{arm.row.variant} {_nats(arm)}'


def _why(study: Study, rows: Sequence[Row]) -> str:
    rates = sorted({rate for row in rows for rate in row.learning_rates})
    if len(rates) == 1:
        return f'the learning rate was not tuned per arm, all ran at {rates[0]:g}'
    return (
        'the learning rate of each arm was chosen by the seeds that its loss is measured with, '
        'not by screening seeds'
    )
