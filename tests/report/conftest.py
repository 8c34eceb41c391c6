"""Synthetic studies and a strict reader of HTML."""

import json
import math
from html.parser import HTMLParser
from typing import NamedTuple

from qkattn.storage import ledger
from qkattn.verdict import find, load_study
from tests.studies import tuned_arm, write_tuned

# Losses of the baseline: about 2, a little different for each of eight seeds.
BASE = tuple(2 + 0.01 * math.sin(seed) for seed in range(8))
SIZES = {f'd_model={d}': d for d in (32, 64, 96, 128)}
LONG = 'my_package.my_module:MyScore/my_package.other:MyValue?num_kv_heads=1'


def findings_of(directory):
    return find(load_study(directory))


def losses_around(mean, spread=0.001):
    """The losses of the baseline plus `mean` + `spread` (even seeds) or `mean` - `spread` (odd)."""
    losses = []
    for seed, loss in enumerate(BASE):
        sign = 1 if seed % 2 == 0 else -1
        losses.append(loss + mean + sign * spread)
    return losses


def records_of_every_decision():
    """Returns the trials of the baseline qk/vo and of one arm for each decision.

    `losses_around(x)` are the baseline's losses of eight seeds plus about x. The comments give the
    decisions at the default margin of equivalence, 0.005.
    """
    losses_by_variant = {
        'qk/vo': BASE,
        'good/vo': losses_around(-0.03),  # better
        'bad/vo': losses_around(0.05),  # worse
        'same/vo': losses_around(0.0005),  # equivalent
        'wide/vo': losses_around(0.006, spread=0.012),  # undecided: seeds differ too much
    }
    records = []
    for variant, losses in losses_by_variant.items():
        records += tuned_arm(variant, losses=losses)
    return records


def records_of_a_scaling_law(multiplier):
    """Returns trials of the baseline qk/vo and the arm b/vo at four sizes.

    A model with N parameters has the loss 1.5 + 30 * N**-0.3. Seeds change it by at most 1e-4. A
    parameter of b/vo is worth `multiplier` parameters of the baseline.
    """
    worth_of_a_parameter = {'qk/vo': 1.0, 'b/vo': multiplier}
    records = []
    for size, d_model in SIZES.items():
        # The number of parameters of the baseline is in each of its trials.
        baseline = tuned_arm('qk/vo', size, BASE, d_model=d_model)[0]
        num_parameters = baseline['parameters']['total']
        for variant, worth in worth_of_a_parameter.items():
            # N is counted in parameters of the baseline.
            loss = 1.5 + 30 * (worth * num_parameters) ** -0.3
            losses = [loss + 1e-4 * math.sin(7 * seed + d_model) for seed in range(8)]
            records += tuned_arm(variant, size, losses, d_model=d_model)
    return records


class PlannedArm(NamedTuple):
    """An arm of the study that `write_controlled_study` writes."""

    variant: str
    control: str | None
    shift: float  # difference of its losses from the baseline's
    d_model: int
    extra_parameters: int  # beyond the target


CONTROLLED_ARMS = [
    PlannedArm('qk/vo', None, shift=0.0, d_model=128, extra_parameters=0),
    PlannedArm('qk/no_o', None, shift=-0.03, d_model=136, extra_parameters=-80),
    PlannedArm('shared_qk/vo', None, shift=0.04, d_model=132, extra_parameters=40),
    PlannedArm('qk/no_o', 'equal_shape', shift=-0.02, d_model=128, extra_parameters=-65536),
    PlannedArm('shared_qk/vo', 'equal_shape', shift=0.06, d_model=128, extra_parameters=-65536),
    PlannedArm('qk/vo', 'longer', shift=-0.3, d_model=128, extra_parameters=0),
    PlannedArm('qk/no_o', 'longer', shift=-0.31, d_model=136, extra_parameters=-80),
    PlannedArm('qk/no_v', None, shift=-0.01, d_model=136, extra_parameters=-80),
]


