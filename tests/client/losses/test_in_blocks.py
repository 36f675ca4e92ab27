"""Inside a block PyTorch's own loss is computed in tiles where that has its bits, else as ever."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import Thread
from typing import Any

import pytest
import storm_client as storm
import torch
import torch.nn.functional as F
from storm_client.errors import UsageError
from storm_client.losses import in_blocks
from support.peak_memory import peak_bytes
from support.same_bits import same, set_tiles
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as held_by_another_name
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

ROWS, CLASSES = 200, 300
TILED = "_LogProbabilitiesBackward"


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tiles(monkeypatch, 4096)
    monkeypatch.setattr(in_blocks, "_PROVED", in_blocks._Proved())


@pytest.fixture
def offload(client: storm.Client) -> storm.Offload:
    return client.offload(min_bytes=1024)


def make(
    dtype: torch.dtype = torch.float32, rows: int = ROWS, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return a head's input, which takes a gradient, and targets of which some are ignored."""
    torch.manual_seed(rows)
    target = torch.randint(CLASSES, (rows,))
    target[::7] = -100
    return torch.randn(rows, CLASSES).to(device, dtype).requires_grad_(), target.to(device)


def nodes_of(loss: Tensor) -> set[str]:
    """Return the names of what the graph of a loss is made of."""
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [one for one, _ in node.next_functions]
    return {node.name() for node in seen}


def is_tiled(loss: Tensor) -> bool:
    return TILED in nodes_of(loss)


Loss = Callable[[Tensor, Tensor], Tensor]


def check(
    offload: AbstractContextManager[Any],
    loss_of: Loss,
    *,
    dtype: torch.dtype = torch.float32,
    rows: int = ROWS,
    device: str = "cpu",
) -> bool:
    """Compare loss and gradient with those outside of blocks; tell whether there were tiles."""
    x, target = make(dtype, rows, device)
    expected = loss_of(x * 2, target)
    assert not is_tiled(expected)
    outer = torch.rand_like(expected)
    (gradient,) = torch.autograd.grad(expected, x, outer)
    with offload:
        found = loss_of(x * 2, target)
    tiled = is_tiled(found)
    assert same(found, expected)
    (ours,) = torch.autograd.grad(found, x, outer)
    assert same(ours, gradient)
    return tiled


WEIGHT = torch.rand(CLASSES)

