"""What is published: its version, its types, and a description whose links lead somewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import storm_client

import stormd

ROOT = Path(__file__).parents[1]
PACKAGES = ["stormd", "client/storm_client", "client/storm_bench", "kernels/storm_kernels"]


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def description(settings: dict[str, Any]) -> str:
    """The README as the build makes a description of it."""
    hook = settings["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = "".join((ROOT / fragment["path"]).read_text() for fragment in hook["fragments"])
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    return text


def test_all_say_the_version_that_the_build_reads(settings: dict[str, Any]) -> None:
    version = settings["tool"]["scikit-build"]["metadata"]["version"]
    found = re.search(version["regex"], (ROOT / version["input"]).read_text())
    assert found["value"] == stormd.__version__ == storm_client.__version__


@pytest.mark.parametrize("package", PACKAGES)
def test_its_types_are_the_user_s_too(package: str, settings: dict[str, Any]) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert package in settings["tool"]["scikit-build"]["wheel"]["packages"]


def test_links_of_the_description_are_absolute_and_lead_to_files(
    settings: dict[str, Any], description: str
) -> None:
    home = settings["project"]["urls"]["Homepage"]
    raw = home.replace("github.com", "raw.githubusercontent.com")
    links = re.findall(r"\]\(([^)]+)\)", description)
    assert links
    for link in links:
        path = re.sub(rf"^({re.escape(home)}/blob/main/|{re.escape(raw)}/main/)", "", link)
        if path == link:
            assert re.match("[a-z]+:|#", link), link
        else:
            assert (ROOT / path.partition("#")[0]).exists(), link


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_documents_lead_to_files(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text())
    assert links
    for link in links:
        assert "://" in link or (ROOT / link).exists(), link
