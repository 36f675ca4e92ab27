"""Compiled models: the plan of what is saved stands inside the graphs.

`compile` and the backend "stormd" of torch.compile have AOTAutograd's joint graph divided with
three choices for each saved value: keep, offload, compute again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["compile", "plans_of"]

if TYPE_CHECKING:
    from storm_client.compile.backend import compile, plans_of  # noqa: A004 - torch.compile's name
else:

    def __getattr__(name: str) -> Any:
        """Load the compiler where it is used: it takes seconds, and most programs do without."""
        if name not in __all__:
            raise AttributeError(name)
        from storm_client.compile import backend

        return getattr(backend, name)
