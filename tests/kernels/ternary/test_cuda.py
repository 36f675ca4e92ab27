"""Ternary tensors on a GPU: integers exactly the oracle's, floats too where their order is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from storm_kernels import CorruptBlob, UsageError
from storm_kernels.ternary import TernaryTensor, decode, dot, encode, hopper, matmul, matvec
from storm_kernels.ternary import cuda as device_code
from storm_kernels.ternary.planes import Kind

available, detail = device_code.probe()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not available, reason=f"no CUDA device here: {detail}"),
]

SHAPES = [
    (1, 1),
    (3, 31),
    (5, 64),
    (17, 65),
    (16, 128),
    (33, 500),
    (7, 513),
    (40, 2560),
    (9, 17000),
]
BATCHES = [1, 2, 7, 8, 9, 16, 33, 64, 65]


def ternary(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([rows, columns, seed])
    return rng.integers(-1, 2, (rows, columns)).astype(np.int8)


def exact_product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return x w^T of whole numbers; float64 has all sums, and is many times as fast as int64."""
    return (x.astype(np.float64) @ w.astype(np.float64).T).astype(np.int32)


def on_device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).cuda()


def same(found: torch.Tensor, expected: np.ndarray) -> None:
    assert found.is_cuda
    assert found.cpu().numpy().dtype == expected.dtype
    assert found.cpu().numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_planes_are_the_oracles(rows, columns):
    w = ternary(rows, columns)
    expected = encode(w, backend="numpy")
    for values in (
        on_device(w),
        on_device(w).float(),
        on_device(w).bfloat16(),
        on_device(w).double(),
    ):
        for plane, other in zip(encode(values), expected, strict=True):
            same(plane, other)
    planes = [on_device(plane) for plane in expected]
    same(decode(*planes, w.shape), w)
    same(decode(*planes, w.shape, torch.float32), w.astype(np.float32))


def test_what_cannot_be_encoded_is_named():
    values = torch.zeros(3, 70, device="cuda")
    values[2, 5], values[2, 66] = 0.5, float("nan")
    with pytest.raises(UsageError, match=r"values\[2, 5\] is 0.5"):
        encode(values)
    with pytest.raises(UsageError, match=r"values\[2, 66\] is nan"):
        encode(values, 0.25)
    planes = encode(torch.zeros(2, 64, device="cuda"))
    planes[1][1, 3] = 4
    with pytest.raises(CorruptBlob, match=r"\[1, 26\]"):
        decode(*planes, (2, 64))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_integers_are_exact(rows, columns, batch):
    w = ternary(rows, columns)
    rng = np.random.default_rng(batch)
    x = rng.integers(-128, 128, (batch, columns)).astype(np.int8)
    x[0] = -128  # the largest sums
    planes = [on_device(plane) for plane in encode(w)]
    expected = exact_product(x, w)
    same(matmul(*planes, on_device(x)), expected)
    scale = rng.random(rows).astype(np.float32)
    same(matmul(*planes, on_device(x), scale=on_device(scale)), expected.astype(np.float32) * scale)
    signs = ternary(batch, columns, 1)
    given = TernaryTensor.encode(on_device(signs))
    expected = exact_product(signs, w)
    same(matmul(*planes, given), expected)


