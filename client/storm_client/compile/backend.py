"""The backend of torch.compile, and `compile`, which calls it for one client.

Every graph that Dynamo hands over is compiled with a plan of its own. A mistake of the caller's is
raised where the compiled function is called, as itself: what a backend raises PyTorch wraps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as functorch_config

from storm_client.arguments import plan_options
from storm_client.client import Client
from storm_client.compile.partition import exact_in_eager, partition
from storm_client.compile.runtime import Graph, Target, running
from storm_client.connect import shared_supply
from storm_client.errors import UsageError
from storm_client.plan.table import Plan
from storm_client.supply import Supply
from stormd.protocol import CODECS, Budget

__all__ = ["compile", "plans_of", "stormd"]

MIN_BYTES = 1 << 20

Model = TypeVar("Model", bound=Callable[..., Any])

_ASKED, _TARGET = "stormd.asked", "stormd.target"
"""The options in which `compile` hands over what it has read."""


@dataclass(frozen=True)
class _Asked:
    """What a caller asked for, checked."""

    budget: Budget
    codec: str
    min_bytes: int
    codegen: str
    patches: tuple[tuple[str, Any], ...]
    """Settings of Inductor's."""

    @classmethod
    def of(cls, mode: str | None, options: Mapping[str, Any]) -> _Asked:
        """Return what torch.compile's mode and options mean.

        Raises:
            UsageError: a value or an option is none.
        """
        rest = dict(options)
        budget = plan_options(rest.pop("budget", None), "learn", replay=False).budget
        codec = rest.pop("codec", "ancf")
        if codec not in CODECS:
            raise UsageError(f"codec is {codec!r}; choose one of {', '.join(CODECS)}")
        min_bytes = rest.pop("min_bytes", MIN_BYTES)
        if type(min_bytes) is not int or min_bytes < 0:
            raise UsageError(
                f"min_bytes is {min_bytes!r}; it must be a number of bytes, at least 0"
            )
        codegen = rest.pop("codegen", "inductor")
        if codegen not in _GENERATORS:
            raise UsageError(f"codegen is {codegen!r}; choose {' or '.join(_GENERATORS)}")
        from storm_client.compile.inductor import inductor_options  # loads Inductor

        patches = inductor_options(mode, rest)
        return cls(budget, codec, min_bytes, codegen, tuple(sorted(patches.items())))


def compile(  # noqa: A001 - torch.compile's name
    model: Model,
    *,
    budget: str | float | None = None,
    client: Client | None = None,
    codec: str = "ancf",
    min_bytes: int = MIN_BYTES,
    codegen: str = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
) -> Model:
    """Return `model`, a module or function, compiled with a plan of its saved tensors inside.

    Each graph keeps, offloads or computes again what its backward graph needs, such that at most
    `budget` of it is on the device at any moment: "least", "fit" (what the device has free), bytes
    or a size as "12GiB" for all graphs of `model` together, or as a float a fraction of what each
    graph saves; by default what STORMD_BUDGET says, else "least". A fraction below the least
    possible means the least possible. Results are those of torch.compile without offload, bit for
    bit where its kernels are deterministic.

    `client` is what `storm_client.connect` returned, by default one that the process shares, which
    is connected when the first value leaves. Tensors of less than `min_bytes` stay. `codec` is
    "ancf" (lossless) or "raw". `codegen` is "inductor", or "eager" to run PyTorch's own kernels.
    The rest is torch.compile's.

    Raises:
        UsageError: a bad value; when `model` is called, also a budget below the least possible,
            which the message names. Nothing has been compiled or stored then.
    """
    asked = _Asked.of(
        mode,
        {
            **dict(options or {}),
            "budget": budget,
            "codec": codec,
            "min_bytes": min_bytes,
            "codegen": codegen,
        },
    )
    target = Target(_supply_of(client), asked.budget, asked.codec, asked.min_bytes)
    compiled: Model = torch.compile(
        model,
        backend=stormd,
        options={_ASKED: asked, _TARGET: target},
        fullgraph=fullgraph,
        dynamic=dynamic,
    )
    _TARGETS[compiled] = target
    return compiled


def stormd(
    gm: fx.GraphModule,
    inputs: list[torch.Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph: the backend "stormd" of torch.compile.

    `options` are those of `compile` that it names there, and settings of torch._inductor.config.
    """
    given = dict(options or {})
    try:
        asked = given[_ASKED] if _ASKED in given else _Asked.of(mode, given)
        target = given[_TARGET] if _TARGET in given else _shared_target(asked)
        generate = _GENERATORS[asked.codegen]
        compiled, found = generate(gm, inputs, asked)
    except UsageError as error:
        return partial(_refuse, str(error))
    target.graphs += found
    graph = found[-1] if found else None

    def run(*arguments: Any) -> Any:
        with running(target, graph):
            return compiled(*arguments)

    return run


def plans_of(compiled: Callable[..., Any]) -> list[Plan]:
    """Return the plans of all graphs that a result of `compile` has had compiled so far.

    Raises:
        UsageError: `compiled` is something else.
    """
    target = _TARGETS.get(compiled)
    if target is None:
        raise UsageError("plans_of() takes what storm_client.compile() returned")
    return [graph.plan for graph in target.graphs]


# --- who generates the code ---------------------------------------------------------------------


def _by_inductor(
    gm: fx.GraphModule, inputs: list[torch.Tensor], asked: _Asked
) -> tuple[Callable[..., Any], list[Graph]]:
    from storm_client.compile.inductor import generate

    return generate(gm, inputs, asked.budget, asked.min_bytes, dict(asked.patches))


def _eagerly(
    gm: fx.GraphModule, inputs: list[torch.Tensor], asked: _Asked
) -> tuple[Callable[..., Any], list[Graph]]:
    """Have the graphs run as they are, by PyTorch's own kernels."""
    found: list[Graph] = []

    def divide(
        joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward, graph = partition(
            joint,
            joint_inputs,
            budget=asked.budget,
            min_bytes=asked.min_bytes,
            is_exact=exact_in_eager,
            **options,
        )
        found.append(graph)
        return forward, backward

    with functorch_config.patch(enable_autograd_cache=False):
        compiled = aot_autograd(
            fw_compiler=boxed_nop,
            bw_compiler=boxed_nop,
            partition_fn=divide,
            keep_inference_input_mutations=True,
        )(gm, inputs)
    return compiled, found


_GENERATORS = {"inductor": _by_inductor, "eager": _eagerly}


# --- helpers ------------------------------------------------------------------------------------

_TARGETS: weakref.WeakKeyDictionary[Any, Target] = weakref.WeakKeyDictionary()
"""Of what `compile` returned."""

_SHARED: dict[tuple[Budget, str, int], Target] = {}
"""Of the client that the process shares, by what was asked for."""


def _shared_target(asked: _Asked) -> Target:
    key = (asked.budget, asked.codec, asked.min_bytes)
    return _SHARED.setdefault(key, Target(shared_supply, *key))


def _supply_of(client: Client | None) -> Callable[[], Supply]:
    if client is None:
        return shared_supply
    if not isinstance(client, Client):
        raise UsageError(
            f"client is of type {type(client).__name__}; pass what storm_client.connect() "
            "returned, or nothing for the client that the process shares"
        )
    supply = client._supply
    return lambda: supply


def _refuse(message: str, *_: object) -> Any:
    raise UsageError(message)
