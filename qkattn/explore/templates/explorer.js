'use strict';
const TABLE = JSON.parse(document.getElementById('table').textContent);
const LOW = -5, HIGH = 5, STEP = 0.1, PER_PIXEL = 0.01;
const start = { score: 'qk', value: 'vo', tokens: 2, dims: 2, heads: 1, causal: false, draw: 0 };
const state = { ...start, numbers: new Map() };
const $ = (id) => document.getElementById(id);
const range = (n) => Array.from({ length: n }, (_, i) => i);
const clamp = (v) => Math.min(HIGH, Math.max(LOW, Math.round(v * 100) / 100));
const shown = (v) => (Math.abs(v) < 0.005 ? 0 : v).toFixed(2).replace('-', '\u2212');

// Elements: make('td', { class: 'x' }, child, 'text').
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children);
  return element;
}

// 'W_Q[n] W_K[n]^T' with subscripts and superscripts.
function pretty(text) {
  const out = make('span');
  for (const [, plain, lower, upper] of text.matchAll(/([^_^]+)|_([A-Za-z]+(?:_[a-z]+)?)|\^(\w+)/g)) {
    out.append(lower ? make('sub', {}, lower.replace('_', ' ')) : upper ? make('sup', {}, upper) : plain);
  }
  return out;
}

// --- What is computed -------------------------------------------------------------------------

const size = () => TABLE.sizes[`${state.dims},${state.heads}`];
const polynomialsOf = (value) => value.B[''] ?? value.B[state.score];
const product = (a, b) => a.map((row) => b[0].map((_, j) => row.reduce((sum, v, k) => sum + v * b[k][j], 0)));
const transpose = (a) => a[0].map((_, j) => a.map((row) => row[j]));
const mix = (a, b, f) => a.map((row, i) => row.map((v, j) => f(v, b[i][j])));

// An even-looking number for a name, the same in every variant: matrices keep theirs.
function drawn(name) {
  let hash = 2166136261 ^ state.draw;
  for (const letter of name) hash = Math.imul(hash ^ letter.charCodeAt(0), 16777619);
  hash = Math.imul(hash ^ (hash >>> 15), 2246822507);
  hash = Math.imul(hash ^ (hash >>> 13), 3266489909);
  return (((hash ^ (hash >>> 16)) >>> 0) % 21) / 10 - 1;
}

// Tokens begin as unit vectors, so that the scores are A itself; a token too many is their sum.
const token = (t, d) => (t < state.dims ? Number(t === d) : t === state.dims || d === 0 ? 1 : -1);

function initial(key, parameter, index) {
  if (!parameter) return token(...key.split(':')[1].split(',').map(Number));
  return parameter.initial ? parameter.initial[index] : drawn(key);
}

// Entries in the order of reading: [{ key, head, row, column, value }].
function entries(parameter) {
  const [heads, rows, columns] = parameter.shape;
  return range(heads * rows * columns).map((index) => {
    const head = Math.floor(index / (rows * columns));
    const row = Math.floor(index / columns) % rows, column = index % columns;
    const key = `${parameter.name}:${head},${row},${column}`;
    return { key, head, row, column, value: state.numbers.get(key) ?? initial(key, parameter, index) };
  });
}

const flat = (circuit) => circuit.parameters.flatMap((parameter) => entries(parameter).map((e) => e.value));
const evaluate = (terms, own, shared) =>
  terms.reduce((sum, [c, ...at]) => sum + at.reduce((p, i) => p * (i < 0 ? shared[-1 - i] : own[i]), c), 0);
const matrices = (polynomials, own, shared) =>
  polynomials.map((head) => head.map((row) => row.map((terms) => evaluate(terms, own, shared))));

function softmax(row, t) {
  const seen = row.map((v, s) => (state.causal && s > t ? -Infinity : v));
  const top = Math.max(...seen), exps = seen.map((v) => Math.exp(v - top));
  const total = exps.reduce((a, b) => a + b);
  return exps.map((v) => v / total);
}

