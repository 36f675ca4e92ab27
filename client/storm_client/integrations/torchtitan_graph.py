"""A memory policy for torchtitan's `graph_trainer`, which traces a step into one graph.

    from storm_client.integrations.torchtitan_graph import register

    register("stormd", budget="12GiB")
    config.compile.memory_policy = "stormd"

No saved-tensor hook can see into such a graph. So this policy decides and torchtitan acts. The
planner that decides for hooks tags each activation that the backward pass reads: to be saved,
recomputed or offloaded. torchtitan's own passes carry this out. They offload to pinned memory of
the process: not to the daemon's pool, and not compressed.

torchtitan's "default" policy tags the graph first. Its tags of gathered parameters, collectives and
sizes are kept; only ordinary activations of layers get another tag.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from storm_client.errors import UsageError
from storm_client.monitoring.layers import MODEL, layer_name
from storm_client.planner.decisions import Decision, Keep, Replay
from storm_client.planner.machine import CUDA
from storm_client.planner.problem import Problem, Value
from storm_client.planner.solver import choose
from stormd.protocol import Budget, parse_budget

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

__all__ = ["register", "tag_activations"]

MIN_BYTES = 4096
"""Smaller activations are left to torchtitan, whose offload skips them too."""

_EXPENSIVE = frozenset({"addmm", "baddbmm", "bmm", "convolution", "linear", "mm"})
"""Operators that take longer than moving their result through memory. Attention is never
recomputed: its operators carry the state of a random generator."""

_CHEAP = frozenset(
    {"_fused_rms_norm", "_softmax", "_log_softmax", "_to_copy", "cat", "clone", "mean", "sum"}
    | {"native_layer_norm", "native_group_norm"}
)
"""Deterministic operators, in addition to those that PyTorch tags as pointwise."""

_VIEWS = frozenset({"_unsafe_view", "reshape"})
"""Operators whose result shares the input's storage although their schema does not say so."""


def register(name: str = "stormd", *, budget: str | float = "least") -> None:
    """Register a memory policy with torchtitan under `name`, replacing one of that name.

    `budget` is how much of the layers' saved values may be kept on the device: "least", bytes, a
    size as "12GiB", or a fraction. "fit" is not supported, since nothing has run when a graph is
    traced.

    Raises:
        UsageError: an invalid budget, or "fit".
        ImportError: torchtitan is not installed, or has no graph_trainer.
    """
    try:
        parsed = parse_budget(budget)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if parsed == "fit":
        raise UsageError(
            "budget is 'fit', and a graph is planned before anything has run: pass bytes, a size "
            "as '12GiB' or a fraction"
        )
    from torchtitan.experiments.graph_trainer import memory_policy  # registers the default
    from torchtitan.experiments.graph_trainer.registry import (
        MEMORY_POLICY_REGISTRY,
        register_memory_policy,
    )

    del memory_policy

    @register_memory_policy(name)  # type: ignore[untyped-decorator]  # its types are not read
    def policy(gm: GraphModule, *, config: Any) -> GraphModule:
        MEMORY_POLICY_REGISTRY["default"](gm, config=config)
        host = int(config.compile.cpu_offload_budget_gb * 2**30)
        return tag_activations(gm, budget=parsed, host_bytes=host)


def tag_activations(gm: GraphModule, *, budget: Budget = "least", host_bytes: int) -> GraphModule:
    """Tag the activations of a joint graph's layers in `node.meta["recompute"]`; return the graph.

    Nodes of the backward pass have `meta["autograd_backward"]`, those of a layer a
    `meta["custom"]["module_fqn"]` such as "layers.3.mlp", all a `meta["val"]`. At most `host_bytes`
    are offloaded, the largest tensors first, and none of the last layer, which is needed at once.
    Activations that are not offloaded for these reasons are saved. Random results are never
    recomputed, nor are results that read memory which is modified in place; such memory keeps its
    tag.
    """
    activations = _activations(gm)
    values = [one.value for one in activations]
    saved = sum(value.nbytes for value in values if value.is_saved)
    room = int(budget * saved) if isinstance(budget, float) else 0
    room = budget if type(budget) is int else room
    decisions = choose(Problem(tuple(values)), CUDA, budget_bytes=room).decisions
    last = activations[-1].layer if activations else ""
    wanted = {
        one.value.number
        for one, decision in zip(activations, decisions, strict=True)
        if not isinstance(decision, Keep | Replay) and one.layer != last and one.is_offloadable
    }
    offloaded = _largest(wanted, values, host_bytes)
    needed = _needed(activations, decisions)
    for one, decision in zip(activations, decisions, strict=True):
        if one.value.number in needed and not one.is_written:
            one.tag(_policy(decision, is_offloaded=one.value.number in offloaded))
    gm.recompile()
    return gm


def _policy(decision: Decision, *, is_offloaded: bool) -> CheckpointPolicy:
    if isinstance(decision, Replay):
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.MUST_CPU_OFFLOAD if is_offloaded else CheckpointPolicy.MUST_SAVE


def _needed(activations: list[_Activation], decisions: list[Decision]) -> set[int]:
    """Return the values that the backward pass reads, and all inputs of their recomputation."""
    needed: set[int] = set()
    for one, decision in zip(reversed(activations), reversed(decisions), strict=True):
        if one.value.is_saved or one.value.number in needed:
            needed.add(one.value.number)
            if isinstance(decision, Replay):
                needed.update(source for source in one.value.inputs if source >= 0)
    return needed


