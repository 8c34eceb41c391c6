"""The page in headless Chromium: what it shows for dragged numbers is what the layers compute."""

import json
import os
import re
import subprocess
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import Mask, oracle
from qkattn.explore.bench import Bench
from qkattn.explore.page import page as written

pytest.importorskip('sympy', reason="pip install -e '.[explore]'")

FLAGS = ['--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars', '--no-first-run']
FLAGS += ['--disable-extensions', '--disable-background-networking', '--disable-dev-shm-usage']


class Page:
    """One open page, driven by the DevTools protocol: JSON that ends in a zero byte."""

    def __init__(self, write: int, read: int, url: str):
        self._write, self._read = os.fdopen(write, 'wb', 0), os.fdopen(read, 'rb')
        self._id, self._session = 0, {}
        self.events: list[dict[str, Any]] = []
        target = self.send('Target.createTarget', url='about:blank')['targetId']
        attached = self.send('Target.attachToTarget', targetId=target, flatten=True)
        self._session = {'sessionId': attached['sessionId']}
        for domain in ('Page', 'Runtime', 'Network', 'Log'):
            self.send(f'{domain}.enable')
        self.send('Page.navigate', url=url)
        while not any(event['method'] == 'Page.loadEventFired' for event in self.events):
            self._take()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command; AssertionError where it fails."""
        self._id += 1
        message = {'id': self._id, 'method': method, 'params': params, **self._session}
        self._write.write(json.dumps(message).encode() + b'\0')
        while (answer := self._take()).get('id') != self._id:
            pass
        assert 'error' not in answer, answer
        return answer['result']

    def _take(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._read.read(1)) != b'\0':
            assert byte, 'Chromium has ended'
            data += byte
        message = json.loads(data)
        if 'method' in message:
            self.events.append(message)
        return message

    def run(self, script: str) -> Any:
        """The value of an expression in the page, a promise's included."""
        options = {'returnByValue': True, 'awaitPromise': True}
        answer = self.send('Runtime.evaluate', expression=script, **options)
        assert 'exceptionDetails' not in answer, answer['exceptionDetails']
        return answer['result'].get('value')

    def drag(self, key: str, *moves: float) -> None:
        """Presses on a number, moves to the right by these pixels from there, and lets go."""
        x, y = self.run(
            f"""(() => {{ const e = document.querySelector('[data-key="{key}"]');
            e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();
            return [r.x + r.width / 2, r.y + r.height / 2] }})()"""
        )
        kinds = ['mousePressed', *['mouseMoved'] * len(moves), 'mouseReleased']
        button = {'button': 'left', 'buttons': 1, 'clickCount': 1}
        for kind, right in zip(kinds, [0, *moves, moves[-1]], strict=True):
            self.send('Input.dispatchMouseEvent', type=kind, x=x + right, y=y, **button)

    def type(self, *keys: str, into: str = '', shift: bool = False) -> None:
        """Presses keys, in a number that gets the focus; a character types itself."""
        if into:
            self.run(f'document.querySelector(\'[data-key="{into}"]\').focus()')
        for key in keys:
            for kind, text in (('keyDown', {'text': key} if len(key) == 1 else {}), ('keyUp', {})):
                self.send('Input.dispatchKeyEvent', type=kind, key=key, modifiers=8 * shift, **text)


@pytest.fixture(scope='module')
def document():
    return written(((2, 1), (4, 2)))


