// Drives the page of the explorer as a reader does. Stands behind the script of the page and shares
// its names. The page then shows what each step returns, as JSON.

const every = (selector) => [...document.querySelectorAll(selector)];

// What the page shows: numbers by their names, results by their places, and lines of facts.
const shownNow = () => ({
  inputs: Object.fromEntries(every('#numbers input').map((e) =>
    [e.name, numbers.get(e.name) ?? Number(e.dataset.initial)])),
  results: Object.fromEntries(every('.entry').map((e) => [e.dataset.place, Number(e.dataset.value)])),
  facts: every('.facts').map((e) => e.textContent.split('\n')),
});

const inputOf = (name) => document.querySelector(`[name="${name}"]`);
const dispatch = (element, type, fields = {}) =>
  element.dispatchEvent(new PointerEvent(type, { bubbles: true, pointerId: 1, ...fields }));

function pick(id, value) {
  $(id).value = value;
  dispatch($(id), 'change');
}

// Presses on a number, moves to the right by these pixels from there, and lets go.
Element.prototype.setPointerCapture = () => {};  // which takes the id of a real pointer
function dragBy(name, ...moves) {
  dispatch(inputOf(name), 'pointerdown', { clientX: 0 });
  for (const clientX of moves) dispatch(inputOf(name), 'pointermove', { clientX });
  dispatch(inputOf(name), 'lostpointercapture');
  dispatch(inputOf(name), 'pointermove', { clientX: 0 });
  return shownNow();
}

// Types into a number, as arrow keys do, and leaves it.
function type(name, text) {
  const input = inputOf(name);
  input.value = text;
  dispatch(input, 'input');
  const whileTyped = input.value;
  dispatch(input, 'change');
  return [whileTyped, numbers.get(name), input.value];
}

async function followLink(hash) {
  const changed = new Promise((done) => addEventListener('hashchange', done, { once: true }));
  location.hash = hash;
  await changed;
  return [location.hash, $('changed').textContent];
}

const steps = {
  start: () => shownNow(),
  drag: () => dragBy('W_Q:0,0,1', 15, 30, 60),
  drag_far: () => dragBy('W_Q:0,0,0', -10000),
  type: () => ['-1.25', '9', ''].map((text) => type('W_K:0,1,0', text)),
  typed: () => { type('W_K:0,1,0', '9'); return shownNow(); },
  pairs: () => PAIRS.map(([score, value]) => {
    pick('score', score);
    pick('value', value);
    $('draw').click();
    return [`${$('score').value}/${$('value').value}`, shownNow()];
  }),
  causal: () => { $('causal').click(); return shownNow(); },
  shared_qk: () => { pick('score', 'shared_qk'); return shownNow(); },
  low_rank: () => { pick('score', 'low_rank'); return shownNow(); },
  unfit_value: () => {
    pick('score', 'latent');
    pick('value', 'latent');
    pick('score', 'merged');
    return [$('value').value, $('changed').textContent];
  },
  link: () => followLink('shared_qk/no_v'),
  unknown_link: () => followLink('constructor/no_v'),
  entries: () => { pick('score', 'qk'); return every('#entries-A li').map((e) => e.textContent); },
  width: () => [document.documentElement.scrollWidth, document.documentElement.clientWidth],
};

(async () => {
  const results = { problems };
  for (const [name, step] of Object.entries(steps)) {
    $('controls').reset();
    await new Promise((done) => setTimeout(done));
    results[name] = await step();
  }
  document.body.replaceChildren(make('pre', { id: 'results' }, JSON.stringify(results)));
})();
