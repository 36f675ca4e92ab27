"""What the backend compiles: exact, within its budget, and gone when nobody can ask for it."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import storm_client as storm
import torch
from storm_client import compile as storm_compile
from storm_client.compile import backend, target
from storm_client.compile.stored import Stored
from support.compiled_programs import (
    IN_GENERATED_CODE,
    PLAIN,
    PROGRAMS,
    GatedMlp,
    Wrap,
    blocks,
    perceptron,
)
from support.daemon_process import DaemonProcess
from support.training import assert_identical, gradients, seeded
from support.waiting import wait_until
from torch import Tensor, nn

DEADLINE_SECONDS = 60.0

QUICK_IN_GENERATED_CODE = "shapes_that_vary"
"""Of the programs in generated code the one that is compared in the default run."""

SELDOM = ("blocks_of_their_own", "half_precision_used_further", "tied_weights")
"""Compared with the slow tests: the first is below as well, the others are as others are."""

RECOMPUTED = ("views_and_strides", "what_is_saved_and_then_overwritten")
"""Where all is cheaper to recompute than to offload."""


class Compiler:
    """Compiles by the backend, and remembers what it compiled."""

    def __init__(self, client: storm.Client, **options: object) -> None:
        self.client = client
        self.options = {"min_bytes": 1, "codegen": "eager", **options}
        self.made: list[Callable[..., Tensor]] = []

    def __call__(self, model: Callable[..., object]) -> Callable[..., Tensor]:
        self.made.append(storm.compile(model, client=self.client, **self.options))
        return self.made[-1]

    def stats(self) -> list[storm.OffloadStats]:
        return [storm.compiled_stats(one) for one in self.made]

    @property
    def offloaded(self) -> int:
        return sum(stats.offloaded_bytes for stats in self.stats())


def reference(codegen: str, **options: object) -> Wrap:
    return partial(torch.compile, backend=PLAIN[codegen], **options)


def dynamic(name: str) -> dict[str, object]:
    return {"dynamic": True} if name in ("shapes_that_vary", "lengths_rounded_up") else {}


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.slow) if one in SELDOM else one for one in PROGRAMS],
)
def test_results_are_those_without_offload(name: str, device: str, client: storm.Client) -> None:
    expected = PROGRAMS[name](reference("eager", **dynamic(name)), device)
    torch._dynamo.reset()
    wrap = Compiler(client, **dynamic(name))
    assert_identical(PROGRAMS[name](wrap, device), expected)
    assert wrap.offloaded > 0 or name in RECOMPUTED


@pytest.mark.parametrize(
    "name",
    [
        name if name == QUICK_IN_GENERATED_CODE else pytest.param(name, marks=pytest.mark.slow)
        for name in IN_GENERATED_CODE
    ],
)
def test_generated_code_gives_the_same_results_though_a_daemon_takes_nothing(
    name: str, device: str, client: storm.Client, make_daemon: Callable[..., DaemonProcess]
) -> None:
    """What is held instead is not written to, though generated code reuses its buffers."""
    if device == "cuda" and dynamic(name):
        pytest.skip("with lengths that vary Inductor's own sums differ from compile to compile")
    expected = PROGRAMS[name](reference("inductor", **dynamic(name)), device)
    torch._dynamo.reset()
    wrap = Compiler(client, codegen="inductor", **dynamic(name))
    assert_identical(PROGRAMS[name](wrap, device), expected)
    assert wrap.offloaded > 0 or name in RECOMPUTED
    if device == "cuda":
        return
    torch._dynamo.reset()
    daemon = make_daemon("--pool-bytes", "4MiB", "--session-quota-bytes", "4KiB")
    with storm.connect(daemon.address, embedded="never", timeout=DEADLINE_SECONDS) as refused:
        wrap = Compiler(refused, codegen="inductor", **dynamic(name))
        assert_identical(PROGRAMS[name](wrap, device), expected)
        assert sum(stats.kept_bytes for stats in wrap.stats()) > 0 or name in RECOMPUTED


class Perceptron(nn.Module):
    """What torch.compile compiles by either of its spellings: not a module of PyTorch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron("cpu")

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def step(call: Callable[..., Tensor], x: Tensor) -> Tensor:
    loss = call(x).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("whole", [True, False])
