"Packaging: everything it says comes from settings.ini, which nbdev reads too."
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

ini = ConfigParser(delimiters=['='])
ini.read(Path(__file__).parent/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
DEVELOPERS_NEED = 'notebook', 'data', 'track', 'hub', 'evaluate'
extras = {k: cfg[f'{k}_requirements'].split() for k in (*DEVELOPERS_NEED, 'gpu', 'mamba', 'dev')}
for k in DEVELOPERS_NEED: extras['dev'] += extras[k]

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    keywords=cfg['keywords'],
    long_description=(Path(__file__).parent/'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    author=cfg['author'],
    url=cfg['git_url'],
    license='Apache-2.0',
    license_files=['LICENSE', 'NOTICE'],
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg['requirements'].split(),
    extras_require=extras,
    # What stands in data/ (corpus, cloze, presets, recipes, cards, web) travels inside the package, as
    # elleci/resources, so that elleci_train works anywhere; `elleci.files.installed_file` finds it there too.
    packages=find_packages(include=['elleci', 'elleci.*']) + ['elleci.resources'],
    package_dir={'elleci.resources': 'data'},
    package_data={
        'elleci.resources': [
            '*.toml', '*/*.toml', '*/*.jsonl', '*/*.js', '*/*.css', '*/*.html', 'web/*.txt', 'corpus/*/*.txt',
        ],
    },
    include_package_data=False,
    entry_points={'console_scripts': cfg['console_scripts'].split(), 'nbdev': ['elleci=elleci._modidx:d']},
    # `pip install -e .` puts this folder on Python's path (mode compat). Otherwise setuptools would
    # leave a hook that comes last: in the folder above a clone, `import elleci` finds the clone's folder.
    options={'editable_wheel': {'mode': 'compat'}},
    zip_safe=False)
