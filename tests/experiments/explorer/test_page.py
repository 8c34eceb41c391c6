"""The page in headless Chromium: what it shows for changed numbers is what the layers compute."""

import html
import json
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.explorer.bench import Bench
from experiments.explorer.page import page
from qkattn.attention import Mask, oracle

pytest.importorskip('sympy', reason="pip install -e '.[explore]'")

FLAGS = ['--headless', '--no-sandbox', '--disable-gpu', '--no-first-run', '--disable-extensions']
FLAGS += ['--disable-background-networking', '--disable-dev-shm-usage', '--window-size=500,844']
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
const one = (key) => document.querySelector(`[name="${key}"]`);
const value = (e) => numbers.get(e.name) ?? Number(e.dataset.initial);
const text = (id) => $(id).textContent;
const read = () => ({
  inputs: Object.fromEntries(all('#numbers input').map((e) => [e.name, value(e)])),
  results: Object.fromEntries(all('.entry').map((e) => [e.dataset.place, Number(e.dataset.value)])),
  facts: all('.facts').map((e) => e.textContent.split('\\n')),
});
const event = (element, kind, more = {}) =>
  element.dispatchEvent(new PointerEvent(kind, { bubbles: true, pointerId: 1, ...more }));

function pick(id, value) {
  $(id).value = value;
  event($(id), 'change');
}

// Presses on a number, moves to the right by these pixels from there, and lets go.
Element.prototype.setPointerCapture = () => {};  // which takes the id of a real pointer
function dragged(key, ...moves) {
  event(one(key), 'pointerdown', { clientX: 0 });
  for (const clientX of moves) event(one(key), 'pointermove', { clientX });
  event(one(key), 'lostpointercapture');
  event(one(key), 'pointermove', { clientX: 0 });
  return read();
}

// Types into a number, as arrow keys do, and leaves it.
function type(key, text) {
  one(key).value = text;
  event(one(key), 'input');
  const seen = one(key).value;
  event(one(key), 'change');
  return [seen, numbers.get(key), one(key).value];
}

const steps = {
  drag: () => [read(), dragged('W_Q:0,0,1', 15, 30, 60), dragged('W_Q:0,0,0', -10000)],
  type: () => [...['-1.25', '9', ''].map((text) => type('W_K:0,1,0', text)), read()],
  pairs: () => PAIRS.map(([score, value]) => {
    pick('score', score);
    pick('value', value);
    $('draw').click();
    return [`${$('score').value}/${$('value').value}`, read()];
  }),
  causal() {
    $('causal').click();
    return ['qk', 'shared_qk', 'low_rank'].map((name) => { pick('score', name); return read(); });
  },
  async others() {
    pick('score', 'latent');
    pick('value', 'latent');
    pick('score', 'merged');
    const shown = [$('value').value, text('changed')];
    for (const name of ['shared_qk/no_v', 'constructor/no_v']) {
      const changed = new Promise((done) => addEventListener('hashchange', done, { once: true }));
      location.hash = name;
      await changed;
      shown.push(location.hash, text('changed'));
    }
    return [...shown, ...all('#entries-A li').map((e) => e.textContent)];
  },
  width: () => [document.documentElement.scrollWidth, document.documentElement.clientWidth],
};

(async () => {
  const results = { wrong };
  for (const [name, step] of Object.entries(steps)) {
    $('controls').reset();
    await new Promise((done) => setTimeout(done));
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
    known = table(document)['2,1']
    pairs = [(score, 'vo') for score in known['score']]
    pairs += [('qk' if {*v['B']} & {'', 'qk'} else 'latent', n) for n, v in known['value'].items()]
    after = f'const PAIRS = {json.dumps(pairs)};{AFTER}'
    document = document.replace('</head>', f'<script>{BEFORE}</script></head>')
    document = document.replace('</body>', f'<script>{after}</script></body>')
    folder = tmp_path_factory.mktemp('explorer')
    (folder / 'page.html').write_text(document, encoding='utf-8')
    place = f'--user-data-dir={folder}/profile', (folder / 'page.html').as_uri()
    done = subprocess.run([chromium, *FLAGS, *place], capture_output=True, text=True, timeout=60)
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
    x_BTD = np.array([[[shown['inputs'][f'x:0,{t},{d}'] for d in (0, 1)] for t in (0, 1)]], float)
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


def test_typed_numbers_count_at_once_and_are_clamped_when_they_are_left(results):
    *typed, shown = results['type']
    assert typed == [['-1.25', -1.25, '-1.25'], ['9', 5, '5.00'], ['', 5, '5.00']]
    assert_computed(shown, 'qk/vo')


def test_every_pair_that_the_page_offers_is_computed_with_drawn_numbers_as_its_layer(
    results, document
):
    known = table(document)['2,1']
    assert 'Left out, because it is not bilinear: nonlinear_query.' in document
    offered = {*known['score'], *known['value']}
    assert {name for pair, _ in results['pairs'] for name in pair.split('/')} == offered
    for variant, shown in results['pairs']:
        assert_computed(shown, variant)
    drawn = {shown['inputs'].get('W_Q:0,0,0') for _, shown in results['pairs']}
    assert len(drawn) > 4 and shown['inputs']['x:0,0,0'] == 1


def test_causal_mask_and_ranks(results):
    causal, shared, low_rank = results['causal']
    assert_computed(causal, 'qk/vo', causal=True)
    assert causal['results']['P0:0,1'] == 0 and causal['results']['P0:0,0'] == 1
    rank, _, share = shared['facts'][0]
    assert rank == 'rank 2 of 2' and share == 'symmetric share 100 %'
    A_DE = np.array([[low_rank['results'][f'A0:{i},{j}'] for j in (0, 1)] for i in (0, 1)])
    largest = np.linalg.svd(A_DE)[1][0]
    assert low_rank['facts'][0][:2] == ['rank 1 of 2', f'singular values {largest:.2f}, 0.00']


def test_what_does_not_fit_gives_way_and_entries_are_polynomials(results):
    assert results['others'] == [
        *('vo', 'latent is not available here; the value is vo. '),
        *('#shared_qk/no_v', ''),
        *('#qk/no_v', 'constructor is not available here; the score is qk. '),
        *('A11 = q11 k11 + q12 k12', 'A12 = q11 k21 + q12 k22'),
        *('A21 = q21 k11 + q22 k12', 'A22 = q21 k21 + q22 k22'),
    ]


def test_the_page_is_as_narrow_as_a_phone_and_requests_nothing(results, document):
    shown, width = results['width']
    assert shown == width < 544
    # The policy of the page forbids requests, and nothing has broken it.
    assert results['wrong'] == [] and "content=\"default-src 'none'; " in document
    assert not re.search(r'https?://|@import|url\(|eval\(|Function\(| src=', document)
