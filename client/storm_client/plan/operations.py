"""Which functions can be run again for the same bits, and which of them are dear.

Each is deterministic, reads nothing but its arguments, changes none of them and makes its results
in new memory; where a call does otherwise, by an argument such as `inplace`, it is not recorded.
Random functions are never here, nor what keeps running statistics; of attention only a call without
dropout can be run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.nn import functional

__all__ = ["DEAR", "REPLAYABLE", "Function", "draws", "is_simple"]

Function = Callable[..., Any]

_ELEMENTWISE = """
    abs add addcdiv addcmul acos acosh asin asinh atan atan2 atanh bfloat16 clamp clamp_max
    clamp_min clip clone complex contiguous cos cosh div divide double erf erfc exp exp2 expm1 float
    float_power half heaviside hypot ldexp lerp lgamma log log10 log1p log2 logaddexp logaddexp2
    logit masked_fill maximum minimum mul multiply nan_to_num neg negative pow reciprocal round
    rsqrt rsub sgn sigmoid sign sin sinc sinh softplus sqrt square sub subtract tan tanh to
    tril triu true_divide trunc type type_as where xlogy
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__
    __pow__ __rpow__ __neg__ __abs__
"""
_SHAPING = """
    cat concat concatenate stack hstack vstack flip roll repeat repeat_interleave tile pad
"""
_ACTIVATIONS = """
    celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish prelu
    relu relu6 selu silu softmin softshrink softsign tanhshrink threshold
"""
_ROWS = """
    amax amin group_norm layer_norm local_response_norm log_softmax logsumexp mean normalize
    rms_norm softmax sum
"""
_PRODUCTS = """
    addbmm addmm baddbmm bmm conv1d conv2d conv3d einsum linear matmul mm outer
    scaled_dot_product_attention __matmul__ __rmatmul__
"""

_OWNERS = (torch, torch.Tensor, functional)


def _functions(names: Iterable[str]) -> Iterator[Function]:
    for name in names:
        for owner in _OWNERS:
            function = getattr(owner, name, None)
            if callable(function):
                yield function


DEAR: frozenset[Function] = frozenset(_functions(_PRODUCTS.split()))
"""What costs more than moving its result through memory does."""

REPLAYABLE: frozenset[Function] = DEAR | frozenset(
    _functions(" ".join((_ELEMENTWISE, _SHAPING, _ACTIVATIONS, _ROWS)).split())
)

_SIMPLE: Final = REPLAYABLE - DEAR


def is_simple(function: Function) -> bool:
    """Tell whether that is a function of the table, not of the user's own, and not dear."""
    return function in _SIMPLE


_ATTENTION: Final = functional.scaled_dot_product_attention
_DROPOUT: Final = 4
"""The place of its probability among the arguments."""


def draws(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Tell whether a call of a function of the table draws random numbers.

    Run again it would draw others, and all that is drawn afterwards would be others, too.
    """
    if function is not _ATTENTION:
        return False
    if len(arguments) > _DROPOUT:
        return bool(arguments[_DROPOUT])
    return bool(options.get("dropout_p"))
