"""Makes the recipes of a plan, while their inputs are as the operation found them.

A recipe is made only if it recomputes the value in the plan's way (`ways.py`), since proofs are of
ways. A step that has followed another plan before may hold inputs otherwise, or have copied them
for another operation. Then the value is offloaded, or kept if it is saved already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from storm_client.eager.bits import copied
from storm_client.eager.calls import Call
from storm_client.eager.casts import Cast
from storm_client.eager.recognition import StepRecord
from storm_client.eager.recompute import OverwrittenResult, RecipeResult, Result
from storm_client.eager.sources import (
    Alias,
    Blank,
    Copied,
    PackedInput,
    Source,
)
from storm_client.eager.tracked import TrackedStorage
from storm_client.eager.values import Inputs, SaveHooks, Values
from storm_client.eager.ways import NO_WAY, Way
from storm_client.planner.decisions import OFFLOAD, Decision, Replay
from storm_client.saved.snapshots import is_result
from storm_client.saved.versions import KeptTensor, SavedVersion, View

__all__ = ["RecipeMaker"]


class RecipeMaker:
    """Makes the recipes of one step; used in the thread of its block."""

    def __init__(
        self, step: StepRecord, values: Values, hooks: SaveHooks, *, min_bytes: int
    ) -> None:
        """Keep or offload inputs by `hooks`; tensors below `min_bytes` are copied."""
        self._step = step
        self._values = values
        self._hooks = hooks
        self._min_bytes = min_bytes

    def expect(
        self, made: torch.Tensor, tracked: TrackedStorage, decision: Decision, *, is_first: bool
    ) -> Decision:
        """Return the decision for a value that autograd saves.

        One that is to be recomputed is held until its operation returns, if this save is the
        value's first event; the operation may have saved its own result. It is offloaded if the
        operation has returned, and no recipe recomputes it in the plan's way.
        """
        if not isinstance(decision, Replay):
            return decision
        result, plan = tracked.result, self._step.plan
        if result is None and is_first:
            tracked.result = Result(made, tracked.pin, self._values.pins)
            tracked.result.original = made.detach()
        elif (
            result is None
            or plan is None
            or (result.has_recipe and result.way != plan.ways[tracked.number])
        ):
            return OFFLOAD
        return decision

    def make(
        self,
        tracked: TrackedStorage,
        call: Call,
        inputs: Inputs,
        output: torch.Tensor,
        index: int | None,
    ) -> None:
        """Have a value recomputed: it is output `index` of `call`, or the only output if None."""
        way = self.way_of(tracked, call.tensors(), inputs)
        if way is NO_WAY:
            return
        if call.recipe is None:
            sources = self._sources(call, output, inputs, tracked.number)
            if sources is None:
                return
            call.recipe = call.recipe_of(sources, output.device.type)
        if tracked.result is None:
            tracked.result = Result(output, tracked.pin, self._values.pins)
        tracked.result.made_by(call.recipe, index, way)

    def make_cast(self, cast: Cast, source: torch.Tensor, inputs: Inputs) -> None:
        """Have a cast recomputed that autocast has made from `source`."""
        tracked, way = cast.tracked, self.way_of(cast.tracked, [source], inputs)
        if way is NO_WAY:
            return
        if tracked.result is None:
            tracked.result = Result(cast.made, tracked.pin, self._values.pins)
        call = Call(torch.Tensor.to, (source, cast.made.dtype), {})
        sources = self._hold([source], inputs, tracked.number)
        tracked.result.made_by(call.recipe_of(sources, source.device.type), None, way)

    def pack_input(self, tensor: torch.Tensor, number: int) -> Any:
        """Keep or offload a value from which others are recomputed; return the packed value."""
        decision = self._step.decision_for_input(number, tensor.untyped_storage().nbytes())
        return self._hooks.pack_input(tensor, decision, self._step.layer(number))

    def way_of(
        self, tracked: TrackedStorage, tensors: Sequence[torch.Tensor], inputs: Inputs
    ) -> Way:
        """Return the plan's way to recompute a value made just now; NO_WAY if it cannot be used.

        An input may have no recipe, or one of another way, or its copy may have been made for
        another operation. And a value may have been saved without a trial, where another step
        signature has a proof that this one lacks.
        """
        plan, signature, result = self._step.plan, self._step.signature, tracked.result
        if plan is None or signature is None:
            return NO_WAY
        for tensor, source in zip(tensors, inputs, strict=True):
            if source is None:
                continue
            if self._recomputes(source):
                if source.result is None or source.result.way != plan.ways[source.number]:
                    return NO_WAY
            elif not is_result(tensor):
                reader = tracked.number if source.copy is None else source.copied_for
                if reader != plan.first_readers.get(source.number):
                    return NO_WAY
        way = plan.ways[tracked.number]
        if result is None or not result.needs_proof:
            return way
        return way if signature.evidence.recomputed.holds(way, result.nbytes) else NO_WAY

    def _recomputes(self, tracked: TrackedStorage) -> bool:
        """Return whether the present plan recomputes a value, which an earlier one may have."""
        return isinstance(self._step.decision_for(tracked.number, tracked.value.nbytes), Replay)

    # --- sources ----------------------------------------------------------------------------

    def _sources(
        self, call: Call, output: torch.Tensor, inputs: Inputs, number: int
    ) -> list[Source] | None:
        """Hold the inputs of a call for an output; None if an overwritten one has no recipe."""
        tensors = call.tensors()
        if call.reads_layout:
            return [Blank.like(tensor) for tensor in tensors]
        count = len(self._values.former(call, output))
        results = [
            tracked.result for tracked in inputs[:count] if tracked is not None and tracked.result
        ]
        if len(results) < count:
            return None
        written = map(OverwrittenResult.over, results, tensors)
        return [*written, *self._hold(tensors[count:], inputs[count:], number)]

    def _hold(self, tensors: Sequence[torch.Tensor], inputs: Inputs, number: int) -> list[Source]:
        """Hold the inputs of the recipe of a value."""
        return [
            self._source(tensor, tracked, number)
            for tensor, tracked in zip(tensors, inputs, strict=True)
        ]

    def _source(self, tensor: torch.Tensor, tracked: TrackedStorage | None, reader: int) -> Source:
        if tracked is None:
            is_large = tensor.untyped_storage().nbytes() >= self._min_bytes  # so a parameter
            if is_large or self._hooks.is_at_rest(tensor):
                return Alias.of(tensor)
            if is_result(tensor):
                return self._held(KeptTensor.keeping(tensor), tensor)
            return Alias.of(copied(tensor))  # the tensor itself can be written to uncounted
        if tracked.result is not None and self._recomputes(tracked):
            tracked.result.expect_use()
            version = SavedVersion.of(tensor, tracked.pin.address)
            return RecipeResult(tracked.result, View.of(tensor), version)
        if is_result(tensor):
            return self._held(self.pack_input(tensor, tracked.number), tensor, tracked)
        if tracked.copy is None:
            packed = self.pack_input(copied(tensor), tracked.number)
            tracked.copy = PackedInput(packed, self._hooks.restore_input)
            tracked.copied_for = reader
        return Copied(tracked.copy, View.of(tensor))

    def _held(
        self, packed: Any, tensor: torch.Tensor, tracked: TrackedStorage | None = None
    ) -> PackedInput:
        """Hold a tensor that was packed for a recipe, and whose memory autograd may get, too."""
        held = PackedInput(packed, self._hooks.restore_input, tracked)
        return self._hooks.inputs.add(held, tensor.untyped_storage()._cdata)
