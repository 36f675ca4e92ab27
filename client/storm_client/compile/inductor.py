"""Inductor's lowerings for the operators, and the calls by which it generates code.

Importing this loads Inductor.

Inductor writes results into buffers that nobody reads any more. A stored value may still be read
from its buffer, by the daemon or in its place, and the result of `wait` may be passed to another
backward pass. So neither buffer is ever written to again; a graph frees both after their last use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._inductor import config, ir, lowering
from torch._inductor import graph as graph_lowering
from torch._inductor.codegen.wrapper import FreeLine, PythonWrapperCodegen
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import (
    CustomGraphPass,
    CustomPartitionerFn,
    get_hash_for_files,
)
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.fx.experimental.symbolic_shapes import SymExprPrinter, free_unbacked_symbols
from torch.utils._ordered_set import OrderedSet

from storm_client.compile.costs import PRODUCTS
from storm_client.compile.exactness import draws, exact_in_generated_code
from storm_client.compile.operators import FETCH, HOLD, MATERIALIZE, STORE, WAIT
from storm_client.compile.partition import NUMBER, Partitioner
from storm_client.compile.saved_values import Rules
from storm_client.compile.schemas import argument
from storm_client.compile.views import hint_of, is_view
from storm_client.errors import UsageError

__all__ = ["InductorPartitioner", "generate", "generate_inference", "inductor_options", "rules"]


_WRITING = (auto_functionalized, auto_functionalized_v2)
"""How a graph calls custom operators that write to their arguments."""


class InductorPartitioner(Partitioner, CustomPartitionerFn):
    """Partitions for one compilation; Inductor may pickle only its plain values."""

    def __call__(self, gm: fx.GraphModule, *args: Any, **options: Any) -> Any:
        """Return the forward and the backward graph, as `Partitioner` does.

        The copy of an input that a custom operator writes to may be dropped later. Then the saved
        value is the caller's own tensor, into which no backward graph may write.
        """
        if any(node.target in _WRITING for node in gm.graph.nodes):
            functorch_config.donated_buffer = False  # until `generate` returns
        return super().__call__(gm, *args, **options)

    def __getstate__(self) -> dict[str, object]:
        """Return the options: no graphs found, and no connection to a daemon."""
        return {**self.__dict__, "found": [], "measured": None}

    def uuid(self) -> Any:
        """Return an id for the lowerings in this file; the decisions are in the graphs already."""
        return get_hash_for_files((__file__,))


def generate(
    gm: fx.GraphModule,
    inputs: list[torch.Tensor],
    partitioner: InductorPartitioner,
    patches: Mapping[str, Any],
) -> Callable[..., Any]:
    """Return the code of a graph.

    PyTorch's cache of whole partitioned graphs is not used, since it would skip the plan. The cache
    of generated code is used.
    """
    changed = {**patches, "custom_partitioner_fn": partitioner, "memory_planning": False}
    donated = functorch_config.donated_buffer
    with functorch_config.patch(enable_autograd_cache=False, donated_buffer=donated):
        compiled = compile_fx(gm, inputs, inner_compile=_WithLayouts(), config_patches=changed)
    assert callable(compiled)
    return compiled


# --- operations in PyTorch's own kernels --------------------------------------------------------

aten = torch.ops.aten

ATTENTION = {
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_efficient_attention,
}
"""Operations that compute attention forward, in one way only."""

CHOOSING = (
    "max_autotune",
    "max_autotune_gemm",
    "freezing",
    "b2b_gemm_pass",
    "decompose_mem_bound_mm",
    "post_grad_fusion_options",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "external_matmul",
    "triton.native_matmul",
)
"""Inductor settings by which a product may run in a different kernel in each of its places."""


def rules(min_bytes: int, codec: str) -> Rules:
    """Return the rules for operations of which Inductor generates code."""
    return Rules(min_bytes, codec, _is_exact, True, _runs_alone, _rounds_alike)


def _is_exact(node: fx.Node) -> bool:
    return exact_in_generated_code(node) or _runs_alone(node)


def _runs_alone(node: fx.Node) -> bool:
    """Return whether an operation runs in PyTorch's own kernel, the same one in every place.

    It must not be fused with the operations after it either: see `stormd::materialize`.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or any(map(_is_set, CHOOSING)):
        return False
    packet = node.target.overloadpacket
    if packet in ATTENTION:
        return not argument(node, "dropout_p")
    return packet in PRODUCTS


ELEMENTWISE = {
    aten._to_copy,
    aten.add,
    aten.div,
    aten.exp,
    aten.mul,
    aten.neg,
    aten.sigmoid,
    aten.sub,
    torch.ops.prims.convert_element_type,
}
"""Operations that Triton compiles to the same instructions in each kernel, except that a product
may be fused with an addition."""


