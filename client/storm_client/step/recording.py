"""Records the operations of a step, forward, backward and update, without running any.

The step's own Python code runs, with autograd, autocast and the optimizers as they are. Each
PyTorch operation that arrives below them becomes a node of one graph. It is computed on fake
tensors, which have shapes and no data. So no memory is allocated, no parameter changes and no
random number is drawn. Tensors that exist before the step, such as parameters, buffers and
optimizer state, arrive as themselves and become inputs of the graph.

In-place operations stay in place. Each node notes the storages of its results and the storages that
it writes to. These notes tell whether two operations may change places.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from storm_client.compile import operators
from storm_client.compile.schemas import argument_of, written
from storm_client.errors import UsageError
from storm_client.step.generators import Generators, is_same
from storm_client.step.kernels import as_the_kernel_does
from storm_client.step.nodes import BACKWARD, MEMORY, MICRO_BATCH, WRITTEN, is_random
from storm_client.step.recurrent import (
    BACKWARD_LAYER,
    LAYER,
    TRAINED_LAYER,
    in_single_precision,
    workspace_bytes,
)
from storm_client.step.refusals import data_dependent, not_in_place, script_line
from storm_client.step.scalars import STAND_IN, Numbers, number_of, symbolic
from storm_client.step.variables import is_plain

__all__ = ["Outside", "Question", "Recorder", "Recording", "is_of_a_capture"]

_NODE = "_stormd_node"
"""The attribute of a fake tensor that holds its node. A table would have to keep the tensors alive,
and autograd counts the references to a gradient."""

aten = torch.ops.aten

_REFUSED = {aten.set_: "gives a tensor other memory", aten.resize_: "resizes a tensor in place"}

_VIEWS = {
    aten._unsafe_view.default: aten.view.default,
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}
"""Views whose schemas declare no alias, so that autograd counts no writes to them, and the same
views with schemas that declare it. A GRU writes to slices of its gates this way."""

_COMPARED = {
    *("__len__", "device", "dim", "dtype", "element_size", "get_device", "grad", "is_complex"),
    *("is_contiguous", "is_cpu", "is_cuda", "is_floating_point", "is_leaf", "is_meta", "is_sparse"),
    *("itemsize", "layout", "nbytes", "ndim", "ndimension", "nelement", "numel", "requires_grad"),
    *("shape", "size", "stride"),
}
"""What follows from the properties that are compared of each tensor."""

_UNMET = "Expected Tensor with single nonzero value, but got zero"
"""What `_assert_async` says. Inductor drops it, except with a message."""


@dataclass(eq=False)
class Outside:
    """A tensor that exists before the step."""

    tensor: torch.Tensor
    fake: torch.Tensor
    node: fx.Node
    argument: int | None = None
    """Its index among the step's tensor arguments; None for other tensors."""


class Question(NamedTuple):
    """What a step asks of a tensor from before it, such as its version."""

    tensor: torch.Tensor
    ask: Callable[[torch.Tensor], Any]
    answer: Any


