"""Renews the lower part of constraints.txt: the version of everything that our direct requirements bring
along.

    make lock

The upper part, down to the line that begins with `# Everything`, holds the direct requirements and is
written by hand.
"""
import re, subprocess, sys, tempfile
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BORDER = '# Everything that these bring along, by `make lock`; not for hands.'
# torch pins the CUDA packages of its own build, and another build needs others
OF_TORCH = re.compile(r'(torch|triton|nvidia-.*|cuda-.*)==')

def requirements():
    "What settings.ini asks for, with all extras"
    ini = ConfigParser(delimiters=['='])
    ini.read(ROOT/'settings.ini', encoding='utf-8')
    # mamba-ssm is built without its own requirements, see below
    named = [k for k in ini['DEFAULT'] if k.endswith('requirements') and k != 'mamba_requirements']
    return [r for k in named for r in ini['DEFAULT'][k].split()]

def resolved(direct):
    "Lines of `name==version`, with a marker where versions differ, for Python 3.11 and newer on any system"
    with tempfile.TemporaryDirectory() as tmp:
        wanted = Path(tmp)/'wanted.in'
        wanted.write_text('\n'.join(requirements() + direct) + '\n', encoding='utf-8')
        uv = [
            sys.executable,
            '-m',
            'uv',
            'pip',
            'compile',
            '--universal',
            '--python-version',
            '3.11',
            '--no-config',
            '--no-header',
            '--no-annotate',
            '--no-emit-index-url',
            '--no-emit-find-links',
            '--quiet',
            wanted,
        ]
        return subprocess.run(uv, check=True, stdout=subprocess.PIPE, text=True, cwd=tmp).stdout.splitlines()

def lower(lines, direct):
    "What to write: without direct requirements, and without markers where one version is right everywhere"
    names = [line.split('==')[0] for line in lines]
    own = {line.split('==')[0] for line in direct}
    for name, line in zip(names, lines):
        if name not in own and not OF_TORCH.match(line):
            yield line if names.count(name) > 1 else line.split(' ;')[0]

def main():
    path = ROOT/'constraints.txt'
    upper = path.read_text(encoding='utf-8').split(BORDER)[0].rstrip()
    direct = [line for line in upper.splitlines() if line and not line.startswith('#')]
    # mamba-ssm is built without its own requirements (Makefile), most of which this project has no use for
    lines = resolved([line for line in direct if not line.startswith('mamba-ssm')])
    path.write_text('\n'.join([upper, '', BORDER, *lower(lines, direct)]) + '\n', encoding='utf-8')

if __name__ == '__main__': main()
