"""Recorded results lie as those of PyTorch's kernels do, whatever arguments lie like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from storm_client.step.kernels import as_the_kernel_does
from support.training import assert_identical, seeded
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "log_softmax": lambda x: functional.log_softmax(x, 1),
    "logsigmoid": functional.logsigmoid,
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: functional.group_norm(x, 1),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[1:]),
    "smooth_l1": lambda x: functional.smooth_l1_loss(x, x.detach() * 2),
    "mse": lambda x: functional.mse_loss(x, x.detach() * 2),
    "huber": lambda x: functional.huber_loss(x, x.detach() * 2),
    "elu": functional.elu,
    "hardswish": functional.hardswish,
    "softplus": functional.softplus,
    "glu": lambda x: functional.glu(x, 1),
    "roll": lambda x: x.roll(1, 1),
    "gelu": functional.gelu,
    "softmax": lambda x: functional.softmax(x, 1),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "max_pool": lambda x: functional.max_pool2d(x, 2),
    "reflection": lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 1),
    "turned": lambda x: x.permute(3, 2, 1, 0),
    "a part": lambda x: x[..., :4],
    "expanded": lambda x: x[..., :1].expand(x.shape),
}


class Compared(TorchDispatchMode):
    """Compares the strides of each operation's results with those that would be recorded."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        fake_mode = FakeTensorMode()
        given = pytree.tree_map_only(Tensor, fake_mode.from_tensor, (args, kwargs or {}))
        with fake_mode:
            fake = as_the_kernel_does(func, *given, func(*given[0], **given[1]))
        made = func(*args, **(kwargs or {}))
        for one, other in zip(pytree.tree_leaves(made), pytree.tree_leaves(fake), strict=True):
            if isinstance(one, Tensor) and one.numel():
                along = zip(one.shape, one.stride(), other.stride(), strict=True)
                assert all(size == 1 or mine == its for size, mine, its in along), func
        return made


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_lie_as_the_kernel_lays_them(name: str, device: str) -> None:
    for layout, lay in LAYOUTS.items():
        x = lay(seeded(device, 4, 4, 4, 4 if layout != "a part" else 8)).detach().requires_grad_()
        with Compared():
            made = FUNCTIONS[name](x)
            turned = made.dim() > 1 and made.shape[0] == made.shape[1]
            gradient = torch.ones_like(made, memory_format=torch.contiguous_format)
            made.backward(gradient.transpose(0, 1) if turned else gradient)


def test_a_step_views_what_a_kernel_has_laid_out(wrap: Callable[..., Any]) -> None:
    """On a CPU, whose kernel makes contiguous results; a GPU's follow their inputs."""

    def step(x: Tensor) -> Tensor:
        made = functional.logsigmoid(x.transpose(0, 1)).view(-1, 8)  # legal for the kernel's alone
        made.sum(0).square().sum().backward()
        return made.detach()

    def trained(wrap: Callable[..., Callable[[Tensor], Tensor]]) -> list[Tensor]:
        call, x = wrap(step), seeded("cpu", 3, 4, 8, grad=True)
        made = call(x)
        return [made, x.grad]

    assert_identical(trained(wrap), trained(lambda step: step))
