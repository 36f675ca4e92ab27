"""What a step's Python code may decide by besides its arguments: its variables and modules.

Plain values are compared by value, objects by identity. An object other than a tensor is held by a
weak reference, so a comparison does not keep it alive. A new object at the address of a freed one
counts as another.
"""

from __future__ import annotations

import ctypes
import dis
import threading
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, ItemsView, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from itertools import chain, islice
from mmap import mmap
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

__all__ = [
    "ARGUMENT",
    "CONTAINERS",
    "CONTENTS",
    "CONTENT_BYTES",
    "NO_STATE",
    "are_themselves",
    "attributes",
    "code_of",
    "compared_variables",
    "contents",
    "functions_of",
    "globals_in",
    "identified",
    "imported_in",
    "is_plain",
    "is_pytorchs",
    "is_value",
    "names_in",
    "names_read",
    "of_optimizer",
    "of_parameters",
    "of_tensor",
    "own_attributes",
    "reference",
    "stored_attributes",
    "table_of",
    "text_of",
    "texts_in",
    "variables",
    "variables_of_type",
]

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    np.number,
    np.bool_,
    np.character,
    np.datetime64,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)

CONTENTS = 64
"""The elements of lists, dicts and sets with more than this are compared by identity."""

ITEMS = 10_000
"""No more elements of one list, dict or set are compared."""

CONTENT_BYTES = 1 << 16
"""The contents of NumPy arrays with more bytes than this are not compared."""

Kind = TypeVar("Kind")


def reference(value: object) -> Callable[[], object]:
    """Return a weak reference to a value, where its type allows that; else one that holds it.

    Tensors are held: PyTorch swaps none that has a weak reference.
    """
    if not isinstance(value, torch.Tensor):
        with suppress(TypeError):
            return weakref.ref(value)
    return lambda: value


class _Same:
    """A reference to an object; it equals only references to the same object."""

    __slots__ = ("_find",)

    def __init__(self, value: object) -> None:
        """Refer to `value`."""
        self._find = reference(value)

    def __eq__(self, other: object) -> bool:
        """Return whether both refer to the same object, which is still alive."""
        if not isinstance(other, _Same):
            return NotImplemented
        mine = self._find()
        return mine is not None and mine is other._find()

    __hash__ = None  # type: ignore[assignment]  # it is compared, and in no table


# --- of functions -------------------------------------------------------------------------------


def variables(step: Callable[..., Any], arguments: Sequence[object] = ()) -> dict[str, Any]:
    """Return the variables that a function finds: plain ones by value, objects by identity.

    This includes elements of lists and dicts, and the members that the function reads of objects,
    classes and modules, but nothing deeper. It also covers the object whose method it is, and
    `arguments` that are objects. Variables of functions that it calls are left out. Those of a
    decorator, a partial or a callable object count as its own.
    """
    return {name: identified(value) for name, value in compared_variables(step, arguments)}


def variables_of_type(step: Callable[..., Any], kind: type[Kind]) -> list[Kind]:
    """Return those of a function's variables and object's attributes that are of type `kind`."""
    found: list[Any] = list(_of_partials(step))
    for function, owner in functions_of(step):
        found += [value for _, value in _surrounding(function, owner)]
        found += (table_of(owner) or {}).values()
    return [one for one in found if isinstance(one, kind)]


def functions_of(step: object, owner: object = None) -> Iterator[tuple[FunctionType, object]]:
    """Yield the functions of a step, each with the object whose method it is.

    A decorator comes before the function that it decorates.
    """
    if isinstance(step, partial):
        yield from functions_of(step.func)
        return
    function = getattr(step, "__func__", step)
    owner = getattr(step, "__self__", owner)
    if isinstance(function, FunctionType):
        # skip what PyTorch's decorators make; code that was run by exec may have no module
        if not (function.__module__ or "").startswith("torch."):
            yield function, owner
    elif not hasattr(step, "__wrapped__") and not isinstance(step, (nn.Module, *_OPAQUE)):
        called = _of_class(type(step), "__call__")
        if isinstance(called, FunctionType):
            yield called, step
    if hasattr(function, "__wrapped__"):
        yield from functions_of(function.__wrapped__, owner)


