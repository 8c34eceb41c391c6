'use strict';
const TABLE = JSON.parse(document.getElementById('table').textContent);
const LIMIT = 5, PER_PIXEL = 0.01;
const numbers = new Map();  // what was changed, by key: W_Q:head,row,column
const $ = (id) => document.getElementById(id);
const range = (n) => Array.from({ length: n }, (_, i) => i);

// What is computed

const product = (a, b) => a.map((row) => b[0].map((_, j) => row.reduce((sum, v, k) => sum + v * b[k][j], 0)));
const transpose = (a) => a[0].map((_, j) => a.map((row) => row[j]));
const mix = (a, b, f) => a.map((row, i) => row.map((v, j) => f(v, b[i][j])));
const part = (a, sign) => mix(a, transpose(a), (v, w) => (v + sign * w) / 2);

// What is chosen: sizes, the tokens as a parameter, both circuits.
function chosen() {
  const known = TABLE[$('size').value], [D, N] = $('size').value.split(',').map(Number), T = Number($('tokens').value);
  const score = known.score[$('score').value], value = known.value[$('value').value];
  // Tokens begin as unit vectors, so that the scores are A itself; a token too many is their sum.
  const unit = (t, d) => (t < D ? Number(t === d) : t === D || d === 0 ? 1 : -1);
  const x = { name: 'x', shape: [1, T, D], initial: range(T * D).map((i) => unit(Math.floor(i / D), i % D)) };
  return { D, N, T, x, score, value, B: value && (value.B[''] ?? value.B[$('score').value]) };
}

// The keys of a parameter's entries in the order of reading, and the numbers of several.
const keys = ({ name, shape: [heads, rows, columns] }) => range(heads).flatMap((n) =>
  range(rows).flatMap((i) => range(columns).map((j) => `${name}:${n},${i},${j}`)));
const values = (parameters) => parameters.flatMap((p) => keys(p).map((key, i) => numbers.get(key) ?? p.initial[i]));

// Matrices of all heads from their polynomials; an index below 0 is one of the shared entries.
const matrices = (polynomials, own, shared) => polynomials.map((head) => head.map((row) => row.map(({ terms }) =>
  terms.reduce((sum, [c, ...at]) => sum + at.reduce((v, i) => v * (i < 0 ? shared[-1 - i] : own[i]), c), 0))));

function softmax(row, t) {
  const seen = row.map((v, s) => ($('causal').checked && s > t ? -Infinity : v));
  const exps = seen.map((v) => Math.exp(v - Math.max(...seen)));
  const total = exps.reduce((a, b) => a + b);
  return exps.map((v) => v / total);
}

function compute({ D, T, x, score, value, B: polynomials }) {
  const own = values(score.parameters), flat = values([x]);
  const tokens = range(T).map((t) => flat.slice(D * t, D * t + D));
  const A = matrices(score.A, own, []), B = matrices(polynomials, values(value.parameters), own);
  const S = A.map((a) => product(product(tokens, a), transpose(tokens)).map((row) => row.map((v) => v * score.scale)));
  const P = S.map((s) => s.map(softmax));
  const out = P.map((p, n) => product(product(p, tokens), B[n])).reduce((a, b) => mix(a, b, (v, w) => v + w));
  return { A, B, S, P, out };
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

// What is shown

const shown = (v) => (Math.abs(v) < 0.005 ? 0 : v).toFixed(2).replace('-', '\u2212');

// An element with properties and children: make('td', { className: 'x' }, 'text').
function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// 'W_Q[n] k12^2' with subscripts, of digits too, and superscripts.
function pretty(text) {
  const out = make('span');
  for (const [plain, lower, upper, digits] of text.matchAll(/_(\w+)|\^(-?\w+)|(?<=[A-Za-z\]])(\d+)|./g)) {
    out.append(upper ? make('sup', {}, upper) : lower || digits ? make('sub', {}, (lower || digits).replace('_', ' ')) : plain);
  }
  return out;
}

