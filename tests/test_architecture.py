"""Imports point one way, and importing a package loads no CUDA."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "stormd": ROOT / "stormd",
    "storm_client": ROOT / "client" / "storm_client",
    "storm_bench": ROOT / "client" / "storm_bench",
    "storm_kernels": ROOT / "kernels" / "storm_kernels",
}
MAY_IMPORT = {
    "stormd": ("stormd", "storm_kernels"),
    "storm_client": ("storm_client", "stormd.protocol", "storm_kernels"),
    "storm_bench": ("storm_bench", "storm_client", "stormd", "storm_kernels"),
    "storm_kernels": ("storm_kernels",),
}
LOADS_PROGRAMS = [ROOT / "stormd" / "commands" / f"{name}.py" for name in ("bench", "demo")]
"""What may import storm_bench, and only inside the functions that need it."""


def _modules() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            yield package, path


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _imported_at_once(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@cache
def _loaded_by(code: str) -> set[str]:
    """Return what a new interpreter has loaded behind that, by the first parts of their names."""
    code += "; import sys; print(*{n.split('.')[0] for n in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    return set(done.stdout.split())


def test_imports_point_one_way() -> None:
    for package, path in _modules():
        allowed = MAY_IMPORT[package]
        if path in LOADS_PROGRAMS:
            assert not any(name.startswith("storm_bench") for name in _imported_at_once(path))
            allowed = (*allowed, "storm_bench")
        for name in _imported(path):
            if name.split(".")[0] in PACKAGES:
                assert any(name == one or name.startswith(one + ".") for one in allowed), (
                    f"{path.relative_to(ROOT)} imports {name}"
                )


@pytest.mark.parametrize("package", ["stormd", "storm_client", "storm_kernels", "stormd.cli"])
def test_importing_loads_nothing_of_cuda_and_starts_none(package: str) -> None:
    loaded = _loaded_by(
        f"import sys, {package}; torch = sys.modules.get('torch');"
        "assert torch is None or not torch.cuda.is_initialized()"
    )
    assert package.partition(".")[0] in loaded
    # of CUDA builds PyTorch itself loads NVIDIA's bindings from 2.14 on
    ours = loaded - _loaded_by("import torch") if "torch" in loaded else loaded
    assert not {"cupy", "cuda", "triton"} & ours


def test_integrations_load_their_frameworks_when_they_are_used() -> None:
    folder = PACKAGES["storm_client"] / "integrations"
    names = [f"storm_client.integrations.{path.stem}" for path in folder.glob("[!_]*.py")]
    assert len(names) > 5
    frameworks = {"accelerate", "lightning", "peft", "pytorch_lightning", "torchtitan"}
    assert not (frameworks | {"transformers", "trl"}) & _loaded_by(f"import {', '.join(names)}")


@pytest.mark.parametrize(
    "arguments", [["serve", "--pool-bytes=17"], ["status", "--address=ipc:///nowhere/s"]]
)
def test_a_command_loads_no_programs_of_others(arguments: list[str]) -> None:
    """Neither the demo and the benchmarks nor the client: a daemon serves without them."""
    code = (
        "import sys; from stormd import cli, running, server; status = cli.main(sys.argv[1:]);"
        "print(status, *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    status, *loaded = done.stdout.split()
    assert status in ("2", "3"), done.stderr
    roots = {name.split(".")[0] for name in loaded}
    assert "stormd" in roots
    assert not {"storm_bench", "storm_client", "torch"} & roots


def test_the_protocol_needs_the_standard_library_and_msgpack_alone() -> None:
    for path in sorted((ROOT / "stormd" / "protocol").glob("*.py")):
        for name in _imported(path):
            root = name.split(".")[0]
            known = root in sys.stdlib_module_names or root == "msgpack"
            assert known or name.startswith("stormd.protocol"), f"{path.name} imports {name}"


# --- circles --------------------------------------------------------------------------------


def _imports_of_a_package(package: str) -> dict[str, set[str]]:
    """Return what each module imports of its package, at once or in functions, but for types."""
    folder = PACKAGES[package]
    names = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix("__init__").strip(".")
        or package: path
        for path in sorted(folder.rglob("*.py"))
    }
    return {
        name: {
            target
            for found in _imported_to_run(ast.parse(path.read_text()))
            if (target := _module_of(found, package, names)) and target != name
        }
        for name, path in names.items()
        if name != package
    }


def _imported_to_run(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0
        yield from (f"{node.module}.{name.name}" for name in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _imported_to_run(child)


def _module_of(found: str, package: str, names: dict[str, Path]) -> str:
    """Return the module that is meant by \"package.module.name\", empty for none of the package."""
    while found.startswith(f"{package}."):
        if (name := found.removeprefix(f"{package}.")) in names:
            return name
        found = found.rpartition(".")[0]
    return ""


def _circles(imports: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the sets of those that reach each other."""
    reached = {name: _reached(name, imports) for name in imports}
    return {
        frozenset({name, *(other for other in reached[name] if name in reached[other])})
        for name in imports
        if name in reached[name]
    }


def _reached(name: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [name]
    while ahead:
        new = imports.get(ahead.pop(), set()) - found
        found |= new
        ahead += new
    return found


def test_circles_are_found() -> None:
    imports = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert _circles(imports) == {frozenset("abc"), frozenset("de")}


@pytest.mark.parametrize("package", ["storm_client", "stormd"])
def test_modules_do_not_import_each_other(package: str) -> None:
    assert not _circles(_imports_of_a_package(package))


@pytest.mark.parametrize("package", ["storm_client", "stormd"])
def test_rooms_do_not_import_each_other(package: str) -> None:
    """The same of folders, and of the modules beside them."""
    rooms: dict[str, set[str]] = {}
    for name, imports in _imports_of_a_package(package).items():
        room = name.partition(".")[0]
        rooms.setdefault(room, set()).update({one.partition(".")[0] for one in imports} - {room})
    assert not _circles(rooms)


def test_every_file_opens_with_what_it_is_for() -> None:
    for _, path in _modules():
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
