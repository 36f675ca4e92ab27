"""Sees which modules and optimizers a step reads, however it reaches them.

A step may call another method than `forward`, find a module in a dict deep in an object, or read an
attribute alone. All of these look up an attribute of the module, so that is what is watched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

__all__ = ["watching_reads"]

Note = Callable[[Any, str], object]

_FIRST_TABLE = {nn.Module: "_modules", Optimizer: "param_groups"}
"""An attribute without which an object of a kind is still being made."""


@contextmanager
def watching_reads(notes: Mapping[type, Note]) -> Iterator[None]:
    """Call a kind's note before this thread looks up an attribute of an object of that kind.

    The note gets the object and the attribute's name. It does not concern objects that are made
    within the block, nor what a note looks up itself.
    """
    thread, made, is_noting = threading.get_ident(), dict[int, object](), False

    def look_up_of(kind: type) -> Callable[[object, str], Any]:
        note, table = notes[kind], _FIRST_TABLE[kind]

        def look_up(owner: object, name: str) -> Any:
            nonlocal is_noting
            if threading.get_ident() == thread and not is_noting and name != "__class__":
                if table not in object.__getattribute__(owner, "__dict__"):
                    made[id(owner)] = owner
                if id(owner) not in made:
                    is_noting = True
                    try:
                        note(owner, name)
                    finally:
                        is_noting = False
            return object.__getattribute__(owner, name)

        return look_up

    for kind in notes:
        kind.__getattribute__ = look_up_of(kind)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for kind in notes:
            del kind.__getattribute__
