"""Synthetic studies and a strict reader of HTML."""

import json
import math
from html.parser import HTMLParser

from qkattn.storage import ledger
from qkattn.verdict import find, load_study
from tests.studies import tuned_arm, write_tuned

BASE = tuple(2 + 0.01 * math.sin(seed) for seed in range(8))
SIZES = {f'd_model={d}': d for d in (32, 64, 96, 128)}
LONG = 'my_package.my_module:MyScore/my_package.other:MyValue?num_kv_heads=1'


def read(directory):
    return find(load_study(directory))


def shifted(mean, spread=0.001):
    return [loss + mean + spread * (-1) ** seed for seed, loss in enumerate(BASE)]


def arms():
    """A baseline and one arm of each decision."""
    made = {
        'qk/vo': BASE,
        'good/vo': shifted(-0.03),
        'bad/vo': shifted(0.05),
        'same/vo': shifted(0.0005),
        'wide/vo': shifted(0.006, 0.012),
    }
    return [r for v, losses in made.items() for r in tuned_arm(v, losses=losses)]


def scaled(multiplier):
    """Losses of a scaling law, of an arm whose parameters count for `multiplier` each."""
    records = []
    for size, d in SIZES.items():
        parameters = tuned_arm('qk/vo', size, BASE, d_model=d)[0]['parameters']['total']
        for variant, factor in (('qk/vo', 1.0), ('b/vo', multiplier)):
            loss = 1.5 + 30 * (factor * parameters) ** -0.3
            seeds = [loss + 1e-4 * math.sin(7 * seed + d) for seed in range(8)]
            records += tuned_arm(variant, size, seeds, d_model=d)
    return records


def controlled(directory):
    """A study with controls, an arm that was added after a look, and accepted changes."""
    target = tuned_arm('qk/vo')[0]['target_parameters']
    planned = {
        ('qk/vo', None): (0.0, 128, 0),
        ('qk/no_o', None): (-0.03, 136, -80),
        ('shared_qk/vo', None): (0.04, 132, 40),
        ('qk/no_o', 'equal_shape'): (-0.02, 128, -65536),
        ('shared_qk/vo', 'equal_shape'): (0.06, 128, -65536),
        ('qk/vo', 'longer'): (-0.3, 128, 0),
        ('qk/no_o', 'longer'): (-0.31, 136, -80),
        ('qk/no_v', None): (-0.01, 136, -80),
    }
    records = []
    for (variant, control), (shift, d_model, more) in planned.items():
        changes = {'num_steps': 1600, 'num_tokens': 1600 * 768} if control == 'longer' else {}
        if (variant, control) == ('shared_qk/vo', 'equal_shape'):
            changes['optimum'] = 16e-3  # not bracketed, which is in the way of no verdict
        losses = BASE if (variant, control) == ('qk/vo', None) else shifted(shift)
        made = tuned_arm(variant, losses=losses, control=control, d_model=d_model, **changes)
        for record in made:
            record |= {'target_parameters': target, 'residual': more / target}
            record['parameters'] = record['parameters'] | {'total': target + more}
        records += made
    early = [record for record in records if record['variant'] != 'qk/no_v']
    controls = {'equal_shape': True, 'longer': 4, 'longer_seeds': []}
    write_tuned(directory, early, controls=controls)
    ledger.record_look(directory)
    declared = (directory / ledger.NAME).read_text()
    write_tuned(directory, records, controls=controls)
    (directory / ledger.NAME).write_text(declared)
    ledger.declare(directory, json.loads((directory / 'study.json').read_text()))
    ledger.accept(directory, ['uncommitted'], 'a comment was edited')
    return directory


def row_names(ax):
    """The names of the lines of a forest plot, from the top."""
    name = ax.yaxis.get_major_formatter()
    return [name(y, place) for place, y in enumerate(ax.get_yticks())]


class Page(HTMLParser):
    """Collects tags, ids and lines of text, and fails on tags that do not nest."""

    def __init__(self, html: str):
        super().__init__()
        self.after_break = False
        self.open = []
        self.tags = []
        self.ids = []
        self.lines = ['']
        self.feed(html)
        self.close()
        assert self.open == []
        self.lines = [line for text in self.lines if (line := ' '.join(text.split()))]
        self.text = ' '.join(self.lines)

    def handle_starttag(self, tag, attrs):
        # A name goes on behind a place where its line may break.
        self.after_break = tag == 'wbr'
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == 'id']
        if tag in {'h1', 'h2', 'h3', 'p', 'li', 'tr', 'dt', 'section', 'figcaption', 'summary'}:
            self.lines.append('')
        if tag not in {'meta', 'br', 'wbr', 'link', 'img', 'source', 'input', 'hr'}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ['style']:
            self.lines[-1] += data if self.after_break else f' {data}'
        self.after_break = False