// The strongest hues leave text a contrast of 4.5, light and dark.
function paint(cell, value, top, hues = ['--hue-0', '--hue-1'], strongest = 56) {
  cell.style.setProperty('--heat', `${(Math.min(1, Math.abs(value) / top) * strongest).toFixed(1)}%`);
  cell.style.setProperty('--hue', `var(${hues[Number(value < 0)]})`);
}

// A table of cells; beside it the names of rows and columns, if any.
function grid(title, cells, rows = [], columns = []) {
  const head = columns.length ? [make('tr', {}, make('td'), ...columns.map((name) => make('th', { scope: 'col' }, pretty(name))))] : [];
  const body = cells.map((row, i) => make('tr', {},
    ...rows.slice(i, i + 1).map((name) => make('th', { scope: 'row' }, pretty(name))), ...row.map((cell) => make('td', {}, cell))));
  return make('table', {}, make('caption', {}, title), ...head, ...body);
}

const mark = (letter, n, heads) => (heads > 1 ? `${letter}[${n + 1}]` : letter);

// A parameter as tables of numbers to change, one for each head.
function editable(parameter, rows = []) {
  const { name, shape: [heads, height, width], initial } = parameter, all = keys(parameter);
  return range(heads).map((n) => {
    const title = mark(name, n, heads);
    const cells = range(height).map((i) => range(width).map((j) => {
      const at = (n * height + i) * width + j;
      const input = make('input', { type: 'number', min: -LIMIT, max: LIMIT, step: 0.1, autocomplete: 'off', name: all[at] });
      input.dataset.initial = initial[at];
      input.setAttribute('aria-label', `${title}, row ${i + 1}, column ${j + 1}`);
      return input;
    }));
    return grid(pretty(title), cells, rows);
  });
}

// A matrix of results, as it is now.
function result(name, title, matrix, { rows, columns, probabilities } = {}) {
  const top = probabilities ? 1 : Math.max(1, ...matrix.flat().map(Math.abs));
  return grid(title, matrix.map((row, i) => row.map((value, j) => {
    const cell = make('span', { className: 'entry' }, shown(value));
    Object.assign(cell.dataset, { place: `${name}:${i},${j}`, value });
    paint(cell, value, top, ...(probabilities ? [['--hue-2'], 46] : []));
    return cell;
  })), rows, columns);
}

function facts(a) {
  const all = singular(a), rank = all.filter((v) => v > 1e-6 * Math.max(all[0], 1e-9)).length;
  const square = (m) => m.flat().reduce((sum, v) => sum + v * v, 0);
  const share = square(a) ? square(part(a, 1)) / square(a) : 1;
  const lines = [`rank ${rank} of ${a.length}`, `singular values ${all.map((v, i) => (i < rank && v < 0.005 ? v.toPrecision(1) : shown(v))).join(', ')}`, `symmetric share ${Math.round(100 * share)} %`];
  return make('p', { className: 'facts' }, lines.join('\n'));
}

// The entries of all heads as polynomials in the parameters.
function entries(letter, heads) {
  const lines = heads.flatMap((head, n) => head.flatMap((row, i) => row.map(({ text }, j) =>
    make('li', {}, pretty(`${mark(letter, n, heads.length)}${i + 1}${j + 1} = ${text}`)))));
  return make('details', {}, make('summary', {}, `Entries of ${letter} in the parameters`), make('ul', {}, ...lines));
}

