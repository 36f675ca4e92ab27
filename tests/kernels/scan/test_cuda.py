"""cuda.py: why it is missing, and on a GPU what the other tests do not reach."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from storm_kernels import BackendUnavailable, UsageError, backends, scan
from storm_kernels.scan import cuda
from storm_kernels.scan.launches import Columns, Rows
from support.guarded_tensors import Guarded
from support.recurrences import recurrence, running

INFO = backends("scan")["cuda"]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not INFO.available, reason=INFO.detail)]


def test_without_triton_the_reason_is_triton(monkeypatch):
    cuda.load_kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "storm_kernels.scan.kernels", raising=False)
    monkeypatch.delattr(scan, "kernels", raising=False)  # another test may have imported it
    try:
        with pytest.raises(BackendUnavailable, match="pip install triton"):
            cuda.load_kernels()
    finally:
        cuda.load_kernels.cache_clear()


class TestOnAGpu:
    pytestmark = gpu

    def test_a_host_tensor_is_refused(self):
        with pytest.raises(UsageError, match="tensor on cpu"):
            scan.cumsum(torch.ones(3), 0, backend="cuda")

    @pytest.mark.parametrize("backend", ["cpu", "numpy"])
    def test_host_backends_scan_what_is_on_the_gpu(self, backend):
        if not backends("scan")[backend].available:
            pytest.skip(backends("scan")[backend].detail)
        x = torch.randn(2, 50, 3, device="cuda", requires_grad=True)
        h, _ = scan.linear_scan(x.sigmoid(), x, backend=backend)
        h.sum().backward()
        assert h.is_cuda
        assert x.grad is not None

    @pytest.mark.parametrize("reverse", [False, True])
    @pytest.mark.parametrize("shape", [(3, 5000, 130), (1, 40000, 512), (2, 9000, 7), (5, 300001)])
    def test_long_sequences_look_back(self, shape, reverse):
        x = torch.randn(shape, device="cuda")
        expected = running("add", x, 1, reverse)
        torch.testing.assert_close(
            scan.cumsum(x, 1, reverse).double(), expected, rtol=1e-5, atol=1e-3
        )
        a, b = torch.rand(shape, device="cuda"), x
        h, _ = scan.linear_scan(a, b, reverse=reverse)
        host, _ = scan.linear_scan(a.cpu(), b.cpu(), reverse=reverse)
        torch.testing.assert_close(h.cpu(), host, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("offset", [0, 1, 3])
    @pytest.mark.parametrize("shape", [(2, 3000, 130), (1, 70001), (300, 1000)])
    def test_nothing_around_the_output_is_written(self, shape, offset):
        x = torch.randn(shape, device="cuda")
        for reverse in (False, True):
            for exclusive in (False, True):
                y = Guarded(x, offset)
                cuda.fold(x, y.tensor, 1, op="add", reverse=reverse, exclusive=exclusive,
                          compensated=False)  # fmt: skip
                y.check()
            h, da, db = (Guarded(x, offset) for _ in range(3))
            cuda.linear(x.sigmoid(), x, None, h.tensor, 1, reverse=reverse)
            cuda.linear_gradient(
                x, x.sigmoid(), h.tensor, None, da.tensor, db.tensor, 1, reverse=reverse
            )
            for one in (h, da, db):
                one.check()

    @pytest.mark.parametrize("tile", [Columns(8, 16, 32, 4, look_back=True, fan=4), None])
    def test_the_bits_are_the_same_beside_other_work(self, tile):
        x = torch.randn(1, 65536, 512, device="cuda")
        options = {"op": "add", "reverse": False, "exclusive": False, "compensated": False}
        first = torch.empty_like(x)
        cuda.fold(x, first, 1, tile=tile, **options)
        other, product = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
        for _ in range(100):
            with torch.cuda.stream(other):
                product = torch.tanh(product @ product * 1e-3)
            again = torch.full_like(x, float("nan"))
            cuda.fold(x, again, 1, tile=tile, **options)
            assert torch.equal(again, first)
        torch.cuda.synchronize()

    @pytest.mark.parametrize("kind", ["fold", "linear", "gradient"])
    @pytest.mark.parametrize(
        ("tile", "reverse"),
        [
            (Columns(4, 8, 16, 4, look_back=True, fan=8), False),
            (Columns(2, 4, 64, 4, look_back=True, fan=4), True),
            (Columns(2, 1, 16, 1, look_back=True, fan=2), False),
            (Rows(64, 1, look_back=True, fan=32), True),
            (Rows(256, 2, look_back=True, fan=64), False),
        ],
    )
    def test_every_number_of_tiles(self, kind, tile, reverse):
        whole = Rows(64, 1, look_back=False)
        if isinstance(tile, Columns):
            whole = Columns(4, 8, 16, 4, look_back=False)
        for tiles in range(1, 71):
            shape = (2, tile.length * tiles - 1, 50)[: 3 if isinstance(tile, Columns) else 2]
            x, a, g = (torch.randn(shape, device="cuda") for _ in range(3))
            a = a.sigmoid()
            found, wanted = ([torch.full_like(x, float("nan")) for _ in "ab"] for _ in "ab")
            for results, one in ((found, tile), (wanted, whole)):
                if kind == "fold":
                    cuda.fold(x, results[0], 1, op="add", reverse=reverse, exclusive=False,
                              compensated=False, tile=one)  # fmt: skip
                elif kind == "linear":
                    cuda.linear(a, x, None, results[0], 1, reverse=reverse, tile=one)
                else:
                    cuda.linear_gradient(g, a, x, None, *results, 1, reverse=reverse, tile=one)
            for mine, theirs in list(zip(found, wanted, strict=True))[: 1 + (kind == "gradient")]:
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)

    def test_a_repeated_call_serves_other_memory(self):
        memory = torch.randn(4, 3 * 70001, device="cuda")
        for row in (*memory, *memory):
            for start in (0, 1, 70001):
                x = row[start : start + 70001]
                torch.testing.assert_close(
                    scan.cumsum(x, 0).double(), x.double().cumsum(0), rtol=1e-5, atol=1e-2
                )

    def test_a_repeated_call_runs_on_the_current_stream(self):
        x = torch.zeros(1, 40000, 64, device="cuda")
        scan.cumsum(x)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            x.fill_(1)
            sums = scan.cumsum(x)
        side.synchronize()
        assert (sums[:, -1] == 40000).all()

    def test_launches_on_one_scratch_are_told_apart(self):
        streams = [torch.cuda.Stream() for _ in range(3)]
        shapes = [(1, 40000, 64), (1, 1 << 20), (3, 9000, 130), (1, 30000, 512)]
        inputs = [torch.randn(shape, device="cuda") for shape in shapes]
        wanted = [scan.cumsum(x) for x in inputs]
        torch.cuda.synchronize()
        for turn in range(60):
            with torch.cuda.stream(streams[turn % 3]):
                found = [scan.cumsum(x) for x in inputs]
            streams[turn % 3].synchronize()
            assert all(map(torch.equal, found, wanted))

    def test_one_row_in_three_levels(self):
        x = torch.randn(1, 1 << 22, device="cuda")
        y = torch.empty_like(x)
        cuda.fold(x, y, 1, op="add", reverse=False, exclusive=False, compensated=False,
                  tile=Rows(1024, 1, look_back=True, fan=32))  # fmt: skip
        torch.testing.assert_close(y.double(), running("add", x, 1), rtol=1e-5, atol=2e-2)

    def test_one_row_in_tiles_of_its_own(self):
        x = torch.randn(1, 1 << 20, device="cuda")
        y = torch.empty_like(x)
        cuda.fold(x, y, 1, op="add", reverse=False, exclusive=False, compensated=False,
                  tile=Rows(256, 1, look_back=True, fan=32))  # fmt: skip
        torch.testing.assert_close(y.double(), running("add", x, 1), rtol=1e-5, atol=1e-2)

    def test_a_graph_replays_them(self):
        x = torch.randn(1, 20000, 64, device="cuda")
        a = torch.rand_like(x)
        scan.cumsum(x)
        scan.linear_scan(a, x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sums, states = scan.cumsum(x), scan.linear_scan(a, x)[0]
        for _ in range(3):
            x.normal_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(sums, scan.cumsum(x))
            assert torch.equal(states, scan.linear_scan(a, x)[0])

    def test_gradients_are_a_loops(self):
        a, b = (torch.rand(2, 700, 40, device="cuda").requires_grad_() for _ in range(2))
        weight = torch.randn(2, 700, 40, device="cuda")
        ours = torch.autograd.grad(scan.linear_scan(a, b)[0], (a, b), weight)
        theirs = torch.autograd.grad(recurrence(a, b), (a, b), weight)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

    def test_compiles_with_inductor(self):
        code = (  # in a process of its own: inductor keeps threads and pipes
            "import torch; from storm_kernels import scan\n"
            "x = torch.randn(2, 900, 64, device='cuda')\n"
            "way = lambda x: scan.cumsum(x * 2).relu()\n"
            "compiled = torch.compile(way, fullgraph=True)\n"
            "torch.testing.assert_close(compiled(x), way(x))\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=300)

    def test_more_than_two_to_the_31_elements(self):
        length = (1 << 31) // 1024 + 8
        x = torch.zeros(1, length, 1024, dtype=torch.int8, device="cuda")
        x[0, 5], x[0, -3] = 1, 2
        result = scan.associative_scan("add", x)
        assert result[0, 4].sum() == 0
        assert (result[0, 5] == 1).all()
        assert (result[0, -4] == 1).all()
        assert (result[0, -3:] == 3).all()
        flat = x.view(-1)
        assert scan.associative_scan("add", flat, 0, reverse=True)[0].item() == (3 * 1024) % 256
