// What is shown.
let cells = [], updates = [];

// The strongest hues that leave text a contrast of 4.5, light and dark.
function paint(cell, value, top, sequential) {
  const strength = Math.min(1, Math.abs(value) / top) * (sequential ? 46 : 56);
  cell.style.setProperty('--heat', `${strength.toFixed(1)}%`);
  cell.style.setProperty('--hue', sequential ? 'var(--hue-2)' : value < 0 ? 'var(--hue-1)' : 'var(--hue-0)');
}

const largest = (m) => Math.max(1, ...m.flat().map(Math.abs));

// A table of numbers: `label(i, j)` says what an entry is, `entry(i, j)` makes what is in it.
function grid(title, rows, columns, { heads = [[], []], entry, kind, ...attributes }) {
  const body = range(rows).map((i) => make('tr', {},
    ...(heads[0].length ? [make('th', { scope: 'row' }, heads[0][i])] : []),
    ...range(columns).map((j) => entry(i, j))));
  const top = heads[1].length
    ? [make('thead', {}, make('tr', {}, make('td', { class: 'corner' }), ...heads[1].map((h) => make('th', { scope: 'col' }, h))))]
    : [];
  return make('table', { class: kind, ...attributes }, make('caption', {}, title), ...top, make('tbody', {}, ...body));
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
    cell.addEventListener('focus', () => { explain(); cell.setAttribute('aria-describedby', line); });
    cell.addEventListener('blur', () => cell.removeAttribute('aria-describedby'));
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
  return grid(title, rows, columns, { heads, kind: 'result', role: 'grid', 'aria-readonly': 'true', entry: (i, j) => places[i][j] });
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
  const part = (letter, n, sign, word) => result(make('span', {}, `${word} part`, make('span', { class: 'unseen' }, ` of ${letter}${head(n)}`)), D, D, {
    name: `${letter}${n}${word}`, line: `f-${letter}`, read: (now) => mix(now[letter][n], transpose(now[letter][n]), (v, w) => (v + sign * w) / 2),
    heads: [[], []], label: (i, j) => `${word} part of ${letter}${head(n)}, row ${i + 1}, column ${j + 1}`,
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
