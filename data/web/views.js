// What the run view and the planner share: elements, the host's theme, tiles, tabs, tables, bars of bytes, and charts.
// Charts are drawn by uPlot (uplot.min.js, which stands before this file in a bundle). Nothing is loaded from elsewhere,
// and every text becomes a text node: what a file says is never read as HTML.

// ---------------------------------------------------------------- elements

// element('div.ev-tile', {title: 'a'}, 'text', child): functions become listeners, null and false are left out.
function element(what, properties = {}, ...children) {
  const [tag, ...classes] = what.split('.'), node = document.createElement(tag || 'div');
  if (classes.length) node.className = classes.join(' ');
  for (const [name, value] of Object.entries(properties)) {
    if (value == null || value === false) continue;
    if (typeof value === 'function') node.addEventListener(name, value);
    else if (name === 'style') for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.filter(child => child != null && child !== false));
  return node;
}

function setText(node, text) { if (node.textContent !== text) node.textContent = text; }

const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

// ---------------------------------------------------------------- numbers as text

function bytesText(n) {
  const sign = n < 0 ? '−' : '';
  let rest = Math.abs(n), unit = 0;
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB'];
  while (rest >= 1024 && unit < units.length - 1) { rest /= 1024; unit++; }
  return `${sign}${unit ? rest.toFixed(rest < 10 ? 2 : rest < 100 ? 1 : 0) : rest} ${units[unit]}`;
}

// With thousands apart, and from `least` to `most` decimals. What it is made with is kept: making it takes longer than using it.
function grouped(v, least, most) {
  const known = grouped.known ||= {}, format = known[`${least} ${most}`] ||= new Intl.NumberFormat('en-US', { minimumFractionDigits: least, maximumFractionDigits: most });
  return format.format(v).replace('-', '−');
}

// A number with about so many digits that count, and thousands apart.
function numberText(v, digits = 4) {
  if (!Number.isFinite(v)) return '–';
  const size = Math.abs(v);
  if (size && (size < 1e-3 || size >= 1e9)) return v.toExponential(Math.min(digits - 1, 3)).replace(/\.?0*e\+?/, 'e').replaceAll('-', '−');
  const decimals = size >= 1000 ? 0 : clamp(digits - 1 - Math.floor(Math.log10(size || 1)), 0, 8);
  return grouped(v, size && size < 1000 ? Math.min(decimals, 3) : 0, decimals);
}

function durationText(seconds) {
  const units = [['d', 86400], ['h', 3600], ['min', 60], ['s', 1]];
  const s = Math.max(0, Math.round(seconds)), at = units.findIndex(([, size]) => s >= size);
  if (at < 0) return '0 s';
  const [unit, size] = units[at], next = units[at + 1];
  const rest = next ? Math.floor(s % size / next[1]) : 0;
  return `${Math.floor(s / size)} ${unit}${rest ? ` ${rest} ${next[0]}` : ''}`;
}

// Labels along an axis: as many decimals as its steps need, and never two that read alike.
function tickTexts(ticks) {
  const finite = ticks.filter(Number.isFinite);
  const most = Math.max(...finite.map(Math.abs), 0);
  let step = Infinity;
  for (let i = 1; i < finite.length; i++) step = Math.min(step, Math.abs(finite[i] - finite[i - 1]));
  if (!Number.isFinite(step) || !step) step = most || 1;
  if (most && (most >= 1e13 || most < 1e-3)) return ticks.map(t => t ? t.toExponential(clamp(Math.floor(Math.log10(most / step)) + 1, 0, 6)).replace(/\.?0*e\+?/, 'e').replaceAll('-', '−') : '0');
  const [scale, letter] = most >= 1e9 ? [1e9, 'G'] : most >= 1e7 ? [1e6, 'M'] : most >= 1e4 ? [1e3, 'k'] : [1, ''];
  let decimals = clamp(-Math.floor(Math.log10(step / scale) + 1e-9), 0, 9);
  // Steps of 2.5 need a digit more.
  if (Math.abs(step / scale * 10 ** decimals - Math.round(step / scale * 10 ** decimals)) > 1e-6) decimals++;
  return ticks.map(t => {
    const text = grouped(t / scale, decimals, decimals);
    return t === 0 ? '0' : text + letter;
  });
}