function compute() {
  const score = size().score[state.score], value = size().value[state.value];
  const own = flat(score);
  const x = range(state.tokens).map((t) => range(state.dims).map((d) => {
    const key = `x:${t},${d}`;
    return state.numbers.get(key) ?? initial(key);
  }));
  const A = matrices(score.A, own, []);
  const B = matrices(polynomialsOf(value), flat(value), own);
  const S = A.map((a) => product(product(x, a), transpose(x)).map((row) => row.map((v) => v * score.scale)));
  const P = S.map((s) => s.map(softmax));
  const out = P.map((p, n) => product(product(p, x), B[n])).reduce((a, b) => mix(a, b, (v, w) => v + w));
  return { x, A, B, S, P, out };
}

// Singular values, largest first: Jacobi rotations of A^T A.
function singular(a) {
  const g = product(transpose(a), a), n = g.length;
  for (let sweep = 0; sweep < 30; sweep++) {
    for (let p = 0; p < n; p++) for (let q = p + 1; q < n; q++) {
      if (Math.abs(g[p][q]) < 1e-300) continue;
      const angle = 0.5 * Math.atan2(2 * g[p][q], g[q][q] - g[p][p]), c = Math.cos(angle), s = Math.sin(angle);
      for (const row of g) [row[p], row[q]] = [c * row[p] - s * row[q], s * row[p] + c * row[q]];
      [g[p], g[q]] = [g[p].map((v, k) => c * v - s * g[q][k]), g[p].map((v, k) => s * v + c * g[q][k])];
    }
  }
  return range(n).map((i) => Math.sqrt(Math.max(0, g[i][i]))).sort((a, b) => b - a);
}

function facts(a, kind) {
  const values = singular(a), rank = values.filter((v) => v > 1e-6 * Math.max(values[0], 1e-9)).length;
  const square = (m) => m.flat().reduce((sum, v) => sum + v * v, 0);
  const share = square(a) ? square(mix(a, transpose(a), (v, w) => (v + w) / 2)) / square(a) : 1;
  const always = kind === 'general' ? [] : [['for all numbers', kind]];
  return [
    ['rank', `${rank} of ${a.length}`],
    ['singular values', values.map((v, i) => (i < rank && v < 0.005 ? v.toPrecision(1) : shown(v))).join(', ')],
    ['symmetric share', `${Math.round(100 * share)} %`],
    ...always,
  ];
}

// --- What is shown ----------------------------------------------------------------------------

let cells = [], updates = [];

function paint(cell, value, top, sequential) {
  const strength = Math.min(1, Math.abs(value) / top) * (sequential ? 62 : 56);
  cell.style.setProperty('--heat', `${strength.toFixed(1)}%`);
  cell.style.setProperty('--hue', sequential ? 'var(--hue-2)' : value < 0 ? 'var(--hue-1)' : 'var(--hue-0)');
}

const largest = (m) => Math.max(1, ...m.flat().map(Math.abs));

// A table of numbers: `label(i, j)` says what an entry is, `entry(i, j)` makes what is in it.
function grid(title, rows, columns, { heads = [[], []], entry, kind }) {
  const body = range(rows).map((i) => make('tr', {},
    ...(heads[0].length ? [make('th', { scope: 'row' }, heads[0][i])] : []),
    ...range(columns).map((j) => entry(i, j))));
  const top = heads[1].length
    ? [make('thead', {}, make('tr', {}, make('td', { class: 'corner' }), ...heads[1].map((h) => make('th', { scope: 'col' }, h))))]
    : [];
  return make('table', { class: kind }, make('caption', {}, title), ...top, make('tbody', {}, ...body));
}

function editable(title, label, list, rows, columns, heads) {
  const inputs = list.map(({ key, value, row, column }) => {
    const input = make('input', {
      type: 'text', role: 'spinbutton', autocomplete: 'off', spellcheck: 'false', 'data-key': key,
      'aria-label': label(row, column), 'aria-valuemin': LOW, 'aria-valuemax': HIGH,
    });
    input.dataset.value = value;
    cells.push(input);
    return input;
  });
  return grid(title, rows, columns, { heads, kind: 'editable', entry: (i, j) => make('td', {}, inputs[i * columns + j]) });
}

