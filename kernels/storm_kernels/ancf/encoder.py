"""`Encoder`: `encode` and `decode` with a memory, one entry a layer.

It remembers which mode suited a layer and goes on using it until the layer's ratio drifts, and
it keeps count of what was saved. A blob never depends on that memory to be decoded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .api import decode, encode
from .escapes import escape_rate
from .options import check_tolerance, parse_mode

if TYPE_CHECKING:
    import torch

    from .blob import Blob

__all__ = ["Encoder", "LayerStats"]

_DRIFT = 0.05  # a ratio this far from the remembered one asks for a new choice
_REFRESH = 64  # tensors after which a layer's mode is chosen anew in any case


@dataclass(frozen=True)
class LayerStats:
    """Sums over one layer's tensors; seconds are of this thread's clock, shares 0..1."""

    tensors: int
    raw_nbytes: int
    nbytes: int
    ratio: float
    escape_rate: float
    encode_seconds: float
    decode_seconds: float
    modes: dict[str, int]


@dataclass
class _Layer:
    """What is known about one layer. `mode` and `ratio` are None until something is cached."""

    mode: str | None = None
    ratio: float = 0.0
    raw_nbytes: int = 0
    nbytes: int = 0
    escape_rate: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    modes: Counter[str] = field(default_factory=Counter)

    def suits(self, blob: Blob) -> bool:
        """Whether `blob` is about as small as the remembered choice promised."""
        near = abs(blob.ratio - self.ratio) <= _DRIFT * self.ratio
        return blob.mode == self.mode and near and self.modes.total() % _REFRESH > 0

    def add(self, blob: Blob, seconds: float) -> None:
        self.raw_nbytes += blob.raw_nbytes
        self.nbytes += blob.nbytes
        self.encode_seconds += seconds
        self.modes[blob.mode] += 1

    def summary(self) -> LayerStats:
        return LayerStats(
            tensors=self.modes.total(),
            raw_nbytes=self.raw_nbytes,
            nbytes=self.nbytes,
            ratio=self.raw_nbytes / self.nbytes if self.nbytes else 1.0,
            escape_rate=self.escape_rate,
            encode_seconds=self.encode_seconds,
            decode_seconds=self.decode_seconds,
            modes=dict(self.modes),
        )


class Encoder:
    """Encodes the tensors of a model, layer by layer. For one thread at a time.

    `policy` sizes the dictionaries of mode values; `tolerance` above 0 is lossy, see `encode`.
    """

    def __init__(
        self,
        policy: str = "adaptive",
        *,
        speed: str = "fast",
        tolerance: float = 0.0,
        caching: bool = True,
        backend: str = "auto",
    ) -> None:
        parse_mode("auto", speed, policy)  # refuse what is wrong here rather than at first use
        check_tolerance(tolerance)
        self._policy = policy
        self._speed = speed
        self._tolerance = tolerance
        self._caching = caching
        self._backend = backend
        self._layers: dict[Hashable, _Layer] = {}

    def encode(self, tensor: torch.Tensor, layer_id: Hashable = None) -> Blob:
        """Return `tensor` encoded, in the mode that suited this layer's last tensors.

        Raises what `ancf.encode` raises; the layer's record is then unchanged.
        """
        layer = self._layers.setdefault(layer_id, _Layer())
        start = time.perf_counter()
        blob = self._encode_cached(tensor, layer)
        layer.add(blob, time.perf_counter() - start)
        return blob

    def decode(
        self, blob: Blob, out: torch.Tensor | None = None, layer_id: Hashable = None
    ) -> torch.Tensor:
        """Return the tensor that `blob` holds; raises what `ancf.decode` raises."""
        start = time.perf_counter()
        tensor = decode(blob, out, backend=self._backend)
        layer = self._layers.setdefault(layer_id, _Layer())
        layer.decode_seconds += time.perf_counter() - start
        return tensor

    def verify_lossless(self, tensor: torch.Tensor) -> bool:
        """Return whether every bit of `tensor` survives; the statistics are left alone."""
        import torch

        blob = self._encode(tensor, "auto")
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        same = decode(blob, backend=self._backend)
        return torch.equal(same.reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8))

    def stats(self) -> dict[Hashable, LayerStats]:
        """Return what was done for each layer; `escape_rate` is of the last tensor
        for which a mode was chosen.
        """
        return {layer_id: layer.summary() for layer_id, layer in self._layers.items()}

    def set_tolerance(self, tolerance: float) -> None:
        """Let elements change by at most `tolerance` from now on; 0 is lossless.

        Raises UsageError for one that is negative or not finite; the present one then stays.
        """
        check_tolerance(tolerance)
        self._tolerance = tolerance
        self._forget()

    def set_caching(self, caching: bool) -> None:
        """Remember the mode of each layer, or choose anew for every tensor."""
        self._caching = caching
        self._forget()

    def _forget(self) -> None:
        for layer in self._layers.values():
            layer.mode = None

    def _encode_cached(self, tensor: torch.Tensor, layer: _Layer) -> Blob:
        if layer.mode is not None:
            blob = self._encode(tensor, layer.mode)
            if layer.suits(blob):
                return blob
        blob = self._encode(tensor, "auto")
        layer.escape_rate = escape_rate(blob.host_data())
        # Raw is chosen anew each time: its ratio stays when the layer could be compressed again.
        cacheable = self._caching and not self._tolerance and blob.mode != "raw"
        layer.mode, layer.ratio = (blob.mode, blob.ratio) if cacheable else (None, 0.0)
        return blob

    def _encode(self, tensor: torch.Tensor, mode: str) -> Blob:
        return encode(
            tensor, mode, self._speed, self._tolerance, self._backend, policy=self._policy
        )