// ---------------------------------------------------------------- colours and the host's theme

function rgbOf(colour) {
  const known = rgbOf.known ||= new Map();
  if (!known.has(colour)) known.set(colour, paintedRgb(colour));
  return known.get(colour);
}

// As the browser paints it: whatever a style sheet may call a colour.
function paintedRgb(colour) {
  const canvas = paintedRgb.canvas ||= document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = '#000';
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)];
}

function luminance([r, g, b]) {
  const linear = [r, g, b].map(c => (c /= 255) <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
  return .2126 * linear[0] + .7152 * linear[1] + .0722 * linear[2];
}

function contrast(a, b) {
  const [high, low] = [luminance(rgbOf(a)), luminance(rgbOf(b))].sort((p, q) => q - p);
  return (high + .05) / (low + .05);
}

// A colour as near to `colour` as it can be while it stands out from the ground.
function readable(colour, ground, least = 3) {
  const key = `${colour} ${ground} ${least}`, known = readable.known ||= new Map();
  if (known.has(key)) return known.get(key);
  const from = rgbOf(colour), to = luminance(rgbOf(ground)) < .4 ? 255 : 0;
  let found = colour;
  for (let share = 0; share <= 1; share += .08) {
    found = `rgb(${from.map(c => Math.round(c + (to - c) * share)).join(',')})`;
    if (contrast(found, ground) >= least) break;
  }
  known.set(key, found);
  return found;
}

function fade(colour, alpha) { return `rgba(${rgbOf(colour).join(',')},${alpha})`; }

// Follow the host's theme: `root` gets data-dark, `changed` is called with the colours, now and after each change.
function followTheme(root, changed) {
  const look = () => {
    root.dataset.dark = false;
    const style = getComputedStyle(root);
    const dark = luminance(rgbOf(style.backgroundColor)) < .4;
    root.dataset.dark = dark;
    const probe = element('span');
    root.append(probe);
    const read = name => {
      probe.style.color = `var(--ev-${name})`;
      return `rgb(${rgbOf(getComputedStyle(probe).color).join(',')})`;
    };
    const theme = { dark, ground: `rgb(${rgbOf(style.backgroundColor).join(',')})` };
    for (const name of ['ink', 'soft', 'line', 'accent', 'limit', 'good', 'warn']) theme[name] = read(name);
    probe.remove();
    changed(theme);
  };
  const system = matchMedia('(prefers-color-scheme: dark)'), watched = new MutationObserver(() => setTimeout(look, 60));
  system.addEventListener('change', look);
  for (const node of [document.documentElement, document.body]) {
    watched.observe(node, { attributes: true, attributeFilter: ['data-jp-theme-name', 'data-jp-theme-light', 'data-vscode-theme-kind', 'class', 'theme'] });
  }
  // JupyterLab loads the style sheet of a new theme after it has named it.
  watched.observe(document.head, { childList: true });
  look();
  return () => {
    system.removeEventListener('change', look);
    watched.disconnect();
  };
}

// ---------------------------------------------------------------- tiles, tabs, tables, bars

// Tiles with one figure each: [{label, value, note, tone}]. What stays the same is not touched.
function drawTiles(list, tiles) {
  while (list.children.length > tiles.length) list.lastChild.remove();
  while (list.children.length < tiles.length) {
    list.append(element('div.ev-tile', {}, element('dt'), element('dd'), element('dd.ev-note')));
  }
  tiles.forEach(({ label, value, note = '', tone = '' }, i) => {
    const [name, figure, below] = list.children[i].children;
    setText(name, label);
    setText(figure, value);
    figure.dataset.tone = tone;
    setText(below, note);
    below.hidden = !note;
  });
}

// Tabs after the ARIA pattern: arrows move, and the panels are `{id: node}`. Gives {show, nodes}.
function makeTabs(tabs, chosen) {
  const bar = element('div.ev-tabs', { role: 'tablist' }), buttons = {}, panels = {};
  const show = (id, focus) => {
    for (const [name, button] of Object.entries(buttons)) {
      button.setAttribute('aria-selected', name === id);
      button.tabIndex = name === id ? 0 : -1;
      panels[name].hidden = name !== id;
    }
    if (focus) buttons[id].focus();
    chosen?.(id);
  };
  for (const [id, title] of tabs) {
    const unique = `ev-${id}-${Math.random().toString(36).slice(2)}`;
    buttons[id] = element('button', { role: 'tab', id: `${unique}-tab`, 'aria-controls': unique, click: () => show(id), type: 'button' }, title);
    panels[id] = element('div', { role: 'tabpanel', id: unique, 'aria-labelledby': `${unique}-tab` });
    bar.append(buttons[id]);
  }
  bar.addEventListener('keydown', e => {
    const direction = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (!direction) return;
    e.preventDefault();
    e.stopPropagation();
    const names = Object.keys(buttons).filter(name => !buttons[name].hidden);
    const at = names.findIndex(name => buttons[name].getAttribute('aria-selected') === 'true');
    show(names[(at + direction + names.length) % names.length], true);
  });
  return { bar, buttons, panels, show };
}

// A table of text; a cell may be {text, number: true, tone, swatch: colour, code: true}.
function drawTable(parent, head, rows) {
  const cell = (tag, content, properties = {}) => {
    const { text, number, tone, swatch, code } = typeof content === 'object' && content ? content : { text: content };
    const inner = code ? element('code', {}, String(text)) : String(text ?? '');
    return element(number ? `${tag}.ev-number` : tag, { 'data-tone': tone, ...properties },
      swatch && element('span.ev-swatch', { style: { background: swatch } }), inner);
  };
  const body = element('tbody', {}, ...rows.map(([first, ...rest]) =>
    element('tr', {}, cell('th', first, { scope: 'row' }), ...rest.map(c => cell('td', c)))));
  const top = head && element('thead', {}, element('tr', {}, ...head.map(c => cell('th', c, { scope: 'col' }))));
  parent.replaceChildren(element('table', {}, top, body));
}

// Bars of bytes over each other: {rows: [{label, parts: [{name, nbytes, colour}]}], limit, unit: bytesText}.
// A part says its name and its bytes to the pointer (title) and to a reader of the page (the bar's label).
function drawBars(parent, { rows, limit = null, limitLabel = 'limit', text = bytesText }) {
  const total = row => row.parts.reduce((sum, part) => sum + part.nbytes, 0);
  const most = Math.max(...rows.map(total), limit || 0, 1) * 1.03, percent = n => `${100 * n / most}%`;
  const bars = rows.map(row => {
    const said = row.parts.map(part => `${part.name} ${text(part.nbytes)}`).join(', ');
    const track = element('div.ev-track', { role: 'img', 'aria-label': `${row.label}: ${said}; together ${text(total(row))}` },
      ...row.parts.filter(part => part.nbytes > 0).map(part => element('div.ev-part', {
        title: `${part.name}: ${text(part.nbytes)}`, style: { width: percent(part.nbytes), background: part.colour },
      })));
    if (limit) {
      track.append(element('div.ev-limit', { style: { left: percent(limit) } },
        row === rows[0] && element('span', {}, `${limitLabel} ${text(limit)}`)));
    }
    return element('div.ev-bar', {}, element('span', {}, row.label), track);
  });
  parent.classList.add('ev-bars');
  parent.style.paddingTop = limit ? '14px' : '';
  parent.replaceChildren(...bars);
}

// Names of parts with their colours, and what is said of each: [{name, colour, text}].
function drawLegend(parent, entries) {
  parent.classList.add('ev-legend');
  parent.replaceChildren(...entries.map(({ name, colour, text = '' }) => element('span', {},
    element('span.ev-swatch', { style: { background: colour } }), name, element('span', {}, ` ${text}`))));
}

// ---------------------------------------------------------------- curves

// The first place in sorted numbers that is not below `value`.
function lowerBound(sorted, value, n = sorted.length) {
  let low = 0, high = n;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

// An exponential mean that is not pulled towards its first value; NaN is passed over. It fills the places of `out` from
// `from` to `to`; `state` holds where it stands, so that it goes on with the numbers that come later.
function smoothed(y, weight, out = new Float32Array(y.length), from = 0, to = y.length, state = {}) {
  let { sum = 0, share = 0 } = state;
  for (let i = from; i < to; i++) {
    const finite = Number.isFinite(y[i]);
    if (finite) {
      sum = weight * sum + (1 - weight) * y[i];
      share = weight * share + 1 - weight;
    }
    out[i] = finite ? sum / share : NaN;
  }
  Object.assign(state, { sum, share });
  return out;
}

// The columns of one width that a curve's points fall into; column k holds x from k·width up to (k + 1)·width.
class Level {
  constructor(how, width) { Object.assign(this, { how, width, n: 0, first: 0, size: 0, sums: [] }); }

  // Take the points that have come since: up to `to`, from `from` if it begins here.
  extend({ x, y, mean = y }, from, to) {
    if (!this.n) { this.n = from; this.first = Math.floor(x[from] / this.width); }
    if (this.n >= to) return;
    const needed = Math.floor(x[to - 1] / this.width) - this.first + 1;
    if (needed > (this.sums[0]?.length ?? 0)) {
      this.sums = [0, 0, 0, Infinity, -Infinity].map((empty, k) => {
        const larger = new Float64Array(Math.ceil(needed * 1.5) + 16).fill(empty);
        if (this.sums[k]) larger.set(this.sums[k]);
        return larger;
      });
    }
    this.size = needed;
    const [counts, xs, means, lows, highs] = this.sums, { width, first } = this;
    for (let i = this.n; i < to; i++) {
      const value = mean[i], raw = y[i], at = x[i];
      if (value - value !== 0 || at - at !== 0) continue;        // not finite
      const k = Math.floor(at / width) - first;
      counts[k]++;
      xs[k] += at;
      means[k] += value;
      if (raw < lows[k]) lows[k] = raw;
      if (raw > highs[k]) highs[k] = raw;
    }
    this.n = to;
  }
}

// Curves of any length as columns of one width: [xs, mean, low, high, mean, low, high, …], at most `columns` of them
// and one more at either side, so that lines run out of the picture. Few points stay as they are; many are put together
// by place: the mean, the lowest and the highest of each column. Widths are powers of two, so that a column stays the
// same when points are appended; a curve with `levels` keeps its columns there, for as long as `how` stays.
function reduceCurves(curves, x0, x1, columns) {
  const ranges = curves.map(({ x, n = x.length }) =>
    [Math.max(0, lowerBound(x, x0, n) - 1), Math.min(n, lowerBound(x, x1, n) + 1)]);
  const points = ranges.reduce((sum, [from, to]) => sum + to - from, 0);
  if (points <= columns) return exactCurves(curves, ranges, points);
  const width = 2 ** Math.ceil(Math.log2((x1 - x0) / columns || 1));
  const start = Math.floor(x0 / width) - 1, size = Math.floor(x1 / width) + 2 - start;
  const levels = curves.map((curve, c) => {
    const { x, n = x.length, levels: kept } = curve;
    // A stretch of a long curve isn't worth keeping; the whole of it is.
    if (!kept || ranges[c][1] - ranges[c][0] < n / 2) {
      const level = new Level('', width);
      level.extend(curve, ...ranges[c]);
      return level;
    }
    if (kept.last?.how !== curve.how || kept.last.width !== width) kept.last = new Level(curve.how, width);
    kept.last.extend(curve, 0, n);
    return kept.last;
  });
  const counts = new Float64Array(size), xs = new Float64Array(size);
  for (const level of levels) {
    for (let k = Math.max(0, start - level.first); k < Math.min(level.size, start + size - level.first); k++) {
      counts[k + level.first - start] += level.sums[0][k];
      xs[k + level.first - start] += level.sums[1][k];
    }
  }
  const kept = Array.from(counts.keys()).filter(i => counts[i]);
  const out = [kept.map(i => xs[i] / counts[i])];
  for (const { first, size: most, sums: [count, , means, lows, highs] } of levels) {
    const read = f => kept.map(i => { const k = i + start - first; return k >= 0 && k < most && count[k] ? f(k) : null; });
    out.push(read(k => means[k] / count[k]), read(k => lows[k]), read(k => highs[k]));
  }
  return out;
}

function exactCurves(curves, ranges, points) {
  const all = new Float64Array(points);
  let at = 0;
  curves.forEach(({ x }, c) => { for (let i = ranges[c][0]; i < ranges[c][1]; i++) all[at++] = x[i]; });
  const xs = Array.from(new Set(all.sort())).filter(Number.isFinite), out = [xs];
  curves.forEach(({ x, y, mean = y }, c) => {
    const [means, lows, highs] = [0, 1, 2].map(() => new Array(xs.length).fill(null));
    const counted = new Uint32Array(xs.length);
    let place = 0;
    for (let i = ranges[c][0]; i < ranges[c][1]; i++) {
      if (!Number.isFinite(mean[i]) || !Number.isFinite(x[i])) continue;
      while (xs[place] < x[i]) place++;
      means[place] = counted[place] ? means[place] + (mean[i] - means[place]) / (counted[place] + 1) : mean[i];
      lows[place] = counted[place] ? Math.min(lows[place], y[i]) : y[i];
      highs[place] = counted[place] ? Math.max(highs[place], y[i]) : y[i];
      counted[place]++;
    }
    out.push(means, lows, highs);
  });
  return out;
}

// Round places of ticks on a scale of powers: 1, 2, 5 times a power of ten, or even steps where that is too few.
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const k of [1, 2, 5]) if (k * 10 ** power >= low * .999 && k * 10 ** power <= high * 1.001) found.push(k * 10 ** power);
  }
  if (found.length > 7) return found.filter(t => Math.abs(Math.log10(t) - Math.round(Math.log10(t))) < 1e-9);
  if (found.length >= 3) return found;
  return evenTicks(low, high, 4);
}

