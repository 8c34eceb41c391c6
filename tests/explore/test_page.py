"""The page in headless Chromium: what it shows for dragged numbers is what the layers compute."""

import html.parser
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import Mask, oracle
from qkattn.explore.bench import Bench
from qkattn.explore.page import table
from tests.explore.explorer import CHOOSE, READ

pytest.importorskip('sympy', reason="pip install -e '.[explore]'")


def expected(variant: str, inputs: dict[str, float], *, causal: bool = False) -> dict[str, float]:
    """What a layer with these parameters computes, by the places of the page."""
    bench = Bench(variant, 2, 2, 1)
    leaves = []
    for parameter in bench.parameters:
        flat = np.empty(parameter.initial.size)
        for place, position in np.ndenumerate(parameter.by_head):
            flat[position] = inputs[f'{parameter.name}:{",".join(map(str, place))}']
        leaves.append(flat.reshape(parameter.initial.shape))
    x_TD = np.array([[inputs[f'x:{t},{d}'] for d in (0, 1)] for t in (0, 1)], float)
    mask = np.tril(np.ones((1, 2, 2), bool)) if causal else np.ones((1, 2, 2), bool)
    with jax.enable_x64(True):
        layer = jax.tree.unflatten(jax.tree.structure(bench.layer), map(jnp.asarray, leaves))
        out_BTE = layer(jnp.asarray(x_TD)[None], Mask(causal=causal))
        A_NDE, B_NDE = map(np.asarray, layer.matrix())
    s_BNTS = oracle.logits(A_NDE, x_TD[None], x_TD[None], scale=layer.score.scale)
    arrays = {
        **{'A0': A_NDE[0], 'B0': B_NDE[0], 'S0': s_BNTS[0, 0], 'out': out_BTE[0]},
        'P0': oracle.probabilities(s_BNTS, mask)[0, 0],
        **{f'{name}0symmetric': (M[0] + M[0].T) / 2 for name, M in (('A', A_NDE), ('B', B_NDE))},
        **{f'{name}0skew': (M[0] - M[0].T) / 2 for name, M in (('A', A_NDE), ('B', B_NDE))},
    }
    return {
        f'{name}:{i},{j}': float(value)
        for name, array in arrays.items()
        for (i, j), value in np.ndenumerate(array)
    }


def assert_computed(page, variant: str, *, causal: bool = False) -> dict:
    shown = page.run(READ)
    wanted = expected(variant, shown['inputs'], causal=causal)
    assert shown['results'].keys() <= wanted.keys() and len(shown['results']) == 28
    for place, value in shown['results'].items():
        assert value == pytest.approx(wanted[place], abs=1e-12), (variant, place)
    return shown


def test_a_dragged_number_moves_scores_attention_and_output(page):
    before = assert_computed(page, 'qk/vo')
    page.drag('[data-key="W_Q:0,0,1"]', 60)
    after = assert_computed(page, 'qk/vo')
    moved = after['inputs']['W_Q:0,0,1'] - before['inputs']['W_Q:0,0,1']
    assert moved == pytest.approx(0.6)
    changed = {p for p, v in after['results'].items() if v != before['results'][p]}
    # x is the identity: the first row of W_Q is in the first rows of A, S, P and the output.
    rows = {'A0:0,0', 'A0:0,1', 'S0:0,0', 'S0:0,1', 'P0:0,0', 'P0:0,1', 'out:0,0', 'out:0,1'}
    assert {p for p in changed if 's' not in p.split(':')[0][2:]} == rows
    assert len({k for k, v in after['inputs'].items() if v != before['inputs'][k]}) == 1


def test_keys_and_typed_numbers(page):
    key = 'W_K:0,1,0'
    selector = f'[data-key="{key}"]'
    start = page.run(READ)['inputs'][key]
    page.run(f"document.querySelector('{selector}').focus()")
    page.press('ArrowUp')
    page.press('ArrowUp')
    assert page.run(READ)['inputs'][key] == pytest.approx(start + 0.2)
    page.press('ArrowDown', shift=True)
    assert page.run(READ)['inputs'][key] == pytest.approx(start - 0.8)
    for character in '-1.25':
        page.press(character)
    assert page.run(READ)['inputs'][key] == pytest.approx(start - 0.8)
    page.press('Enter')
    assert assert_computed(page, 'qk/vo')['inputs'][key] == -1.25
    for character in '9':
        page.press(character)
    page.press('Enter')
    assert page.run(READ)['inputs'][key] == 5  # the largest
    page.press('Escape')
    assert page.run(READ)['inputs'][key] == pytest.approx(start)
    for character in 'x':
        page.press(character)
    page.press('Enter')
    assert page.run(READ)['inputs'][key] == pytest.approx(start)


def test_a_number_that_is_let_go_outside_stays(page):
    x, y = page.center('[data-key="W_Q:0,0,0"]')
    page.mouse('mousePressed', x, y)
    page.mouse('mouseMoved', 2, y)
    page.mouse('mouseReleased', 2, y)
    dragged = page.run(READ)['inputs']
    for step in range(5):
        page.mouse('mouseMoved', x + 10 * step, y, held=False)
    assert page.run(READ)['inputs'] == dragged


