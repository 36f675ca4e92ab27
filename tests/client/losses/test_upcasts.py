"""A float32 copy of logits is not made for a loss; whoever else looks at one finds it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import storm_client as storm
import torch
import torch.nn.functional as F
from storm_client.losses import upcasts
from storm_client.losses.deferred import Deferred
from support.following import follow_by
from support.peak_memory import peak_bytes
from support.same_bits import same, set_tiles
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

ROWS, CLASSES = 200, 300


pytestmark = pytest.mark.usefixtures("new_losses")


@pytest.fixture
def offload(client: storm.Client) -> storm.Offload:
    return client.offload(min_bytes=1024)


def make(dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return a head's input, which takes a gradient, and targets of which some are ignored."""
    torch.manual_seed(7)
    target = torch.randint(CLASSES, (ROWS,))
    target[::7] = -100
    return torch.randn(ROWS, CLASSES).to(device, dtype).requires_grad_(), target.to(device)


Step = Callable[[Tensor, Tensor, list[Any]], Tensor]


def run(
    step: Step, block: AbstractContextManager[Any], x: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, list[Any]]:
    """Return a step's loss, gradient, and what it has noted."""
    noted: list[Any] = []
    with block:
        loss = step(x, target, noted)
    (gradient,) = torch.autograd.grad(loss, x)
    return loss.detach(), gradient, noted


