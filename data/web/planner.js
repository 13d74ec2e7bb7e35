// The planner: controls on the left, what they lead to on the right. The kernel computes; here a control that was
// moved is sent, and what comes back is drawn. While an answer is awaited, later positions wait and only the last is sent.

const ANSWER_MS = 2000;      // after which the next position is sent although nothing came back
const GONE_MS = 15000;       // after which the kernel is said to be gone

function valueText(value) { return value === true ? 'yes' : value === false ? 'no' : String(value); }

// The nearest stop of a slider; the present value is a stop of its own, so that the slider can stand on it.
function stopsWith(options, value) {
  if (options.includes(value)) return options;
  return [...options, value].sort((a, b) => a - b);
}

async function copyText(text, root) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element('textarea', { 'aria-hidden': true });
    area.value = text;
    root.append(area);
    area.select();
    const done = document.execCommand('copy');
    area.remove();
    return done;
  }
}

// ---------------------------------------------------------------- one control

// Gives {root, set(value), mark({changed, disabled, sentence})}; `moved(value)` is called for what the hand does.
function makeControl(field, moved, back) {
  const id = `pl-${field.label}-${Math.random().toString(36).slice(2)}`;
  const inputs = element('div.pl-inputs'), sentence = element('div.pl-sentence', { role: 'alert', hidden: true });
  const was = element('div.pl-was', { hidden: true });
  const undo = element('button.pl-back', { type: 'button', 'aria-label': `${field.label}: back to the start`, title: 'back to the start', click: back }, '↺');
  const root = element('div.pl-row', { 'data-name': field.name, title: field.says }, element('label', { for: id }, field.label), inputs, undo, was, sentence);
  let nodes, set, stops = field.options, last;
  if (field.kind === 'number') {
    const slider = element('input', { type: 'range', min: 0, 'aria-label': `${field.label}, slider`, input: () => { number.value = stops[+slider.value]; say(); moved(stops[+slider.value]); } });
    const number = element('input.pl-number', { id, type: 'text', inputmode: 'decimal', autocomplete: 'off', change: () => moved(number.value.trim()), keydown: e => { if (e.key === 'Enter') moved(number.value.trim()); } });
    const say = () => slider.setAttribute('aria-valuetext', number.value);
    set = value => {
      if (document.activeElement !== slider || last === undefined) stops = stopsWith(field.options, value);
      slider.max = stops.length - 1;
      let at = stops.indexOf(value);
      if (at < 0) at = clamp(stops.findIndex(s => s >= value), 0, stops.length - 1);
      slider.value = at;
      number.value = value;
      say();
    };
    nodes = [slider, number];
  } else if (field.kind === 'choice') {
    const select = element('select', { id, change: () => moved(select.value) }, ...field.options.map(o => element('option', { value: o }, o)));
    set = value => {
      if (![...select.options].some(o => o.value === value)) select.append(element('option', { value }, value));
      select.value = value;
    };
    nodes = [select];
  } else if (field.kind === 'switch') {
    const box = element('input', { id, type: 'checkbox', change: () => moved(box.checked) });
    set = value => { box.checked = value; };
    nodes = [box];
  } else {
    const text = element('input.pl-text', { id, type: 'text', autocomplete: 'off', spellcheck: false, change: () => moved(text.value.trim()), keydown: e => { if (e.key === 'Enter') moved(text.value.trim()); } });
    set = value => { text.value = value; };
    nodes = [text];
  }
  inputs.append(...nodes);
  const described = `${id}-why`;
  const why = element('span.ev-unseen', { id: described });
  root.append(why);
  for (const node of nodes) node.setAttribute('aria-describedby', described);
  return {
    root, field,
    set(value) { if (value !== undefined && value !== null) { set(value); last = value; } },
    mark({ changed, disabled, problem, about }) {
      root.dataset.changed = changed !== undefined;
      root.dataset.disabled = !!disabled;
      root.dataset.bad = !!(problem || about);
      root.title = disabled || field.says;
      setText(why, disabled ? `Does not apply. ${disabled}` : field.says);
      for (const node of nodes) node.disabled = !!disabled;
      undo.style.visibility = changed === undefined ? 'hidden' : '';
      was.hidden = changed === undefined;
      setText(was, changed === undefined ? '' : `at the start ${changed === 'True' ? 'yes' : changed === 'False' ? 'no' : changed || 'none'}`);
      sentence.hidden = !problem;
      setText(sentence, problem || '');
    },
  };
}

// ---------------------------------------------------------------- the page

