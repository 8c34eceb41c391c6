'use strict';
// What is computed, and what the parts of the script share.
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
