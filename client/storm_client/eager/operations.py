"""The table of functions that can be recomputed with the same bits, and which are expensive.

Each function is deterministic, reads nothing but its arguments, changes none of them and makes its
results in new memory. Some elementwise functions write to their first argument instead, by their
name or by an argument `inplace`. Those are recomputed on memory that nobody else holds. Other calls
are not recorded.

Some functions draw random numbers from the default generator of their device. They also read the
generator's state, which is recorded (`native/draws.h`). No other function reads it. A normalization
over the batch is recomputed without the running statistics that it has written to.

Only functions written in C++ are recomputed, as the objects that they were when this module was
loaded: nobody can replace the behaviour of such an object. PyTorch's Python functions around them
look up names that a script may replace. So each of these has a form of its own here, made of the
C++ functions that it calls. It is not recorded while one of its names means something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.nn import functional

from storm_client.eager.byproducts import FORMER, Byproduct, Depends
from storm_client.eager.launches import Kernel
from storm_client.eager.settings import KernelChoice

__all__ = [
    "EXPENSIVE",
    "REPLAYABLE",
    "Function",
    "bound",
    "byproduct_of",
    "choice_of",
    "draws",
    "is_attention",
    "is_bound",
    "may_draw",
    "may_overwrite",
    "may_view",
    "read_by",
    "tunes",
]

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
_IN_PLACE = """
    abs_ add_ addcdiv_ addcmul_ celu_ clamp_ clamp_max_ clamp_min_ cos_ div_ elu_ exp_ hardtanh_
    leaky_relu_ lerp_ log_ masked_fill_ mul_ neg_ pow_ reciprocal_ relu_ rsqrt_ selu_ sigmoid_
    sin_ sqrt_ square_ sub_ tanh_ threshold_ __iadd__ __isub__ __imul__ __itruediv__
"""
_SHAPING = """
    cat concat concatenate stack hstack vstack flip roll repeat repeat_interleave tile pad
    embedding gather index_select pixel_shuffle pixel_unshuffle take_along_dim
    affine_grid_generator grid_sampler
"""
_RESAMPLING = """
    adaptive_avg_pool2d adaptive_avg_pool3d col2im im2col
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
_VIEWING = "flatten ravel reshape __getitem__"
_ACTIVATIONS = """
    celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish prelu
    relu relu6 selu silu softmin softshrink softsign tanhshrink threshold
"""
_ROWS = """
    amax amin batch_norm group_norm instance_norm layer_norm log_softmax logsumexp mean rms_norm
    _safe_softmax softmax std sum var avg_pool1d avg_pool2d avg_pool3d max_pool2d max_pool3d
    _weight_norm
"""
_RANDOM = """
    alpha_dropout dropout dropout2d dropout3d feature_alpha_dropout feature_dropout native_dropout
"""
_PRODUCTS = """
    addbmm addmm baddbmm bmm einsum linear matmul mm outer scaled_dot_product_attention
    _grouped_mm _scaled_mm __matmul__ __rmatmul__
"""

