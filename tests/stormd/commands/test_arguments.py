"""Values on the command line."""

from __future__ import annotations

import argparse

import pytest

from stormd.commands.arguments import add_daemon_arguments, positive_float, positive_int


def test_positive_numbers() -> None:
    assert positive_int("7") == 7
    assert positive_float("0.5") == 0.5


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", "²"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        positive_int(text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x", ""])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        positive_float(text)


def test_a_daemon_may_be_named() -> None:
    parser = argparse.ArgumentParser()
    add_daemon_arguments(parser)
    chosen = parser.parse_args(["--address", "ipc:///x", "--timeout", "3"])
    assert (chosen.address, chosen.timeout) == ("ipc:///x", 3.0)
