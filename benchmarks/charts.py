"""Which library draws the curves: four candidates in Chromium, 50,000 points each:
data/results/charts-<commit>.json.

    python -m pip install --no-deps --target candidates/plotly plotly      # likewise bokeh, altair
    (cd candidates && npm pack uplot vega vega-lite vega-embed && for f in *.tgz; do
        mkdir -p npm/${f%%-[0-9]*} && tar xzf $f -C npm/${f%%-[0-9]*}; done)
    python benchmarks/charts.py --candidates candidates

Every page gets its library from the disk and its points from a formula. `first paint` counts from the
page's beginning, so it includes reading the library; `update` is the main thread's time for one more
point, drawn. Nothing may be asked of the network: each request is recorded.
"""
import argparse, datetime, json, shutil, statistics, tempfile
from pathlib import Path
from elleci.core import atomic_write
from tiny import ROOT, commit, hardware

N = 50_000
POINTS = f"""
const N = {N}, x = new Float64Array(N), y = new Float64Array(N);
for (let i = 0; i < N; i++) {{
  x[i] = i;
  y[i] = 2 + 8*Math.exp(-i/4000) + .1*Math.sin(i*12.9898)*Math.cos(i*78.233);
}}
const host = document.getElementById('chart'), frame = () => new Promise(requestAnimationFrame);
"""
# How each draws, and how it takes one more point; `take(i)` resolves when it is drawn.
PAGES = {
    'uplot': ("""
const data = [Array.from(x), Array.from(y)];
const options = {width: 430, height: 240, scales: {x: {time: false}}, series: [{}, {stroke: '#33415c'}]};
const plot = new uPlot(options, data, host);
const take = async i => { data[0].push(i); data[1].push(2); plot.setData(data); };
""", ['npm/uplot/package/dist/uPlot.iife.min.js']),
    'plotly': ("""
await Plotly.newPlot(host, [{x: Array.from(x), y: Array.from(y), mode: 'lines', type: 'scattergl'}],
                     {width: 430, height: 240}, {displaylogo: false});
const take = i => Plotly.extendTraces(host, {x: [[i]], y: [[2]]}, [0]);
""", ['plotly/plotly/package_data/plotly.min.js']),
    'plotly, SVG': ("""
await Plotly.newPlot(host, [{x: Array.from(x), y: Array.from(y), mode: 'lines', type: 'scatter'}],
                     {width: 430, height: 240}, {displaylogo: false});
const take = i => Plotly.extendTraces(host, {x: [[i]], y: [[2]]}, [0]);
""", ['plotly/plotly/package_data/plotly.min.js']),
    'bokeh': ("""
const source = new Bokeh.ColumnDataSource({data: {x: Array.from(x), y: Array.from(y)}});
const plot = Bokeh.Plotting.figure({width: 430, height: 240});
plot.line({field: 'x'}, {field: 'y'}, {source});
await Bokeh.Plotting.show(plot, host);
const take = async i => { source.stream({x: [i], y: [2]}); await frame(); };
""", ['bokeh/bokeh/server/static/js/bokeh.min.js', 'bokeh/bokeh/server/static/js/bokeh-api.min.js']),
    'altair (vega-lite)': ("""
const values = Array.from(x, (a, i) => ({x: a, y: y[i]}));
const spec = {width: 380, height: 200, data: {name: 'd', values}, mark: 'line',
  encoding: {x: {field: 'x', type: 'quantitative'}, y: {field: 'y', type: 'quantitative'}}};
const view = (await vegaEmbed(host, spec, {renderer: 'canvas', actions: false})).view;
const take = i => view.insert('d', [{x: i, y: 2}]).runAsync();
""", ['npm/vega/package/build/vega.min.js', 'npm/vega-lite/package/build/vega-lite.min.js',
      'npm/vega-embed/package/build/vega-embed.min.js']),
}
# What is installed for Python besides what Elleci has anyway.
PYTHON_PARTS = {'plotly': 'plotly', 'plotly, SVG': 'plotly', 'bokeh': 'bokeh', 'altair (vega-lite)': 'altair'}
COUNT_ACCESSIBLE = """() => {
  const all = [...document.querySelectorAll('#chart *')];
  return {named: all.filter(e => e.hasAttribute('aria-label') || e.hasAttribute('role')).length,
          focusable: all.filter(e => e.tabIndex >= 0).length};
}"""

def write_page(folder, name, candidates):
    "The page of a candidate with its library inside, and how many bytes of script that is"
    body, scripts = PAGES[name]
    texts = [(candidates/script).read_text(encoding='utf-8') for script in scripts]
    inlined = ''.join('<script>' + text.replace('</script', '<\\/script') + '</script>' for text in texts)
    run = f"""<script type="module">{POINTS}{body}
await frame(); await frame();
window.firstPaint = performance.now();
const costs = [];
for (let i = 0; i < 12; i++) {{
  const start = performance.now();
  await take(N + i);
  if ({json.dumps(name)} === 'uplot') await Promise.resolve();
  host.getBoundingClientRect();
  costs.push(performance.now() - start);
  await frame();
}}
window.costs = costs;</script>"""
    page = folder/'page.html'
    head = '<!doctype html><meta charset="utf-8"><div id="chart"></div>'
    page.write_text(head + inlined + run, encoding='utf-8')
    return page, sum(map(len, texts))

def measure(browser, name, candidates, rounds):
    "What a candidate costs, the median of some visits"
    paints, updates = [], []
    outside, accessible = set(), {}
    with tempfile.TemporaryDirectory() as folder:
        path, script_bytes = write_page(Path(folder), name, candidates)
        for _ in range(rounds):
            page = browser.new_page()
            page.on('request', lambda r: r.url.startswith(('file:', 'data:', 'blob:')) or outside.add(r.url))
            page.goto(path.as_uri())
            page.wait_for_function('window.costs', timeout=120_000)
            paints.append(page.evaluate('window.firstPaint'))
            updates += page.evaluate('window.costs')[2:]
            accessible = page.evaluate(COUNT_ACCESSIBLE)
            page.close()
    installed = 0
    if name in PYTHON_PARTS:
        installed = sum(f.stat().st_size for f in (candidates/PYTHON_PARTS[name]).rglob('*') if f.is_file())
    return dict(
        first_paint_ms=statistics.median(paints),
        update_ms=statistics.median(updates),
        script_bytes=script_bytes,
        installed_bytes=installed or script_bytes,
        requests=sorted(outside),
        **accessible,
    )

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--candidates', type=Path, default=Path('candidates'))
    p.add_argument('--rounds', type=int, default=5)
    a = p.parse_args()
    from playwright.sync_api import sync_playwright
    measured = commit()
    names = ('chromium', 'chromium-browser', 'google-chrome')
    executable = next(filter(None, map(shutil.which, names)), None)
    options = ['--no-sandbox', '--disable-gpu', '--disable-background-networking']
    found = {}
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=executable, args=options)
        for name in PAGES:
            found[name] = measure(browser, name, a.candidates, a.rounds)
            shown = {k: round(v) if isinstance(v, float) else v for k, v in found[name].items()}
            print(f'{name:20}', shown, flush=True)
        version = browser.version
        browser.close()
    now = datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC')
    result = dict(hardware=hardware(), commit=measured, date=now, chromium=version, points=N)
    result['candidates'] = found
    path = ROOT/'data'/'results'/f"charts-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1, ensure_ascii=False) + '\n')
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