function evenTicks(low, high, about) {
  const rough = (high - low) / about || 1, base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(k => k * base).find(s => s >= rough * .999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9 && found.length < 50; i++) found.push(i * step);
  return found;
}

// What the axis must hold; the bands from lowest to highest do not count, or one spike would flatten the rest.
function rangeOfValues(columns, { log, fromZero, limit, stacked }) {
  let low = Infinity, high = -Infinity;
  for (const column of columns) {
    for (const value of column) {
      if (value == null || log && value <= 0) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return null;
  if (limit != null && limit < 1.6 * high) high = Math.max(high, limit);
  if (log) return low === high ? [low / 2, high * 2] : [low / 1.08, high * 1.08];
  if (fromZero || stacked) low = Math.min(low, 0);
  const margin = (high - low || Math.abs(high) || 1) * .06;
  return [fromZero && low === 0 ? 0 : low - margin, high + margin];
}

const CHART_HEIGHT = 190;
// We choose the ticks, but uPlot draws none where its own steps end.
const INCREMENTS = Array.from({ length: 90 }, (_, i) => 10 ** (i - 45));
const chartsAlive = new Set();

// One chart: `draw(spec)` shows it, again and again; gives {root, draw, theme, close}.
//   spec: {title, unit, xLabel, xText(x) for the read-out, xTicks(low, high) or null, integers: whether x is counted,
//          curves: [{label, colour, x, y, n, mean, dots, area}], marks: [{x, label}], limit: {y, label},
//          log, fromZero, zoom: [x0, x1] or null, extent: [x0, x1] or null, yText(y), ySteps(low, high), yTicks(places)}
//   onZoom([x0, x1] or null): the hand has chosen another stretch
//   sync: charts with the same key share their cursor
function makeChart({ onZoom = () => {}, sync = null, height = CHART_HEIGHT } = {}) {
  const title = element('h3'), unit = element('span.ev-unit'), readout = element('div.ev-readout');
  const said = element('div.ev-unseen', { 'aria-live': 'polite' });
  const plot = element('div.ev-plot', { tabindex: 0, role: 'group', 'aria-roledescription': 'chart' });
  const root = element('div.ev-chart', {}, element('div', {}, title, unit), readout, plot, said);
  let u = null, spec = null, shape = '', theme = null, data = null, view = [0, 1], yRange = [0, 1], width = 0, drawnFor = null;
  // As the observer says: reading it from the element would have the page laid out anew for each chart.
  let seenWidth = 0;

  const colourOf = curve => readable(curve.colour, theme.ground);
  const text = v => (spec.yText || numberText)(v);

  function series() {
    const out = [{}];
    spec.curves.forEach((_, c) => {
      const curve = () => spec.curves[c];
      out.push({
        stroke: () => curve().area ? fade(curve().colour, 1) : colourOf(curve()), width: curve().area ? 0 : 1.6, spanGaps: true,
        fill: curve().area ? () => curve().colour : undefined, fillTo: curve().area ? () => yRange[0] : undefined,
        points: { show: () => !curve().area && (curve().dots || data[0].length <= 40), size: 5, fill: () => colourOf(curve()), stroke: () => colourOf(curve()) },
      });
      for (let k = 0; k < 2; k++) out.push({ stroke: 'transparent', width: 0, spanGaps: true, points: { show: false } });
    });
    return out;
  }

  function build() {
    u?.destroy();
    const font = '11px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif';
    const axis = { font, incrs: INCREMENTS, stroke: () => theme.soft, ticks: { stroke: () => theme.line, size: 4 }, gap: 4 };
    u = new uPlot({
      width, height, legend: { show: false }, pxAlign: 0,
      padding: [8, 22, 0, 0],
      scales: {
        x: { time: false, auto: false, range: () => view },
        y: { auto: false, distr: spec.log ? 3 : 1, range: () => yRange },
      },
      axes: [
        { ...axis, size: 28, grid: { show: false }, space: 70,
          splits: (_, __, low, high, ___, space) => (spec.xTicks || ((a, b, n) => evenTicks(a, b, n).filter(t => !spec.integers || Number.isInteger(t))))(low, high, Math.max(2, Math.floor(width / 90))),
          values: (_, ticks) => spec.xTickTexts ? spec.xTickTexts(ticks) : tickTexts(ticks) },
        { ...axis, size: 52, grid: { stroke: () => theme.line, width: 1 },
          splits: (_, __, low, high) => spec.log ? logTicks(low, high) : (spec.ySteps || evenTicks)(low, high, 4),
          values: (_, ticks) => spec.yTicks ? spec.yTicks(ticks) : spec.log ? ticks.map(t => tickTexts([t])[0]) : tickTexts(ticks) },
      ],
      series: series(),
      bands: spec.curves.flatMap((curve, c) => curve.area ? [] : [{ series: [3 * c + 3, 3 * c + 2], fill: () => fade(colourOf(spec.curves[c]), .2) }]),
      cursor: {
        sync: sync ? { key: sync, setSeries: false, scales: ['x', null] } : undefined,
        drag: { x: true, y: false, setScale: false },
        points: { show: (_, i) => (i - 1) % 3 === 0 && element('div', { style: { width: '7px', height: '7px', margin: '-3.5px 0 0 -3.5px' } }) },
        bind: {
          dblclick: () => () => { onZoom(null); return null; },
          mousedown: (_, __, handler) => e => { if (!e.shiftKey) handler(e); return null; },
        },
      },
      hooks: {
        setSelect: [self => {
          if (self.select.width < 6) return;
          const [from, to] = [self.select.left, self.select.left + self.select.width].map(p => self.posToVal(p, 'x'));
          self.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          onZoom([from, to]);
        }],
        setCursor: [self => describe(self.cursor.idx)],
        draw: [marks],
      },
    }, data, plot);
    u.over.addEventListener('mousedown', e => {
      if (!e.shiftKey) return;
      const from = e.clientX, [x0, x1] = view, perPixel = (x1 - x0) / u.over.clientWidth;
      const move = m => onZoom([x0 - (m.clientX - from) * perPixel, x1 - (m.clientX - from) * perPixel]);
      const up = () => { removeEventListener('mousemove', move); removeEventListener('mouseup', up); };
      addEventListener('mousemove', move);
      addEventListener('mouseup', up);
    });
  }

  // Events as lines from top to bottom with a flag, and the limit with its name.
  function marks(self) {
    const { ctx } = self, { left, top, width: w, height: h } = self.bbox, ratio = devicePixelRatio || 1;
    ctx.save();
    ctx.beginPath();
    // Wide enough for the flag of a mark on the last step.
    ctx.rect(left - 5 * ratio, top - 8 * ratio, w + 10 * ratio, h + 8 * ratio);
    ctx.clip();
    ctx.lineWidth = ratio;
    for (const mark of spec.marks || []) {
      if (mark.x < view[0] || mark.x > view[1]) continue;
      const x = Math.round(self.valToPos(mark.x, 'x', true)) + .5;
      ctx.strokeStyle = ctx.fillStyle = mark.quiet ? theme.soft : theme.limit;
      ctx.setLineDash([2 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + h);
      ctx.stroke();
      if (mark.quiet) continue;
      ctx.beginPath();
      ctx.moveTo(x - 4 * ratio, top - 6 * ratio);
      ctx.lineTo(x + 4 * ratio, top - 6 * ratio);
      ctx.lineTo(x, top);
      ctx.fill();
    }
    if (spec.limit && spec.limit.y <= yRange[1]) {
      const y = self.valToPos(spec.limit.y, 'y', true);
      ctx.strokeStyle = ctx.fillStyle = theme.limit;
      ctx.setLineDash([6 * ratio, 4 * ratio]);
      ctx.lineWidth = 1.5 * ratio;
      ctx.beginPath();
      ctx.moveTo(left, y);
      ctx.lineTo(left + w, y);
      ctx.stroke();
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      ctx.textAlign = 'right';
      ctx.fillText(spec.limit.label, left + w - 4 * ratio, y - 4 * ratio);
    }
    ctx.restore();
  }

  // The values at a place, or the last ones.
  function describe(idx) {
    const parts = [], at = idx ?? null;
    let shownX = null;
    spec.curves.forEach((curve, c) => {
      const column = data[3 * c + 1];
      let i = at;
      if (i == null) for (i = column.length - 1; i >= 0 && column[i] == null; i--);
      else for (let d = 0; column[i] == null && d < 40; d++) {        // the nearest value, for curves with few points
        if (column[at - d] != null) i = at - d; else if (column[at + d] != null) i = at + d;
      }
      if (column[i] == null) return;
      let value = column[i];
      if (curve.area) { const below = spec.curves[c + 1]; if (below?.area) value -= data[3 * c + 4][i] ?? 0; }
      const low = data[3 * c + 2][i], high = data[3 * c + 3][i];
      const spread = !curve.area && at != null && high - low > 1e-9 * Math.abs(value) ? ` (${text(low)} to ${text(high)})` : '';
      parts.push([curve, text(value) + spread]);
      if (at != null) shownX = data[0][at];
    });
    const mark = at == null ? null : (spec.marks || []).find(m => m.label && Math.abs(u.valToPos(m.x, 'x') - u.valToPos(data[0][at], 'x')) < 7);
    const nodes = parts.map(([curve, value]) => element('span', {},
      element('span.ev-swatch', { style: { background: curve.area ? curve.colour : colourOf(curve) } }), curve.label ? `${curve.label} ` : '', element('b', {}, value)));
    if (shownX != null) nodes.push(element('span.ev-at', {}, spec.xText ? spec.xText(shownX) : numberText(shownX)));
    if (mark) nodes.push(element('span.ev-mark', {}, `⚑ ${mark.label}`));
    readout.replaceChildren(...nodes);
    return nodes.map(node => node.textContent).join('; ');
  }

  function summary() {
    const parts = spec.curves.flatMap((curve, c) => {
      const column = data[3 * c + 1].filter(v => v != null);
      if (!column.length) return [];
      const low = column.reduce((a, b) => Math.min(a, b)), high = column.reduce((a, b) => Math.max(a, b));
      return [`${curve.label || spec.title}: from ${text(column[0])} to ${text(column[column.length - 1])}, lowest ${text(low)}, highest ${text(high)}`];
    });
    const stretch = spec.xText ? `${spec.xText(view[0])} to ${spec.xText(view[1])}` : '';
    return `${spec.title}, ${spec.unit || ''}. ${parts.join('. ')}. ${stretch}. Arrows read values, plus and minus zoom, Shift and arrows move, 0 shows all.`;
  }

  function draw(next) {
    spec = next;
    setText(title, spec.title);
    setText(unit, spec.unit || '');
    // What nobody sees is drawn when it is seen.
    if (!theme || !seenWidth) { drawnFor = null; return; }
    width = seenWidth;
    const extent = spec.extent || [
      Math.min(...spec.curves.map(c => (c.n ?? c.x.length) ? c.x[0] : Infinity)),
      Math.max(...spec.curves.map(c => (c.n ?? c.x.length) ? c.x[(c.n ?? c.x.length) - 1] : -Infinity)),
    ];
    let [x0, x1] = spec.zoom || extent;
    if (!(x1 > x0)) [x0, x1] = Number.isFinite(x0) ? [x0 - 1, x0 + 1] : [0, 1];
    view = [x0, x1];
    data = reduceCurves(spec.curves, x0, x1, clamp(Math.round(width * .8), 200, 2000));
    yRange = rangeOfValues(spec.curves.map((_, c) => data[3 * c + 1]), {
      log: spec.log, fromZero: spec.fromZero, limit: spec.limit?.y, stacked: spec.curves.some(c => c.area),
    }) || (spec.log ? [1, 10] : [0, 1]);
    if (spec.log) data = data.map((column, i) => i ? column.map(v => v > 0 ? v : null) : column);
    const nextShape = JSON.stringify([spec.log, spec.curves.map(c => [c.area, c.dots])]);
    if (!u || nextShape !== shape) {
      shape = nextShape;
      build();
    } else {
      if (u.width !== width) u.setSize({ width, height });
      u.setData(data, false);
    }
    u.batch(() => {
      u.setScale('x', { min: x0, max: x1 });
      u.setScale('y', { min: yRange[0], max: yRange[1] });
    });
    u.redraw(true, true);
    if (u.cursor.left == null || u.cursor.left < 0) describe(null);
    plot.setAttribute('aria-label', summary());
    drawnFor = spec;
  }

  plot.addEventListener('keydown', e => {
    if (!u || e.ctrlKey || e.metaKey || e.altKey) return;
    const [x0, x1] = view, span = x1 - x0;
    const visible = data[0].filter(x => x >= x0 && x <= x1);
    const step = direction => {
      const first = data[0].indexOf(visible[0]), last = data[0].indexOf(visible[visible.length - 1]);
      const now = u.cursor.idx == null || u.cursor.left < 0 ? (direction > 0 ? first - 1 : last + 1) : u.cursor.idx;
      const at = clamp(now + direction * (e.key.startsWith('Page') ? 10 : 1), first, last);
      u.setCursor({ left: u.valToPos(data[0][at], 'x'), top: u.over.clientHeight / 2 });
      setText(said, describe(at));
    };
    const zoom = factor => onZoom([(x0 + x1) / 2 - span * factor / 2, (x0 + x1) / 2 + span * factor / 2]);
    const keys = {
      ArrowLeft: () => e.shiftKey ? onZoom([x0 - span / 8, x1 - span / 8]) : step(-1),
      ArrowRight: () => e.shiftKey ? onZoom([x0 + span / 8, x1 + span / 8]) : step(1),
      PageDown: () => step(-1), PageUp: () => step(1),
      '+': () => zoom(.6), '=': () => zoom(.6), '-': () => zoom(1 / .6), '0': () => onZoom(null), Home: () => onZoom(null),
      Escape: () => { u.setCursor({ left: -10, top: -10 }); describe(null); },
    };
    if (!keys[e.key]) return;
    e.preventDefault();
    e.stopPropagation();
    keys[e.key]();
  });

  const resized = new ResizeObserver(entries => {
    seenWidth = Math.floor(entries[0].contentRect.width);
    if (spec && theme && seenWidth && (seenWidth !== width || !drawnFor)) draw(spec);
  });
  resized.observe(plot);
  const chart = {
    root, draw, plot,
    theme(next) { theme = next; if (spec) draw(spec); },
    get state() { return { view, yRange, data, spec, u }; },
    close() { resized.disconnect(); u?.destroy(); chartsAlive.delete(chart); },
  };
  chartsAlive.add(chart);
  return chart;
}
