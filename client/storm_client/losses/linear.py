"""The cross-entropy of a linear head whose logits are never materialized as a whole.

Both passes process the vocabulary slice by slice. A row's largest logit and the sum of its
exponentials are updated with each slice; with them, logits give log-probabilities. So the gradient
of the head's weight is one product for each slice, and needs no sum in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own name for it
from torch import Tensor

from storm_client.errors import UsageError
from storm_client.losses.cross_entropy import (
    FLOATING,
    REDUCTIONS,
    Options,
    check_targets,
    is_index,
    loss_of,
    of_pytorch,
)
from storm_client.losses.once import differentiable_once
from storm_client.losses.targets import Targets

__all__ = ["linear_cross_entropy"]

SLICE_BYTES: Final = 128 << 20
"""Bytes of the float32 logits of one slice of a head's vocabulary."""

SLICE_COLUMNS: Final = 128
"""The columns of a slice are a multiple of this, for which matrix products run at full speed."""

_NEEDED: Final = ("hidden", "weight", "target")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of `linear(hidden, weight, bias)` without materializing its logits.

    The vocabulary is processed in slices. Their logits are computed in the arguments' type and
    converted to float32 (float64 if the arguments have that type). **Its bits are those of this
    order, not those of `cross_entropy(linear(...))`**: a row's exponentials are added slice by
    slice, from the first, and each sum is rescaled to the largest logit so far. The gradient of
    `hidden` is added slice by slice in float32 and rounded once. That of `weight` and `bias` is one
    product and sum over all rows for each slice. The order depends on the shapes alone, so that
    runs are reproducible.

    Takes a few slices of 128 MiB (of at least 128 columns), N x D float32 numbers in the backward
    pass, and a few numbers a row. The backward pass recomputes each slice's logits.

    Args:
        hidden: (..., D) in float16, bfloat16, float32 or float64.
        weight: of the head (C, D), of the same type; under autocast both are cast to its type.
        target: class indices (...) in int64.
        bias: (C), or None.
        class_weight: of each class (C), or None; has no gradient.
        ignore_index: a target that counts for nothing.
        reduction: "mean", "sum" or "none".
        label_smoothing: 0.0 to 1.0.

    Returns:
        A scalar, or with "none" a loss for each target, in float32 (float64).

    Raises:
        UsageError: shapes, types or devices that do not match, or an option that is invalid.
        IndexError: as `cross_entropy`.
        RuntimeError: a second derivative is requested, which is not supported.

    Example:
        loss = storm.linear_cross_entropy(hidden, model.lm_head.weight, target)
        loss.backward()
    """
    options = Options(class_weight, ignore_index, reduction, label_smoothing)
    _check(hidden, weight, target, bias, options)
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        cast = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(cast), weight.to(cast)
        bias = None if bias is None else bias.to(cast)
    flat = hidden[None] if hidden.dim() == 1 else hidden.flatten(0, -2)
    loss = _loss_of_rows(flat, weight, bias, target.flatten(), options)
    return loss.view(target.shape) if reduction == "none" else loss


def _loss_of_rows(
    hidden: Tensor, head: Tensor, bias: Tensor | None, target: Tensor, options: Options
) -> Tensor:
    """Return the loss of hidden (N, D) and targets (N)."""
    computed = torch.promote_types(hidden.dtype, torch.float32)
    if options.weight is not None:
        options = options._replace(weight=options.weight.to(computed))
    with torch.autocast(hidden.device.type, enabled=False):
        if torch.compiler.is_compiling():  # then the compiler decides about memory
            return of_pytorch(F.linear(hidden, head, bias), target, options, computed)
        classes = len(head)
        check_targets(target, classes, options.ignore_index)
        rows = Targets.of(target, classes, options.ignore_index)
        log_probabilities: Any = _HeadLogProbabilities.apply
        smoothing = options.label_smoothing > 0
        weight = options.weight
        picked, sums = log_probabilities(hidden, head, bias, rows, weight, smoothing)
        return loss_of(picked, sums, rows, options, classes)


class _HeadLogProbabilities(torch.autograd.Function):
    """As _LogProbabilities, for logits that a head computes slice by slice of its vocabulary."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd's order
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        rows: Targets,
        weight: Tensor | None,
        smoothing: bool,
    ) -> tuple[Tensor, Tensor | None]:
        dtype, index = torch.promote_types(hidden.dtype, torch.float32), rows.classes
        largest = hidden.new_full(index.shape, torch.finfo(dtype).min, dtype=dtype)
        total, picked, sums = hidden.new_zeros((3, len(index)), dtype=dtype).unbind()
        slices = _Slices(hidden, head, bias, index)
        for logits, part in slices.logits():
            before, largest = largest, torch.maximum(largest, logits.amax(1))
            picked = torch.where(part.has, part.lookup(logits), picked)
            if smoothing:
                sums = sums + (logits if weight is None else logits * weight[part.columns]).sum(1)
            exponentials = logits.sub_(largest.unsqueeze(1)).exp_()
            total = total * torch.exp(before - largest) + exponentials.sum(1)
        log_total = total.log()
        ctx.source = rows.source
        ctx.save_for_backward(hidden, head, bias, ctx.source.target, weight, largest, log_total)
        if smoothing:
            sums = sums - (largest + log_total) * _weight_of_all(head, weight)
        return picked - largest - log_total, sums if smoothing else None

    @staticmethod
    def backward(
        ctx: Any, grad_picked: Tensor, grad_sums: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad
        with torch.no_grad(), torch.autocast(grad_picked.device.type, enabled=False):
            index = ctx.source.now().classes
            gradients = _head_gradients(saved, index, wanted, grad_picked, grad_sums)
        sources = (*saved[:3], grad_picked, grad_sums)
        return (*differentiable_once(gradients, *sources, message=_NOT_TWICE), None, None, None)


_NOT_TWICE: Final = (
    "a second derivative of linear_cross_entropy() is not supported; compute the logits and pass "
    "them to storm.cross_entropy(), which has one"
)


def _head_gradients(
    saved: Sequence[Any],
    index: Tensor,
    wanted: Sequence[bool],
    grad_picked: Tensor,
    grad_sums: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden, head and bias; None for those that are not wanted."""
    hidden, head, bias, _, weight, largest, log_total = saved
    of_row = grad_picked  # the sum of the gradient of a row's log-probabilities
    if grad_sums is not None:
        of_row = of_row + grad_sums * _weight_of_all(head, weight)
    of_hidden = torch.zeros_like(hidden, dtype=largest.dtype) if wanted[0] else None
    of_head = head.new_empty(head.shape) if wanted[1] else None
    of_bias = head.new_empty(len(head)) if wanted[2] else None
    for logits, part in _Slices(hidden, head, bias, index).logits():
        logits.sub_(largest.unsqueeze(1)).sub_(log_total.unsqueeze(1)).exp_()
        logits.mul_(-of_row.unsqueeze(1))
        if grad_sums is not None:
            spread = grad_sums.unsqueeze(1)
            logits.add_(spread if weight is None else spread * weight[part.columns])
        part.add(logits, grad_picked)
        gradient = logits.to(hidden.dtype)
        if of_hidden is not None:
            of_hidden.add_(_product(gradient, head[part.columns], of_hidden.dtype))
        if of_head is not None:
            torch.mm(gradient.t(), hidden, out=of_head[part.columns])
        if of_bias is not None:
            torch.sum(gradient, 0, out=of_bias[part.columns])
    return None if of_hidden is None else of_hidden.to(hidden.dtype), of_head, of_bias


class _Part(NamedTuple):
    """The targets within one slice of the vocabulary."""

    columns: slice
    has: Tensor
    """bool (N): whether the row's target is in the slice."""
    place: Tensor
    """int64 (N, 1): the target's column in the slice; 0 for targets outside."""

    def lookup(self, logits: Tensor) -> Tensor:
        """Return the entry at each row's target."""
        return logits.gather(1, self.place).squeeze(1)

    def add(self, gradient: Tensor, numbers: Tensor) -> None:
        """Add a number to the entry at each row's target that is in the slice."""
        found = gradient.gather(1, self.place)
        gradient.scatter_(1, self.place, torch.where(self.has, numbers, 0).unsqueeze(1) + found)


class _Slices(NamedTuple):
    """The inputs of the logits, for each slice of the vocabulary."""

    hidden: Tensor
    head: Tensor
    bias: Tensor | None
    target: Tensor

    def logits(self) -> Iterator[tuple[Tensor, _Part]]:
        """Yield each slice's logits, in float32 or more; the caller may overwrite them."""
        dtype = torch.promote_types(self.hidden.dtype, torch.float32)
        classes = len(self.head)
        width = SLICE_BYTES // max(1, len(self.hidden) * dtype.itemsize)
        width = max(SLICE_COLUMNS, width // SLICE_COLUMNS * SLICE_COLUMNS)
        for begin in range(0, classes, width):
            columns = slice(begin, min(begin + width, classes))
            bias = None if self.bias is None else self.bias[columns]
            has = (self.target >= begin) & (self.target < columns.stop)
            place = (self.target - begin).masked_fill_(~has, 0).unsqueeze(1)
            logits = F.linear(self.hidden, self.head[columns], bias)
            yield logits.to(dtype), _Part(columns, has, place)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix product in `dtype`, which is at least as wide as the type of both."""
    if left.is_cuda and left.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def _weight_of_all(head: Tensor, weight: Tensor | None) -> Tensor | int:
    return len(head) if weight is None else weight.sum()


def _check(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options
) -> None:
    """Raise UsageError for arguments that are invalid, or do not match."""
    class_weight = options.weight
    tensors = {"hidden": hidden, "weight": weight, "target": target, "bias": bias}
    for name, one in {**tensors, "class_weight": class_weight}.items():
        if not isinstance(one, Tensor) and (one is not None or name in _NEEDED):
            raise UsageError(f"linear_cross_entropy() got {one!r} as {name}: pass a tensor")
    _check_options(options)
    classes = weight.shape[:1]
    wrong = [
        (hidden.dim() < 1 or hidden.dtype not in FLOATING, "hidden must be (..., D), floating"),
        (weight.dim() != 2 or weight.shape[1:] != hidden.shape[-1:], "weight must be (C, D)"),
        (not weight.numel(), "weight must have classes"),
        (target.shape != hidden.shape[:-1], "target must have hidden's shape without its last"),
        (target.dtype != torch.int64, "target must be int64"),
        (bias is not None and bias.shape != classes, "bias must be (C)"),
        (class_weight is not None and class_weight.shape != classes, "class_weight must be (C)"),
        (class_weight is not None and class_weight.requires_grad, "class_weight takes no gradient"),
        (_differ(hidden, weight, bias), "hidden, weight and bias must be of one type"),
    ]
    given = [one for one in (hidden, weight, target, bias, class_weight) if one is not None]
    wrong.append((len({one.device for one in given}) > 1, "all must be on one device"))
    for is_wrong, wanted in wrong:
        if is_wrong:
            shapes = ", ".join(
                f"{name} {tuple(one.shape)} {one.dtype} {one.device}"
                for name, one in (*tensors.items(), ("class_weight", class_weight))
                if one is not None
            )
            raise UsageError(f"linear_cross_entropy() got {shapes}: {wanted}")


def _check_options(options: Options) -> None:
    """Raise UsageError for an option that is invalid whatever the tensors are."""
    smoothing = options.label_smoothing
    valid = {
        "ignore_index": (is_index(options.ignore_index), "an integer that fits int64"),
        "reduction": (options.reduction in REDUCTIONS, f"one of {REDUCTIONS}"),
        "label_smoothing": (
            isinstance(smoothing, Real) and 0 <= smoothing <= 1,
            "a number from 0.0 to 1.0",
        ),
    }
    for name, (is_valid, accepted) in valid.items():
        if not is_valid:
            given = getattr(options, name)
            raise UsageError(
                f"linear_cross_entropy() got {name}={given!r}: {name} must be {accepted}"
            )


def _differ(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if torch.is_autocast_enabled(hidden.device.type):
        return False  # autocast casts them to one type
    return weight.dtype != hidden.dtype or (bias is not None and bias.dtype != hidden.dtype)
