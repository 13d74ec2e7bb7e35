"Triton's interpreter, made faster for the checks; `nbs/tests/14_interpreter.ipynb` compares the results"
import functools, importlib, inspect
from dataclasses import replace

# What has been replaced: (owner, name, as released, ours). The test takes it back to compare.
REPLACED = []

def _replace(owner, name, wrap):
    "`owner.name` becomes `wrap(owner.name)`, once; nothing where this Triton has no such name"
    real = getattr(owner, name, None)
    if real is None or hasattr(real, '__wrapped__'): return
    ours = functools.wraps(real)(wrap(real))
    REPLACED.append((owner, name, real, ours))
    setattr(owner, name, ours)

def _patch_lang_once(real):
    "The interpreter's `_patch_lang(fn)`, which does nothing where `triton.language` is replaced already"
    # Whenever a kernel calls a function that is itself `@jit` (`tl.sigmoid`, `tl.sum`, a device function of
    # ours), the interpreter goes through every member of `triton.language` to put its own in their place,
    # though it has done so at the launch. Triton marks its built-in functions, and what has been replaced
    # has no mark.
    tl = importlib.import_module('triton.language')
    no_patches = importlib.import_module('triton.runtime.interpreter')._LangPatchScope
    def patch_lang(fn):
        seen = [v for v in fn.__globals__.values() if v is tl or v is tl.core]
        if not seen: return real(fn)
        functions = [tl.core.tensor.__add__, *(lang.load for lang in seen)]
        return real(fn) if any(map(tl.core.is_builtin, functions)) else no_patches()
    return patch_lang

def _cache_np_dtype(real):
    "The interpreter's `_get_np_dtype(type)`, which builds its table once for each type and not at each call"
    known = {}
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

# What follows was read in these versions. Nine tenths of what the interpreter does for `x + y` is to find out
# of which type the sum is, with objects that it makes anew for each shape and each constant.
READ = ('3.7.',)

def _remember_builtins(semantic):
    "`_patch_builtin` that looks through a module once, and puts one call in the place of three"
    core = importlib.import_module('triton.language.core')
    checked = core.builtin(lambda: None).__code__   # of the wrapper that only looks for `_semantic`
    known = {}
    def interpreted(function):
        direct = getattr(function, '__code__', None) is checked
        function = function.__wrapped__ if direct else function
        def call(*args, **kwargs):
            kwargs['_semantic'] = semantic
            return function(*args, **kwargs)
        return call
    def wrap(real):
        def patch_builtin(package, builder, scope):
            if package not in known:
                members = inspect.getmembers(package, core.is_builtin)
                known[package] = [(name, member, interpreted(member)) for name, member in members]
            for name, member, ours in known[package]:
                if getattr(package, name) is member: scope.set_attr(package, name, ours)
        return patch_builtin
    return wrap

def _unwrap_fast(core):
    "`_unwrap_if_constexpr(x)`, which mostly gets what is not wrapped"
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}
    def wrap(real):
        def unwrap_if_constexpr(o):
            kind = o.__class__
            if kind in plain: return o
            return o.value if kind is core.constexpr else real(o)
        return unwrap_if_constexpr
    return wrap

def _compare_names(core):
    "`dtype.__eq__`, at once for two plain types"
    dtype = core.dtype
    def wrap(real):
        def equal(self, other):
            if self.__class__ is dtype and other.__class__ is dtype: return self.name == other.name
            return real(self, other)
        return equal
    return wrap

def _remember_shapes(core):
    "`block_type(element_ty, shape)` whose shape, size and name are made once for each"
    known = {}
    def wrap(real):
        def init(self, element_ty, shape):
            values = shape.values if shape.__class__ is core.tuple else shape
            values = tuple([v.value if v.__class__ is core.constexpr else v for v in values])
            key = element_ty.name, getattr(element_ty, 'address_space', None), values
            if (found := known.get(key)) is None:
                real(self, element_ty, shape)
                known[key] = dict(shape=self.shape, numel=self.numel, name=self.name)
            else:
                self.__dict__.update(found)
                self.element_ty = element_ty
        return init
    return wrap

def _remember_sizes(core):
    "`tensor(handle, type)` that takes number and sizes from the last one of this shape"
    scalar = core.constexpr(1), core.tuple([])
    def wrap(real):
        def init(self, handle, type):
            found = type.shape.__dict__.get('of_tensor') if type.is_block() else scalar
            if found is None:
                real(self, handle, type)
                type.shape.__dict__['of_tensor'] = self.numel, self.shape
                return
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = found
        return init
    return wrap

def _make_handle(core):
    "`TensorHandle(data, dtype)` that looks twice only at what may be too wide"
    def wrap(real):
        def init(self, data, dtype, attr=None):
            self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
            is_plain = dtype.__class__ is core.dtype
            if not (is_plain and data.itemsize*8 <= dtype.primitive_bitwidth): self.__post_init__()
        return init
    return wrap

