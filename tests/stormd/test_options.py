"""One option: names, reading and checking."""

from __future__ import annotations

from typing import Any

import pytest

from stormd.errors import ConfigError
from stormd.options import Kind, Option, check_value, parse_host_port, read_value


def _option(kind: Kind, **details: Any) -> Option:
    return Option(name="some_limit", kind=kind, help="limits some", section="limits", **details)


def test_names_follow_from_one_name() -> None:
    option = _option("count")
    assert option.flag == "--some-limit"
    assert option.variable == "STORMD_SOME_LIMIT"


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("text", " as it is ", " as it is "),
        ("size", "3MiB", 3 << 20),
        ("count", " 7 ", 7),
        ("seconds", "1.5", 1.5),
        ("mode", "0o660", 0o660),
        ("mode", "640", 0o640),
        ("uids", "0, 12,", (0, 12)),
        ("uids", "", ()),
        ("switch", "Yes", True),
        ("switch", "0", False),
    ],
)
def test_reads_text(kind: Kind, text: str, value: object) -> None:
    assert read_value(_option(kind), text, "here") == value


@pytest.mark.parametrize("kind", ["size", "count", "seconds", "mode", "uids", "switch"])
def test_unreadable_text_names_its_source(kind: Kind) -> None:
    with pytest.raises(ConfigError, match=r"the third line.*'no value'"):
        read_value(_option(kind), "no value", "the third line")


def test_values_of_other_types_are_left_to_the_check() -> None:
    assert read_value(_option("seconds"), 2, "here") == 2.0
    assert read_value(_option("uids"), [1], "here") == (1,)
    assert read_value(_option("size"), True, "here") is True
    with pytest.raises(ConfigError, match="some_limit is True"):
        check_value(_option("size"), True)


@pytest.mark.parametrize("value", [0, 11])
def test_limits_are_named(value: int) -> None:
    with pytest.raises(ConfigError, match=rf"some_limit is {value}, and must be .*--some-limit"):
        check_value(_option("count", least=1, most=10), value)


@pytest.mark.parametrize("value", [1 << 63, 10**400, -(10**400)])
@pytest.mark.parametrize("kind", ["size", "count"])
def test_a_number_beyond_all_machines_is_named(kind: Kind, value: int) -> None:
    with pytest.raises(ConfigError, match=r"some_limit is -?0x[0-9a-f]+, .* below 2\^63"):
        check_value(_option(kind, least=1, most=10), value)


def test_reads_addresses() -> None:
    assert parse_host_port("127.0.0.1:9464") == ("127.0.0.1", 9464)
    assert parse_host_port("[::1]:80") == ("::1", 80)
    assert parse_host_port("localhost:0") == ("localhost", 0)


@pytest.mark.parametrize(
    "text",
    [
        "", ":9464", "9464", "host", "::1:9464", "[::1]", "h:70000", "h:x", f"h:{'9' * 5000}",
        "127..0.0.1:9464", f"{'h' * 64}:9464",
    ],
)  # fmt: skip
def test_refuses_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="metrics_address"):
        parse_host_port(text)
