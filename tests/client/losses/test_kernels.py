"""On a GPU: the kernels have every bit of this PyTorch's operations, in the memory promised.

What a CPU can show of them is in tests/kernels/loss.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import storm_client as storm
import torch
import torch.nn.functional as F
from storm_client.losses import kernels as loss_kernels
from storm_client.losses import log_probabilities as losses
from storm_client.losses.kernels import NO_KERNELS, Kernels, kernels_for, statistics_of
from support.cuda_only import cuda_only
from support.same_bits import compare, same, set_tiles
from torch import Tensor

MIB = 1 << 20
CLASSES = [2049, 4096, 9216, 9217, 9220, 12_252, 12_256, 32_000, 50_257, 128_256, 151_936, 200_003]
TYPES = [torch.bfloat16, torch.float16, torch.float32]
CHOICES = {
    "no kernel": NO_KERNELS,
    "backward alone": Kernels(forward=False, backward=True),
    "both": None,
}


def make(rows: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows + classes)
    target = torch.randint(classes, (rows,), device="cuda")
    target[::7] = -100
    return (torch.randn(rows, classes, device="cuda") * 3).to(dtype), target


@pytest.fixture(params=CHOICES)
def _chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use some of the kernels only, where log-probabilities are float32."""
    set_tiles(monkeypatch, 2 * MIB)
    kernels = CHOICES[request.param]

    def chosen(_: Tensor, dtype: torch.dtype) -> Kernels | None:
        return kernels if dtype == torch.float32 else NO_KERNELS

    if kernels is not None:
        monkeypatch.setattr(losses, "kernels_for", chosen)


def test_statistics_give_log_probabilities_back(device: str) -> None:
    """With PyTorch's own bits, where it subtracts the largest and the logarithm in turn."""
    torch.manual_seed(0)
    for classes in (7, 1000, 4099):
        logits = torch.randn(50, classes, device=device) * 5
        log_probs = torch.log_softmax(logits, 1)
        largest, log_total = statistics_of(logits, log_probs)
        again = (logits - largest.unsqueeze(1)) - log_total.unsqueeze(1)
        assert torch.equal(again, log_probs)


def test_a_cpu_has_none() -> None:
    assert kernels_for(torch.empty(4, 5000), torch.float32) == NO_KERNELS


