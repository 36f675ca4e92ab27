"""Compiled steps: bit for bit what the function does, offloaded or not, and whole or not at all."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.errors import UsageError
from storm_client.step import compiled
from support.compiled_programs import blocks, perceptron
from support.daemon_process import DaemonProcess
from support.steps import OPTIMIZERS, PROGRAMS, everything, step_of, train
from support.training import assert_identical, seeded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

DEADLINE_SECONDS = 60.0

Wrap = Callable[..., compiled.CompiledStep]


OFFLOADED = ("a_transformer", "autocast", "writes_in_place")
"""Where something has to leave for the least peak: of the others all may stay, or is recomputed."""

STEPS = 3
"""The first makes the optimizer's state, the second is another capture, which the third uses."""


def same(step: Callable[..., object]) -> Callable[..., object]:
    return step


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "dropout_and_batch_norm"])
def test_every_program_gives_the_bits_of_the_function(
    name: str, device: str, wrap: Wrap, cpu_costs: None
) -> None:
    optimizer = "adamw" if name == "a_transformer" else "sgd"
    expected = train(name, optimizer, same, device, STEPS)
    made: list[compiled.CompiledStep] = []

    def wrapped(step: Callable[..., object]) -> compiled.CompiledStep:
        made.append(wrap(step))
        return made[-1]

    assert_identical(train(name, optimizer, wrapped, device, STEPS), expected)
    if name in OFFLOADED:
        assert made[0].stats().offloaded_bytes > 0


