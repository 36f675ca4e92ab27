"""Reads an operator's settings: flags override the environment, which overrides the TOML file.

Nothing else in the daemon reads the environment or a file for a setting.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from stormd.config import Config, config_options
from stormd.errors import ConfigError
from stormd.options import read_value
from stormd.protocol import unknown_variables

__all__ = ["OPTIONS", "load_config", "reloaded"]

OPTIONS: Final = {option.name: option for option in config_options()}
"""All options by name."""


def load_config(
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    path: Path | None = None,
) -> Config:
    """Return the settings of flags, environment and TOML file; the first that sets an option wins.

    `flags` maps option names to values or to texts as written on the command line; None means
    the flag was not given. `environ` is os.environ if None.

    Raises:
        ConfigError: an unknown key or variable, a value that cannot be read, an invalid value, or
            no such file.
    """
    settings: dict[str, Any] = {}
    if path is not None:
        settings |= _from_toml(path)
    settings |= _from_environment(os.environ if environ is None else environ)
    settings |= {
        name: read_value(OPTIONS[name], value, f"flag {OPTIONS[name].flag}")
        for name, value in (flags or {}).items()
        if value is not None
    }
    return Config(**settings)


def reloaded(running: Config, read: Config) -> tuple[Config, list[str]]:
    """Return `running` with the reloadable values of `read`, and the names of other differences."""
    changed = [
        option
        for option in config_options()
        if getattr(read, option.name) != getattr(running, option.name)
    ]
    taken = {option.name: getattr(read, option.name) for option in changed if option.reloadable}
    return replace(running, **taken), [item.name for item in changed if not item.reloadable]


def _from_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # bad TOML or UTF-8, number too long, too deep
        raise ConfigError(f"config file {path} is not TOML: {error}") from error
    settings = {}
    for key, value in table.items():
        option = OPTIONS.get(key)
        if option is None:
            raise ConfigError(f"config file {path} sets {key!r}, which is no option{_near(key)}")
        settings[key] = read_value(option, value, f"{path}: {key}")
    return settings


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    for text in unknown_variables(environ).values():
        raise ConfigError(f"{text}; unset it, or set what was meant")
    default = Config()
    return {
        option.name: read_value(option, environ[option.variable], f"variable {option.variable}")
        for option in config_options()
        if option.variable in environ
        # Scripts and compose files write VARIABLE= for unset. For some options empty is a value.
        and (environ[option.variable] or getattr(default, option.name) in ("", ()))
    }


def _near(key: str) -> str:
    names = get_close_matches(key, OPTIONS, n=1, cutoff=0.5)
    return f": did you mean {names[0]!r}?" if names else f": known are {', '.join(OPTIONS)}"
