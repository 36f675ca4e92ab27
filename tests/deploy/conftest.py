"""Where the files of deploy/ are."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def repository() -> Path:
    """The checkout's root."""
    return Path(__file__).parents[2]


@pytest.fixture
def deploy(repository: Path) -> Path:
    """The folder under test."""
    return repository / "deploy"
