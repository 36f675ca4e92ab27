"""Finds which of its parameters a Triton kernel reads and writes, from its compiled form.

Triton keeps the text of a kernel's intermediate form (TTIR), one operation a line, after all
functions have been inlined. From each load and store the pointer is followed back to the kernel's
parameters. An operation is accepted only if it is known to depend on nothing but the parameters and
the memory that they point to. So atomic operations, whose order may differ, assembler, pointers
made from numbers and unknown operations are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

__all__ = ["Accesses", "accesses_of"]

_NAME: Final = re.compile(r"%\w+")
_FUNCTION: Final = re.compile(r"tt\.func (?:\w+ )?@\w+\((.*)\)")
_PARAMETER: Final = re.compile(r"(%\w+): (\S+)")
_OPERATION: Final = re.compile(r'(?:(%[\w%:, ]+) = )?"?([a-z_]+\.[\w.]+)"?')

_POINTER: Final = "!tt.ptr"
_TO_POINTERS: Final = "!tt.ptr<!tt"

_FLOW: Final = frozenset({"scf.for", "scf.if", "scf.while"})
_ENDS: Final = frozenset({"scf.yield", "scf.condition"})

_MATH: Final = ("arith.", "math.")
"""Dialects whose operations depend on their operands alone."""

_OTHERS: Final = """
    llvm.intr.assume tt.addptr tt.bitcast tt.broadcast tt.cat tt.clampf tt.dot tt.dot_scaled
    tt.expand_dims tt.fp_to_fp tt.gather tt.get_num_programs tt.get_program_id tt.histogram tt.join
    tt.load tt.make_range tt.mulhiui tt.precise_divf tt.precise_sqrt tt.reduce tt.reduce.return
    tt.reshape tt.return tt.scan tt.scan.return tt.splat tt.split tt.store tt.trans tt.unsplat
"""
"""Operations that depend on their operands alone, or read or write at pointers among them."""

_KNOWN: Final = frozenset((*_OTHERS.split(), *_FLOW, *_ENDS))

_LIBRARY: Final = ("__nv_", "__ocml_")
"""Name prefixes of device library functions, which are mathematical functions."""


class Accesses(NamedTuple):
    """Places of parameters among those that the compiled kernel takes."""

    taken: int
    """The number of parameters."""
    pointers: frozenset[int]
    read: frozenset[int]
    written: frozenset[int]


def accesses_of(ttir: str) -> Accesses | None:
    """Return which parameters a kernel with this intermediate form reads and writes.

    None where that is not known, or where the kernel's results may depend on something else.
    """
    lines = [line.strip() for line in ttir.splitlines()]
    functions = [match for line in lines if (match := _FUNCTION.match(line))]
    if len(functions) != 1 or _TO_POINTERS in ttir:
        return None
    parameters = _PARAMETER.findall(functions[0][1])
    pointers = {name: at for at, (name, kind) in enumerate(parameters) if _POINTER in kind}
    found = _Pointers(pointers)
    is_settled = False
    while not is_settled:  # a loop passes pointers back to its begin
        if not found.follow(lines):
            return None
        is_settled = not found.has_grown
    if found.is_unknown:
        return None
    at = frozenset(pointers.values())
    return Accesses(len(parameters), at, frozenset(found.read), frozenset(found.written))


class _Pointers:
    """Maps the pointers of a kernel to the parameters that they may come from."""

    def __init__(self, parameters: dict[str, int]) -> None:
        self._of = {name: {at} for name, at in parameters.items()}
        self._regions: list[list[str]] = []
        """For each operation that encloses the present line, the names on its first line."""
        self.read: set[int] = set()
        self.written: set[int] = set()
        self.has_grown = False
        self.is_unknown = False
        """Whether the kernel reads or writes through a pointer of unknown origin."""

    def follow(self, lines: Iterable[str]) -> bool:
        """Go through all operations once; return whether all of them are known."""
        self.has_grown = self.is_unknown = False
        self._regions.clear()
        for line in lines:
            if line.startswith("#"):
                continue
            names = _NAME.findall(line)
            if line.startswith("}") and self._regions:
                names += self._regions.pop()  # another region of the same operation may begin
            found = _OPERATION.match(line)
            if line.startswith("^"):
                self._regions[-1].extend(names)  # the arguments of a region
            elif found and not found[2].startswith("tt.func"):
                if not _is_known(found[2], line):
                    return False
                made = _NAME.findall(found[1] or "")
                self._run(found[2], made, names, is_moving=_POINTER in line)
            if line.endswith("{"):
                self._regions.append(names)
        return True

    def _run(self, name: str, made: list[str], names: list[str], *, is_moving: bool) -> None:
        if name == "tt.load":
            self._access(names[len(made)], self.read)
        elif name == "tt.store":
            self._access(names[0], self.written)
        elif is_moving and name in _FLOW:
            self._hand_on(names, names)
        elif is_moving:
            self._hand_on(names[len(made) :], self._regions[-1] if name in _ENDS else made)

    def _access(self, name: str, places: set[int]) -> None:
        places |= self._of.get(name, set())
        self.is_unknown |= not self._of.get(name)

    def _hand_on(self, given: Iterable[str], taken: Iterable[str]) -> None:
        places = set().union(*(self._of.get(name, ()) for name in given))
        for name in taken:
            known = self._of.setdefault(name, set())
            self.has_grown |= not places <= known
            known |= places


def _is_known(name: str, line: str) -> bool:
    if name == "tt.extern_elementwise":
        return "pure = true" in line and any(f'symbol = "{one}' in line for one in _LIBRARY)
    return name.startswith(_MATH) or name in _KNOWN