def test_the_name_of_the_backend_is_enough(
    whole: bool, monkeypatch: pytest.MonkeyPatch, client: storm.Client
) -> None:
    monkeypatch.setattr(target, "shared_supply", lambda: client._supply)
    monkeypatch.setattr(target, "_SHARED", {})
    nets = [Perceptron(), Perceptron()]
    expected = step(torch.compile(nets[0], backend="aot_eager"), seeded("cpu", 16, 32))
    options = {"min_bytes": 1, "codegen": "eager"}
    if whole:
        calls = [torch.compile(net, backend="stormd", options=options) for net in nets]
    else:
        calls = list(nets)
        for net in nets:
            net.compile(backend="stormd", options=options)
    with pytest.raises(storm.UsageError, match="call the model once before"):
        storm.compiled_plans(calls[0])
    assert torch.equal(step(calls[0], seeded("cpu", 16, 32)), expected)
    assert storm.compiled_stats(calls[0]).saved_bytes > 0
    (plan,) = storm.compiled_plans(calls[0])
    assert plan.bytes_by_decision["offload"] > 0
    assert all("built-in" not in row.operation for row in plan.rows)
    assert "forward" not in str(plan)  # on a CPU nobody knows how long it takes


def test_the_run_before_is_fetched_when_one_has_its_last_value_back(
    monkeypatch: pytest.MonkeyPatch, client: storm.Client
) -> None:
    """Of blocks that are compiled one by one, no graph could begin with another's values."""
    calls = [Compiler(client, budget=0.0)(blocks("cpu", 1)) for _ in range(2)]
    events: list[tuple[str, object]] = []
    fetch, restore = Stored.fetch, Stored.restore

    def fetching(stored: Stored) -> None:
        events.append(("fetch", stored._target))
        fetch(stored)

    def bringing(stored: Stored) -> Tensor:
        events.append(("restore", stored._target))
        return restore(stored)

    def run() -> None:
        calls[1](calls[0](seeded("cpu", 2, 16, 32))).square().mean().backward()

    monkeypatch.setattr(Stored, "fetch", fetching)
    monkeypatch.setattr(Stored, "restore", bringing)
    run()
    first, second = (backend.compiled_of(call).target for call in calls)
    last = max(at for at, event in enumerate(events) if event == ("restore", second))
    assert first.graphs[0].early
    assert events[last + 1] == ("fetch", first)
    assert all(target is first for _, target in events[last + 1 :])


# --- budgets ------------------------------------------------------------------------------------


def test_the_peak_grows_with_the_budget_and_stays_below(client: storm.Client) -> None:
    peaks, shares = [], (0.0, 0.3, 1.0)
    for share in shares:
        torch._dynamo.reset()
        wrap = Compiler(client, budget=share)
        step(wrap(blocks("cpu", 1)), seeded("cpu", 2, 16, 32))
        (plan,) = storm.compiled_plans(wrap.made[0])
        saved = sum(row.nbytes for row in plan.rows)
        least = peaks[0] if peaks else plan.peak_bytes
        assert plan.peak_bytes <= max(least, int(share * saved))
        peaks.append(plan.peak_bytes)
    assert peaks == sorted(peaks)
    assert peaks[-1] > peaks[0]


def test_a_budget_below_the_least_possible_is_refused_by_name(client: storm.Client) -> None:
    wrap = Compiler(client, budget=1)
    call = wrap(perceptron("cpu"))
    with pytest.raises(storm.UsageError, match="least possible") as refused:
        call(seeded("cpu", 16, 32))
    least = int(str(refused.value).partition("(")[2].partition(" bytes")[0])
    torch._dynamo.reset()
    step(Compiler(client, budget=least)(perceptron("cpu")), seeded("cpu", 16, 32))
    torch._dynamo.reset()
    with pytest.raises(storm.UsageError, match="least possible"):
        Compiler(client, budget=least - 1)(perceptron("cpu"))(seeded("cpu", 16, 32))


