"""The page in headless Chromium: what it shows for changed numbers is what the layers compute."""

import html
import json
import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.explorer.bench import Bench
from experiments.explorer.page import page
from qkattn.attention import Mask, oracle

pytest.importorskip('sympy', reason="pip install -e '.[explore]'")

FLAGS = (
    '--headless',
    '--no-sandbox',
    '--disable-gpu',
    '--no-first-run',
    '--disable-extensions',
    '--disable-background-networking',
    '--disable-dev-shm-usage',
    '--window-size=500,844',
    '--virtual-time-budget=60000',  # timers pass without waiting
    '--dump-dom',
)
# In the head, before the script of the page: collects errors and forbidden requests.
COLLECT_PROBLEMS = """
const problems = [];
addEventListener('error', (event) => problems.push(event.message));
addEventListener('securitypolicyviolation', (event) => problems.push(event.blockedURI));
"""
DRIVE_PAGE = Path(__file__).with_name('drive_page.js').read_text(encoding='utf-8')


@pytest.fixture(scope='module')
def page_html():
    return page(((2, 1), (4, 2)))


@pytest.fixture(scope='module')
def offered_variants(page_html):
    """The scores and values that the page offers at two dimensions."""
    pattern = r'<script type="application/json" id="table">(.*?)</script>'
    return json.loads(re.search(pattern, page_html, re.S)[1])['2,1']