def compared_variables(
    step: Callable[..., Any], arguments: Sequence[object]
) -> Iterator[tuple[str, Any]]:
    """Yield all variables and arguments of a function that are compared, with their names."""
    for number, (function, owner) in enumerate(functions_of(step)):
        before = "decorated: " * number
        yield f"{before}its code", function.__code__
        names = _names(function)
        for name, value in _surrounding(function, owner):
            yield from _look_at(before + name, value, names)
        for name, value in _defaults(function):
            yield f"{before}default {name}", value
    names = names_read(step)
    for number, value in enumerate(_of_partials(step)):
        yield from _look_at(f"{ARGUMENT} {number} of the partial", value, names)
    for number, value in enumerate(arguments):
        if not isinstance(value, torch.Tensor) and not is_plain(value):
            yield from _look_at(f"{ARGUMENT} {number}", value, names)


ARGUMENT = "argument"
"""The names of a step's arguments begin with this."""


def names_read(step: Callable[..., Any]) -> list[str]:
    """Return the names that a step's own code may read, of variables and of attributes."""
    return [name for function, _ in functions_of(step) for name in _names(function)]


def _of_partials(step: object) -> Iterator[Any]:
    """Yield the arguments that partials of a step have bound."""
    while isinstance(step, partial):
        yield from (*step.args, *step.keywords.values())
        step = step.func


def _surrounding(function: FunctionType, owner: object) -> Iterator[tuple[str, Any]]:
    """Yield the variables that exist before a function begins, with their names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # an empty cell
            continue
    for name in globals_in(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    if owner is not None:
        yield "self", owner


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    yield from ((str(number), value) for number, value in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()


def _names(function: FunctionType) -> list[str]:
    """Return the names that a function's code may read, with those of functions defined in it."""
    return list(dict.fromkeys(names_in(function.__code__)))


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that code may read, with those of functions defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


@lru_cache(maxsize=1024)
def globals_in(code: CodeType) -> tuple[str, ...]:
    """Return the globals that code may read, with those of functions defined in it.

    The name of an attribute is none: a script's own `loss` is not what `model(x).loss` reads.
    """
    found = [
        one.argval
        for one in dis.get_instructions(code)
        if one.opname.endswith(("_GLOBAL", "_GLOBALS")) or one.opname == "LOAD_NAME"
    ]
    if "globals" in found:
        found += texts_in(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found += globals_in(constant)
    return tuple(dict.fromkeys(found))


@lru_cache(maxsize=1024)
def imported_in(code: CodeType) -> tuple[tuple[str, int], ...]:
    """Return the names of the modules that code may import, each with the level of the import."""
    found = list(dis.get_instructions(code))
    return tuple(
        (one.argval, level.argval)
        for level, _, one in zip(found, found[1:], found[2:], strict=False)
        if one.opname == "IMPORT_NAME"
    )


def texts_in(code: CodeType) -> Iterator[str]:
    """Yield the texts in code that may be names, as in `getattr(settings, "scale")`."""
    for one in code.co_consts:
        if isinstance(one, str) and one.isidentifier():
            yield one


_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType)
"""Types that are not looked at as callable objects with attributes of their own."""


