"""Converts the linear layers of a model to ternary layers, and reports the error of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from .linear import Activations, TernaryLinear

__all__ = ["ConversionReport", "LayerReport", "convert"]


@dataclass(frozen=True)
class LayerReport:
    """One converted layer: bytes before and after, and |w - rounded| / |w| over all weights."""

    name: str
    shape: tuple[int, int]
    bytes_before: int
    bytes_after: int
    error: float


@dataclass(frozen=True)
class ConversionReport:
    """All converted layers; `str` is a table."""

    layers: tuple[LayerReport, ...]

    @property
    def bytes_before(self) -> int:
        """Bytes of the original weights."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Bytes of planes and scales."""
        return sum(layer.bytes_after for layer in self.layers)

    def __str__(self) -> str:
        """Return one line per layer, and the total."""
        width = max([len("all"), *(len(layer.name) for layer in self.layers)])
        lines = [f"{'layer':{width}}  {'shape':>13}  {'before':>12}  {'after':>12}  error"]
        for layer in self.layers:
            shape = "x".join(map(str, layer.shape))
            lines.append(
                f"{layer.name:{width}}  {shape:>13}  {layer.bytes_before:12,}  "
                f"{layer.bytes_after:12,}  {layer.error:.3f}"
            )
        total = f"{'all':{width}}  {'':13}  {self.bytes_before:12,}  {self.bytes_after:12,}"
        return "\n".join([*lines, total])


def convert(
    model: nn.Module,
    *,
    threshold: float | str = "absmean",
    activations: Activations = "float",
    group: int | None = None,
    skip: Iterable[str] | Callable[[str], bool] = (),
) -> ConversionReport:
    """Replace every torch.nn.Linear inside `model` by a frozen TernaryLinear; report each.

    `skip` is the names of modules to skip, or a function that returns whether to skip a name.
    A layer with several names is replaced under each, and reported under the first. Weights that
    several layers share are converted in each of them. Raises UsageError if weights are not finite;
    layers before that one are then already converted.
    """
    keeps = skip if callable(skip) else frozenset(skip).__contains__
    found: dict[nn.Linear, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Linear and name and not keeps(name):
            found.setdefault(module, []).append(name)
    return ConversionReport(
        tuple(
            _replaced(model, names, linear, threshold, activations, group)
            for linear, names in found.items()
        )
    )


def _replaced(  # noqa: PLR0917 (what convert was told)
    model: nn.Module,
    names: list[str],
    linear: nn.Linear,
    threshold: float | str,
    activations: Activations,
    group: int | None,
) -> LayerReport:
    layer = TernaryLinear.from_linear(
        linear, threshold=threshold, activations=activations, group=group
    )
    for name in names:
        before, _, last = name.rpartition(".")
        parent = model.get_submodule(before)
        setattr(parent, last, layer)
        if isinstance(parent, nn.TransformerEncoderLayer):
            parent.activation_relu_or_gelu = 0  # in inference it would read the layers' weights
    weight = linear.weight.detach().float()
    missed = (weight - layer.tensor.to_float()).norm() / weight.norm().clamp(min=1e-30)
    return LayerReport(
        names[0],
        (linear.out_features, linear.in_features),
        linear.weight.nbytes,
        layer.tensor.nbytes,
        float(missed),
    )
