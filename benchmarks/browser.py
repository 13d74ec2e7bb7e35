"""The run view in a browser: data/results/browser-<commit>.json.

    python benchmarks/browser.py [--rounds N]

JupyterLab and Chromium (with playwright) show a run of 50,000 steps that is made up. Measured, in
milliseconds: from running the cell to the first paint of all charts; what one refresh, one zoom and one
move of the smoothing slider take, all charts together. The processor time of the page's main thread is
given beside each (`…_busy`): a busy machine lengthens the wall clock much, the processor time little.
The load average of the machine before and after each round is recorded as well.
"""
import argparse, datetime, json, math, os, shutil, signal, socket, statistics, subprocess, sys, tempfile, time
import urllib.request
from pathlib import Path
from elleci.config import config_to_json, preset
from elleci.core import atomic_write
from tiny import ROOT, commit, hardware

STEPS = 50_000
CELL = "from elleci.dashboard.run_view import dashboard\ndashboard('long', every=.2)"

def step_line(i):
    loss = 2.2 + 8*math.exp(-i/8000) + .05*math.sin(i)
    figures = dict(loss=loss, grad_norm=.8 + .1*math.sin(7*i), lr=3e-5, tokens=65_536, seconds=24.)
    speed = dict(batch_size=4, seq_len=1024, tokens_per_s=2700 + 40*math.sin(3*i), mfu=.41)
    more = dict(memory_bytes=5_980_000_000, peak_bytes=5_700_000_000, joules=4000., eta_s=1.)
    return json.dumps(dict(step=i, time=1.7e9 + 24*i) | figures | speed | more) + '\n'

def val_line(i):
    loss = 2.35 + 8*math.exp(-i/8000)
    return json.dumps(dict(step=i, time=1.7e9 + 24*i, val_loss=loss, val_bpb=loss/3, ternary_zero=.31)) + '\n'

def prepare(work):
    "A run of 50,000 steps, a notebook, and JupyterLab's settings"
    (work/'long').mkdir()
    (work/'long'/'config.json').write_text(config_to_json(preset('elleci-1b5-12gib', steps=STEPS + 1000)))
    with open(work/'long'/'metrics.jsonl', 'w') as f:
        for i in range(1, STEPS + 1): f.write(step_line(i) + (val_line(i) if i % 500 == 0 else ''))
    cell = dict(cell_type='code', id='a', metadata={}, source=CELL, outputs=[], execution_count=None)
    kernel = dict(display_name='Python 3', language='python', name='python3')
    notebook = dict(cells=[cell], metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)
    (work/'look.ipynb').write_text(json.dumps(notebook))

def start_lab(work):
    "JupyterLab in a folder: its process and its address"
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    folders = {name: str(work/name) for name in ('JUPYTER_CONFIG_DIR', 'JUPYTER_RUNTIME_DIR', 'IPYTHONDIR')}
    options = ['--no-browser', '--allow-root', f'--port={port}', '--IdentityProvider.token=',
               '--LabApp.expose_app_in_browser=True', '--ServerApp.disable_check_xsrf=True']
    quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    command = [sys.executable, '-m', 'jupyter', 'lab', *options]
    process = subprocess.Popen(command, cwd=work, env=os.environ | folders, start_new_session=True, **quiet)
    url = f'http://127.0.0.1:{port}'
    for _ in range(600):
        try:
            if urllib.request.urlopen(f'{url}/api').status == 200: break
        except OSError: time.sleep(.2)
    return process, url

def processor_ms(session):
    "Milliseconds that the page's main thread has worked so far"
    metrics = {m['name']: m['value'] for m in session.send('Performance.getMetrics')['metrics']}
    return 1e3*metrics['ThreadTime'] if 'ThreadTime' in metrics else 1e3*metrics['TaskDuration']

VIEW = "document.querySelector('.elleci-run').runView"

