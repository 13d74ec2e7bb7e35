"""JupyterLab's settings for `make lab`: what is saved is clean, and threads that have nothing to do sleep.

Opening, running and saving a notebook must not show up in `git diff` unless something was edited. So a save
cleans as `nbdev_clean` does, and a code cell whose source is that of the last commit keeps the outputs of
that commit: pictures and timings differ a little each time. To renew outputs on purpose:
`ELLECI_NEW_OUTPUTS=1 make lab`.

JupyterLab opens on the index. Its folder is the whole repository, so that links to data and to files beside
`nbs` open too, and a terminal starts where the commands of the README do.
"""
import json, os, subprocess
from pathlib import Path

def committed(path):
    "The notebook as it was last committed, as a dict; None where there is none"
    try: said = subprocess.run(['git', 'show', f'HEAD:./{path.name}'], cwd=path.parent, capture_output=True)
    except FileNotFoundError: return None              # no git here
    return None if said.returncode else json.loads(said.stdout)

def text(source):
    "Jupyter has a cell's source as one string, a file as a list of lines"
    return source if isinstance(source, str) else ''.join(source)

def keep_committed(notebook, before):
    "Give the cells of `notebook` whose source is as in `before` the outputs and the metadata from there"
    left = [c for c in before['cells'] if c['cell_type'] == 'code']
    for cell in notebook['cells']:
        if cell['cell_type'] != 'code': continue
        same = [c for c in left if text(c['source']) == text(cell['source'])]
        same = [c for c in same if c.get('id') == cell.get('id')] or same
        if not same: continue
        left.remove(same[0])
        cell['metadata'] = json.loads(json.dumps(same[0]['metadata']))
        cell['outputs'] = as_lab_has_them(same[0]['outputs'])

def as_lab_has_them(outputs):
    "A copy of a file's outputs with every text as one string"
    def joined(value):
        return ''.join(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else value
    outputs = json.loads(json.dumps(outputs))
    for o in outputs:
        if 'text' in o: o['text'] = joined(o['text'])
        if 'data' in o: o['data'] = {kind: joined(v) for kind, v in o['data'].items()}
    return outputs

def clean_on_save(model, path, contents_manager, **kwargs):
    "What Jupyter calls before it writes a file"
    if model['type'] != 'notebook' or model['content']['nbformat'] != 4: return
    from nbdev.clean import clean_nb
    notebook, where = model['content'], Path(contents_manager.root_dir)/path.strip('/')
    before = committed(where)
    if before is not None:
        notebook['metadata'] = json.loads(json.dumps(before['metadata']))
        if not os.environ.get('ELLECI_NEW_OUTPUTS'): keep_committed(notebook, before)
    clean_nb(notebook, allowed_cell_metadata_keys=['jupyter', 'slow', 'varies'])

if 'get_config' in globals():                          # read by Jupyter, not imported by a check
    from elleci.commands import idle_threads_sleep
    idle_threads_sleep(os.environ)
    c = get_config()                                   # noqa: F821
    c.FileContentsManager.pre_save_hook = clean_on_save
    c.LabApp.default_url = c.ServerApp.default_url = '/lab/tree/nbs/index.ipynb'
    # Nothing here goes to the network without being asked: neither for news nor for updates.
    c.LabApp.news_url = None
    c.LabApp.check_for_updates_class = 'jupyterlab.NeverCheckForUpdate'