@pytest.mark.parametrize("group", [32, 64, 96, 512])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_groups_are_the_oracles(rows, columns, group):
    w = ternary(rows, columns)
    rng = np.random.default_rng(group)
    x = rng.integers(-128, 128, (3, columns)).astype(np.int8)
    scale = rng.standard_normal((rows, -(-columns // group))).astype(np.float32)
    host = encode(w)
    planes = [on_device(plane) for plane in host]
    for one in (x, rng.standard_normal((3, columns)).astype(np.float32)):
        expected = matmul(*host, one, scale=scale, group=group, backend="numpy")
        same(matmul(*planes, on_device(one), scale=on_device(scale), group=group), expected)


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_float32_keeps_the_order_of_summation(rows, columns, batch):
    w = ternary(rows, columns)
    rng = np.random.default_rng(batch)
    x = rng.standard_normal((batch, columns)).astype(np.float32)
    host = encode(w)
    planes = [on_device(plane) for plane in host]
    same(matmul(*planes, on_device(x)), matmul(*host, x, backend="numpy"))
    scale = rng.random(rows).astype(np.float32)
    expected = matmul(*host, x, scale=scale, backend="numpy")
    same(matmul(*planes, on_device(x), scale=on_device(scale)), expected)


@pytest.mark.parametrize("batch", [1, 2, 8, 33, 64, 200])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_tensor_cores_stay_within_what_any_order_allows(rows, columns, batch):
    """A sum of n floats differs from the exact one by at most n * 2^-23 of the sum of sizes.

    2^-23 and not 2^-24, because tensor cores may cut off where others round.
    """
    w = ternary(rows, columns)
    x = torch.randn(batch, columns, generator=torch.Generator().manual_seed(batch)).bfloat16()
    planes = [on_device(plane) for plane in encode(w)]
    found = matmul(*planes, x.cuda()).cpu().double()
    wide = torch.from_numpy(w).double()
    exact, sizes = x.double() @ wide.T, x.double().abs() @ wide.abs().T
    assert ((found - exact).abs() <= columns * 2.0**-23 * sizes).all()


@pytest.fixture
def on_hopper(monkeypatch):
    """Products of any number of x go to the kernels for Hopper."""
    if torch.cuda.get_device_capability() != hopper.CAPABILITY:
        pytest.skip("these kernels are for compute capability 9.0")
    assert device_code.has_hopper(torch.cuda.current_device())
    for which in hopper.BATCHES:
        monkeypatch.setitem(hopper.BATCHES, which, (range(1, 1 << 30),))


ROWS_AROUND_TILES = [1, 63, 64, 65, 127, 128, 129, 200]
COLUMNS_AROUND_SPANS = [1, 31, 32, 33, 511, 512, 513, 2560]
BATCHES_AROUND_TILES = [2, 3, 8, 15, 16, 17, 24, 25, 32, 33, 48, 49, 64, 65, 96, 97, 128, 129, 130]


@pytest.mark.parametrize("columns", COLUMNS_AROUND_SPANS)
@pytest.mark.parametrize("rows", ROWS_AROUND_TILES)
def test_kernels_for_hopper_are_exact(on_hopper, rows, columns):
    """Whole numbers, whose sums float32 has: results are the oracle's with bfloat16 x too."""
    w = ternary(rows, columns)
    planes = [on_device(plane) for plane in encode(w)]
    for batch in BATCHES_AROUND_TILES:
        rng = np.random.default_rng(batch)
        x = rng.integers(-128, 128, (batch, columns)).astype(np.int8)
        x[0] = -128  # the largest sums
        expected = exact_product(x, w)
        same(matmul(*planes, on_device(x)), expected)
        same(matmul(*planes, on_device(x).bfloat16()), expected.astype(np.float32))
    scale = rng.random(rows).astype(np.float32)
    scaled = np.float32(0) + expected.astype(np.float32) * scale
    same(matmul(*planes, on_device(x), scale=on_device(scale)), scaled)
    same(matmul(*planes, on_device(x).bfloat16(), scale=on_device(scale)), scaled)


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("batch", [16, 24, 32, 48, 64, 96, 128, 300])
def test_every_way_to_cut_a_product_gives_the_same(on_hopper, monkeypatch, batch, groups, splits):
    rows, columns = 700, 5000
    w = ternary(rows, columns)
    planes = [on_device(plane) for plane in encode(w)]
    x = np.random.default_rng(batch).integers(-128, 128, (batch, columns)).astype(np.int8)
    expected = exact_product(x, w)
    for kind, given in (
        (Kind.INT8, on_device(x)),
        (Kind.BFLOAT16, on_device(x).bfloat16()),
    ):
        eights = hopper.chosen(kind, rows, columns, batch).eights
        if groups > hopper.MAX_GROUPS[eights]:
            continue
        for spans in (1, 2, 10):
            way = hopper.fitted(kind, eights, groups, splits, spans)
            with monkeypatch.context() as patch:
                patch.setattr(hopper, "chosen", lambda *_, way=way: way)
                same(matmul(*planes, given).int(), expected)


@pytest.mark.parametrize("batch", [16, 64, 128])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_kernels_for_hopper_stay_within_what_any_order_allows(on_hopper, rows, columns, batch):
    w = ternary(rows, columns)
    x = torch.randn(batch, columns, generator=torch.Generator().manual_seed(batch)).bfloat16()
    x[0, 0] = 2.0**127  # twice as much is infinite
    x[0, -1] = 2.0**-120
    planes = [on_device(plane) for plane in encode(w)]
    found = matmul(*planes, x.cuda()).cpu().double()
    wide = torch.from_numpy(w).double()
    exact, sizes = x.double() @ wide.T, x.double().abs() @ wide.abs().T
    assert ((found - exact).abs() <= columns * 2.0**-23 * sizes).all()


@pytest.mark.parametrize("batch", [20, 600])
def test_many_x_go_through_a_dense_product(batch):
    w = ternary(64, 256)
    planes = [on_device(plane) for plane in encode(w)]
    x = torch.randn(batch, 256, device="cuda")
    exact = x.double() @ on_device(w).double().T
    sizes = x.double().abs() @ on_device(w).double().abs().T
    assert ((matmul(*planes, x).double() - exact).abs() <= 256 * 2.0**-23 * sizes).all()
    whole = torch.randint(-128, 128, (batch, 256), dtype=torch.int8)
    expected = whole.long() @ torch.from_numpy(w).long().T
    same(matmul(*planes, whole.cuda()), expected.int().numpy())


@pytest.mark.parametrize("count", [1, 64, 1000, 1 << 20])
def test_dot(count):
    a, b = ternary(1, count)[0], ternary(1, count, 1)[0]
    total = dot(*(on_device(one) for one in (*encode(a), *encode(b))))
    assert total.is_cuda
    assert int(total) == int(a.astype(np.int64) @ b.astype(np.int64))


def test_sums_beyond_32_bits():
    """2^31 products of 1 with 1, and 2^24 + 64 of -128: neither fits into 32 bits."""
    ones = torch.full(((1 << 28) + 8,), 255, dtype=torch.uint8, device="cuda")
    none = torch.zeros_like(ones)
    assert int(dot(ones, none, ones, none)) == (1 << 31) + 64
    columns = (1 << 24) + 64
    x = torch.full((columns,), -128, dtype=torch.int8, device="cuda")
    row = ones[: columns // 8].reshape(1, -1)
    found = matvec(row, none[: columns // 8].reshape(1, -1), x)
    assert found.dtype == torch.int64
    assert found.tolist() == [-128 * columns]


@pytest.mark.parametrize("offset", [1, 8])
def test_planes_and_x_that_are_not_aligned(offset):
    w = ternary(5, 320)
    x = torch.randint(-128, 128, (640,), dtype=torch.int8)[offset : offset + 320]
    moved = []
    for plane in encode(w):
        memory = torch.empty(plane.size + offset, dtype=torch.uint8, device="cuda")
        memory[offset:] = on_device(plane).reshape(-1)
        moved.append(memory[offset:].reshape(plane.shape))
    given = torch.empty(640, dtype=torch.int8, device="cuda")[offset : offset + 320]
    given.copy_(x)
    expected = w.astype(np.int32) @ x.numpy().astype(np.int32)
    same(matvec(*moved, given), expected)
    narrow = [plane[:, :40].contiguous() for plane in moved]  # rows without padding
    same(matvec(*narrow, given), expected)


def test_it_runs_on_the_current_stream_and_in_a_graph():
    w, x = ternary(256, 512), torch.zeros(512, dtype=torch.int8, device="cuda")
    planes = [on_device(plane) for plane in encode(w)]
    matvec(*planes, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = matvec(*planes, x)
    new = torch.randint(-128, 128, (512,), dtype=torch.int8)
    x.copy_(new)
    graph.replay()
    same(y, w.astype(np.int32) @ new.numpy().astype(np.int32))


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("rows", [512, 4096])  # w is small, and not
@pytest.mark.parametrize("batch", [2, 20, 40, 128])
def test_products_in_a_row_await_what_they_read(rows, batch, captured):
    """Kernels begin before those before them have ended, which make x and w of each product."""
    made = torch.Generator().manual_seed(batch)
    values = torch.randint(-1, 2, (rows, rows), dtype=torch.int8, generator=made)
    start = torch.randint(-128, 128, (batch, rows), dtype=torch.int8, generator=made)
    x, w = start.cuda(), values.cuda()
    bit0, bit1 = encode(w)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            y = matmul(bit0, bit1, x)
            whole = matmul(bit0, bit1, (y % 128).bfloat16())
            x = ((whole + y) % 256 - 128).to(torch.int8)
            bit0.copy_(bit0.roll(1, 0))
            bit1.copy_(bit1.roll(1, 0))
        return x

    if captured:
        chain(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain(x)
        for plane, given in zip((bit0, bit1), encode(w), strict=True):
            plane.copy_(given)
        graph.replay()
    else:
        found = chain(x)
    wide, expected = values.double().cuda(), start.double().cuda()
    for _ in range(6):
        y = expected @ wide.T
        expected = (y % 128 @ wide.T + y) % 256 - 128
        wide = wide.roll(1, 0)
    assert torch.equal(found, expected.to(torch.int8))


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
def test_a_product_awaits_another_stream_that_it_was_told_to_await(captured):
    values = torch.randint(-1, 2, (4096, 4096), dtype=torch.int8)
    x = torch.randint(-128, 128, (40, 4096), dtype=torch.int8, device="cuda")
    bit0, bit1 = encode(values.cuda())
    busy = torch.randn(2048, 2048, device="cuda")
    given = torch.zeros_like(x)
    side = torch.cuda.Stream()

    def forked() -> torch.Tensor:
        given.zero_()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            busy.copy_(busy @ busy % 1)
            given.copy_(x)
        bit0.bitwise_not_()  # of another stream than x, and as late
        bit0.bitwise_not_()
        torch.cuda.current_stream().wait_stream(side)
        return matmul(bit0, bit1, given)

    found = forked()
    if captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = forked()
        for _ in range(3):
            graph.replay()
    same(found, exact_product(x.cpu().numpy(), values.numpy()))


def test_nothing_beside_the_output_is_written():
    """Results lie between guards; a kernel that writes past its rows would change them."""
    w = ternary(37, 100)
    planes = [on_device(plane) for plane in encode(w)]
    torch.cuda.empty_cache()
    guards = [torch.full((1 << 16,), 77, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del guards[3]  # a hole between guards, which the next small results are put into
    for batch in (1, 3, 9, 40):
        x = torch.randint(-128, 128, (batch, 100), dtype=torch.int8, device="cuda")
        same(matmul(*planes, x), x.cpu().numpy().astype(np.int32) @ w.T.astype(np.int32))
    assert all(bool((guard == 77).all()) for guard in guards)


def test_layers_compute_on_the_device():
    from storm_kernels.ternary.nn import SimpleRotorNet, TernaryLinear

    linear = torch.nn.Linear(200, 70)
    x = torch.randn(5, 200)
    for activations in ("float", "int8", "ternary"):
        layer = TernaryLinear.from_linear(linear, activations=activations)
        expected = layer(x)
        found = layer.cuda()(x.cuda())
        assert found.is_cuda
        assert torch.allclose(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    net = SimpleRotorNet(64, 32, 10)
    same(net(x[:, :64].cuda()), net(x[:, :64].numpy()))


def test_layers_train_on_the_device():
    from storm_kernels.ternary.nn import TernaryLinear

    layer = TernaryLinear(64, 8, activations="ternary", device="cuda")
    x = torch.randn(16, 64, device="cuda", requires_grad=True)
    layer(x).square().sum().backward()
    assert bool(layer.weight.grad.abs().sum() > 0)
    assert bool(x.grad.abs().sum() > 0)
