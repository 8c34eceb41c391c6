"""Variants outside the registries: classes of examples/ and of docs/extend.md.

An import path finds the classes of the page, too, once this is imported.
"""

import sys
import types

from tests.fixtures import BLOCK, PAGE

SOURCES = dict(BLOCK.findall((PAGE.parent / 'extend.md').read_text('utf-8')))

for name, source in SOURCES.items():
    sys.modules[name] = types.ModuleType(name)
    exec(compile(source, f'{name}.py', 'exec'), vars(sys.modules[name]))

PAGE_VARIANTS = [
    ('gained:Gained', 'vo'),
    ('qk', 'shared_v:SharedV'),
    ('qk', 'gated:Gated'),
    ('qk', 'differential:Differential'),
    ('qk', 'talking_heads:TalkingHeads'),
    ('t5_bias:T5Bias', 'vo'),
    ('cosine:Cosine', 'vo'),
]
FOLDER_VARIANTS = [
    ('examples.symmetric_skew:SymmetricSkew', 'vo'),
    ('examples.collaborative:Collaborative', 'vo'),
    ('examples.gauge_fixed:GaugeFixedQK', 'vo'),
    ('examples.frozen:Frozen', 'vo'),
    ('qk', 'examples.gauge_fixed:GaugeFixedVO'),
    ('qk', 'examples.hadamard:Hadamard'),
    ('qk', 'examples.identity_start:OutputFromIdentity'),
]
VARIANTS = FOLDER_VARIANTS + PAGE_VARIANTS


def is_from_outside(variant: tuple[str, str]) -> bool:
    """Whether a class of the pair is neither registered nor in examples/."""
    return any(':' in name and not name.startswith('examples.') for name in variant)
