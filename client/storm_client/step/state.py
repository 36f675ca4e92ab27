"""What a captured step reads besides its arguments: where it is, and what must not differ.

Tensors are found by their place, such as a module's parameter or an optimizer's table. So a run
uses state that was loaded between steps. Everything else that Python code decided by is compared
before each run. Where it differs, the step is captured again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import is_, itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules import module as modules
from torch.nn.utils import parametrize
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)
from torch.overrides import _get_current_function_mode_stack

from storm_client.eager.settings import deciding_settings, kinds_of_casts
from storm_client.step.captured import VARYING_SETTINGS, Captured, is_varying
from storm_client.step.scalars import evaluate
from storm_client.step.variables import (
    are_themselves,
    attributes,
    identified,
    is_plain,
    of_optimizer,
    of_parameters,
    of_tensor,
    variables,
    variables_of_type,
)

__all__ = ["State", "described", "surroundings"]


_Slot: TypeAlias = Callable[[Sequence[torch.Tensor]], Any]
"""Finds a tensor again, given the tensors among the step's arguments."""


def _itself(tensor: torch.Tensor) -> _Slot:
    """Return a slot for a tensor that is in no table: it gives the tensor itself."""
    return lambda _: tensor


def _in_table(table: Mapping[str, Any], key: str) -> _Slot:
    """Return a slot for a tensor in a module's table, such as a parameter or buffer."""
    return lambda _: table.get(key)


def _in_state(optimizer: Optimizer, parameter: Any, key: str) -> _Slot:
    """Return a slot for an optimizer's state, whose tables are replaced when a state is loaded."""

    def find(_: Sequence[torch.Tensor]) -> Any:
        table = optimizer.state.get(parameter)
        return table.get(key) if isinstance(table, dict) else None

    return find


def _in_group(optimizer: Optimizer, number: int, key: str) -> _Slot:
    """Return a slot for a setting of an optimizer's group that is a tensor."""

    def find(_: Sequence[torch.Tensor]) -> Any:
        groups = optimizer.param_groups
        return groups[number].get(key) if number < len(groups) else None

    return find


def _gradient_of(leaf: _Slot) -> _Slot:
    """Return a slot for a gradient from before the step: the present gradient of its leaf."""
    return lambda given: getattr(leaf(given), "grad", None)


class _Held(NamedTuple):
    node: fx.Node
    slot: _Slot
    form: tuple[Any, ...]
    """The tensor's properties on which the capture depends."""


