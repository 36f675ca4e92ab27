"""Inductor's code around the operators: nothing is copied, and kernels are as without offload."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.compile import inductor
from support.compiled_programs import PROGRAMS, GatedMlp, Wrap, perceptron, trained
from support.devices import DEVICES
from support.training import assert_identical, gradients, seeded
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional


def test_what_is_stored_is_not_copied_and_comes_back_aligned(client: storm.Client) -> None:
    """A kernel would write it twice. Kernels for other memory may add in another order."""
    torch._dynamo.reset()
    call = storm.compile(perceptron("cpu"), client=client, min_bytes=1, budget=0.0)
    _, found = run_and_get_code(lambda: call(seeded("cpu", 16, 32)).square().mean().backward())
    torch._dynamo.reset()
    forward, backward = found
    assert "stormd.store" in forward
    assert "out_ptr1" not in forward
    assert "stormd.wait" in backward
    doubted = [line for line in backward.splitlines() if "assumed to be not aligned" in line]
    assert not [line for line in doubted if "stormd.wait" in line]


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, partial(nn.GroupNorm, 2)])
def test_images_of_several_sizes_are_read_in_the_layout_that_was_chosen(
    norm: Callable[[int], nn.Module], client: storm.Client
) -> None:
    """Inductor lays a convolution's result out by channels, and norms add in that order."""

    def program(wrap: Wrap) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 16, 3), norm(16), nn.ReLU())
        call, found = wrap(net), []
        for size in ((12, 14), (18, 10)):
            y = call(seeded("cpu", 2, 3, *size))
            (y * torch.linspace(0.5, 1.5, y.numel()).view(y.shape)).sum().backward()
            found += [y.detach(), *(one.clone() for one in gradients(net))]
        return found

    def compiled(model: nn.Module) -> Any:
        return storm.compile(model, client=client, min_bytes=1, budget="least", dynamic=True)

    assert_identical(program(compiled), program(partial(torch.compile, dynamic=True)))


@torch.library.custom_op("stormd_tests::accumulate", mutates_args=("total",))
def accumulate(total: Tensor, x: Tensor) -> None:
    total.add_(x)


def test_what_a_custom_operator_writes_to_stays_as_it_left_it(client: storm.Client) -> None:
    """Without the copy that PyTorch drops, the caller's tensor is the saved one."""

    def function(x: Tensor, w: Tensor, total: Tensor) -> Tensor:
        h = x @ w
        accumulate(total, x.detach() @ w.detach())
        copied, other = total.clone(), h * 1
        accumulate(other, h.detach())
        return h * copied + other * h

    def program(wrap: Wrap) -> list[Tensor]:
        torch._dynamo.reset()
        x, w = seeded("cpu", 8, 16, grad=True), seeded("cpu", 16, 16, seed=2, grad=True)
        total = torch.zeros(8, 16)
        y = wrap(function)(x, w, total)
        y.sum().backward()
        return [y.detach(), x.grad, w.grad, total]

    found = program(partial(storm.compile, client=client, min_bytes=64, budget="least"))
    assert_identical(found, program(torch.compile))
    assert torch.allclose(found[-1], program(lambda one: one)[-1])


# --- what is recomputed ---------------------------------------------------------------------


class Compiled:
    """Compiles what it is called with, and keeps it for its plans."""

    def __init__(self, client: storm.Client, **options: Any) -> None:
        self._options = {"client": client, "min_bytes": 1, **options}
        self.made: list[Callable[..., Any]] = []

    def __call__(self, model: Callable[..., Any]) -> Callable[..., Any]:
        self.made.append(storm.compile(model, **self._options))
        return self.made[-1]

    def replayed(self) -> dict[str, str]:
        plans = [plan for one in self.made for plan in storm.compiled_plans(one)]
        rows = [row for plan in plans for row in plan.rows if row.decision == "replay"]
        return {row.operation: row.reason for row in rows}


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 3, 1, 2)])
def test_what_is_recomputed_has_the_layout_that_is_saved(
    client: storm.Client, full_link: None, order: tuple[int, ...]
) -> None:
    """In the layout of what it is made from, products would read it by another kernel."""

    def program(wrap: Wrap) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = nn.Linear(24, 24)

        def loss(x: Tensor) -> Tensor:
            made = functional.relu(net(x).permute(order).contiguous())
            return made @ made.transpose(-1, -2)

        x = seeded("cpu", 6, 8, 10, 24, grad=True)
        wrap(loss)(x).square().mean().backward()
        assert x.grad is not None
        return [x.grad, *gradients(net)]

    compiled = Compiled(client, budget="least")
    assert_identical(program(compiled), program(torch.compile))
    assert "aten.relu.default" in compiled.replayed()


@pytest.mark.slow
def test_what_is_only_moved_is_still_made_by_itself(
    device: str, client: storm.Client, full_link: None
) -> None:
    """Fused with what follows, a repeated statistic has its norm summed up in other loops."""

    def program(wrap: Wrap) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        norm = nn.InstanceNorm2d(8, track_running_stats=True, affine=True)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.SiLU()).to(device).eval()
        return trained(wrap(net), net, seeded(device, 4, 3, 8, 8))

    expected = program(torch.compile)
    wrap = Compiled(client, budget=0.0)
    assert_identical(program(wrap), expected)
    assert "aten.repeat.default" in wrap.replayed()