@pytest.fixture(scope='module')
def results(chromium, page_html, offered_variants, tmp_path_factory):
    """What the steps of drive_page.js return, by their names, after it ran in Chromium."""
    # Every score beside vo, and every value beside a score that it fits.
    pairs = [(score, 'vo') for score in offered_variants['score']]
    for name, value in offered_variants['value'].items():
        fits_qk = '' in value['B'] or 'qk' in value['B']
        pairs.append(('qk' if fits_qk else 'latent', name))
    # The steps run in the page itself and leave their results in it as JSON.
    script = f'const PAIRS = {json.dumps(pairs)};\n{DRIVE_PAGE}'
    driven = page_html.replace('</head>', f'<script>{COLLECT_PROBLEMS}</script></head>')
    driven = driven.replace('</body>', f'<script>{script}</script></body>')

    folder = tmp_path_factory.mktemp('explorer')
    file = folder / 'page.html'
    file.write_text(driven, encoding='utf-8')
    command = [chromium, *FLAGS, f'--user-data-dir={folder}/profile', file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    (text,) = re.findall('<pre id="results">(.*?)</pre>', done.stdout, re.S)
    return json.loads(html.unescape(text))


def layer_of(bench: Bench, inputs: dict):
    """The layer of a bench with the numbers that the page shows, in float64."""
    arrays = []
    for parameter in bench.parameters:
        flat = np.empty(parameter.initial.size)
        for place, position in np.ndenumerate(parameter.by_head):
            head, *row, column = place  # a vector has no row and is shown as one
            flat[position] = inputs[f'{parameter.name}:{head},{row[0] if row else 0},{column}']
        arrays.append(jnp.asarray(flat.reshape(parameter.initial.shape)))
    return bench.filled(arrays)


def assert_computed(shown: dict, variant: str, *, causal: bool = False) -> None:
    """The results that the page shows are those of a layer with its numbers."""
    inputs = shown['inputs']
    x_TD = np.array([[inputs[f'x:0,{t},{d}'] for d in range(2)] for t in range(2)], float)
    x_BTD = x_TD[None]
    with jax.enable_x64(True):
        layer = layer_of(Bench(variant, 2, 2, 1), inputs)
        out_BTE = layer(jnp.asarray(x_BTD), Mask(causal=causal))
        A_NDE, B_NDE = [np.asarray(matrix) for matrix in layer.matrix()]
    mask_BTS = np.ones((1, 2, 2), bool)
    if causal:
        mask_BTS = np.tril(mask_BTS)
    s_BNTS = oracle.logits(A_NDE, x_BTD, x_BTD, scale=layer.score.scale)
    A_DE = A_NDE[0]
    expected = {
        'A0': A_DE,
        'A0symmetric': (A_DE + A_DE.T) / 2,
        'A0skew': (A_DE - A_DE.T) / 2,
        'B0': B_NDE[0],
        'S0': s_BNTS[0, 0],
        'P0': oracle.probabilities(s_BNTS, mask_BTS)[0, 0],
        'out': np.asarray(out_BTE[0]),
    }
    numbers = {}
    for name, matrix in expected.items():
        for (row, column), number in np.ndenumerate(matrix):
            numbers[f'{name}:{row},{column}'] = float(number)
    assert shown['results'] == pytest.approx(numbers, abs=1e-12, rel=0), variant


def test_a_dragged_number_moves_by_a_hundredth_per_pixel(results):
    before = results['start']['inputs']
    after = results['drag']['inputs']
    moved = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert moved == {'W_Q:0,0,1': pytest.approx(0.6)}


def test_a_number_is_dragged_to_its_limit_at_most(results):
    assert results['drag_far']['inputs']['W_Q:0,0,0'] == -5


def test_a_dragged_number_moves_the_results_that_depend_on_it(results):
    assert_computed(results['drag'], 'qk/vo')
    before = results['start']['results']
    after = results['drag']['results']
    changed = {place for place in after if after[place] != before[place]}
    # Its symmetric and its skew part change in more places than A itself.
    parts_of_A = {place for place in changed if place.startswith(('A0symmetric', 'A0skew'))}
    # x is the identity: the first row of W_Q is in the first rows of A, S, P and the output.
    rows = {f'{name}:0,{column}' for name in ('A0', 'S0', 'P0', 'out') for column in range(2)}
    assert changed - parts_of_A == rows


def test_a_typed_number_counts_at_once_but_is_clamped_when_it_is_left(results):
    """The text while it is typed, the number that counts, and the text after it is left."""
    assert results['type'] == [['-1.25', -1.25, '-1.25'], ['9', 5, '5.00'], ['', 5, '5.00']]


def test_a_typed_number_moves_the_results(results):
    assert results['typed']['inputs']['W_K:0,1,0'] == 5
    assert_computed(results['typed'], 'qk/vo')


def test_every_variant_but_those_that_are_not_bilinear_is_offered(
    results, offered_variants, page_html
):
    assert 'Left out, because it is not bilinear: nonlinear_query.' in page_html
    driven = {name for variant, _ in results['pairs'] for name in variant.split('/')}
    assert driven == {*offered_variants['score'], *offered_variants['value']}


def test_every_pair_is_computed_as_its_layer(results):
    for variant, shown in results['pairs']:
        assert_computed(shown, variant)


def test_drawn_numbers_are_those_of_parameters_alone(results):
    inputs = [shown['inputs'] for _, shown in results['pairs']]
    assert len({shown.get('W_Q:0,0,0') for shown in inputs}) > 4
    assert all(shown['x:0,0,0'] == 1 for shown in inputs)


def test_a_causal_mask_hides_later_tokens(results):
    causal = results['causal']
    assert_computed(causal, 'qk/vo', causal=True)
    assert causal['results']['P0:0,1'] == 0
    assert causal['results']['P0:0,0'] == 1


def test_a_symmetric_matrix_is_shown_with_its_rank_and_symmetric_share(results):
    rank, _, share = results['shared_qk']['facts'][0]
    assert rank == 'rank 2 of 2'
    assert share == 'symmetric share 100 %'


def test_a_matrix_of_low_rank_is_shown_with_its_rank_and_singular_values(results):
    shown = results['low_rank']
    A_DE = np.array(
        [[shown['results'][f'A0:{row},{column}'] for column in (0, 1)] for row in (0, 1)]
    )
    largest = np.linalg.svd(A_DE, compute_uv=False)[0]
    assert shown['facts'][0][:2] == ['rank 1 of 2', f'singular values {largest:.2f}, 0.00']


def test_a_value_that_does_not_fit_the_score_gives_way(results):
    assert results['unfit_value'] == ['vo', 'latent is not available here; the value is vo. ']


def test_a_link_chooses_the_variant(results):
    assert results['link'] == ['#shared_qk/no_v', '']


def test_a_link_to_an_unknown_score_shows_another_one(results):
    sentence = 'constructor is not available here; the score is qk. '
    assert results['unknown_link'] == ['#qk/no_v', sentence]


def test_entries_are_shown_as_polynomials(results):
    assert results['entries'] == [
        'A11 = q11 k11 + q12 k12',
        'A12 = q11 k21 + q12 k22',
        'A21 = q21 k11 + q22 k12',
        'A22 = q21 k21 + q22 k22',
    ]


def test_the_page_is_as_narrow_as_a_phone(results):
    shown, width = results['width']
    assert shown == width < 544


def test_the_page_requests_nothing(results, page_html):
    """Its policy forbids requests, and nothing breaks it."""
    assert results['problems'] == []
    assert "content=\"default-src 'none'; " in page_html
    assert not re.search(r'https?://|@import|url\(|eval\(|Function\(| src=', page_html)