def _largest(wanted: set[int], values: list[Value], room: int) -> set[int]:
    """Return those of `wanted` that fit, the largest first."""
    taken: set[int] = set()
    for number in sorted(wanted, key=lambda n: values[n].nbytes, reverse=True):
        if values[number].nbytes <= room:
            room -= values[number].nbytes
            taken.add(number)
    return taken


# --- the graph as input of the planner ------------------------------------------------------


@dataclass
class _Activation:
    """The result of one node: a value of the planner, and the nodes that hold its memory."""

    node: Node
    layer: str
    value: Value
    parts: list[Node] = field(default_factory=list)
    """The single tensors, for a node that makes several."""
    is_written: bool = False
    """Whether an operator modifies its memory later."""

    @property
    def tensors(self) -> list[Node]:
        """The nodes whose output is one tensor."""
        return self.parts or [self.node]

    @property
    def is_offloadable(self) -> bool:
        """Whether torchtitan can offload all of it."""
        return all(one.meta["val"].is_contiguous() for one in self.tensors) and not self.is_written

    def tag(self, policy: CheckpointPolicy) -> None:
        """Set the tag of its nodes; a node that makes several tensors is never offloaded itself."""
        for node in (self.node, *self.parts):
            node.meta["recompute"] = policy
            if policy is CheckpointPolicy.MUST_CPU_OFFLOAD and not _is_large_tensor(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _activations(gm: GraphModule) -> list[_Activation]:
    """Return the results of the layers' forward nodes, in order."""
    made: list[_Activation] = []
    by_node: dict[Node, _Activation] = {}
    for node in gm.graph.nodes:
        layer = _layer(node)
        if node.op != "call_function" or node.meta.get("autograd_backward") or not layer:
            continue
        if node.target is operator.getitem or _shares(node):
            owner = by_node.get(node.args[0])
            if owner is not None:
                by_node[node] = owner
                if node.target is operator.getitem and node.args[0] is owner.node:
                    owner.parts.append(node)
            continue
        if _is_ordinary(node):
            sources = _sources(node, by_node)
            value = _value(node, len(made), tuple(one.value.number for one in sources))
            by_node[node] = _Activation(node, layer, value)
            made.append(by_node[node])
    _use(made, by_node)
    return made


def _use(made: list[_Activation], by_node: dict[Node, _Activation]) -> None:
    """Note the values that the backward pass reads, and those that may not be recomputed."""
    for node, one in by_node.items():
        one.is_written |= any(map(_writes, node.users))
        if any(user.meta.get("autograd_backward") for user in node.users):
            one.value = replace(one.value, uses=one.value.uses + 1)
    for one in made:
        if one.is_written:
            one.value = replace(one.value, uses=0)
        if one.is_written or any(source.is_written for source in _sources(one.node, by_node)):
            one.value = replace(one.value, operation="")


def _sources(node: Node, by_node: dict[Node, _Activation]) -> Iterator[_Activation]:
    return (by_node[source] for source in node.all_input_nodes if source in by_node)


def _value(node: Node, number: int, inputs: tuple[int, ...]) -> Value:
    name = _name(node)
    is_pure = torch.Tag.nondeterministic_seeded not in _tags(node)
    can_replay = is_pure and (torch.Tag.pointwise in _tags(node) or name in _CHEAP | _EXPENSIVE)
    vals = _tensors(node.meta["val"])
    return Value(
        number=number,
        nbytes=sum(val.nbytes for val in vals),
        dtype=vals[0].dtype,
        shape=tuple(vals[0].shape),
        operation=name if can_replay else "",
        is_expensive=name in _EXPENSIVE,
        inputs=inputs,
    )


def _is_ordinary(node: Node) -> bool:
    """Return whether a node makes tensors of some size, in new memory, and is no collective."""
    target: Any = node.target
    if getattr(target, "namespace", "") == "_c10d_functional" or _writes(node):
        return False
    return sum(val.nbytes for val in _tensors(node.meta.get("val"))) >= MIN_BYTES


def _layer(node: Node) -> str:
    """Return the layer of a node; empty outside of numbered layers."""
    name = layer_name(node.meta.get("custom", {}).get("module_fqn", ""))
    return name if name != MODEL and name.rpartition(".")[2].isdecimal() else ""


def _shares(node: Node) -> bool:
    """Return whether a node's output shares the memory of its first argument."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or _name(node) in _VIEWS:
        return schema is not None
    return any(returned.alias_info is not None for returned in schema.returns)


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _tags(node: Node) -> list[torch.Tag]:
    return list(getattr(node.target, "tags", []))


def _name(node: Node) -> str:
    packet: Any = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def _is_large_tensor(node: Node) -> bool:
    val = node.meta["val"]
    return isinstance(val, torch.Tensor) and val.nbytes >= MIN_BYTES


def _tensors(val: Any) -> list[torch.Tensor]:
    if isinstance(val, torch.Tensor):
        return [val]
    return [one for one in val if isinstance(one, torch.Tensor)] if isinstance(val, tuple) else []
