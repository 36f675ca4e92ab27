"""What a Triton kernel reads and writes is told from its intermediate form, or not told."""

from __future__ import annotations

from typing import Any

import pytest
from storm_client.eager.kernel_accesses import Accesses, accesses_of

LOAD = "%v = tt.load %x : !tt.ptr<f32> loc(#loc2)"
STORE = "tt.store %y, %v : !tt.ptr<f32> loc(#loc3)"


def kernel(*body: str) -> str:
    """Return the text of a kernel of two pointers and a number, as Triton prints it."""
    parameters = (
        '%x: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("x"(#loc)), '
        '%y: !tt.ptr<f32> loc("y"(#loc)), %n: i32 loc("n"(#loc))'
    )
    head = f"  tt.func public @kernel({parameters}) attributes {{noinline = false}} {{"
    return "\n".join(["#loc = loc(unknown)", "module {", head, *body, "    tt.return", "  }", "}"])


def test_each_pointer_is_followed_to_a_parameter() -> None:
    text = kernel(
        "%a = tt.splat %x : !tt.ptr<f32> -> tensor<8x!tt.ptr<f32>>",
        "%i = tt.make_range {end = 8 : i32, start = 0 : i32} : tensor<8xi32>",
        "%b = tt.addptr %a, %i : tensor<8x!tt.ptr<f32>>, tensor<8xi32>",
        "%v = tt.load %b : tensor<8x!tt.ptr<f32>>",
        "%c = tt.splat %y : !tt.ptr<f32> -> tensor<8x!tt.ptr<f32>>",
        "%d = tt.addptr %c, %i : tensor<8x!tt.ptr<f32>>, tensor<8xi32>",
        "%w = math.exp %v : tensor<8xf32>",
        "tt.store %d, %w : tensor<8x!tt.ptr<f32>>",
    )
    both = frozenset({0, 1})
    assert accesses_of(text) == Accesses(3, both, read=frozenset({0}), written=frozenset({1}))


def test_pointers_go_around_in_loops_and_through_branches() -> None:
    loop = (
        "%r:2 = scf.for %i = %n to %n step %n iter_args(%p = %x, %q = %y) -> !tt.ptr<f32> : i32 {",
        "%v = tt.load %p : !tt.ptr<f32>",
        "%s = tt.addptr %p, %n : !tt.ptr<f32>, i32",
        "scf.yield %s, %q : !tt.ptr<f32>, !tt.ptr<f32>",
        "}",
        "tt.store %r#1, %v : !tt.ptr<f32>",
    )
    found = accesses_of(kernel(*loop))
    assert found.written >= {1}
    branches = (
        "%r = scf.if %n -> (!tt.ptr<f32>) {",
        "scf.yield %x : !tt.ptr<f32>",
        "} else {",
        "scf.yield %y : !tt.ptr<f32>",
        "}",
        "%v = arith.constant 0.0 : f32",
        "tt.store %r, %v : !tt.ptr<f32>",
    )
    found = accesses_of(kernel(*branches))
    assert found.written == {0, 1}


@pytest.mark.parametrize(
    "line",
    [
        "%a = tt.atomic_rmw fadd, acq_rel, gpu, %y, %v : (!tt.ptr<f32>, f32) -> f32",
        '%a = tt.elementwise_inline_asm "mov.u32 $0, %clock;" {pure = true} -> i32',
        "%a = tt.int_to_ptr %n : i64 -> !tt.ptr<f32>",
        '%a = tt.extern_elementwise %v {pure = false, symbol = "__nv_tanhf"} : (f32) -> f32',
        '%a = tt.extern_elementwise %v {pure = true, symbol = "mine"} : (f32) -> f32',
        "%a = tt.load %other : !tt.ptr<f32>",
        "%a = tt.load %x : !tt.ptr<!tt.ptr<f32>>",
        "tt.func private @another(%z: i32) {",
    ],
)
def test_what_may_depend_on_something_else_is_not_told(line: str) -> None:
    assert accesses_of(kernel(LOAD, STORE)) is not None
    assert accesses_of(kernel(LOAD, line, STORE)) is None


def test_functions_of_the_device_library_depend_on_their_operands() -> None:
    line = '%w = tt.extern_elementwise %v {pure = true, symbol = "__nv_tanhf"} : (f32) -> f32'
    assert accesses_of(kernel(LOAD, line, STORE)) is not None


def test_what_triton_compiles_is_told() -> None:
    """The forms above are as Triton writes them: it compiles without a GPU."""
    triton: Any = pytest.importorskip("triton")
    backends: Any = pytest.importorskip("triton.backends.compiler")
    ops: Any = pytest.importorskip("liger_kernel.ops.rms_norm")
    kernel = ops._rms_norm_forward_kernel
    types = dict.fromkeys(kernel.arg_names, "i32")
    types.update((name, "*fp32") for name in types if name.endswith("_ptr"))
    types.update(eps="fp32", offset="fp32")
    given = {"casting_mode": 0, "elementwise_affine": True, "BLOCK_SIZE": 64}
    types.update(dict.fromkeys(given, "constexpr"))
    constants = {(kernel.arg_names.index(name),): value for name, value in given.items()}
    source = triton.compiler.ASTSource(kernel, types, constants, {})
    compiled = triton.compile(source, target=backends.GPUTarget("cuda", 90, 32))
    found = accesses_of(compiled.asm["ttir"])
    names = [name for name, kind in compiled.src.signature.items() if kind != "constexpr"]
    assert {names[at] for at in found.written} == {"Y_ptr", "RSTD_ptr"}
    assert {names[at] for at in found.read} == {"X_ptr", "W_ptr"}
