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
# A script for <head>, before the script of the page, that collects errors and forbidden requests.
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
    """The scores and values that the page offers for two dimensions and one head."""
    pattern = r'<script type="application/json" id="table">(.*?)</script>'
    table = json.loads(re.search(pattern, page_html, re.S)[1])
    return table['2,1']


def pairs_to_drive(offered_variants):
    """(score, value) pairs: every score with the value vo, and every value with a fitting score."""
    pairs = [(score, 'vo') for score in offered_variants['score']]
    for value, offered in offered_variants['value'].items():
        # offered['B'] maps a score to the matrix B. The key '' means: for every score.
        fits_qk = '' in offered['B'] or 'qk' in offered['B']
        score = 'qk' if fits_qk else 'latent'
        pairs.append((score, value))
    return pairs


@pytest.fixture(scope='module')
def results(chromium, page_html, offered_variants, tmp_path_factory):
    """What the page shows in Chromium after each step of a simulated user.

    The script drive_page.js takes the steps, such as dragging a number or following a link. For
    example, results['drag']['inputs'] has the numbers on the page after the step `drag`.
    """
    # Two scripts are added to the page: one collects errors, and one takes the steps.
    pairs = pairs_to_drive(offered_variants)
    script = f'const PAIRS = {json.dumps(pairs)};\n{DRIVE_PAGE}'
    driven_page = page_html.replace('</head>', f'<script>{COLLECT_PROBLEMS}</script></head>')
    driven_page = driven_page.replace('</body>', f'<script>{script}</script></body>')

    # Chromium opens the page without a window, and prints the final HTML.
    folder = tmp_path_factory.mktemp('explorer')
    file = folder / 'page.html'
    file.write_text(driven_page, encoding='utf-8')
    command = [chromium, *FLAGS, f'--user-data-dir={folder}/profile', file.as_uri()]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60)

    # The script leaves its results in the page as JSON.
    texts = re.findall('<pre id="results">(.*?)</pre>', completed.stdout, re.S)
    assert len(texts) == 1
    return json.loads(html.unescape(texts[0]))


def layer_of(bench: Bench, inputs: dict):
    """An attention layer with the numbers on the page as parameters.

    Args:
        bench: The variant and the sizes of the layer.
        inputs: The numbers on the page. For example, inputs['W_Q:0,1,0'] is the entry of W_Q in
            head 0, row 1 and column 0.
    """
    arrays = []
    for parameter in bench.parameters:
        flat_array = np.empty(parameter.initial.size)
        # positions[head, row, column] is the index of an entry in the flat array.
        positions = parameter.by_head
        if positions.ndim == 2:
            positions = positions[:, None]  # the page shows a vector as one row
        for (head, row, column), position in np.ndenumerate(positions):
            flat_array[position] = inputs[f'{parameter.name}:{head},{row},{column}']
        array = flat_array.reshape(parameter.initial.shape)
        arrays.append(jnp.asarray(array))
    return bench.filled(arrays)


def expected_on_page(inputs: dict, x_BTD: np.ndarray, variant: str, causal: bool) -> dict:
    """The matrices that the page should show, in float64, e.g. {'A0': A of head 0, ...}.

    Args:
        inputs: The numbers on the page.
        x_BTD: The vectors of the tokens, of shape [1, 2, 2].
        variant: The variant of attention.
        causal: Whether later tokens are hidden from a token.
    """
    with jax.enable_x64(True):
        layer = layer_of(Bench(variant, tokens=2, dims=2, heads=1), inputs)
        out_BTE = layer(jnp.asarray(x_BTD), Mask(causal=causal))
        A_NDE, B_NDE = layer.matrix()
        A_NDE = np.asarray(A_NDE)
        B_NDE = np.asarray(B_NDE)

    # `oracle` computes logits and probabilities in plain code.
    mask_BTS = np.ones((1, 2, 2), bool)
    if causal:
        mask_BTS = np.tril(mask_BTS)
    s_BNTS = oracle.logits(A_NDE, x_BTD, x_BTD, scale=layer.score.scale)
    p_BNTS = oracle.probabilities(s_BNTS, mask_BTS)

    A_DE = A_NDE[0]
    return {
        'A0': A_DE,
        'A0symmetric': (A_DE + A_DE.T) / 2,
        'A0skew': (A_DE - A_DE.T) / 2,
        'B0': B_NDE[0],
        'S0': s_BNTS[0, 0],
        'P0': p_BNTS[0, 0],
        'out': np.asarray(out_BTE[0]),
    }


def assert_computed(shown: dict, variant: str, *, causal: bool = False) -> None:
    """Asserts that the page shows the matrices that an attention layer computes.

    Args:
        shown: What the page shows for 2 tokens, 2 dimensions and one head. shown['inputs'] has the
            parameters and tokens, and shown['results'] has the entries of the matrices.
        variant: The variant of attention, such as 'qk/vo'.
        causal: Whether later tokens are hidden from a token.
    """
    inputs = shown['inputs']
    x_BTD = np.empty((1, 2, 2))
    for token, dim in np.ndindex(2, 2):
        x_BTD[0, token, dim] = inputs[f'x:0,{token},{dim}']

    expected_matrices = expected_on_page(inputs, x_BTD, variant, causal)
    # The page names an entry by matrix, row and column, e.g. 'A0:0,1'.
    expected = {}
    for name, matrix in expected_matrices.items():
        for (row, column), entry in np.ndenumerate(matrix):
            expected[f'{name}:{row},{column}'] = float(entry)
    assert shown['results'] == pytest.approx(expected, abs=1e-12, rel=0), variant


