"""What the example for LMCache uses of it, where lmcache is not installed.

As lmcache 0.5.6 documents it. A test compares names and arguments with the real package where that
is installed.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

FACTORIES: dict[str, Callable[[dict[str, object]], Any]] = {}


class Serializer(abc.ABC):
    @abc.abstractmethod
    def serialize(self, src: Any, dst: Any, key: Any) -> int: ...

    @abc.abstractmethod
    def estimate_serialized_size(self, layout_desc: Any) -> int: ...


class Deserializer(abc.ABC):
    @abc.abstractmethod
    def deserialize(self, src: Any, dst: Any, key: Any) -> None: ...


class AsyncSerdeProcessor:
    def __init__(
        self, serializer: Serializer, deserializer: Deserializer, max_workers: int = 1
    ) -> None:
        self.pair = serializer, deserializer
        self.max_workers = max_workers

    def close(self) -> None:
        """Nothing is held."""


def register_serde_factory(name: str, factory: Callable[[dict[str, object]], Any]) -> None:
    if name in FACTORIES:
        raise ValueError(f"Serde type already registered: {name!r}")
    FACTORIES[name] = factory


def get_registered_serde_types() -> list[str]:
    return list(FACTORIES)


@dataclass(frozen=True)
class MemoryLayoutDesc:
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]


@dataclass
class MemoryObjMetadata:
    shape: torch.Size
    dtype: torch.dtype
    address: int
    phy_size: int
    ref_count: int
    fmt: Any = None
    shapes: Any = None
    dtypes: Any = None


class TensorMemoryObj:
    def __init__(
        self, raw_data: torch.Tensor, metadata: MemoryObjMetadata, parent_allocator: Any
    ) -> None:
        self.raw_data, self.meta, self.parent_allocator = raw_data, metadata, parent_allocator
        self._used: int | None = None

    def set_used_size(self, n: int) -> None:
        self._used = n

    @property
    def tensor(self) -> torch.Tensor:
        if self._used is not None:
            return self.raw_data[: self._used]
        return self.raw_data.view(self.meta.dtype).view(self.meta.shape)


def modules() -> dict[str, ModuleType]:
    """Return the modules by name."""
    contents: dict[str, dict[str, Any]] = {
        "lmcache": {},
        "lmcache.v1": {},
        "lmcache.v1.distributed": {},
        "lmcache.v1.distributed.api": {"MemoryLayoutDesc": MemoryLayoutDesc},
        "lmcache.v1.distributed.serde": {
            one.__name__: one
            for one in (
                *(AsyncSerdeProcessor, Deserializer, Serializer),
                *(get_registered_serde_types, register_serde_factory),
            )
        },
        "lmcache.v1.memory_management": {
            "MemoryFormat": SimpleNamespace(KV_2LTD="KV_2LTD"),
            "MemoryObjMetadata": MemoryObjMetadata,
            "TensorMemoryObj": TensorMemoryObj,
        },
    }
    made = {}
    for name, members in contents.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(members, __path__=[])
    return made
