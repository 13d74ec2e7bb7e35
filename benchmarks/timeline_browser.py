"""How long the timeline of the 1.5B step takes in a browser: data/results/timeline_browser-<commit>.json.

    python benchmarks/timeline_browser.py [--repeats N]

Every block of elleci-1b5-12gib's step, as `write_timeline_html` writes it, in Chromium without a GPU: from
the start of loading to the first picture, and frames a second while it's dragged, zoomed in by two, in both
views and both themes. Needs playwright and a Chromium (Debian: `apt install chromium`).
"""
import argparse, datetime, json, os, shutil, statistics, tempfile, time
from pathlib import Path
import torch
from elleci.config import preset
from elleci.core import GiB, atomic_write
from elleci.memory.timeline import as_timeline, write_timeline_html
from elleci.planning.account import account
from tiny import ROOT, commit, hardware

FIRST_PAINT = '''
const look = () => {
  const drawn = document.querySelector('.elleci-timeline')?.timeline?.state.frames > 0;
  if (drawn) window.firstPaint = performance.now();
  else requestAnimationFrame(look);
};
look();
'''
FRAMES = '() => document.querySelector(".elleci-timeline").timeline.state.frames'

def pan(page, view, moves=120):
    "Frames a second while the picture is dragged to and fro; milliseconds of main thread for a frame"
    page.get_by_role('button', name=view, exact=True).click()
    page.get_by_role('button', name='Whole', exact=True).click()
    page.get_by_label('Zoom in').click()
    box = page.locator('canvas').first.bounding_box()
    x, y = box['x'] + .5*box['width'], box['y'] + 200
    session = page.context.new_cdp_session(page)
    session.send('Performance.enable')
    def busy():
        metrics = session.send('Performance.getMetrics')['metrics']
        return next(m['value'] for m in metrics if m['name'] == 'TaskDuration')
    page.mouse.move(x, y)
    page.mouse.down()
    frames, spent, start = page.evaluate(FRAMES), busy(), time.perf_counter()
    for i in range(moves): page.mouse.move(x + (i % 60 - 30)*4, y)
    drawn = page.evaluate(FRAMES) - frames
    seconds, spent = time.perf_counter() - start, busy() - spent
    page.mouse.up()
    return drawn/seconds, 1e3*spent/max(drawn, 1)

def visit(browser, path, scheme):
    "One visit: seconds to the first picture, frames a second in both views"
    context = browser.new_context(viewport=dict(width=1400, height=900), color_scheme=scheme)
    page, outside = context.new_page(), []
    page.on('request', lambda r: r.url.startswith('file:') or outside.append(r.url))
    page.add_init_script(FIRST_PAINT)
    page.goto(path.as_uri())
    page.wait_for_function('() => window.firstPaint > 0', timeout=120_000)
    row = dict(scheme=scheme, first_paint_s=round(page.evaluate('firstPaint')/1e3, 3))
    for name, view in dict(areas='By category', blocks='By address').items():
        rate, ms = pan(page, view)
        row |= {f'{name}_frames_per_s': round(rate, 1), f'{name}_main_thread_ms': round(ms, 1)}
    assert not outside, outside
    context.close()
    return row

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--repeats', type=int, default=3)
    a = p.parse_args()
    from playwright.sync_api import sync_playwright
    config = preset('elleci-1b5-12gib')
    timeline = as_timeline(account(config.model, config.train, name=config.preset), limit=12*GiB)
    found = shutil.which('chromium') or shutil.which('google-chrome')
    flags = ['--no-sandbox', '--disable-gpu', '--disable-background-networking']
    rows = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder)/'step.html'
        write_timeline_html(path, timeline)
        browser = playwright.chromium.launch(args=flags, **dict(executable_path=found) if found else {})
        for _ in range(a.repeats):
            for scheme in ('light', 'dark'): rows.append(visit(browser, path, scheme))
        result = dict(
            hardware=hardware(), torch=torch.__version__, commit=commit(),
            browser=f'Chromium {browser.version}',
            load=round(os.getloadavg()[0], 1), blocks=len(timeline.blocks['start']), events=timeline.n_events,
            html_bytes=path.stat().st_size, rows=rows,
            date=datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d %H:%M UTC'),
        )
        browser.close()
    path = ROOT/'data'/'results'/f"timeline_browser-{result['commit']}.json"
    atomic_write(path, json.dumps(result, indent=1) + '\n')
    for key in rows[0]:
        if key != 'scheme':
            values = [row[key] for row in rows]
            print(f'{key}: median {statistics.median(values):g}, from {min(values):g} to {max(values):g}')
    print(f"{result['html_bytes']:,} bytes, load {result['load']}; written to {path.relative_to(ROOT)}")

if __name__ == '__main__': main()
