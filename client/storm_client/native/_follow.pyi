"""What the compiled module has; its sources are beside this file."""

from collections.abc import Callable
from typing import Any

import torch

class Kept:
    """What autograd holds for a tensor that is kept on the device."""

    @property
    def token(self) -> torch.Tensor: ...

class Tallies:
    """Counts of what became of saved tensors."""

    def __init__(self) -> None: ...
    def add_row(self) -> int: ...
    def drain(self) -> tuple[list[tuple[int, int, int]], float]: ...

class Owned:
    """The storages of a list of tensors, none of which it keeps."""

    def __init__(self, tensors: list[torch.Tensor], /) -> None: ...

class Script:
    """What a step that follows its plan saves, in order."""

    def __init__(self, events: list[tuple[int, int, int, int]], length: int, /) -> None: ...

class Follower:
    """Saved-tensor hooks of one step that follows a script."""

    def __init__(
        self,
        script: Script,
        tallies: Tallies,
        owned: Owned,
        pack: Callable[[torch.Tensor, int], Any],
        unpack: Callable[[Any], torch.Tensor],
        asked: Callable[[], None],
        least: int,
        small_row: int,
        parameter_row: int,
        /,
    ) -> None: ...
    @property
    def position(self) -> int: ...
    @property
    def owner(self) -> Any: ...
    @property
    def walks(self) -> bool: ...
    def pack(self, tensor: torch.Tensor, /) -> Any: ...
    def unpack(self, packed: Any, /) -> torch.Tensor: ...
    def go_on(self, position: int, /) -> None: ...
    def leave(self) -> None: ...

def configure(parameter: type, changed_in_place: Callable[..., RuntimeError], /) -> None: ...