def test_selected_text_is_not_dragged_in_place_of_its_number(page):
    key = 'W_Q:0,0,0'
    start = page.run(READ)['inputs'][key]
    page.run(f'document.querySelector(\'[data-key="{key}"]\').focus()')
    x, y = page.center(f'[data-key="{key}"]')
    page.mouse('mousePressed', x, y)
    page.run('new Promise((done) => setTimeout(done, 300))')  # a shorter press selects anew
    for right, down in ((1, 3), (2, 6), (30, 6), (60, 6)):
        page.mouse('mouseMoved', x + right, y + down)
    page.mouse('mouseReleased', x + 60, y + 6)
    assert page.run(READ)['inputs'][key] == pytest.approx(start + 0.6)


def test_typed_digits_give_way_to_a_drag(page):
    key = 'W_Q:0,0,0'
    start = page.run(READ)['inputs'][key]
    page.run(f'document.querySelector(\'[data-key="{key}"]\').focus()')
    page.press('2')
    page.drag(f'[data-key="{key}"]', 40)
    page.run('document.activeElement.blur()')
    assert page.run(READ)['inputs'][key] == pytest.approx(start + 0.4)


def test_every_pair_that_the_page_offers_is_computed_as_its_layer(page):
    known = table(((2, 1),))['sizes']['2,1']
    pairs = [(score, 'vo') for score in known['score']]
    pairs += [
        ('qk' if set(of['B']) & {'', 'qk'} else 'latent', v) for v, of in known['value'].items()
    ]
    for score, value in pairs:
        assert page.run(CHOOSE.format(score=score, value=value)) == [score, value]
        assert_computed(page, f'{score}/{value}')


def test_causal_mask_and_what_is_always_so(page):
    page.run("document.getElementById('causal').click()")
    shown = assert_computed(page, 'qk/vo', causal=True)
    assert shown['results']['P0:0,1'] == 0 and shown['results']['P0:0,0'] == 1
    page.run(CHOOSE.format(score='shared_qk', value='vo'))
    facts = page.run(READ)['facts']
    assert (
        facts[:4:2] == ['rank2 of 2', 'symmetric share100 %']
        and facts[3] == 'for all numberssymmetric'
    )


def test_rank_and_singular_values(page):
    page.run(CHOOSE.format(score='low_rank', value='vo'))
    shown = page.run(READ)
    A_DE = [[shown['results'][f'A0:{i},{j}'] for j in (0, 1)] for i in (0, 1)]
    largest = np.linalg.svd(np.array(A_DE))[1][0]
    assert shown['facts'][:2] == ['rank1 of 2', f'singular values{largest:.2f}, 0.00']


def test_a_phone_has_room_and_a_finger_drags(page):
    size = {'width': 390, 'height': 844, 'deviceScaleFactor': 1, 'mobile': True}
    page.send('Emulation.setDeviceMetricsOverride', **size)
    page.send('Emulation.setTouchEmulationEnabled', enabled=True)
    assert page.run('document.documentElement.scrollWidth') == 390
    small = "[...document.querySelectorAll('input[role=spinbutton], button, select')]"
    assert page.run(f'Math.min(...{small}.map((e) => e.getBoundingClientRect().height))') >= 36
    before = page.run(READ)['inputs']['W_Q:0,0,0']
    x, y = page.center('[data-key="W_Q:0,0,0"]')
    page.send('Input.dispatchTouchEvent', type='touchStart', touchPoints=[{'x': x, 'y': y}])
    for step in range(1, 9):
        page.send(
            'Input.dispatchTouchEvent', type='touchMove', touchPoints=[{'x': x + 10 * step, 'y': y}]
        )
    page.send('Input.dispatchTouchEvent', type='touchEnd', touchPoints=[])
    assert assert_computed(page, 'qk/vo')['inputs']['W_Q:0,0,0'] == pytest.approx(before + 0.8)
    page.send('Emulation.setTouchEmulationEnabled', enabled=False)
    page.send('Emulation.clearDeviceMetricsOverride')


def test_no_request_and_no_complaint(page):
    sent = [e for e in page.events if e['method'] == 'Network.requestWillBeSent']
    urls = [event['params']['request']['url'] for event in sent]
    assert len(urls) == 1 and urls[0].startswith('file://')
    bad = ('Log.entryAdded', 'Runtime.exceptionThrown')
    assert [event for event in page.events if event['method'] in bad] == []


class Tags(html.parser.HTMLParser):
    """The ids and the start tags of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_the_page_is_self_contained(document):
    tags = Tags(document).tags
    ids = [attributes['id'] for _, attributes in tags if 'id' in attributes]
    assert len(ids) == len(set(ids))
    assert not [t for t, a in tags if t in ('link', 'img', 'iframe') or 'src' in a]
    assert [a['href'] for _, a in tags if 'href' in a] == ['#trained']
    assert not re.search(r'https?://|@import|url\(|eval\(|Function\(', document)


def test_the_table_holds_every_variant_and_names_the_others(document):
    data = json.loads(
        re.search(r'<script type="application/json" id="table">(.*?)</script>', document, re.S)[1]
    )
    assert data['without'] == {'score': ['nonlinear_query'], 'value': []}
    of = data['sizes']['2,1']
    shared = [
        [[[1, 0, 0], [1, 1, 1]], [[1, 0, 2], [1, 1, 3]]],
        [[[1, 0, 2], [1, 1, 3]], [[1, 2, 2], [1, 3, 3]]],
    ]
    assert (
        of['score']['shared_qk']['A'] == [shared]
        and of['score']['shared_qk']['kind'] == 'symmetric'
    )
    assert of['value']['k_is_v']['B']['shared_qk'][0][0][0] == [[1, -1, 0], [1, -2, 2]]
    assert of['score']['symmetric']['parameters'][1]['initial'] == [1, -1]