def _remember_constants(real):
    "`scalar_constant(value, dtype)` that makes each number once; nothing writes to a handle"
    # In bf16 the package mends them, and takes that back to show what it is for.
    known = {}
    def scalar_constant(value, dtype):
        is_number = value.__class__ in (int, float, bool)
        if not is_number or dtype is None or dtype.name == 'bf16': return real(value, dtype)
        key = value.__class__, value, dtype.name
        if (found := known.get(key)) is None:
            if len(known) > 5000: known.clear()
            found = known[key] = real(value, dtype)
        return found
    return scalar_constant

def _remember_types(real):
    "`computation_type_impl`: of which type a result is, once for each pair of types"
    known = {}
    def computation_type(a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod):
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in known: known[key] = real(a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return known[key]
    return computation_type

def _broadcast_what_differs(semantic):
    "`broadcast_impl_value(lhs, rhs)`, at once where shapes are equal or as long as each other"
    core, builder = importlib.import_module('triton.language.core'), semantic.builder
    def stretched(x, own, shape):
        if own == shape: return x
        to = core.block_type(x.type.element_ty, shape)
        return core.tensor(builder.create_broadcast(x.handle, shape), to)
    def wrap(real):
        def broadcast(lhs, rhs):
            a, b = lhs.type, rhs.type
            if not a.is_block() or not b.is_block():
                return real(lhs, rhs) if a.is_block() or b.is_block() else (lhs, rhs)
            a, b = a.shape.values, b.shape.values
            if a == b: return lhs, rhs
            if len(a) != len(b) or any(m != n and m != 1 and n != 1 for m, n in zip(a, b)):
                return real(lhs, rhs)
            shape = [n if m == 1 else m for m, n in zip(a, b)]
            return stretched(lhs, a, shape), stretched(rhs, b, shape)
        return broadcast
    return wrap

def _take_equal_types(semantic):
    "`binary_op_type_checking_impl`, at once for two tensors of one type and for an address and a number"
    core = importlib.import_module('triton.language.core')
    tensor, dtype, pointer = core.tensor, core.dtype, core.pointer_type
    halves = 'fp16', 'bf16'
    numbers = {int, float, bool}
    constants = {}   # the blocks that Python's numbers become, as long as nobody writes to a handle
    def with_number(real, lhs, rhs, flags):
        is_left = rhs.__class__ is tensor
        block, number = (rhs, lhs) if is_left else (lhs, rhs)
        key = number.__class__, number, is_left, block.type.name, flags
        if (found := constants.get(key)) is not None: return (found, rhs) if is_left else (lhs, found)
        left, right = real(lhs, rhs, *flags)
        kept, constant = (right, left) if is_left else (left, right)
        if kept is block and constant.numel.value <= 4096 and constant.dtype.name != 'bf16':
            if len(constants) > 500: constants.clear()
            constants[key] = constant
        return left, right
    def wrap(real):
        def check(
            lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
        ):
            flags = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
            if lhs.__class__ is not tensor or rhs.__class__ is not tensor:
                kinds = {lhs.__class__, rhs.__class__} - {tensor}
                is_number = len(kinds) == 1 and kinds <= numbers and tensor in (lhs.__class__, rhs.__class__)
                return with_number(real, lhs, rhs, flags) if is_number else real(lhs, rhs, *flags)
            a, b = lhs.dtype, rhs.dtype
            x, y = a.__class__, b.__class__
            same = x is dtype and y is dtype and a.name == b.name and not (div_or_mod and a.name in halves)
            moved = x is pointer and y is dtype and allow_lhs_ptr and b.is_int()
            moves = y is pointer and x is dtype and allow_rhs_ptr and a.is_int()
            if same or moved or moves: return semantic.broadcast_impl_value(lhs, rhs)
            return real(lhs, rhs, *flags)
        return check
    return wrap

def _speed_up_types(interpreter):
    "The part of `speed_up_interpreter` that depends on Triton's version"
    core = importlib.import_module('triton.language.core')
    semantic = interpreter.interpreter_semantic
    _replace(interpreter, '_patch_builtin', _remember_builtins(semantic))
    _replace(interpreter.TensorHandle, '__init__', _make_handle(core))
    _replace(core, '_unwrap_if_constexpr', _unwrap_fast(core))
    _replace(core.dtype, '__eq__', _compare_names(core))
    _replace(core.block_type, '__init__', _remember_shapes(core))
    _replace(core.tensor, '__init__', _remember_sizes(core))
    # of the interpreter's own object: the compiler's are left alone
    _replace(semantic, 'scalar_constant', _remember_constants)
    _replace(semantic, 'computation_type_impl', _remember_types)
    _replace(semantic, 'broadcast_impl_value', _broadcast_what_differs(semantic))
    _replace(semantic, 'binary_op_type_checking_impl', _take_equal_types(semantic))

def speed_up_interpreter():
    "Spare Triton's interpreter what changes no result; does nothing without Triton, or when called again"
    try: interpreter = importlib.import_module('triton.runtime.interpreter')
    except ImportError: return
    if hasattr(interpreter, '_LangPatchScope'):
        _replace(interpreter, '_patch_lang', _patch_lang_once)
        _replace(interpreter, '_get_np_dtype', _cache_np_dtype)
    _skip_overflow_check(getattr(interpreter, 'interpreter_builder', None))
    if importlib.import_module('triton').__version__.startswith(READ): _speed_up_types(interpreter)
