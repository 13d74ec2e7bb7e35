// The run view: one run, or up to ten over each other, from what the kernel sends. Everything that has arrived stays
// in the browser, so zooming, smoothing and other axes ask nothing of the kernel, and work when it is gone.

const RUN_COLOURS = ['#4477aa', '#ee6677', '#228833', '#ee7733', '#aa3377', '#33bbcc', '#b5a11d', '#777777', '#882255', '#5566dd'];
const COLOUR = { training: '#4477aa', validation: '#ee7733', sources: ['#aa3377', '#228833', '#b5a11d', '#33bbcc', '#777777'] };
const SOONER = { pause: 'Pause', unpause: 'Go on', save: 'Save now', stop: 'Save and stop' };
const TYPES = { f4: Float32Array, f8: Float64Array };

// ---------------------------------------------------------------- what has arrived

class Columns {
  constructor() { this.n = 0; this.epoch = -1; this.arrays = {}; this.cache = {}; this.forget(); }

  // What was made of rows that aren't there any more.
  forget() { this.made = {}; this.levels = {}; }

  // Numbers from place `from` on; whatever was there before them is replaced.
  put(names, types, buffers, from, n) {
    const room = from + n;
    if (from < this.n) this.forget();
    names.forEach((name, i) => {
      const raw = buffers[i], Type = TYPES[types[i]];
      const values = new Type(raw.buffer.slice(raw.byteOffset, raw.byteOffset + raw.byteLength));
      let array = this.arrays[name];
      if (!array || array.length < room) {
        const larger = new Type(Math.ceil(room * 1.5) + 64).fill(NaN);
        if (array) larger.set(array.subarray(0, this.n));
        array = this.arrays[name] = larger;
      }
      array.set(values, from);
    });
    for (const name in this.arrays) {
      if (names.includes(name)) continue;
      if (this.arrays[name].length < room) {
        const larger = new this.arrays[name].constructor(Math.ceil(room * 1.5) + 64).fill(NaN);
        larger.set(this.arrays[name].subarray(0, this.n));
        this.arrays[name] = larger;
      }
      this.arrays[name].fill(NaN, from, room);
    }
    this.n = room;
    this.cache = {};
  }

  get(name) { return this.arrays[name]?.subarray(0, this.n); }

  // Whether any of its numbers is one.
  has(name) {
    const all = this.get(name), seen = this.made[`has ${name}`] ||= { found: false, n: 0 };
    for (; all && !seen.found && seen.n < this.n; seen.n++) seen.found = Number.isFinite(all[seen.n]);
    return seen.found;
  }

  // Something of all rows, until the next ones arrive.
  remember(key, compute) { return this.cache[key] ??= compute(); }

  // A column made of others that grows with them: `extend(out, from, to, state)` fills its places from `from` to `to`.
  // There is one for each key; a change of `how` makes it anew.
  extended(key, how, Type, extend) {
    let made = this.made[key];
    if (made?.how !== how) made = this.made[key] = { how, n: 0, out: new Type(0), state: {} };
    if (made.out.length < this.n) {
      const larger = new Type(Math.ceil(this.n * 1.5) + 64);
      larger.set(made.out.subarray(0, made.n));
      made.out = larger;
    }
    if (made.n < this.n) extend(made.out, made.n, this.n, made.state);
    made.n = this.n;
    return made.out.subarray(0, this.n);
  }
}

// Numbers, each of which is at least the one before; `origin` becomes zero.
function rising(values, origin = 0) {
  return (out, from, to, state) => {
    let last = from ? state.last : Number.isFinite(values[0]) ? values[0] - origin : 0;
    for (let i = from; i < to; i++) out[i] = last = values[i] - origin > last ? values[i] - origin : last;
    state.last = last;
  };
}

