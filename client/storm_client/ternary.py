"""Ternary models in the daemon's shared cache: put once, then used by any process from there.

A model is stored as its planes (2 bits a weight), its scales and whatever else its state holds,
each as a cached tensor. Who loads it computes with those very planes, which are never widened. On a
GPU they come straight from the daemon's memory, so the host holds one copy, the cache's; a process
that computes on the host has its own.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn

from storm_client.cache import Cache
from storm_client.errors import CorruptBlob, UsageError

__all__ = ["load_model", "put_model"]


def put_model(cache: Cache, name: str, model: nn.Module, ttl: float | None = None) -> int:
    """Put the state of `model` into the cache under `name`; return its bytes.

    Convert it first (`storm_kernels.ternary.nn.convert`), or it takes what its floats take. The
    list of its tensors is put last, so whoever finds that finds the tensors too.

    Raises:
        UsageError: layers still have latent weights; freeze them.
        QuotaExceeded: the cache has no room. The name means what it meant before.
    """
    from storm_kernels.ternary.nn import TernaryLinear

    for path, layer in model.named_modules():
        if isinstance(layer, TernaryLinear) and not layer.frozen:
            raise UsageError(f"{path or 'the model'} has latent weights; freeze() it first")
    state: dict[str, Tensor] = model.state_dict()
    for key, tensor in state.items():
        cache.put(_part(name, key), tensor, ttl)
    listed = json.dumps(list(state)).encode()
    cache.put(name, torch.frombuffer(bytearray(listed), dtype=torch.uint8), ttl)
    return sum(tensor.nbytes for tensor in state.values())


def load_model(
    cache: Cache, name: str, model: nn.Module, device: torch.device | str = "cpu"
) -> bool:
    """Give `model` the state that is cached as `name`, on `device`; tell whether it was there.

    `model` has the same layers; on the meta device it takes no memory of its own before. Its own
    tensors are replaced, not filled, so no second copy is made.

    Raises:
        UsageError: the model has other layers than the one that was put. It is as it was.
        CorruptBlob: what is cached is no model; it is as it was.
    """
    listed = cache.get(name)
    if listed is None:
        return False
    state: dict[str, Tensor] = {}
    for key in _keys(name, listed):
        tensor = cache.get(_part(name, key), device)
        if tensor is None:
            return False  # dropped meanwhile, to make room
        state[key] = tensor
    own = model.state_dict()
    for key in own.keys() | state.keys():
        if key not in own or key not in state or own[key].shape != state[key].shape:
            raise UsageError(f"{name!r} and the model differ in {key!r}; build the model alike")
    model.load_state_dict(state, assign=True)
    return True


def _part(name: str, key: str) -> str:
    return f"{name}/{key}"


def _keys(name: str, listed: Tensor) -> list[str]:
    try:
        keys = json.loads(bytes(listed.tolist()))
    except (ValueError, TypeError) as error:
        raise CorruptBlob(f"{name!r} is no model in the cache: {error}") from error
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise CorruptBlob(f"{name!r} is no model in the cache: it lists no tensors")
    return keys