// Results, and all numbers but one that is being typed.
function update(typed) {
  for (const input of document.querySelectorAll('#numbers input')) {
    const value = numbers.get(input.name) ?? Number(input.dataset.initial);
    if (input !== typed) input.value = value.toFixed(2);
    paint(input, value, 1.5);
  }
  const layer = chosen(), { N, T } = layer, now = compute(layer), tokens = range(T).map((t) => `x${t + 1}`);
  const head = (...parts) => make('div', {}, ...parts);
  $('A').replaceChildren(...now.A.map((a, n) => head(
    result(`A${n}`, mark('A', n, N), a), result(`A${n}symmetric`, 'symmetric part', part(a, 1)),
    result(`A${n}skew`, 'skew part', part(a, -1)), facts(a))));
  $('S').replaceChildren(...range(N).map((n) => head(
    result(`S${n}`, `${mark('S', n, N)}, scores`, now.S[n], { rows: tokens, columns: tokens }),
    result(`P${n}`, `${mark('P', n, N)}, attention`, now.P[n], { rows: tokens, columns: tokens, probabilities: true }))));
  $('B').replaceChildren(...now.B.map((b, n) => head(result(`B${n}`, mark('B', n, N), b), facts(b))),
    result('out', 'output', now.out, { rows: tokens }));
}

// What is done with the page

// Offers what is valid; says what takes the place of a name that is not.
function choose(circuit, name, valid) {
  const select = $(circuit);
  for (const option of select.options) option.disabled = !valid(option.value);
  select.value = name;
  if (select.selectedOptions[0]?.disabled === false) return '';
  select.value = [...select.options].find((option) => !option.disabled).value;
  return `${name} is not available here; the ${circuit} is ${select.value}. `;
}

function build(score = $('score').value, value = $('value').value) {
  const known = TABLE[$('size').value];
  $('changed').textContent = choose('score', score, (name) => name in known.score)
    + choose('value', value, (name) => Boolean(known.value[name]?.B[''] ?? known.value[name]?.B[$('score').value]));
  history.replaceState(null, '', `#${$('score').value}/${$('value').value}`);
  const layer = chosen();
  $('x').replaceChildren(...editable(layer.x, range(layer.T).map((t) => `x${t + 1}`)));
  for (const circuit of ['score', 'value']) {
    const tables = layer[circuit].parameters.flatMap((parameter) => editable(parameter));
    $(`of-${circuit}`).replaceChildren(...(tables.length ? tables : ['no parameters of its own']));
    const equation = `${circuit === 'score' ? 'A' : 'B'}[n] = ${$(circuit).selectedOptions[0].dataset.equation}`;
    $(`e-${circuit}`).replaceChildren(pretty(equation));
  }
  $('e-softmax').replaceChildren(pretty(`P[n] = softmax S[n], S[n] = ${shown(layer.score.scale)} x A[n] x^T`));
  $('entries-A').replaceChildren(entries('A', layer.score.A));
  $('entries-B').replaceChildren(entries('B', layer.B));
  update();
}

function set(input, value, typed) {
  numbers.set(input.name, Math.min(LIMIT, Math.max(-LIMIT, Math.round(value * 100) / 100)));
  update(typed);
}

function drag(event) {
  const input = event.target, start = event.clientX, value = numbers.get(input.name) ?? Number(input.dataset.initial);
  if (!input.matches('input') || event.button) return;
  const move = ({ clientX }) => {
    if (!input.classList.contains('dragged') && Math.abs(clientX - start) < 4) return;
    input.classList.add('dragged');
    set(input, value + (clientX - start) * PER_PIXEL);
  };
  input.setPointerCapture(event.pointerId);
  input.addEventListener('pointermove', move);
  input.addEventListener('lostpointercapture', () => {
    input.removeEventListener('pointermove', move);
    input.classList.remove('dragged');
  }, { once: true });
}

// Reads '#score/value' of the address.
const follow = () => build(...location.hash.slice(1).split('/').map((name) => name || undefined));

$('numbers').addEventListener('pointerdown', drag);
$('numbers').addEventListener('input', ({ target }) => { if (target.value) set(target, target.valueAsNumber, target); });
$('numbers').addEventListener('change', () => update());
$('controls').addEventListener('change', () => build());
$('controls').addEventListener('reset', () => { numbers.clear(); setTimeout(build); });
$('draw').addEventListener('click', () => {
  for (const { name } of document.querySelectorAll('#numbers input')) {
    if (!name.startsWith('x')) numbers.set(name, Math.round(20 * Math.random() - 10) / 10);
  }
  update();
});
addEventListener('hashchange', follow);
follow();