// A matrix of results: `read` takes it from what is computed, `formula` explains an entry.
function result(title, rows, columns, { read, heads, sequential, label, formula, line, name }) {
  const places = range(rows).map((i) => range(columns).map((j) => {
    const cell = make('td', { tabindex: i + j === 0 ? 0 : -1, 'data-place': `${name}:${i},${j}` });
    const explain = () => { $(line).replaceChildren(...formula(i, j)); };
    cell.addEventListener('pointerenter', explain);
    cell.addEventListener('focus', explain);
    cell.addEventListener('keydown', (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      const next = step && places[i + step[0]]?.[j + step[1]];
      if (!next) return;
      event.preventDefault();
      cell.tabIndex = -1; next.tabIndex = 0; next.focus();
    });
    return cell;
  }));
  updates.push((now) => {
    const m = read(now), top = sequential ? 1 : largest(m);
    m.forEach((row, i) => row.forEach((value, j) => {
      const cell = places[i][j];
      cell.textContent = shown(value);
      cell.dataset.value = value;
      cell.setAttribute('aria-label', `${label(i, j)}: ${shown(value)}`);
      paint(cell, value, top, sequential);
    }));
  });
  return grid(title, rows, columns, { heads, kind: 'result', entry: (i, j) => places[i][j] });
}

const indexed = (letter, ...numbers) => make('var', {}, letter, make('sub', {}, numbers.join('')));

// The polynomial of an entry, in the symbols of the parameters.
function sum(terms, own, shared) {
  const symbol = (index) => {
    const list = index < 0 ? shared : own, at = index < 0 ? -1 - index : index;
    const { stem, head, row, column, vector } = list[at];
    const mark = state.heads > 1 && head !== null ? `${head + 1}\u00b7` : '';
    return indexed(stem, mark + (vector ? column + 1 : `${row + 1}${column + 1}`));
  };
  if (!terms.length) return ['0'];
  return terms.flatMap(([c, ...at], k) => {
    const sign = c < 0 ? '\u2212' : k ? '+' : '';
    const factor = Math.abs(c) === 1 && at.length ? '' : String(Math.round(Math.abs(c) * 1e4) / 1e4);
    return [k ? ` ${sign} ` : sign, factor && `${factor} `, ...at.flatMap((i) => [symbol(i), ' '])];
  });
}

const symbols = (circuit) => circuit.parameters.flatMap((parameter) => entries(parameter).map((e) => ({
  ...e, stem: parameter.stem, vector: parameter.vector, head: parameter.shape[0] > 1 ? e.head : null,
})));

