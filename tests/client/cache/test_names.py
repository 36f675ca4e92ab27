"""Client.cache: any tensor comes back as it was, and whatever cannot be done says why."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import storm_client as storm
import torch
from support.daemon_process import DaemonProcess, daemons
from support.waiting import wait_until

MIB = 1 << 20

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """A daemon whose cache and staging areas are small, so that tests fill them."""
    with daemons() as make:
        yield make(
            "--pool-bytes=16MiB",
            "--cache-bytes=8MiB",
            "--staging-bytes-cpu=512KiB",
            "--part-bytes-cpu=128KiB",
        )


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[storm.Client]:
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        yield client
        for name in client.cache.list():
            client.cache.delete(name)
        wait_until(lambda: is_empty(client), 30, client.status)  # a GPU's loans end on their own


def is_empty(client: storm.Client) -> bool:
    cache = client.status().details["cache"]
    return (cache["used_bytes"], cache["promised_bytes"]) == (0, 0)


def patterns(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return values of all bit patterns, NaNs with payloads among them."""
    if dtype is torch.bool:
        return torch.rand(count) < 0.5
    data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return data.view(dtype)


def same(found: torch.Tensor | None, put: torch.Tensor) -> bool:
    """Compare bits: NaNs too, which torch.equal would tell apart."""
    assert (found.dtype, found.shape) == (put.dtype, put.shape)
    plain = put.detach().resolve_conj().resolve_neg().contiguous()
    return torch.equal(found.reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8))


# --- what comes back ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_comes_back(client: storm.Client, dtype: torch.dtype) -> None:
    for count in (0, 1, 300_001):
        tensor = patterns(dtype, count)
        client.cache.put("bits", tensor)
        assert same(client.cache.get("bits"), tensor), count


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(3, 0, 2),
        torch.randn(40, 30).t(),
        torch.randn(40, 30)[::3, 5:],
        torch.randn(5).expand(4, 5),
        torch.randn(6, dtype=torch.complex64).conj(),
        torch.randn(6, dtype=torch.complex64).conj().imag,
        torch.nn.Parameter(torch.randn(4, 4)),
        torch.randn(3, requires_grad=True) * 2,
    ],
    ids=["scalar", "empty", "transposed", "sliced", "expanded", "conj", "neg", "parameter", "grad"],
)
def test_every_view_comes_back_as_a_plain_tensor(
    client: storm.Client, tensor: torch.Tensor
) -> None:
    client.cache.put("view", tensor)
    found = client.cache.get("view")
    assert same(found, tensor)
    assert found.is_contiguous()
    assert not found.requires_grad


def test_it_is_kept_compressed(client: storm.Client) -> None:
    client.cache.put("normal", torch.randn(MIB).bfloat16())
    assert 0 < client.status().cache.used_bytes < 2 * MIB / 1.3
    assert client.status().entries == 0, "it is nobody's activation"


@pytest.mark.gpu
def test_a_gpus_tensor_comes_back_on_any_device(client: storm.Client) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    tensor = torch.randn(300_001, device="cuda").bfloat16()
    client.cache.put("gpu", tensor)
    for device in ("cuda", "cpu", torch.device("cuda", 0)):
        found = client.cache.get("gpu", device=device)
        assert found.device.type == torch.device(device).type
        assert same(found.cpu(), tensor.cpu())
    client.cache.put("host", tensor.cpu())
    found = client.cache.get("host", device="cuda")
    assert found is not None
    assert torch.equal(found, tensor)


# --- names --------------------------------------------------------------------------------------


def test_names_and_what_they_name(client: storm.Client) -> None:
    cache = client.cache
    assert cache.list() == []
    assert cache.get("a") is None
    tensor = torch.zeros(1000)
    for name in ("b", "a", "a"):
        cache.put(name, tensor)
        tensor.add_(1)  # what was put is a copy
    assert cache.list() == ["a", "b"]
    first = cache.get("a")
    assert same(first, torch.full((1000,), 2.0))
    first.zero_()
    assert same(cache.get("a"), torch.full((1000,), 2.0))
    assert (cache.contains("a"), cache.contains("c")) == (True, False)
    assert (cache.delete("a"), cache.delete("a")) == (True, False)
    assert cache.list() == ["b"]


