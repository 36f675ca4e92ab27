"""Notes what the functions that a step calls read, to compare it before each run.

A step's own variables are found from its code. What else it reads is read by functions that it
calls: a helper, a method of an object, a hook, a module's `forward`. A profile function sees each
of them begin. What its code names is then looked up in its globals, its closure, the modules that
it imports and the objects that it gets, by arguments or from calls, and in what these hold. Looking
up runs none of the user's code.

What is compared: of a name, whether it exists and its value; of an object, its class, which
attributes it has, and the values of those that code names; of a function, its code and defaults.
"""

from __future__ import annotations

import builtins
import gc
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache, partial
from importlib.util import resolve_name
from logging import Logger
from types import (
    BuiltinMethodType,
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import ReferenceType

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from storm_client.step.places import Places
from storm_client.step.reachable import VALUES, is_iterator
from storm_client.step.recording import is_of_a_capture
from storm_client.step.refusals import leaves_behind
from storm_client.step.variables import (
    CONTAINERS,
    CONTENTS,
    contents,
    globals_in,
    identified,
    imported_in,
    is_plain,
    is_pytorchs,
    names_in,
    reference,
    table_of,
    texts_in,
)

__all__ = ["Called"]

_LIBRARIES: Final = {"torch", "storm_client", "numpy", "sympy", *sys.stdlib_module_names}
"""Of their functions, only methods of objects that the step's own code has reached are looked at:
what else PyTorch decides by is compared elsewhere."""

_ASKING: Final = sys.stdlib_module_names - {"importlib", "linecache", "logging", "warnings"}
"""Modules of Python's whose functions return what they ask for."""

_IMPORTS: Final = ("importlib", "_frozen_importlib")

_MISSING: Final = object()
_GONE: Final = object()
"""Found where an object no longer exists, as those that only the capture has made."""

Comparison: TypeAlias = Callable[[Any], bool]


class _Place(NamedTuple):
    name: str
    find: Callable[[], Any]
    """Returns what is there now."""
    is_same: Comparison
    """Whether that is what was there."""


class _Shape(tuple[Any, ...]):
    """The classes of an object, and the names of its attributes."""


class _Code(NamedTuple):
    code: CodeType
    names: list[str]
    """What it may read: variables, attributes, and texts that may be names."""
    reads_all: bool
    """Whether it may read all attributes of an object."""


class Called:
    """What the functions that one capture has called read."""

    def __init__(self) -> None:
        self.places = Places()
        """The globals of these functions, in which nothing of the capture's may be left."""
        self.changed: dict[str, Any] = {}
        """What has changed during the capture, by name, with what it became."""
        self.asked: str | None = None
        """What the step asks, such as a clock, whose next answer nothing tells."""
        self._found: list[_Place] = []
        """What is compared before each run."""
        self._places: dict[tuple[int, str], _Place] = {}
        self._tables: dict[int, tuple[dict[str, Any], bool]] = {}
        """Tables of globals, by id, and whether they are of a library."""
        self._codes: dict[int, _Code] = {}
        """Code that has begun, by its id."""
        self._pending: deque[tuple[str, Any, CodeType]] = deque()
        """Objects to be looked into, the nearest first, each with the code that reads it."""
        self._looked_into: dict[tuple[int, int], Callable[[], object]] = {}
        """Objects by their ids and those of the code that reads them."""
        self._reached: dict[int, Callable[[], object]] = {}
        self._caches: list[Any] = []
        """The functions with a `functools.lru_cache` among them."""
        self._made: dict[int, Callable[[], object]] = {}
        """Objects that the step makes, whose attributes are its own concern."""
        self._closures: dict[int, dict[tuple[int, ...], dict[str, tuple[Any, Comparison]]]] = {}
        """By the id of code, what its functions had in their cells when they began."""

    def note(self, frame: FrameType) -> None:
        """Note what a function may read that has just begun."""
        is_of_library = self._is_of_library(frame.f_globals)
        caller = frame.f_back
        if is_of_library:
            if caller is not None and id(caller.f_code) in self._codes:
                self._note_given(frame, is_of_library=True)
        elif not self._is_importing(caller):
            self._note_given(frame, is_of_library=False)
        self._look_at_pending()

    def _look_at_pending(self) -> None:
        while self._pending:
            value = self._pending.popleft()
            if len(self._looked_into) < VALUES:
                self._note_held(*value)

    def note_result(self, frame: FrameType, value: Any) -> None:
        """Note what a function returns or yields, of which its caller may read more."""
        caller = frame.f_back
        if caller is None or id(caller.f_code) not in self._codes:
            return
        is_own = not self._is_of_library(caller.f_globals)
        if is_own and not _has(self._made, id(value), value) and not _leads_to_capture(value):
            self._look_into(type(value).__name__, value, caller.f_code)
            self._look_at_pending()

    def note_asked(self, frame: FrameType, function: Any) -> None:
        """Note that a function of C's is called that answers by more than what Python code holds.

        What libraries ask is their own concern, unless the step's code has called one for it.
        """
        caller: FrameType | None = frame
        while caller is not None and self._is_of_library(caller.f_globals):
            if str(caller.f_globals.get("__name__")).split(".")[0] not in _ASKING:
                return
            caller = caller.f_back
        if caller is not None:
            where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            self.asked = self.asked or f"{function.__qualname__}() at {where}"

    def conclude(self) -> None:
        """Find the closures, and note what has changed since the functions began."""
        self._note_closures()
        found = []
        for name, find, is_same in self._places.values():
            now = find()
            if now is _GONE or _leads_to_capture(now):  # `Places` looks for what a capture leaves
                continue
            if is_iterator(now):
                self.asked = self.asked or f"the iterator {name!r}"
            if not is_same(now):
                self.changed[name] = now if type(now) is _Shape else identified(now)
            found.append(_Place(name, find, _comparison(now)))
        self._found = found
        for table in (self._places, self._looked_into, self._reached, self._made, self._closures):
            table.clear()  # runs need none of them, and they hold objects
        self._caches.clear()

    def different(self) -> Iterator[str]:
        """Yield the names of what is no longer as it was when the capture had ended."""
        for name, find, is_same in self._found:
            now = find()
            if now is not _GONE and not is_same(now):
                yield name

    def check(self) -> None:
        """Raise UsageError if something of the capture's is in a global or a function's cache."""
        self.places.check()
        for cache in self._caches_of_capture():
            raise leaves_behind(f"the cache of {cache.__qualname__}")

    def put_back(self) -> None:
        """Take out what the capture has left there."""
        self.places.put_back()
        for cache in self._caches_of_capture():
            cache.cache_clear()

    def _caches_of_capture(self) -> list[Any]:
        return [
            cache for cache in self._caches if any(map(Places().is_left, gc.get_referents(cache)))
        ]

    # --- what is noted ----------------------------------------------------------------------

    def _note_given(self, frame: FrameType, *, is_of_library: bool) -> None:
        """Note the arguments of a function, and its closure and globals if it is of no library."""
        code, values = frame.f_code, frame.f_locals
        count = code.co_argcount + code.co_kwonlyargcount
        given = [values[name] for name in code.co_varnames[:count] if name in values]
        if code.co_name == "__init__" and given:
            self._made[id(given[0])] = reference(given[0])
            given = given[1:]
        if is_of_library:
            given = [one for one in given[:1] if _has(self._reached, id(one), one)]
        else:
            self._note_globals(code, frame.f_globals)
            free = {name: values[name] for name in code.co_freevars if name in values}
            given += free.values()
            if free:
                of_code = self._closures.setdefault(id(code), {})
                if (key := tuple(map(id, free.values()))) not in of_code:
                    of_code[key] = {name: (one, _comparison(one)) for name, one in free.items()}
        for one in given:
            if not _has(self._made, id(one), one):
                self._look_into(type(one).__name__, one, code)

    def _is_of_library(self, table: dict[str, Any]) -> bool:
        if id(table) not in self._tables:
            is_one = str(table.get("__name__")).split(".")[0] in _LIBRARIES
            self._tables[id(table)] = table, is_one
        return self._tables[id(table)][1]

    def _is_own(self, value: Any) -> bool:
        """Return whether a value is a function of no library, or one with a cache."""
        is_own = isinstance(value, FunctionType) and not self._is_of_library(value.__globals__)
        return is_own or isinstance(value, _CACHED)

    def _is_importing(self, caller: FrameType | None) -> bool:
        """Return whether a function is called by an import, as a finder of modules is."""
        while caller is not None and id(caller.f_code) not in self._codes:
            if str(caller.f_globals.get("__name__")).split(".")[0] in _IMPORTS:
                return True
            caller = caller.f_back
        return False

    def _known(self, code: CodeType, *, is_own: bool = False) -> _Code:
        if id(code) not in self._codes:
            names = dict.fromkeys((*names_in(code), *texts_in(code)))
            reads_all = is_own and bool(_READING_ALL & names.keys())
            self._codes[id(code)] = _Code(code, list(names), reads_all)
        return self._codes[id(code)]

    def _note_globals(self, code: CodeType, table: dict[str, Any]) -> None:
        if id(code) in self._codes:
            return
        names = self._known(code, is_own=True).names  # so that its globals are noted once
        module = str(table.get("__name__"))
        self.places.note([(module, table)], depth=0)
        for name in globals_in(code):
            find = partial(_in_globals, table, name)
            self._note(f"{module}.{name}", (id(table), name), find, code)
        for name, level in imported_in(code):
            full = resolve_name("." * level + name, table.get("__package__")) if level else name
            for one in (full, full.split(".")[0]):
                find = partial(sys.modules.get, one, _MISSING)
                self._note(one, (id(sys.modules), one), find, code)
        if "getenv" in names:
            find = partial(getattr, os.environ, "_data")
            self._note("os.environ", (id(os.environ), "_data"), find, code)

    def _note(
        self, name: str, key: tuple[int, str], find: Callable[[], Any], code: CodeType
    ) -> None:
        """Note a place, and what its value leads to."""
        value = find()
        if key not in self._places:
            self._places[key] = _Place(name, find, _comparison(value))
        self._look_into(name, value, code)

    def _look_into(self, name: str, value: Any, code: CodeType) -> None:
        """Look into a value later, if it may hold others."""
        if is_plain(value) and not table_of(value):
            return
        if not (is_of_a_capture(value) or issubclass(type(value), torch.Tensor)):
            self._pending.append((name, value, code))

    def _note_held(self, name: str, value: Any, code: CodeType) -> None:
        """Note those of an object's attributes that code names, or what a container holds."""
        key = id(value), id(code)
        if _has(self._looked_into, key, value):
            return
        self._looked_into[key] = self._reached[id(value)] = reference(value)
        if type(value) is ContextVar:
            self._note(name, (id(value), ""), partial(value.get, _MISSING), code)
        if issubclass(type(value), CONTAINERS):
            for inner, one in list(contents(name, value))[: CONTENTS + 1]:
                if issubclass(type(one), CONTAINERS):
                    self._note(inner, (id(one), ""), partial(_itself, one), code)
                else:
                    self._look_into(inner, one, code)
        if self._is_own(value) or issubclass(type(value), _HOLDERS):
            self._note_bound(name, value, code)
        elif not (issubclass(type(value), (type, ModuleType)) and is_pytorchs(value)):
            names, table = self._known(code).names, self._note_shape(name, value)
            if table is not None and self._known(code).reads_all:
                names = list(dict.fromkeys((*names, *table)))
            for attribute in names:
                self._note_attribute(name, value, attribute, code)

    def _note_shape(self, name: str, owner: Any) -> dict[str, Any] | None:
        """Note an object's class, and which attributes they have; return the object's table."""
        table = table_of(owner)
        if issubclass(type(owner), ModuleType) or is_pytorchs(owner):
            return None
        if issubclass(type(owner), (nn.Module, Optimizer)):
            table = None  # all their attributes are compared
        for one in (owner, type(owner)) if table is not None else (type(owner),):
            if (id(one), "{}") not in self._places and _may_get_attributes(one):
                find = partial(_shape, reference(one))
                self._places[id(one), "{}"] = _Place(name, find, _comparison(find()))
        return table if type(table) is dict else None

    def _note_bound(self, name: str, value: Any, code: CodeType) -> None:
        """Note what a function has besides its variables, or an object of C's has bound."""
        if isinstance(value, _CACHED):
            self._caches.append(value)
        if isinstance(value, FunctionType):
            find = partial(_code_of, reference(value))
            self._places[id(value), "code"] = _Place(f"{name}: its code", find, _comparison(find()))
        find = partial(_held_by, reference(value))
        if find():
            self._note(name, (id(value), "()"), find, code)

    def _note_attribute(self, name: str, owner: Any, key: str, code: CodeType) -> None:
        table = table_of(owner)
        name = f"{name}.{key}"
        if key in _OF_LOGGERS and issubclass(type(owner), Logger):
            return
        if table is None or key not in table or isinstance(owner, type):
            self._note_in_class(name, owner, key, code)
        elif not isinstance(owner, (nn.Module, Optimizer)):
            self._note(name, (id(owner), key), partial(_in_table, reference(owner), key), code)
        elif key not in _TABLES_OF_OPTIMIZERS:  # its attributes are compared, not what these hold
            self._look_into(name, table[key], code)
        elif key == "param_groups":
            settings = (one for group in table[key] for one in group.items())
            for inner, one in settings:
                if inner != "params":
                    self._look_into(f"{name}[{inner!r}]", one, code)

    def _note_in_class(self, name: str, owner: Any, key: str, code: CodeType) -> None:
        """Note an attribute that an object has by its class, or a class by itself or its own."""
        is_class = isinstance(owner, type)
        kinds = (*owner.__mro__, *type(owner).__mro__) if is_class else type(owner).__mro__
        for kind in kinds:
            if key not in kind.__dict__:
                continue
            found = kind.__dict__[key]
            if isinstance(found, MemberDescriptorType):  # one of __slots__
                if not is_class:
                    find = partial(_in_slot, reference(owner), found)
                    self._note(name, (id(owner), key), find, code)
            elif not hasattr(type(found), "__get__") or self._is_own(found):
                find = partial(kind.__dict__.get, key, _MISSING)
                self._note(name, (id(kind), key), find, code)
            return

    def _note_closures(self) -> None:
        """Note the cells of the functions that have run, which only their functions lead to."""
        codes = [self._codes[key].code for key in self._closures if key in self._codes]
        for function in gc.get_referrers(*codes) if codes else ():
            if not isinstance(function, FunctionType) or not function.__closure__:
                continue
            code = function.__code__
            cells = dict(zip(code.co_freevars, function.__closure__, strict=True))
            for before in self._closures.get(id(code), {}).values():
                if all(_fits(cells[name], value) for name, (value, _) in before.items()):
                    for name, (_, is_same) in before.items():
                        find = partial(_in_cell, reference(cells[name]))
                        place = _Place(f"{function.__qualname__}: {name}", find, is_same)
                        self._places.setdefault((id(cells[name]), ""), place)


_OF_LOGGERS = ("_cache", "manager")
"""What loggers compute of their levels whenever they are asked, and what leads to all loggers."""

_READING_ALL = frozenset(("__dict__", "asdict", "astuple", "dir", "fields", "vars"))
"""Names by which code reads all attributes of an object."""

_TABLES_OF_OPTIMIZERS = ("defaults", "param_groups", "state")
"""Those that are compared one by one."""

_HOLDERS: tuple[type, ...] = (
    BuiltinMethodType,
    MappingProxyType,
    MethodType,
    partial,
    ReferenceType,
    type({}.items()),
    type({}.keys()),
    type({}.values()),
    _CACHED := type(lru_cache(len)),
)
"""Types whose objects hold others in no attribute of Python's."""


def _held_by(find: Callable[[], Any]) -> Any:
    """Return what a function has besides its variables, or what an object of C's has bound."""
    value = find()
    if value is None:
        return _GONE
    if isinstance(value, FunctionType):
        held = [value.__defaults__, value.__kwdefaults__, value.__dict__]
        return held if any(held) else []
    held = [value()] if isinstance(value, ReferenceType) else gc.get_referents(value)
    if isinstance(value, _CACHED):  # each hit changes the order of the rest
        return [one for one in held if type(one) is dict]
    return [one for one in held if not isinstance(one, (type, ModuleType))]


def _comparison(value: Any) -> Comparison:
    """Return a function that tells whether another value is the same, or holds the same."""
    if value is _MISSING or is_plain(value):
        form = identified(value)
        return lambda now: now is value or identified(now) == form
    if _leads_to_capture(value):  # `Places` looks for what a capture leaves
        return lambda _: True
    if type(value) is _Shape:
        return lambda now: now == value
    if issubclass(type(value), CONTAINERS):
        form = identified(value)
        return lambda now: identified(now) == form
    find = reference(value)
    return lambda now: find() is now


def _leads_to_capture(value: Any, depth: int = 3) -> bool:
    if depth and issubclass(type(value), CONTAINERS):
        return any(_leads_to_capture(one, depth - 1) for _, one in contents("", value))
    return is_of_a_capture(value)


def _has(table: dict[Any, Callable[[], object]], key: Any, value: object) -> bool:
    """Return whether a value is in a table, and not another one with the id of one that is gone."""
    return key in table and table[key]() is value


def _fits(cell: Any, value: Any) -> bool:
    """Return whether a cell may be the one that a function had; numbers in it may have changed."""
    now = _in_cell(lambda: cell)
    return now is not _MISSING and (is_plain(now) or now is value)


def _itself(value: Any) -> Any:
    return value


def _may_get_attributes(owner: Any) -> bool:
    """Return whether a script may add attributes to an object or a class, and code ask for them."""
    if isinstance(owner, type):
        return str(owner.__module__).split(".")[0] not in _LIBRARIES
    table = table_of(owner)
    return bool(table) or (type(table) is dict and _may_get_attributes(type(owner)))


def _in_globals(table: dict[str, Any], name: str) -> Any:
    return table[name] if name in table else builtins.__dict__.get(name, _MISSING)


def _code_of(find: Callable[[], Any]) -> Any:
    function = find()
    return function.__code__ if isinstance(function, FunctionType) else _GONE


def _shape(find: Callable[[], Any]) -> Any:
    """Return the class of an object, or the bases of a class, and the names of its attributes."""
    owner = find()
    if owner is None:
        return _GONE
    kinds = owner.__mro__ if isinstance(owner, type) else (type(owner),)
    return _Shape((*kinds, *(table_of(owner) or ())))


def _in_table(find: Callable[[], Any], key: str) -> Any:
    owner = find()
    if owner is None:
        return _GONE
    table = table_of(owner)
    return _MISSING if table is None else table.get(key, _MISSING)


def _in_slot(find: Callable[[], Any], slot: MemberDescriptorType) -> Any:
    owner = find()
    if owner is None:
        return _GONE
    try:
        return slot.__get__(owner)
    except AttributeError:
        return _MISSING


def _in_cell(find: Callable[[], Any]) -> Any:
    cell = find()
    if cell is None:
        return _GONE
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _MISSING