def visit(browser, url, work):
    "One visit: milliseconds of each kind"
    page = browser.new_page(viewport=dict(width=1400, height=900))
    page.goto(f'{url}/lab/tree/look.ipynb')
    page.wait_for_selector('.jp-NotebookPanel .jp-CodeCell', timeout=300_000)
    idle = 'window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === "idle"'
    page.wait_for_function(idle, timeout=300_000)
    # Importing PyTorch is no part of the view.
    page.evaluate("""() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel
        .requestExecute({code: 'import elleci.dashboard.run_view'}).done.then(() => true)""")
    session = page.context.new_cdp_session(page)
    session.send('Performance.enable', dict(timeDomain='threadTicks'))
    busy = processor_ms(session)
    began = page.evaluate("""() => { const t = performance.now();
        window.jupyterapp.commands.execute('notebook:run-all-cells'); return t; }""")
    page.wait_for_function(f"document.querySelector('.elleci-run')?.runView?.painted > 0 && "
                           f"{VIEW}.store.runs[0].steps.n >= {STEPS}", timeout=120_000)
    found = dict(first_paint=page.evaluate(f'{VIEW}.painted') - began)
    found['first_paint_busy'] = processor_ms(session) - busy
    time.sleep(2)
    def timed(name, code):
        wall, busy = [], []
        for i in range(12):
            before = processor_ms(session)
            wall.append(page.evaluate(f"""async () => {{
                const v = {VIEW}, n = v.times.length;
                ({code})(v, {i});
                while (v.times.length === n) await new Promise(requestAnimationFrame);
                return v.times[n]; }}"""))
            busy.append(processor_ms(session) - before)
        found[name], found[f'{name}_busy'] = statistics.median(wall), statistics.median(busy)
    slider = "document.querySelector('.elleci-run input[type=range]')"
    timed('zoom', 'v => v.zoomTo([1000*Math.random(), 20000 + 1000*Math.random()])')
    timed('all', 'v => v.zoomTo(null)')
    changed = f"{slider}.dispatchEvent(new Event('input'));"
    timed('smoothing', f'(v, i) => {{ {slider}.value = 20 + i; {changed} }}')
    page.evaluate(f'() => {{ {slider}.value = 0; {changed} }}')
    time.sleep(1)
    refreshes, refreshes_busy, n = [], [], STEPS
    for i in range(8):
        seen, before = page.evaluate(f'{VIEW}.times.length'), processor_ms(session)
        with open(work/'long'/'metrics.jsonl', 'a') as f: f.write(step_line(n + 1 + i))
        arrived = f'{VIEW}.store.runs[0].steps.n >= {n + 1 + i} && {VIEW}.times.length > {seen}'
        page.wait_for_function(arrived, timeout=60_000)
        # The words come after the numbers: a second message, and a second, smaller drawing.
        time.sleep(.5)
        refreshes.append(sum(page.evaluate(f'{VIEW}.times.slice({seen})')))
        refreshes_busy.append(processor_ms(session) - before)
    found['refresh'], found['refresh_busy'] = map(statistics.median, (refreshes, refreshes_busy))
    page.close()
    return found

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--rounds', type=int, default=3)
    a = p.parse_args()
    from playwright.sync_api import sync_playwright
    measured = commit()
    names = ('chromium', 'chromium-browser', 'google-chrome')
    executable = next(filter(None, map(shutil.which, names)), None)
    options = ['--no-sandbox', '--disable-gpu', '--disable-background-networking']
    rounds, load = [], []
    for _ in range(a.rounds):
        with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
            work = Path(folder)
            prepare(work)
            lab, url = start_lab(work)
            browser = play.chromium.launch(executable_path=executable, args=options)
            try:
                before = os.getloadavg()[0]
                rounds.append(visit(browser, url, work))
                load.append((before, os.getloadavg()[0]))
                version = browser.version
                print({k: round(v) for k, v in rounds[-1].items()}, flush=True)
            finally:
                browser.close()
                os.killpg(lab.pid, signal.SIGTERM)
                lab.wait()
    now = datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC')
    result = dict(hardware=hardware(), commit=measured, date=now, chromium=version, steps=STEPS)
    result |= dict(cpus=os.cpu_count(), load_before_and_after_each=load, rounds=rounds)
    result['best_ms'] = {k: min(r[k] for r in rounds) for k in rounds[0]}
    path = ROOT/'data'/'results'/f"browser-{measured}.json"
    atomic_write(path, json.dumps(result, indent=1, ensure_ascii=False) + '\n')
    print(f'written to {path.relative_to(ROOT)}')

if __name__ == '__main__': main()
