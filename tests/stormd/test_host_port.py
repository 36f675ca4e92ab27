"""Addresses in and out, and what is refused."""

import pytest

from stormd.errors import ConfigError
from stormd.host_port import parse_host_port


def test_reads_addresses() -> None:
    assert parse_host_port("127.0.0.1:9464") == ("127.0.0.1", 9464)
    assert parse_host_port("[::1]:80") == ("::1", 80)
    assert parse_host_port("localhost:0") == ("localhost", 0)


@pytest.mark.parametrize(
    "text", ["", ":9464", "9464", "host", "::1:9464", "[::1]", "h:70000", "h:x", f"h:{'9' * 5000}"]
)
def test_refuses_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="metrics_address"):
        parse_host_port(text)