class State:
    """What one captured step reads besides its arguments."""

    def __init__(
        self, captured: Captured, step: Callable[..., Any], leaves: Sequence[object]
    ) -> None:
        """Note the present state and the arguments; nothing has changed since the capture."""
        tensors = _tensors_in(leaves)
        self.captured = captured
        slots = _slots(captured)
        self.held = [
            _Held(one.node, slots.get(id(one.tensor), _itself(one.tensor)), _form(one.tensor))
            for one in captured.recording.outside.values()
            if one.argument is None
        ]
        self.besides = [slots[id(one)] for one in tensors if id(one) in slots]
        """Slots of tensors that are also arguments, such as a buffer that is passed to the step."""
        self.arguments = [
            (one.node, one.argument)
            for one in captured.recording.outside.values()
            if one.argument is not None
        ]
        self.step = step
        self._accumulating = _accumulating(one for one, _ in captured.recording.leaves.values())
        self._attributes_known: dict[int, tuple[tuple[object, ...], dict[str, Any]]] = {}
        """The last attributes of modules that have no containers, by the module's number."""
        self._places: list[tuple[int, int]] = []
        """The tensors' ids and addresses when their memory sharing was last found unchanged."""
        self.sharing = self._sharing(tensors, [held.slot(tensors) for held in self.held])
        self.conditions = list(dict.fromkeys(captured.recording.numbers.conditions))
        asked, known = captured.recording.asked, captured.recording.outside
        self._asked = [one for key, (one, _) in asked.items() if key not in known]
        """Tensors of which only properties are read, which are no inputs of the graph."""
        self.python = self._python(leaves)
        self.gradients = [
            (tensor, gradient is None) for tensor, gradient in captured.recording.leaves.values()
        ]

    def _python(self, leaves: Sequence[object]) -> list[Any]:
        """Return everything, besides tensors, that Python code may have decided by."""
        seed = self.captured.recording.generators.seed_read()
        found: list[Any] = [variables(self.step, leaves), surroundings(), seed]
        found += map(_form, self._asked)
        found += [
            (
                module.training,
                type(module),
                _ids(module._modules),
                of_parameters(module),
                [(key, one is None) for key, one in module._buffers.items()],
                self._attributes(number, module),
            )
            for number, module in enumerate(self.captured.modules)
        ]
        kinds = {type(module): None for module in self.captured.modules}
        found += [identified(kind.forward) for kind in kinds]
        found += [_hooks(module, _HOOKS_OF_MODULES) for module in self.captured.modules]
        trained = self.captured.recording.leaves.values()
        found += [_hooks(leaf, _HOOKS_OF_LEAVES) for leaf, _ in trained]
        found.append(_hooks_of_nodes(self._accumulating))
        for optimizer in self.captured.optimizers:
            for group in optimizer.param_groups:
                found.append([_plain_setting(key, value) for key, value in group.items()])
            found.append(of_optimizer(optimizer))
            found.append(_hooks(optimizer, _HOOKS_OF_OPTIMIZERS))
        return found

    def _attributes(self, number: int, module: nn.Module) -> dict[str, Any]:
        """Return a module's attributes, or the last result if its values are the same objects."""
        values = tuple(module.__dict__.values())
        known = self._attributes_known.get(number)
        if known and len(known[0]) == len(values) and all(map(is_, known[0], values)):
            return known[1]
        found = attributes(module)
        if are_themselves(module):
            self._attributes_known[number] = values, found
        return found

    def _shares_alike(
        self, tensors: Sequence[torch.Tensor], held: Collection[torch.Tensor]
    ) -> bool:
        """Return whether tensors share memory as before; equal addresses mean that they do."""
        places = [
            (id(one), one.data_ptr() if one.layout is torch.strided else 0)
            for one in (*tensors, *held)
        ]
        if places == self._places and not self._has_others:
            return True
        is_alike = self.sharing == self._sharing(tensors, held)
        self._places = places if is_alike else []
        return is_alike

    @property
    def _has_others(self) -> bool:
        """Whether there are tensors besides the arguments and the graph's inputs."""
        return bool(self.besides) or bool(variables_of_type(self.step, torch.Tensor))

    def _sharing(
        self, tensors: Sequence[torch.Tensor], held: Iterable[torch.Tensor]
    ) -> list[tuple[int, int]]:
        """Return which tensors that the step may read are the same or share memory.

        A write to one of them changes the others, so a capture is valid only for this sharing.
        """
        besides = [slot(tensors) for slot in self.besides]
        found = [*tensors, *held, *besides, *variables_of_type(self.step, torch.Tensor)]
        tables: tuple[dict[int, int], dict[int, int]] = ({}, {})
        return [
            (tables[0].setdefault(id(one), at), tables[1].setdefault(_memory_of(one), at))
            for at, one in enumerate(found)
        ]

    def different(self, leaves: Sequence[object]) -> list[str]:
        """Return the names of variables that are no longer as they were, as far as known."""
        before, now = self.python[0], variables(self.step, leaves)
        names = [name for name in now if name not in before or before[name] != now[name]]
        return [*names, *self.captured.called.different()]

    def values(self, leaves: Sequence[object]) -> dict[fx.Node, Any] | None:
        """Return the values of the graph's inputs now; None where another capture is needed.

        `leaves` are the arguments, tensors and others.
        """
        tensors = _tensors_in(leaves)
        found: dict[fx.Node, Any] = {}
        for held in self.held:
            tensor = held.slot(tensors)
            if not isinstance(tensor, torch.Tensor) or _form(tensor) != held.form:
                return None
            found[held.node] = tensor
        if not self._shares_alike(tensors, found.values()) or self.python != self._python(leaves):
            return None
        if any(self.captured.called.different()):
            return None
        for setting in self.captured.settings:
            found[setting.node] = setting.value()
        if any(evaluate(one.node, found) != one.outcome for one in self.conditions):
            return None
        for node, number in self.arguments:
            found[node] = tensors[number]
        return found if self._are_as_asked(found) else None

    def _are_as_asked(self, found: Mapping[fx.Node, Any]) -> bool:
        """Return whether tensors have gradients as before, and answer what the step asks of them.

        `found` are the values of the graph's inputs.
        """
        outside = self.captured.recording.outside

        def present(tensor: torch.Tensor) -> torch.Tensor:
            known = outside.get(id(tensor))
            return tensor if known is None else found[known.node]

        return all(
            (present(one).grad is None) is had_none for one, had_none in self.gradients
        ) and all(
            one.ask(present(one.tensor)) == one.answer
            for one in self.captured.recording.questions.values()
        )