function drawPlanner(root, model) {
  const form = model.get('facts'), client = Math.random().toString(36).slice(2);
  root.className = 'elleci-view elleci-planner';
  root.setAttribute('role', 'region');
  let theme = null, seq = 0, answered = 0, waitingSince = 0, pending = {}, closed = false, folderTyped = false, clock = 0;
  const times = [];

  // In command mode JupyterLab takes arrows and Enter before a focused element sees them, unless that element forbids it.
  function keepKeys() {
    const name = 'data-lm-suppress-shortcuts';
    for (const node of root.querySelectorAll('button, input, select, summary, textarea')) if (!node.hasAttribute(name)) node.setAttribute(name, 'true');
  }

  // ------------------------------------------------------------ words to the kernel

  function send(message) {
    waitingSince = performance.now();
    model.send({ ...message, client, seq: ++seq });
  }

  function moved(name, value) {
    pending[name] = value;
    flush();
  }

  function flush() {
    if (!Object.keys(pending).length) return;
    if (seq > answered && performance.now() - waitingSince < ANSWER_MS) return;
    const values = pending;
    pending = {};
    send({ kind: 'set', values });
  }

  // ------------------------------------------------------------ parts

  const start = element('select', { id: `pl-start-${client}`, change: () => send({ kind: 'start', label: start.value }) });
  const reset = element('button', { type: 'button', click: () => send({ kind: 'reset', name: null }) }, 'Back to the start');
  const fit = element('button', { type: 'button', title: 'search engine, batch, placements, optimizer and precision for the fastest step that the three budgets have room for', click: () => send({ kind: 'fit' }) }, 'Fastest that fits');
  const head = element('div.pl-head', {}, element('h2', {}, 'Plan a training'), element('label', { for: start.id }, 'start from', start), reset, fit);
  const gone = element('div.pl-gone', { role: 'status', hidden: true });

  const controls = {}, counts = {}, column = element('div.pl-controls');
  for (const group of [...new Set(form.fields.map(f => f.group))]) {
    const count = element('span.pl-count');
    const box = element('details', { open: true }, element('summary', {}, group, count));
    const more = element('details', {}, element('summary', {}, `more of the ${group.toLowerCase()}`));
    for (const field of form.fields.filter(f => f.group === group)) {
      const control = controls[field.name] = makeControl(field, value => moved(field.name, value), () => send({ kind: 'reset', name: field.name }));
      (field.main ? box : more).append(control.root);
    }
    if (more.children.length > 1) box.append(more);
    counts[group] = { count, more };
    column.append(box);
  }

  const verdict = element('div.pl-verdict', { role: 'status' }), source = element('div.pl-source'), tiles = element('dl.ev-tiles');
  const budgets = element('div'), legend = element('div'), advice = element('div.pl-advice'), changes = element('div.pl-changes');
  const said = element('span.ev-unseen', { role: 'status' });
  const copyButton = (label, text) => {
    const button = element('button', { type: 'button', click: async () => {
      const done = await copyText(text(), root);
      setText(said, done ? `${label}: copied` : 'The browser did not let us copy; mark the text and copy it.');
      if (!done) { setText(note, said.textContent); return; }
      button.textContent = 'Copied';
      setTimeout(() => { button.textContent = label; }, 1500);
    } }, label);
    return button;
  };
  const plan = () => model.get('plan') || {};
  const toml = copyButton('Copy as TOML', () => plan().toml), copyCommand = copyButton('Copy command', () => plan().command || trainCommand());
  const show = element('button', { type: 'button', 'aria-expanded': false, click: () => { area.hidden = !area.hidden; show.setAttribute('aria-expanded', !area.hidden); setText(show, area.hidden ? 'Show TOML' : 'Hide TOML'); } }, 'Show TOML');
  const trainButton = element('button', { type: 'button', 'aria-expanded': false, click: () => { train.hidden = !train.hidden; trainButton.setAttribute('aria-expanded', !train.hidden); } }, 'Train this …');
  const area = element('textarea', { readonly: true, hidden: true, 'aria-label': 'the configuration as TOML' });
  const command = element('code.pl-command', { 'aria-label': 'the command' });
  const folder = element('input', { id: `pl-folder-${client}`, type: 'text', spellcheck: false, autocomplete: 'off', input: () => { folderTyped = true; drawTrain(); } });
  const trainText = element('code.pl-command', { 'aria-label': 'the command that is started' });
  const write = element('button', { type: 'button', click: () => send({ kind: 'write', folder: folder.value.trim() }) }, 'Write the file only');
  const go = element('button', { type: 'button', click: () => send({ kind: 'train', folder: folder.value.trim() }) }, 'Write the file and start the training');
  const copyTrain = copyButton('Copy this command', () => trainCommand());
  const train = element('div.pl-train', { hidden: true }, element('label', { for: folder.id }, 'folder of the run'), folder, trainText,
    element('p', {}, 'The file is written beside the folder. The training is a process of its own: it goes on when this notebook is closed.'),
    element('div.pl-buttons', {}, go, write, copyTrain));
  const note = element('div.pl-note', { role: 'status' });
  const take = element('div.pl-take', {}, element('div.pl-buttons', {}, toml, copyCommand, show, trainButton, said), command, area, train, note);
  const figures = element('div.pl-figures', {}, verdict, source, tiles, budgets, legend, advice, changes, take);
  root.replaceChildren(head, gone, element('div.pl-columns', {}, column, figures));
  keepKeys();

  function quoted(text) { return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`; }
  function trainCommand() { return `elleci_train --config ${quoted(`${folder.value.trim()}.toml`)} --out ${quoted(folder.value.trim())}`; }

  function drawTrain() {
    setText(trainText, trainCommand());
    for (const button of [write, go, copyTrain]) button.disabled = !folder.value.trim();
  }

  function drawBudgets(bars) {
    while (budgets.children.length > bars.length) budgets.lastChild.remove();
    bars.forEach((bar, i) => {
      const box = budgets.children[i] || budgets.appendChild(element('div.pl-budget', {}, element('div'), element('div.pl-words')));
      drawBars(box.children[0], { rows: [bar], limit: bar.limit, limitLabel: 'limit' });
      box.children[0].querySelector('.ev-limit span')?.remove();
      box.children[0].style.paddingTop = '3px';
      setText(box.children[1], bar.parts.length ? bar.text : bar.text.replace(/^\S+ \S+/, 'nothing'));
      box.children[1].dataset.tone = bar.tone;
    });
  }

  function draw() {
    if (closed || !theme) return;
    const begun = performance.now(), p = plan();
    if (!p.values) return;
    gone.hidden = true;
    if (p.client === client && p.seq > answered) {
      times.push(performance.now() - waitingSince);
      answered = p.seq;
    }
    // What the hand has moved since is not moved back.
    const current = p.client !== client || p.seq >= seq;
    for (const [name, control] of Object.entries(controls)) {
      if (current && !(name in pending)) control.set(p.values[name]);
      const about = p.problem && name !== p.at && new RegExp(`\\b${control.field.label}\\b`).test(p.problem);
      control.mark({ changed: p.changed[name], disabled: p.disabled?.[name], problem: p.problem && name === p.at ? p.problem : '', about });
    }
    if (start.dataset.labels !== p.labels.join('\n')) {
      start.dataset.labels = p.labels.join('\n');
      start.replaceChildren(...p.labels.map(l => element('option', { value: l }, l)));
    }
    start.value = p.label;
    const names = Object.keys(p.changed);
    reset.disabled = !names.length;
    for (const [group, { count, more }] of Object.entries(counts)) {
      const mine = names.filter(n => controls[n].field.group === group);
      setText(count, mine.length ? `${mine.length} changed` : '');
      if (mine.some(n => !controls[n].field.main)) more.open = true;
    }
    changes.hidden = !names.length;
    changes.replaceChildren(names.length ? `changed from ${p.label}: ` : '', ...names.flatMap(n =>
      [element('code', {}, `${controls[n].field.label} ${p.changed[n].replace('True', 'yes').replace('False', 'no') || 'none'} → ${valueText(p.values[n]) || 'none'}`), ' ']));
    const works = !!p.bars;
    for (const node of [tiles, budgets, legend, source]) node.hidden = !works;
    setText(verdict, works ? p.verdict.text : p.problem);
    verdict.dataset.tone = works ? p.verdict.tone : 'bad';
    for (const button of [toml, copyCommand, show, trainButton, fit]) button.disabled = !works;
    advice.hidden = !works || !(p.suggestions.length || p.problem);
    if (!works) { train.hidden = true; area.hidden = true; command.hidden = true; setText(note, ''); return; }
    source.replaceChildren(p.source, p.waiting ? element('b', {}, ` · ${p.waiting}`) : '');
    drawTiles(tiles, p.tiles);
    p.tiles.forEach((tile, i) => { tiles.children[i].lastChild.dataset.tone = tile.delta || ''; });
    drawBudgets(p.bars);
    drawLegend(legend, p.legend);
    advice.replaceChildren(...(p.problem ? [element('div', { 'data-tone': 'bad' }, p.problem)] : []),
      ...(p.suggestions.length ? [element('h3', {}, 'What would fit')] : []),
      ...p.suggestions.map(({ text, values }) => element('div', {},
        Object.keys(values).length ? element('button', { type: 'button', 'aria-label': `apply: ${text}`, click: () => send({ kind: 'set', values }) }, 'Apply') : '', text)));
    command.hidden = false;
    setText(command, p.command || `${trainCommand()}    (the start has no name: write the file first)`);
    if (!folderTyped) folder.value = p.folder;
    drawTrain();
    if (area.value !== p.toml) area.value = p.toml;
    setText(note, p.note.text || '');
    note.dataset.tone = p.note.tone || '';
    keepKeys();
    flush();
    root.planner.drawTimes.push(performance.now() - begun);
  }

  root.planner = { plan, times, drawTimes: [], controls, contrast, get theme() { return theme; }, get settled() { return seq === answered && !plan().waiting; }, get seq() { return seq; } };
  const look = () => draw();
  model.on('change:plan', look);
  const endTheme = followTheme(root, colours => { theme = colours; draw(); });
  clock = setInterval(() => {
    flush();
    if (seq > answered && performance.now() - waitingSince > GONE_MS) {
      setText(gone, 'The kernel does not answer: it is busy, or it has ended. These are the last figures that it sent; run the cell again to go on.');
      gone.hidden = false;
    }
  }, 500);
  draw();
  return () => {
    closed = true;
    clearInterval(clock);
    model.off('change:plan', look);
    endTheme();
  };
}

export default {
  render({ model, el }) {
    const root = element('div');
    el.append(root);
    return drawPlanner(root, model);
  },
};