@dataclass(eq=False)
class Recording:
    """The recorded operations of a step. `graph` has its nodes in order, placeholders first."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    outside: dict[int, Outside] = field(default_factory=dict)
    """By the id of the tensor, which the entry keeps alive."""
    constants: dict[fx.Node, Any] = field(default_factory=dict)
    """Tensors that Python code made from its own data, and generators."""
    numbers: Numbers = field(init=False)
    generators: Generators = field(init=False)
    micro_batch: int = 0
    """The micro-batch being recorded: 0 before the first and without any, -1 after the last."""
    storages: dict[int, tuple[int, object]] = field(default_factory=dict)
    made: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    """The tensors that the step has got from the capture."""
    leaves: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)
    """Tensors that may have gradients, by id, with the gradient that each had before the step."""
    asked: dict[int, tuple[torch.Tensor, bool]] = field(default_factory=dict)
    """Tensors from before the step that it asks for anything or changes, by id, with their
    `requires_grad` before the step."""

    questions: dict[str, Question] = field(default_factory=dict)
    """What else the step asks of tensors from before it, besides what `State` compares of all."""

    def __post_init__(self) -> None:
        self.root = self.graph.create_node("get_attr", "stormd_begin")
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=False)
        self.numbers = Numbers(self.graph, self._note)
        self.generators = Generators()

    # --- tensors from before the step -------------------------------------------------------

    def input_for(self, tensor: torch.Tensor, argument: int | None = None) -> Outside:
        """Return the graph's input for a tensor that exists before the step."""
        known = self.outside.get(id(tensor))
        if known is not None:
            return known
        self._check(tensor)
        self.generators.check_read(tensor)
        self.record_leaf(tensor)
        with torch.utils._python_dispatch._disable_current_modes():
            fake = self.fake_mode.from_tensor(tensor, static_shapes=True)
        node = self._input(fake)
        found = self.outside[id(tensor)] = Outside(tensor, fake, node, argument)
        return found

    def drop_weak_references(self) -> None:
        """Drop those to the tensors from before the step: PyTorch swaps no tensor that has one."""
        self.fake_mode.fake_tensor_converter = FakeTensorConverter()

    def record_leaf(self, tensor: torch.Tensor) -> None:
        """Note the gradient of a tensor, before the step can change it."""
        if tensor.is_leaf and tensor.requires_grad and id(tensor) not in self.leaves:
            with torch._C.DisableTorchFunction():
                self.leaves[id(tensor)] = (tensor, tensor.grad)

    def record_asked(self, tensor: torch.Tensor) -> None:
        """Note a tensor, before the step asks for its shape or another property, or changes it.

        Arguments are left out: each run has other ones.
        """
        known = self.outside.get(id(tensor))
        if tensor.layout is torch.strided and (known is None or known.argument is None):
            self.asked.setdefault(id(tensor), (tensor, tensor.requires_grad))

    def record_answer(self, function: Any, given: tuple[Any, ...], answer: Any) -> None:
        """Note what a function answers of a tensor, if that is no tensor."""
        tensor, *others = given
        name = getattr(function, "__name__", "")
        is_property = name == "__get__"
        if is_property:
            name = function.__self__.__name__
        is_answer = type(answer) in (bool, int, float, str) or (is_property and answer is None)
        if is_answer and name not in _COMPARED and all(map(is_plain, others)):
            ask = lambda now: function(now, *others)  # noqa: E731
            self.questions[f"{id(tensor)} {name} {others}"] = Question(tensor, ask, answer)

    def number(self, value: float) -> Any:
        """Return a symbolic number that the graph takes as an input."""
        return symbolic(self.numbers, self._placeholder(), value)

    def fresh(self, fake: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `fake`, of which each micro-batch has another one."""
        with torch.utils._python_dispatch._disable_current_modes(), self.fake_mode:
            made = torch.empty_strided(
                fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device
            )
        self._input(made)
        return made

    def _input(self, fake: torch.Tensor) -> fx.Node:
        """Return a new input of the graph, for which `fake` stands."""
        node = self._placeholder()
        with torch.utils._python_dispatch._disable_current_modes():
            self.describe(node, fake.detach())
        self._mark(fake, node)
        return node

    def _mark(self, fake: torch.Tensor, node: fx.Node) -> None:
        setattr(fake, _NODE, node)
        self.made.append(weakref.ref(fake))

    def _placeholder(self) -> fx.Node:
        with self.graph.inserting_before(self.root):
            node = self.graph.placeholder(f"primals_{len(self.graph.nodes)}")
        node.meta.update({"val": None, MEMORY: frozenset(), WRITTEN: frozenset(), MICRO_BATCH: 0})
        return node

    @staticmethod
    def _check(tensor: torch.Tensor) -> None:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise UsageError(
                f"the step uses a tensor of type {type(tensor).__name__}, which compile_step does "
                "not capture; use plain tensors, or storm.compile(model)"
            )
        if tensor.grad_fn is not None:
            raise UsageError(
                f"the step uses a tensor that was computed before it ({tensor.grad_fn.name()}) at "
                f"{script_line()}, and its backward pass would go on there; compute that in the "
                "step, or pass tensor.detach()"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UsageError(
                f"the step uses a tensor of layout {tensor.layout}, which compile_step does not "
                "capture; use dense tensors, or storm.compile(model)"
            )

    def left(self) -> list[torch.Tensor]:
        """Return the tensors of the capture that something else still holds after it."""
        own = {id(one.fake) for one in self.outside.values()}
        found = (one() for one in self.made)
        return [one for one in found if one is not None and id(one) not in own]

    # --- operations -------------------------------------------------------------------------

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node of a tensor that the step made or found."""
        node = _node_in(tensor)
        if node is not None and node.graph is self.graph:
            return node
        if isinstance(tensor, FakeTensor):
            raise UsageError(
                "the step uses a tensor that another capture of a step has left behind; keep no "
                "tensors of a step in Python objects, return them"
            )
        return self.input_for(tensor).node

    def has(self, tensor: object) -> bool:
        """Return whether a tensor was made by this step."""
        node = _node_in(tensor)
        return node is not None and node.graph is self.graph

    def run(self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Record one operation, and return its results."""
        if function is aten._local_scalar_dense.default:
            return self._item(arguments[0])
        if function in (aten.lift_fresh.default, aten.lift.default) and not isinstance(
            arguments[0], FakeTensor
        ):
            return self._constant(arguments[0])
        if function.namespace == "profiler":
            return function(*arguments, **options)
        if function.namespace == "prim":  # it asks only for metadata
            faked, faked_options = pytree.tree_map(self._faked, (arguments, options))
            return function(*faked, **faked_options)
        self._refuse_some(function)
        function, arguments = self._instead(function, arguments)
        given = pytree.tree_map(self._noded, (arguments, options))
        faked, faked_options = pytree.tree_map(self._faked, (arguments, options))
        with torch.no_grad(), self.fake_mode:
            try:
                made = function(*faked, **faked_options)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise data_dependent(str(function)) from error
            made = as_the_kernel_does(function, faked, faked_options, made)
            if function is BACKWARD_LAYER:
                made = in_single_precision(made)
        self._check_layout(function, made)
        self._check_memory(function, (faked, faked_options), made)
        node = self.graph.call_function(function, *given)
        node.meta[WRITTEN] = frozenset(
            memory
            for one in written(function, arguments, options)
            for memory in self._memory(self._faked(one))
        )
        self._note(node)
        found = self._returned(function, arguments, options, made)
        self._track(node, found)
        return found

    def _note(self, node: fx.Node) -> None:
        node.meta[BACKWARD] = torch._C._current_graph_task_id() != -1
        node.meta[MICRO_BATCH] = self.micro_batch
        node.meta.setdefault(MEMORY, frozenset())
        node.meta.setdefault(WRITTEN, frozenset())
        if node.meta[BACKWARD] and is_random(node):
            raise UsageError(
                f"{node.target} draws random numbers in a backward pass, as checkpointing does "
                "that computes dropout again; leave checkpointing out of the step, whose plan "
                "recomputes what is worth it"
            )
        if is_random(node):
            given = [self.constants.get(one) for one in node.all_input_nodes]
            own = [one for one in given if isinstance(one, torch.Generator)]
            self.generators.draw(own[0] if own else None)

    def _item(self, tensor: torch.Tensor) -> Any:
        if not tensor.dtype.is_floating_point:
            raise data_dependent(f".item() of {tensor.dtype}")
        node = self.graph.call_function(aten._local_scalar_dense.default, (self.node_of(tensor),))
        node.meta["val"] = None
        self._note(node)
        return symbolic(self.numbers, node, None)

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor that Python code has just made; each run copies it again."""
        fake = self.fake_mode.from_tensor(tensor, static_shapes=True)
        with torch.utils._python_dispatch._disable_current_modes():
            self.constants[self._input(fake)] = tensor.clone()
        made = self.run(aten.clone.default, (fake,), {})
        assert isinstance(made, torch.Tensor)
        return made

    def _generator(self, generator: torch.Generator) -> fx.Node:
        for node, value in self.constants.items():
            if isinstance(value, torch.Generator) and is_same(value, generator):
                return node
        self.generators.watch(generator)
        node = self._placeholder()
        self.constants[node] = generator
        return node

    def _instead(self, function: Any, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Return an equivalent operation whose schema and arguments describe all that it does."""
        if function is LAYER and torch.is_grad_enabled():
            return TRAINED_LAYER, (*arguments, workspace_bytes(arguments))
        if function is BACKWARD_LAYER:
            *others, workspace = arguments
            return function, (*others, self.run(aten.clone.default, (workspace,), {}))
        if function is aten._assert_async.default:
            return aten._assert_async.msg, (*arguments, _UNMET)
        return _VIEWS.get(function, function), arguments

    def _refuse_some(self, function: Any) -> None:
        """Refuse operations that cannot be captured, whatever their arguments are.

        Indexing with integers gives a known shape. Indexing with booleans raises on fake tensors.
        """
        packet = getattr(function, "overloadpacket", None)
        if packet in _REFUSED:
            raise not_in_place(_REFUSED[packet], str(function))
        if not isinstance(function, torch._ops.OpOverload):
            raise UsageError(
                f"the step uses {function} at {script_line()}, which compile_step does not "
                "capture; compile the model with storm.compile instead"
            )
        if torch.Tag.dynamic_output_shape in function.tags and packet is not aten.index:
            raise data_dependent(str(function))
        if function.namespace in ("c10d", "_c10d_functional"):
            raise UsageError(
                f"the step communicates ({function}) at {script_line()}; compile_step is for one "
                "process, use storm.compile(model) with DDP or FSDP"
            )

    @staticmethod
    def _check_layout(function: Any, made: Any) -> None:
        """Refuse results that are not strided, such as gradients of sparse embeddings."""
        for one in pytree.tree_leaves(made):
            if isinstance(one, torch.Tensor) and one.layout is not torch.strided:
                raise UsageError(
                    f"{function} at {script_line()} makes a tensor of layout {one.layout}, which "
                    "compile_step does not capture; use dense gradients (sparse=False), or "
                    "storm.compile(model)"
                )

    def _check_memory(self, function: Any, given: Any, made: Any) -> None:
        """Refuse results that share an argument's memory where the schema does not declare it.

        A write to one of them would not be known to change the other.
        """
        lent = {memory for one in pytree.tree_leaves(given) for memory in self._memory(one)}
        results = made if isinstance(made, tuple) else (made,)
        for result, described in zip(results, function._schema.returns, strict=False):
            memory = {one for leaf in pytree.tree_leaves(result) for one in self._memory(leaf)}
            if described.alias_info is None and lent & memory:
                raise UsageError(
                    f"{function} at {script_line()} returns what lies in the memory of its "
                    "arguments, and its schema does not say so; have it return a copy, or leave it "
                    "out of the step"
                )

    def _noded(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if isinstance(value, torch.Generator):
            return self._generator(value)
        number = number_of(value)
        return value if number is None else number.source

    def _faked(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return value
        if isinstance(value, torch.Tensor):
            return self.input_for(value).fake
        return STAND_IN if number_of(value) is not None else value

    def _returned(
        self, function: Any, arguments: tuple[Any, ...], options: dict[str, Any], made: Any
    ) -> Any:
        """Return the results, with the arguments that were written to in place of their aliases."""
        results = made if isinstance(made, tuple) else (made,)
        found = []
        for result, described in zip(results, function._schema.returns, strict=False):
            alias = described.alias_info
            if alias is not None and alias.is_write:
                found.append(argument_of(function, arguments, options, alias))
            else:
                found.append(result)
        if not isinstance(made, tuple):
            return found[0] if found else made
        return tuple(found)

    def _track(self, node: fx.Node, made: Any) -> None:
        """Give each new tensor its node."""
        if isinstance(made, torch.Tensor):
            if isinstance(made, FakeTensor) and not hasattr(made, _NODE):
                self._mark(made, node)
            elif self.node_of(made) is not node:
                return  # an argument
            with torch.utils._python_dispatch._disable_current_modes():
                self.describe(node, made.detach())
            return
        if not isinstance(made, (tuple, list)):
            return
        memory: frozenset[int] = frozenset()
        vals: list[Any] = [None] * len(made)
        for index, one in enumerate(made):
            if not isinstance(one, (torch.Tensor, tuple, list)):
                continue
            if isinstance(one, torch.Tensor) and (
                not isinstance(one, FakeTensor) or hasattr(one, _NODE)
            ):
                continue
            item = self.graph.call_function(operator.getitem, (node, index))
            self._note(item)
            self._track(item, one)
            memory |= item.meta[MEMORY]
            vals[index] = item.meta.get("val")
        node.meta["val"] = type(made)(vals)
        node.meta[MEMORY] = memory

    # --- memory -----------------------------------------------------------------------------

    def describe(self, node: fx.Node, val: torch.Tensor) -> None:
        """Note a node's value, its metadata and the storage that it lies in."""
        operators.describe(node, val)
        node.meta[MEMORY] = frozenset(self._memory(val))

    def _memory(self, value: Any) -> list[int]:
        if not isinstance(value, torch.Tensor):
            return []
        storage = value.untyped_storage()
        number, _ = self.storages.setdefault(storage._cdata, (len(self.storages), storage))
        return [number]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation below autograd instead of running it."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        profile = sys.getprofile()
        sys.setprofile(None)  # PyTorch's own code below is not the step's
        try:
            return self.recording.run(func, args, dict(kwargs or {}))
        finally:
            sys.setprofile(profile)


def is_of_a_capture(value: object) -> bool:
    """Return whether a value is a tensor without memory, or a number, that a capture has made."""
    return number_of(value) is not None or _node_in(value) is not None


def _node_in(value: object) -> fx.Node | None:
    return getattr(value, _NODE, None) if isinstance(value, FakeTensor) else None
