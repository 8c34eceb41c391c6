"""Trials that do not belong together, in sentences: of one arm, or with scores unlike others."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from qkattn.errors import ReportError
from qkattn.metrics import METRICS
from qkattn.study.place import Place
from qkattn.study.tuning import SCREENING, SINGLE
from qkattn.verdict.documents import Documents
from qkattn.verdict.runs import Trial


def named(place: Place) -> str:
    """'b/vo' at 'd_model=128' on 'stdlib' as a sentence names it, with its control if it is one."""
    return f'{place.variant!r} at {place.size!r} on {place.corpus!r}' + (
        f' ({place.control})' if place.control else ''
    )


def arm_problems(trials: Iterable[Trial]) -> Iterator[str]:
    """Trials of an arm in several runs that do not belong together."""
    owners: dict[tuple, Trial] = {}
    shapes: dict[Place, Trial] = {}
    for trial in trials:
        arm = named(trial.place)
        owner = owners.setdefault((trial.place, trial.stage, trial.key), trial)
        if trial.stage == SINGLE and owner is not trial:
            raise ReportError(
                f'runs {owner.run!r} and {trial.run!r} both hold seed {trial.seed} of {arm} with '
                'the same settings; one seed cannot count twice.'
            )
        first = shapes.setdefault(trial.place, trial)
        if (first.parameters, first.config) != (trial.parameters, trial.config):
            yield (
                f'trials of {arm} differ in parameters or config: runs {first.run!r} and '
                f'{trial.run!r}; the table shows those of the chosen trials.'
            )


def document_problems(trials: Iterable[Trial]) -> Iterator[str]:
    """Losses of arms of one size and corpus that are not over the same documents."""
    firsts: dict[tuple[str, str, str], tuple[Trial, Documents]] = {}
    runs: set[str] = set()
    for trial in trials:
        if trial.stage == SCREENING or trial.run in runs:
            continue  # the trials of a run share their documents, and screening does not use them
        for split, found in trial.documents.items():
            runs.add(trial.run)
            key = trial.place.size, trial.place.corpus, split
            first, expected = firsts.setdefault(key, (trial, found))
            if not found.alike(expected):
                yield (
                    f'losses are not comparable, documents of split {split!r} differ: '
                    f'{len(expected.names)} with {expected.tokens_C.sum():,.0f} targets '
                    f'({named(first.place)}), {len(found.names)} with {found.tokens_C.sum():,.0f} '
                    f'({named(trial.place)}).'
                )


def score_problems(trials: Sequence[Trial]) -> Iterator[str]:
    """Scores that do not compare: not computed alike (signatures), or on other numbers of texts.

    The details of a metric are the same for all trials; texts on all splits together.
    """
    for metric in METRICS.values():
        for name, kind in metric.details.items():
            fields = tuple(f'{prefix}_{name}' for prefix in metric.prefixes)
            for compared in [fields] if kind is str else [(field,) for field in fields]:
                places: dict[Any, str] = {}
                for trial, field in itertools.product(trials, compared):
                    if (value := trial.metrics[field]) is not None:
                        places.setdefault(value, named(trial.place))
                if len(places) > 1:
                    listed = ', '.join(f'{value} ({place})' for value, place in places.items())
                    names = '/'.join(compared)
                    yield f'scores are not comparable, {names} differs: {listed}.'