_CONVOLUTIONS = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
"""

_nn: Final = torch._C._nn
_variable: Final = torch._C._VariableFunctions
_Base: Final = torch._C.TensorBase

_Read: TypeAlias = tuple[Any, str, Any]
"""The class or module that a name is looked up in, the name, and the object expected there."""


class _Bound(NamedTuple):
    """The form that is recomputed in place of a function that PyTorch has written in Python."""

    form: Function
    reads: tuple[_Read, ...]

    @property
    def is_original(self) -> bool:
        """Whether the function still calls the same functions as its form."""
        return all(getattr(owner, name, None) is meant for owner, name, meant in self.reads)


def _perhaps_in_place(
    function: Function, in_place: Function, *arguments: Any, inplace: bool = False, **by: Any
) -> Any:
    return (in_place if inplace else function)(*arguments, **by)


def _dropout(
    function: Function,
    values: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    assert not inplace, "what changes its input is not recorded"
    return function(values, p, training)


def _alpha_dropout(
    function: Function,
    values: torch.Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    return _dropout(function, values, p, training, inplace)


def _softmax(
    function: Function,
    values: torch.Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Any:
    if dim is None:  # PyTorch warns of that once, in the step itself
        dim = 0 if values.dim() in (0, 1, 3) else 1
    return function(values, dim, dtype=dtype)


def _softmin(values: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    return _softmax(_variable.softmax, _variable.neg(values), *arguments, **options)


def _group_norm(
    values: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    is_enabled = torch._C._get_cudnn_enabled()
    return _variable.group_norm(values, num_groups, weight, bias, eps, is_enabled)


def _batch_norm(  # noqa: PLR0917 - as PyTorch's modules call it
    values: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    is_enabled = torch._C._get_cudnn_enabled()
    statistics = running_mean, running_var
    arguments = values, weight, bias, *statistics, training, momentum, eps, is_enabled
    return _variable.batch_norm(*arguments)


def _without_statistics(  # noqa: PLR0917 - as PyTorch's modules call it
    values: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    *others: Any,
    **options: Any,
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    statistics = (None, None) if training else (running_mean, running_var)
    return (values, *statistics, weight, bias, training, *others), options


def _embedding(indices: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> Any:
    return _variable.embedding(weight, indices)  # the other arguments are for the gradient


def _layer_norm(
    values: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    is_enabled = torch._C._get_cudnn_enabled()
    return _variable.layer_norm(values, normalized_shape, weight, bias, eps, is_enabled)


def _max_pool(  # noqa: PLR0917 - as PyTorch's modules call it
    function: Function,
    values: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    assert not return_indices, "PyTorch has another function for that"
    return function(values, kernel_size, stride or [], padding, dilation, ceil_mode)


def _softsign(values: torch.Tensor) -> Any:
    return _variable.div(values, _variable.add(_variable.abs(values), 1))


def _tanhshrink(values: torch.Tensor) -> Any:
    return _variable.sub(values, _variable.tanh(values))


def _einsum(equation: str, *operands: Any) -> Any:
    return _variable.einsum(equation, _operands(operands))  # type: ignore[attr-defined]  # torch's gap


def _operands(given: Sequence[Any]) -> list[Any]:
    is_listed = len(given) == 1 and isinstance(given[0], (list, tuple))
    return list(given[0] if is_listed else given)


def _divided(divisor: torch.Tensor, dividend: Any) -> Any:
    return _variable.mul(_variable.reciprocal(divisor), dividend)


def _swapped(function: Function, right: Any, left: Any) -> Any:
    return function(left, right)


def _reads(owner: Any, *names: str) -> tuple[_Read, ...]:
    return tuple((owner, name, getattr(owner, name)) for name in names)


def _simply(owner: Any, *names: str) -> Iterator[tuple[Function, _Bound]]:
    """Yield functions, and their forms, that call their namesake in `owner`, perhaps in place."""
    for name in names:
        both = name, f"{name}_"
        form = partial(_perhaps_in_place, *(getattr(owner, one) for one in both))
        yield getattr(functional, name), _Bound(form, _reads(owner, *both))


_PERHAPS_IN_PLACE: Final[dict[Function, _Bound]] = {
    **dict(_simply(_nn, "elu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu")),
    **dict(_simply(_nn, "mish", "relu6", "silu")),
    **dict(_simply(torch, "celu", "relu", "selu")),
    functional.threshold: _Bound(
        partial(_perhaps_in_place, _variable.threshold, _variable.threshold_),
        _reads(torch._VF, "threshold", "threshold_"),
    ),
}
"""Functions that write to their first argument if an argument `inplace` is true."""

_BOUND: Final[dict[Function, _Bound]] = {
    **_PERHAPS_IN_PLACE,
    functional.dropout: _Bound(partial(_dropout, _variable.dropout), _reads(torch._VF, "dropout")),
    **dict.fromkeys(
        (functional.dropout2d, functional.dropout3d),
        _Bound(partial(_dropout, _variable.feature_dropout), _reads(torch._VF, "feature_dropout")),
    ),
    functional.alpha_dropout: _Bound(
        partial(_alpha_dropout, _variable.alpha_dropout), _reads(torch._VF, "alpha_dropout")
    ),
    functional.feature_alpha_dropout: _Bound(
        partial(_alpha_dropout, _variable.feature_alpha_dropout),
        _reads(torch._VF, "feature_alpha_dropout"),
    ),
    functional.glu: _Bound(_nn.glu, _reads(_nn, "glu")),
    functional.pad: _Bound(_nn.pad, _reads(_nn, "pad")),
    functional.max_pool2d: _Bound(
        partial(_max_pool, _variable.max_pool2d), _reads(torch, "max_pool2d")
    ),
    functional.max_pool3d: _Bound(
        partial(_max_pool, _variable.max_pool3d), _reads(torch, "max_pool3d")
    ),
    functional.batch_norm: _Bound(_batch_norm, _reads(torch, "batch_norm")),
    functional.embedding: _Bound(_embedding, _reads(torch, "embedding")),
    functional.group_norm: _Bound(_group_norm, _reads(torch, "group_norm")),
    functional.layer_norm: _Bound(_layer_norm, _reads(torch, "layer_norm")),
    functional.rms_norm: _Bound(_variable.rms_norm, _reads(torch, "rms_norm")),
    functional.softmax: _Bound(
        partial(_softmax, _variable.softmax), _reads(torch.Tensor, "softmax")
    ),
    functional.log_softmax: _Bound(
        partial(_softmax, _variable.log_softmax), _reads(torch.Tensor, "log_softmax")
    ),
    functional.softmin: _Bound(_softmin, _reads(torch.Tensor, "softmax", "__neg__")),
    functional.softsign: _Bound(_softsign, _reads(torch.Tensor, "abs", "__add__", "__truediv__")),
    functional.tanhshrink: _Bound(_tanhshrink, _reads(torch.Tensor, "tanh", "__sub__")),
    torch.einsum: _Bound(_einsum, _reads(torch._VF, "einsum")),
    torch.Tensor.__pow__: _Bound(_Base.pow, ()),
    torch.Tensor.__rpow__: _Bound(partial(_swapped, _variable.pow), _reads(torch, "pow")),
    torch.Tensor.__rsub__: _Bound(_variable.rsub, ()),
    torch.Tensor.__rdiv__: _Bound(_divided, _reads(torch.Tensor, "reciprocal", "__mul__")),
    torch.Tensor.__rmatmul__: _Bound(partial(_swapped, _variable.matmul), _reads(torch, "matmul")),
}

_OWNERS = (torch, torch.Tensor, functional)


def _functions(names: Iterable[str]) -> Iterator[Function]:
    for name in names:
        for owner in _OWNERS:
            function = getattr(owner, name, None)
            if isinstance(function, _CANNOT_BE_REPLACED) or function in _BOUND:
                yield function


_CANNOT_BE_REPLACED: Final = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)

EXPENSIVE: frozenset[Function] = frozenset(_functions((_PRODUCTS + _CONVOLUTIONS).split()))
"""Functions that cost more than moving their result through memory."""

_INSIDE: Final = frozenset(
    {*(getattr(_nn, name) for name in _RESAMPLING.split()), torch.linalg.vector_norm}
)
"""Functions that PyTorch's Python functions call."""

