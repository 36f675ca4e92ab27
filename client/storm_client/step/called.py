"""Notes what the functions that a step calls read, to compare it before each run.

A step's own variables are found from its code. What else it reads is read by functions that it
calls: a helper, a method of an object, a hook, a module's `forward`. A profile function sees each
of them begin. What its code names is then looked up in its globals, its closure and the objects
that it gets, and in what these hold. Looking up runs none of the user's code.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache, partial
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

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from storm_client.step.places import Places
from storm_client.step.reachable import VALUES
from storm_client.step.recording import is_of_a_capture
from storm_client.step.refusals import leaves_behind
from storm_client.step.variables import (
    CONTAINERS,
    CONTENTS,
    contents,
    globals_in,
    identified,
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


class _Code(NamedTuple):
    code: CodeType
    names: list[str]
    """What it may read: variables, attributes, and texts that may be names."""
    texts: frozenset[str]
    """Those of its own texts that may be names."""


class Called:
    """What the functions that one capture has called read."""

    def __init__(self) -> None:
        self.places = Places()
        """The globals of these functions, in which nothing of the capture's may be left."""
        self.changed: dict[str, Any] = {}
        """What has changed during the capture, by name, with what it became."""
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
        while self._pending:
            value = self._pending.popleft()
            if len(self._looked_into) < VALUES:
                self._note_held(*value)

    def conclude(self) -> None:
        """Find the closures, and note what has changed since the functions began."""
        self._note_closures()
        found = []
        for name, find, is_same in self._places.values():
            now = find()
            if now is _GONE or _leads_to_capture(now):  # `Places` looks for what a capture leaves
                continue
            if not is_same(now):
                self.changed[name] = identified(now)
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

    def _known(self, code: CodeType) -> _Code:
        if id(code) not in self._codes:
            texts = frozenset(texts_in(code))
            names = list(dict.fromkeys((*names_in(code), *texts_in(code))))
            self._codes[id(code)] = _Code(code, names, texts)
        return self._codes[id(code)]

    def _note_globals(self, code: CodeType, table: dict[str, Any]) -> None:
        if id(code) in self._codes:
            return
        self._known(code)  # so that its globals are noted once
        module = str(table.get("__name__"))
        self.places.note([(module, table)], depth=0)
        for name in globals_in(code):
            if name in table:
                find = partial(table.get, name, _MISSING)
                self._note(f"{module}.{name}", (id(table), name), find, code)

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
        if not (is_plain(value) or is_of_a_capture(value) or issubclass(type(value), torch.Tensor)):
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
        if self._is_own(value) or isinstance(value, _HOLDERS):
            self._note_bound(name, value, code)
        elif not (isinstance(value, (type, ModuleType)) and is_pytorchs(value)):
            for attribute in self._known(code).names:
                self._note_attribute(name, value, attribute, code)

    def _note_bound(self, name: str, value: Any, code: CodeType) -> None:
        """Note what a function has besides its variables, or an object of C's has bound."""
        if isinstance(value, _CACHED):
            self._caches.append(value)
        find = partial(_held_by, reference(value))
        if any(find()):
            self._note(name, (id(value), "()"), find, code)

    def _note_attribute(self, name: str, owner: Any, key: str, code: CodeType) -> None:
        table = table_of(owner)
        name = f"{name}.{key}"
        if table is not None and key in table and not isinstance(owner, type):
            if isinstance(owner, (nn.Module, Optimizer)):
                # Its attributes are compared, not what they lead to.
                if key not in _TABLES_OF_OPTIMIZERS:
                    self._look_into(name, table[key], code)
            else:
                self._note(name, (id(owner), key), partial(_in_table, reference(owner), key), code)
            return
        for kind in (owner if isinstance(owner, type) else type(owner)).__mro__:
            if key not in kind.__dict__:
                continue
            found = kind.__dict__[key]
            if isinstance(found, MemberDescriptorType):  # one of __slots__
                find = partial(_in_slot, reference(owner), found)
                self._note(name, (id(owner), key), find, code)
            elif not hasattr(type(found), "__get__") or self._is_own(found):
                find = partial(kind.__dict__.get, key, _MISSING)
                self._note(name, (id(kind), key), find, code)
                break
            return
        else:
            if key not in self._known(code).texts:
                return
        if type(table) is dict and not isinstance(owner, (nn.Module, ModuleType)):
            # The object's own may get this name: it hides the class's, and `hasattr` may ask.
            self._note(name, (id(owner), key), partial(_in_table, reference(owner), key), code)

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


_TABLES_OF_OPTIMIZERS = ("defaults", "param_groups", "state")
"""Those that are compared one by one."""

_HOLDERS = (
    BuiltinMethodType,
    MappingProxyType,
    MethodType,
    partial,
    _CACHED := type(lru_cache(len)),
)
"""Types whose objects hold others in no attribute of Python's."""


def _held_by(find: Callable[[], Any]) -> Any:
    """Return what a function has besides its variables, or what an object of C's has bound."""
    value = find()
    if value is None:
        return _GONE
    if isinstance(value, FunctionType):
        return [value.__defaults__, value.__kwdefaults__, value.__dict__]
    held = gc.get_referents(value)
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