def test_many_names_come_in_pages(client: storm.Client) -> None:
    names = [f"{number:04} {'x' * 200}" for number in range(600)]
    for name in names:
        client.cache.put(name, torch.zeros(1))
    assert client.cache.list() == names


# --- room ---------------------------------------------------------------------------------------


def test_what_was_used_longest_ago_makes_room(client: storm.Client) -> None:
    for number in range(6):
        client.cache.put(str(number), patterns(torch.uint8, MIB))
    client.cache.get("0")
    client.cache.contains("1")
    for number in range(6, 9):
        client.cache.put(str(number), patterns(torch.uint8, MIB))
    assert client.cache.list() == ["0", "3", "4", "5", "6", "7", "8"]
    assert client.status().cache.evictions == 2


def test_a_tensor_larger_than_the_cache_is_refused_and_nothing_changes(
    client: storm.Client,
) -> None:
    client.cache.put("a", torch.ones(5))
    with pytest.raises(storm.QuotaExceeded, match=r"16\.0 MiB into a cache of 8\.0 MiB: raise"):
        client.cache.put("a", torch.zeros(16 * MIB, dtype=torch.uint8))
    assert same(client.cache.get("a"), torch.ones(5))


def test_threads_put_and_get_through_one_small_staging_area(client: storm.Client) -> None:
    def work(number: int) -> bool:
        tensor = torch.full((500_000,), number, dtype=torch.uint8)
        for _ in range(3):
            client.cache.put(f"{number}", tensor)
            assert same(client.cache.get(f"{number}"), tensor)
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


# --- errors -------------------------------------------------------------------------------------


def test_what_no_name_and_no_time_to_live_is(client: storm.Client) -> None:
    cache = client.cache
    for name in ("", "x" * 257, "a\nb", None):
        put = partial(cache.put, tensor=torch.ones(1))
        for use in (put, cache.get, cache.contains, cache.delete):
            with pytest.raises(storm.UsageError, match=r"^name is .* 256 printable characters"):
                use(name)
    for ttl in (0, -1, float("nan"), 1e9, True, "1"):
        with pytest.raises(storm.UsageError, match="ttl is"):
            cache.put("a", torch.ones(1), ttl=ttl)


class Wrapper(torch.Tensor):
    """A tensor that has no memory: what it means is in an attribute."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Wrapper(func(*(arg.inner if isinstance(arg, Wrapper) else arg for arg in args)))


def nested(*tensors: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        return torch.nested.nested_tensor(list(tensors), layout=torch.strided)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_only_plain_tensors_are_put(client: storm.Client) -> None:
    """A subclass may have no bytes, and a quantized one is more than those."""
    refused = {
        "list": [1.0],
        "sparse_coo": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "nested": nested(torch.ones(2), torch.ones(3)),
        r"quantized.*dequantize": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        r"got a Wrapper, .* plain": Wrapper(torch.ones(64)),
    }
    for said, value in refused.items():
        with pytest.raises(storm.UsageError, match=said):
            client.cache.put("a", value)
        assert not client.cache.contains("a")
    with pytest.raises(storm.UsageError, match=r"torch\.func"):
        torch.vmap(lambda row: client.cache.put("a", row))(torch.ones(2, 64))


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])
def test_a_device_that_torch_cannot_use(client: storm.Client, device: str) -> None:
    with pytest.raises(storm.UsageError, match=f"device is '{device}', which cannot be used"):
        client.cache.get("a", device=device)


def test_a_daemon_without_a_cache_says_so(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon("--pool-bytes=16MiB", "--cache-bytes=0")
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        with pytest.raises(storm.UsageError, match="--cache-bytes above 0"):
            client.cache.put("a", torch.ones(1))
        assert client.status().cache is None


def test_a_daemon_that_dies_is_told_and_then_looked_for_again(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon("--pool-bytes=16MiB", "--cache-bytes=1MiB")
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        client.cache.put("a", torch.ones(1))
        daemon.kill()
        with pytest.raises((storm.DaemonLost, storm.DaemonUnavailable)):
            client.cache.get("a")
        with pytest.raises(storm.DaemonUnavailable, match="no daemon listens"):
            client.cache.get("a")
