"""The classes of docs/extend.md, as modules that an import path finds."""

import sys
import types

from tests.fixtures import BLOCK, PAGE

SOURCES = dict(BLOCK.findall((PAGE.parent / 'extend.md').read_text('utf-8')))

for name, source in SOURCES.items():
    sys.modules[name] = types.ModuleType(name)
    exec(compile(source, f'{name}.py', 'exec'), vars(sys.modules[name]))

VARIANTS = [
    ('qk', 'gated:Gated'),
    ('qk', 'differential:Differential'),
    ('qk', 'talking_heads:TalkingHeads'),
    ('t5_bias:T5Bias', 'vo'),
    ('cosine:Cosine', 'vo'),
]
