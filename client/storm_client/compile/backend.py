"""The torch.compile backend "stormd", and how `storm_client.compile` uses it.

Every graph from Dynamo is compiled with a plan of its own. A mistake of the user's is raised where
the compiled function is called, because PyTorch wraps exceptions of a backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as functorch_config

from storm_client.arguments import check_choice, plan_options, size_of
from storm_client.client import Client
from storm_client.compile.exactness import exact_in_eager
from storm_client.compile.graph import Graph
from storm_client.compile.partition import Partitioner
from storm_client.compile.runtime import running
from storm_client.compile.saved_values import Rules
from storm_client.compile.shared_budget import shared_budget_for
from storm_client.compile.target import Target, shared_target
from storm_client.connecting import shared_supply
from storm_client.errors import UsageError
from storm_client.monitoring.compiled_models import backend_of
from storm_client.transport.daemon_loss import Supply
from stormd.protocol import CODECS, Budget

__all__ = ["compiled", "compiled_of", "stormd", "supply_of"]

MIN_BYTES = 1 << 20

Model = TypeVar("Model", bound=Callable[..., Any])

_ASKED, _TARGET = "stormd.asked", "stormd.target"
"""The options in which `compile` passes its checked options and its target."""


@dataclass(frozen=True)
class _Asked:
    """The user's options, checked."""

    budget: Budget
    codec: str
    min_bytes: int
    codegen: str
    patches: tuple[tuple[str, Any], ...]
    """Settings of Inductor."""

    @classmethod
    def of(cls, mode: str | None, options: Mapping[str, Any]) -> _Asked:
        """Return torch.compile's mode and options; raise UsageError for an unknown or bad one."""
        rest = dict(options)
        budget = plan_options(rest.pop("budget", None), "learn", replay=False).budget
        codec = rest.pop("codec", "ancf")
        min_bytes = size_of(rest.pop("min_bytes", MIN_BYTES), "min_bytes")
        check_choice("codec", codec, CODECS)
        codegen = rest.pop("codegen", "inductor")
        check_choice("codegen", codegen, _GENERATORS)
        from storm_client.compile.inductor import inductor_options  # loads Inductor

        patches = inductor_options(mode, rest)
        return cls(budget, codec, min_bytes, codegen, tuple(sorted(patches.items())))


def compiled(
    model: Model,
    client: Client | None,
    mode: str | None,
    options: Mapping[str, Any],
    *,
    fullgraph: bool,
    dynamic: bool | None,
) -> Model:
    """Compile `model` for one client, as `storm_client.compile` does."""
    if not callable(model) or isinstance(model, type):
        raise UsageError(f"model is {model!r}; pass a module that was made, or a function")
    asked = _Asked.of(mode, options)
    supply = supply_of(client)
    shared_budget = shared_budget_for(None if client is None else client._supply, asked.budget)
    target = Target(supply, asked.budget, asked.codec, asked.min_bytes, shared_budget)
    options = {_ASKED: asked, _TARGET: target}
    found = torch.compile(
        model, backend=stormd, options=options, fullgraph=fullgraph, dynamic=dynamic
    )
    found.__dict__[_COMPILED] = _Compiled(target, target.graphs)
    return cast("Model", found)


def stormd(
    gm: fx.GraphModule,
    inputs: list[torch.Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph: the backend "stormd" of torch.compile.

    `options` has `budget`, `codec`, `min_bytes` and `codegen`, as `storm_client.compile` takes
    them, and settings of torch._inductor.config. The client is the one that the process shares.
    """
    given = dict(options or {})
    try:
        asked = given[_ASKED] if _ASKED in given else _Asked.of(mode, given)
        target = given.get(_TARGET) or shared_target(asked.budget, asked.codec, asked.min_bytes)
        generate = _GENERATORS[asked.codegen]
        compiled, found = generate(gm, inputs, asked, target)
    except UsageError as error:
        return partial(_refuse, str(error))
    target.graphs += found
    if _TARGET not in given:
        _note(sys._getframe(1).f_locals.get("self"), target, found)
    graph = found[-1] if found else None

    def run(*arguments: Any) -> Any:
        with running(target, graph):
            return compiled(*arguments)

    return run


# --- code generators ----------------------------------------------------------------------------


def _by_inductor(
    gm: fx.GraphModule, inputs: list[torch.Tensor], asked: _Asked, target: Target
) -> tuple[Callable[..., Any], list[Graph]]:
    from storm_client.compile import inductor

    rules = inductor.rules(asked.min_bytes, asked.codec)
    share = target.shared_budget.share_of(target)
    partitioner = inductor.InductorPartitioner(rules, asked.budget, share, target.measured)
    return inductor.generate(gm, inputs, partitioner, dict(asked.patches)), partitioner.found


def _eagerly(
    gm: fx.GraphModule, inputs: list[torch.Tensor], asked: _Asked, target: Target
) -> tuple[Callable[..., Any], list[Graph]]:
    """Partition the graphs, which run as they are, by PyTorch's own kernels."""
    rules = Rules(asked.min_bytes, asked.codec, exact_in_eager)
    share = target.shared_budget.share_of(target)
    partitioner = Partitioner(rules, asked.budget, share, target.measured)
    with functorch_config.patch(enable_autograd_cache=False):
        compiled = aot_autograd(
            fw_compiler=boxed_nop,
            bw_compiler=boxed_nop,
            partition_fn=partitioner,
            keep_inference_input_mutations=True,
        )(gm, inputs)
    return compiled, partitioner.found


_GENERATORS = {"inductor": _by_inductor, "eager": _eagerly}


# --- helpers ------------------------------------------------------------------------------------


class _Compiled(NamedTuple):
    """The target and the graphs of one compiled model."""

    target: Target
    graphs: list[Graph]


_COMPILED = "_stormd_compiled"
"""The key of a `_Compiled` in the `__dict__` of what `compile` returned, or of torch.compile's own
object for one of its calls. Set as an attribute, it would go to the module inside. A weak table
would run Python code when a key is freed, where Ctrl-C may be lost."""


def _note(caller: Any, target: Target, found: list[Graph]) -> None:
    """Note graphs with the object by which torch.compile called this backend; the model has it."""
    if hasattr(caller, "compiler_name"):
        made = caller.__dict__.setdefault(_COMPILED, _Compiled(target, []))
        made.graphs.extend(found)


def supply_of(client: Client | None) -> Callable[[], Supply]:
    """Return a function that gives a client's supply; without a client, the process's shared one.

    Raises:
        UsageError: `client` is no client.
    """
    if client is None:
        return shared_supply
    if not isinstance(client, Client):
        raise UsageError(
            f"client is of type {type(client).__name__}; pass what storm_client.connect() "
            "returned, or nothing for the client that the process shares"
        )
    supply = client._supply
    return lambda: supply


def compiled_of(model: Callable[..., Any]) -> _Compiled:
    """Return the target and graphs of a model, whichever of the two ways compiled it."""
    for holder in (model, backend_of(model)):
        found = getattr(holder, "__dict__", {}).get(_COMPILED)
        if isinstance(found, _Compiled):
            return found
    if getattr(backend_of(model), "compiler_name", None) == "stormd":
        raise UsageError("nothing has been compiled yet: call the model once before")
    raise UsageError(
        f"this takes what storm_client.compile(model) or torch.compile(model, backend='stormd') "
        f"returned, not a {type(model).__name__}"
    )


def _refuse(message: str, *_: object) -> Any:
    raise UsageError(message)
