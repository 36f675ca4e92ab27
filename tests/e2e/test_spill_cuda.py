"""Training on a GPU whose activations go to a disk: the same bits, and it is the disk they went to.

What stands on the cpu lane (test_spill.py) is not tried again. Here a blob goes another way: the
device copies to and from blocks of the pool that threads of the tier read and fill.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon
from support.chains import gradient
from support.patience import patient_clients
from support.spilling import ENCRYPTIONS, skip_without_disk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.timeout(300),
]

MIB = 1 << 20
POOL_BYTES = 256 * MIB
TENSOR_BYTES = 16 * MIB
LENGTH = 64
"""Of a chain that saves 1 GiB, four times the pool."""


def _leaf() -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(TENSOR_BYTES // 4, generator=generator, device="cuda").requires_grad_()


def _chain(x: torch.Tensor) -> torch.Tensor:
    """Save tensors that stay as dense as `x`, which takes part in each of them."""
    h = x
    for _ in range(LENGTH):
        h = (h + x).cos()
    return h.sum()


@pytest.mark.parametrize("codec", ["raw", "ancf"])
@pytest.mark.parametrize("encrypt", ENCRYPTIONS)
def test_a_pool_of_a_quarter_of_what_is_stored(tmp_path: Path, encrypt: str, codec: str) -> None:
    skip_without_disk(tmp_path)
    flags = [
        f"--pool-bytes={POOL_BYTES}",
        "--cache-bytes=0",
        "--device=cuda",
        f"--part-bytes-cuda={TENSOR_BYTES}",
        f"--spill-path={tmp_path}",
        f"--spill-bytes={8 * POOL_BYTES}",
        f"--spill-encrypt={encrypt}",
    ]
    x = _leaf()
    expected = gradient(_chain(x), x)
    with (
        ChildDaemon(flags=flags) as daemon,
        patient_clients(),
        storm.connect(daemon.address, embedded="never") as client,
    ):
        for _ in range(4):
            x = _leaf()
            with client.offload(min_bytes=1, codec=codec, replay=False, budget="least") as offload:
                loss = _chain(x)
            assert torch.equal(gradient(loss, x), expected)
            assert offload.stats().stored_bytes > POOL_BYTES
        torch.cuda.synchronize()
        spill = daemon.status()["spill"]
    assert spill["write"]["bytes"] > POOL_BYTES
    assert spill["read"]["bytes"] > POOL_BYTES
    assert (spill["ended"], spill["lost_entries"]) == ("", 0)
