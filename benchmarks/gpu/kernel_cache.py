"""Triton's cache of compiled kernels, as a folder that travels: filled for a card that is not there, moved to
where the card is.

Within `absent_card` a part runs at its real sizes on tensors without numbers; the kernels that it launches
are compiled, the C code that launches them too, and nothing is computed. Triton finds a kernel again by its
source, argument types, divisibility by 16 and options, the settings below and Triton's version. (By itself it
compares its own files too, and a Triton that was built elsewhere would compile all anew.)
"""
import contextlib, importlib, inspect, json, re, subprocess, types
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT/'.gpu_cache'
# The same where kernels are compiled and where they run. Without line numbers they are smaller.
SETTINGS = dict(TRITON_CACHE_DIR=str(CACHE), TRITON_STORE_BINARY_ONLY='1', TRITON_DISABLE_LINE_INFO='1',
                TRITON_MOCK_PTX_VERSION='any')

COUNTED = 'compiled', 'cached', 'launchers'

def settle(cache=CACHE):
    "Make the cache's absolute paths those of the folder where it lies, and leave out what runs no kernel"
    for source in cache.glob('*/*.source'): source.unlink()
    for group in cache.glob('*/__grp__*'):
        names = json.loads(group.read_text())['child_paths']
        here = {n: str(group.parent/n) for n in names if (group.parent/n).exists()}
        group.write_text(json.dumps(dict(child_paths=here)))

def count_compilations():
    "Use the cache; a dictionary that counts what this process compiles from now on"
    counts = dict.fromkeys(COUNTED, 0)
    triton, build = (importlib.import_module(name) for name in ('triton', 'triton.runtime.build'))
    importlib.import_module('triton.runtime.cache').triton_key = lambda: triton.__version__
    def on_kernel(*, cache_hit, **_): counts['cached' if cache_hit else 'compiled'] += 1
    def on_launcher(*args, real=build._build):
        counts['launchers'] += 1
        return real(*args)
    triton.knobs.compilation.listener, build._build = on_kernel, on_launcher
    return counts

def stub_libcuda(folder):
    "A library with the names of CUDA's driver, which launchers are linked with where there is no driver"
    driver = importlib.import_module('triton.backends.nvidia.driver')
    text = inspect.getsource(driver) + Path(driver.__file__).with_name('driver.c').read_text()
    names = sorted(set(re.findall(r'\bcu[A-Z]\w+(?=\s*\()', text)))
    source = Path(folder)/'stub.c'
    source.write_text('\n'.join(f'void {name}(void) {{}}' for name in names))
    library = Path(folder)/'libcuda.so.1'
    command = ['gcc', '-shared', '-fPIC', f'-Wl,-soname,{library.name}', '-o', library, source]
    subprocess.run(command, check=True)
    return folder

def compiling_driver(capability):
    "Triton's driver for that card: kernels and launchers go into the cache, none is loaded"
    compat = importlib.import_module('elleci.kernels.triton_compat')
    nvidia = importlib.import_module('triton.backends.nvidia.driver')
    build = importlib.import_module('triton.runtime.build')
    build._load_module_from_path = lambda *_: types.SimpleNamespace(launch=None)

    class Driver(compat.CompileOnlyDriver):
        def load_binary(self, *_): return None, None, 0, 0, 1024
        def launcher_cls(self, source, metadata):
            nvidia.CudaLauncher(source, metadata)
            return lambda *args, **kwargs: None

    nvidia.compile_module_from_src(
        src=Path(nvidia.__file__).with_name('driver.c').read_text(), name='cuda_utils',
        library_dirs=nvidia.library_dirs(), include_dirs=nvidia.include_dirs, libraries=nvidia.libraries,
    )
    return Driver(capability)

def compile_every_configuration():
    "Have kernels that tune themselves compile all their configurations, and measure none"
    tuner = importlib.import_module('triton.runtime.autotuner').Autotuner
    def run(self, *args, **kwargs):
        for config in self.configs:
            self.best_config = config
            # The tuner too skips a configuration that does not fit.
            with contextlib.suppress(Exception): self.fn.run(*args, **kwargs, **config.all_kwargs())
    tuner.run = run

def answers(torch):
    "(owner, name, what stands there): what a part may ask a card, or a tensor that has no numbers"
    GiB = 2**30
    properties = types.SimpleNamespace(name='absent', total_memory=80*GiB, multi_processor_count=132)
    def says(answer): return lambda *args, **kwargs: answer
    class Generator(torch.Generator):
        def __new__(cls, device='cpu'): return super().__new__(cls)
    graph = mock.MagicMock(name='CUDAGraph')
    found = [(torch.Tensor, name, says(1)) for name in ('item', '__int__', '__index__')]
    found += [(torch.Tensor, '__float__', says(1.)), (torch.Tensor, '__bool__', says(True))]
    found += [(torch, 'equal', says(True)), (torch, 'Generator', Generator)]
    cuda = dict(
        mem_get_info=(80*GiB, 80*GiB), memory_snapshot=[], set_per_process_memory_fraction=None, _sleep=None,
        get_device_properties=properties, get_device_name='absent', max_memory_allocated=2*GiB,
        max_memory_reserved=2*GiB, memory_allocated=GiB, memory_reserved=GiB, CUDAGraph=graph,
        graph=contextlib.nullcontext(), device=contextlib.nullcontext(),
    )
    found += [(torch.cuda.Event, 'elapsed_time', says(1.))]
    return found + [(torch.cuda, name, says(answer)) for name, answer in cuda.items()]

@contextlib.contextmanager
def absent_card(capability=90):
    "Within it what is launched for CUDA is compiled for that capability, and tensors there have no numbers"
    import torch
    from elleci.kernels import linear_cross_entropy, triton_compat
    from elleci.memory import trace
    from elleci.memory.emulate import emulate
    triton_compat.triton.runtime.driver.set_active(compiling_driver(capability))
    compile_every_configuration()
    for name, operator in importlib.import_module('torch._library.custom_ops').OPDEFS.items():
        # On tensors without numbers torch runs an operator's rule for shapes: now the operator itself, except
        # those that read where documents begin, and launch no kernel of ours.
        if name.startswith('elleci::') and 'document' not in name:
            operator._abstract_fn = operator._init_fn
    with contextlib.ExitStack() as stack:
        def replace(owner, name, value): stack.enter_context(mock.patch.object(owner, name, value))
        # A product of torch's that has no rule for shapes; and each launch counts, however often it was seen.
        replace(linear_cross_entropy, '_matmul_into', lambda *args, **kwargs: None)
        replace(trace, 'OUTPUT_FACTORIES', mock.MagicMock(get=lambda key: None))
        stack.enter_context(emulate('cuda'))
        for one in answers(torch): replace(*one)
        yield