def test_kernels_are_asked_for_unless_logits_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read and write one type, and compute in float32."""
    both = Kernels(forward=True, backward=True)
    monkeypatch.setattr(losses, "kernels_for", lambda *_: both)
    for dtype, cast, expected in (
        (torch.bfloat16, torch.float32, both),
        (torch.float32, torch.float32, both),
        (torch.bfloat16, torch.bfloat16, both),
        (torch.float32, torch.bfloat16, NO_KERNELS),
        (torch.bfloat16, torch.float16, NO_KERNELS),
    ):
        tiles = losses.Tiles.of(torch.empty(16, 4099, dtype=dtype), cast, torch.float32, False)
        assert tiles.kernels == expected


class TestOnDevice:
    """Everything that needs one."""

    pytestmark = cuda_only

    @pytest.mark.parametrize("classes", CLASSES)
    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    def test_both_kernels_have_pytorchs_bits(self, dtype: torch.dtype, classes: int) -> None:
        logits, _ = make(16, classes, dtype)
        assert kernels_for(logits, torch.float32) == Kernels(forward=True, backward=True)

    @pytest.mark.parametrize("classes", [9217, 32_000, 50_257])
    @pytest.mark.parametrize("offset", [1, 2, 3])
    def test_float32_that_lies_anywhere_too(self, classes: int, offset: int) -> None:
        memory = torch.randn(16 * classes + offset, device="cuda")
        logits = memory[offset:].view(16, classes)
        assert kernels_for(logits, torch.float32) == Kernels(forward=True, backward=True)

    def test_an_order_that_is_another_is_found_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What guards the bits: kernels that add in a wrong order are not used."""
        monkeypatch.setattr(loss_kernels, "_proved", {})
        monkeypatch.setattr(loss_kernels.cuda, "order", lambda *_: "strided")
        for classes in (32_000, 50_257, 128_256):
            logits, _ = make(16, classes, torch.bfloat16)
            assert kernels_for(logits, torch.float32) == Kernels(forward=False, backward=True)

    def test_what_they_do_not_take_is_left_to_tiles(self) -> None:
        logits, _ = make(64, 4100, torch.bfloat16)
        for other in (
            logits[:, :2048].contiguous(),
            logits[:, :4000],
            logits.double(),
            logits.flatten()[1:4097].view(1, 4096),
        ):
            assert kernels_for(other, torch.float32) == NO_KERNELS
        assert kernels_for(logits, torch.bfloat16) == NO_KERNELS

    @pytest.mark.usefixtures("_chosen")
    @pytest.mark.parametrize("classes", CLASSES)
    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    def test_loss_and_gradient_have_pytorchs_bits(self, dtype: torch.dtype, classes: int) -> None:
        logits, target = make(333, classes, dtype)
        logits[5, 17] = float("inf")
        logits[6, 1000] = float("nan")
        logits[8] *= 20
        for reduction in ("mean", "sum", "none"):
            compare(logits.detach(), target, dtype=torch.float32, reduction=reduction)
        logits, target = make(333, classes, dtype)
        compare(logits, target, dtype=torch.float32)

    @pytest.mark.usefixtures("_chosen")
    @pytest.mark.parametrize("given", TYPES, ids=str)
    @pytest.mark.parametrize("cast", TYPES, ids=str)
    def test_autocast_and_a_type_have_pytorchs_bits(
        self, given: torch.dtype, cast: torch.dtype
    ) -> None:
        logits, target = make(333, 32_000, given)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            compare(logits, target, dtype=cast)

    @pytest.mark.usefixtures("_chosen")
    def test_a_real_batch_has_pytorchs_bits(self) -> None:
        logits, target = make(4096, 128_256, torch.bfloat16)
        compare(logits, target, dtype=torch.float32)

    @pytest.mark.parametrize(
        ("rows", "classes"),
        [(600, 32_000), (1200, 32_000), (2500, 50_257), (1200, 151_936), (4400, 128_256)],
    )
    def test_smoothed_losses_have_pytorchs_bits(self, rows: int, classes: int) -> None:
        """Sums of rows: by one block each in a tile as in all, which may be cut at 2 GiB."""
        logits, target = make(rows, classes, torch.bfloat16)
        compare(logits, target, dtype=torch.float32, label_smoothing=0.1)

    def test_the_gradient_of_kernels_takes_the_logits_memory(self) -> None:
        leaf = torch.randn(2048, 32_000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        target = torch.randint(32_000, (2048,), device="cuda")
        (expected,) = torch.autograd.grad(F.cross_entropy((leaf * 2).float(), target), leaf)
        logits = leaf * 2
        address, seen = logits.data_ptr(), []
        logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
        loss = storm.cross_entropy(logits, target, dtype=torch.float32)
        del logits
        (found,) = torch.autograd.grad(loss, leaf)
        assert seen == [address]
        assert same(found, expected)

    @pytest.mark.parametrize("kernels", [NO_KERNELS, CHOICES["backward alone"], None], ids=str)
    def test_it_takes_no_more_than_tiles(
        self, kernels: Kernels | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if kernels is not None:
            monkeypatch.setattr(losses, "kernels_for", lambda *_: kernels)
        leaf = torch.randn(4096, 32_000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        target = torch.randint(32_000, (4096,), device="cuda")
        storm.cross_entropy(leaf, target, dtype=torch.float32).backward()
        leaf.grad = None
        taken = []
        tile, few = losses.TILE_BYTES["cuda"] + MIB, 2 * MIB
        for held in (False, True):
            logits = leaf.clone()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = storm.cross_entropy(logits, target, dtype=torch.float32)
            assert torch.cuda.max_memory_allocated() - before <= 3 * tile + few
            keep = logits if held else None
            del logits
            torch.cuda.reset_peak_memory_stats()
            loss.backward()
            taken.append(torch.cuda.max_memory_allocated() - before)
            assert (keep is not None) is held
            leaf.grad = None
        assert taken[0] <= 4 * tile + few
        assert leaf.nbytes <= taken[1] <= leaf.nbytes + 4 * tile + few

    def test_any_stream_and_thread_will_do(self) -> None:
        logits, target = make(600, 32_000, torch.bfloat16)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compare(logits, target, dtype=torch.float32)

    def test_a_cuda_graph_replays_it(self) -> None:
        logits, target = make(600, 32_000, torch.bfloat16)
        leaf = logits.clone().requires_grad_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is proved once waits for the device
            torch.autograd.grad(storm.cross_entropy(leaf, target, dtype=torch.float32), leaf)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = storm.cross_entropy(leaf, target, dtype=torch.float32)
            (gradient,) = torch.autograd.grad(loss, leaf)
        with torch.no_grad():
            leaf.copy_(logits.flip(0))
        graph.replay()
        expected = F.cross_entropy(leaf.float(), target)
        (theirs,) = torch.autograd.grad(expected, leaf)
        assert same(loss.detach(), expected.detach())
        assert same(gradient, theirs)

    @pytest.mark.parametrize("classes", [900, 32_000])
    def test_a_target_that_is_no_class_is_pytorchs_assertion(self, classes: int) -> None:
        """In a process of its own, whose context it ends."""
        code = (
            "import torch, storm_client as storm;"
            "from storm_client.losses import log_probabilities as losses;"
            "losses.TILE_BYTES.update(cpu=4096, cuda=4096);"
            f"x = torch.randn(64, {classes}, device='cuda');"
            f"y = torch.full((64,), {classes}, device='cuda');"
            "storm.cross_entropy(x, y).item()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode != 0
        assert "device-side assert" in done.stderr
