"""Imports point one way, and importing a package loads no CUDA."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

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


class Import(NamedTuple):
    """What a file imports, by its full name."""

    name: str
    is_to_run: bool
    """And not for its types alone."""


def _modules() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            yield package, path


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _imports(path: Path) -> tuple[Import, ...]:
    return tuple(_imports_among(_tree(path).body, is_to_run=True))


def _imports_among(nodes: Iterable[ast.AST], *, is_to_run: bool) -> Iterator[Import]:
    """Look through statements alone: files have many more expressions."""
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = [f"{module}.{name.name}" for name in node.names]
        else:
            is_of_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from _imports_among(
                    getattr(node, field, ()), is_to_run=is_to_run and not is_of_types
                )
            continue
        yield from (Import(name, is_to_run) for name in names)


def _printed_by(code: str, *arguments: str) -> list[list[str]]:
    """Return the words of each line that a new interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", dedent(code), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return [line.split() for line in done.stdout.splitlines()]


def test_imports_point_one_way() -> None:
    for package, path in _modules():
        allowed = MAY_IMPORT[package]
        for name, _ in _imports(path):
            if name.split(".")[0] in PACKAGES:
                assert any(name == one or name.startswith(one + ".") for one in allowed), (
                    f"{path.relative_to(ROOT)} imports {name}"
                )


def test_importing_the_client_loads_little() -> None:
    """Nothing of CUDA but what PyTorch loads, and frameworks only when they are used."""
    folder = PACKAGES["storm_client"] / "integrations"
    names = [f"storm_client.integrations.{path.stem}" for path in folder.glob("[!_]*.py")]
    assert len(names) > 5
    script = """
        import sys, torch
        before = set(sys.modules)
        import storm_client
        print(*sorted(name for name in set(sys.modules) - before if name != "storm_client"))
        from importlib import import_module
        for name in sys.argv[1:]:
            import_module(name)
        print(*{name.split(".")[0] for name in set(sys.modules) - before})
        assert not torch.cuda.is_initialized()
    """
    loaded, behind_integrations = _printed_by(script, *names)
    assert loaded == ["storm_client.compile", "storm_client.errors"]
    frameworks = {"accelerate", "lightning", "peft", "pytorch_lightning", "torchtitan"}
    frameworks |= {"transformers", "trl", "cupy", "cuda", "triton"}
    assert not frameworks & set(behind_integrations)


def test_commands_load_no_programs_of_others(tmp_path: Path) -> None:
    """Neither the demo and the benchmarks nor the client, nor CUDA: a daemon serves without."""
    script = """
        import sys
        import storm_kernels
        from stormd import cli, running, server
        calls = [["serve", "--pool-bytes=17"], ["status", "--address", sys.argv[1]]]
        print(*map(cli.main, calls))
        print(*{name.split(".")[0] for name in sys.modules})
    """
    *_, status, loaded = _printed_by(script, f"ipc://{tmp_path}/missing/s")
    assert status == ["2", "3"]
    assert "stormd" in loaded
    assert not {"storm_bench", "storm_client", "torch", "cupy", "cuda", "triton"} & set(loaded)


def test_the_protocol_needs_the_standard_library_and_msgpack_alone() -> None:
    for path in sorted((ROOT / "stormd" / "protocol").glob("*.py")):
        for name, _ in _imports(path):
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
            for found in _imports(path)
            if found.is_to_run
            if (target := _module_of(found.name, package, names)) and target != name
        }
        for name, path in names.items()
        if name != package
    }


def _module_of(found: str, package: str, names: dict[str, Path]) -> str:
    """Return the module that is meant by \"package.module.name\", empty for none of the package."""
    assert not found.startswith("."), "name the module in full"
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
def test_modules_and_rooms_do_not_import_each_other(package: str) -> None:
    """Rooms are folders, and the modules beside them."""
    modules = _imports_of_a_package(package)
    assert not _circles(modules)
    rooms: dict[str, set[str]] = {}
    for name, imports in modules.items():
        room = name.partition(".")[0]
        rooms.setdefault(room, set()).update({one.partition(".")[0] for one in imports} - {room})
    assert not _circles(rooms)


def test_every_file_opens_with_what_it_is_for() -> None:
    for _, path in _modules():
        assert ast.get_docstring(_tree(path)), f"{path} has no docstring"


LOSES_INTERRUPTS = {"WeakSet", "WeakKeyDictionary", "WeakValueDictionary", "WeakMethod", "finalize"}
"""Of the module weakref: they have callbacks in Python, which an interrupt may strike."""


def test_no_callback_in_python_is_called_when_an_object_of_the_client_dies() -> None:
    for path in sorted(PACKAGES["storm_client"].rglob("*.py")):
        names = {node.attr for node in ast.walk(_tree(path)) if isinstance(node, ast.Attribute)}
        names |= {one.name.rpartition(".")[2] for one in _imports(path)}
        assert not names & LOSES_INTERRUPTS, path