SELDOM = ("adam", "adam_tensor_lr", "adagrad", "nadam", "adamax")


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(one, marks=pytest.mark.slow) if one in SELDOM else one
        for one in OPTIMIZERS
        if one not in ("sgd", "adamw")  # above
    ],
)
def test_every_optimizer_gives_the_bits_of_the_function(
    optimizer: str, device: str, wrap: Wrap
) -> None:
    expected = train("dropout_and_batch_norm", optimizer, same, device, STEPS)
    assert_identical(train("dropout_and_batch_norm", optimizer, wrap, device, STEPS), expected)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        pytest.param("writes_in_place", "sgd", marks=pytest.mark.slow),
        # whose state, which the first step makes, is one capture more
        pytest.param("convolutions", "momentum", marks=pytest.mark.slow),
        pytest.param("a_transformer", "momentum", marks=pytest.mark.slow),
    ],
)
def test_generated_code_gives_the_same_bits_with_offload(
    name: str, optimizer: str, device: str, wrap: Wrap
) -> None:
    without = train(name, optimizer, partial(wrap, codegen="inductor", min_bytes=1 << 40), device)
    offloaded = train(name, optimizer, partial(wrap, codegen="inductor"), device)
    assert_identical(offloaded, without)
    if name != "convolutions":  # dropout has numbers of Inductor's
        eager = train(name, optimizer, same, device)
        for one, other in zip(offloaded, eager, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_may_update_twice(wrap: Wrap, kind: type[torch.optim.Optimizer]) -> None:
    """The second forward pass comes after numbers that only a run knows."""

    def run(
        make: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]],
    ) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(8, 8)
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(net.parameters(), lr=1e-2, **options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def step(x: Tensor) -> Tensor:
            for _ in range(2):
                loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return loss

        call, losses = make(step), []
        for n in range(4):
            losses.append(call(seeded("cpu", 4, 8, seed=n)).detach())
            schedule.step()
        return [*losses, *everything(net, optimizer, "cpu")]

    assert_identical(run(partial(wrap, codegen="inductor")), run(lambda step: step))


def test_generated_code_keeps_copies_of_what_a_step_updates_by_itself(wrap: Wrap) -> None:
    """Two graphs that are compiled read the weights' copy. Inductor would leave out `before`."""

    def run(make: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

        def step(x: Tensor) -> Tensor:
            before = [one.detach().clone() for one in net.parameters()]
            for _ in range(2):
                loss = net(x).square().mean()
                loss.backward()
                with torch.no_grad():
                    for one in net.parameters():
                        assert one.grad is not None
                        one.sub_(one.grad * 0.5)
                        one.grad = None
            with torch.no_grad():
                for one, other in zip(net.parameters(), before, strict=True):
                    one.lerp_(other, 0.5)
            return loss

        call = make(step)
        losses = [call(seeded("cpu", 6, 8, seed=n)).detach() for n in range(3)]
        return [*losses, *net.parameters()]

    without = run(partial(wrap, codegen="inductor", min_bytes=1 << 40))
    assert_identical(run(partial(wrap, codegen="inductor", budget="least")), without)
    for one, other in zip(without, run(same), strict=True):
        torch.testing.assert_close(one, other)


def test_an_optimizer_that_a_step_makes_ends_with_it(wrap: Wrap) -> None:
    def run(make: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(8, 4)
        outer = torch.optim.AdamW(net.parameters(), lr=1e-2)

        def step(x: Tensor) -> Tensor:
            learner = copy.deepcopy(net)
            inner = torch.optim.SGD(learner.parameters(), lr=0.1, momentum=0.9)
            for _ in range(2):
                inner.zero_grad()
                learner(x).square().mean().backward()
                inner.step()
            loss = learner(x).square().mean()
            made = torch.autograd.grad(loss, list(learner.parameters()))
            for one, gradient in zip(net.parameters(), made, strict=True):
                one.grad = gradient
            outer.step()
            outer.zero_grad()
            return loss

        call = make(step)
        losses = [call(seeded("cpu", 6, 8, seed=n)).detach() for n in range(4)]
        return [*losses, *everything(net, outer, "cpu")]

    assert_identical(run(wrap), run(same))


class Training:
    """A small step, and all that it changes."""

    def __init__(self, device: str = "cpu", **options: object) -> None:
        torch.manual_seed(0)
        self.device = device
        self.net = nn.Sequential(nn.Linear(32, 16), nn.Dropout(0.5), nn.Linear(16, 4)).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, **options)

    def step(self, x: Tensor) -> Tensor:
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def everything(self) -> list[Tensor]:
        return everything(self.net, self.optimizer, self.device)


def both(
    wrap: Wrap,
    run: Callable[[Training, Callable[..., Tensor]], None],
    **options: object,
) -> compiled.CompiledStep:
    """Do the same with a step and with what is compiled of it, and compare."""
    plain = Training(**options)
    torch.manual_seed(5)
    run(plain, plain.step)
    expected = plain.everything()
    other = Training(**options)
    step = wrap(other.step)
    torch.manual_seed(5)
    run(other, step)
    assert_identical(other.everything(), expected)
    return step


def count(step: compiled.CompiledStep) -> int:
    """Return how many captures are kept."""
    return len(step.captures())


def test_what_a_scheduler_sets_takes_effect_without_another_capture(wrap: Wrap) -> None:
    def run(training: Training, step: Callable[..., Tensor]) -> None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            training.optimizer, max_lr=0.1, total_steps=8
        )
        for n in range(4):
            step(seeded("cpu", 8, 32, seed=n))
            schedule.step()

    assert count(both(wrap, run)) == 2  # the first makes the optimizer's state
    assert count(both(wrap, run, fused=True)) == 2
    assert count(both(wrap, run, foreach=True)) == 2


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that a run calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_gradients_are_clipped_by_the_kernels_for_lists(device: str, wrap: Wrap) -> None:
    """On a GPU the norms of single gradients have other bits."""

    def run(compile_: Callable[..., Callable[..., Tensor]]) -> list[Tensor]:
        net = perceptron(device)
        optimizer = torch.optim.AdamW(net.parameters())
        norms = []

        def step(x: Tensor) -> Tensor:
            net(x).float().square().mean().backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        call = compile_(step)
        for number in range(12):
            with Operations() as operations:
                norms.append(call(seeded(device, 16, 32, seed=number)))
        assert {"aten._foreach_norm.Scalar", "aten._foreach_mul_.Tensor"} <= {*operations.names}
        return [*norms, *everything(net, optimizer, device)]

    assert_identical(run(wrap), run(same))


def test_other_settings_modes_and_attributes_are_captured_anew(wrap: Wrap) -> None:
    def run(training: Training, step: Callable[..., Tensor]) -> None:
        x = seeded("cpu", 8, 32)
        step(x)
        training.optimizer.param_groups[0]["weight_decay"] = 0.5
        step(x)
        training.net.eval()
        step(x)
        training.net.train()
        training.net[1].p = 0.25
        step(x)
        training.net[2] = nn.Linear(16, 4)
        step(x)
        training.net[0].bias.requires_grad_(False)
        step(x)

    both(wrap, run)


def test_another_shape_is_captured_anew_and_so_many_are_kept(wrap: Wrap) -> None:
    def run(training: Training, step: Callable[..., Tensor]) -> None:
        for rows in (4, 6, 8, 4):
            step(seeded("cpu", rows, 32))

    assert count(both(partial(wrap, captures=2), run)) == 2


def test_of_captures_for_like_arguments_the_one_used_last_is_kept(wrap: Wrap) -> None:
    training = Training()
    step = wrap(training.step, captures=2)
    x = seeded("cpu", 8, 32)
    step(x)  # makes the optimizer's state
    step(x)
    used = step.captures()[-1]
    training.net.eval()
    step(x)
    training.net.train()
    step(x)
    assert step.captures()[-1] is used
    training.net[1].p = 0.25
    step(x)
    training.net[1].p = 0.5
    step(x)
    assert step.captures()[-1] is used
    assert count(step) == 2


def test_a_state_that_is_loaded_is_used(wrap: Wrap) -> None:
    def run(training: Training, step: Callable[..., Tensor]) -> None:
        x = seeded("cpu", 8, 32)
        step(x)
        kept = copy.deepcopy((training.net.state_dict(), training.optimizer.state_dict()))
        step(x)
        training.net.load_state_dict(kept[0])
        training.optimizer.load_state_dict(kept[1])
        step(x)
        for parameter in training.net.parameters():
            parameter.data = parameter.data * 2
        step(x)

    both(wrap, run)


def test_parameters_may_be_swapped_between_steps(wrap: Wrap) -> None:
    """PyTorch swaps no tensor that has a weak reference; the step has some in a list, too."""

    class Clipping(Training):
        def step(self, x: Tensor) -> None:
            self.net(x).square().mean().backward()
            for parameter in self.parameters:
                parameter.grad.clamp_(-0.1, 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def run(make: Callable[..., object]) -> list[Tensor]:
        training = Clipping()
        training.parameters = list(training.net.parameters())
        step = make(training.step)
        for _ in range(3):
            step(seeded("cpu", 8, 32))
            for parameter in training.parameters:
                other = nn.Parameter(parameter.detach() * 2)
                torch.utils.swap_tensors(parameter, other)
        return training.everything()

    torch.manual_seed(5)
    expected = run(lambda step: step)
    torch.manual_seed(5)
    assert_identical(run(wrap), expected)


def test_gradients_that_are_left_are_added_to(wrap: Wrap) -> None:
    def run(training: Training, step: Callable[..., Tensor]) -> None:
        x = seeded("cpu", 8, 32)
        step(x)
        training.net(x).sum().backward()
        step(x)
        step(x)

    both(wrap, run)


def test_gradients_that_others_took_the_place_of_are_added_to(wrap: Wrap) -> None:
    """The step knows them by what has them, be it a parameter or another argument each time."""

    class Accumulating(Training):
        def step(self, x: Tensor) -> None:
            self.net(x).square().mean().backward()
            self.optimizer.step()

    def run(training: Accumulating, step: Callable[..., object]) -> list[Tensor]:
        torch.manual_seed(5)
        found = []
        for n in range(8):
            if n in (3, 6):
                training.optimizer.zero_grad()  # the gradients of a former capture are no more
            if n in (2, 4):
                for parameter in training.net.parameters():
                    parameter.grad = torch.full_like(parameter, n)
            x = seeded("cpu", 8, 32, seed=n, grad=True)
            x.grad = torch.full_like(x, n)
            step(x)
            found.append(x.grad)
        return [*found, *training.everything()]

    plain, other = Accumulating(), Accumulating()
    expected = run(plain, plain.step)
    assert_identical(run(other, wrap(other.step)), expected)


def test_gradients_of_arguments_are_put_on_the_arguments(wrap: Wrap) -> None:
    net = perceptron("cpu")

    def step(x: Tensor) -> None:
        net(x).square().mean().backward()
        for parameter in net.parameters():
            parameter.grad = None

    call = wrap(step)
    for n in range(3):
        x, expected = (seeded("cpu", 4, 32, seed=n, grad=True) for _ in range(2))
        call(x)
        step(expected)
        assert_identical([x.grad], [expected.grad])


def test_several_optimizers_and_results_of_every_kind(wrap: Wrap) -> None:
    def make(call: Callable[..., object]) -> list[Tensor]:
        torch.manual_seed(0)
        one, two = nn.Linear(8, 8), nn.Linear(8, 8)
        first = torch.optim.Adam(one.parameters(), lr=1e-2)
        second = torch.optim.SGD(two.parameters(), lr=1e-2, momentum=0.9)

        def step(batch: dict[str, Tensor], scale: float) -> dict[str, object]:
            fake = one(batch["x"])
            loss = (two(fake) - batch["y"]).square().mean() * scale
            loss.backward()
            first.step()
            second.step()
            number = loss.item()
            first.zero_grad()
            second.zero_grad()
            return {
                "loss": loss,
                "fake": [fake[:2]],
                "scale": scale,
                "weight": one.weight,
                "number": number,
                "x": batch["x"],
                "shape": fake.shape,
            }

        step_ = call(step)
        found = []
        for n in range(3):
            batch = {"x": seeded("cpu", 4, 8, seed=n), "y": seeded("cpu", 4, 8, seed=n + 9)}
            made = step_(batch, 0.5)
            assert made["scale"] == 0.5
            assert made["weight"] is one.weight
            assert made["x"] is batch["x"]
            assert type(made["shape"]) is torch.Size
            assert made["number"] == float(made["loss"].detach())
            found += [made["loss"].detach(), made["fake"][0].detach()]
        return [*found, *everything(one, first, "cpu"), *everything(two, second, "cpu")]

    assert_identical(make(wrap), make(same))


def test_what_is_detached_is_returned_without_gradient(wrap: Wrap) -> None:
    net = perceptron("cpu")
    weight = next(net.parameters())
    net.register_buffer("kept", None)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        net(x).sum().backward()
        net.kept = weight.detach()
        net.zero_grad()
        return weight, weight.detach(), weight.data, weight.detach().detach(), x, x.detach()

    call, x = wrap(step), seeded("cpu", 4, 32, grad=True)
    for _ in range(2):
        made, expected = call(x), step(x)
        assert [one.requires_grad for one in made] == [one.requires_grad for one in expected]
        assert [one.data_ptr() for one in made] == [one.data_ptr() for one in expected]
        assert made[0] is weight
        assert made[4] is x
        assert not net.kept.requires_grad
        made[1].mul_(2)  # as it may be of what is no leaf
        assert_identical(made, step(x))


def test_a_budget_is_kept_and_what_fits_stays(wrap: Wrap) -> None:
    steps = []
    for budget in ("least", 0.8, 1.0):
        net = blocks("cpu", 1)
        step = step_of(net, torch.optim.SGD(net.parameters(), lr=0.1))
        steps.append(wrap(step, budget=budget))
        steps[-1](seeded("cpu", 2, 16, 32))
    offloaded = [step.stats().offloaded_bytes for step in steps]
    assert offloaded[0] > offloaded[2] == 0
    kept = [step.plans()[0].bytes_by_decision["keep"] for step in steps]
    assert kept[0] < kept[1] < kept[2]
    peaks = [step.plans()[0].peak_bytes for step in steps]
    assert peaks == sorted(peaks)
    assert steps[0].explain().layout.bound < steps[2].explain().layout.bound
    with pytest.raises(UsageError, match="least possible"):
        wrap(Training().step, budget=16)(seeded("cpu", 8, 32))


def test_a_training_goes_on_where_a_later_batch_needs_more_than_the_budget(
    wrap: Wrap, caplog: pytest.LogCaptureFixture
) -> None:
    x = seeded("cpu", 8, 32)
    with pytest.raises(UsageError, match="least possible") as refused:
        wrap(Training().step, budget=16)(x)
    least = int(str(refused.value).partition("(")[2].partition(" bytes")[0])
    plain, training = Training(), Training()
    call = wrap(training.step, budget=least)
    for batch in (x, x.repeat(4, 1), x):
        losses = []
        for step in (plain.step, call):
            torch.manual_seed(1)
            losses.append(step(batch).detach())
        assert torch.equal(*losses)
    found = [*training.net.parameters()], [*plain.net.parameters()]
    assert_identical(*found)
    assert sum("least possible" in one.message for one in caplog.records) == 1


def test_tensors_of_numbers_may_index(wrap: Wrap) -> None:
    weight = seeded("cpu", 8, 4, grad=True)

    def step(at: Tensor) -> Tensor:
        loss = (weight[at].exp() * weight[..., [-1]][:2]).sum()
        loss.backward()
        gradient = weight.grad
        weight.grad = None
        return gradient

    call = wrap(step)
    for rows in ([0, 3], [3, 3], [7, 1]):
        assert_identical([call(torch.tensor(rows))], [step(torch.tensor(rows))])


def test_a_compiled_step_in_another_is_a_part_of_it(wrap: Wrap) -> None:
    def run(training: Training, step: Callable[..., Tensor]) -> None:
        outer = step if step == training.step else wrap(lambda x: step(x) * 2)
        for n in range(3):
            x = seeded("cpu", 8, 32, seed=n)
            assert outer(x).grad_fn is None or outer is step

    both(wrap, run)


# --- what fails ---------------------------------------------------------------------------------


def test_what_fails_before_the_update_changes_nothing(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon("--pool-bytes", "64MiB")
    training = Training()
    training.net = blocks("cpu", 1)
    training.optimizer = torch.optim.AdamW(training.net.parameters(), lr=1e-2)
    with storm.connect(daemon.address, embedded="never", timeout=DEADLINE_SECONDS) as client:
        step = storm.compile_step(training.step, client=client, min_bytes=1, codegen="eager")
        x = seeded("cpu", 2, 16, 32)
        step(x)
        before = training.everything()[:-2]
        daemon.kill()
        with pytest.raises(storm.StormError):
            step(x)
        assert_identical(training.everything()[:-2], before)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Have Ctrl-C raise, as it does not in a process that a shell has put into the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_takes_effect_before_the_update_or_behind_it(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, expected = Training(), Training()
    step = wrap(training.step)
    x = seeded("cpu", 8, 32)
    for one in (training, expected):
        torch.manual_seed(3)
        (step if one is training else one.step)(x)
        one.state = torch.get_rng_state()
    before = training.everything()[:-2]
    finish = compiled._finish

    def interrupted(*arguments: object) -> None:
        signal.raise_signal(signal.SIGINT)
        finish(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(compiled, "uninterrupted", lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            step(x)
        assert_identical(training.everything()[:-2], before)
    monkeypatch.setattr(compiled, "_finish", interrupted)
    torch.set_rng_state(training.state)
    with pytest.raises(KeyboardInterrupt):
        step(x)
    torch.set_rng_state(expected.state)
    expected.step(x)
    assert_identical(training.everything()[:-2], expected.everything()[:-2])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_may_be_called_by_another_thread(wrap: Wrap) -> None:
    def run(training: Training, step: Callable[..., Tensor]) -> None:
        for n in range(3):
            thread = threading.Thread(target=step, args=(seeded("cpu", 8, 32, seed=n),))
            thread.start()
            thread.join()

    both(wrap, run)


def test_a_compiled_step_is_neither_copied_nor_pickled(wrap: Wrap) -> None:
    step = wrap(Training().step)
    with pytest.raises(UsageError, match="belongs to the model"):
        copy.deepcopy(step)
    with pytest.raises(UsageError, match="belongs to the model"):
        pickle.dumps(step)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"codegen": "c"}, "codegen is 'c'"),
        ({"captures": 0}, "captures is 0"),
        ({"budget": -1}, "budget"),
        ({"min_bytes": -1}, "min_bytes"),
        ({"codec": "zip"}, "codec"),
        ({"client": 3}, "client is of type int"),
    ],
)
def test_bad_values_are_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        storm.compile_step(Training().step, **options)