function build() {
  cells = []; updates = [];
  const { tokens: T, dims: D, heads: N } = state, score = size().score[state.score], value = size().value[state.value];
  const names = range(T).map((t) => indexed('x', t + 1)), clones = () => names.map((n) => n.cloneNode(true));
  const tokens = range(T).flatMap((row) => range(D).map((column) => {
    const key = `x:${row},${column}`;
    return { key, row, column, value: state.numbers.get(key) ?? initial(key) };
  }));
  $('x').replaceChildren(editable('x', (i, j) => `token ${i + 1}, dimension ${j + 1}`, tokens, T, D, [clones(), []]));
  for (const [id, circuit] of [['of-score', score], ['of-value', value]]) {
    const tables = circuit.parameters.map((parameter) => make('div', { class: 'together' }, ...range(parameter.shape[0]).map((head) => {
      const [heads, rows, columns] = parameter.shape, of = heads > 1 ? `, head ${head + 1}` : '';
      const own = entries(parameter).filter((e) => e.head === head);
      const label = (i, j) => `${parameter.name.replace('_', ' ')}${of}, ${parameter.vector ? '' : `row ${i + 1}, `}column ${j + 1}`;
      const title = make('span', {}, pretty(parameter.name), of);
      return editable(title, label, own, rows, columns, [[], []]);
    })));
    $(id).replaceChildren(...(tables.length ? tables : [make('p', { class: 'note' }, 'no parameters of its own')]));
  }
  const count = (circuit) => circuit.parameters.reduce((n, p) => n + p.shape.reduce((a, b) => a * b), 0);
  $('count').textContent = `${count(score)} parameters in the score, ${count(value)} in the value.`;
  const heading = (text) => pretty(N > 1 ? text : text.replaceAll('[n]', ''));
  $('e-score').replaceChildren(heading(`A[n] = ${TABLE.equations.score[state.score]}`));
  $('e-value').replaceChildren(heading(`B[n] = ${TABLE.equations.value[state.value]}`));
  $('e-softmax').replaceChildren(heading(`P[n] = softmax S[n], S[n] = ${shown(score.scale)} x A[n] x^T`));

  const ofScore = symbols(score), ofValue = symbols(value), B = polynomialsOf(value);
  const head = (n) => (N > 1 ? `, head ${n + 1}` : ''), mark = (letter, n) => (N > 1 ? `${letter}[${n + 1}]` : letter);
  const block = (n, tables, about) => make('div', { class: 'head' }, ...tables, ...(about ? [about] : []));
  const described = (n, matrix, kind) => {
    const list = make('dl', { class: 'facts', id: `facts-${matrix}${n}` });
    updates.push((now) => list.replaceChildren(...facts(now[matrix][n], kind).map(([term, text]) =>
      make('div', {}, make('dt', {}, term), make('dd', {}, text)))));
    return list;
  };
  const part = (letter, n, sign, word) => result(`${word} part`, D, D, {
    name: `${letter}${n}${word}`, line: `f-${letter}`, read: (now) => mix(now[letter][n], transpose(now[letter][n]), (v, w) => (v + sign * w) / 2),
    heads: [[], []], label: (i, j) => `${word} part, row ${i + 1}, column ${j + 1}`,
    formula: (i, j) => [`${word} part: half of `, indexed(mark(letter, n), i + 1, j + 1), sign > 0 ? ' + ' : ' \u2212 ', indexed(mark(letter, n), j + 1, i + 1)],
  });
  const whole = (letter, n, polynomials, own, shared) => result(mark(letter, n), D, D, {
    name: `${letter}${n}`, line: `f-${letter}`, read: (now) => now[letter][n], heads: [[], []],
    label: (i, j) => `${letter}${head(n)}, row ${i + 1}, column ${j + 1}`,
    formula: (i, j) => [indexed(mark(letter, n), i + 1, j + 1), ' = ', ...sum(polynomials[n][i][j], own, shared)],
  });
  const kindB = value.kind[''] ?? value.kind[state.score];
  $('circuit-A').replaceChildren(...range(N).map((n) => block(n, [
    whole('A', n, score.A, ofScore, []), part('A', n, 1, 'symmetric'), part('A', n, -1, 'skew'),
  ], described(n, 'A', score.kind))));
  const pair = (i, j) => [clones()[i], ' to ', clones()[j]];
  $('circuit-S').replaceChildren(...range(N).map((n) => block(n, [
    result(make('span', {}, mark('S', n), ', scores'), T, T, {
      name: `S${n}`, line: 'f-S', read: (now) => now.S[n], heads: [clones(), clones()],
      label: (i, j) => `score${head(n)} of token ${i + 1} with token ${j + 1}`,
      formula: (i, j) => ['score of ', ...pair(i, j), `: ${shown(score.scale)} `, clones()[i], ` ${mark('A', n)} `, clones()[j], make('sup', {}, 'T')],
    }),
    result(make('span', {}, mark('P', n), ', attention'), T, T, {
      name: `P${n}`, line: 'f-S', sequential: true, read: (now) => now.P[n], heads: [clones(), clones()],
      label: (i, j) => `attention${head(n)} of token ${i + 1} to token ${j + 1}`,
      formula: (i, j) => ['attention of ', ...pair(i, j), ': the softmax of row ', String(i + 1), ' of the scores'],
    }),
  ])));
  const output = result('output', T, D, {
    name: 'out', line: 'f-B', read: (now) => now.out, heads: [clones(), []],
    label: (i, j) => `output of token ${i + 1}, dimension ${j + 1}`,
    formula: (i, j) => ['output of ', clones()[i], `, dimension ${j + 1}: the rows of x B, averaged with the attention`, N > 1 ? ', summed over the heads' : ''],
  });
  $('circuit-B').replaceChildren(...range(N).map((n) => block(n, [
    whole('B', n, B, ofValue, ofScore), ...(N === 1 ? [output] : []),
  ], described(n, 'B', kindB))), ...(N > 1 ? [block(N, [output])] : []));
  update();
  for (const place of ['A0:0,1', 'P0:0,1', 'B0:0,1']) {
    document.querySelector(`[data-place="${place}"]`).dispatchEvent(new Event('pointerenter'));
  }
}

