"""One call of a layer, and what it saves, which its forward makes again where that is asked for.

Autograd holds numbers in the place of what is saved, so the graph is the one that it would be
otherwise. The first number that the backward pass asks for has the forward called again, for what
all of them stand for; each is given away once, and freed with its use. What the layer was given is
saved as by any operation.

PyTorch's own checkpointing does the same for any function, and takes the thread as long as the
forward pass itself where operations are small. Here the layer has been tried: it does the same
twice where nothing that it reads has changed, and that is looked at before it is called again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Never

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._device import DeviceContext

from storm_client.blocks import Stacks, function_modes
from storm_client.errors import ActivationLost
from storm_client.layers import parts_of
from storm_client.plan.layer_trial import (
    Attributes,
    RandomStates,
    TensorStates,
    copied,
    own_tensors,
    tensors_in,
    version_of,
)
from storm_client.settings import deciding_settings, kinds_of_casts

if TYPE_CHECKING:
    from storm_client.stats import StatsRecorder

__all__ = ["LayerCall"]


class LayerCall:
    """A call in the forward pass, and those that follow from it in backward passes.

    Those are given lists and dicts as they were at first, whatever was written to them since.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        passed: Attributes,
        parts: Sequence[torch.nn.Module],
        *,
        own: list[torch.Tensor],
        stats: StatsRecorder,
    ) -> None:
        """Note the present state of a layer's `parts`, whose parameters and buffers are `own`."""
        self._name = name
        self._forward = forward
        self._stats = stats
        self._passed = passed
        self._parts = parts
        self._own = TensorStates(own + passed.tensors)
        self._settings = deciding_settings()
        self._saved: list[tuple[torch.dtype, torch.Size]] = []
        self._made: list[torch.Tensor | None] = []
        """What the numbers stand for, without what was given away; empty before it was made."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the forward returns."""
        self._note(args, kwargs)
        with saved_tensors_hooks(self._pack, self._unpack):
            return self._forward(*args, **kwargs)

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what is given, and what else decides what the forward does with it."""
        first = {id(one): one for one in args if isinstance(one, torch.Tensor)}
        self._given: torch.Tensor = _Given.apply(_RECORDED, *first.values())  # type: ignore[no-untyped-call]
        """Whose node has saved them, by the hooks that are on PyTorch's stack now."""
        places = {key: place for place, key in enumerate(first)}
        self._places = [places.get(id(argument)) for argument in args]
        """Of the arguments that are tensors, which of those given: one tensor is one again."""
        loose = [None if isinstance(one, torch.Tensor) else one for one in args]
        held = tensors_in((*loose, *kwargs.values()))
        self._loose = copied((loose, kwargs))
        self._held = [(tensor, version_of(tensor)) for tensor in held]
        self._inside = {places[id(one)]: one for one in held if id(one) in places}
        """Of those given the tensors that lists, dicts or names refer to as well."""
        self._random = RandomStates((*first.values(), *held))
        self._casts = kinds_of_casts()
        self._device = _device_context()

    def _pack(self, tensor: torch.Tensor) -> int:
        self._saved.append((tensor.dtype, tensor.shape))
        return len(self._saved) - 1

    def _unpack(self, number: int) -> torch.Tensor:
        """Return what a number stands for, having all made again unless that is here."""
        tensor = self._made[number] if self._made else None
        if tensor is None:
            stacks = Stacks()
            try:
                self._made = self._make_again()
            except BaseException:
                stacks.restore()
                raise
            tensor = self._made[number]
            assert tensor is not None, "made by one thread, and asked for by others"
        self._made[number] = None
        return tensor

    def _make_again(self) -> list[torch.Tensor | None]:
        """Return what the forward saves when it is called again.

        Raises:
            ActivationLost: what it reads is not as it was in the forward pass, or it saves other
                tensors.
        """
        self._check()
        began = perf_counter()
        args, kwargs = self._arguments()
        made: list[torch.Tensor] = []
        count = len(self._saved)

        def pack(tensor: torch.Tensor) -> None:
            made.append(tensor.detach())
            if len(made) == count:
                raise _AllMadeError

        try:
            with self._surroundings(), saved_tensors_hooks(pack, _never):
                self._forward(*args, **kwargs)
        except _AllMadeError:
            pass
        finally:
            self._stats.replayed(perf_counter() - began)
        if [(tensor.dtype, tensor.shape) for tensor in made] != self._saved:
            raise ActivationLost(
                f"{self._name}, which the backward pass has run again, did not do what it did in "
                f"the forward pass: it saved {_listed(made)} instead of {len(self._saved)} tensors "
                "of certain shapes; pass offload(..., layers=[])"
            )
        return list(made)

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Return what the forward was given."""
        node: Any = self._given.grad_fn
        brought = list(node.saved_tensors)
        for given, tensor in self._inside.items():
            brought[given] = tensor
        loose, kwargs = copied(self._loose)
        for index, place in enumerate(self._places):
            if place is not None:
                loose[index] = brought[place]
        return loose, kwargs

    def _surroundings(self) -> AbstractContextManager[object]:
        """Return a context in which PyTorch records, casts and draws as it did."""
        stack = ExitStack()
        stack.enter_context(self._random.again())
        for before, now in zip(self._casts, kinds_of_casts(), strict=True):
            if before != now:
                kind, is_enabled, dtype = before
                stack.enter_context(torch.autocast(kind, dtype, enabled=is_enabled))
        if self._device is not None:
            stack.enter_context(self._device)
        stack.enter_context(torch.enable_grad())
        return stack

    def _check(self) -> None:
        if difference := self._difference():
            raise ActivationLost(
                f"a parameter, a buffer, an attribute or the mode of {self._name} was changed "
                f"between the forward and the backward pass, or by its forward ({difference}), and "
                "the backward pass was to run that layer again; change it after the backward pass, "
                "or pass offload(..., layers=[])"
            )
        for tensor, version in self._held:
            if version_of(tensor) != version:
                raise ActivationLost(
                    f"a tensor of shape {list(tensor.shape)} that {self._name} was given was "
                    "changed in place before the backward pass, which was to run that layer again; "
                    "change a copy of it, or pass offload(..., layers=[])"
                )
        if deciding_settings() != self._settings:
            raise ActivationLost(
                f"settings of PyTorch (attention kernels, cuDNN, precision, default dtype, "
                f"determinism) are others in the backward pass, which was to run {self._name} "
                "again, than in the forward pass; run it within the same ones, or pass "
                "offload(..., layers=[])"
            )

    def _difference(self) -> str:
        """Return what of the layer is not as it was; empty where all is."""
        parts = list(parts_of(self._parts[:1]))
        if not self._passed.is_of(parts):
            return "its modules, or their modes"
        own = own_tensors(parts)
        if not self._own.is_of(own + self._passed.tensors):
            return "its set of parameters and buffers"
        return self._passed.difference(parts) or self._own.difference()


class _AllMadeError(Exception):
    """Ends a forward that is called again, once all that it saved is there."""


class _Given(torch.autograd.Function):
    """An operation that does nothing, and saves what it is given."""

    @staticmethod
    def forward(ctx: Any, recorded: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return recorded.detach()

    @staticmethod
    def jvp(*_: Any) -> torch.Tensor:
        """Return what forward-mode differentiation asks for, where what was given has tangents."""
        return torch.zeros(0)

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Never:  # noqa: ARG004 - so it is called
        raise AssertionError("nobody has its result")


_RECORDED: Final = torch.empty(0, device="cpu", requires_grad=True)
"""Has operations be recorded of which nothing else needs a gradient."""


def _device_context() -> DeviceContext | None:
    """Return the innermost context of this thread that says where tensors are made."""
    contexts = (mode for mode in reversed(function_modes()) if isinstance(mode, DeviceContext))
    return next(contexts, None)


def _never(_: object) -> Never:
    raise AssertionError("nobody goes back through a call that is made again")


def _listed(tensors: Sequence[torch.Tensor]) -> str:
    """Return some of the shapes of tensors."""
    shown = ", ".join(str(list(tensor.shape)) for tensor in tensors[:4])
    return f"{len(tensors)} ({shown}{', ...' if len(tensors) > 4 else ''})"
