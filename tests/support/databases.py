"""PyTorch's own databases of modules and operators, each entry run with offload and without.

They are what PyTorch tests itself with: several thousand samples of inputs for everything that it
can differentiate, in every dtype. Each sample is run inside a context on clones of its inputs that
die before the backward pass, so that what was saved of them leaves.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import storm_client as storm
import torch
from hypothesis import settings
from support.comparing import Plain, Way
from support.training import bits
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["EXCEPTIONS", "Sample", "Tally", "module_samples", "operator_samples", "same"]


Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def directly(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function makes of arguments."""
    return function(*args, **kwargs)


EXCEPTIONS = {
    "cpu": {
        "linalg.lstsq": "differs with where its inputs lie in memory, also without offload",
        "linalg.lstsq.grad_oriented": "as linalg.lstsq",
    },
    "cuda": {
        "nn.FractionalMaxPool3d": "its backward adds atomically",
        "nn.functional.fractional_max_pool3d": "its backward adds atomically",
        "nn.functional.max_pool3d": "its backward adds atomically",
        "nn.functional.grid_sample": "its backward adds atomically",
        "grid_sampler_2d": "its backward adds atomically",
        "grid_sampler_3d": "its backward adds atomically",
    },
}
"""Entries whose bits may differ, by device, with the reason."""

MORE_RUNS = 20
"""Without offload, where bits differ: atomic additions often come in the same order."""


@dataclass(frozen=True)
class Sample:
    """One entry of a database with one sample of its inputs."""

    name: str
    run: Callable[..., list[Tensor]]
    """Returns the outputs and the gradients of all inputs and parameters of a run in a Way, where
    something else may call the function or module, which is handed it and its arguments."""


@dataclass
class Tally:
    """What came of the samples that were compared."""

    offload: storm.Offload
    exceptions: dict[str, str]
    """Entries that may differ, and why."""
    counts: Counter[str] = field(default_factory=Counter)
    differing: list[str] = field(default_factory=list)

    def compare(self, sample: Sample) -> None:
        """Run a sample twice as PyTorch runs it, then with offload."""
        try:
            expected = sample.run(Plain())
        except Exception:  # noqa: BLE001 - samples of what PyTorch refuses to differentiate
            self.counts["refused"] += 1
            return
        if not same(sample.run(Plain()), expected):
            self.counts["not deterministic"] += 1
            return
        before = self.offload.stats().offloaded_bytes
        try:
            found = sample.run(self.offload)
        except Exception as error:  # noqa: BLE001 - all differing entries are reported together
            self._differs(sample, f"{type(error).__name__}: {error}")
            return
        if not same(found, expected):
            if any(not same(sample.run(Plain()), expected) for _ in range(MORE_RUNS)):
                self.counts["not deterministic"] += 1
            else:
                self._differs(sample, "other bits")
            return
        self.counts["identical"] += 1
        self.counts["offloaded"] += self.offload.stats().offloaded_bytes > before

    def _differs(self, sample: Sample, how: str) -> None:
        if sample.name.partition(" ")[0] in self.exceptions:
            self.counts["excepted"] += 1
        else:
            self.differing.append(f"{sample.name}: {how}")


def module_samples(device: str, dtype: torch.dtype | None = None) -> Iterator[Sample]:
    """Yield all samples of the modules in `dtype`, or the first of each, trained and evaluated."""
    for info in _modules():
        found = _dtype(info.supported_dtypes(device), dtype)
        for training in (True, False) if found is not None else ():
            _seed(1)  # what a sample is depends on nothing that ran before
            inputs = info.module_inputs_func(
                info, device=device, dtype=found, requires_grad=True, training=training
            )
            for number, each in enumerate(inputs[: None if dtype else 1]):
                mode = "training" if training else "evaluation"
                name = f"{info.name} {_named(found)} {mode} {number}"
                yield Sample(name, _module_run(info, each, device, found, training))


def operator_samples(device: str, dtype: torch.dtype | None = None) -> Iterator[Sample]:
    """Yield all samples of the operators in `dtype`, or the first of each, in place as well."""
    for info in _operators():
        found = _dtype(info.supported_backward_dtypes(device), dtype)
        if found is not None:
            yield from _of_operator(info, device, found, None if dtype else 1)