def _look_at(name: str, value: object, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield a variable, and those of its attributes that are among `names`."""
    yield name, value
    if is_plain(value) or isinstance(value, (nn.Module, Optimizer, torch.Tensor, *CONTAINERS)):
        return
    if isinstance(value, (FunctionType, BuiltinFunctionType)) or is_pytorchs(value):
        return
    for key in dict.fromkeys((*names, *_of_properties(value, names))):
        held = _attribute(value, key)
        if held is not _MISSING:
            yield f"{name}.{key}", held


def _of_properties(owner: object, names: Sequence[str]) -> Iterator[str]:
    """Yield the names that the code of an object's properties may read."""
    for name in names:
        found = _of_class(type(owner), name)
        if isinstance(found, property) and isinstance(found.fget, FunctionType):
            yield from names_in(found.fget.__code__)


def _attribute(owner: object, name: str) -> Any:
    """Return an attribute without running code.

    Of modules and classes, only plain values and containers are returned.
    """
    found, is_value = _stored(owner, name)
    is_compared = is_value or is_plain(found) or isinstance(found, CONTAINERS)
    return found if is_compared else _MISSING


def _stored(owner: object, name: str) -> tuple[Any, bool]:
    """Return an attribute without running code, and whether it is an object's own value."""
    table = table_of(owner)
    if type(table) is dict and name in table:
        return table[name], not isinstance(owner, ModuleType)
    found = _of_class(owner if isinstance(owner, type) else type(owner), name)
    if isinstance(found, MemberDescriptorType):  # one of __slots__
        try:
            return found.__get__(owner), True
        except AttributeError:
            return _MISSING, True
    return found, False


def table_of(owner: object) -> Any:
    """Return an object's table of attributes without running its code; None if it has none."""
    if isinstance(owner, threading.local):  # the table is the thread's
        return threading.local.__getattribute__(owner, "__dict__")
    for kind in type(owner).__mro__:
        found = kind.__dict__.get("__dict__")
        if isinstance(found, (GetSetDescriptorType, MemberDescriptorType)):
            return found.__get__(owner)
    return None


def stored_attributes(owner: object, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield those of an object's attributes that are among `names`, without running code.

    Of properties, the attributes that their code names are yielded.
    """
    for name in dict.fromkeys((*names, *_of_properties(owner, names))):
        found, _ = _stored(owner, name)
        if found is not _MISSING:
            yield name, found


def _of_class(kind: type, name: str) -> Any:
    for one in kind.__mro__:
        if name in one.__dict__:
            return one.__dict__[name]
    return _MISSING


def is_pytorchs(value: object) -> bool:
    """Return whether a module, class or object is PyTorch's or a builtin of Python."""
    if isinstance(value, ModuleType):
        name = value.__name__
    else:
        name = (value if isinstance(value, type) else type(value)).__module__
    return name.split(".")[0] in ("torch", "builtins")


_MISSING = object()


# --- of modules ---------------------------------------------------------------------------------

_EVERY_MODULES = frozenset(nn.Module().__dict__)
"""Attributes that every module has: its tables, which are compared one by one, and its mode."""


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes except tensors, which have slots, and the module's tables."""
    return {
        key: value
        for key, value in module.__dict__.items()
        if key not in _EVERY_MODULES and not isinstance(value, torch.Tensor)
    }


def code_of(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """Return what a module runs by a name: a function, a method, or that of a property.

    None where there is none, or only what every module has.
    """
    found = module.__dict__.get(name, _of_class(type(module), name))
    if found is nn.Module.__dict__.get(name):
        return None
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, cached_property):
        found = found.func
    elif isinstance(found, (classmethod, staticmethod, MethodType)):
        found = found.__func__
    return found if callable(found) else None


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, such as a dropout's probability, in comparable form."""
    return {key: identified(value) for key, value in own_attributes(module).items()}


def are_themselves(module: nn.Module) -> bool:
    """Return whether a module's attributes are compared as objects, whatever these hold."""
    return not any(
        issubclass(type(value), (dict, list, set, deque, np.ndarray, torch.Tensor, *_MEMORY))
        for key, value in module.__dict__.items()
        if key not in _EVERY_MODULES
    )


def of_parameters(module: nn.Module) -> list[tuple[int, dict[str, Any] | None]]:
    """Return the ids of a module's parameters, each with the attributes that a script has added."""
    return [(id(one), of_tensor(one)) for one in module._parameters.values()]


def of_tensor(tensor: torch.Tensor | None) -> dict[str, Any] | None:
    """Return the attributes that a script has added to a tensor, in comparable form."""
    table = getattr(tensor, "__dict__", None)
    return {key: identified(one) for key, one in table.items()} if table else None


# --- of optimizers -------------------------------------------------------------------------------

NO_STATE = ("_opt_called", "_need_device_dtype_check_for_fused")
"""Attributes that say whether an optimizer was called at all, which schedulers ask, and whether its
tensors' types were checked."""


def of_optimizer(optimizer: Optimizer) -> dict[tuple[Any, str], Any]:
    """Return an optimizer's attributes and its state's non-tensor values, by place and name."""
    found: dict[tuple[Any, str], Any] = {
        (None, key): identified(value)
        for key, value in optimizer.__dict__.items()
        if key not in ("state", "param_groups", *NO_STATE) and not key.startswith("_optimizer_")
    }
    for owner, table in optimizer.state.items():
        place = id(owner) if isinstance(owner, torch.Tensor) else owner
        if not isinstance(table, dict):
            found[place, ""] = identified(table)
            continue
        for key, value in table.items():
            found[place, key] = None if isinstance(value, torch.Tensor) else identified(value)
    return found


# --- of values ----------------------------------------------------------------------------------

_MEMORY: tuple[Any, ...] = (
    array,
    bytearray,
    memoryview,
    mmap,
    ctypes.Structure.__base__,
    np.void,
)
"""Types that have bytes instead of items."""

CONTAINERS = (dict, list, tuple, set, frozenset, deque, np.ndarray, *_MEMORY)


def identified(value: object) -> Any:
    """Return a form of a value that differs for another value, or once its contents change."""
    if isinstance(value, (np.ndarray, *_MEMORY)):
        return _bytes(value)
    if not isinstance(value, (dict, list, set, frozenset, deque)):
        return _alone(value)
    if len(value) > CONTENTS:
        members = chain.from_iterable(_items(value)) if isinstance(value, dict) else value
        return _Same(value), len(value), hash(tuple(map(id, islice(members, ITEMS))))
    if isinstance(value, dict):
        return type(value), [(_alone(key), _alone(one)) for key, one in _items(value)]
    if isinstance(value, (set, frozenset)):
        return type(value), _members(value)
    return type(value), list(map(_alone, value))


def contents(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield what a dict, list, tuple, set or deque called `name` holds, each with a name."""
    if isinstance(value, dict):
        yield from ((f"{name}[{text_of(key):.40}]", one) for key, one in dict.items(value))
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        yield from ((f"{name}[{number}]", one) for number, one in enumerate(value))
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        yield from contents(name, value.ravel().tolist())


def text_of(key: object) -> str:
    """Return a text for a key, without running its code."""
    return repr(key) if is_plain(key) else type(key).__name__


def is_value(value: object) -> bool:
    """Return whether a value is plain, or holds only plain values."""
    if isinstance(value, dict):
        return all(map(is_value, (*value, *value.values())))
    if isinstance(value, (list, tuple)):
        return all(map(is_value, value))
    return is_plain(value)


def is_plain(value: object) -> bool:
    """Return whether a value never changes in place; numbers of a capture are none."""
    return issubclass(type(value), _PLAIN)


def _alone(value: object) -> Any:
    if is_plain(value):
        # the text distinguishes zeros by sign, and NaN equals itself
        is_number = isinstance(value, (float, complex, np.generic))
        return type(value), repr(value) if is_number else value
    if isinstance(value, tuple) and len(value) <= CONTENTS:
        return type(value), tuple(map(_alone, value))
    return _Same(value)


def _members(value: set[Any] | frozenset[Any]) -> Any:
    plain = [one for one in value if is_plain(one)]
    others = [one for one in value if not is_plain(one)]
    return set(map(_alone, plain)), sorted(map(id, others))


def _bytes(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return value.shape, identified(value.ravel().tolist())
    memory = np.asarray(memoryview(value))  # of ctypes, arrays, and NumPy's records
    if memory.nbytes > CONTENT_BYTES:
        return _Same(value), memory.shape
    return type(value), memory.dtype, memory.shape, memory.tobytes()


def _items(value: dict[Any, Any]) -> ItemsView[Any, Any]:
    """Return a dict's items in its order, without running its own code."""
    return OrderedDict.items(value) if isinstance(value, OrderedDict) else dict.items(value)