LOSSES: dict[str, Loss] = {
    "function": F.cross_entropy,
    "held by another name": held_by_another_name,
    "module": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "none": nn.CrossEntropyLoss(reduction="none"),
    "smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
    "ignore_index": lambda x, t: F.cross_entropy(x, t.clamp_min(0), ignore_index=3),
    "upcast": lambda x, t: F.cross_entropy(x.float(), t),
    "weighted": lambda x, t: F.cross_entropy(x, t, WEIGHT.to(x), reduction="none"),
    "more dimensions": lambda x, t: F.cross_entropy(
        x.view(20, 10, CLASSES).transpose(1, 2), t.view(20, 10), reduction="none"
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_computed_in_tiles(
    loss: str, dtype: torch.dtype, device: str, offload: storm.Offload
) -> None:
    has_tiles = loss != "weighted" and (device == "cpu" or loss != "more dimensions")
    for _ in range(3):
        assert check(offload, LOSSES[loss], dtype=dtype, device=device) is has_tiles


def test_a_block_takes_no_more_than_tiles_beside_logits_and_gradient(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tiles(monkeypatch, 1 << 18)
    torch.manual_seed(1)
    x, target = torch.randn(512, 64), torch.randint(2048, (512,))
    weight = torch.randn(64, 2048, requires_grad=True)

    def step(offload: AbstractContextManager[Any]) -> None:
        with offload:
            loss = F.cross_entropy(x @ weight, target)
        loss.backward()
        weight.grad = None

    taken = {}
    for way in ("plain", "tiled"):
        offload = client.offload(min_bytes="1GiB", loss=way)
        step(offload)
        taken[way] = peak_bytes(lambda offload=offload: step(offload))  # type: ignore[misc]
    logits, few = 512 * 2048 * 4, weight.nbytes + (1 << 18)
    assert taken["tiled"] <= logits + 4 * (1 << 18) + few
    assert taken["plain"] >= 3 * logits


@pytest.mark.parametrize("model", ["ForCausalLM", "ForMaskedLM", "ForTokenClassification"])
def test_losses_of_transformers_end_in_it(model: str, offload: storm.Offload) -> None:
    losses = pytest.importorskip("transformers.loss.loss_utils")
    config = pytest.importorskip("transformers").PretrainedConfig(num_labels=CLASSES)
    function = losses.LOSS_MAPPING[model]

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = logits.view(2, ROWS // 2, CLASSES), labels.view(2, -1)
        return function(logits=logits, labels=labels, vocab_size=CLASSES, config=config)

    assert check(offload, loss_of, dtype=torch.bfloat16)


def test_a_loss_may_be_left_plain(client: storm.Client) -> None:
    offload = client.offload(loss="plain")
    assert not check(offload, F.cross_entropy)
    assert not check(copy.deepcopy(offload), F.cross_entropy)
    assert pickle.loads(pickle.dumps(offload))._options.loss == "plain"
    tiled = client.offload(loss="tiled")
    assert check(copy.deepcopy(tiled), F.cross_entropy)
    with pytest.raises(UsageError, match="loss is 'tilde'; choose tiled or plain"):
        client.offload(loss="tilde")


def test_the_innermost_block_decides(client: storm.Client) -> None:
    x, target = make()
    with client.offload(loss="tiled"):
        with client.offload(loss="plain"):
            assert not is_tiled(F.cross_entropy(x, target))
        assert is_tiled(F.cross_entropy(x, target))


def test_a_block_is_its_thread_s_own(offload: storm.Offload) -> None:
    x, target = make()
    found: list[Tensor] = []
    with offload:
        thread = Thread(target=lambda: found.append(F.cross_entropy(x, target)))
        thread.start()
        thread.join()
    assert not is_tiled(found[0])


class _Subclass(Tensor):
    pass


class _Halving(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 0.5 if func in (F.cross_entropy, torch.log_softmax) else made


def in_hooks(x: Tensor, target: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
        return F.cross_entropy(x, target)


def in_a_mode(x: Tensor, target: Tensor) -> Tensor:
    with _Halving():
        return F.cross_entropy(x, target)


LOOKS: dict[str, Loss] = {
    "identity hooks": in_hooks,
    "checkpoint": lambda x, t: checkpoint(F.cross_entropy, x, t, use_reentrant=False),
    "no grad": torch.no_grad()(F.cross_entropy),
    "vmap": lambda x, t: torch.vmap(F.cross_entropy)(x[None], t[None])[0],
    "a mode": in_a_mode,
    "probabilities": lambda x, _: F.cross_entropy(x, x.detach().softmax(1)),
    "few rows": lambda x, t: F.cross_entropy(x[:2], t[:2]),
    "a subclass": lambda x, t: F.cross_entropy(x.as_subclass(_Subclass), t).as_subclass(Tensor),
    "a deprecated argument": lambda x, t: F.cross_entropy(x, t, size_average=False),
}


@pytest.mark.parametrize("way", LOOKS)
def test_what_looks_at_the_loss_or_is_no_such_meets_pytorch_s(
    way: str, offload: storm.Offload
) -> None:
    x, target = make()
    expected = LOOKS[way](x, target)
    with offload:
        loss = LOOKS[way](x, target)
    assert is_tiled(loss) is (way == "a mode")  # which sees the function all the same
    assert same(loss, expected)
    del loss


def test_errors_are_pytorch_s(offload: storm.Offload) -> None:
    x, target = make()
    for call in (
        lambda: F.cross_entropy(x, target.clamp_min(0) + CLASSES),
        lambda: F.cross_entropy(x, target[:5]),
        lambda: F.cross_entropy(x, target, torch.ones(5)),
        lambda: F.cross_entropy(x, target, reduction="most"),
        lambda: F.cross_entropy(x, target, label_smoothing=2.0),
        lambda: F.cross_entropy(x, None),
    ):
        with pytest.raises(Exception) as expected:
            call()
        with offload, pytest.raises(expected.type) as found:
            call()
        assert str(found.value) == str(expected.value)


def test_logits_that_are_changed_after_the_loss_raise_and_it_says_what_to_do(
    offload: storm.Offload,
) -> None:
    x, target = make()
    for _ in range(3):
        with offload:
            logits = x * 2
            loss = F.cross_entropy(logits, target)
        logits.detach().zero_()
        with pytest.raises(RuntimeError, match=r'inplace operation[^"]*loss="plain"'):
            loss.backward()


def test_second_derivatives(offload: storm.Offload) -> None:
    def second(block: AbstractContextManager[Any]) -> tuple[Tensor, Tensor]:
        x, target = make(torch.float64)
        with block:
            loss = F.cross_entropy(x * 2, target)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return gradient, torch.autograd.grad(gradient.square().sum(), x)[0]

    for ours, theirs in zip(second(offload), second(nullcontext()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("adds", [True, False])
def test_a_second_derivative_has_pytorchs_bits_or_raises(
    adds: bool, reduction: str, client: storm.Client, offload: storm.Offload
) -> None:
    """PyTorch adds it to the first one before the softmax's backward pass, and tiles after it."""

    def penalized(block: AbstractContextManager[Any]) -> tuple[Tensor, ...]:
        x, target = make()
        with block:
            loss = F.cross_entropy(x * 2, target, reduction=reduction).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = gradient.square().sum()
        return gradient.detach(), *torch.autograd.grad(loss + penalty if adds else penalty, x)

    if adds:
        with pytest.raises(RuntimeError, match=r"through its gradient.*loss=.plain"):
            penalized(offload)
        offload = client.offload(min_bytes=1024, loss="plain")
    for ours, theirs in zip(penalized(offload), penalized(nullcontext()), strict=True):
        assert same(ours, theirs)


def test_a_second_derivative_is_added_in_pytorchs_order(offload: storm.Offload) -> None:
    """To what others of the same logits' readers have computed."""

    def penalized(block: AbstractContextManager[Any]) -> tuple[Tensor, ...]:
        x, target = make()
        with block:
            logits = x * 2
            loss, other = (F.cross_entropy(logits, one) for one in (target, target.roll(1)))
            penalty = logits.logsumexp(-1).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(other + penalty + gradient.square().sum() * 1e3, x)

    for ours, theirs in zip(penalized(offload), penalized(nullcontext()), strict=True):
        assert same(ours, theirs)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_batched_gradients_are_pytorchs(
    reduction: str, smoothing: float, offload: storm.Offload
) -> None:
    def batched(block: AbstractContextManager[Any], create_graph: bool) -> Tensor:
        x, target = make()
        with block:
            loss = F.cross_entropy(x * 2, target, reduction=reduction, label_smoothing=smoothing)
        outer = torch.linspace(0.2, 2.3, 3 * loss.numel()).view(3, *loss.shape)
        return torch.autograd.grad(
            loss, x, outer, is_grads_batched=True, create_graph=create_graph
        )[0].detach()

    for create_graph in (False, True):
        assert same(batched(offload, create_graph), batched(nullcontext(), create_graph))


def test_batched_second_derivatives_are_refused(offload: storm.Offload) -> None:
    x, target = make()
    with offload:
        loss = F.cross_entropy(x * 2, target)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    outer = torch.rand(2, *x.shape)
    with pytest.raises(RuntimeError, match=r"through its gradient.*loss=.plain"):
        torch.autograd.grad(gradient, x, outer, is_grads_batched=True)


def test_targets_that_pytorch_copies_may_change(offload: storm.Offload) -> None:
    def gradient(block: AbstractContextManager[Any]) -> Tensor:
        x, target = make(rows=120)
        targets = target.view(10, 12)
        with block:
            logits = (x * 2).view(10, 12, CLASSES).transpose(1, 2)[:, :, 1:]
            loss = F.cross_entropy(logits, targets[:, 1:])
        targets.copy_(targets.roll(3))
        return torch.autograd.grad(loss, x)[0]

    for _ in range(2):
        assert same(gradient(offload), gradient(nullcontext()))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_targets_are_read_in_the_backward_pass(
    reduction: str, has_weight: bool, smoothing: float, offload: storm.Offload
) -> None:
    """As PyTorch does: a change that it counts raises, and another one has its effect."""
    weight = torch.rand(CLASSES) + 0.5 if has_weight else None

    def gradient(block: AbstractContextManager[Any], change: Callable[[Tensor], Any]) -> Tensor:
        x, target = make()
        with block:
            loss = F.cross_entropy(
                x * 2, target, weight, reduction=reduction, label_smoothing=smoothing
            ).sum()
        change(target)
        return torch.autograd.grad(loss, x)[0]

    def shift(target: Tensor) -> None:
        target.data.copy_(target.roll(3))

    assert same(gradient(offload, shift), gradient(nullcontext(), shift))
    for block in (offload, nullcontext()):
        with pytest.raises(RuntimeError, match=r"inplace|changed in place"):
            gradient(block, lambda target: target.copy_(target.roll(3)))


def test_autocast_and_deterministic_algorithms(offload: storm.Offload) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert check(offload, F.cross_entropy, dtype=torch.bfloat16)
        assert check(offload, F.cross_entropy)
    torch.use_deterministic_algorithms(True)
    try:
        assert check(offload, F.cross_entropy)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("compiled_in_block", [True, False])
def test_compiled_code_has_pytorch_s_in_its_graph(
    compiled_in_block: bool, offload: storm.Offload
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    loss_of = torch.compile(
        lambda x, target: F.cross_entropy(x * 2, target), backend=backend, fullgraph=True
    )
    x, target = make()
    with offload if compiled_in_block else nullcontext():
        loss_of(x, target)
    with nullcontext() if compiled_in_block else offload:
        loss_of(x, target)
    assert len(graphs) == 1
    assert F.cross_entropy in [node.target for node in graphs[0].graph.nodes]


def test_a_function_that_the_script_has_put_in_its_place_is_called(
    offload: storm.Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, target = make()
    monkeypatch.setattr(F, "cross_entropy", lambda logits, *_, **__: logits.sum())
    with offload:
        assert same(nn.CrossEntropyLoss()(x, target), x.sum())
        in_blocks.substitute()
        assert same(nn.CrossEntropyLoss()(x, target), x.sum())


@pytest.mark.parametrize("wrong", ["loss", "gradient"])
def test_other_bits_are_not_trusted(
    wrong: str, offload: storm.Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def altered(logits: Tensor, *arguments: Any) -> Tensor:
        calls.append(logits)
        loss = F.cross_entropy(logits, arguments[0])
        if wrong == "loss":
            return loss * (1 + 2**-23)
        return loss + (logits[0, 0] - logits[0, 0].detach()) * 1e-6

    monkeypatch.setattr(in_blocks, "in_tiles", altered)
    x, target = make()
    with offload:
        for _ in range(3):
            loss = F.cross_entropy(x, target)
            assert nodes_of(loss) == nodes_of(in_blocks._plain(x, target))
    assert len(calls) == 1


def test_a_proof_takes_fewer_rows_where_memory_is_short(
    offload: storm.Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    compare = in_blocks._compared

    def short(call: Any) -> bool:
        compared.append(len(call.logits))
        if compared[-1] > ROWS // 3:
            raise torch.OutOfMemoryError
        return compare(call)

    monkeypatch.setattr(in_blocks, "_compared", short)
    assert check(offload, F.cross_entropy)
    assert compared == [ROWS, ROWS // 2, ROWS // 4]