function update() {
  for (const input of cells) {
    const value = Number(input.dataset.value);
    if (document.activeElement !== input || !input.dataset.typing) input.value = shown(value);
    input.setAttribute('aria-valuenow', value);
    input.setAttribute('aria-valuetext', shown(value));
    paint(input, value, 1.5, false);
  }
  const now = compute();
  for (const run of updates) run(now);
  const tile = (m, sequential) => {
    const map = make('div', { class: 'tile', style: `--n:${m[0].length}` });
    const top = sequential ? 1 : largest(m);
    map.append(...m.flat().map((v) => { const i = make('i'); paint(i, v, top, sequential); return i; }));
    return map;
  };
  $('strip').replaceChildren(...[['A', now.A[0]], ['S', now.S[0]], ['P', now.P[0], true], ['out', now.out]].map(
    ([name, m, sequential]) => make('div', {}, make('span', {}, name), tile(m, sequential))));
}

// --- What is done -----------------------------------------------------------------------------

let saying = 0;
function say(text) {
  clearTimeout(saying);
  saying = setTimeout(() => { $('said').textContent = text; }, 400);
}

function set(input, value) {
  input.dataset.value = clamp(value);
  state.numbers.set(input.dataset.key, clamp(value));
  update();
  const P = compute().P[0];
  say(`${input.getAttribute('aria-label')} is ${shown(clamp(value))}. ${P.map((row, t) =>
    `Token ${t + 1} attends ${row.map((p, s) => `${Math.round(100 * p)} % to token ${s + 1}`).join(', ')}.`).join(' ')}`);
}

function listen(root) {
  let drag = null;
  const typed = (input) => {
    if (!input.dataset.typing) return;
    delete input.dataset.typing;
    const value = Number(input.value.replace('\u2212', '-').replace(',', '.'));
    if (input.value.trim() && Number.isFinite(value)) set(input, value); else update();
  };
  root.addEventListener('pointerdown', (event) => {
    const input = event.target.closest('input[role=spinbutton]');
    if (!input || event.button) return;
    drag = { input, x: event.clientX, value: Number(input.dataset.value), moved: false };
    if (input.dataset.typing === undefined) input.dataset.before = input.dataset.value;
  });
  root.addEventListener('pointermove', (event) => {
    if (!drag) return;
    const by = event.clientX - drag.x;
    if (!drag.moved && Math.abs(by) < 4) return;
    if (!drag.moved) { drag.moved = true; drag.input.setPointerCapture(event.pointerId); drag.input.classList.add('dragged'); }
    event.preventDefault();
    set(drag.input, drag.value + by * PER_PIXEL);
  });
  const end = () => {
    if (drag?.moved) { drag.input.classList.remove('dragged'); getSelection().removeAllRanges(); }
    drag = null;
  };
  for (const name of ['pointerup', 'pointercancel']) root.addEventListener(name, end);
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

function options(select, circuit, valid) {
  select.replaceChildren(...Object.keys(TABLE.equations[circuit]).filter((name) => !TABLE.without[circuit].includes(name)).map((name) =>
    make('option', { value: name, disabled: !valid(name) }, `${name}:  ${TABLE.equations[circuit][name].replaceAll('[n]', '').replaceAll('^T', '\u1d40')}`)));
  select.value = state[circuit];
}

const fits = (value) => { const of = size().value[value]; return Boolean(of && (of.B[''] ?? of.B[state.score])); };

// The nearest state that exists: sizes first, then the score, then the value.
function settle() {
  const heads = Object.keys(TABLE.sizes).filter((key) => key.startsWith(`${state.dims},`)).map((key) => Number(key.split(',')[1]));
  if (!heads.includes(state.heads)) state.heads = heads[0];
  if (!size().score[state.score]) state.score = 'qk';
  const left = state.value;
  if (!fits(left)) {
    state.value = 'vo';
    say(`${left} does not go with ${state.score} at this size; the value is vo.`);
  }
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
  const [score, value] = decodeURIComponent(location.hash.slice(1)).split('/');
  if (TABLE.equations.score[score]) state.score = score;
  if (TABLE.equations.value[value]) state.value = value;
  listen($('trained'));
  settle();
}

begin();
