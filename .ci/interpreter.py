"Triton's interpreter, made faster for the checks; `nbs/tests/14_interpreter.ipynb` compares the results"
import functools, importlib
from dataclasses import replace

def _patch_lang_once(real):
    "The interpreter's `_patch_lang(fn)`, which does nothing where `triton.language` is replaced already"
    # Whenever a kernel calls a function that is itself `@jit` (`tl.sigmoid`, `tl.sum`, a device function of
    # ours), the interpreter goes through every member of `triton.language` to put its own in their place,
    # though it has done so at the launch. Triton marks its built-in functions, and what has been replaced
    # has no mark.
    tl = importlib.import_module('triton.language')
    no_patches = importlib.import_module('triton.runtime.interpreter')._LangPatchScope
    @functools.wraps(real)
    def patch_lang(fn):
        seen = [v for v in fn.__globals__.values() if v is tl or v is tl.core]
        if not seen: return real(fn)
        functions = [tl.core.tensor.__add__, *(lang.load for lang in seen)]
        return real(fn) if any(map(tl.core.is_builtin, functions)) else no_patches()
    return patch_lang

def _cache_np_dtype(real):
    "The interpreter's `_get_np_dtype(type)`, which builds its table once for each type and not at each call"
    known = {}
    @functools.wraps(real)
    def get_np_dtype(tt_dtype):
        name = tt_dtype.scalar.name
        if name not in known: known[name] = real(tt_dtype.scalar)
        return known[name]
    return get_np_dtype

def _skip_overflow_check(builder):
    "Compute sums, differences and products of integers once"
    # The interpreter computes each a second time in 64 bits and compares it with what the type can hold. The
    # verdict goes to an assertion that counts in debug mode alone, and the interpreter has no such mode.
    options = getattr(builder, 'options', None)
    if getattr(options, 'sanitize_overflow', False) and not getattr(options, 'debug', True):
        builder.options = replace(options, sanitize_overflow=False)

def speed_up_interpreter():
    "Spare Triton's interpreter what changes no result; does nothing without Triton, or when called again"
    try: interpreter = importlib.import_module('triton.runtime.interpreter')
    except ImportError: return
    if hasattr(interpreter, '_LangPatchScope'):
        for name, wrap in (('_patch_lang', _patch_lang_once), ('_get_np_dtype', _cache_np_dtype)):
            real = getattr(interpreter, name, None)
            if real is not None and not hasattr(real, '__wrapped__'): setattr(interpreter, name, wrap(real))
    _skip_overflow_check(getattr(interpreter, 'interpreter_builder', None))
