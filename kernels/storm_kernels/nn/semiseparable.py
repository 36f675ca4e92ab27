"""AR-SSM, a layer that mixes a sequence by a semiseparable matrix; each position chooses its rank.

For x of (batch, length, d_model)

    y = T(x) + W (V * scan(g * U))

T is a causal depthwise convolution and mixes near positions. U and V are projections of x to
`max_rank` numbers and mix far positions. The scan sums g * U over positions, with exponential decay
if the layer has `decay`; W projects back. The gate g softly opens the first ranks of a position and
closes the others. One learned number per position, its complexity, sets how many are open. So a
penalty on the complexity lowers the rank in use, and ranks that no position opens can be removed.

Position t of the output depends only on positions up to t. So `step`, called for one position
after the other, returns the outputs of `forward`.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import scan
from ..errors import UsageError

__all__ = ["AdaptiveRankSemiseparable", "Diagnostics", "State"]

_SHARPNESS: Final = 4.0
"""How sharply the gate closes at the chosen rank: within about one rank on either side."""

_OPEN: Final = 2.0
"""The initial logit of the complexity: seven eighths of the ranks are open."""

_LONGEST: Final = 1024.0
"""Steps after which the state with the slowest initial decay has decayed to 1/e."""


class Diagnostics(TypedDict):
    """What a call returns besides its output.

    Attributes:
        used_fused_scan: whether the scan was one of storm_kernels.scan.
        mean_rank: the mean number of open ranks over positions, without gradient.
        gate_penalty: the mean share of open ranks, with gradient. Scaled and added to a loss, it
            lowers the rank in use.
    """

    used_fused_scan: bool
    mean_rank: Tensor
    gate_penalty: Tensor


class State(NamedTuple):
    """The state that `step` passes from one position to the next."""

    recent: Tensor
    """The last conv_size - 1 inputs, (batch, conv_size - 1, d_model), the oldest first."""
    memory: Tensor
    """The state of the scan, (batch, max_rank)."""


class _Mixing(NamedTuple):
    """The projections of one call for each position: all (..., max_rank) except `complexity`."""

    write: Tensor
    read: Tensor
    gate: Tensor
    keep: Tensor | None
    complexity: Tensor


class AdaptiveRankSemiseparable(nn.Module):
    """The layer; `max_rank` bounds the rank, `conv_size` is the number of positions T spans.

    With `decay` each rank decays at a rate that each position chooses. Without it the scan is a
    plain sum. `use_fused_scan=False` computes the same with PyTorch's own operations, for
    comparison. Raises UsageError for sizes below 1.
    """

    def __init__(
        self,
        d_model: int,
        max_rank: int = 32,
        conv_size: int = 4,
        decay: bool = False,
        use_fused_scan: bool = True,
    ) -> None:
        super().__init__()
        for name, size in (("d_model", d_model), ("max_rank", max_rank), ("conv_size", conv_size)):
            if size < 1:
                raise UsageError(f"{name}={size} must be at least 1")
        self.d_model, self.max_rank, self.conv_size = d_model, max_rank, conv_size
        self.decay, self.use_fused_scan = decay, use_fused_scan
        self.taps = nn.Parameter(torch.empty(conv_size, d_model))
        self.project = nn.Linear(d_model, (3 if decay else 2) * max_rank + 1)
        self.out = nn.Linear(max_rank, d_model, bias=False)
        self.register_buffer("ranks", torch.empty(max_rank), persistent=False)
        self.ranks: Tensor
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all memory: most ranks open, decay rates from fast to almost none."""
        with torch.no_grad():
            self.ranks.copy_(torch.arange(self.max_rank) + 0.5)
            nn.init.uniform_(self.taps, -(self.conv_size**-0.5), self.conv_size**-0.5)
            self.project.reset_parameters()
            self.out.reset_parameters()
            bias = self.project.bias
            bias[-1] = _OPEN
            if self.decay:
                spans = torch.logspace(0.5, math.log10(_LONGEST), self.max_rank)
                bias[2 * self.max_rank : -1] = (spans - 1).log()

    def extra_repr(self) -> str:
        """Return the arguments, for `print`."""
        return (
            f"{self.d_model}, max_rank={self.max_rank}, conv_size={self.conv_size}, "
            f"decay={self.decay}, use_fused_scan={self.use_fused_scan}"
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Diagnostics]:
        """Return y of x's shape, (batch, length, d_model), and the diagnostics of the gate."""
        self._check(x, 3)
        mixing = self._mix(x)
        memory = self._scan(mixing, reverse=False)
        y = self._convolve(x, reverse=False) + self.out(mixing.read * memory)
        return y, self._diagnose(mixing)

    def forward_bidirectional(self, x: Tensor) -> tuple[Tensor, Diagnostics]:
        """Return the same as `forward`, but each position sees both sides, and itself once."""
        self._check(x, 3)
        mixing = self._mix(x)
        written = mixing.gate * mixing.write
        memory = self._scan(mixing, reverse=False) + self._scan(mixing, reverse=True) - written
        near = self._convolve(x, reverse=False) + self._convolve(x, reverse=True)
        y = near - x * self.taps[0] + self.out(mixing.read * memory)
        return y, self._diagnose(mixing)

    def initial_state(self, batch: int) -> State:
        """Return the state before the first position, with the layer's device and dtype."""
        weight = self.taps
        return State(
            weight.new_zeros(batch, self.conv_size - 1, self.d_model),
            weight.new_zeros(batch, self.max_rank),
        )

    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return the output for one position x, (batch, d_model), and the state after it."""
        self._check(x, 2)
        if state is None:
            state = self.initial_state(x.shape[0])
        mixing = self._mix(x)
        memory = state.memory if mixing.keep is None else mixing.keep * state.memory
        memory = memory + mixing.gate * mixing.write
        window = torch.cat([state.recent, x.unsqueeze(1)], 1)
        y = (window * self.taps.flip(0)).sum(1) + self.out(mixing.read * memory)
        return y, State(window[:, 1:], memory)

    def _check(self, x: Tensor, dims: int) -> None:
        if x.dim() != dims or x.shape[-1] != self.d_model:
            expected = "(batch, length, d_model)" if dims == 3 else "(batch, d_model)"
            raise UsageError(
                f"x has shape {tuple(x.shape)}; {expected} with d_model={self.d_model} is needed"
            )

    def _mix(self, x: Tensor) -> _Mixing:
        rank = self.max_rank
        projected = self.project(x)
        complexity = projected[..., -1:].sigmoid()
        gate = (_SHARPNESS * (complexity * rank - self.ranks)).sigmoid()
        keep = projected[..., 2 * rank : -1].sigmoid() if self.decay else None
        write, read = projected[..., :rank], projected[..., rank : 2 * rank]
        return _Mixing(write, read, gate, keep, complexity)

    def _scan(self, mixing: _Mixing, *, reverse: bool) -> Tensor:
        written = mixing.gate * mixing.write
        if self.use_fused_scan:
            if mixing.keep is None:
                return scan.cumsum(written, 1, reverse)
            return scan.linear_scan(mixing.keep, written, dim=1, reverse=reverse)[0]
        if reverse:
            keep = None if mixing.keep is None else mixing.keep.flip(1)
            return _plain_scan(keep, written.flip(1)).flip(1)
        return _plain_scan(mixing.keep, written)

    def _convolve(self, x: Tensor, *, reverse: bool) -> Tensor:
        """Return the sum over i of taps[i] times x from i positions before (after, if reverse).

        It computes one product per tap. PyTorch's convolution needs channels first and copies, and
        its gradient for the taps is slow.
        """
        length = x.shape[1]
        ends = (0, 0, 0, self.conv_size - 1) if reverse else (0, 0, self.conv_size - 1, 0)
        padded = functional.pad(x, ends)
        y = x * self.taps[0]
        for i in range(1, self.conv_size):
            begin = i if reverse else self.conv_size - 1 - i
            y = torch.addcmul(y, padded[:, begin : begin + length], self.taps[i])
        return y

    def _diagnose(self, mixing: _Mixing) -> Diagnostics:
        return Diagnostics(
            used_fused_scan=self.use_fused_scan,
            mean_rank=mixing.gate.detach().sum(-1, dtype=torch.float32).mean(),
            gate_penalty=mixing.complexity.mean(),
        )


def _plain_scan(keep: Tensor | None, written: Tensor) -> Tensor:
    """Return the scan by PyTorch's operations; decay needs log2(length) doubling passes."""
    if keep is None:
        return written.cumsum(1)
    span = 1
    while span < written.shape[1]:
        before = functional.pad(written, (0, 0, span, 0))[:, : written.shape[1]]
        kept = functional.pad(keep, (0, 0, span, 0), value=1.0)[:, : keep.shape[1]]
        written, keep = written + keep * before, keep * kept
        span *= 2
    return written