def _of_operator(info: Any, device: str, dtype: torch.dtype, limit: int | None) -> Iterator[Sample]:
    _seed(1)
    try:
        samples = list(islice(info.sample_inputs(device, dtype, requires_grad=True), limit))
    except (RuntimeError, ImportError):
        return  # some need libraries, such as SciPy, or hardware
    variants = {"": info.op}
    if info.inplace_variant is not None and info.supports_inplace_autograd:
        variants[" in_place"] = info.inplace_variant
    full_name = f"{info.name}.{info.variant_test_name}".rstrip(".")
    for number, sample in enumerate(samples):
        for variant, function in variants.items():
            if not (variant and sample.broadcasts_input):
                name = f"{full_name} {_named(dtype)}{variant} {number}"
                yield Sample(name, _operator_run(function, sample))


def _operator_run(function: Callable[..., Any], sample: Any) -> Callable[..., list[Tensor]]:
    def run(way: Way, call: Call = directly) -> list[Tensor]:
        _seed(0)
        leaves = _leaves((sample.input, sample.args, sample.kwargs))
        with way:
            first, args, kwargs = _clones(leaves)
            out = sample.output_process_fn_grad(call(function, (first, *args), kwargs))
            del first, args, kwargs
            copies, loss = _copies_and_loss(out)
            del out
        return copies + _gradients(loss, _differentiable(tree_leaves(leaves)), way)

    return run


def _module_run(
    info: Any, sample: Any, device: str, dtype: torch.dtype, training: bool
) -> Callable[..., list[Tensor]]:
    def run(way: Way, call: Call = directly) -> list[Tensor]:
        _seed(0)
        made = copy.deepcopy(sample.constructor_input)
        module = info.module_cls(*made.args, **made.kwargs).to(device).to(dtype).train(training)
        leaves = _leaves((sample.forward_input.args, sample.forward_input.kwargs))
        with way:
            args, kwargs = _clones(leaves)
            out = call(module, args, kwargs)
            del args, kwargs
            copies, loss = _copies_and_loss(out)
            del out
        parameters = list(module.parameters())  # lazy ones are made by the forward
        del module
        return copies + _gradients(loss, _differentiable([*tree_leaves(leaves), *parameters]), way)

    return run


def _seed(number: int) -> None:
    """Seed as `torch.manual_seed` does, which formats a stack for each kind of device not here."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


def _leaves(inputs: Any) -> Any:
    return tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), inputs
    )


def _clones(leaves: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, leaves)


def _differentiable(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor) and value.requires_grad]


def _copies_and_loss(out: Any) -> tuple[list[Tensor], Tensor]:
    """Return copies of all outputs, and a sum of them in which each element counts otherwise."""
    outputs = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
    copies = [value.detach().clone() for value in outputs]
    loss: Tensor | None = None
    for value in _differentiable(outputs):
        dense = value if value.layout is torch.strided else value.to_dense()
        if dense.is_nested:
            dense = dense.to_padded_tensor(0.0)
        weights = torch.arange(dense.numel(), device=dense.device).remainder(7).add(1)
        total = (dense * weights.reshape(dense.shape)).sum()
        total = torch.view_as_real(total).sum() if total.is_complex() else total
        loss = total if loss is None else loss + total
    if loss is None:
        raise ValueError("nothing to differentiate")
    return copies, loss


def _gradients(loss: Tensor, leaves: list[Tensor], way: Way) -> list[Tensor]:
    way.stats()
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [loss.detach(), *(gradient for gradient in found if gradient is not None)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Tell whether tensors of any layouts have the same bits."""
    return len(found) == len(expected) and all(
        one.layout is other.layout and _equal(_plain(one), _plain(other))
        for one, other in zip(found, expected, strict=True)
    )


def _equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(
        (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(bits(one), bits(other))
        for one, other in zip(found, expected, strict=True)
    )


def _plain(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor of any layout is made of."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return [part for one in tensor.unbind() for part in _plain(one)]
    match tensor.layout:
        case torch.strided:
            # also where a single element has a stride of its own
            return [
                tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
            ]
        case torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        case _:
            return [tensor.to_dense()]


def _dtype(supported: Iterable[torch.dtype], wanted: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype that is wanted if it is supported; where any is, float32 before others."""
    dtypes = sorted(supported, key=lambda dtype: (dtype is not torch.float32, str(dtype)))
    if wanted is None:
        return dtypes[0] if dtypes else None
    return wanted if wanted in dtypes else None


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _modules() -> list[Any]:
    _import()
    from torch.testing._internal.common_modules import module_db

    return module_db


def _operators() -> list[Any]:
    _import()
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def _import() -> None:
    """Import what PyTorch tests itself with, and take back what that sets for the process.

    For each operator it would look twice through the sources of the whole stack for a
    `unittest.TestCase`, which takes 0.1 s and finds none.
    """
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    for module in (common_utils, core):
        module.extract_test_fn = lambda: None
    settings.load_profile("few")
    setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)
