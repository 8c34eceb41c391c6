// What is done with the page.
let saying = 0;
function say(text) {
  clearTimeout(saying);
  saying = setTimeout(() => { $('said').textContent = text; }, 400);
}

function set(input, value) {
  input.dataset.value = clamp(value);
  state.numbers.set(input.dataset.key, clamp(value));
  update();
  const attended = compute().P.flatMap((head, n) => head.map((row, t) =>
    `${state.heads > 1 ? `Head ${n + 1}, token` : 'Token'} ${t + 1} attends ${row.map((p, s) => `${Math.round(100 * p)} % to token ${s + 1}`).join(', ')}.`));
  say(`${input.getAttribute('aria-label')} is ${shown(clamp(value))}. ${attended.join(' ')}`);
}

function listen(root) {
  let drag = null;
  const end = () => {
    if (drag?.moved) { drag.input.classList.remove('dragged'); getSelection().removeAllRanges(); }
    drag = null;
  };
  const typed = (input) => {
    if (!input.dataset.typing) return;
    delete input.dataset.typing;
    const value = Number(input.value.replace('\u2212', '-').replace(',', '.'));
    if (input.value.trim() && Number.isFinite(value)) set(input, value); else update();
  };
  root.addEventListener('pointerdown', (event) => {
    const input = event.target.closest('input[role=spinbutton]');
    if (!input || event.button || !event.isPrimary) return;
    end();
    drag = { input, pointer: event.pointerId, x: event.clientX, value: Number(input.dataset.value), moved: false };
    input.setPointerCapture(event.pointerId);
    if (input.dataset.typing === undefined) input.dataset.before = input.dataset.value;
  });
  root.addEventListener('pointermove', (event) => {
    if (event.pointerId !== drag?.pointer) return;
    if (!event.buttons) { end(); return; }
    const by = event.clientX - drag.x;
    if (!drag.moved && Math.abs(by) < 4) return;
    if (!drag.moved) { drag.moved = true; drag.input.classList.add('dragged'); delete drag.input.dataset.typing; }
    event.preventDefault();
    set(drag.input, drag.value + by * PER_PIXEL);
  });
  root.addEventListener('lostpointercapture', (event) => { if (event.pointerId === drag?.pointer) end(); });
  // Pressed on selected text, a browser would drag that text instead.
  root.addEventListener('dragstart', (event) => event.preventDefault());
  root.addEventListener('focusin', ({ target }) => {
    if (target.matches('input[role=spinbutton]')) { target.dataset.before = target.dataset.value; target.select(); }
  });
  root.addEventListener('focusout', ({ target }) => typed(target));
  root.addEventListener('input', ({ target }) => { target.dataset.typing = true; });
  root.addEventListener('keydown', (event) => {
    const input = event.target;
    const by = { ArrowUp: STEP, ArrowDown: -STEP, PageUp: 1, PageDown: -1 }[event.key];
    if (by) {
      event.preventDefault();
      typed(input);
      set(input, Number(input.dataset.value) + by * (event.shiftKey && Math.abs(by) < 1 ? 10 : 1));
      input.select();
    } else if (event.key === 'Enter') { typed(input); input.select(); }
    else if (event.key === 'Escape') { delete input.dataset.typing; set(input, Number(input.dataset.before)); input.select(); }
  });
}

const offered = (circuit) => Object.keys(TABLE.equations[circuit]).filter((name) => !TABLE.without[circuit].includes(name));

function options(select, circuit, valid) {
  select.replaceChildren(...offered(circuit).map((name) =>
    make('option', { value: name, disabled: !valid(name) }, `${name}:  ${TABLE.equations[circuit][name].replaceAll('[n]', '').replaceAll('^T', '\u1d40')}`)));
  select.value = state[circuit];
}

const fits = (value) => { const of = size().value[value]; return Boolean(of && (of.B[''] ?? of.B[state.score])); };

// The nearest state that exists: sizes first, then the score, then the value.
// `changed` has sentences about what was asked for and is not shown.
function settle(changed = []) {
  const heads = Object.keys(TABLE.sizes).filter((key) => key.startsWith(`${state.dims},`)).map((key) => Number(key.split(',')[1]));
  if (!heads.includes(state.heads)) {
    const left = `${state.heads} head${state.heads > 1 ? 's do' : ' does'}`;
    state.heads = heads[0];
    changed.push(`${left} not go with ${state.dims} dimensions; heads: ${state.heads}.`);
  }
  if (!size().score[state.score]) {
    changed.push(`${state.score} does not exist at this size; the score is qk.`);
    state.score = 'qk';
  }
  if (!fits(state.value)) {
    changed.push(`${state.value} does not go with ${state.score} at this size; the value is vo.`);
    state.value = 'vo';
  }
  $('changed').textContent = changed.join(' ');
  if (changed.length) say(changed.join(' '));
  options($('score'), 'score', (name) => Boolean(size().score[name]));
  options($('value'), 'value', fits);
  for (const input of document.querySelectorAll('.choice input')) {
    input.checked = state[input.name] === Number(input.value);
    if (input.name === 'heads') input.disabled = !heads.includes(Number(input.value));
  }
  $('causal').checked = state.causal;
  history.replaceState(null, '', `#${state.score}/${state.value}`);
  build();
}

// Reads '#score/value'.
function follow() {
  let text = location.hash.slice(1);
  try { text = decodeURIComponent(text); } catch { /* an escape that is none */ }
  const changed = [];
  text.split('/').forEach((name, i) => {
    const circuit = ['score', 'value'][i];
    if (!name || !circuit) return;
    if (offered(circuit).includes(name)) state[circuit] = name;
    else changed.push(`This page has no ${circuit} ${name}; the ${circuit} is ${state[circuit]}.`);
  });
  settle(changed);
}

function begin() {
  const all = Object.keys(TABLE.sizes).map((key) => key.split(',').map(Number));
  const sizes = { tokens: [2, 3, 4], dims: [...new Set(all.map(([d]) => d))], heads: [...new Set(all.map(([, n]) => n))] };
  for (const [name, numbers] of Object.entries(sizes)) {
    $(name).querySelector('div').append(...numbers.map((n) => {
      const input = make('input', { type: 'radio', name, value: n, id: `${name}-${n}` });
      input.addEventListener('change', () => { state[name] = n; settle(); });
      return make('label', {}, input, make('span', {}, String(n)));
    }));
  }
  for (const circuit of ['score', 'value']) {
    $(circuit).addEventListener('change', ({ target }) => { state[circuit] = target.value; settle(); });
  }
  $('causal').addEventListener('change', ({ target }) => { state.causal = target.checked; build(); });
  $('draw').addEventListener('click', () => { state.draw += 1; state.numbers.clear(); build(); say('Other numbers.'); });
  $('reset').addEventListener('click', () => { Object.assign(state, start); state.numbers.clear(); settle(); say('As at the beginning.'); });
  const without = Object.values(TABLE.without).flat();
  $('without').textContent = without.length ? `Left out, because it is not bilinear: ${without.join(', ')}.` : '';
  // Its anchor would take the place of the variant in the address.
  document.querySelector('.skip').addEventListener('click', (event) => { event.preventDefault(); $('trained').focus(); });
  addEventListener('hashchange', follow);
  listen($('trained'));
  follow();
}

begin();