REPLAYABLE: frozenset[Function] = EXPENSIVE | frozenset(
    {
        *_functions(
            " ".join(
                (_ELEMENTWISE, _IN_PLACE, _SHAPING, _VIEWING, _ACTIVATIONS, _ROWS, _RANDOM)
            ).split()
        ),
        *_INSIDE,
    }
)

_DROPPING: Final = frozenset(_functions(_RANDOM.split()))

_C_NORMS: Final = (_variable.batch_norm, _variable.instance_norm)

_NORMS: Final = frozenset({functional.batch_norm, *_C_NORMS})
"""Norms with running statistics: like products, they have several kernels."""

_SIMPLE: Final = REPLAYABLE - EXPENSIVE - _NORMS

_MAY_VIEW: Final = frozenset(_functions(_VIEWING.split()))

_MAY_OVERWRITE: Final = frozenset({*_PERHAPS_IN_PLACE, *_functions(_IN_PLACE.split())})


def may_view(function: Function) -> bool:
    """Return whether a function may return a view of its argument rather than new memory."""
    return function in _MAY_VIEW


def may_overwrite(function: Function) -> bool:
    """Return whether a function may write to its first argument and return it."""
    return function in _MAY_OVERWRITE


def choice_of(function: Function) -> KernelChoice:
    """Return what chooses a function's kernel among those that a device has for its arguments.

    A Triton kernel is its own only kernel. The kernel of a byproduct is that of its function.
    """
    if function in _SIMPLE or isinstance(function, (Kernel, Byproduct)):
        return KernelChoice.NONE
    is_product = function in REPLAYABLE and function is not _ATTENTION
    return KernelChoice.PRODUCT if is_product else KernelChoice.ATTENTION


