"""The page for who listens, reads in the dark, or follows a link."""

import pytest

from tests.explore.explorer import CHOOSE, READ, said


def test_a_change_is_announced_once_it_is_over(page):
    page.run('document.querySelector(\'[data-key="x:0,0"]\').focus()')
    page.press('ArrowUp')
    said(page)
    shown = page.run(READ)
    assert shown['said'].startswith('token 1, dimension 1 is 1.10. Token 1 attends ')
    percent = round(100 * shown['results']['P0:0,0'])
    assert f'Token 1 attends {percent} % to token 1, {100 - percent} % to token 2.' in shown['said']


def test_two_heads_and_what_a_size_drops(page):
    page.run("document.getElementById('dims-4').click()")
    assert said(page) == '1 head does not go with 4 dimensions; heads: 2.'
    labels = page.run("[...document.querySelectorAll('[aria-label]')].map((e) => e.ariaLabel)")
    places = [label.partition(':')[0] for label in labels]
    assert len(set(places)) == len(places) and 'skew part of A, head 2, row 1, column 4' in places
    captions = page.run("[...document.querySelectorAll('caption')].map((e) => e.textContent)")
    assert len(set(captions)) == len(captions)
    page.run('document.querySelector(\'[data-key="x:0,0"]\').focus()')
    page.press('ArrowUp')
    heads = [f'Head {n}, token {t} attends ' for n in (1, 2) for t in (1, 2)]
    assert [text for text in heads if text not in said(page)] == []


HASH = """
new Promise((done) => {{
  addEventListener('hashchange', () => done([document.getElementById('score').value,
    document.getElementById('value').value, location.hash,
    document.getElementById('changed').textContent]), {{ once: true }});
  location.hash = {!r};
}})
"""


@pytest.mark.parametrize(
    ('address', 'variant', 'message'),
    [
        ('#shared_qk/no_v', 'shared_qk/no_v', ''),
        ('#shared%5Fqk', 'shared_qk/vo', ''),
        ('#50%', 'qk/vo', 'This page has no score 50%; the score is qk.'),
        ('#constructor/no_v', 'qk/no_v', 'This page has no score constructor; the score is qk.'),
        ('#nonlinear_query', 'qk/vo', 'This page has no score nonlinear_query; the score is qk.'),
    ],
)
def test_the_address_names_the_variant(page, address, variant, message):
    shown = page.run(HASH.format(address))
    assert shown == [*variant.split('/'), f'#{variant}', message]
    page.run("document.querySelector('.skip').click()")
    now = (
        "[location.hash, document.activeElement.id, document.getElementById('changed').textContent]"
    )
    assert page.run(now) == [f'#{variant}', 'trained', message]


CONTRAST = """
[[1, false], [-1, false], [1, true]].map(([value, sequential]) => {
  const cell = document.querySelector('[data-place="P0:0,0"]');
  const canvas = make('canvas', { width: 1, height: 1 });
  const context = canvas.getContext('2d', { willReadFrequently: true });
  cell.style.transition = 'none';
  paint(cell, value, 1, sequential);
  const light = (colour) => {
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const linear = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) =>
      v / 255 > 0.04045 ? ((v / 255 + 0.055) / 1.055) ** 2.4 : v / 255 / 12.92);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05;
  };
  const style = getComputedStyle(cell), pair = [light(style.color), light(style.backgroundColor)];
  return Math.max(...pair) / Math.min(...pair);
})
"""


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_numbers_stand_out_from_the_strongest_colours(page, scheme):
    feature = {'name': 'prefers-color-scheme', 'value': scheme}
    page.send('Emulation.setEmulatedMedia', features=[feature])
    ratios = page.run(CONTRAST)
    page.send('Emulation.setEmulatedMedia', features=[])
    assert min(ratios) >= 4.5 and len(set(ratios)) == 3


def test_a_value_that_does_not_fit_gives_way(page):
    page.run(CHOOSE.format(score='latent', value='latent'))
    assert page.run(CHOOSE.format(score='merged', value='latent')) == ['merged', 'vo']
    assert said(page) == 'latent does not go with merged at this size; the value is vo.'
    disabled = "[...document.querySelectorAll('#value option:disabled')].map((o) => o.value)"
    assert {'latent', 'k_is_v', 'q_is_v', 'subspace'} <= {*page.run(disabled)}


def test_formula_of_an_entry(page):
    page.run('document.querySelector(\'[data-place="A0:1,0"]\').focus()')
    assert page.run("document.getElementById('f-A').textContent").split() == [
        'A21',
        '=',
        'q21',
        'k11',
        '+',
        'q22',
        'k12',
    ]
    page.press('ArrowRight')
    assert page.run("document.getElementById('f-A').textContent").startswith('A22 = q21 k21')
    assert page.run('document.activeElement.dataset.place') == 'A0:1,1'
    assert page.run("document.activeElement.getAttribute('aria-describedby')") == 'f-A'


def test_every_control_has_a_name(page):
    nodes = page.send('Accessibility.getFullAXTree')['nodes']
    named = {'spinbutton', 'combobox', 'radio', 'checkbox', 'button', 'table', 'group', 'grid'}
    shown = [n for n in nodes if not n.get('ignored') and n['role']['value'].lower() in named]
    roles = {'spinbutton', 'combobox', 'radio', 'checkbox', 'table', 'grid'}
    assert {n['role']['value'] for n in shown} >= roles
    assert [n for n in shown if not n.get('name', {}).get('value')] == []
    labels = {n['name']['value'] for n in shown if n['role']['value'] == 'spinbutton'}
    assert {'token 2, dimension 1', 'W Q, row 1, column 2'} <= labels and len(labels) == 20
