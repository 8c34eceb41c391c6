"""What a reader wants to know first: a strip of names and values, and provenance in full."""

import json
from collections.abc import Iterable, Mapping
from html import escape

from qkattn.report import elements
from qkattn.report.numbers import si, words
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study
from qkattn.verdict.reading import flat
from qkattn.verdict.trials import corpora

# A value that differs in every run, such as a starting time, is not listed for every one.
MAX_VALUES = 3


def key_facts(study: Study, found: Findings) -> list[tuple[str, str]]:
    """(name, value) texts about the whole study."""
    trials = study.trials
    done = sum(bool(run.trials) for run in study.runs)
    unplanned = sum(run.name is None for run in study.missing)
    parameters = _span(row.example.parameters['total'] for row in found.arms)
    matching = 'not matched' if study.matched is None else f'{words(study.matched)} matched'
    finished = [trial for trial in trials if trial.finished] or trials
    facts = [
        ('baseline', study.baseline or 'none'),
        ('grid', f'{done} of {len(study.runs) + unplanned} runs, {len(trials):,} trials'),
        ('data', _each(data_name(t.data) for t in trials)),
        ('parameters', f'{parameters}, {matching.replace("non embedding", "non-embedding")}'),
        (
            'training',
            f'{_span(t.num_steps for t in finished)} steps, '
            f'{_span(t.num_tokens for t in finished)} tokens a trial',
        ),
        *_settings(study),
        ('device', _each(_device(t.provenance) for t in trials)),
    ]
    diverged = sum(not trial.finished for trial in trials)
    return facts + ([('diverged', f'{diverged} of {len(trials)} trials')] if diverged else [])


def _settings(study: Study) -> list[tuple[str, str]]:
    """Seeds and what was tuned with which; for a study without tuning, what was run."""
    if study.tuning is None:
        rates = sorted({trial.learning_rate for trial in study.trials})
        return [
            ('learning rates', _each(f'{rate:g}' for rate in rates)),
            ('seeds', _each(sorted({trial.seed for trial in study.trials}))),
        ]
    return [
        ('tuned for each arm', ', '.join(map(words, study.tuning.knobs)) or 'nothing'),
        ('screening seeds', _each(study.tuning.seeds)),
        ('verdict seeds', _each(study.seeds)),
        ('margin of equivalence', f'±{study.margin:g} nats/token'),
    ]


def _each(values: Iterable[object]) -> str:
    return ', '.join(dict.fromkeys(str(value) for value in values))


def _span(values: Iterable[float]) -> str:
    values = sorted(values)
    return '–'.join(dict.fromkeys((si(values[0]), si(values[-1]))))


def data_name(data: Mapping[str, object]) -> str:
    """'stdlib 3.11', 'copy 1 (length=16)' or, for parallel text, 'a/de -> a/en 1.0'."""
    sides = corpora(data)
    versions = dict.fromkeys(str(side['version']) for side in sides)
    name = f'{" → ".join(side["name"] for side in sides)} {" → ".join(versions)}'
    match data:
        case {'options': {**options}} if options:
            return f'{name} ({", ".join(f"{k}={_plain(v)}" for k, v in options.items())})'
    return name


def _device(provenance: Mapping[str, object]) -> str:
    match provenance:
        case {'devices': {'kind': kind, 'count': count}}:
            return f'{count} x {kind}'
        case {'device': device}:
            return _plain(device)
    return 'not recorded'


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def provenance_html(study: Study) -> str:
    """What ran where: each recorded value, with the number of runs when they differ."""
    facts: dict[str, dict[str, set[str]]] = {}
    for trial in study.trials:
        recorded = {
            'data': trial.data,
            'eval tokens': trial.eval_tokens,
            'trials run as': trial.lifting,
            **trial.provenance,
        }
        for name, value in flat(recorded, ': '):
            facts.setdefault(name, {}).setdefault(_plain(value), set()).add(trial.run)
    done = {trial.run for trial in study.trials}
    lines = [('command', escape(study.command))] if study.command else []
    for name, values in facts.items():
        if name == 'command' and study.command:
            continue
        texts = [
            escape(text)
            + (f' <small>({len(runs)} of {len(done)} runs)</small>' if len(values) > 1 else '')
            for text, runs in list(values.items())[:MAX_VALUES]
        ]
        texts += [f'and {len(values) - MAX_VALUES} more'] if len(values) > MAX_VALUES else []
        lines.append((name, '<br>'.join(texts)))
    body = [
        f'<tr><th scope="row">{escape(name)}</th><td class="left wrap">{text}</td></tr>'
        for name, text in lines
    ]
    return elements.table('', body, kind='plain')