def plain(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
    logits = (x * 2).float()
    noted.append(type(logits))
    return F.cross_entropy(logits, target)


def shifted(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
    logits = (x * 2).view(4, 50, CLASSES).float()
    noted.append(type(logits))
    logits = logits[..., :-1, :].contiguous().view(-1, CLASSES)
    return nn.CrossEntropyLoss()(logits, target.view(4, 50)[..., 1:].flatten())


def flattened(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
    logits = (x * 2).view(4, 50, CLASSES).float()
    noted.append(type(logits))
    logits = logits.flatten(0, 1)
    assert logits.shape == (ROWS, CLASSES)
    assert (logits.dtype, logits.requires_grad, logits.ndim) == (torch.float32, True, 2)
    return F.cross_entropy(logits, target, reduction="sum") / 7


def transposed(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
    logits = (x * 2).view(4, 50, CLASSES).float()
    noted.append(type(logits))
    losses = F.cross_entropy(logits.transpose(1, 2), target.view(4, 50), reduction="none")
    return losses.sum()


STEPS = {"plain": plain, "shifted": shifted, "flattened": flattened, "transposed": transposed}


@pytest.mark.parametrize(
    ("step", "dtype"), [("plain", torch.float16), *((step, torch.bfloat16) for step in STEPS)]
)
def test_a_copy_for_a_loss_is_deferred_from_the_third_step_on(
    step: str, dtype: torch.dtype, device: str, offload: storm.Offload
) -> None:
    x, target = make(dtype, device)
    expected = run(STEPS[step], nullcontext(), x, target)
    for number in range(5):
        found = run(STEPS[step], offload, x, target)
        assert same(found[0], expected[0])
        assert same(found[1], expected[1])
        defers = number > 1 and (device == "cpu" or step != "transposed")
        assert found[2] == [Deferred if defers else Tensor]
    assert run(STEPS[step], nullcontext(), x, target)[2] == [Tensor]


def test_a_step_has_no_float32_beside_tiles(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tiles(monkeypatch, 1 << 18)
    torch.manual_seed(1)
    x, target = torch.randn(512, 64).bfloat16(), torch.randint(2048, (512,))
    weight = torch.randn(64, 2048).bfloat16().requires_grad_()
    offload = client.offload(min_bytes="1GiB")

    def step() -> None:
        with offload:
            loss = F.cross_entropy((x @ weight).float(), target)
        loss.backward()
        weight.grad = None

    taken = [peak_bytes(step) for _ in range(5)]
    logits = 512 * 2048 * 2
    # Processors without arithmetic for bfloat16 compute products from copies in float32.
    least = max(logits, peak_bytes(lambda: torch.mm(x, weight.detach())))
    assert taken[3:] == pytest.approx([least] * 2, abs=4 * (1 << 18) + 2 * weight.nbytes)
    assert taken[0] > 4 * logits


def _in_place(logits: Tensor) -> Any:
    return logits.mul_(0.5)


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "result": lambda one: one.argmax(1),
    "numbers": lambda one: one.detach().numpy().copy(),
    "list": lambda one: one[0].tolist(),
    "item": lambda one: one[3, 4].item(),
    "index": lambda one: one[torch.arange(3)],
    "in place": _in_place,
    "text": lambda one: str(one).partition("grad_fn")[0],
    "deep copy": lambda one: copy.deepcopy(one.detach()),
    "pickle": lambda one: pickle.loads(pickle.dumps(one.detach())),
    "pointer": lambda one: one.data_ptr() != 0,
    "storage": lambda one: one.untyped_storage().nbytes(),
    "view": lambda one: one.flatten().sum().detach(),
    "statistics": lambda one: torch.log_softmax(one, 1).detach(),
    "version": lambda one: one._version,
    "other type": lambda one: one.double().detach(),
    "cast back": lambda one: one.bfloat16().detach(),
    "inference mode": torch.inference_mode()(lambda one: one.argmax(1).tolist()),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_at_a_copy_finds_it(look: str, offload: storm.Offload) -> None:
    looks = False

    def step(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
        logits = (x * 2).float()
        noted.append(type(logits))
        noted.append(LOOKS[look](logits) if looks else None)
        return F.cross_entropy(logits, target)

    x, target = make()
    for _ in range(3):
        assert run(step, offload, x, target)[2][0] in (Tensor, Deferred)
    looks = True
    expected = run(step, nullcontext(), x, target)
    found = run(step, offload, x, target)
    assert found[2][0] is Deferred
    seen, there = found[2][1], expected[2][1]
    if isinstance(there, Tensor):
        assert type(seen) is Tensor
        assert same(seen.detach(), there.detach())
    elif not isinstance(there, (str, bool)):
        assert (seen == there).all() if hasattr(there, "all") else seen == there
    else:
        assert seen == there
    assert same(found[0], expected[0])
    assert same(found[1], expected[1])
    assert run(step, offload, x, target)[2][0] is Tensor  # that line's are made from now on


def write_to_a_view(_: Tensor, found: Tensor) -> None:
    found[3:].mul_(0.5)


@torch.no_grad()
def change_the_logits(logits: Tensor, _: Tensor) -> None:
    logits.mul_(2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (write_to_a_view, r"float\(\) of logits was changed in place"),
        (change_the_logits, r"were changed in place after float\(\)"),
    ],
)
def test_what_changes_before_the_loss_is_noticed(
    change: Callable[[Tensor, Tensor], None], said: str, offload: storm.Offload
) -> None:
    changes = False

    def step(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
        logits = x * 2
        found = logits.float()
        if changes:
            change(logits, found)
        return F.cross_entropy(found, target)

    x, target = make()
    for _ in range(3):
        run(step, offload, x, target)
    changes = True
    with pytest.raises(RuntimeError, match=said):
        run(step, offload, x, target)
    run(step, nullcontext(), x, target)


def test_a_gradient_flows_through_what_looks_too(offload: storm.Offload) -> None:
    uses = False

    def step(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
        logits = (x * 2).float()
        noted.append(type(logits))
        loss = F.cross_entropy(logits, target)
        if uses:
            loss = loss + logits.logsumexp(1).square().mean() * 1e-4
            loss = loss + _Doubled.apply(logits).mean()
            logits.register_hook(noted.append)
        return loss

    x, target = make()
    for _ in range(3):
        run(step, offload, x, target)
    uses = True
    expected = run(step, nullcontext(), x, target)
    found = run(step, offload, x, target)
    assert found[2][0] is Deferred
    assert same(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor) -> Tensor:
        ctx.save_for_backward(one)
        return one * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert ctx.saved_tensors[0].dtype == torch.float32
        return gradient * 2


def test_logits_that_others_read_have_the_same_gradient(offload: storm.Offload) -> None:
    def step(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
        logits = x * 2
        found = logits.float()
        noted.append(type(found))
        more = logits.square().mean().float() + logits.logsumexp(1).float().sum() / 300
        return F.cross_entropy(found, target) + more + logits.abs().mean().float()

    x, target = make()
    expected = run(step, nullcontext(), x, target)
    for kind in (Tensor, Tensor, Deferred, Deferred):
        found = run(step, offload, x, target)
        assert found[2] == [kind]
        assert same(found[0], expected[0])
        assert same(found[1], expected[1])


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("holds", ["nothing", "copy", "view", "logits"])
def test_a_gradient_takes_the_logits_memory_where_nobody_has_them(
    holds: str, keeps: bool, client: storm.Client
) -> None:
    x, target = make()
    offload = client.offload(min_bytes="1GiB" if keeps else 1024)
    addresses: list[int] = []

    def forward() -> tuple[Tensor, dict[str, Tensor]]:
        logits = x * 2
        logits.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
        addresses.append(logits.data_ptr())
        copied = logits.float()
        held = {"copy": copied, "view": copied.view(-1), "logits": logits}
        loss = F.cross_entropy(copied, target)
        return loss, {holds: held[holds]} if holds in held else {}

    for _ in range(4):
        addresses.clear()
        with offload:
            loss, held = forward()
        loss.backward()
        del loss
    assert len(upcasts._deferring) == 1
    is_in_place = addresses[0] == addresses[1]
    assert is_in_place <= (not held)
    if keeps:
        assert is_in_place is not bool(held)
    for one in held.values():
        expected = (x * 2).detach().float().view(one.shape)
        assert same(one.float().detach(), expected)


def test_a_second_derivative_of_a_deferred_copy_is_an_error(offload: storm.Offload) -> None:
    x, target = make()
    for _ in range(3):
        run(plain, offload, x, target)
    noted: list[Any] = []
    with offload:
        loss = plain(x, target, noted)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative by way of float"):
        gradient.float().square().sum().backward()
    with offload:
        plain(x, target, noted)
    assert noted == [Deferred, Tensor]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_that_reads_a_deferred_copy_is_refused(
    backend: str, offload: storm.Offload
) -> None:
    """Traced, it would become a tensor that is not in the graph: no gradient through it."""
    compiled = torch.compile(lambda one: one.logsumexp(-1).square().mean(), backend=backend)
    with pytest.raises(Exception, match=r"compiled code reads float.*loss=.plain"):
        read_once_deferred(compiled, offload)


def read_once_deferred(read: Callable[[Tensor], Any], offload: storm.Offload) -> None:
    """Train until copies are deferred, and have `read` read one."""
    reads, noted = False, list[Any]()

    def step(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
        logits = (x * 2).float()
        noted.append(type(logits))
        found = read(logits) if reads else 0.0
        return F.cross_entropy(logits, target) + found

    x, target = make()
    for _ in range(3):
        run(step, offload, x, target)
    reads = True
    try:
        with offload:
            step(x, target, noted)
    finally:
        assert noted == [Deferred]


def in_make_fx(logits: Tensor) -> Any:
    return make_fx(lambda one: one.logsumexp(-1))(logits)


@torch.no_grad()
def in_trace(logits: Tensor) -> Any:
    return torch.jit.trace(lambda one: one.argmax(-1), (logits,))


def in_fake_mode(logits: Tensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return logits.logsumexp(-1)


@pytest.mark.parametrize("is_read_before", [False, True])
@pytest.mark.parametrize("trace", [in_make_fx, in_trace, in_fake_mode])
def test_traced_code_that_reads_a_deferred_copy_is_refused(
    trace: Callable[[Tensor], Any], is_read_before: bool, offload: storm.Offload
) -> None:
    """What it traced would return the present values, whatever it is given."""

    def read(logits: Tensor) -> Any:
        if is_read_before:
            logits.sum()
        return trace(logits)

    with pytest.raises(RuntimeError, match=r"traced or compiled code.*loss=.plain"):
        read_once_deferred(read, offload)


def assert_same_once_deferred(
    step_that: Callable[[bool], Step],
    offload: storm.Offload,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Compare a step that does more than three before it, after which its copy is deferred."""
    x, target = make(dtype)
    for _ in range(3):
        run(step_that(False), offload, x, target)
    expected = run(step_that(True), nullcontext(), x, target)
    found = run(step_that(True), offload, x, target)
    assert found[2][0] is Deferred
    assert all(map(same, found[2][1:], expected[2][1:]))
    assert same(found[0], expected[0])
    assert same(found[1], expected[1])


def refused_once_deferred(
    step_that: Callable[[bool], Step], offload: storm.Offload, match: str
) -> tuple[Any, Any]:
    """Check that a changed step raises once its copy is deferred.

    Return what it gives then, without offload and with it.
    """
    x, target = make()
    for _ in range(3):
        run(step_that(False), offload, x, target)
    changed = step_that(True)
    with pytest.raises(RuntimeError, match=match):
        run(changed, offload, x, target)
    return run(changed, nullcontext(), x, target), run(changed, offload, x, target)


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "vmap": lambda one: torch.vmap(lambda by: (one * by).logsumexp(-1).mean())(torch.rand(2)),
    "jacfwd": lambda one: torch.func.jacfwd(lambda by: (one * by).logsumexp(-1).mean())(
        torch.tensor(1.5)
    ),
    "jvp of its values": lambda one: torch.func.jvp(
        lambda by: (one.detach() * by).logsumexp(-1), (torch.tensor(1.5),), (torch.ones(()),)
    )[1],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_function_that_is_transformed_reads_a_deferred_copy_of_its_surroundings(
    transform: str, offload: storm.Offload
) -> None:
    def step_that(reads: bool) -> Step:
        def step(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
            torch.manual_seed(3)
            logits = (x * 2).float()
            noted.append(type(logits))
            found = TRANSFORMS[transform](logits).sum() if reads else 0.0
            return F.cross_entropy(logits, target) + found

        return step

    assert_same_once_deferred(step_that, offload)


def clamped(logits: Tensor) -> Any:
    return logits.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))


READERS_OF_GRADIENTS: dict[str, Callable[[Tensor], Any]] = {
    "a hook": clamped,
    "a hook of the node": lambda logits: logits.grad_fn.register_prehook(
        lambda gradients: (gradients[0] * 2,)
    ),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda logits: logits.amax(),
    "a quotient": lambda logits: logits.div_(3.0),
    "a mask": lambda logits: logits.__setitem__((slice(None), slice(5, 9)), 4.0),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("reader", READERS_OF_GRADIENTS)
def test_who_reads_a_gradient_gets_that_of_the_written_copy(
    reader: str, write: str, offload: storm.Offload
) -> None:
    def step_that(writes: bool) -> Step:
        def step(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
            logits = (x * 2).float()
            noted.append(type(logits))
            if writes:
                WRITES[write](logits)
                READERS_OF_GRADIENTS[reader](logits)
            return F.cross_entropy(logits, target)

        return step

    assert_same_once_deferred(step_that, offload)


def test_several_readers_add_their_gradients_in_pytorchs_order(offload: storm.Offload) -> None:
    """Also where a view is made of a copy that was read before."""

    def step_that(reads: bool) -> Step:
        def step(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
            logits = (x * 2).view(4, 50, CLASSES).float()
            noted.append(type(logits))
            first = logits.logsumexp(-1).square().mean() if reads else 0.0
            loss = F.cross_entropy(logits.view(-1, CLASSES), target) + first
            return loss + logits.softmax(-1).square().sum() if reads else loss

        return step

    assert_same_once_deferred(step_that, offload)


def summed(factor: float) -> Callable[[Tensor], Tensor]:
    """Return a reader whose gradient is of the size of a summed loss's, and unlike any other's."""
    return lambda one: (one * (one.detach() * factor).cos()).sum()


class Waves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor) -> Tensor:
        ctx.save_for_backward(one)
        return one.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (one,) = ctx.saved_tensors
        waves: Tensor = gradient * (one * 7).sin()
        return waves


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a view": lambda one: summed(5)(one.view(20, 10, CLASSES)),
    "a part": lambda one: summed(5)(one[9:]),
    "a custom function": Waves.apply,
}


@pytest.mark.parametrize("is_read_before", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_between_others_adds_its_gradient_in_pytorchs_order(
    reader: str, is_read_before: bool, offload: storm.Offload
) -> None:
    def step_that(reads: bool) -> Step:
        def step(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
            logits = (x * 2).float()
            noted.append(type(logits))
            before = summed(3)(logits) if reads and is_read_before else 0.0
            loss = F.cross_entropy(logits, target, reduction="sum") + before
            if reads:
                for one in (summed(2), READERS[reader], summed(11)):
                    loss = loss + one(logits)
            return loss

        return step

    assert_same_once_deferred(step_that, offload, torch.float16)


@pytest.mark.parametrize("write", WRITES)
def test_a_retained_gradient_is_that_of_the_copy_whoever_reads_it_later(
    write: str, offload: storm.Offload
) -> None:
    def step_that(reads: bool) -> Step:
        def step(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
            logits = (x * 2).float()
            noted.append(type(logits))
            if reads:
                logits.retain_grad()
                WRITES[write](logits)
            loss = F.cross_entropy(logits, target)
            if reads:
                loss.backward(retain_graph=True)
                noted.append(logits.grad)
            return loss

        return step

    assert_same_once_deferred(step_that, offload)


class InTable(Tensor):
    """Looks functions up in a table, as many subclasses do."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in TABLE or func is Tensor.float:
            return torch.full((), 3.0)
        return super().__torch_function__(func, types, args, kwargs)


TABLE = {Tensor.float}


class Noting(TorchFunctionMode):
    def __init__(self, noted: list[Any]) -> None:
        super().__init__()
        self.noted = noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.noted.append(func)
        return func(*args, **(kwargs or {}))


def test_subclasses_and_modes_are_passed_pytorchs_own_functions(offload: storm.Offload) -> None:
    x, target = make()
    for _ in range(3):
        run(plain, offload, x, target)
    assert "float" in Tensor.__dict__
    assert Tensor.float in TABLE
    for block in (offload, nullcontext()):
        with block:
            assert x.detach().as_subclass(InTable).float() == 3
    with offload:
        noted: list[Any] = []
        with Noting(noted):
            F.cross_entropy(x.float(), target)
    assert noted == [Tensor.float, F.cross_entropy]


def test_an_interrupt_while_the_class_is_asked_is_not_lost(
    offload: storm.Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's C++ code asks it if a mode is on, and drops what is raised there."""
    x, target = make()
    for _ in range(3):
        run(plain, offload, x, target)

    def interrupted(_: object, tensor: Tensor | None, owner: type | None = None) -> Any:
        if tensor is None:
            raise KeyboardInterrupt
        return found(Tensor.__dict__["float"], tensor, owner)

    found = upcasts._Float.__get__
    monkeypatch.setattr(upcasts._Float, "__get__", interrupted)
    for copied in (x, x.half(), x.detach()):
        with offload, Noting([]), pytest.raises(KeyboardInterrupt):
            copied.float()


@pytest.mark.parametrize("hook", [False, True])
def test_batched_gradients_are_pytorchs(hook: bool, offload: storm.Offload) -> None:
    x, target = make()
    outer = torch.tensor([0.3, 1.7, -2.1])

    def batched(block: AbstractContextManager[Any], noted: list[Any]) -> Tensor:
        with block:
            logits = (x * 2).float()
            noted.append(type(logits))
            if hook:
                logits.register_hook(lambda gradient: gradient * 1.3)
            loss = F.cross_entropy(logits, target)
        return torch.autograd.grad(loss, x, outer, is_grads_batched=True)[0]

    expected, kinds = batched(nullcontext(), []), []
    for _ in range(4):
        assert same(batched(offload, kinds), expected)
    assert kinds[-1] is Deferred


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_custom_function_that_writes_to_a_deferred_copy_is_an_error(
    offload: storm.Offload,
) -> None:
    def step_that(writes: bool) -> Step:
        def step(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
            logits = (x * 2).float()
            noted.append(type(logits))
            return F.cross_entropy(Doubled.apply(logits) if writes else logits, target)

        return step

    expected, found = refused_once_deferred(step_that, offload, "changed by a custom function")
    assert found[2] == [Tensor]
    assert same(found[1], expected[1])


def test_a_hook_on_a_copy_that_a_view_has_changed_is_an_error(offload: storm.Offload) -> None:
    """It would have got the gradient of the copy as it was before."""

    def step_that(writes: bool) -> Step:
        def step(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
            logits = (x * 2).float()
            noted.append(type(logits))
            rows = logits[2:]
            if writes:
                rows.mul_(0.75)
                logits.register_hook(lambda gradient: noted.append(gradient.sum()))
            return F.cross_entropy(rows, target[2:])

        return step

    expected, found = refused_once_deferred(step_that, offload, "changed in place")
    assert found[2][0] is Tensor
    assert same(found[2][1], expected[2][1])
    assert same(found[1], expected[1])


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 2).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


def test_a_custom_function_that_reads_a_written_copy_is_an_error(offload: storm.Offload) -> None:
    """In the graph it would have read the copy as it was before."""

    def step_that(writes: bool) -> Step:
        def step(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
            logits = (x * 2).float()
            noted.append(type(logits))
            if writes:
                logits[2:9] = 0.5
                with torch.no_grad():
                    logits.sum()
                return Summed.apply(logits)
            return F.cross_entropy(logits, target)

        return step

    expected, found = refused_once_deferred(step_that, offload, "changed in place")
    assert found[2] == [Tensor]
    assert same(found[0], expected[0])
    assert same(found[1], expected[1])


def test_no_term_of_a_second_derivative_is_missing(offload: storm.Offload) -> None:
    """The gradient of a matrix holds its input, too, which comes from the same tensor."""
    x, target = make(torch.bfloat16)
    matrix = torch.eye(CLASSES, dtype=x.dtype, requires_grad=True)

    def step(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
        logits = ((x * 2) @ matrix).float()
        noted.append(type(logits))
        return F.cross_entropy(logits, target)

    for _ in range(3):
        run(step, offload, x, target)
    noted: list[Any] = []
    with offload:
        loss = step(x, target, noted)
    assert noted == [Deferred]
    (gradient,) = torch.autograd.grad(loss, matrix, create_graph=True)
    for one in (x, matrix):
        with pytest.raises(RuntimeError, match="a second derivative by way of float"):
            torch.autograd.grad(gradient.sum(), one, allow_unused=True, retain_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_deferred_copy_cast_to_another_type_has_pytorchs_bits(
    offload: storm.Offload, dtype: torch.dtype
) -> None:
    x, target = make()

    def step(entropy: Callable[..., Tensor], x: Tensor, noted: list[Any]) -> Tensor:
        logits = (x * 2).float()
        noted.append(type(logits))
        return entropy(logits)

    def learned(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
        return step(lambda logits: F.cross_entropy(logits, target), x, noted)

    def ours(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
        return step(lambda logits: storm.cross_entropy(logits, target, dtype=dtype), x, noted)

    def theirs(x: Tensor, target: Tensor, noted: list[Any]) -> Tensor:
        return step(lambda logits: F.cross_entropy(logits.to(dtype), target), x, noted)

    for _ in range(3):
        run(learned, offload, x, target)
    loss, gradient, noted = run(ours, offload, x, target)
    assert noted == [Deferred]
    expected, its_gradient, _ = run(theirs, nullcontext(), x, target)
    assert same(loss, expected)
    assert same(gradient, its_gradient)


def test_small_tensors_and_other_calls_are_left_alone(offload: storm.Offload) -> None:
    x, target = make()
    for _ in range(3):
        run(plain, offload, x, target)
    with offload:
        assert type(x[:2].float()) is Tensor
        assert type((x * 2).detach().float()) is Tensor
        assert type((x * 2).float()) is Tensor  # of another line
    assert type((x * 2).float()) is Tensor


@pytest.mark.parametrize("inside", [False, True])
def test_compiled_code_has_the_cast_in_its_graph(inside: bool, offload: storm.Offload) -> None:
    x, target = make()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    before = torch.compile(lambda x: x.float() * 3, backend=backend, fullgraph=True)
    before(x)
    for _ in range(3):
        run(plain, offload, x, target)
    assert "float" in Tensor.__dict__
    after = torch.compile(lambda x: x.float() * 2, backend=backend, fullgraph=True)
    by_class = torch.compile(lambda x: Tensor.float(x) * 2, backend="eager", fullgraph=True)
    assert same(by_class(x).detach(), x.detach().to(torch.float32) * 2)
    with offload if inside else nullcontext():
        for compiled, factor in ((before, 3), (after, 2)):
            assert same(compiled(x).detach(), (x.to(torch.float32) * factor).detach())
    casts = [
        [node.target for node in one.graph.nodes if node.op == "call_method"] for one in graphs
    ]
    assert casts in ([["float"], ["to"]], [["to"], ["to"]])


def test_scripted_and_traced_code_has_it_too(offload: storm.Offload) -> None:
    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float() + 1

    x, target = make()
    for _ in range(3):
        run(plain, offload, x, target)
    with offload:
        expected = x.to(torch.float32) + 1
        assert same(torch.jit.script(Cast())(x), expected)
        assert same(torch.jit.trace(Cast(), x)(x), expected)
        assert same(torch.fx.symbolic_trace(Cast())(x), expected)
        assert same(torch.export.export(Cast(), (x,)).module()(x), expected)
        assert same(torch.vmap(lambda row: row.float() + 1)(x), expected)


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize(
    ("path", "dtype"), [("python", torch.bfloat16), ("compiled", torch.float32)]
)
def test_a_gradient_takes_the_memory_of_logits_that_a_block_keeps(
    path: str,
    dtype: torch.dtype,
    holds: bool,
    client: storm.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of those in float32 `float()` is no copy."""
    followed, offload = follow_by(path, monkeypatch), client.offload(min_bytes=1024, budget=1.0)
    places: list[int] = []
    for _ in range(8):
        x, target = make(dtype)
        with offload:
            logits = x * 2
            loss = F.cross_entropy(logits.float(), target)
        places = [logits.data_ptr()]
        logits.register_hook(lambda gradient, found=places: found.append(gradient.data_ptr()))
        if not holds:
            del logits
        loss.backward()
    assert followed[-1] is (path == "compiled")
    assert (places[0] == places[1]) is not holds
