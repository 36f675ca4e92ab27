"""The example file says what the definition says."""

from __future__ import annotations

from pathlib import Path

from stormd.config import Config, config_options
from stormd.example_config import render_example
from stormd.settings import load_config

EXAMPLE = Path(__file__).parents[2] / "deploy" / "stormd.example.toml"


def test_the_file_is_what_the_definition_gives() -> None:
    assert EXAMPLE.read_text() == render_example(), (
        "write it anew: stormd serve --example-config > deploy/stormd.example.toml"
    )


def test_unchanged_it_sets_nothing() -> None:
    assert load_config(environ={}, path=EXAMPLE) == Config()


def test_uncommented_every_setting_is_read(tmp_path: Path) -> None:
    lines = [line.removeprefix("# ") for line in render_example().splitlines() if " = " in line]
    path = tmp_path / "stormd.toml"
    path.write_text("\n".join(lines))
    assert len(lines) == len(config_options())
    assert load_config(environ={}, path=path).pool_bytes == Config().pool_bytes
