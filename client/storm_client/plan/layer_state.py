"""What decides what a call of a layer does: noted at the call, and there again for a later one.

What the layer was given is not kept where it can be saved for the backward pass, as the inputs of
any operation are: that is left to who calls again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.utils._device import DeviceContext

from storm_client.blocks import function_modes
from storm_client.errors import ActivationLost
from storm_client.layers import parts_of
from storm_client.plan.layer_graph import uncached_casts
from storm_client.plan.layer_snapshots import (
    Attributes,
    RandomStates,
    TensorStates,
    address_of,
    copied,
    own_tensors,
    replaced,
    tensors_in,
)
from storm_client.settings import kinds_of_casts, settings_of_kernels
from storm_client.watching import are_altered, unaltered

if TYPE_CHECKING:
    from storm_client.stats import StatsRecorder

__all__ = ["Arguments", "Call", "CallState"]

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Those without names, and those by name."""


class CallState:
    """The arguments of one call, and its layer and PyTorch as they were.

    A later call is given lists and dicts as they were at first, whatever was written to them since.
    """

    def __init__(
        self,
        name: str,
        passed: Attributes,
        layer: torch.nn.Module,
        own: list[torch.Tensor],
        arguments: Arguments,
    ) -> None:
        """Note the present state of a layer, whose parameters and buffers are `own`."""
        args, kwargs = arguments
        self._name = name
        self._passed = passed
        self._layer = layer
        self._own = TensorStates(own + passed.tensors)
        self._casts = kinds_of_casts()
        self._device = _device_context()
        first = self.saved_of(args)
        places = {id(one): place for place, one in enumerate(first)}
        self._places = [places.get(id(argument)) for argument in args]
        """Of the arguments that are tensors, which of the first: one tensor is one again."""
        loose = [None if isinstance(one, torch.Tensor) else one for one in args]
        held = {id(one): one for one in tensors_in((*loose, *kwargs.values()))}
        self._loose = copied((loose, kwargs))
        self._held = TensorStates(list(held.values()))
        self._addresses = [(weakref.ref(one), address_of(one)) for one in first]
        self._inside = {places[key]: one for key, one in held.items() if key in places}
        """Of the first the tensors that lists, dicts or names refer to as well."""
        self._kept = [one for key, one in held.items() if key not in places]
        self._random = RandomStates((*first, *held.values()))
        is_on_gpu = any(tensor.is_cuda for tensor in (*own, *first, *held.values()))
        self._device_type = "cuda" if is_on_gpu else "cpu"
        self._settings = settings_of_kernels(self._device_type)

    @staticmethod
    def saved_of(args: tuple[Any, ...]) -> list[torch.Tensor]:
        """Return the tensors among arguments that are to be saved, each once."""
        return list({id(one): one for one in args if isinstance(one, torch.Tensor)}.values())

    def given(self, saved: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return all that the layer was given, each once, of which some was saved."""
        first = list(saved)
        for place, tensor in self._inside.items():
            first[place] = tensor
        return first + self._kept

    def arguments(
        self, given: Sequence[torch.Tensor], instead: Mapping[int, torch.Tensor]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments, with what is `given`, or others `instead` by the id of each."""
        loose, kwargs = copied(self._loose)
        if instead and (self._inside or self._kept):
            loose, kwargs = replaced(loose, instead), replaced(kwargs, instead)
        for index, place in enumerate(self._places):
            if place is not None:
                loose[index] = instead.get(id(given[place]), given[place])
        return loose, kwargs

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Have PyTorch record, cast and draw as it did, and use no casts of other graphs.

        Nor modes of the script: a call that passes through some is never made again.
        """
        casts = kinds_of_casts()
        with ExitStack() as stack, self._random.again(), torch.enable_grad():
            if are_altered():
                stack.enter_context(unaltered())
            if any(is_enabled for _, is_enabled, _ in casts):
                stack.enter_context(uncached_casts())
            for before, now in zip(self._casts, casts, strict=True):
                if before != now:
                    kind, is_enabled, dtype = before
                    stack.enter_context(torch.autocast(kind, dtype, enabled=is_enabled))
            if self._device is not None:
                stack.enter_context(self._device)
            yield

    def check(self) -> None:
        """Look whether a call would do again what the first did.

        Raises:
            ActivationLost: something that it reads is not as it was.
        """
        if difference := self._difference():
            raise ActivationLost(
                f"a parameter, a buffer, an attribute or the mode of {self._name} was changed "
                f"between the forward and the backward pass, or by its forward ({difference}), and "
                "the backward pass was to run that layer again; change it after the backward pass, "
                "or pass offload(..., layers=[])"
            )
        difference = self._held.difference() or next(filter(None, map(_moved, self._addresses)), "")
        if difference:
            raise ActivationLost(
                f"a {difference} that {self._name} was given was changed in place, or given other "
                "data, before the backward pass, which was to run that layer again; change a copy "
                "of it, or pass offload(..., layers=[])"
            )
        if settings_of_kernels(self._device_type) != self._settings:
            raise ActivationLost(
                f"settings of PyTorch (attention kernels, cuDNN, precision, default dtype, "
                f"determinism, number of threads) are others in the backward pass, which was to "
                f"run {self._name} again, than in the forward pass; run it within the same ones, "
                "or pass offload(..., layers=[])"
            )

    def cannot_be_called_again(self, reason: str) -> ActivationLost:
        """Return the error of a call that nothing has shown to be one which could not be."""
        return ActivationLost(
            f"{self._name} was to be run again in the backward pass, which had nothing else saved "
            f"of it, and {reason}: the sums of its gradients would have other bits; that layer is "
            "run otherwise from here on, so do this step again, or pass offload(..., layers=[])"
        )

    def did_otherwise(self, difference: str) -> ActivationLost:
        """Return the error of a later call that did not do what the first did."""
        return ActivationLost(
            f"{self._name}, which the backward pass has run again, did not do what it did in the "
            f"forward pass: {difference}; pass offload(..., layers=[])"
        )

    def _difference(self) -> str:
        """Return what of the layer is not as it was; empty where all is."""
        if self._passed.is_untouched(self._layer):
            return self._own.difference()
        parts = list(parts_of([self._layer]))
        if not self._passed.is_of(parts):
            return "its modules, or their modes"
        own = own_tensors(parts)
        if not self._own.is_of(own + self._passed.tensors):
            return "its set of parameters and buffers"
        return self._passed.difference(parts) or self._own.difference()


class Call(NamedTuple):
    """A call that may be made again."""

    state: CallState
    forward: Callable[..., Any]
    """Of the layer."""
    stats: StatsRecorder


def _moved(noted: tuple[weakref.ref[torch.Tensor], int]) -> str:
    """Return which tensor has been given other data since, while somebody holds it; empty if not.

    Of what it was given then nothing is left if nobody does.
    """
    reference, address = noted
    tensor = reference()
    if tensor is None:
        return ""
    tensor._fix_weakref()  # type: ignore[attr-defined]  # what C++ alone holds comes back
    return f"tensor of shape {list(tensor.shape)}" if address_of(tensor) != address else ""


def _device_context() -> DeviceContext | None:
    """Return the innermost context of this thread that says where tensors are made."""
    contexts = (mode for mode in reversed(function_modes()) if isinstance(mode, DeviceContext))
    return next(contexts, None)