def test_a_training_goes_on_where_a_later_graph_needs_more_than_the_budget(
    client: storm.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch that is longer than all before is compiled anew."""
    x = seeded("cpu", 16, 32)
    with pytest.raises(storm.UsageError, match="least possible") as refused:
        Compiler(client, budget=1)(perceptron("cpu"))(x)
    least = int(str(refused.value).partition("(")[2].partition(" bytes")[0])
    torch._dynamo.reset()
    net, plain = perceptron("cpu"), perceptron("cpu")
    call, expected = Compiler(client, budget=least)(net), torch.compile(plain, backend="aot_eager")
    for batch in (x, x.repeat(4, 1)):
        assert torch.equal(step(call, batch), step(expected, batch))
    assert_identical(gradients(net), gradients(plain))
    assert sum("least possible" in one.message for one in caplog.records) == 1


def test_a_budget_of_bytes_holds_for_all_graphs_together(client: storm.Client) -> None:
    nets = [blocks("cpu", 1) for _ in range(2)]
    wrap = Compiler(client, budget=60_000)

    def model(x: Tensor) -> Tensor:
        x = nets[0](x)
        torch._dynamo.graph_break()
        return nets[1](x)

    call = wrap(model)
    target = backend.compiled_of(call).target
    for number in range(3):
        loss = call(seeded("cpu", 2, 16, 32)).square().mean()
        least = max(graph.schedule.least for graph in target.graphs)
        assert len(target.graphs) == 2
        assert target.shared_budget.kept_bytes <= 60_000 - least
        assert (target.shared_budget.kept_bytes > 0) == (number > 0), (
            "which graphs run is learned first"
        )
        loss.backward()
        del loss
        assert target.shared_budget.kept_bytes == 0


def test_blocks_that_are_compiled_one_by_one_share_a_budget_of_bytes(client: storm.Client) -> None:
    wrap = Compiler(client, budget=60_000)
    calls = [wrap(blocks("cpu", 1)) for _ in range(2)]
    others = Compiler(client, budget=50_000)(perceptron("cpu"))
    budgets = [backend.compiled_of(call).target.shared_budget for call in calls]
    assert budgets[0] is budgets[1]
    assert budgets[0] is not backend.compiled_of(others).target.shared_budget
    for number in range(3):
        x = seeded("cpu", 2, 16, 32)
        for call in calls:
            x = call(x)
        least = max(backend.compiled_of(call).target.least for call in calls)
        assert budgets[0].kept_bytes <= 60_000 - least
        assert (budgets[0].kept_bytes > 0) == (number > 0)
        x.square().mean().backward()
        del x
        assert budgets[0].kept_bytes == 0


def test_blocks_compute_again_what_their_part_of_a_budget_does_not_hold(
    client: storm.Client, full_link: None
) -> None:
    """The first would keep all else, and the others have more to ship than the link carries."""
    least = Compiler(client, budget=0.0)
    expected = trained_blocks(reference("eager"))
    assert_identical(trained_blocks(least), expected)
    schedule = backend.compiled_of(least.made[0]).target.graphs[0].schedule
    count = min(filter(None, schedule.recomputed_until))  # as many kept, and less is recomputed
    part = schedule.kept_bytes[count]
    again = []
    for nbytes in (part, part - 1):
        shared = Compiler(client, budget=schedule.least + BLOCKS * nbytes)
        assert_identical(trained_blocks(shared), expected)
        graphs = [backend.compiled_of(call).target.graphs[0] for call in shared.made]
        assert sum(graph.planned or 0 for graph in graphs) <= BLOCKS * nbytes
        again.append([computed_again(call) for call in shared.made])
    assert again[0] == [again[0][0]] * BLOCKS
    assert again[0][0] < computed_again(least.made[0]) == again[1][0]


BLOCKS = 2


def computed_again(call: Callable[..., Tensor]) -> int:
    (plan,) = storm.compiled_plans(call)
    return sum(row.decision == "replay" for row in plan.rows)


def trained_blocks(wrap: Wrap) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    nets = [GatedMlp() for _ in range(BLOCKS)]
    net, found = nn.Sequential(*map(wrap, nets)), list[Tensor]()
    for _ in range(3):
        net.zero_grad()
        net(seeded("cpu", 2, 16, 32)).square().mean().backward()
        found += [gradient.clone() for gradient in gradients(net)]
    return found


# --- lives --------------------------------------------------------------------------------------


def entries(client: storm.Client) -> int:
    client._supply.sessions.settle(DEADLINE_SECONDS)
    return client.status().entries


def test_a_graph_dropped_without_backward_frees_what_it_stored(client: storm.Client) -> None:
    call = Compiler(client)(perceptron("cpu"))
    loss = call(seeded("cpu", 16, 32)).sum()
    assert entries(client) > 0
    del loss
    gc.collect()
    wait_until(lambda: entries(client) == 0, DEADLINE_SECONDS)


def test_evaluation_stores_nothing(client: storm.Client) -> None:
    wrap = Compiler(client)
    call = wrap(perceptron("cpu"))
    expected = perceptron("cpu")(seeded("cpu", 16, 32))
    with torch.no_grad():
        assert torch.equal(call(seeded("cpu", 16, 32)), expected)
    with torch.inference_mode():
        assert torch.equal(call(seeded("cpu", 16, 32)), expected)
    assert wrap.stats()[0].saved_bytes == 0


def test_a_second_backward_pass_is_refused_as_by_pytorch(client: storm.Client) -> None:
    with torch._functorch.config.patch(donated_buffer=False):
        out = Compiler(client)(perceptron("cpu"))(seeded("cpu", 16, 32)).sum()
        out.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            out.backward()


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["input", "output"])
def test_a_saved_tensor_that_is_changed_in_place_raises(
    what: str, codegen: str, client: storm.Client
) -> None:
    def model(x: Tensor) -> Tensor:
        return (x * 2).exp().sin().exp() if what == "output" else x.sin() * x

    def change(call: Callable[..., Tensor]) -> None:
        x = seeded("cpu", 16, 32, grad=True) * 1
        out = call(x)
        with torch.no_grad():
            (x if what == "input" else out).add_(1)
        out.sum().backward()

    ours = Compiler(client, codegen=codegen)(model)
    for compiled in (torch.compile(model, backend="aot_eager"), ours):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            change(compiled)


def test_copies_and_pickles_train_on_their_own(client: storm.Client) -> None:
    wrap = Compiler(client)
    call = wrap(perceptron("cpu"))
    expected = step(call, seeded("cpu", 16, 32))
    other = copy.deepcopy(call)
    other.zero_grad()
    assert torch.equal(step(other, seeded("cpu", 16, 32)), expected)
    assert_identical(gradients(other), gradients(call))
    loaded = pickle.loads(pickle.dumps(call))
    assert_identical(loaded.parameters(), call.parameters())


def test_threads_share_what_is_compiled(client: storm.Client) -> None:
    wrap = Compiler(client)
    net = perceptron("cpu").requires_grad_(requires_grad=False)
    call = wrap(net)
    x = seeded("cpu", 16, 32, grad=True)
    step(call, x)
    expected, found = x.grad, []

    def train() -> None:
        mine = seeded("cpu", 16, 32, grad=True)
        for _ in range(5):
            mine.grad = None
            step(call, mine)
        found.append(mine.grad)

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_identical(found, [expected] * 3)


# --- the daemon's end ---------------------------------------------------------------------------


def test_what_a_lost_daemon_held_raises_and_a_client_may_go_on(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon("--pool-bytes", "64MiB")
    connect = partial(storm.connect, daemon.address, embedded="never", timeout=DEADLINE_SECONDS)
    with connect(on_daemon_loss="keep") as keeping, connect() as raising:
        call, other = (Compiler(client)(perceptron("cpu")) for client in (keeping, raising))
        expected = step(call, seeded("cpu", 16, 32))
        step(other, seeded("cpu", 16, 32))
        loss = call(seeded("cpu", 16, 32)).square().mean()
        keeping._supply.sessions.settle(DEADLINE_SECONDS)
        daemon.kill()
        with pytest.raises(storm.DaemonLost, match="repeat the step"):
            loss.backward()
        with pytest.warns(RuntimeWarning, match="stay in memory"):
            assert torch.equal(step(call, seeded("cpu", 16, 32)), expected)
        with pytest.raises(storm.DaemonLost, match="on_daemon_loss"):
            other(seeded("cpu", 16, 32))


def test_a_closed_client_is_named(daemon: DaemonProcess) -> None:
    client = storm.connect(daemon.address, embedded="never", timeout=DEADLINE_SECONDS)
    call = Compiler(client)(perceptron("cpu"))
    client.close()
    with pytest.raises(storm.UsageError, match="closed"):
        call(seeded("cpu", 16, 32))


# --- beside hooks -------------------------------------------------------------------------------


def test_hooks_leave_what_the_backend_handles_alone(client: storm.Client) -> None:
    wrap = Compiler(client, budget=1.0)
    net = perceptron("cpu")
    call = wrap(net)
    x = seeded("cpu", 16, 32)
    expected = step(call, x)
    offload = client.offload(net, min_bytes=1)
    with offload:
        loss = call(x).square().mean()
    loss.backward()
    assert torch.equal(loss.detach(), expected)
    stats = offload.stats()
    assert stats.skipped["compiled"] > 0
    assert stats.offloaded_bytes < x.nbytes * 4  # what the loss saves, which is not compiled


@pytest.mark.parametrize("whole", [True, False])
def test_hooks_do_not_warn_of_this_backend(whole: bool, client: storm.Client) -> None:
    net = perceptron("cpu")
    if whole:
        model = Compiler(client)(net)
    else:
        net.compile(backend="stormd")
        model = net
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with client.offload(model):
            pass


def test_hooks_that_copy_what_they_are_given_are_named(client: storm.Client) -> None:
    call = Compiler(client)(perceptron("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        out = call(seeded("cpu", 16, 32)).sum()
    with pytest.raises(storm.ActivationLost, match="saved-tensor hooks"):
        out.backward()


# --- what cannot be done ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "much"}, "budget is 'much'"),
        ({"codec": "zip"}, "codec is 'zip'"),
        ({"min_bytes": -1}, "min_bytes is -1"),
        ({"codegen": "jvm"}, "codegen is 'jvm'"),
        ({"mode": "fast"}, "mode is 'fast'; torch.compile knows default, "),
        ({"mode": "reduce-overhead"}, "replays CUDA graphs"),
        ({"options": {"triton.cudagraphs": True}}, "replays CUDA graphs"),
        ({"options": {"bugdet": 1}}, "no option 'bugdet'"),
    ],
)
def test_what_is_asked_wrongly_is_named(
    options: dict[str, object], message: str, client: storm.Client
) -> None:
    with pytest.raises(storm.UsageError, match=message):
        storm.compile(perceptron("cpu"), client=client, **options)


def test_the_backend_raises_for_itself(client: storm.Client) -> None:
    call = torch.compile(perceptron("cpu"), backend="stormd", mode="reduce-overhead")
    with pytest.raises(storm.UsageError, match="replays CUDA graphs"):
        call(seeded("cpu", 16, 32))


def test_something_else_than_a_client_or_a_model_is_named(client: storm.Client) -> None:
    with pytest.raises(storm.UsageError, match="client is of type str"):
        storm.compile(perceptron("cpu"), client="ipc:///stormd.sock")
    for model in (3, nn.Linear):
        with pytest.raises(storm.UsageError, match="pass a module that was made"):
            storm.compile(model, client=client)
    with pytest.raises(storm.UsageError, match="not a Linear"):
        storm.compiled_plans(nn.Linear(2, 2))


def test_the_function_is_called_like_its_package() -> None:
    assert storm_compile is storm.compile
