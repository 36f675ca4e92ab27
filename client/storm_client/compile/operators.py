"""The operators in compiled graphs: `stormd::store`, `hold`, `fetch`, `wait`, and `materialize`.

    token = store(value, number, shared)    in the forward graph; autograd saves the token
    token = hold(parameter)                 for a parameter that others are recomputed from
    begun = fetch(token)                    in the backward graph, ahead of use
    value = wait(token, [begun, ...], size, stride, dtype, device)      right before use
    materialize(value)                      where a value is recomputed: see `partition.py`

A **token** is a CPU tensor of one int64, by which autograd holds the stored bytes. Its memory
belongs to an object that holds them, so bytes that nobody can request any more are freed, whatever
happens to the graph. A graph holds no other reference to this process, only numbers and shapes.

`wait` takes the results of the fetches that are to begin before it. So no compiler can delay these,
however it orders a graph. The results of all operators are new tensors, as the schemas say, but the
result of `wait` may share its memory with the stored value. See `inductor.py` and `partition.py`
for what keeps a compiler from writing to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import extract_tensor_metadata

from storm_client.compile import runtime

__all__ = ["FETCH", "HOLD", "MATERIALIZE", "STORE", "WAIT", "describe", "materialize", "token_like"]

_LIBRARY = torch.library.Library("stormd", "DEF")  # type: ignore[no-untyped-call]

_SCHEMAS = {
    "store(Tensor value, int number, bool shared) -> Tensor": torch.Tag.flexible_layout,
    "hold(Tensor value) -> Tensor": torch.Tag.flexible_layout,
    "fetch(Tensor token) -> Tensor": torch.Tag.needs_exact_strides,
    "wait(Tensor token, Tensor[] begun, SymInt[] size, SymInt[] stride, ScalarType dtype, "
    "Device device) -> Tensor": torch.Tag.needs_exact_strides,
    "materialize(Tensor value) -> ()": torch.Tag.flexible_layout,
}

for _schema, _layout in _SCHEMAS.items():
    _LIBRARY.define(_schema, tags=(torch.Tag.cudagraph_unsafe, _layout))  # type: ignore[no-untyped-call]

STORE = torch.ops.stormd.store.default
HOLD = torch.ops.stormd.hold.default
FETCH = torch.ops.stormd.fetch.default
WAIT = torch.ops.stormd.wait.default
MATERIALIZE = torch.ops.stormd.materialize.default


def _store(value: torch.Tensor, number: int, shared: bool) -> torch.Tensor:
    return runtime.store(value, number, shared=shared)


def _fetch(token: torch.Tensor) -> torch.Tensor:
    runtime.fetch(token)
    return torch.zeros(1, dtype=torch.int64)


def _wait(
    token: torch.Tensor, begun: list[torch.Tensor], size: list[int], stride: list[int], *_: object
) -> torch.Tensor:
    del begun  # an order, not a value; the stored value has its dtype and device
    return runtime.wait(token, tuple(size), tuple(stride))


def _materialize(value: torch.Tensor) -> None:
    """Do nothing: a compiler must have the value in memory here, as if it were saved."""


def _fake_token(*_: object) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _fake_wait(*arguments: Any) -> torch.Tensor:
    _, _, size, stride, dtype, device = arguments
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


for _name, _function, _fake in (
    ("store", _store, _fake_token),
    ("hold", runtime.hold, _fake_token),
    ("fetch", _fetch, _fake_token),
    ("wait", _wait, _fake_wait),
    ("materialize", _materialize, _materialize),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"stormd::{_name}", _fake, lib=_LIBRARY)
    torch.fx.node.has_side_effect(getattr(torch.ops.stormd, _name).default)


# --- in graphs ---------------------------------------------------------------------------------


def materialize(node: fx.Node) -> None:
    """Make a compiler compute a value as if it were saved: on its own, and in memory."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(MATERIALIZE, (node,))
    made.meta["val"] = None
    if "autograd_backward" in node.meta:
        made.meta["autograd_backward"] = True


def token_like(node: fx.Node) -> torch.Tensor:
    """Return a fake tensor for the token of a node's value, to be used while a graph is made."""
    with node.meta["val"].fake_mode:
        return torch.empty(1, dtype=torch.int64, device="cpu")


def describe(node: fx.Node, value: torch.Tensor) -> None:
    """Note the value of a node and its metadata."""
    node.meta["val"] = value
    node.meta["tensor_meta"] = extract_tensor_metadata(value)
