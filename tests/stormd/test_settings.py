"""Settings are read from flags, environment and file, and a wrong one is named with its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from stormd.config import Config
from stormd.errors import ConfigError
from stormd.settings import OPTIONS, load_config, reloaded

NO_ENVIRONMENT: dict[str, str] = {}


def _load(path: Path, text: str) -> Config:
    path.write_text(text)
    return load_config(environ=NO_ENVIRONMENT, path=path)


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    path = tmp_path / "stormd.toml"
    path.write_text('pool_bytes = "1GiB"\nmax_sessions = 3\nlog_format = "json"\n')
    environ = {"STORMD_POOL_BYTES": "2GiB", "STORMD_MAX_SESSIONS": "4"}
    environ |= {"STORMD_SOCKET_MODE": "0660", "STORMD_ALLOWED_UIDS": "1, 2"}
    flags = {"pool_bytes": "3GiB", "device": None}
    config = load_config(flags=flags, environ=environ, path=path)
    assert config.pool_bytes == 3 << 30
    assert (config.max_sessions, config.socket_mode, config.allowed_uids) == (4, 0o660, (1, 2))
    assert config.log_format == "json"
    assert config.device == "auto"


def test_reads_every_kind_from_toml(tmp_path: Path) -> None:
    text = (
        'address = "ipc:///tmp/x.sock"\nsocket_mode = 0o660\nallowed_uids = [0, 7]\n'
        "pool_bytes = 1073741824\nlease_seconds = 3\nexit_with_last_client = true\n"
    )
    config = _load(tmp_path / "stormd.toml", text)
    assert config.socket_mode == 0o660
    assert config.allowed_uids == (0, 7)
    assert config.pool_bytes == 1 << 30
    assert config.lease_seconds == 3.0
    assert config.exit_with_last_client is True


def test_a_number_of_workers_needs_no_quotes(tmp_path: Path) -> None:
    assert _load(tmp_path / "workers.toml", "workers = 4\n").workers == "4"
    for text in ("1", "65", "'" + "9" * 5000 + "'"):
        with pytest.raises(ConfigError, match="write auto, off, or a number from 2 to 64"):
            _load(tmp_path / "workers.toml", f"workers = {text}\n")


def test_an_unknown_key_names_the_closest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'pool_bytes'"):
        _load(tmp_path / "stormd.toml", "pool_byte = 1\n")
    with pytest.raises(ConfigError, match="known are address"):
        _load(tmp_path / "stormd.toml", "xyzzy = 1\n")


def test_an_unknown_variable_names_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"STORMD_POOL_BYTE is no .* mean 'STORMD_POOL_BYTES'"):
        load_config(environ={"STORMD_POOL_BYTE": "1GiB"})
    with pytest.raises(ConfigError, match=r"STORMD_XYZZY is no .*known are STORMD_ADDRESS"):
        load_config(environ={"STORMD_XYZZY": "1"})
    assert load_config(environ={"STORMDIRECTORY": "1", "STORM_X": "1"}) == Config()


def test_an_empty_variable_is_unset(tmp_path: Path) -> None:
    empty = {option.variable: "" for option in OPTIONS.values()}
    assert load_config(environ=empty) == Config()
    path = tmp_path / "stormd.toml"
    path.write_text('pool_bytes = "1GiB"\nresumable = true\nallowed_uids = [7]\n')
    config = load_config(environ=empty, path=path)
    assert (config.pool_bytes, config.resumable) == (1 << 30, True)
    assert config.allowed_uids == (), "empty is a value of it"


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"STORMD_POOL_BYTES": "lots"}, ["STORMD_POOL_BYTES", "'lots'", "4GiB"]),
        ({"STORMD_MAX_SESSIONS": "many"}, ["STORMD_MAX_SESSIONS", "'many'", "whole number"]),
        ({"STORMD_SOCKET_MODE": "rw"}, ["STORMD_SOCKET_MODE", "octal"]),
        ({"STORMD_EXIT_WITH_LAST_CLIENT": "maybe"}, ["'maybe'", "true or false"]),
        ({"STORMD_SPILL_PATH": "/d"}, ["spill_path is set and spill_bytes is not", "500GiB"]),
        ({"STORMD_SPILL_BYTES": "1GiB"}, ["spill_bytes is set and spill_path is not"]),
        ({"STORMD_SPILL_ENCRYPT": "maybe"}, ["spill_encrypt is 'maybe'", "on, off"]),
    ],
)
def test_what_cannot_be_is_named(environ: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ=environ)
    for part in parts:
        assert part in str(caught.value)


def test_a_file_that_is_missing_or_no_toml_is_an_error(tmp_path: Path) -> None:
    for text in ("p = \n", "p = " + "9" * 5000, "allowed_uids = " + "[" * 5000, "a = '\0'"):
        with pytest.raises(ConfigError, match="is not TOML"):
            _load(tmp_path / "bad.toml", text)
    with pytest.raises(ConfigError, match="No such file"):
        load_config(environ=NO_ENVIRONMENT, path=tmp_path / "none.toml")


def test_a_reload_takes_limits_and_names_the_rest() -> None:
    running = Config(pool_bytes=1 << 30, max_sessions=4, log_level="info")
    read = Config(pool_bytes=2 << 30, max_sessions=8, log_level="info")
    fresh, ignored = reloaded(running, read)
    assert (fresh.pool_bytes, fresh.max_sessions) == (1 << 30, 8)
    assert ignored == ["pool_bytes"]
    assert reloaded(running, running) == (running, [])


def test_a_reload_whose_shares_do_not_fit_the_running_pool_is_an_error() -> None:
    running = Config(pool_bytes=64 << 20, max_sessions=64)
    read = Config(pool_bytes=128 << 20, max_sessions=64, session_share_bytes=2 << 20)
    with pytest.raises(ConfigError, match="session_share_bytes"):
        reloaded(running, read)
