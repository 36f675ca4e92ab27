"""`SimpleRotorNet`: a network of two layers with ternary weights and ternary activations.

    inputs -> standardised, signs beyond +-1/2 -> w1 -> gain and shift -> signs beyond +-1/2 -> w2
           -> gain and shift -> outputs

Both products multiply ternary by ternary values, so they are exact integers on every backend. The
network is trained with latent weights in torch and then stored as planes; inference needs only
NumPy.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...errors import CorruptBlob, UsageError
from ..api import encode, matmul
from ..arrays import is_tensor
from ..planes import Array
from ..tensor import TernaryTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SimpleRotorNet"]

THRESHOLD: Final = 0.5

_DAMAGE: Final = (
    ValueError, KeyError, EOFError, TypeError, RuntimeError, zlib.error, zipfile.BadZipFile,
)  # fmt: skip
"""The exceptions that the readers raise for a damaged archive."""

_VECTORS: Final = ("mean", "size", "gain1", "shift1", "gain2", "shift2")


class SimpleRotorNet:
    """A classifier or regressor from `inputs` to `outputs` values through `hidden` rotors.

    A new network has random weights. `nbytes` counts the planes and the six vectors.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, *, seed: int = 0) -> None:
        """Make a network with random ternary weights."""
        if min(inputs, hidden, outputs) < 1:
            raise UsageError(f"a network of {inputs}, {hidden}, {outputs}: each must be at least 1")
        self.inputs, self.hidden, self.outputs = inputs, hidden, outputs
        rng = np.random.default_rng(seed)
        self._w1 = TernaryTensor.encode(rng.integers(-1, 2, (hidden, inputs)).astype(np.int8))
        self._w2 = TernaryTensor.encode(rng.integers(-1, 2, (outputs, hidden)).astype(np.int8))
        self._vectors: dict[str, NDArray[np.float32]] = {
            "mean": np.zeros(inputs, np.float32),
            "size": np.ones(inputs, np.float32),
            "gain1": np.full(hidden, (4 / 9 * inputs) ** -0.5, np.float32),
            "shift1": np.zeros(hidden, np.float32),
            "gain2": np.full(outputs, (4 / 9 * hidden) ** -0.5, np.float32),
            "shift2": np.zeros(outputs, np.float32),
        }
        self._placed: dict[str, tuple[Any, ...]] = {}  # parameters for `forward`, by device

    @property
    def weights(self) -> tuple[TernaryTensor, TernaryTensor]:
        """w1, (hidden, inputs), and w2, (outputs, hidden)."""
        return self._w1, self._w2

    @property
    def nbytes(self) -> int:
        """Bytes of weights and vectors."""
        vectors = sum(vector.nbytes for vector in self._vectors.values())
        return self._w1.nbytes + self._w2.nbytes + vectors

    def forward(self, x: Array, *, threads: int = 1, backend: str = "auto") -> Array:
        """Return (..., outputs) float32 for x of (..., inputs), an array or a tensor on any device.

        Raises UsageError for a wrong number of inputs, or if an input is NaN.
        """
        values = x.float() if is_tensor(x) else np.asarray(x, dtype=np.float32)
        if values.ndim < 1 or values.shape[-1] != self.inputs:
            raise UsageError(f"x has shape {tuple(values.shape)}; give (..., {self.inputs})")
        w1, w2, mean, size, gain1, shift1, gain2, shift2 = self._on(values)

        def product(w: TernaryTensor, one: Array) -> Array:
            planes = encode(one, THRESHOLD, backend=backend)
            total = matmul(*w.planes, planes, threads=threads, backend=backend)
            return total.float() if is_tensor(total) else total.astype(np.float32)

        hidden = product(w1, (values - mean) / size) * gain1 + shift1
        return product(w2, hidden) * gain2 + shift2

    __call__ = forward

    def train(
        self,
        x: Array,
        y: Array,
        *,
        epochs: int = 150,
        batch: int = 64,
        rate: float = 3e-3,
        seed: int = 0,
    ) -> list[float]:
        """Train on x (samples, inputs) and classes y (samples,); return each epoch's mean loss.

        This needs torch and trains on the device of x. The network changes only when all epochs are
        done; until then, and after an error, it is unchanged.
        """
        from .rotor_training import train

        found = train(self, x, y, epochs=epochs, batch=batch, rate=rate, seed=seed)
        self._w1, self._w2 = found.weights
        self._vectors = found.vectors
        self._placed = {}
        return found.losses

    def save(self, path: str | Path) -> None:
        """Write the network to a file: an archive of arrays, which contains no executable code."""
        arrays: dict[str, Any] = {
            "w1": np.frombuffer(self._w1.to_bytes(packed=True), np.uint8),
            "w2": np.frombuffer(self._w2.to_bytes(packed=True), np.uint8),
            **self._vectors,
        }
        with Path(path).open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> SimpleRotorNet:
        """Return the network that `save` wrote.

        Raises CorruptBlob if the file is damaged or not a network, OSError if it cannot be read.
        """
        data = io.BytesIO(Path(path).read_bytes())
        try:
            with np.load(data, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in ("w1", "w2", *_VECTORS)}
        except _DAMAGE as error:
            raise CorruptBlob(f"{path} holds no network: {error}") from error
        w1 = TernaryTensor.from_bytes(arrays["w1"].tobytes())
        w2 = TernaryTensor.from_bytes(arrays["w2"].tobytes())
        if len(w1.shape) != 2 or len(w2.shape) != 2 or w1.shape[0] != w2.shape[1]:
            raise CorruptBlob(f"{path} holds layers of {w1.shape} and {w2.shape}: no network")
        net = cls(w1.shape[1], w1.shape[0], w2.shape[0])
        for name, vector in net._vectors.items():
            found = arrays[name]
            if found.shape != vector.shape or found.dtype != vector.dtype:
                raise CorruptBlob(f"{path} holds {name} of {found.dtype} {found.shape}")
            net._vectors[name] = found
        net._w1, net._w2 = w1, w2
        return net

    def _on(self, x: Array) -> tuple[Any, ...]:
        """Return weights and vectors on the device of x."""
        if not is_tensor(x):
            return (self._w1, self._w2, *self._vectors.values())
        key = str(x.device)
        if key not in self._placed:
            import torch

            vectors = [torch.from_numpy(one).to(x.device) for one in self._vectors.values()]
            self._placed[key] = (self._w1.to(x.device), self._w2.to(x.device), *vectors)
        return self._placed[key]