def _rounds_alike(node: fx.Node) -> bool:
    """Return whether a GPU's operation rounds the same in whichever kernel it is fused into.

    A product that is added may become one instruction, or two where it has other uses. On a CPU,
    the last elements of a loop are computed by other functions than those before.
    """
    value, target = node.meta.get("val"), node.target
    if not isinstance(value, torch.Tensor) or value.device.type != "cuda":
        return False
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket not in ELEMENTWISE:
        return False
    adds = target.overloadpacket in (aten.add, aten.sub)
    if adds and node.kwargs.get("alpha", 1) != 1:
        return False
    return not (adds and any(map(_is_multiplied, node.all_input_nodes)))


def _is_multiplied(node: fx.Node) -> bool:
    passed_on = (aten.neg, aten._to_copy, torch.ops.prims.convert_element_type)
    target = node.target
    while isinstance(target, torch._ops.OpOverload):
        if target.overloadpacket in (aten.mul, aten.div):
            return True
        if target.overloadpacket not in passed_on and not is_view(target):
            return False
        node = node.all_input_nodes[0]
        target = node.target
    return False


def _is_set(name: str) -> bool:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part, None)
    return bool(value)


# --- layouts ------------------------------------------------------------------------------------


_UNCACHED = {"fx_graph_cache": False, "fx_graph_remote_cache": False}


class _WithLayouts:
    """Compiles the two graphs of a pair such that stored values keep their strides.

    For graphs with convolutions, Inductor chooses layouts, and a backward pass reads a saved tensor
    in the layout that the forward graph chose. The backward graph gets the layouts when it is
    compiled. Cached code of a forward graph would not give them.
    """

    def __init__(self) -> None:
        self._strides: dict[int, tuple[int, ...]] = {}
        self._chooses = False

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        is_backward = options.get("is_backward")
        if is_backward:
            self._set_strides(gm)
        else:
            self._chooses = GraphLowering.decide_layout_opt(gm, is_inference=False)
        if not self._chooses:
            return compile_fx_inner(gm, inputs, **options)
        _CHOSEN.strides = self._strides
        try:
            with config.patch({} if is_backward else _UNCACHED):
                return compile_fx_inner(gm, inputs, **options)
        finally:
            _CHOSEN.strides = None

    def _set_strides(self, gm: fx.GraphModule) -> None:
        """Have stored values be read with the strides that they were given.

        Of sizes that vary, these are the strides at the sizes that the graphs are compiled for, as
        PyTorch does it for what it saves itself: its code for other sizes would be another.
        """
        for node in gm.graph.find_nodes(op="call_function", target=WAIT):
            strides = self._strides.get(node.meta.get(NUMBER, -1))
            if strides is not None and strides != tuple(map(_hint_of, node.args[3])):
                node.update_arg(3, list(strides))
        gm.recompile()  # the cache looks code up by its graph's code


def _hint_of(size: Any) -> int:
    """Return a size of a graph, or what it is while the graph is compiled."""
    return hint_of(size.meta["val"] if isinstance(size, fx.Node) else size)


class _Chosen(threading.local):
    strides: dict[int, tuple[int, ...]] | None = None


_CHOSEN = _Chosen()
"""The layouts of stored values, noted here while a graph is compiled whose layouts are chosen."""