def records_of_controlled_arms():
    """Returns the trials of CONTROLLED_ARMS.

    An arm is a variant of attention with nearly the parameter count of the baseline, the target. A
    control is a variant with the shape of the baseline, or a variant trained for more steps.
    """
    target = tuned_arm('qk/vo')[0]['target_parameters']
    records = []
    for arm in CONTROLLED_ARMS:
        changes = {}
        if arm.control == 'longer':
            # Other arms have 400 steps. A step has 768 tokens.
            changes = {'num_steps': 1600, 'num_tokens': 1600 * 768}
        elif arm.variant == 'shared_qk/vo' and arm.control == 'equal_shape':
            # The best rate is the last one of the grid. A control gets a verdict all the same.
            changes = {'optimum': 16e-3}

        is_baseline = arm.variant == 'qk/vo' and arm.control is None
        losses = BASE if is_baseline else losses_around(arm.shift)
        trials = tuned_arm(
            arm.variant, losses=losses, control=arm.control, d_model=arm.d_model, **changes
        )
        # Each trial gets the parameter count that its arm plans.
        for record in trials:
            record['target_parameters'] = target
            record['residual'] = arm.extra_parameters / target
            total = target + arm.extra_parameters
            record['parameters'] = record['parameters'] | {'total': total}
        records += trials
    return records


def write_controlled_study(directory):
    """Writes a study with controls, and with an arm that was added after a look.

    A look is a reading of the results. The ledger records looks and new arms in their order, so
    arms that were added after a look can be marked.

    Returns:
      `directory`. The arms of the study are CONTROLLED_ARMS.
    """
    records = records_of_controlled_arms()
    # Controls have an equal shape, or are trained 4 times as long.
    controls = {'equal_shape': True, 'longer': 4, 'longer_seeds': []}
    ledger_file = directory / ledger.NAME

    # At the look, the study has all arms but qk/no_v.
    records_at_look = [record for record in records if record['variant'] != 'qk/no_v']
    write_tuned(directory, records_at_look, controls=controls)
    ledger.record_look(directory)

    # Then qk/no_v gets results. `write_tuned` starts a new ledger, so the old one is restored.
    ledger_after_look = ledger_file.read_text()
    write_tuned(directory, records, controls=controls)
    ledger_file.write_text(ledger_after_look)

    # Declare qk/no_v, which the ledger does not have yet.
    study = json.loads((directory / 'study.json').read_text())
    ledger.declare(directory, study)

    # Uncommitted changes of the code are a problem. The ledger records why it is accepted.
    ledger.accept(directory, ['uncommitted'], 'a comment was edited')
    return directory


def row_names(ax):
    """The names of the lines of a forest plot, from the top."""
    name_at = ax.yaxis.get_major_formatter()
    return [name_at(y, place) for place, y in enumerate(ax.get_yticks())]


# Tags that begin a line of text, and tags that are never closed.
LINE_TAGS = {'h1', 'h2', 'h3', 'p', 'li', 'tr', 'dt', 'section', 'figcaption', 'summary'}
VOID_TAGS = {'meta', 'br', 'wbr', 'link', 'img', 'source', 'input', 'hr'}


class Page(HTMLParser):
    """Collects tags, ids and lines of text, and fails on tags that do not nest."""

    def __init__(self, html: str):
        """Reads a page, and sets `tags`, `ids`, `lines` and `text`.

        `feed` calls the handlers below, such as `handle_starttag`, for each part of the page.
        """
        super().__init__()
        self.after_break = False  # whether <wbr> was the last tag
        self.open = []  # names of the tags that are not closed yet
        self.tags = []  # pairs of a name and a dictionary of attributes
        self.ids = []
        self.lines = ['']

        self.feed(html)
        self.close()
        assert self.open == []

        # Each run of spaces and line breaks becomes one space. Empty lines are left out.
        lines = [' '.join(text.split()) for text in self.lines]
        self.lines = [line for line in lines if line]
        self.text = ' '.join(self.lines)

    def handle_starttag(self, tag, attrs):
        # <wbr> stands within a word, so no space follows it.
        self.after_break = tag == 'wbr'
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == 'id']
        if tag in LINE_TAGS:
            self.lines.append('')
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        in_style = bool(self.open) and self.open[-1] == 'style'
        if not in_style:
            self.lines[-1] += data if self.after_break else f' {data}'
        self.after_break = False