// Where the rows of a table lie along x: by step, tokens read, or seconds since the first event.
function places(run, table, by) {
  const rows = run[table], steps = rows.get('step') || [];
  if (by === 'step') return rows.extended('x step', '', Float64Array, rising(steps));
  if (by === 'time') {
    const start = startOf(run);
    return rows.extended('x time', start, Float64Array, rising(rows.get('time') || steps, start));
  }
  const read = run.steps.extended('x tokens', '', Float64Array, (out, from, to, state) => {
    const tokens = run.steps.get('tokens');
    let sum = state.sum || 0;
    for (let i = from; i < to; i++) out[i] = sum += Number.isFinite(tokens?.[i]) ? tokens[i] : 0;
    state.sum = sum;
  });
  if (table === 'steps') return read;
  const all = places(run, 'steps', 'step');
  return rows.remember(`x tokens ${read.length}`, () => places(run, table, 'step').map(step => read[clamp(lowerBound(all, step + .5) - 1, 0, read.length - 1)] ?? 0));
}

// Seconds since 1970 of the first thing that is known of a run.
function startOf(run) {
  const firsts = [run.steps, run.validations].map(table => table.get('time')?.[0]).filter(Number.isFinite);
  return firsts.length ? Math.min(...firsts) : 0;
}

// Where an event of one step lies along x.
function placeOf(run, event, by) {
  if (by === 'step') return event.step;
  const steps = places(run, 'steps', 'step');
  if (!steps.length) return 0;
  return places(run, 'steps', by)[clamp(lowerBound(steps, event.step), 0, steps.length - 1)];
}

function newRun() { return { steps: new Columns(), validations: new Columns(), events: [], samples: [], fixed: null }; }

// ---------------------------------------------------------------- what is drawn of it

// A column of the steps as curves, one for each run that has it.
function stepCurves(shown, name, { label, colour, scale = 1, by, smoothing }) {
  return shown.flatMap(({ run, colour: runColour, name: runName, alone }) => {
    if (!run.steps.has(name)) return [];
    const rows = run.steps, raw = rows.get(name);
    const y = scale === 1 ? raw : rows.extended(`scaled ${name}`, scale, Float32Array, (out, from, to) => { for (let i = from; i < to; i++) out[i] = raw[i] * scale; });
    const mean = smoothing ? rows.extended(`smooth ${name}`, `${scale} ${smoothing}`, Float32Array, (out, from, to, state) => smoothed(y, smoothing, out, from, to, state)) : y;
    const levels = rows.levels[name] ||= {}, how = `${by} ${by === 'time' ? startOf(run) : ''} ${scale} ${smoothing || 0}`;
    return [{ label: alone ? label : runName, colour: alone ? colour : runColour, x: places(run, 'steps', by), y, mean, n: rows.n, levels, how }];
  });
}

function validationCurves(shown, name, { label, colour, scale = 1, by }) {
  return shown.flatMap(({ run, colour: runColour, name: runName, alone }) => {
    if (!run.validations.has(name)) return [];
    const all = run.validations.get(name), x = places(run, 'validations', by);
    const kept = run.validations.remember(`rows ${name}`, () => Array.from(all.keys()).filter(i => Number.isFinite(all[i])));
    return [{
      label: alone ? label : runName, colour: alone ? colour : runColour, dots: true,
      x: Float64Array.from(kept, i => x[i]), y: Float32Array.from(kept, i => all[i] * scale),
    }];
  });
}

function sourcesOf(shown, prefix) {
  const names = new Set(shown.flatMap(({ run }) => Object.keys(run.validations.arrays).filter(n => n.startsWith(prefix))));
  return [...names].sort();
}

// A power series, watts from joules.
function withPower(shown) {
  for (const { run } of shown) {
    const rows = run.steps, joules = rows.get('joules'), seconds = rows.get('seconds');
    if (!joules || !seconds) continue;
    rows.extended('power', '', Float32Array, (out, from, to) => { for (let i = from; i < to; i++) out[i] = joules[i] / seconds[i]; });
    rows.arrays.power = rows.made.power.out;
  }
}

