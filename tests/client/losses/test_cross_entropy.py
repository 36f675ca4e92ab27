"""Cross-entropy in tiles has the bits of PyTorch's, takes no more than tiles, and errs like it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import psutil
import pytest
import storm_client as storm
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from storm_client.errors import UsageError
from storm_client.losses import cross_entropy as losses
from support.peak_memory import peak_bytes
from support.same_bits import compare, same, set_tiles
from support.steps import descended
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

SMALL_TILE = 4096
"""Tiles of the fewest rows for all but the smallest vocabularies."""

TYPES = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, None),
    (torch.float16, None),
    (torch.float32, None),
    (torch.float64, None),
    (torch.float32, torch.float64),
]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tiles(monkeypatch, SMALL_TILE)


def make(
    rows: int,
    classes: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    ignored: int = 7,
) -> tuple[Tensor, Tensor]:
    """Return logits and targets of which each so many is ignored."""
    torch.manual_seed(rows * 31 + classes)
    target = torch.randint(classes, (rows,))
    if ignored:
        target[::ignored] = -100
    return (torch.randn(rows, classes) * 3).to(device, dtype), target.to(device)


@contextmanager
def calls_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Note the calls that are left to PyTorch's own function."""
    calls: list[Tensor] = []
    real = F.cross_entropy

    def noted(logits: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(logits)
        return real(logits, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(F, "cross_entropy", noted)
        yield calls


@pytest.mark.parametrize("dtypes", TYPES, ids=str)
@pytest.mark.parametrize("classes", [1, 7, 1031, 4099])
def test_bits_are_pytorchs(device: str, classes: int, dtypes: tuple[Any, Any]) -> None:
    dtype, upcast = dtypes
    for rows in (1, 9, 130):
        logits, target = make(rows, classes, dtype, device)
        for reduction, smoothing in product(("mean", "sum", "none"), (0.0, 0.1)):
            compare(logits, target, dtype=upcast, reduction=reduction, label_smoothing=smoothing)


@pytest.mark.parametrize("dtypes", TYPES, ids=str)
def test_bits_with_class_weights_are_pytorchs(device: str, dtypes: tuple[Any, Any]) -> None:
    dtype, upcast = dtypes
    for rows, classes in ((33, 7), (700, 7), (65, 1031)):
        logits, target = make(rows, classes, dtype, device)
        weight = torch.rand(classes, device=device).to(upcast or dtype) * 2 - 0.5
        for reduction, smoothing in product(("mean", "sum", "none"), (0.0, 0.3)):
            options = {"reduction": reduction, "label_smoothing": smoothing}
            compare(logits, target, dtype=upcast, weight=weight, **options)


@pytest.mark.parametrize(("classes", "threads"), [(50257, 1), (50257, 2), (128256, 2)])
def test_bits_of_whole_vocabularies_are_pytorchs(classes: int, threads: int) -> None:
    logits, target = make(21, classes, torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare(logits, target, dtype=torch.float32)
        compare(logits, target, dtype=torch.float32, label_smoothing=0.1)
        compare(logits.detach().float(), target, reduction="none")
    finally:
        torch.set_num_threads(before)


def test_means_of_many_rows_are_pytorchs(device: str) -> None:
    """PyTorch adds in a tree whose shape depends on how many rows there are."""
    for rows in (257, 4096, 20_011):
        logits, target = make(rows, 5, torch.float32, device)
        compare(logits, target)
        compare(logits, target, reduction="sum")


@given(
    st.data(),
    st.integers(1, 60),
    st.integers(1, 70),
    st.sampled_from(TYPES),
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.booleans(),
    st.sampled_from([-100, 0, 3, -1, 1000]),
    st.sampled_from([64, 256, 4096]),
)
def test_any_shape_and_option_has_pytorchs_bits(
    data: st.DataObject,
    rows: int,
    classes: int,
    dtypes: tuple[Any, Any],
    reduction: str,
    smoothing: float,
    weighted: bool,
    ignore_index: int,
    tile_bytes: int,
) -> None:
    dtype, upcast = dtypes
    torch.manual_seed(data.draw(st.integers(0, 1 << 30)))
    logits = (torch.randn(rows, classes) * 4).to(dtype)
    if data.draw(st.booleans()):
        numbers = [float("inf"), -float("inf"), float("nan"), 0.0, 6e4]
        for _ in range(3):
            row = data.draw(st.integers(0, rows - 1))
            column = data.draw(st.integers(0, classes - 1))
            logits[row, column] = data.draw(st.sampled_from(numbers))
    target = torch.randint(classes, (rows,))
    target[torch.rand(rows) < data.draw(st.sampled_from([0.0, 0.3, 1.0]))] = ignore_index
    weight = torch.rand(classes).to(upcast or dtype) if weighted else None
    with pytest.MonkeyPatch.context() as patch:
        set_tiles(patch, tile_bytes)
        options = {"label_smoothing": smoothing, "ignore_index": ignore_index}
        compare(logits, target, dtype=upcast, weight=weight, reduction=reduction, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_ignored_and_weights_of_what_is_ignored(
    device: str, reduction: str, smoothing: float
) -> None:
    logits, target = make(40, 300, torch.float32, device, ignored=1)
    compare(logits, target, reduction=reduction, label_smoothing=smoothing)
    target[5] = 0
    target[6] = -1
    weight = torch.rand(300, device=device)
    compare(logits, target.clamp_min(-1), reduction=reduction, weight=weight, ignore_index=-1)


@pytest.mark.parametrize("number", [float("inf"), -float("inf"), float("nan")])
def test_numbers_that_are_none_and_infinities_come_out_where_pytorchs_do(
    device: str, number: float
) -> None:
    logits, target = make(20, 1500, torch.bfloat16, device)
    logits[3, int(target[3])] = number
    logits[5, 700] = number
    logits[6] = number
    compare(logits, target, dtype=torch.float32, reduction="none")
    compare(logits, target, dtype=torch.float32, label_smoothing=0.1)


@pytest.mark.parametrize("inner", [(5,), (3, 4), (2, 3, 4)])
def test_images_are_tiled_by_sample(device: str, inner: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    target = torch.randint(11, (9, *inner), device=device)
    target[0] = -100
    weight = torch.rand(11, device=device)
    for dtype, upcast in TYPES:
        logits = torch.randn(9, 11, *inner, device=device).to(dtype)
        # On a GPU PyTorch itself adds images' losses in no fixed order.
        reductions = ("none",) if device == "cuda" else ("mean", "sum", "none")
        for reduction in reductions:
            compare(logits, target, dtype=upcast, reduction=reduction)
            typed = weight.to(upcast or dtype)
            compare(logits, target, dtype=upcast, reduction=reduction, weight=typed)
            compare(logits, target, dtype=upcast, reduction=reduction, label_smoothing=0.1)


def test_logits_in_any_layout_have_pytorchs_bits(device: str) -> None:
    for dtype, upcast in TYPES:
        base = (torch.randn(40, 2, 1503, device=device) * 3).to(dtype)
        target = torch.randint(1401, (40,), device=device)
        for logits in (
            base[:, 1, 5:1406],
            base.transpose(0, 2)[3:1404, 0].t(),
            base.flatten()[3 : 3 + 40 * 1401].view(40, 1401),
            base[:1, 0, :1401].expand(40, 1401),
        ):
            compare(logits.detach(), target, dtype=upcast)
            compare(logits.detach(), target, dtype=upcast, label_smoothing=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("upcast", [None, torch.float32, torch.bfloat16, torch.float16])
def test_autocast_does_what_it_does_with_pytorchs(
    device: str, dtype: torch.dtype, given: torch.dtype, upcast: torch.dtype | None
) -> None:
    logits, target = make(40, 900, given, device)
    weight = torch.rand(900, device=device)
    with torch.autocast(device, dtype=dtype):
        compare(logits, target, dtype=upcast)
        compare(logits, target, dtype=upcast, label_smoothing=0.1)
        if given != torch.float64 or upcast is not None:  # PyTorch takes no float32 weight then
            compare(logits, target, dtype=upcast, weight=weight, reduction="none")
        for layout in (logits.detach().t().contiguous().t(), logits.detach()[:, 3:]):
            compare(layout, target.clamp(max=890), dtype=upcast)
        images = logits.detach().unflatten(1, (300, 3))
        places = target.clamp(max=299)[:, None].expand(40, 3)
        # On a GPU PyTorch itself adds the losses of images in no fixed order.
        reduction = "sum" if device == "cpu" else "none"
        compare(images, places, dtype=upcast, reduction=reduction)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_gradient_with_a_graph_is_rounded_as_autocasts(smoothing: float) -> None:
    logits, target = make(40, 900)
    logits.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.cross_entropy(logits.to(torch.float16), target, label_smoothing=smoothing)
        options: dict[str, Any] = {"dtype": torch.float16, "label_smoothing": smoothing}
        found = storm.cross_entropy(logits, target, **options)
        first, ours = (
            torch.autograd.grad(loss, logits, create_graph=True)[0] for loss in (expected, found)
        )
    assert same(ours.detach(), first.detach())
    assert ours.grad_fn is not None


@pytest.fixture
def _asks_anew() -> Iterator[None]:
    losses._computed_under_autocast.cache_clear()
    yield
    losses._computed_under_autocast.cache_clear()


@torch.library.custom_op("storm_tests::below_autograd", mutates_args=())
def below_autograd(logits: Tensor, target: Tensor) -> Tensor:
    """Compute a loss where autograd's and autocast's dispatch are over."""
    return storm.cross_entropy(logits, target)


@pytest.mark.usefixtures("_asks_anew")
@pytest.mark.parametrize("mode", ["inference", "no_grad", "grad", "custom operation"])
def test_autocasts_type_is_found_in_whichever_mode_asks_first(mode: str) -> None:
    logits, target = make(40, 900, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.cross_entropy(logits, target)
        if mode == "custom operation":
            assert same(below_autograd(logits, target), expected)
        else:
            with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "grad"):
                assert same(storm.cross_entropy(logits, target), expected)
                assert torch.is_inference_mode_enabled() is (mode == "inference")
        with torch.inference_mode():
            assert same(storm.cross_entropy(logits, target), expected)
        compare(logits, target)


def _error(fn: Callable[..., Tensor], *args: Any, **options: Any) -> tuple[type, str]:
    with pytest.raises((IndexError, RuntimeError, TypeError, ValueError)) as caught:
        fn(*args, **options)
    return caught.type, str(caught.value)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        (torch.full((40,), 900), {}),
        (torch.full((40,), -1), {}),
        (torch.full((40,), -100), {"ignore_index": 5}),
        (torch.zeros(39, dtype=torch.long), {}),
        (torch.zeros(40, 2, dtype=torch.long), {}),
        (torch.zeros(40, dtype=torch.int32), {}),
        (torch.zeros(40), {}),
        (torch.zeros(40, dtype=torch.long), {"weight": torch.ones(899)}),
        (torch.zeros(40, dtype=torch.long), {"weight": torch.ones(900, dtype=torch.float64)}),
        (torch.zeros(40, dtype=torch.long), {"weight": torch.ones(900).requires_grad_()}),
        (torch.zeros(40, dtype=torch.long), {"label_smoothing": 1.5}),
        (torch.zeros(40, dtype=torch.long), {"reduction": "average"}),
        (torch.zeros(40, dtype=torch.long), {"reduction": None}),
        (torch.zeros(40, dtype=torch.long), {"ignore_index": 1.5}),
        (torch.zeros(40, dtype=torch.long), {"ignore_index": None}),
        (torch.zeros(40, dtype=torch.long), {"ignore_index": True}),
        (torch.zeros(40, dtype=torch.long), {"ignore_index": 1 << 63}),
        (torch.zeros(40, dtype=torch.long), {"label_smoothing": "a"}),
        (torch.zeros(40, dtype=torch.long), {"label_smoothing": None}),
        (None, {}),
    ],
)
def test_errors_are_pytorchs(target: Tensor | None, options: dict[str, Any]) -> None:
    logits = torch.randn(40, 900)
    expected = _error(F.cross_entropy, logits, target, **options)
    assert _error(storm.cross_entropy, logits, target, **options) == expected


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("logits", [None, np.ones((40, 900))], ids=["none", "array"])
def test_logits_that_are_no_tensor_are_pytorchs_error(
    logits: Any, dtype: torch.dtype | None
) -> None:
    target = torch.zeros(40, dtype=torch.long)
    expected = _error(F.cross_entropy, logits, target)
    assert _error(storm.cross_entropy, logits, target, dtype=dtype) == expected


def test_options_may_have_any_type_that_pytorch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = make(40, 900, torch.float64, ignored=0)
    compare(logits, target, ignore_index=torch.tensor(5))
    for smoothing in (1, True, np.float64(0.1), np.float32(0.1), torch.tensor(0.1)):
        compare(logits, target, label_smoothing=smoothing)
    compare(logits, target, ignore_index=np.int64(5))
    with calls_of_pytorch(monkeypatch) as calls:
        storm.cross_entropy(logits, target, ignore_index=np.int64(5))
    assert not calls


@pytest.mark.filterwarnings("ignore:reduction='elementwise_mean' is deprecated")
def test_the_deprecated_name_of_the_mean_is_pytorchs() -> None:
    logits, target = make(40, 900)
    for options in ({}, {"label_smoothing": 0.1}, {"weight": torch.rand(900)}):
        compare(logits, target, reduction="elementwise_mean", **options)


def test_a_type_that_is_no_number_of_a_loss_is_refused() -> None:
    other: Any
    for other, told in (
        (torch.int32, r"torch\.int32"),
        ("float32", "'float32'"),
        (torch.ones(()), r"tensor\(1\.\)"),
    ):
        with pytest.raises(UsageError, match=f"dtype is {told}; .* as torch.float32"):
            storm.cross_entropy(*make(4, 5), dtype=other)


def test_deprecated_arguments_mean_what_they_mean_to_pytorch() -> None:
    logits, target = make(40, 900)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for average, reduce in ((True, None), (False, None), (None, False), (True, True)):
            found = storm.cross_entropy(logits, target, None, average, -100, reduce)
            assert same(found, F.cross_entropy(logits, target, None, average, -100, reduce))


def test_probabilities_and_bytes_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = make(40, 200, ignored=0)
    for other in (torch.rand(40, 200).softmax(1), target.to(torch.uint8)):
        with calls_of_pytorch(monkeypatch) as calls:
            found = storm.cross_entropy(logits, other)
        assert len(calls) == 1
        assert same(found, F.cross_entropy(logits, other))
    assert same(storm.cross_entropy(logits[0], target[0]), F.cross_entropy(logits[0], target[0]))
    with calls_of_pytorch(monkeypatch) as calls:
        storm.cross_entropy(logits, target)
    assert not calls


def test_derivatives_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Second ones too: the backward pass is one of PyTorch's operations where it has a graph."""
    set_tiles(monkeypatch, 64)
    logits, target = make(11, 6, torch.float64)
    logits.requires_grad_()
    for options in ({}, {"reduction": "none", "label_smoothing": 0.2}):

        def loss(x: Tensor, options: dict[str, Any] = options) -> Tensor:
            return storm.cross_entropy(x, target, **options)

        with calls_of_pytorch(monkeypatch) as calls:
            assert torch.autograd.gradcheck(loss, logits)
            assert torch.autograd.gradgradcheck(loss, logits)
        assert not calls


def test_a_gradient_with_a_graph_has_pytorchs_bits_and_derivative() -> None:
    logits, target = make(40, 300, torch.bfloat16)
    logits.requires_grad_()
    results = []
    for loss in (
        F.cross_entropy(logits.float(), target),
        storm.cross_entropy(logits, target, dtype=torch.float32),
    ):
        (first,) = torch.autograd.grad(loss, logits, create_graph=True)
        (second,) = torch.autograd.grad(first.float().square().sum(), logits)
        results.append((first.detach(), second))
    assert same(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_loss_takes_tiles_and_no_copy_of_the_logits(
    monkeypatch: pytest.MonkeyPatch, smoothing: float
) -> None:
    rows, classes, tile_rows = 1000, 2000, 16
    tile = tile_rows * classes * torch.float32.itemsize
    set_tiles(monkeypatch, tile)
    leaf = torch.randn(rows, classes, dtype=torch.bfloat16, requires_grad=True)
    logits, target = leaf.clone(), torch.randint(classes, (rows,))
    whole, few = logits.numel() * logits.itemsize, 64 * rows
    options = {"dtype": torch.float32, "label_smoothing": smoothing}
    storm.cross_entropy(logits.detach(), target, **options)
    made: list[Tensor] = []
    held = peak_bytes(lambda: made.append(storm.cross_entropy(logits, target, **options)))
    assert held <= 2 * tile + few
    seen: list[int] = []
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    address = logits.data_ptr()
    del logits
    # In the logits' memory; what it is passed on to is the leaf's.
    assert peak_bytes(lambda: torch.autograd.grad(made[0], leaf)) <= 4 * tile + few
    assert seen == [address]
    logits = leaf.clone()
    loss = storm.cross_entropy(logits, target, **options)
    assert whole < peak_bytes(loss.backward) <= whole + 4 * tile + few


TARGET = torch.arange(40)


def test_a_graph_that_is_kept_gives_the_same_gradient_again() -> None:
    leaf = torch.randn(40, 300, requires_grad=True)
    loss = storm.cross_entropy(leaf * 2, TARGET)
    first, second, last = (
        torch.autograd.grad(loss, leaf, retain_graph=kept)[0] for kept in (True, True, False)
    )
    assert same(first, second)
    assert same(first, last)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_two_losses_of_the_same_logits_add_their_gradients() -> None:
    leaf = torch.randn(40, 300, requires_grad=True)
    gradients = []
    for entropy in (F.cross_entropy, storm.cross_entropy):
        logits = leaf * 2
        loss = entropy(logits, TARGET) + entropy(logits, TARGET.flip(0)) + logits.square().mean()
        del logits
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    assert same(*gradients)


def test_hooks_on_what_is_saved_are_respected() -> None:
    leaf, packed = torch.randn(40, 300, requires_grad=True), []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        loss = storm.cross_entropy(leaf * 2, TARGET)
    kept = [one.clone() for one in packed]
    (found,) = torch.autograd.grad(loss, leaf)
    (expected,) = torch.autograd.grad(F.cross_entropy(leaf * 2, TARGET), leaf)
    assert same(found, expected)
    assert all(map(torch.equal, packed, kept))


def test_logits_that_changed_are_refused() -> None:
    logits = torch.randn(40, 300, requires_grad=True) * 2
    loss = storm.cross_entropy(logits, TARGET)
    logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_anomaly_mode_and_deterministic_algorithms_change_nothing(device: str) -> None:
    logits, target = make(40, 300, torch.bfloat16, device)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            compare(logits, target, dtype=torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)


def test_compilers_and_transforms_have_pytorchs_own() -> None:
    logits, target = make(40, 300)

    def loss(x: Tensor) -> Tensor:
        return storm.cross_entropy(x, target)

    expected = F.cross_entropy(logits, target)
    assert same(torch.compile(loss, backend="eager", fullgraph=True)(logits), expected)
    assert same(torch.func.grad(loss)(logits), torch.func.grad(F.cross_entropy)(logits, target))
    batch = torch.stack([logits, logits])
    assert same(
        torch.vmap(loss)(batch)[1], torch.vmap(lambda x: F.cross_entropy(x, target))(batch)[1]
    )
    _, tangent = torch.func.jvp(loss, (logits,), (torch.ones_like(logits),))
    assert tangent.shape == ()
    assert same(make_fx(loss)(logits)(logits * 2), F.cross_entropy(logits * 2, target))


@pytest.mark.parametrize("computed", [False, True])
def test_a_captured_step_has_pytorchs_own(client: storm.Client, computed: bool) -> None:
    """Whether its logits are computed in the step, or are a parameter."""
    start, target = make(40, 900)

    def trained(client: storm.Client | None) -> list[Tensor]:
        logits = start.clone().requires_grad_()

        def loss_of(target: Tensor) -> Tensor:
            return storm.cross_entropy(logits * 2 if computed else logits, target)

        return descended(loss_of, [logits], target, client=client, refused=[900])

    assert all(map(same, trained(client), trained(None)))


def test_it_starts_nothing() -> None:
    """No daemon either; threads and descriptors that stay are found behind every test."""
    before = psutil.Process().children()
    x = torch.randn(40, 300, requires_grad=True)
    storm.cross_entropy(x * 2, TARGET).backward()
    storm.linear_cross_entropy(x, torch.randn(50, 300), TARGET).backward()
    assert psutil.Process().children() == before
