"""What the tests of the page read from it and do with it."""

READ = """
(() => {
  const number = (e, key) => [e.dataset[key], Number(e.dataset.value)];
  const numbers = (list, key) => Object.fromEntries([...list].map((e) => number(e, key)));
  return {
    inputs: numbers(document.querySelectorAll('[data-key]'), 'key'),
    results: numbers(document.querySelectorAll('[data-place]'), 'place'),
    facts: [...document.querySelectorAll('.facts div')].map((e) => e.textContent),
    said: document.getElementById('said').textContent,
  };
})()
"""
CHOOSE = """
(() => {{
  const choose = (id, value) => {{
    const element = document.getElementById(id);
    if (element.value === value) return;
    element.value = value;
    element.dispatchEvent(new Event('change'));
  }};
  choose('score', {score!r}); choose('value', {value!r});
  return [document.getElementById('score').value, document.getElementById('value').value];
}})()
"""


def said(page) -> str:
    """What a screen reader is told, after the pause for more changes."""
    page.run('new Promise((done) => setTimeout(done, 600))')
    return page.run(READ)['said']