function unitOf(most) { return [[2 ** 60, 'EiB'], [2 ** 50, 'PiB'], [2 ** 40, 'TiB'], [2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB'], [1, 'B']].find(([size]) => most >= size) || [1, 'B']; }

function bytesTicks(ticks) {
  const unit = unitOf(Math.max(...ticks));
  return tickTexts(ticks.map(t => t / unit[0])).map(t => t === '0' ? '0' : `${t} ${unit[1]}`);
}

function bytesSteps(low, high) {
  const [unit] = unitOf(high);
  return evenTicks(low / unit, high / unit, 4).map(t => t * unit);
}

// All that may be drawn of the runs shown; what has no points is left out.
function chartsOf(shown, { by, smoothing }) {
  const how = { by, smoothing }, first = shown[0]?.facts, device = first?.device;
  const alone = shown.length === 1;
  withPower(shown);
  const perSource = (prefix, label) => alone ? sourcesOf(shown, prefix).flatMap((name, i) =>
    validationCurves(shown, name, { label: `${label} ${name.slice(prefix.length)}`.trim(), colour: COLOUR.sources[i % 5], by })) : [];
  const list = [
    { id: 'loss', title: 'Loss', unit: 'nats per token', loggable: true, curves: [
      ...stepCurves(shown, 'loss', { label: 'training', colour: COLOUR.training, ...how }),
      ...(alone ? validationCurves(shown, 'val_loss', { label: 'validation', colour: COLOUR.validation, by }) : []),
      ...perSource('val_loss_', 'validation,')] },
    { id: 'validation', title: 'Validation', unit: 'nats per token, all sources', loggable: true,
      curves: alone ? [] : validationCurves(shown, 'val_loss', { by }) },
    { id: 'bpb', title: 'Bits per byte', unit: 'of validation text', loggable: true, curves: [
      ...validationCurves(shown, 'val_bpb', { label: 'all sources', colour: COLOUR.validation, by }), ...perSource('val_bpb_', '')] },
    { id: 'lr', title: 'Learning rate', unit: 'of the base group', loggable: true, fromZero: true,
      curves: stepCurves(shown, 'lr', { label: '', colour: '#228833', by }) },
    { id: 'grad', title: 'Gradient norm', unit: 'before clipping', loggable: true,
      curves: stepCurves(shown, 'grad_norm', { label: '', colour: '#aa3377', ...how }) },
    { id: 'speed', title: 'Throughput', unit: `tokens/s, forward + backward${first?.shape ? `, ${first.shape}` : ''}`, fromZero: true,
      curves: stepCurves(shown, 'tokens_per_s', { label: '', colour: '#228833', ...how }) },
    { id: 'memory', title: 'Memory', unit: device === 'cuda' ? 'of the card' : 'of the process, Python and libraries included', fromZero: true, yText: bytesText, yTicks: bytesTicks, ySteps: bytesSteps,
      limit: alone && first?.limit ? { y: first.limit, label: `limit ${bytesText(first.limit)}` } : null, curves: [
        ...stepCurves(shown, 'memory_bytes', { label: device === 'cuda' ? 'reserved' : 'process', colour: '#4477aa', by }),
        ...(alone ? stepCurves(shown, 'peak_bytes', { label: 'tensors, highest so far', colour: '#ee6677', by }) : [])] },
    { id: 'busy', title: 'Model FLOP utilisation', unit: '%', fromZero: true, curves: stepCurves(shown, 'mfu', { label: '', colour: '#4477aa', scale: 100, ...how }) },
    { id: 'power', title: 'Power', unit: 'watts, the whole card', fromZero: true, curves: stepCurves(shown, 'power', { label: '', colour: '#ee7733', ...how }) },
    { id: 'ternary', title: 'Ternary weights', unit: alone ? '%' : '% that are zero', fromZero: true, curves: [
      ...validationCurves(shown, 'ternary_zero', { label: 'are zero', colour: '#4477aa', scale: 100, by }),
      ...(alone ? validationCurves(shown, 'ternary_flipped', { label: 'changed since the validation before', colour: '#aa3377', scale: 100, by }) : [])] },
    { id: 'flipped', title: 'Ternary weights', unit: '% that changed since the validation before', fromZero: true,
      curves: alone ? [] : validationCurves(shown, 'ternary_flipped', { scale: 100, by }) },
    { id: 'router', title: 'Router', unit: 'share of the free passes', fromZero: true, curves: validationCurves(shown, 'router_share', { label: '', colour: '#4477aa', by }) },
    { id: 'scale', title: 'Loss scale', unit: 'of fp16', loggable: true, curves: stepCurves(shown, 'loss_scale', { label: '', colour: '#777777', by }) },
  ];
  return list.filter(chart => chart.curves.length);
}

// ---------------------------------------------------------------- the page

function drawRunView(root, store, send) {
  const s = { by: 'step', slider: 0, log: false, zoom: null, hidden: new Set(), tab: 'curves', asked: {} };
  let theme = null, pending = 0, closed = false, stale = true, said = '';
  root.className = 'elleci-view elleci-run';
  root.setAttribute('role', 'region');
  const heading = element('h2'), pill = element('span.ev-pill'), sentence = element('span.ev-sentence'), next = element('code.ev-next');
  const copy = element('button.ev-copy', { type: 'button', click: () => navigator.clipboard?.writeText(next.textContent).then(() => {
    copy.textContent = 'Copied';
    setTimeout(() => { copy.textContent = 'Copy'; }, 1500);
  }) }, 'Copy');
  const nextRow = element('div.ev-nextrow', {}, element('span', {}, 'Next: '), next, copy);
  const gone = element('div.ev-gone', { role: 'status', hidden: true });
  const tiles = element('dl.ev-tiles'), runTable = element('div.ev-runs', { hidden: true });
  const buttons = Object.fromEntries(Object.entries(SOONER).map(([command, label]) =>
    [command, element('button', { type: 'button', click: () => ask(0, command) }, label)]));
  const answer = element('span.ev-answer', { role: 'status' });
  const control = element('div.ev-control', { role: 'group', 'aria-label': 'The training' }, ...Object.values(buttons), answer);

  const axis = element('select', { 'aria-label': 'x axis', change: () => { s.by = axis.value; s.zoom = null; schedule(); } },
    ...[['step', 'by step'], ['tokens', 'by tokens'], ['time', 'by time']].map(([value, text]) => element('option', { value }, text)));
  const smooth = element('input', { type: 'range', min: 0, max: 100, value: 0, 'aria-label': 'smoothing', input: () => { s.slider = +smooth.value; schedule(); } });
  const smoothText = element('span.ev-smooth');
  const log = element('button', { type: 'button', 'aria-pressed': false, click: () => { s.log = !s.log; log.setAttribute('aria-pressed', s.log); schedule(); } }, 'log scale');
  const all = element('button', { type: 'button', disabled: true, click: () => zoomTo(null) }, 'Show all');
  const tools = element('div.ev-tools', {}, axis, element('label', {}, 'smoothing ', smooth, ' ', smoothText), log, all,
    element('span.ev-hint', {}, 'Drag to zoom, Shift and drag to move, double-click for all.'));

  const tabs = makeTabs([['curves', 'Curves'], ['memory', 'Memory'], ['samples', 'Samples'], ['events', 'Events'], ['settings', 'Settings'], ['data', 'Data']],
    id => { s.tab = id; schedule(); });
  const grid = element('div.ev-charts'), empty = element('p.ev-empty');
  tabs.panels.curves.append(tools, empty, grid);
  const bars = element('div'), legend = element('div'), memoryTable = element('div.ev-wide'), timelineBox = element('div.ev-charts.ev-one'), memoryNote = element('p.ev-empty');
  tabs.panels.memory.append(memoryNote, bars, legend, memoryTable, timelineBox);
  root.replaceChildren(
    element('div.ev-head', {}, heading, pill, sentence), nextRow, gone, control, tiles, runTable,
    tabs.bar, ...Object.values(tabs.panels));
  const charts = {}, timeline = makeChart({ height: 230 });
  const sync = `elleci-${Math.random().toString(36).slice(2)}`;

  function zoomTo(range) {
    s.zoom = range;
    schedule();
  }

  function ask(run, command) {
    send({ kind: 'command', run, command });
    s.asked[run] = { command, state: store.facts.runs[run].state };
    setText(answer, `Asked to ${command === 'unpause' ? 'go on' : command}; it obeys after the step it is in.`);
  }

  function shownRuns() {
    const runs = store.facts.runs || [], alone = runs.length === 1;
    // Labels of many settings stand in the table, beside the folder's name; the charts have no room for them.
    const byFolder = new Set(runs.map(r => r.name)).size === runs.length && runs.some(r => r.label.length > 24);
    return runs.map((facts, i) => ({ facts, run: store.run(i), i, alone, name: byFolder ? facts.name : facts.label, colour: RUN_COLOURS[i % RUN_COLOURS.length] }))
      .filter(({ i }) => !s.hidden.has(i));
  }

  // What isn't there may still come, unless the run is over.
  function yet(shown) { return shown.length && shown.every(({ facts }) => ['finished', 'stopped', 'killed'].includes(facts.state)) ? '' : ' yet'; }

  function weight() { return s.slider ? 1 - 10 ** (-3 * s.slider / 100) : 0; }

  // ------------------------------------------------------------ parts

  function drawHead() {
    const { runs = [], title = '', message = '' } = store.facts, alone = runs.length === 1, one = runs[0];
    setText(heading, title);
    root.setAttribute('aria-label', alone ? `Run ${title}: ${one.state}. ${one.sentence}` : `${title}. ${message}`);
    pill.hidden = !alone;
    setText(sentence, alone ? one.sentence : message);
    if (alone) {
      setText(pill, one.state);
      pill.dataset.tone = one.tone;
      setText(next, one.next || '');
    }
    nextRow.hidden = !(alone && one.next);
    control.hidden = !(alone && (one.can.length || s.asked[0]));
    if (alone) {
      for (const [command, button] of Object.entries(buttons)) {
        button.disabled = !one.can.includes(command) || store.gone;
        button.hidden = command === 'pause' ? one.can.includes('unpause') : command === 'unpause' && !one.can.includes('unpause');
      }
      const asked = s.asked[0];
      if (asked && (asked.state !== one.state || one.answer && one.answer !== asked.answer)) {
        setText(answer, '');
        delete s.asked[0];
      } else if (asked) asked.answer = one.answer;
    }
    tiles.hidden = !alone || !one.tiles.length;
    if (alone) drawTiles(tiles, one.tiles);
    runTable.hidden = runs.length < 2;
    if (runs.length > 1) drawRunTable(runs);
    setText(gone, store.gone ? `No word from the kernel since ${new Date(store.lastWord).toLocaleTimeString()}: it has ended, or is busy. `
      + 'This is the last state it sent; you can still read, zoom and smooth it. A training in another process is not affected. '
      + `Run the cell again to go on, or type in a terminal: elleci_watch --run ${runs[0]?.path ?? ''}` : '');
    gone.hidden = !store.gone;
  }

  function drawRunTable(runs) {
    const head = element('tr', {}, ...['Run', 'State', 'Step', 'Loss', 'Validation', 'Tokens/s', ''].map((t, i) => element(i > 1 && i < 6 ? 'th.ev-number' : 'th', { scope: 'col' }, t)));
    const rows = runs.map((facts, i) => {
      const button = element('button', { type: 'button', 'aria-pressed': !s.hidden.has(i), 'aria-label': `show ${facts.name}`, title: facts.path, click: () => {
        if (s.hidden.has(i)) s.hidden.delete(i); else s.hidden.add(i);
        schedule();
      } }, element('span.ev-swatch', { style: { background: RUN_COLOURS[i % RUN_COLOURS.length] } }), facts.label);
      const does = facts.can.filter(c => c !== 'save').map(command =>
        element('button', { type: 'button', disabled: store.gone, 'aria-label': `${SOONER[command]}: ${facts.name}`, click: () => ask(i, command) }, SOONER[command]));
      const cells = [facts.row.step, facts.row.loss, facts.row.validation, facts.row.speed];
      return element('tr', {}, element('th', { scope: 'row' }, button, facts.label.split(', ').includes(facts.name) ? '' : element('span.ev-note', {}, ` ${facts.name}`)),
        element('td', { title: facts.sentence }, element('b', { 'data-tone': facts.tone }, facts.state)), ...cells.map(c => element('td.ev-number', {}, c || '–')), element('td', {}, ...does));
    });
    const focused = [...runTable.querySelectorAll('button')].indexOf(document.activeElement);
    runTable.replaceChildren(element('table', {}, element('thead', {}, head), element('tbody', {}, ...rows)), answer.isConnected && !control.hidden ? '' : answer);
    if (focused >= 0) runTable.querySelectorAll('button')[focused]?.focus();
  }

  function marksOf(shown) {
    if (shown.length !== 1) return [];
    const { run } = shown[0];
    return run.events.filter(e => e.kind).slice(-80).map(e => ({ x: placeOf(run, e, s.by), label: `step ${grouped(e.step, 0, 0)}: ${e.text}`, quiet: e.quiet }));
  }

  function drawCurves() {
    const shown = shownRuns(), list = chartsOf(shown, { by: s.by, smoothing: weight() }), marks = marksOf(shown);
    const seconds = v => durationText(v), tokens = v => `${tickTexts([v])[0]} tokens`, step = v => `step ${grouped(Math.round(v), 0, 0)}`;
    const xText = { step, tokens, time: seconds }[s.by];
    // One stretch for all charts, from the first point of any curve to the last.
    let [low, high] = [Infinity, -Infinity];
    for (const { curves } of list) for (const c of curves) {
      const n = c.n ?? c.x.length;
      if (n) { low = Math.min(low, c.x[0]); high = Math.max(high, c.x[n - 1]); }
    }
    const n = weight() ? Math.round(1 / (1 - weight())) : 0;
    setText(smoothText, n ? `over ${n} steps` : 'off');
    all.disabled = !s.zoom;
    setText(empty, list.length ? '' : store.facts.runs?.length ? (shown.length ? `No step is logged${yet(shown)}.` : 'All runs are hidden: press one in the table.') : '');
    empty.hidden = !empty.textContent;
    tools.hidden = !list.length;
    for (const id of Object.keys(charts)) if (!list.some(c => c.id === id)) { charts[id].close(); charts[id].root.remove(); delete charts[id]; }
    list.forEach((spec, place) => {
      const chart = charts[spec.id] ||= makeChart({ onZoom: zoomTo, sync });
      if (grid.children[place] !== chart.root) grid.insertBefore(chart.root, grid.children[place] || null);
      const draws = { ...spec, log: s.log && !!spec.loggable, fromZero: spec.fromZero && !(s.log && spec.loggable), xText, integers: s.by === 'step', marks, zoom: s.zoom, extent: [low, high] };
      if (s.by === 'time') {
        draws.xTicks = (a, b, k) => {
          const sizes = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];
          const size = sizes.find(x => x >= (b - a) / k) || 604800 * Math.ceil((b - a) / k / 604800), found = [];
          for (let t = Math.ceil(a / size) * size; t <= b; t += size) found.push(t);
          return found;
        };
        draws.xTickTexts = ticks => ticks.map(t => t ? durationText(t) : '0');
      }
      if (chart.themed !== theme) { chart.themed = theme; chart.theme(theme); }
      chart.draw(draws);
    });
  }

  function drawMemory() {
    const shown = shownRuns(), fixed = shown.map(r => r.run.fixed).find(f => f?.memory), memory = fixed?.memory;
    setText(memoryNote, memory ? (shown.length > 1 ? `Of ${shown.find(r => r.run.fixed === fixed).name}; hide it in the table above to see the next.` : '')
      : `memory.json is not there${yet(shown)}: a run writes it before its first step.`);
    memoryNote.hidden = !memoryNote.textContent;
    for (const node of [bars, legend, memoryTable, timelineBox]) node.hidden = !memory;
    if (!memory) return;
    drawBars(bars, { rows: memory.bars, limit: memory.limit });
    drawLegend(legend, memory.legend);
    drawTable(memoryTable, ['', ...['predicted', 'measured', 'difference'].map(text => ({ text, number: true })), 'what it is'], memory.table.map(([what, p, m, d, why]) =>
      [what, { text: p, number: true }, { text: m, number: true }, { text: d, number: true }, why]));
    const { x, stack, measured, steps } = memory.timeline;
    if (!x?.length) { timelineBox.hidden = true; return; }
    const curves = [];
    let sum = new Float64Array(x.length);
    for (const { name, colour, y } of stack) {
      sum = sum.map((v, i) => v + y[i]);
      curves.unshift({ label: name, colour, x: Float64Array.from(x), y: Float64Array.from(sum), area: true });
    }
    if (measured.length) curves.push({ label: 'measured', colour: theme.ink, x: Float64Array.from(measured, (_, i) => 100 * i / Math.max(measured.length - 1, 1)), y: Float64Array.from(measured) });
    if (!timelineBox.contains(timeline.root)) timelineBox.replaceChildren(timeline.root);
    if (timeline.themed !== theme) { timeline.themed = theme; timeline.theme(theme); }
    timeline.draw({ title: 'The first two steps', unit: `tensors: predicted (areas)${measured.length ? ' and measured (line)' : ''}, over their allocations and frees`, curves, fromZero: true,
      marks: steps.map(at => ({ x: at, quiet: true, label: 'the second step begins' })), yText: bytesText, yTicks: bytesTicks, ySteps: bytesSteps,
      xText: v => `${numberText(v, 3)} % of the way`, xTickTexts: ticks => ticks.map(t => `${t} %`), zoom: s.timelineZoom,
      limit: memory.limit ? { y: memory.limit, label: `limit ${bytesText(memory.limit)}` } : null });
  }

  function drawSamples() {
    const shown = shownRuns(), blocks = shown.flatMap(({ run, name, alone }) => run.samples.slice(alone ? -40 : -5).reverse().map(({ step, text }) =>
      element('div.ev-sample', {}, element('b', {}, `${alone ? '' : `${name}, `}step ${step.toLocaleString('en-US')}`), element('pre', {}, text))));
    tabs.panels.samples.replaceChildren(...(blocks.length ? blocks : [element('p.ev-empty', {}, `No sample${yet(shown)}: a run writes one with each validation, unless its settings say otherwise.`)]));
  }

  function drawEvents() {
    const rows = shownRuns().flatMap(({ run, name, alone }) => run.events.toReversed().map(e =>
      [{ text: grouped(e.step, 0, 0), number: true }, e.time ? new Date(e.time * 1000).toLocaleString() : '', { text: e.kind || 'note', tone: e.kind && !e.quiet ? 'bad' : '' }, e.text, alone ? '' : name]));
    const parts = [];
    for (const { facts } of shownRuns()) if (facts.skipped) parts.push(element('p.ev-empty', {}, `${facts.skipped.toLocaleString('en-US')} lines of metrics.jsonl in ${facts.name} are no events, and left out.`));
    const table = element('div.ev-wide');
    if (rows.length) drawTable(table, ['step', 'when', 'kind', 'what', ''], rows); else parts.push(element('p.ev-empty', {}, `No event${yet(shownRuns())}: no guard has intervened, and nobody has pressed a button.`));
    tabs.panels.events.replaceChildren(...parts, table);
  }

  function drawSettings(panel, part, none) {
    const shown = shownRuns(), tables = shown.map(r => r.run.fixed?.[part] || []);
    const names = [...new Set(tables.flatMap(t => t.map(([name]) => name)))];
    const values = tables.map(t => new Map(t));
    const rows = names.map(name => [name, ...values.map(v => v.get(name) ?? '–')]);
    if (shown.length > 1) {
      rows.sort((a, b) => (new Set(b.slice(1)).size > 1) - (new Set(a.slice(1)).size > 1));
      for (const row of rows) if (new Set(row.slice(1)).size > 1) for (let i = 1; i < row.length; i++) row[i] = { text: row[i], tone: 'warn' };
    }
    const table = element('div.ev-wide');
    if (rows.length) drawTable(table, shown.length > 1 ? ['', ...shown.map(r => r.name)] : null, rows);
    panel.replaceChildren(rows.length ? table : element('p.ev-empty', {}, none));
  }

  function draw() {
    pending = 0;
    if (closed || !theme) return;
    const start = performance.now();
    drawHead();
    const nothing = !store.facts.runs?.length;
    tabs.bar.hidden = nothing;
    for (const [id, panel] of Object.entries(tabs.panels)) panel.hidden = nothing || id !== s.tab;
    // Of the words, a panel shows these.
    const words = JSON.stringify((store.facts.runs || []).map(({ name, label, state, device, limit, shape, skipped }) => [name, label, state, device, limit, shape, skipped]));
    if (!nothing && (stale || words !== said)) {
      stale = false;
      said = words;
      if (s.tab === 'curves') drawCurves();
      if (s.tab === 'memory') drawMemory();
      if (s.tab === 'samples') drawSamples();
      if (s.tab === 'events') drawEvents();
      if (s.tab === 'settings') drawSettings(tabs.panels.settings, 'settings', 'config.json is not there.');
      if (s.tab === 'data') drawSettings(tabs.panels.data, 'data', 'Nothing is known of its data.');
    }
    root.runView.times.push(performance.now() - start);
    if (root.runView.times.length > 500) root.runView.times.shift();
    if (store.arrived && !root.runView.painted) requestAnimationFrame(() => { root.runView.painted = performance.now(); });
  }

  // Once a frame at most, and only for what is seen; new words alone leave the panel as it is.
  function schedule(onlyWords = false) {
    if (!onlyWords) stale = true;
    if (!pending) pending = requestAnimationFrame(draw);
  }

  root.runView = { state: s, store, charts, timeline, times: [], painted: 0, draw, contrast, readable, get theme() { return theme; }, zoomTo };
  const endTheme = followTheme(root, colours => { theme = colours; schedule(); });
  store.views.add(schedule);
  tabs.show('curves');
  schedule();
  return () => {
    closed = true;
    endTheme();
    store.views.delete(schedule);
    for (const chart of Object.values(charts)) chart.close();
    timeline.close();
  };
}

// ---------------------------------------------------------------- what anywidget calls

// Once for each view of the kernel: what has arrived is kept here, whatever happens to the cells that show it.
export default () => {
  const store = { facts: {}, runs: [], views: new Set(), gone: false, lastWord: Date.now(), wait: 20, arrived: false,
    run(i) { return this.runs[i] ||= newRun(); },
    changed(onlyWords = false) { for (const view of this.views) view(onlyWords); } };
  let clock = 0;

  function receive(message, buffers) {
    store.lastWord = Date.now();
    if (message.wait != null) store.wait = message.wait;
    store.gone = false;
    const run = message.run == null ? null : store.run(message.run);
    if (message.kind === 'rows') {
      const table = run[message.table];
      if (message.from === 0) Object.assign(table, new Columns(), { epoch: message.epoch });
      if (message.epoch !== table.epoch || message.from > table.n) return { kind: 'hello' };
      table.put(message.names, message.types, buffers, message.from, message.n);
      store.arrived = true;
    }
    if (message.kind === 'events') Object.assign(run, { events: message.events, samples: message.samples });
    if (message.kind === 'fixed') run.fixed = message;
    if (message.kind !== 'beat') store.changed();
    return null;
  }

  return {
    initialize({ model }) {
      store.facts = model.get('facts');
      const onFacts = () => { store.facts = model.get('facts'); store.lastWord = Date.now(); store.gone = false; store.changed(true); };
      const onMessage = (message, buffers) => {
        const wasGone = store.gone, question = receive(message, buffers);
        if (wasGone) store.changed(true);
        if (question) model.send(question);
      };
      model.on('change:facts', onFacts);
      model.on('msg:custom', onMessage);
      model.send({ kind: 'hello' });
      clock = setInterval(() => {
        if (store.gone || Date.now() - store.lastWord < 1000 * (store.wait + 12)) return;
        store.gone = true;
        store.changed(true);
      }, 1000);
      return () => {
        clearInterval(clock);
        model.off('change:facts', onFacts);
        model.off('msg:custom', onMessage);
      };
    },
    render({ model, el }) {
      const root = element('div');
      el.append(root);
      return drawRunView(root, store, message => model.send(message));
    },
  };
};