def test_a_dragged_number_moves_by_a_hundredth_per_pixel(results):
    """The step `drag` moves one number by 60 pixels. 60 * 0.01 = 0.6"""
    before = results['start']['inputs']
    after = results['drag']['inputs']

    changes = {}
    for name in after:
        if after[name] != before[name]:
            changes[name] = after[name] - before[name]
    assert changes == {'W_Q:0,0,1': pytest.approx(0.6)}


def test_a_number_is_dragged_to_its_limit_at_most(results):
    assert results['drag_far']['inputs']['W_Q:0,0,0'] == -5


def test_a_dragged_number_changes_the_results_that_depend_on_it(results):
    """A change in the first row of W_Q changes only the first rows of A, S, P and the output.

    The page has one head of qk/vo. The matrix x of the two tokens is the identity.

        A = W_Q W_K^T,  S = scale * x A x^T,  P = softmax(S),  out = P x B
    """
    assert_computed(results['drag'], 'qk/vo')

    before = results['start']['results']
    after = results['drag']['results']
    changed = {place for place in after if after[place] != before[place]}
    # The symmetric and skew parts of A are left out, because every entry may change.
    parts_of_A = ('A0symmetric', 'A0skew')
    changed_matrices = {place for place in changed if not place.startswith(parts_of_A)}

    # In 'A0:0,1', A0 is the matrix, 0 is the row, and 1 is the column.
    first_rows = {'A0:0,0', 'A0:0,1', 'S0:0,0', 'S0:0,1', 'P0:0,0', 'P0:0,1', 'out:0,0', 'out:0,1'}
    assert changed_matrices == first_rows


def test_a_typed_number_is_clamped_when_it_is_left(results):
    typed = []
    for text_while_typed, number, text_when_left in results['type']:
        typed.append((text_while_typed, number, text_when_left))
    assert typed == [('-1.25', -1.25, '-1.25'), ('9', 5, '5.00'), ('', 5, '5.00')]


def test_a_typed_number_changes_the_results(results):
    assert results['typed']['inputs']['W_K:0,1,0'] == 5
    assert_computed(results['typed'], 'qk/vo')


def test_every_bilinear_score_and_value_is_offered(results, offered_variants, page_html):
    assert 'Left out, because it is not bilinear: nonlinear_query.' in page_html

    driven = set()
    for variant, _ in results['pairs']:
        driven.update(variant.split('/'))
    assert driven == {*offered_variants['score'], *offered_variants['value']}


def test_every_variant_is_computed_as_its_layer(results):
    for variant, shown in results['pairs']:
        assert_computed(shown, variant)


def test_random_numbers_replace_parameters_but_not_tokens(results):
    first_entries = set()
    for _, shown in results['pairs']:
        inputs = shown['inputs']
        first_entries.add(inputs.get('W_Q:0,0,0'))
        assert inputs['x:0,0,0'] == 1
    assert len(first_entries) > 4


def test_a_causal_mask_hides_later_tokens(results):
    causal = results['causal']
    assert_computed(causal, 'qk/vo', causal=True)
    assert causal['results']['P0:0,1'] == 0
    assert causal['results']['P0:0,0'] == 1


def test_a_symmetric_matrix_is_shown_with_its_rank_and_symmetric_share(results):
    rank, _, share = results['shared_qk']['facts'][0]
    assert rank == 'rank 2 of 2'
    assert share == 'symmetric share 100 %'


def test_a_matrix_of_low_rank_is_shown_with_its_singular_values(results):
    shown = results['low_rank']
    A_DE = np.empty((2, 2))
    for row, column in np.ndindex(2, 2):
        A_DE[row, column] = shown['results'][f'A0:{row},{column}']
    largest = np.linalg.svd(A_DE, compute_uv=False)[0]

    rank, singular_values = shown['facts'][0][:2]
    assert rank == 'rank 1 of 2'
    assert singular_values == f'singular values {largest:.2f}, 0.00'


def test_a_value_that_does_not_fit_the_score_is_replaced(results):
    value, notice = results['unfit_value']
    assert value == 'vo'
    assert notice == 'latent is not available here; the value is vo. '


def test_a_link_chooses_the_variant(results):
    variant_in_address, notice = results['link']
    assert variant_in_address == '#shared_qk/no_v'
    assert notice == ''


def test_a_link_to_an_unknown_score_shows_another_one(results):
    variant_in_address, notice = results['unknown_link']
    assert variant_in_address == '#qk/no_v'
    assert notice == 'constructor is not available here; the score is qk. '


def test_entries_are_shown_as_polynomials(results):
    assert results['entries'] == [
        'A11 = q11 k11 + q12 k12',
        'A12 = q11 k21 + q12 k22',
        'A21 = q21 k11 + q22 k12',
        'A22 = q21 k21 + q22 k22',
    ]


def test_the_page_is_as_narrow_as_a_phone(results):
    page_width, window_width = results['width']
    assert page_width == window_width
    assert window_width < 544


def test_the_page_requests_nothing(results, page_html):
    """The page's Content-Security-Policy forbids requests, and the page attempts none."""
    assert results['problems'] == []
    assert "content=\"default-src 'none'; " in page_html
    assert not re.search(r'https?://|@import|url\(|eval\(|Function\(| src=', page_html)
