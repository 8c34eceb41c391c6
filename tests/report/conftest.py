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


def findings_of(directory):
    return find(load_study(directory))


def losses_around(mean, spread=0.001):
    """The baseline's losses plus `mean`, and plus or minus `spread` by turns."""
    return [loss + mean + spread * (-1) ** seed for seed, loss in enumerate(BASE)]


def records_of_every_decision():
    """Trials of a baseline and of one arm for each decision."""
    losses_by_variant = {
        'qk/vo': BASE,
        'good/vo': losses_around(-0.03),
        'bad/vo': losses_around(0.05),
        'same/vo': losses_around(0.0005),
        'wide/vo': losses_around(0.006, 0.012),
    }
    records = []
    for variant, losses in losses_by_variant.items():
        records += tuned_arm(variant, losses=losses)
    return records


def records_of_a_scaling_law(multiplier):
    """Trials at four sizes whose losses follow 1.5 + 30 N^-0.3 in the number of parameters N.

    A parameter of arm b/vo is worth `multiplier` parameters of the baseline.
    """
    records = []
    for size, d in SIZES.items():
        parameters = tuned_arm('qk/vo', size, BASE, d_model=d)[0]['parameters']['total']
        for variant, factor in (('qk/vo', 1.0), ('b/vo', multiplier)):
            loss = 1.5 + 30 * (factor * parameters) ** -0.3
            seeds = [loss + 1e-4 * math.sin(7 * seed + d) for seed in range(8)]
            records += tuned_arm(variant, size, seeds, d_model=d)
    return records


def write_controlled_study(directory):
    """Writes a study with controls, an arm that was added after a look, and accepted changes."""
    target = tuned_arm('qk/vo')[0]['target_parameters']
    # Variant and control: the shift of its losses, d_model, parameters beyond the target.
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
            changes['optimum'] = 16e-3  # at the end of its grid, which withholds no verdict
        losses = BASE if (variant, control) == ('qk/vo', None) else losses_around(shift)
        trials = tuned_arm(variant, losses=losses, control=control, d_model=d_model, **changes)
        for record in trials:
            record |= {'target_parameters': target, 'residual': more / target}
            record['parameters'] = record['parameters'] | {'total': target + more}
        records += trials

    # The ledger has a look at all arms but qk/no_v, which is declared afterwards.
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
        # A word goes on behind <wbr>, where its line may break.
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