def inductor_options(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return Inductor's settings for torch.compile's mode and options.

    Raises:
        UsageError: the mode or an option is unknown, or asks for CUDA graphs.
    """
    patches: dict[str, Any] = {}
    if mode is not None and mode != "default":
        try:
            patches.update(torch._inductor.list_mode_options(mode))
        except (KeyError, RuntimeError) as error:
            modes = ", ".join(torch._inductor.list_mode_options())
            raise UsageError(f"mode is {mode!r}; torch.compile knows {modes}") from error
    known = config.get_config_copy()
    for name, value in options.items():
        if name.replace("-", "_") not in known:
            raise UsageError(
                f"the backend stormd has no option {name!r}: known are budget, min_bytes, codec, "
                "codegen, and the settings of torch._inductor.config"
            )
        patches[name.replace("-", "_")] = value
    if patches.get("triton.cudagraphs", known["triton.cudagraphs"]):
        asked = f"mode {mode!r}" if mode else "triton.cudagraphs"
        raise UsageError(
            f"{asked} replays CUDA graphs, in which nothing can leave the device; use mode "
            "'default' or 'max-autotune-no-cudagraphs' with the backend stormd"
        )
    return patches


# --- lowerings ----------------------------------------------------------------------------------


_HELD_ELSEWHERE = "stormd_held_elsewhere"
"""An attribute of a GraphLowering: the names of buffers whose memory is not the graph's alone."""


def _held_elsewhere(box: Any) -> Any:
    """Make Inductor free a buffer after its last use, and never write to it."""
    V.graph.never_reuse_buffers.add(box.get_name())
    V.graph.__dict__.setdefault(_HELD_ELSEWHERE, set()).add(box.get_name())
    return box


def _freeing_held_buffers(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Extend Inductor's `codegen_free`, which else holds these buffers to the graph's end."""

    def codegen_free(wrapper: Any, buffer: Any) -> None:
        name = buffer.get_name()
        if name not in V.graph.__dict__.get(_HELD_ELSEWHERE, ()):
            original(wrapper, buffer)
        elif name not in wrapper.freed and name not in V.graph.removed_buffers:
            wrapper.freed.add(name)
            wrapper.writeline(FreeLine(wrapper, buffer))

    return codegen_free


PythonWrapperCodegen.codegen_free = _freeing_held_buffers(PythonWrapperCodegen.codegen_free)  # type: ignore[method-assign]


def _lower_store(value: Any, number: int, shared: bool) -> Any:
    made = V.graph.current_node.args[0]
    assert isinstance(made, fx.Node)
    value.realize()  # else a copy would be stored, and other users would make theirs
    value = _laid_out_as_an_output(value, made)
    realized = _held_elsewhere(ir.ExternKernel.realize_input(value))
    token = _call_store(realized, number, shared)
    if _CHOSEN.strides is not None:
        known, printer = V.graph.sizevars.shape_env, SymExprPrinter()
        _CHOSEN.strides[number] = tuple(
            known.evaluate_symexpr(printer.doprint(stride)) for stride in realized.get_stride()
        )
    return token


def _laid_out_as_an_output(value: Any, made: fx.Node) -> Any:
    """Return a value in the layout that Inductor gives to a forward graph's saved values.

    In another layout the backward graph's reductions would add in another order.
    """
    val = made.meta["val"]
    strides = V.graph.user_visible_output_strides.get(made) or val.stride()
    if free_unbacked_symbols(strides):
        return value
    is_dense = is_non_overlapping_and_dense_or_false(val)
    if made in V.graph.nodes_prefer_channels_last and len(val.shape) == 4 and is_dense:
        strides = ir.FlexibleLayout.stride_ordered_for_memory_format(
            value.get_size(), torch.channels_last
        )
    if val._is_view() or isinstance(value.data, ir.BaseView):
        return ir.ExternKernel.require_stride_order(value, ir.get_stride_order(strides))
    return ir.ExternKernel.require_exact_strides(value, strides)


def _lower_wait(*arguments: Any) -> Any:
    box = _held_elsewhere(_call_wait(*arguments))
    # `runtime.wait` aligns results. Kernels for memory that is not aligned add in another order.
    V.graph.unaligned_buffers.discard(box.get_name())
    return box


def _lower_materialize(value: Any) -> None:
    """Make Inductor compute a value on its own; the operator itself generates no code.

    In the backward graph it stands for a saved value, which no loop of that graph would make. It
    has the layout that the saved one would have: in another, it would be read in another order.
    """
    value.realize()
    made = V.graph.current_node.args[0]
    assert isinstance(made, fx.Node)
    if _CHOSEN.strides is None and not made.meta["val"]._is_view():
        _laid_out_as_an_output(value, made)
    if V.graph.is_backward:
        V.graph.no_fuse_buffer_names.add(value.get_name())


_call_store = lowering.fallback_handler(STORE)  # type: ignore[no-untyped-call]
_call_wait = lowering.fallback_handler(WAIT)  # type: ignore[no-untyped-call]
_call_hold = lowering.fallback_handler(HOLD)  # type: ignore[no-untyped-call]
_call_fetch = lowering.fallback_handler(FETCH)  # type: ignore[no-untyped-call]

lowering.add_needs_realized_inputs([STORE, HOLD, WAIT, FETCH, MATERIALIZE])  # type: ignore[no-untyped-call]
lowering.register_lowering(STORE, type_promotion_kind=None)(_lower_store)
lowering.register_lowering(WAIT, type_promotion_kind=None)(_lower_wait)
lowering.register_lowering(HOLD, type_promotion_kind=None)(_call_hold)
lowering.register_lowering(FETCH, type_promotion_kind=None)(_call_fetch)
lowering.register_lowering(MATERIALIZE, type_promotion_kind=None)(_lower_materialize)


# --- values in half precision -------------------------------------------------------------------


def _rounds_what_is_stored(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Extend Inductor's check whether a half-precision result is saved for the backward graph.

    PyTorch then rounds it for the forward graph's other uses, too. The check looks for outputs, and
    a stored value is none. Without this, offload would change the last bits of a loss.
    """

    def is_saved(node: fx.Node | None) -> bool:
        if node is not None and len(node.users) > 1:
            stores = sum(user.target is STORE for user in node.users)
            if stores and any(
                user.op != "output" and user.target is not STORE for user in node.users
            ):
                return True
        return original(node)

    return is_saved


_SAVED_LOWP_CHECK = "_has_saved_lowp_output_use"
if hasattr(lowering, _SAVED_LOWP_CHECK):  # from PyTorch 2.13 on
    setattr(
        lowering, _SAVED_LOWP_CHECK, _rounds_what_is_stored(getattr(lowering, _SAVED_LOWP_CHECK))
    )


# --- graphs without a backward pass of their own --------------------------------------------------


class _Captured(threading.local):
    is_generated = False


_CAPTURED = _Captured()
"""Whether this thread generates code of a captured step, which has both passes in its graphs."""


def _in_recorded_layouts(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Extend Inductor's look-up of what an operation requires of its arguments' layouts.

    PyTorch's own kernel may read wrong values in another layout than the recorded one: oneDNN's
    backward pass of an LSTM does. Inductor looks after that only in what it takes for a backward
    graph.
    """

    def constraint(target: Any) -> Any:
        found = original(target)
        if not _CAPTURED.is_generated or not isinstance(target, torch._ops.OpOverload):
            return found
        is_pytorchs = target in lowering.fallbacks or target.overloadpacket in PRODUCTS
        if not is_pytorchs or torch.Tag.flexible_layout in target.tags:
            return found
        is_unknown = found is None or found is lowering.constrain_to_fake_tensors
        return _recorded_layouts if is_unknown else found

    return constraint


def _recorded_layouts(node: fx.Node, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """Return the arguments of a kernel of PyTorch's own in the layouts of the graph."""
    recorded, named = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    constrain: Callable[..., tuple[Any, Any]] = lowering.constrain_to_fake_tensors
    return constrain(arguments, options, recorded, named)


_CONSTRAINTS = "maybe_layout_constraints"
setattr(graph_lowering, _CONSTRAINTS, _in_recorded_layouts(getattr(graph_lowering, _CONSTRAINTS)))


def generate_inference(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return the code of a graph without gradients, as a function of a list, which it empties.

    So each value in the list is freed after its last use. Layouts are those of the graph: chosen
    ones would differ between stored and saved values, and rounding would differ with them.
    PyTorch's own kernels draw random numbers in the order of the graph.
    """
    examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with torch.no_grad(), functorch_config.patch(enable_autograd_cache=False):
        patches = {
            "memory_planning": False,
            "layout_optimization": False,
            "reorder_for_locality": False,
            "post_grad_custom_post_pass": config.post_grad_custom_post_pass or _DrawnInOrder(),
        }
        _CAPTURED.is_generated = True
        try:
            compiled = compile_fx(module, examples, config_patches=patches)
        finally:
            _CAPTURED.is_generated = False
    boxed = _taking_a_list(compiled)
    if boxed is not None:
        return boxed
    function: Callable[..., Any] = compiled  # type: ignore[assignment]  # it is for such inputs
    return lambda given: function(*_emptied(given))


class _DrawnInOrder(CustomGraphPass):
    """Makes kernels that draw from PyTorch's generators run in the order of the graph.

    Inductor orders only by data dependences, so a store could make two kernels get each other's
    numbers.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Make each such kernel wait for the one before it."""
        drawing = list(filter(_draws, graph.nodes))
        behind = {later: OrderedSet([one]) for one, later in pairwise(drawing)}
        if behind:
            from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

            preserve_node_ordering(graph, behind)

    def uuid(self) -> Any:
        """Return an id for this pass."""
        return get_hash_for_files((__file__,))


def _draws(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket is aten.bernoulli:
        return False  # Inductor draws in place, and readers of the result would not wait for it
    return target in _SEEDS or draws(target)


_SEEDS = {torch.ops.prims.inductor_seed.default, torch.ops.prims.inductor_seeds.default}
"""Operations that draw the seeds of generated code's own random numbers."""


def _emptied(given: list[Any]) -> list[Any]:
    taken = list(given)
    given.clear()
    return taken


def _taking_a_list(compiled: Any) -> Callable[[list[Any]], Any] | None:
    """Return the function of a list that AOTAutograd's wrapper calls; None if there is none.

    The wrapper holds all arguments for as long as it runs.
    """
    wrapper = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    cells = getattr(wrapper, "__closure__", None) or ()
    found = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    inner = found.get("compiled_fn")
    has_parameters = any(found.get(name) for name in ("params_flat", "params_buffers_flat"))
    return inner if callable(inner) and not has_parameters else None
