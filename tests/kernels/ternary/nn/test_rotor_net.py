"""SimpleRotorNet: the same on every backend, trained, saved and loaded."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from storm_kernels import CorruptBlob, UsageError
from storm_kernels.ternary.nn import SimpleRotorNet


def rows(count: int, inputs: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, inputs)).astype(np.float32)


def test_arrays_and_tensors_give_one_result():
    net = SimpleRotorNet(70, 33, 5)
    x = rows(9, 70)
    y = net.forward(x)
    assert y.shape == (9, 5)
    assert y.dtype == np.float32
    assert net.forward(x, backend="numpy").tobytes() == y.tobytes()
    assert net(torch.from_numpy(x)).numpy().tobytes() == y.tobytes()
    assert net.forward(x.reshape(3, 3, 70)).shape == (3, 3, 5)
    assert np.unique(y).size > 5


def test_it_learns_and_then_computes_what_it_learnt():
    """Two classes told apart by a sign that half the inputs share."""
    rng = np.random.default_rng(1)
    y = rng.integers(0, 2, 400)
    x = rng.standard_normal((400, 32)).astype(np.float32)
    x[:, :16] += np.where(y, 1.0, -1.0)[:, None]
    net = SimpleRotorNet(32, 16, 2)
    losses = net.train(x[:300], y[:300], epochs=8)
    assert losses[-1] < 0.8 * losses[0]
    assert (net(x[300:]).argmax(1) == y[300:]).mean() > 0.9


def test_training_that_fails_changes_nothing():
    net = SimpleRotorNet(8, 4, 2)
    x = rows(5, 8)
    before = net(x)
    for bad_x, bad_y in ((rows(5, 9), np.zeros(5)), (x, np.zeros(4)), (x, np.full(5, 7))):
        with pytest.raises((UsageError, IndexError)):
            net.train(bad_x, bad_y, epochs=1)
    assert (net(x) == before).all()


def test_files(tmp_path):
    net = SimpleRotorNet(64, 32, 10)
    net.train(rows(50, 64), np.arange(50) % 10, epochs=1)
    net.save(tmp_path / "net")
    loaded = SimpleRotorNet.load(tmp_path / "net")
    assert loaded.forward(rows(7, 64)).tobytes() == net.forward(rows(7, 64)).tobytes()
    assert loaded.nbytes == net.nbytes
    data = bytearray((tmp_path / "net").read_bytes())
    for place in range(40, len(data), len(data) // 50):
        broken = data.copy()
        broken[place] ^= 0x55
        (tmp_path / "broken").write_bytes(broken)
        try:
            other = SimpleRotorNet.load(tmp_path / "broken")
        except CorruptBlob:
            continue
        # Bytes of the archive that say nothing, such as times.
        assert other.forward(rows(7, 64)).tobytes() == net.forward(rows(7, 64)).tobytes()
    directory = bytes(data).index(b"PK\x01\x02")
    encrypted, elsewhere = data.copy(), data.copy()
    encrypted[directory + 8] = 1
    elsewhere[-6 + 3] = 0x7F  # the directory's offset
    array, compressed = io.BytesIO(), io.BytesIO()
    np.save(array, np.zeros(3))
    np.savez_compressed(compressed, w1=np.random.default_rng(0).integers(0, 4, 3000))
    deflated = bytearray(compressed.getvalue())
    deflated[60] ^= 0xFF
    damaged = encrypted, elsewhere, array.getvalue(), deflated
    for content in (b"", b"no archive", bytes(data[:100]), *damaged):
        (tmp_path / "broken").write_bytes(content)
        with pytest.raises(CorruptBlob):
            SimpleRotorNet.load(tmp_path / "broken")


def test_other_shapes_are_refused():
    with pytest.raises(UsageError, match="must be at least 1"):
        SimpleRotorNet(0, 3, 4)
    with pytest.raises(UsageError, match=r"give \(\.\.\., 8\)"):
        SimpleRotorNet(8, 4, 2).forward(rows(3, 9))
    with pytest.raises(UsageError, match="nan"):
        SimpleRotorNet(8, 4, 2).forward(np.full((1, 8), np.nan))
