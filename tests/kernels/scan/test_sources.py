"""What Triton asks of the kernels' sources, for where it is not installed to say so itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import storm_kernels

SCAN = Path(storm_kernels.__file__).parent / "scan"
SOURCES = [path for path in SCAN.glob("*.py") if "@triton.jit" in path.read_text()]


def jitted(source: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.FunctionDef) and "triton.jit" in ast.unparse(node):
            yield node


def blocks(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for name in ("body", "orelse"):
            found = getattr(node, name, None)
            if isinstance(found, list):
                yield found


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_nothing_follows_a_branch_that_returns(source: Path) -> None:
    """Triton compiles it all the same, for operations that it is not meant for."""
    wrong = [
        f"{function.name}, line {statement.lineno}"
        for function in jitted(source)
        for block in blocks(function)
        for statement in block[:-1]
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return)
    ]
    assert not wrong


def test_there_are_such_sources() -> None:
    assert {path.name for path in SOURCES} >= {"combine.py", "kernels.py"}
