"""cpu.py and csrc/: every instruction set agrees, nothing outside the output is written."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from storm_kernels import BackendUnavailable, UsageError, backends
from storm_kernels.native import InstructionSet, available_sets
from storm_kernels.scan import cpu, reference
from storm_kernels.scan.cpu import CpuScans
from support.guarded_tensors import Guarded

pytestmark = pytest.mark.skipif(
    not backends("scan")["cpu"].available, reason=backends("scan")["cpu"].detail
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
SHAPES = (((2, 37, 130), 1), ((7, 300), 1), ((3, 5, 1), 1), ((1, 1), 0))


@pytest.fixture(params=list(available_sets()) if backends("scan")["cpu"].available else [])
def scans(request) -> CpuScans:
    return CpuScans(request.param)


@pytest.mark.parametrize("op", ["add", "mul", "max", "min", "logaddexp", "compensated"])
def test_every_instruction_set_writes_the_references_results(op):
    options = {"op": "add" if op == "compensated" else op, "compensated": op == "compensated"}
    only_floats = op in ("logaddexp", "compensated")
    for dtype, ((shape, dim), offset) in product(
        DTYPES[:4] if only_floats else DTYPES, zip(SHAPES, (1, 3, 2, 0), strict=True)
    ):
        x = torch.randint(1, 3, shape) if dtype == torch.int64 else torch.rand(shape).to(dtype)
        for reverse, exclusive in ((False, False), (True, False), (False, True), (True, True)):
            options |= {"reverse": reverse, "exclusive": exclusive}
            expected = torch.empty_like(x)
            reference.fold(x, expected, dim, **options)
            for one in available_sets():
                result = Guarded(x, offset)
                CpuScans(one).fold(x, result.tensor, dim, **options)
                result.check()
                _assert_near(result.tensor, expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_every_instruction_set_computes_the_recurrence(scans, reverse):
    for dtype, ((shape, dim), offset) in product(
        [*DTYPES[:4], torch.complex64], zip(SHAPES, (0, 1, 2, 3), strict=True)
    ):
        a, b, g = (torch.randn(shape).mul(0.7).to(dtype) for _ in range(3))
        initial = torch.randn([s for at, s in enumerate(shape) if at != dim]).to(dtype)
        h, expected = Guarded(b, offset), torch.empty_like(b)
        scans.linear(a, b, initial, h.tensor, dim, reverse=reverse)
        reference.linear(a, b, initial, expected, dim, reverse=reverse)
        h.check()
        _assert_near(h.tensor, expected)
        results = [Guarded(b, offset) for _ in range(2)]
        wanted = [torch.empty_like(b) for _ in range(2)]
        ours = [one.tensor for one in results]
        scans.linear_gradient(g, a, expected, initial, *ours, dim, reverse=reverse)
        reference.linear_gradient(g, a, expected, initial, *wanted, dim, reverse=reverse)
        for one, other in zip(results, wanted, strict=True):
            one.check()
            _assert_near(one.tensor, other)


def _assert_near(result: torch.Tensor, expected: torch.Tensor) -> None:
    coarse = expected.itemsize == 2
    torch.testing.assert_close(
        result, expected, rtol=2e-2 if coarse else 1e-4, atol=2e-2 if coarse else 1e-5
    )


def test_large_results_are_streamed_and_right(scans):
    x = torch.randn(3, 900, 999)
    y = Guarded(x, 3)
    scans.fold(x, y.tensor, 1, op="add", reverse=False, exclusive=False, compensated=False)
    y.check()
    torch.testing.assert_close(y.tensor, x.cumsum(1))


def test_all_half_precision_numbers_pass_unchanged(scans):
    bits = torch.arange(-(1 << 15), 1 << 15).short()
    for dtype in (torch.float16, torch.bfloat16):
        x = bits.view(dtype).unsqueeze(0).contiguous()
        y = torch.empty_like(x)
        options = {"op": "max", "reverse": False, "exclusive": False, "compensated": False}
        scans.fold(x, y, 0, **options)
        number = ~x.isnan()
        assert torch.equal(y[number], x[number])
        assert y[~number].isnan().all()


def test_rounding_to_half_precision_is_torchs(scans):
    x = torch.randn(200_000) * torch.logspace(-9, 5, 200_000)
    for dtype in (torch.float16, torch.bfloat16):
        pair = torch.stack([x.to(dtype), (x * 1e-3).to(dtype)])
        y = torch.empty_like(pair)
        scans.fold(pair, y, 0, op="add", reverse=False, exclusive=False, compensated=False)
        assert torch.equal(y[1], (pair[0].float() + pair[1].float()).to(dtype))


def test_threads_do_not_show_in_the_bits():
    x = torch.randn(8, 1000, 300)
    found = []
    threads = torch.get_num_threads()
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        try:
            y = torch.empty_like(x)
            cpu.linear(x.sigmoid(), x, None, y, 1, reverse=False)
        finally:
            torch.set_num_threads(threads)
        found.append(y)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_missing_instruction_set_is_named():
    there = (InstructionSet.BEST, *available_sets())
    missing = next((one for one in InstructionSet if one not in there), None)
    assert missing is not None, "no processor has the vectors of two architectures"
    x = torch.ones(3)
    with pytest.raises(BackendUnavailable, match=missing.name.lower()):
        CpuScans(missing).linear(x, x, None, x.clone(), 0, reverse=False)


def test_what_the_library_refuses_is_a_usage_error():
    x = torch.ones(3, dtype=torch.int64)
    with pytest.raises(UsageError, match="BAD_ARGUMENT"):
        cpu.linear(x, x, None, x.clone(), 0, reverse=False)