def _tensors_in(leaves: Sequence[object]) -> list[torch.Tensor]:
    """Return the tensors among a step's arguments; a capture knows them by their index here."""
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def described(leaf: object) -> Any:
    """Return the properties of an argument on which a captured step depends, as a table's key.

    An object may be another one at the same address, or hold other values: `State` checks that.
    """
    if isinstance(leaf, torch.Tensor):
        offset = leaf.storage_offset() * leaf.element_size() if leaf.device.type == "meta" else 0
        return type(leaf), *_form(leaf), offset % 16
    return identified(leaf) if is_plain(leaf) else (type(leaf), id(leaf))


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    added = of_tensor(tensor)
    return tensor.shape, tensor.dtype, tensor.requires_grad, tensor.stride(), tensor.device, added


def surroundings() -> tuple[Any, ...]:
    """Return PyTorch's settings on which a recording depends."""
    return (
        kinds_of_casts(),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled(),
        bool(parametrize._cache_enabled),
        torch.backends.mha.get_fastpath_enabled(),
        _modes(),
        *deciding_settings(),
        *map(_of_others, _HOOKS_OF_ALL),
    )


def _modes() -> list[tuple[type, Any]]:
    """Return the kinds of the modes that override PyTorch's functions around a call."""
    around = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [(type(one), getattr(one, "device", None)) for one in around]


_HOOKS_OF_ALL: tuple[dict[int, Any], ...] = (
    modules._global_forward_hooks,
    modules._global_forward_pre_hooks,
    modules._global_backward_hooks,
    modules._global_backward_pre_hooks,
    _global_optimizer_pre_hooks,
    _global_optimizer_post_hooks,
)
"""Hooks of all modules and all optimizers."""

_HOOKS_OF_MODULES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_HOOKS_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_HOOKS_OF_LEAVES = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _memory_of(tensor: torch.Tensor | None) -> int:
    """Return the address of a tensor's storage; the tensor's id where it has none."""
    if tensor is None or tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def _ids(table: Mapping[str, object]) -> list[int]:
    return list(map(id, table.values()))


def _hooks(owner: object, tables: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the keys of an owner's hooks, which Python code may add and remove."""
    return [tuple(getattr(owner, name, None) or ()) for name in tables]


def _of_others(table: Mapping[int, object]) -> tuple[int, ...]:
    """Return the ids of a table's hooks except ours, which exist while another step is captured."""
    return tuple(
        id(hook)
        for hook in list(table.values())
        if not str(getattr(hook, "__module__", "")).startswith("storm_client.")
    )


def _accumulating(leaves: Iterable[torch.Tensor]) -> list[object]:
    """Return autograd's nodes that accumulate gradients.

    Hooks on a leaf's gradient are put on these nodes for as long as the nodes are held.
    """
    with torch.inference_mode(False), torch.enable_grad():
        return [get_gradient_edge(one).node for one in leaves if not one.is_inference()]


def _hooks_of_nodes(nodes: Sequence[object]) -> list[tuple[Any, ...]]:
    """Return the ids of the hooks of autograd's nodes, which only the garbage collector lists."""
    tables = [one for one in gc.get_referents(*nodes) if isinstance(one, dict) and one]
    return [tuple(map(id, table.values())) for table in tables]


def _plain_setting(key: str, value: Any) -> Any:
    if key == "params":
        return [id(one) for one in value]
    if isinstance(value, torch.Tensor):
        return key, id(value)
    if key in VARYING_SETTINGS and is_varying(value):
        return key, type(value)
    return key, identified(value)


def _slots(captured: Captured) -> dict[int, _Slot]:
    """Return a slot for each tensor in a table, by the tensor's id."""
    found: dict[int, _Slot] = {}
    for optimizer in captured.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            found |= {id(one): _in_group(optimizer, number, key) for key, one in _tensors(group)}
        for parameter, table in optimizer.state.items():
            if not isinstance(table, dict):
                continue
            found |= {id(one): _in_state(optimizer, parameter, key) for key, one in _tensors(table)}
    for module in captured.modules:
        for names in (module.__dict__, module._parameters, module._buffers):
            found |= {id(one): _in_table(names, key) for key, one in _tensors(names)}
    for leaf, gradient in captured.recording.leaves.values():
        if gradient is not None and id(gradient) not in found:
            found[id(gradient)] = _gradient_of(_slot_of_leaf(leaf, captured, found))
    return found


def _slot_of_leaf(leaf: torch.Tensor, captured: Captured, slots: Mapping[int, _Slot]) -> _Slot:
    known = captured.recording.outside.get(id(leaf))
    if known is not None and known.argument is not None:
        return itemgetter(known.argument)
    return slots.get(id(leaf), _itself(leaf))


def _tensors(table: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((key, one) for key, one in table.items() if isinstance(one, torch.Tensor))