def read_by(
    function: Function, arguments: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a call of a function of the table without those it only writes to.

    These are the running statistics of a norm in training: see native/watching.h.
    """
    if function in _C_NORMS:
        values, weight, bias, mean, var, trains, *others = arguments
        statistics = (None, None) if trains else (mean, var)
        return (values, weight, bias, *statistics, trains, *others), options
    if function is functional.batch_norm:
        return _without_statistics(*arguments, **options)
    return arguments, options


def bound(function: Function) -> Function:
    """Return a function that does the same and cannot be replaced; a user's function as it is."""
    known = _BOUND.get(function)
    return function if known is None else known.form


def is_bound(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether a call of a function of the table depends only on what is recorded.

    False where a name that the function looks up was replaced. False, too, where the kernel is
    chosen by measuring, which each thread does for itself.
    """
    known = _BOUND.get(function)
    if (known is not None and not known.is_original) or (function in EXPENSIVE and tunes()):
        return False
    depends = _DEPENDS.get(function)
    return depends is None or not depends(arguments, options)


_ATTENTION: Final = functional.scaled_dot_product_attention

_DROPOUT: Final = 4
"""The place of its probability among the arguments of attention."""


def is_attention(function: Function) -> bool:
    """Return whether it is attention; if other calls compute it, those are recorded instead."""
    return function is _ATTENTION


def may_draw(function: object) -> bool:
    """Return whether calls of a function of the table may draw random numbers."""
    if isinstance(function, Byproduct):
        return function.depends is Depends.LAYOUT
    return function in _DROPPING or function is _ATTENTION


_POOLING: Final = frozenset(_functions(["max_pool2d", "max_pool3d"]))

_BYPRODUCTS: Final[dict[Function, Byproduct]] = {
    **{
        one: Byproduct(bound(one), "dropout mask", Depends.LAYOUT)
        for one in (functional.dropout, torch.dropout)
    },
    **{one: Byproduct(bound(one), "pooling's indices", Depends.VALUES) for one in _POOLING},
    **dict.fromkeys(_MAY_OVERWRITE, FORMER),
}


def byproduct_of(function: Function) -> Byproduct | None:
    """Return the function that makes the byproduct of a function's calls; None if it has none."""
    return _BYPRODUCTS.get(function)


def draws(function: Function, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether this call of a function of the table may draw random numbers."""
    if function is not _ATTENTION:
        return function in _DROPPING
    if len(arguments) > _DROPOUT:
        return bool(arguments[_DROPOUT])
    return bool(options.get("dropout_p"))


def _is_measured(arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:  # noqa: ARG001
    """Return whether the kernel of a convolution is chosen by measuring."""
    return torch._C._get_cudnn_benchmark()


def _has_path(arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:  # noqa: ARG001
    """Return whether opt_einsum may order the products, or the first argument is no equation."""
    return len(_operands(arguments[1:])) > 2 or not isinstance(arguments[0], str)


def _is_repeated(arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether `pad` repeats edges, which deterministic algorithms do by other functions."""
    mode = arguments[2] if len(arguments) > 2 else options.get("mode")
    return mode == "replicate"


def _has_fewer(count: int, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:  # noqa: ARG001
    """Return whether some of the first `count` arguments are given by name."""
    return len(arguments) < count


def _renormalizes(arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether an embedding lookup renormalizes rows of its table, in place."""
    limit = arguments[3] if len(arguments) > 3 else options.get("max_norm")
    return limit is not None


tunes: Final[Callable[[], bool]] = getattr(torch._C, "_cuda_tunableop_is_enabled", bool)
"""Returns whether products choose their kernels by measuring; False without CUDA."""

_DEPENDS: Final[dict[Function, Callable[[Sequence[Any], Mapping[str, Any]], bool]]] = {
    **dict.fromkeys(_functions(_CONVOLUTIONS.split()), _is_measured),
    functional.batch_norm: partial(_has_fewer, 1),
    **dict.fromkeys(_C_NORMS, partial(_has_fewer, 6)),
    functional.embedding: _renormalizes,
    torch.einsum: _has_path,
    functional.pad: _is_repeated,
}
"""Functions with a check whether a call depends on something else, or is not understood."""
