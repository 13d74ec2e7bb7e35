// The memory timeline: areas by category, blocks by address, and the segments at one moment.
// It is drawn on two canvases from the columns that `elleci.memory.timeline` writes; nothing is loaded from elsewhere.

const GUTTER = 74, PLOT = 350, LANE = 20, CHUNK = 64;
const ROW = 22, ROWS = 6;                       // of the segments at one moment
const RIBBON = ROW * ROWS + 6;

// ---------------------------------------------------------------- reading

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f8: Float64Array };

async function column({ type, data }) {
  const packed = Uint8Array.from(atob(data), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new ARRAYS[type](await new Response(stream).arrayBuffer());
}

async function columns(record) {
  const names = Object.keys(record);
  const arrays = await Promise.all(names.map(name => column(record[name])));
  return Object.fromEntries(names.map((name, i) => [name, arrays[i]]));
}

// What is drawn, computed once: bytes by group after each event, what is reserved, and where the peak is.
async function prepare(raw) {
  const t = { ...raw, n: raw.events, blocks: await columns(raw.blocks), segments: await columns(raw.segments) };
  t.bands = {};
  for (const [name, band] of Object.entries(raw.bands)) t.bands[name] = await columns(band);
  const { blocks, segments, n } = t, rounding = raw.groups.findIndex(g => g.name === 'rounding');
  t.sums = raw.groups.map(() => new Float64Array(n + 1));
  blocks.start.forEach((start, i) => {
    const change = (sums, bytes) => { sums[start] += bytes; sums[blocks.end[i]] -= bytes; };
    change(t.sums[blocks.group[i]], blocks.nbytes[i]);
    if (rounding >= 0) change(t.sums[rounding], blocks.size[i] - blocks.nbytes[i]);
  });
  t.reserved = new Float64Array(n + 1);
  segments.start.forEach((start, i) => {
    t.reserved[start] += segments.size[i];
    t.reserved[segments.end[i]] -= segments.size[i];
  });
  for (const sums of [...t.sums, t.reserved]) for (let k = 1; k <= n; k++) sums[k] += sums[k - 1];
  t.total = new Float64Array(n);
  for (const sums of t.sums) for (let k = 0; k < n; k++) t.total[k] += sums[k];
  t.chunks = new Float64Array(Math.ceil(n / CHUNK));          // the largest total of each stretch
  for (let k = 0; k < n; k++) t.chunks[k / CHUNK | 0] = Math.max(t.chunks[k / CHUNK | 0], t.total[k]);
  t.peak = highest(t, 0, n);
  t.order = Array.from(blocks.start.keys()).sort((a, b) => blocks.group[a] - blocks.group[b]);
  place(t);
  return t;
}

// Addresses without the gaps between segments: every block gets an offset from the bottom of the picture.
function place(t) {
  const { blocks, segments } = t;
  const from = segments.start.length ? segments : blocks;
  const spans = Array.from(from.start.keys(), i => [from.address[i], from.address[i] + from.size[i]])
    .filter(([low]) => low >= 0).sort((a, b) => a[0] - b[0]);
  const regions = [];
  for (const [low, high] of spans) {
    const last = regions[regions.length - 1];
    if (last && low <= last.high) last.high = Math.max(last.high, high);
    else regions.push({ low, high });
  }
  t.extent = 0;
  for (const region of regions) { region.offset = t.extent; t.extent += region.high - region.low; }
  const offset = address => {
    let a = 0, b = regions.length;
    while (a < b) { const m = a + b >> 1; if (regions[m].low <= address) a = m + 1; else b = m; }
    const region = regions[a - 1];
    return region && address < region.high ? address - region.low + region.offset : -1;
  };
  blocks.offset = Float64Array.from(blocks.address, offset);
  t.segmentOffset = Float64Array.from(segments.address, offset);
}

// The event with the largest total among low … high − 1: no column of pixels loses a peak.
function highest(t, low, high) {
  let best = low;
  for (let k = low; k < high;) {
    const c = k / CHUNK | 0;
    if (k % CHUNK === 0 && k + CHUNK <= high && t.chunks[c] <= t.total[best]) { k += CHUNK; continue; }
    if (t.total[k] > t.total[best]) best = k;
    k++;
  }
  return best;
}

// ---------------------------------------------------------------- words and colours

// As Python writes them; on an axis without the zeros.
function bytes(n, decimals = 2) {
  const how = { minimumFractionDigits: decimals, maximumFractionDigits: 2 };
  for (const [unit, name] of [[2 ** 40, 'TiB'], [2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']])
    if (Math.abs(n) >= unit) return `${(n / unit).toLocaleString('en', how)} ${name}`;
  return `${n.toLocaleString('en')} B`;
}

const count = n => n.toLocaleString('en');

function rgb(colour) {
  const probe = document.createElement('canvas').getContext('2d');
  probe.fillStyle = colour;
  probe.fillRect(0, 0, 1, 1);
  return Array.from(probe.getImageData(0, 0, 1, 1).data.slice(0, 3));
}

// Relative luminance and contrast as WCAG 2 defines them.
function luminance(channels) {
  const [r, g, b] = channels.map(c => (c /= 255) <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
}
const contrast = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);

// On a dark ground a dark colour is mixed with white until it stands out.
function readable(colour, ground) {
  const channels = rgb(colour), below = luminance(ground);
  if (below > .4) return channels;
  for (let mix = 0; mix <= 1; mix += .05) {
    const lighter = channels.map(c => Math.round(c + (255 - c) * mix));
    if (contrast(luminance(lighter), below) >= 3.2) return lighter;
  }
  return channels;
}

function theme(root, groups) {
  const style = getComputedStyle(root), name = key => style.getPropertyValue(`--tl-${key}`).trim();
  const ground = rgb(name('ground'));
  root.dataset.dark = luminance(ground) < .4;
  const fills = groups.map(g => readable(g.colour, ground));
  return {
    ground: name('ground'), raised: name('raised'), ink: name('ink'), soft: name('soft'), line: name('line'),
    accent: name('accent'), limit: name('limit'), font: '12px system-ui, sans-serif',
    fills: fills.map(c => `rgb(${c})`),
    on: fills.map(c => luminance(c) > .179 ? '#000' : '#fff'),     // the better of the two: 4.5 : 1 at least
  };
}

function element(parent, tag, properties = {}, attributes = {}) {
  const made = Object.assign(document.createElement(tag), properties);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

// ---------------------------------------------------------------- the picture

export async function drawTimeline(root, payload, onSelect = () => {}) {
  const all = await Promise.all(payload.timelines.map(prepare));
  root.classList.add('elleci-timeline');
  root.replaceChildren();
  const s = { active: 0, view: 'areas', x0: 0, x1: all[0].n, y0: 0, y1: all[0].extent, at: all[0].peak, block: -1 };
  let t = all[0], other = all[1], colours, width = 0, pending = false;

  const heading = element(root, 'h2'), peakText = element(root, 'p', { className: 'tl-peak' });
  const tools = element(root, 'div', { className: 'tl-tools' }, { role: 'toolbar', 'aria-label': 'Timeline' });
  const grid = element(root, 'div', { className: 'tl-columns' });
  const left = element(grid, 'div'), right = element(grid, 'div');
  const hintId = `tl-hint-${Math.random().toString(36).slice(2)}`;
  // An application: a screen reader hands it the keys that the hint names. What they find is told in words beside it.
  const canvas = element(left, 'canvas', { tabIndex: 0 },
    { role: 'application', 'aria-roledescription': 'memory timeline', 'aria-describedby': hintId });
  element(left, 'p', { className: 'tl-hint', id: hintId, textContent:
    'Drag or ← → to pan · wheel (after a click), + and − to zoom · shift for addresses · 0 whole · P peak · ' +
    'V other view · , and . one event · ↑ ↓ through the blocks alive' });
  const nowText = element(left, 'p', { className: 'tl-now' });
  const ribbon = element(left, 'canvas', {}, { role: 'img' });
  const table = element(right, 'table');
  const chosen = element(right, 'div', { className: 'tl-chosen' }, { 'aria-live': 'polite' });

  const buttons = {};
  function button(key, label, action) {
    buttons[key] = element(tools, 'button', { type: 'button', textContent: label, onclick: action });
  }
  button('areas', 'By category', () => show('areas'));
  button('blocks', 'By address', () => show('blocks'));
  element(tools, 'span', { className: 'tl-gap' });
  button('in', '+', () => zoom(.5));
  button('out', '−', () => zoom(2));
  button('whole', 'Whole', whole);
  button('peak', 'To the peak', toPeak);
  buttons.in.setAttribute('aria-label', 'Zoom in');
  buttons.out.setAttribute('aria-label', 'Zoom out');
  if (other) {
    element(tools, 'span', { className: 'tl-gap' });
    all.forEach((each, i) => button(`set${i}`, each.label, () => activate(i)));
  }

  // ------------------------------------------------------------ moving

  const redraw = () => { if (!pending) { pending = true; requestAnimationFrame(draw); } };
  const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

  function range(low, high) {
    const span = clamp(high - low, Math.min(8, t.n), t.n);
    s.x0 = clamp(low, 0, t.n - span);
    s.x1 = s.x0 + span;
    redraw();
  }
  function heights(low, high) {
    const span = clamp(high - low, Math.min(4096, t.extent), t.extent);
    s.y0 = clamp(low, 0, t.extent - span);
    s.y1 = s.y0 + span;
    redraw();
  }
  function zoom(factor, place = (s.at >= s.x0 && s.at < s.x1 ? s.at : (s.x0 + s.x1) / 2)) {
    range(place - (place - s.x0) * factor, place + (s.x1 - place) * factor);
  }
  function zoomHeights(factor, place = (s.y0 + s.y1) / 2) {
    heights(place - (place - s.y0) * factor, place + (s.y1 - place) * factor);
  }
  function whole() { range(0, t.n); heights(0, t.extent); }
  function toPeak() {
    const span = Math.min(s.x1 - s.x0, Math.max(t.n / 20, 200));
    moment(t.peak);
    range(t.peak - span / 2, t.peak + span / 2);
  }
  function show(view) { s.view = view; redraw(); }
  function activate(i) {
    const fraction = [s.x0 / t.n, s.x1 / t.n];
    s.active = i; t = all[i]; other = all[1 - i];
    s.block = -1; s.at = t.peak;
    restyle();
    range(fraction[0] * t.n, fraction[1] * t.n);
    heights(0, t.extent);
  }
  function moment(k) {
    s.at = clamp(Math.round(k), 0, t.n - 1);
    if (s.at < s.x0 || s.at >= s.x1) range(s.at - (s.x1 - s.x0) / 2, s.at + (s.x1 - s.x0) / 2);
    redraw();
  }
  function select(i) { s.block = i; onSelect(i); redraw(); }

  // ------------------------------------------------------------ finding

  const alive = k => Array.from(t.blocks.start.keys()).filter(i => t.blocks.start[i] <= k && k < t.blocks.end[i]);
  const eventAt = x => clamp(Math.floor(s.x0 + (x - GUTTER) / (width - GUTTER) * (s.x1 - s.x0)), 0, t.n - 1);
  const columnEvent = x => {                       // the event that a column of pixels shows
    const c = Math.max(Math.floor(x - GUTTER), 0), per = (s.x1 - s.x0) / (width - GUTTER);
    const low = clamp(Math.floor(s.x0 + c * per), 0, t.n - 1);
    return highest(t, low, clamp(Math.floor(s.x0 + (c + 1) * per), low + 1, t.n));
  };

  // A moment and the block that is seen at a point of the plot; −1 where there is none.
  function find(x, y) {
    const { blocks } = t, up = (PLOT - y) / PLOT;
    if (s.view === 'areas') {
      const k = columnEvent(x);
      let from = up * top(), group = 0;
      while (group < t.sums.length && from >= t.sums[group][k]) from -= t.sums[group++][k];
      if (group === t.sums.length) return [k, -1];
      for (const i of alive(k)) {
        if (blocks.group[i] !== group) continue;
        if (from < blocks.nbytes[i]) return [k, i];
        from -= blocks.nbytes[i];
      }
      return [k, -1];
    }
    const offset = s.y0 + up * (s.y1 - s.y0), per = (s.x1 - s.x0) / (width - GUTTER);
    const low = s.x0 + (x - GUTTER) * per, high = Math.max(low + per, Math.floor(low) + 1);
    let found = -1;
    for (let i = 0; i < blocks.start.length; i++) {
      const inside = blocks.offset[i] >= 0 && blocks.offset[i] <= offset && offset < blocks.offset[i] + blocks.size[i];
      if (inside && blocks.start[i] < high && blocks.end[i] > low && (found < 0 || blocks.size[i] > blocks.size[found]))
        found = i;
    }
    return [found < 0 ? eventAt(x) : clamp(eventAt(x), blocks.start[found], blocks.end[found] - 1), found];
  }

  // ------------------------------------------------------------ drawing

  const top = () => 1.06 * Math.max(t.total[t.peak], t.reserved.length ? maximum(t.reserved) : 0, t.limit || 0,
    other ? other.total[other.peak] : 0, 1);
  const maxima = new Map();
  function maximum(array) {
    if (!maxima.has(array)) maxima.set(array, array.reduce((a, b) => Math.max(a, b), 0));
    return maxima.get(array);
  }

  function prepareCanvas(target, height) {
    const ratio = window.devicePixelRatio || 1;
    if (target.width !== Math.round(width * ratio) || target.height !== Math.round(height * ratio)) {
      target.width = Math.round(width * ratio);
      target.height = Math.round(height * ratio);
      target.style.height = `${height}px`;
    }
    const g = target.getContext('2d');
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.fillStyle = colours.ground;
    g.fillRect(0, 0, width, height);
    g.font = colours.font;
    g.textBaseline = 'middle';
    return g;
  }

  function axis(g, low, high) {
    let step = 2 ** Math.ceil(Math.log2((high - low) / 7 || 1));
    g.textAlign = 'right';
    for (let y = Math.ceil(low / step) * step; y < high; y += step) {
      const at = PLOT - (y - low) / (high - low) * PLOT;
      g.fillStyle = colours.line;
      g.fillRect(GUTTER, Math.round(at), width - GUTTER, 1);
      g.fillStyle = colours.soft;
      if (at > 6) g.fillText(bytes(y, 0), GUTTER - 7, Math.min(at, PLOT - 6));
    }
    g.textAlign = 'left';
  }

  function drawAreas(g, w) {
    const high = top(), per = (s.x1 - s.x0) / w, scale = PLOT / high;
    axis(g, 0, high);
    const events = new Uint32Array(w), base = new Float64Array(w);
    for (let c = 0; c < w; c++) events[c] = columnEvent(GUTTER + c);
    t.sums.forEach((sums, group) => {
      g.fillStyle = colours.fills[group];
      let start = 0, low = 0, high = 0;         // of the columns that look alike so far, in whole pixels
      for (let c = 0; c <= w; c++) {
        let below = 0, above = 0;
        if (c < w) {
          below = Math.round(base[c]);
          above = Math.round(base[c] += sums[events[c]] * scale);
        }
        if (below === low && above === high) continue;
        if (high > low) g.fillRect(GUTTER + start, PLOT - high, c - start, high - low);
        [start, low, high] = [c, below, above];
      }
    });
    if (t.segments.start.length) {
      line(g, w, c => t.reserved[events[c]] * scale, colours.ink, 1.5);
      const peakAt = (t.peak - s.x0) / per;                    // its label stands near the peak's or this one's
      const c = w * (Math.abs(peakAt - w * .7) < 200 ? .2 : .7) | 0;
      note(g, 'reserved', GUTTER + c, PLOT - t.reserved[events[c]] * scale - 10, colours.ink, 'center');
    }
    if (other) {
      const ratio = other.n / t.n;
      line(g, w, c => {
        const low = clamp(Math.floor((s.x0 + c * per) * ratio), 0, other.n - 1);
        const until = clamp(Math.ceil((s.x0 + (c + 1) * per) * ratio), low + 1, other.n);
        return other.total[highest(other, low, until)] * scale;
      }, colours.ink, 2, [6, 4]);
    }
    if (t.limit) {
      const y = Math.round(PLOT - t.limit * scale);
      g.fillStyle = colours.limit;
      g.fillRect(GUTTER, y, w, 2);
      note(g, `the card: ${bytes(t.limit)}`, GUTTER + 8, y + 13, colours.limit, 'left');
    }
    markPeak(g, w, PLOT - t.total[t.peak] * scale);
  }

  // A triangle whose tip is at height y, where most is alive.
  function markPeak(g, w, y) {
    if (t.peak < s.x0 || t.peak >= s.x1) return;
    const x = GUTTER + (t.peak + .5 - s.x0) / (s.x1 - s.x0) * w;
    g.fillStyle = colours.ink;
    g.strokeStyle = colours.ground;
    g.lineWidth = 2;
    g.beginPath();
    g.moveTo(x, y - 1); g.lineTo(x - 6, y - 11); g.lineTo(x + 6, y - 11);
    g.closePath();
    g.stroke();
    g.fill();
    const align = x > width - 150 ? 'right' : 'left';
    note(g, `peak ${bytes(t.total[t.peak])}`, x + (align === 'left' ? 10 : -10), y - 12, colours.ink, align);
  }

  function line(g, w, value, colour, thickness, dashes = []) {
    g.beginPath();
    for (let c = 0; c < w; c++) g.lineTo(GUTTER + c, PLOT - value(c));
    g.setLineDash(dashes);
    g.strokeStyle = colours.ground;
    g.lineWidth = thickness + 2;
    if (dashes.length) g.stroke();
    g.strokeStyle = colour;
    g.lineWidth = thickness;
    g.stroke();
    g.setLineDash([]);
  }

  function note(g, text, x, y, colour, align) {
    g.textAlign = align;
    g.lineWidth = 4;
    g.strokeStyle = colours.ground;
    g.strokeText(text, x, y);
    g.fillStyle = colour;
    g.fillText(text, x, y);
    g.textAlign = 'left';
  }

  function drawBlocks(g, w) {
    axis(g, s.y0, s.y1);
    const { blocks } = t, across = w / (s.x1 - s.x0), up = PLOT / (s.y1 - s.y0);
    const seen = new Uint8Array((w + 1) * PLOT);  // pixels under narrow blocks: one in front is enough
    const labels = [];
    let group = -1;
    g.save();
    g.beginPath();
    g.rect(GUTTER, 0, w, PLOT);
    g.clip();
    for (const i of t.order) {
      const offset = blocks.offset[i];
      if (offset < 0 || blocks.end[i] <= s.x0 || blocks.start[i] >= s.x1) continue;
      if (offset + blocks.size[i] <= s.y0 || offset >= s.y1) continue;
      const x = Math.round(Math.max((blocks.start[i] - s.x0) * across, 0));
      const boxWidth = Math.max(Math.round(Math.min((blocks.end[i] - s.x0) * across, w)) - x, 1);
      const bottom = (offset - s.y0) * up, h = blocks.size[i] * up;
      // Whole pixels are drawn several times as fast.
      const low = Math.round(PLOT - bottom), high = Math.min(Math.round(PLOT - bottom - h), low - 1);
      if (boxWidth < 3) {
        let hidden = true;
        for (let y = Math.max(high, 0); y < Math.min(low, PLOT); y++) {
          if (!seen[x * PLOT + y]) hidden = false;
          seen[x * PLOT + y] = 1;
        }
        if (hidden) continue;
      }
      if (blocks.group[i] !== group) g.fillStyle = colours.fills[group = blocks.group[i]];
      const inset = boxWidth > 5 && low - high > 5 ? 1 : 0;
      g.fillRect(GUTTER + x, high + inset, boxWidth - inset, low - high - inset);
      if (boxWidth > 110 && h > 17) labels.push([i, x, Math.min(bottom + h, PLOT), Math.max(bottom, 0), boxWidth]);
    }
    for (const [i, x, high, low, boxWidth] of labels) {
      if (high - low < 16) continue;
      g.fillStyle = colours.on[blocks.group[i]];
      g.fillText(fit(g, `${bytes(blocks.nbytes[i])}  ${name(i)}`, boxWidth - 12), GUTTER + x + 6, PLOT - (high + low) / 2);
    }
    if (s.block >= 0) outline(g, across, up);
    g.restore();
    markPeak(g, w, 20);
  }

  function outline(g, across, up) {
    const { blocks } = t, i = s.block, offset = blocks.offset[i];
    g.strokeStyle = colours.ink;
    g.lineWidth = 2;
    const x = GUTTER + (blocks.start[i] - s.x0) * across, h = blocks.size[i] * up;
    g.strokeRect(x - 1, PLOT - (offset - s.y0) * up - h - 1, Math.max((blocks.end[i] - blocks.start[i]) * across, 1) + 2, h + 2);
  }

  const name = i => t.strings[t.blocks.layer[i]] || t.strings[t.blocks.op[i]];

  function fit(g, text, room) {
    if (g.measureText(text).width <= room) return text;
    let n = text.length;
    while (n > 1 && g.measureText(`${text.slice(0, n)}…`).width > room) n = n * .85 | 0;
    return `${text.slice(0, n)}…`;
  }

  function drawBands(g, w) {
    const across = w / (s.x1 - s.x0);
    Object.entries(t.bands).forEach(([lane, band], row) => {
      const y = PLOT + 8 + row * LANE;
      g.fillStyle = colours.soft;
      g.fillText(lane, 8, y + LANE / 2 - 1);
      let covered = -1;
      for (let i = 0; i < band.start.length; i++) {
        const end = i + 1 < band.start.length ? band.start[i + 1] : t.n;
        if (end <= s.x0 || band.start[i] >= s.x1) continue;
        const x = Math.max((band.start[i] - s.x0) * across, 0), right = Math.min((end - s.x0) * across, w);
        if (right - x < 1 && (right | 0) === covered) continue;
        covered = right | 0;
        g.fillStyle = i % 2 ? colours.raised : colours.line;
        g.fillRect(GUTTER + x, y, Math.max(right - x, 1), LANE - 3);
        if (right - x < 34) continue;
        g.fillStyle = colours.ink;
        g.fillText(fit(g, t.strings[band.name[i]] || '–', right - x - 10), GUTTER + x + 5, y + LANE / 2 - 1);
      }
    });
  }

  // The segments at one moment, end to end and broken into rows like a text; holes are hatched.
  function drawRibbon() {
    const g = prepareCanvas(ribbon, t.segments.start.length ? RIBBON : 1), { segments, blocks } = t;
    const here = Array.from(segments.start.keys()).filter(i => segments.start[i] <= s.at && s.at < segments.end[i]);
    here.sort((a, b) => segments.address[a] - segments.address[b]);
    const held = t.reserved[s.at], perRow = held / ROWS || 1;
    const living = alive(s.at).filter(i => blocks.offset[i] >= 0);
    living.sort((a, b) => blocks.address[a] - blocks.address[b]);
    s.pieces = [];
    let from = 0, next = 0, largest = 0, used = 0;
    const piece = (low, high, block, segment) => {
      if (high > low) s.pieces.push({ low, high, block, segment });
      if (block < 0) largest = Math.max(largest, high - low); else used += high - low;
    };
    for (const i of here) {
      const start = segments.address[i], end = start + segments.size[i];
      let at = start;
      while (next < living.length && blocks.address[living[next]] < end) {
        const block = living[next], low = Math.max(blocks.address[block], at);
        const high = Math.min(blocks.address[block] + blocks.size[block], end);
        piece(from + at - start, from + low - start, -1, i);
        piece(from + low - start, from + high - start, block, i);
        at = high;
        if (blocks.address[block] + blocks.size[block] <= end) next++; else break;
      }
      piece(from + at - start, from + segments.size[i], -1, i);
      from += segments.size[i];
    }
    const hatch = hatching(g), scale = width / perRow;
    for (const { low, high, block } of s.pieces) for (let row = low / perRow | 0; row * perRow < high && row < ROWS; row++) {
      const a = Math.max(low - row * perRow, 0) * scale, b = Math.min(high - row * perRow, perRow) * scale;
      g.fillStyle = block < 0 ? hatch : colours.fills[blocks.group[block]];
      g.fillRect(a, row * ROW, Math.max(b - a - (b - a > 4 ? 1 : 0), .5), ROW - 4);
      if (block !== s.block || block < 0) continue;
      g.strokeStyle = colours.ink;
      g.lineWidth = 2;
      g.strokeRect(a + 1, row * ROW + 1, Math.max(b - a - 2, 1), ROW - 6);
    }
    g.fillStyle = colours.ink;
    let edge = 0;
    for (const i of here) {                       // a tick where a segment begins
      const row = Math.min(edge / perRow | 0, ROWS - 1);
      g.fillRect((edge - row * perRow) * scale, row * ROW - 2, 1.5, ROW);
      edge += segments.size[i];
    }
    const what = here.length ? `${count(here.length)} segments hold ${bytes(held)}: ${bytes(used)} in blocks, ` +
      `${bytes(held - used)} in holes, the largest ${bytes(largest)}` : `${bytes(t.total[s.at])} in blocks`;
    nowText.textContent = `After event ${count(s.at)}: ${what}`;
    ribbon.setAttribute('aria-label', nowText.textContent);
  }

  function hatching(g) {
    const tile = document.createElement('canvas');
    tile.width = tile.height = 7;
    const h = tile.getContext('2d');
    h.fillStyle = colours.raised;
    h.fillRect(0, 0, 7, 7);
    h.strokeStyle = colours.soft;
    h.globalAlpha = .55;
    h.beginPath();
    for (const d of [-7, 0, 7]) { h.moveTo(d, 7); h.lineTo(d + 7, 0); }
    h.stroke();
    return g.createPattern(tile, 'repeat');
  }

  function draw() {
    pending = false;
    if (!width) return;
    const g = prepareCanvas(canvas, PLOT + Object.keys(t.bands).length * LANE + 10), w = Math.floor(width - GUTTER);
    if (s.view === 'areas') drawAreas(g, w); else drawBlocks(g, w);
    drawBands(g, w);
    const x = GUTTER + (s.at + .5 - s.x0) / (s.x1 - s.x0) * w;
    if (x >= GUTTER && x <= width) {
      g.fillStyle = colours.accent;
      g.fillRect(Math.round(x) - .5, 0, 1.5, PLOT);
    }
    if (s.drawnAt !== s.at || s.drawnBlock !== s.block || s.drawnFor !== t) { drawRibbon(); fillTable(); describe(); }
    s.drawnAt = s.at; s.drawnBlock = s.block; s.drawnFor = t;
    for (const view of ['areas', 'blocks']) buttons[view].setAttribute('aria-pressed', s.view === view);
    if (other) all.forEach((_, i) => buttons[`set${i}`].setAttribute('aria-pressed', s.active === i));
    s.frames = (s.frames || 0) + 1;
  }

  // ------------------------------------------------------------ words beside the picture

  function fillTable() {
    table.replaceChildren();
    const head = element(element(table, 'thead'), 'tr');
    for (const label of ['', 'at the peak', 'here']) element(head, 'th', { textContent: label }, { scope: 'col' });
    const body = element(table, 'tbody');
    const row = (label, values, colour) => {
      const made = element(body, 'tr'), first = element(made, 'th', {}, { scope: 'row' });
      if (colour) element(first, 'span', { className: 'tl-swatch' }).style.background = colour;
      first.append(label);
      for (const value of values) element(made, 'td', { textContent: bytes(value) });
    };
    for (let i = t.groups.length - 1; i >= 0; i--)
      if (maximum(t.sums[i]) > 0) row(t.groups[i].name, [t.sums[i][t.peak], t.sums[i][s.at]], colours.fills[i]);
    row('in all', [t.total[t.peak], t.total[s.at]]);
    if (t.segments.start.length) row('reserved', [t.reserved[t.peak], t.reserved[s.at]]);
  }

  function describe() {
    chosen.replaceChildren();
    const i = s.block, { blocks, strings } = t;
    if (i < 0) {
      element(chosen, 'span', { textContent: 'Point at a block, or click it: its size, operator and lifetime appear here.' });
      return;
    }
    const forever = blocks.end[i] >= t.n;
    element(chosen, 'b', { textContent: `${bytes(blocks.nbytes[i])} of ${t.groups[blocks.group[i]].name}` });
    const list = element(chosen, 'dl'), rows = {
      operator: strings[blocks.op[i]], 'source line': strings[blocks.line[i]], layer: strings[blocks.layer[i]],
      phase: strings[blocks.phase[i]], step: t.bands.step ? count(blocks.step[i] + 1) : '',
      alive: `from event ${count(blocks.start[i])} ${forever ? 'to the end' : `to ${count(blocks.end[i])}`} ` +
        `(${count(blocks.end[i] - blocks.start[i])} events)`,
      address: blocks.address[i] < 0 ? '' : `0x${blocks.address[i].toString(16)}`,
      block: blocks.size[i] === blocks.nbytes[i] ? '' : `${bytes(blocks.size[i])}, after rounding`,
    };
    for (const [term, text] of Object.entries(rows)) if (text) {
      element(list, 'dt', { textContent: term });
      element(list, 'dd', { textContent: text });
    }
  }

  function restyle() {
    colours = theme(root, t.groups);
    heading.textContent = t.title;
    const at = t.blocks.start.length ? `${count(t.blocks.start.length)} blocks, ${count(t.n)} events` : 'nothing';
    const beyond = t.limit ? ` of ${bytes(t.limit)}` : '';
    peakText.textContent = `Peak ${bytes(t.total[t.peak])}, ` +
      (t.segments.start.length ? `reserved ${bytes(maximum(t.reserved))}${beyond}; ` : '') + at +
      (other ? `; dashed: ${other.label}, peak ${bytes(other.total[other.peak])}` : '');
    canvas.setAttribute('aria-label', `Memory over time. ${peakText.textContent}. The table beside it has the categories.`);
    s.drawnFor = null;
    redraw();
  }

  // ------------------------------------------------------------ hands

  let drag = null, pinned = false;
  const place2 = e => { const box = canvas.getBoundingClientRect(); return [e.clientX - box.left, e.clientY - box.top]; };
  canvas.addEventListener('pointerdown', e => {
    canvas.focus({ preventScroll: true });
    canvas.setPointerCapture(e.pointerId);
    const [x, y] = place2(e);
    drag = { x, y, x0: s.x0, x1: s.x1, y0: s.y0, y1: s.y1, moved: false };
  });
  canvas.addEventListener('pointermove', e => {
    const [x, y] = place2(e);
    if (!drag) {
      if (pinned || x < GUTTER || y > PLOT) return;
      const [k, i] = find(x, y);
      s.at = k;
      if (i !== s.block) select(i); else redraw();
      return;
    }
    if (Math.hypot(x - drag.x, y - drag.y) > 3) drag.moved = true;
    if (!drag.moved) return;
    const shift = (drag.x - x) / (width - GUTTER) * (drag.x1 - drag.x0);
    range(drag.x0 + shift, drag.x1 + shift);
    const lift = (y - drag.y) / PLOT * (drag.y1 - drag.y0);
    if (s.view === 'blocks') heights(drag.y0 + lift, drag.y1 + lift);
  });
  canvas.addEventListener('pointerup', e => {
    const [x, y] = place2(e), clicked = drag && !drag.moved && x >= GUTTER && y <= PLOT;
    drag = null;
    if (!clicked) return;
    const [k, i] = find(x, y);
    s.at = k;
    pinned = i >= 0 && !(pinned && i === s.block);   // a second click lets go
    select(i);
  });
  canvas.addEventListener('pointercancel', () => { drag = null; });
  canvas.addEventListener('wheel', e => {
    if (document.activeElement !== canvas && canvas.getRootNode().activeElement !== canvas && !e.ctrlKey) return;
    e.preventDefault();
    const [x, y] = place2(e), factor = 1.0016 ** (e.deltaY || e.deltaX);
    if (e.shiftKey && s.view === 'blocks') zoomHeights(factor, s.y0 + (PLOT - y) / PLOT * (s.y1 - s.y0));
    else zoom(factor, s.x0 + (x - GUTTER) / (width - GUTTER) * (s.x1 - s.x0));
  }, { passive: false });
  ribbon.addEventListener('pointerdown', e => {
    const box = ribbon.getBoundingClientRect(), perRow = t.reserved[s.at] / ROWS;
    const at = Math.floor((e.clientY - box.top) / ROW) * perRow + (e.clientX - box.left) / width * perRow;
    const found = s.pieces.find(piece => piece.low <= at && at < piece.high);
    pinned = Boolean(found && found.block >= 0);
    select(found ? found.block : -1);
  });

  function throughBlocks(direction) {
    const here = alive(s.at).sort((a, b) => t.blocks.nbytes[b] - t.blocks.nbytes[a] || a - b);
    if (!here.length) return;
    const now = here.indexOf(s.block);
    pinned = true;
    select(here[now < 0 ? 0 : clamp(now + direction, 0, here.length - 1)]);
  }
  const keys = {
    ArrowLeft: () => range(s.x0 - (s.x1 - s.x0) / 8, s.x1 - (s.x1 - s.x0) / 8),
    ArrowRight: () => range(s.x0 + (s.x1 - s.x0) / 8, s.x1 + (s.x1 - s.x0) / 8),
    ArrowUp: e => e.shiftKey ? heights(s.y0 + (s.y1 - s.y0) / 8, s.y1 + (s.y1 - s.y0) / 8) : throughBlocks(-1),
    ArrowDown: e => e.shiftKey ? heights(s.y0 - (s.y1 - s.y0) / 8, s.y1 - (s.y1 - s.y0) / 8) : throughBlocks(1),
    '+': () => zoom(.6), '=': () => zoom(.6), '-': () => zoom(1 / .6), '−': () => zoom(1 / .6),
    '*': () => zoomHeights(.6), _: () => zoomHeights(1 / .6),
    0: whole, Home: whole, p: toPeak, v: () => show(s.view === 'areas' ? 'blocks' : 'areas'),
    ',': () => moment(s.at - 1), '.': () => moment(s.at + 1),
    Escape: () => { pinned = false; select(-1); },
  };
  canvas.addEventListener('keydown', e => {
    const action = keys[e.key] || keys[e.key.toLowerCase()];
    if (!action || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    e.stopPropagation();
    action(e);
  });

  // ------------------------------------------------------------ the host

  const resized = new ResizeObserver(() => {
    width = Math.floor(left.clientWidth);
    s.drawnFor = null;
    redraw();
  });
  const dark = matchMedia('(prefers-color-scheme: dark)'), themed = new MutationObserver(restyle);
  resized.observe(left);
  dark.addEventListener('change', restyle);
  // What JupyterLab and VS Code change when their theme changes.
  themed.observe(document.body, { attributes: true, attributeFilter: ['data-jp-theme-name', 'data-jp-theme-light', 'class'] });
  restyle();
  root.timeline = { state: s, all, find, draw, current: () => t, colours: () => colours, restyle, contrast, luminance, rgb };
  return () => {
    resized.disconnect();
    themed.disconnect();
    dark.removeEventListener('change', restyle);
  };
}

// What anywidget calls.
export default {
  render({ model, el }) {
    let close = () => {};
    const root = element(el, 'div');
    const start = async () => {
      close();
      close = await drawTimeline(root, JSON.parse(model.get('facts')), i => {
        model.set('selected', i);
        model.save_changes();
      });
    };
    model.on('change:facts', start);
    start();
    return () => close();
  },
};
