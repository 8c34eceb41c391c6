"""The page in headless Chromium: what it shows for changed numbers is what the layers compute."""

import html
import json
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import Mask, oracle
from qkattn.explore.bench import Bench
from qkattn.explore.page import page

pytest.importorskip('sympy', reason="pip install -e '.[explore]'")

FLAGS = ['--headless', '--no-sandbox', '--disable-gpu', '--no-first-run', '--disable-extensions']
FLAGS += ['--disable-background-networking', '--disable-dev-shm-usage', '--window-size=500,844']
FLAGS += ['--enable-blink-features=ComputedAccessibilityInfo']
FLAGS += ['--virtual-time-budget=60000', '--dump-dom']  # no waiting

# In the head, before the script of the page: what is wrong.
BEFORE = """
const wrong = [];
addEventListener('error', (event) => wrong.push(event.message));
addEventListener('securitypolicyviolation', (event) => wrong.push(event.blockedURI));
"""
# After it: what is done to the page, and what it then shows.
AFTER = """
const all = (selector) => [...document.querySelectorAll(selector)];
const one = (key) => document.querySelector(`[data-key="${key}"]`);
const number = (key) => Number(one(key).dataset.value);
const text = (id) => $(id).textContent.replace(/\\s+/g, ' ').trim();
const numbers = (name) => Object.fromEntries(
  all(`[data-${name}]`).map((e) => [e.dataset[name], Number(e.dataset.value)]));
const described = () => all('.facts div').map((e) => e.textContent);
const read = () => ({ inputs: numbers('key'), results: numbers('place'), facts: described() });

function choose(...names) {
  ['score', 'value'].forEach((id, i) => {
    if ($(id).value === names[i]) return;
    $(id).value = names[i];
    $(id).dispatchEvent(new Event('change'));
  });
  return `${$('score').value}/${$('value').value}`;
}

// Presses on a number, moves to the right by these pixels from there, and lets go.
Element.prototype.setPointerCapture = () => {};  // which takes the id of a real pointer
function drag(key, ...moves) {
  const event = (kind, clientX) => one(key).dispatchEvent(new PointerEvent(kind, {
    bubbles: true, cancelable: true, isPrimary: true, pointerId: 1, buttons: 1, clientX }));
  event('pointerdown', 0);
  for (const x of moves) event('pointermove', x);
  event('lostpointercapture', moves.at(-1));
  event('pointermove', 0);
  return read();
}

// Presses a key, or types a text, where the focus is.
const press = (key, shiftKey = false) => document.activeElement.dispatchEvent(
  new KeyboardEvent('keydown', { bubbles: true, cancelable: true, key, shiftKey }));
function type(text) {
  document.activeElement.value = text;
  document.activeElement.dispatchEvent(new Event('input', { bubbles: true }));
}

const steps = {
  drag: () => [read(), drag('W_Q:0,0,1', 15, 30, 60), drag('W_Q:0,0,0', -10000)],
  async keys() {
    const key = 'W_K:0,1,0', seen = [number(key)], see = () => seen.push(number(key));
    one(key).focus();
    press('ArrowUp'); see();
    press('ArrowDown', true); see();
    type('-1.25'); see();
    press('Enter'); see();
    for (const text of ['9', 'x']) { type(text); press('Enter'); see(); }
    press('Escape'); see();
    one('x:0,0').focus();
    press('ArrowUp');
    await new Promise((done) => setTimeout(done, 600));
    return [text('said'), ...seen];
  },
  pairs: () => PAIRS.map((names) => [choose(...names), read()]),
  causal() {
    $('causal').click();
    return ['qk', 'shared_qk', 'low_rank'].map((name) => { choose(name, 'vo'); return read(); });
  },
  async gives_way() {
    choose('latent', 'latent');
    const shown = [choose('merged', 'latent'), text('changed')];
    $('dims-4').click();
    shown.push(text('changed'));
    for (const name of ['shared_qk/no_v', 'constructor/no_v', 'nonlinear_query']) {
      const changed = new Promise((done) => addEventListener('hashchange', done, { once: true }));
      location.hash = name;
      await changed;
      shown.push(location.hash, text('changed'));
    }
    return shown;
  },
  explains() {
    document.querySelector('[data-place="A0:1,0"]').focus();
    const formula = text('f-A');
    press('ArrowRight');
    return [formula, text('f-A')];
  },
  controls: () => all('input, select, table').map((e) => [e.computedRole, e.computedName]),
  width: () => [document.documentElement.scrollWidth, document.documentElement.clientWidth],
};

(async () => {
  const results = { wrong };
  for (const [name, step] of Object.entries(steps)) {
    $('reset').click();
    results[name] = await step();
  }
  document.body.replaceChildren(make('pre', { id: 'results' }, JSON.stringify(results)));
})();
"""


def table(document: str) -> dict:
    pattern = r'<script type="application/json" id="table">(.*?)</script>'
    return json.loads(re.search(pattern, document, re.S)[1])


