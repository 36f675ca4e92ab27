"""Calls an operator without PyTorch's dispatcher if only the results are needed.

For an operator written in Python the dispatcher costs about 40 us a call, and twice that with
gradients: more than most scans take on a GPU. So a call bypasses the dispatcher if its tensors are
plain and no compiler, mode or autocast is active. It runs the kernel directly, as an autograd node
if a gradient is required. torch.func's transforms do not support the dispatcher's autograd nodes;
inside them a call uses an autograd function that they support. All other calls use the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import UsageError

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

__all__ = ["Operator"]

_PLAIN = (Tensor, torch.nn.Parameter)
_DEVICES = ("cpu", "cuda")


class Operator:
    """One operator, called like the function that implements it."""

    def __init__(
        self,
        op: CustomOpDef,
        run: Callable[..., Any],
        setup: Callable[..., None],
        backward: Callable[..., Any],
        vmap: Callable[..., Any],
    ) -> None:
        """Register autograd and vmap functions for `op`, which runs `run`, with torch.library."""
        self.op = op
        self._run = run
        op.register_autograd(backward, setup_context=setup)
        op.register_vmap(vmap)

        class Node(torch.autograd.Function):
            """The autograd node of a call that bypasses the dispatcher.

            With a separate `setup_context` PyTorch would inspect `run`'s signature in each call.
            """

            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:
                results = run(*arguments)
                setup(ctx, arguments, results)
                return results

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Any:
                return backward(ctx, *gradients)

        self._node = Node
        methods = {
            "forward": staticmethod(run),
            "setup_context": staticmethod(setup),
            "backward": Node.backward,
            "vmap": staticmethod(vmap),
        }
        self._transformed: Any = type("Transformed", (torch.autograd.Function,), methods)
        """An autograd function that torch.func's transforms support, unlike the dispatcher's."""

    def __call__(self, *arguments: Any) -> Any:
        """Return the operator's results.

        Raises UsageError for forward-mode derivatives, for which the dispatcher would return zeros.
        """
        if forward_ad._current_level >= 0:
            _refuse_tangents(arguments)
        if torch.compiler.is_compiling():
            return self.op(*arguments)
        if torch._C._are_functorch_transforms_active():
            return self._transformed.apply(*map(_as_autocast_has_it, arguments))
        tensors = [one for one in arguments if isinstance(one, Tensor)]
        if not _is_plain(tensors):
            return self.op(*arguments)
        if torch.is_grad_enabled():
            for one in tensors:
                if one.requires_grad:
                    return self._node.apply(*arguments)  # type: ignore[no-untyped-call]  # torch's gap
        return self._run(*arguments)


def _is_plain(tensors: list[Tensor]) -> bool:
    """Return whether the tensors are plain, and no mode, tracing or autocast sees the call."""
    state = torch._C
    if state._len_torch_dispatch_stack() or state._len_torch_function_stack():
        return False
    if state._get_tracing_state():
        return False
    for tensor in tensors:
        device = tensor.device.type
        if type(tensor) not in _PLAIN or device not in _DEVICES:
            return False
        if torch.is_autocast_enabled(device):
            return False
        if state._dispatch_keys(tensor).raw_repr() != _plain_keys(device):
            return False
    return True


def _as_autocast_has_it(argument: Any) -> Any:
    """Return an argument as the dispatcher would pass it on: under autocast in float32."""
    if isinstance(argument, Tensor) and argument.is_floating_point():
        is_on = torch.is_autocast_enabled(argument.device.type)
        return argument.float() if is_on and argument.dtype is not torch.float64 else argument
    return argument


def _refuse_tangents(arguments: tuple[Any, ...]) -> None:
    for one in arguments:
        if not isinstance(one, Tensor):
            continue
        if forward_ad.unpack_dual(one).tangent is not None:  # type: ignore[no-untyped-call]
            raise UsageError(
                "a scan has no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad); use "
                "reverse mode, as torch.func.vjp or jacrev"
            )


@cache
def _plain_keys(device: str) -> int:
    """Return the dispatch keys of a plain tensor; conjugate or batched tensors have more keys."""
    with torch.inference_mode(False):  # the first call may be in inference mode
        return torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr()