@pytest.mark.slow
def test_what_is_moved_again_is_read_from_memory(
    device: str, client: storm.Client, cpu_costs: None
) -> None:
    """Loops that read what it is moved from are fused with others, and round otherwise."""

    def program(wrap: Wrap) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        norms = (nn.BatchNorm1d(10), nn.SiLU(), nn.InstanceNorm1d(10, affine=True), nn.GELU())
        net = nn.Sequential(*norms, nn.LayerNorm(15), nn.Hardswish()).to(device, torch.bfloat16)
        x = seeded(device, 4, 10, 15).to(torch.bfloat16).requires_grad_()
        return trained(wrap(net), net, x)

    expected = program(torch.compile)
    wrap = Compiled(client, budget="least")
    assert_identical(program(wrap), expected)
    assert "aten.repeat.default" in wrap.replayed()


@pytest.mark.slow
def test_what_is_looked_up_again_is_fused_with_no_reader(
    device: str, client: storm.Client, cpu_costs: None
) -> None:
    """Loops that look it up as well sum its norm's gradient up otherwise."""
    torch.manual_seed(0)
    numbers = torch.randint(0, 101, (4, 9), device=device)
    labels = torch.randint(0, 101, (36,), device=device)

    def program(wrap: Wrap) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        embedding, norm = nn.Embedding(101, 36).to(device), nn.LayerNorm(36).to(device)

        def loss_of(numbers: Tensor) -> Tensor:
            words = functional.linear(norm(embedding(numbers)), embedding.weight)
            return functional.cross_entropy(words.flatten(0, 1), labels, label_smoothing=0.1)

        call, net = wrap(loss_of), nn.ModuleList([embedding, norm])
        optimizer, found = torch.optim.SGD(net.parameters(), 0.05), []
        for _ in range(3):
            with torch.autocast(device, torch.bfloat16):
                loss = call(numbers)
            optimizer.zero_grad()
            loss.backward()
            found += [loss.detach(), *(one.clone() for one in gradients(net))]
            optimizer.step()
        return found

    expected = program(torch.compile)
    wrap = Compiled(client, budget="least")
    assert_identical(program(wrap), expected)
    assert "aten.embedding.default" in wrap.replayed()


def a_gated_mlp(wrap: Wrap, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = GatedMlp().to(device, torch.bfloat16)
    return trained(wrap(net), net, seeded(device, 2, 16, 32).to(torch.bfloat16))


@pytest.mark.parametrize(
    "name",
    [
        "a_gated_mlp",
        pytest.param("half_precision", marks=pytest.mark.slow),
        pytest.param("autocast", marks=pytest.mark.slow),
        pytest.param("lengths_rounded_up", marks=pytest.mark.slow),
    ],
)
def test_products_that_are_computed_again_have_the_same_bits(
    name: str, device: str, client: storm.Client, full_link: None
) -> None:
    options = {"dynamic": True} if name == "lengths_rounded_up" else {}
    if device == "cuda" and options:
        pytest.skip("with lengths that vary Inductor's own sums differ from compile to compile")
    program = PROGRAMS.get(name, a_gated_mlp)
    expected = program(partial(torch.compile, **options), device)
    torch._dynamo.reset()
    wrap = Compiled(client, budget=0.0, **options)
    assert_identical(program(wrap, device), expected)
    again = wrap.replayed()
    products = {"aten.mm.default", "aten.addmm.default"}
    assert {again.get(name) for name in products} & {"the link is full"}


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_norm_is_computed_again_from_its_statistic(
    device: str, client: storm.Client, full_link: None
) -> None:
    """On a GPU, where all elements of a row are computed by the same instructions."""

    def program(wrap: Wrap) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 48, bias=False))
        net = net.to(device, torch.bfloat16)
        x = seeded(device, 64, 32).to(torch.bfloat16).requires_grad_()
        return trained(wrap(net), net, x)

    expected = program(torch.compile)
    wrap = Compiled(client, budget=0.0)
    assert_identical(program(wrap), expected)
    assert set(wrap.replayed()) == {"prims.convert_element_type.default"}


@pytest.mark.slow
def test_what_products_read_is_handed_over_besides(client: storm.Client, full_link: None) -> None:
    """It is in memory anyway: the forward pass has the same kernels as without offload."""
    x = seeded("cpu", 2, 16, 32)

    def code(call: Callable[..., torch.Tensor]) -> tuple[list[str], list[str]]:
        torch._dynamo.reset()
        _, found = run_and_get_code(lambda: call(x).square().mean().backward())
        kernels = [line.strip() for line in found[0].splitlines() if " = in_ptr" in line]
        products = [line for line in found[1].splitlines() if "extern_kernels.mm(" in line]
        return kernels, products

    torch.manual_seed(0)
    net = GatedMlp()
    kernels, products = code(torch.compile(net))
    wrap = Compiled(client, budget=0.0)
    ours, more = code(wrap(net))
    assert ours == kernels
    assert len(more) > len(products)
    assert "aten.mm.default" in wrap.replayed()


def test_products_are_not_run_again_where_they_may_run_in_another_kernel() -> None:
    graph = make_fx(torch.mm, tracing_mode="fake")(torch.ones(8, 8), torch.ones(8, 8)).graph
    (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert inductor._runs_alone(product)
    for name in ("max_autotune", "max_autotune_gemm", "freezing", "triton.native_matmul"):
        with config.patch({name: True}):
            assert not inductor._runs_alone(product)


def attention(dropout: float) -> torch.fx.Node:
    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, dropout)[0]

    graph = make_fx(run, tracing_mode="fake")(torch.ones(1, 2, 8, 8)).graph
    target = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    (found,) = graph.find_nodes(op="call_function", target=target)
    return found


def test_attention_is_run_again_without_dropout_alone() -> None:
    assert inductor._runs_alone(attention(0.0))
    assert not inductor._runs_alone(attention(0.1))