@pytest.fixture(scope='module')
def document():
    return page(((2, 1), (4, 2)))


@pytest.fixture(scope='module')
def results(chromium, document, tmp_path_factory):
    """What each of the steps returns."""
    known = table(document)['sizes']['2,1']
    pairs = [(score, 'vo') for score in known['score']]
    pairs += [('qk' if {*v['B']} & {'', 'qk'} else 'latent', n) for n, v in known['value'].items()]
    after = f'const PAIRS = {json.dumps(pairs)};{AFTER}'
    document = document.replace('</head>', f'<script>{BEFORE}</script></head>')
    document = document.replace('</body>', f'<script>{after}</script></body>')
    folder = tmp_path_factory.mktemp('explorer')
    (folder / 'page.html').write_text(document, encoding='utf-8')
    place = f'--user-data-dir={folder}/profile', (folder / 'page.html').as_uri()
    done = subprocess.run([chromium, *FLAGS, *place], capture_output=True, text=True, timeout=300)
    (text,) = re.findall('<pre id="results">(.*?)</pre>', done.stdout, re.S)
    return json.loads(html.unescape(text))


def assert_computed(shown: dict, variant: str, *, causal: bool = False) -> None:
    """The results that the page shows are those of a layer with its numbers."""
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


def test_a_dragged_number_moves_scores_attention_and_output(results):
    before, after, far = results['drag']
    assert_computed(after, 'qk/vo')
    moved = {k: v - before['inputs'][k] for k, v in after['inputs'].items()}
    assert {k: v for k, v in moved.items() if v} == {'W_Q:0,0,1': pytest.approx(0.6)}
    changed = {p for p, v in after['results'].items() if v != before['results'][p]}
    # x is the identity: the first row of W_Q is in the first rows of A, S, P and the output.
    rows = {f'{name}:0,{j}' for name in ('A0', 'S0', 'P0', 'out') for j in (0, 1)}
    assert {p for p in changed if 's' not in p.split(':')[0][2:]} == rows
    assert far['inputs']['W_Q:0,0,0'] == -5


def test_keys_and_typed_numbers(results):
    said, start, *seen = results['keys']
    typed = [
        start - 0.9,
        -1.25,
        5,
        5,
        start,
    ]  # not entered, entered, the largest, no number, undone
    assert seen == pytest.approx([start + 0.1, start - 0.9, *typed])
    # A change is announced once it is over.
    assert said.startswith('token 1, dimension 1 is 1.10. Token 1 attends ')


def test_every_pair_that_the_page_offers_is_computed_as_its_layer(results, document):
    data = table(document)
    assert data['without'] == {'score': ['nonlinear_query'], 'value': []}
    known = data['sizes']['2,1']
    offered = {*known['score'], *known['value']}
    assert {name for pair, _ in results['pairs'] for name in pair.split('/')} == offered
    for variant, shown in results['pairs']:
        assert_computed(shown, variant)


def test_causal_mask_ranks_and_what_is_always_so(results):
    causal, shared, low_rank = results['causal']
    assert_computed(causal, 'qk/vo', causal=True)
    assert causal['results']['P0:0,1'] == 0 and causal['results']['P0:0,0'] == 1
    facts = shared['facts']
    assert facts[0] == 'rank2 of 2' and facts[2] == 'symmetric share100 %'
    assert facts[3] == 'for all numberssymmetric'
    A_DE = np.array([[low_rank['results'][f'A0:{i},{j}'] for j in (0, 1)] for i in (0, 1)])
    largest = np.linalg.svd(A_DE)[1][0]
    assert low_rank['facts'][:2] == ['rank1 of 2', f'singular values{largest:.2f}, 0.00']


def test_what_does_not_fit_gives_way(results):
    assert results['gives_way'] == [
        *('merged/vo', 'latent does not go with merged at this size; the value is vo.'),
        '1 head does not go with 4 dimensions; heads: 2.',
        *('#shared_qk/no_v', ''),
        *('#shared_qk/no_v', 'This page has no score constructor; the score is shared_qk.'),
        *('#shared_qk/no_v', 'This page has no score nonlinear_query; the score is shared_qk.'),
    ]


def test_entries_explain_themselves_controls_have_names_and_a_phone_has_room(results, document):
    assert results['explains'] == ['A21 = q21 k11 + q22 k12', 'A22 = q21 k21 + q22 k22']
    roles = {'spinbutton', 'combobox', 'radio', 'checkbox', 'table', 'grid'}
    assert {role for role, _ in results['controls']} == roles
    assert all(name for _, name in results['controls'])
    shown, width = results['width']
    assert shown == width < 544  # as narrow as a phone
    # Nothing is requested: the policy of the page forbids it, and nothing has broken it.
    assert results['wrong'] == [] and "content=\"default-src 'none'; " in document
    assert not re.search(r'https?://|@import|url\(|eval\(|Function\(| src=', document)
