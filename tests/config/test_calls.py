"""Names, options and import paths: what they resolve to, and refusals in one sentence."""

import sys

import pytest

from qkattn.config.calls import resolve, split_pattern, takes
from tests.refusals import refused

MODULE = """
class Linear:
    def __init__(self, config, *, slope=1.0): pass
def quadratic(config, steps, *, power=2): pass
NUMBER = 3
"""


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    files = {'calls': MODULE, 'failing': '\nx = 1 / 0\n', 'missing': 'import no_such_library\n'}
    for name, source in files.items():
        (tmp_path / f'outside_{name}.py').write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith('outside_')]:
        del sys.modules[name]


def named(text, **options):
    return resolve(text, {'constant': len}, 'optimizer.schedule', **options)


def test_a_name_or_an_import_path_with_options():
    assert named('constant') == (len, {})
    target, options = named('outside_calls:Linear(slope=(1, 2))')
    assert target.__name__ == 'Linear' and options == {'slope': (1, 2)}
    # Options of something that is called through another function.
    call = {'call': lambda target: lambda *, rank: None}
    assert named('outside_calls:Linear(rank=3)', **call)[1] == {'rank': 3}


def test_what_cannot_be_resolved_is_one_sentence():
    for text, message in (
        ('constnt', "^unknown optimizer.schedule 'constnt', did you mean 'constant'.*constant, or"),
        *(
            (text, '^optimizer.schedule=.* must be written package.module:name to be')
            for text in ('..:x', ':b', 'a:', 'a:b:c', '.a:b', 'a b:c', 'a:b/c', 'a\0:b')
        ),
        *(
            (f'constant({text}', r'must be written name\(option=value, ...\) with')
            for text in ('', '2)', 'a=)', 'a=x)', 'a=1, a=2)', 'a=1)(a=2)', '**{"a": 1})')
            + ('a={[]: 1})', f'a={"(" * 500})')
        ),
        ('no.such.module:x', "schedule='no.such.module:x': no module named 'no'"),
        ('outside_missing:x', "no module named 'no_such_library'"),
        ('outside_calls:missing', "outside_calls has no 'missing'"),
        ('outside_failing:x', r'ZeroDivisionError in .*outside_failing.py, line 2: division'),
        ('outside_calls:NUMBER', "='outside_calls:NUMBER' is not a function of two"),
        ('outside_calls:Linear', 'is not a function of two'),
        ('outside_calls:quadratic(slope=1)', "no option 'slope'; it takes power"),
    ):
        with refused(message):
            named(text, needs='a function of two', fits=takes('config', 'steps'))


def test_variants_are_separated_by_the_commas_outside_of_parentheses():
    text = 'shared_qk(key_norm=True,self_mask=True)/vo, qk/low_rank(rank=(2)),a.b:C/no_v'
    variants = ['shared_qk(key_norm=True,self_mask=True)/vo', 'qk/low_rank(rank=(2))', 'a.b:C/no_v']
    assert split_pattern(text) == variants