@pytest.fixture(scope='module')
def browser(chromium, document, tmp_path_factory):
    folder = tmp_path_factory.mktemp('explorer')
    (folder / 'page.html').write_text(document, encoding='utf-8')
    (to_read, write), (read, to_write) = os.pipe(), os.pipe()
    command = [chromium, *FLAGS, f'--user-data-dir={folder}/profile', '--remote-debugging-pipe']
    program = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
    process = subprocess.Popen(
        ['bash', '-c', program, *command],
        pass_fds=(to_read, to_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(to_write)
    watch = threading.Timer(300, process.kill)  # ends a test that waits for it
    watch.start()
    yield Page(write, read, (folder / 'page.html').as_uri())
    watch.cancel()
    process.kill()
    process.wait()


@pytest.fixture
def page(browser):
    """As at the beginning."""
    browser.send('Input.dispatchMouseEvent', type='mouseMoved', x=0, y=0)
    browser.run("document.getElementById('reset').click()")
    return browser


READ = """
(() => {
  const numbers = (key) => Object.fromEntries([...document.querySelectorAll(`[data-${key}]`)].map(
    (e) => [e.dataset[key], Number(e.dataset.value)]));
  return {
    inputs: numbers('key'), results: numbers('place'),
    facts: [...document.querySelectorAll('.facts div')].map((e) => e.textContent),
  };
})()
"""
CHOOSE = """
(() => {{
  for (const [id, value] of Object.entries({{ score: {!r}, value: {!r} }})) {{
    const element = document.getElementById(id);
    if (element.value === value) continue;
    element.value = value;
    element.dispatchEvent(new Event('change'));
  }}
  return [document.getElementById('score').value, document.getElementById('value').value];
}})()
"""


def text(page, identifier: str) -> str:
    return page.run(f"document.getElementById('{identifier}').textContent")


def assert_computed(page, variant: str, *, causal: bool = False) -> dict:
    """What the page shows; its results are those of a layer with its numbers."""
    shown = page.run(READ)
    bench, arrays = Bench(variant, 2, 2, 1), []
    for parameter in bench.parameters:
        flat = np.empty(parameter.initial.size)
        for (n, *place), position in np.ndenumerate(parameter.by_head):
            row, column = place if len(place) == 2 else (0, *place)
            flat[position] = shown['inputs'][f'{parameter.name}:{n},{row},{column}']
        arrays.append(flat.reshape(parameter.initial.shape))
    x_BTD = np.array([[[shown['inputs'][f'x:{t},{d}'] for d in (0, 1)] for t in (0, 1)]], float)
    with jax.enable_x64(True):
        layer = bench.filled([jnp.asarray(array) for array in arrays])
        out_BTE = layer(jnp.asarray(x_BTD), Mask(causal=causal))
        A_NDE, B_NDE = map(np.asarray, layer.matrix())
    mask = np.tril(np.ones((1, 2, 2), bool)) if causal else np.ones((1, 2, 2), bool)
    s_BNTS = oracle.logits(A_NDE, x_BTD, x_BTD, scale=layer.score.scale)
    A, B = A_NDE[0], B_NDE[0]
    expected = {'A0': A, 'A0symmetric': (A + A.T) / 2, 'A0skew': (A - A.T) / 2, 'B0': B}
    expected |= {'S0': s_BNTS[0, 0], 'P0': oracle.probabilities(s_BNTS, mask)[0, 0]}
    numbers = {
        f'{name}:{i},{j}': float(value)
        for name, array in (expected | {'out': np.asarray(out_BTE[0])}).items()
        for (i, j), value in np.ndenumerate(array)
    }
    assert shown['results'] == pytest.approx(numbers, abs=1e-12, rel=0), variant
    return shown


def test_a_dragged_number_moves_scores_attention_and_output(page):
    before = assert_computed(page, 'qk/vo')
    page.drag('W_Q:0,0,1', 15, 30, 60)
    after = assert_computed(page, 'qk/vo')
    moved = {k: v - before['inputs'][k] for k, v in after['inputs'].items()}
    assert {k: v for k, v in moved.items() if v} == {'W_Q:0,0,1': pytest.approx(0.6)}
    changed = {p for p, v in after['results'].items() if v != before['results'][p]}
    # x is the identity: the first row of W_Q is in the first rows of A, S, P and the output.
    rows = {f'{name}:0,{j}' for name in ('A0', 'S0', 'P0', 'out') for j in (0, 1)}
    assert {p for p in changed if 's' not in p.split(':')[0][2:]} == rows
    page.drag('W_Q:0,0,0', -10_000)  # let go outside of the page
    assert page.run(READ)['inputs']['W_Q:0,0,0'] == -5


def test_keys_and_typed_numbers(page):
    key = 'W_K:0,1,0'

    def number():
        return page.run(READ)['inputs'][key]

    start = number()
    page.type('ArrowUp', 'ArrowUp', into=key)
    assert number() == pytest.approx(start + 0.2)
    page.type('ArrowDown', shift=True)
    assert number() == pytest.approx(start - 0.8)
    page.type(*'-1.25')
    assert number() == pytest.approx(start - 0.8)
    page.type('Enter')
    assert assert_computed(page, 'qk/vo')['inputs'][key] == -1.25
    for typed, expected in (('9', 5), ('x', 5)):  # the largest; no number
        page.type(typed, 'Enter')
        assert number() == expected
    page.type('Escape')
    assert number() == pytest.approx(start)
    # A change is announced once it is over.
    page.type('ArrowUp', into='x:0,0')
    page.run('new Promise((done) => setTimeout(done, 600))')
    assert text(page, 'said').startswith('token 1, dimension 1 is 1.10. Token 1 attends ')


def table(document: str) -> dict:
    pattern = r'<script type="application/json" id="table">(.*?)</script>'
    return json.loads(re.search(pattern, document, re.S)[1])


def test_every_pair_that_the_page_offers_is_computed_as_its_layer(page, document):
    known = table(document)['sizes']['2,1']
    pairs = [(score, 'vo') for score in known['score']]
    pairs += [('qk' if {*v['B']} & {'', 'qk'} else 'latent', n) for n, v in known['value'].items()]
    for score, value in pairs:
        assert page.run(CHOOSE.format(score, value)) == [score, value]
        assert_computed(page, f'{score}/{value}')


def test_causal_mask_ranks_and_what_is_always_so(page):
    page.run("document.getElementById('causal').click()")
    shown = assert_computed(page, 'qk/vo', causal=True)
    assert shown['results']['P0:0,1'] == 0 and shown['results']['P0:0,0'] == 1
    page.run(CHOOSE.format('shared_qk', 'vo'))
    facts = page.run(READ)['facts']
    assert facts[0] == 'rank2 of 2' and facts[2] == 'symmetric share100 %'
    assert facts[3] == 'for all numberssymmetric'
    page.run(CHOOSE.format('low_rank', 'vo'))
    shown = page.run(READ)
    A_DE = np.array([[shown['results'][f'A0:{i},{j}'] for j in (0, 1)] for i in (0, 1)])
    largest = np.linalg.svd(A_DE)[1][0]
    assert shown['facts'][:2] == ['rank1 of 2', f'singular values{largest:.2f}, 0.00']


def test_what_does_not_fit_gives_way(page):
    page.run(CHOOSE.format('latent', 'latent'))
    assert page.run(CHOOSE.format('merged', 'latent')) == ['merged', 'vo']
    sentence = 'latent does not go with merged at this size; the value is vo.'
    assert text(page, 'changed') == sentence
    page.run("document.getElementById('dims-4').click()")
    assert text(page, 'changed') == '1 head does not go with 4 dimensions; heads: 2.'
    labels = page.run("[...document.querySelectorAll('[aria-label]')].map((e) => e.ariaLabel)")
    places = [label.partition(':')[0] for label in labels]
    assert len({*places}) == len(places) and 'skew part of A, head 2, row 1, column 4' in places
    page.run("document.getElementById('reset').click()")
    for address, variant, message in (
        ('#shared_qk/no_v', 'shared_qk/no_v', ''),
        ('#constructor/no_v', 'shared_qk/no_v', 'This page has no score constructor;'),
        ('#nonlinear_query', 'shared_qk/no_v', 'This page has no score nonlinear_query;'),
    ):
        script = """new Promise((done) => {{
          addEventListener('hashchange', () => done(location.hash), {{ once: true }});
          location.hash = {!r};
        }})"""
        assert page.run(script.format(address)) == f'#{variant}'
        assert text(page, 'changed').startswith(message) and bool(text(page, 'changed')) == bool(
            message
        )


def test_entries_explain_themselves_controls_have_names_and_a_phone_has_room(page):
    page.run('document.querySelector(\'[data-place="A0:1,0"]\').focus()')
    assert ' '.join(text(page, 'f-A').split()) == 'A21 = q21 k11 + q22 k12'
    page.type('ArrowRight')
    assert text(page, 'f-A').startswith('A22 = q21 k21')
    nodes = page.send('Accessibility.getFullAXTree')['nodes']
    roles = {'spinbutton', 'combobox', 'radio', 'checkbox', 'table', 'grid'}
    shown = [n for n in nodes if not n.get('ignored') and n['role']['value'] in roles]
    assert {n['role']['value'] for n in shown} == roles
    assert all(n['name']['value'] for n in shown)
    size = {'width': 390, 'height': 844, 'deviceScaleFactor': 1, 'mobile': True}
    page.send('Emulation.setDeviceMetricsOverride', **size)
    assert page.run('document.documentElement.scrollWidth') == 390
    page.send('Emulation.clearDeviceMetricsOverride')


def test_no_request_and_no_complaint(page):
    sent = [e for e in page.events if e['method'] == 'Network.requestWillBeSent']
    assert [e['params']['request']['url'][:7] for e in sent] == ['file://']
    bad = ('Log.entryAdded', 'Runtime.exceptionThrown')
    assert [event for event in page.events if event['method'] in bad] == []


def test_the_table_holds_every_variant_and_names_the_others(document):
    data = table(document)
    assert data['without'] == {'score': ['nonlinear_query'], 'value': []}
    small = data['sizes']['2,1']
    shared = [
        [[[1, 0, 0], [1, 1, 1]], [[1, 0, 2], [1, 1, 3]]],
        [[[1, 0, 2], [1, 1, 3]], [[1, 2, 2], [1, 3, 3]]],
    ]
    score = small['score']['shared_qk']
    assert score['A'] == [shared] and score['kind'] == 'symmetric'
    assert small['value']['k_is_v']['B']['shared_qk'][0][0][0] == [[1, -1, 0], [1, -2, 2]]
    assert small['score']['symmetric']['parameters'][1]['initial'] == [1, -1]
    assert not re.search(r'https?://|@import|url\(|eval\(|Function\(| src=', document)
