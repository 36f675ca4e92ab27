"""The shared cache's messages: what a put may name and how large it may be."""

from __future__ import annotations

from typing import Any

import pytest

from stormd.gateway.dispatch import MESSAGES_A_FRAME
from stormd.protocol import (
    NAMES_A_PAGE,
    CacheGet,
    CacheNames,
    CachePut,
    CacheTensor,
    Envelope,
    ProtocolError,
    encode,
)
from stormd.protocol.limits import (
    MAX_BATCH,
    MAX_DIMENSIONS,
    MAX_DTYPE,
    MAX_FRAME_BYTES,
    MAX_ID,
    MAX_NAME,
)


def put(**changes: Any) -> CachePut:
    fields: dict[str, Any] = {
        "name": "teacher",
        "dtype": "bfloat16",
        "shape": [2, 3],
        "nbytes": 12,
        "part_bytes": 8,
        "ttl_seconds": 0.0,
    }
    return CachePut(**{**fields, **changes})


@pytest.mark.parametrize("name", ["", "x" * (MAX_NAME + 1), "a\nb", "\ud800", b"bytes", None])
def test_a_name_is_printable_and_of_limited_length(name: Any) -> None:
    for make in (lambda: put(name=name), lambda: CacheGet(name)):
        with pytest.raises(ProtocolError, match=f"not 1 to {MAX_NAME} printable"):
            make()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nbytes": 8 * MAX_BATCH + 1}, f"{MAX_BATCH + 1} of them; the limit is {MAX_BATCH}"),
        ({"part_bytes": 0}, "part_bytes is 0"),
        ({"nbytes": -1}, "nbytes is -1"),
        ({"shape": [1] * (MAX_DIMENSIONS + 1)}, f"at most {MAX_DIMENSIONS} sizes"),
        ({"dtype": "x" * (MAX_DTYPE + 1)}, f"at most {MAX_DTYPE} characters"),
        ({"shape": [-1]}, "shape is -1"),
        ({"ttl_seconds": -0.5}, "ttl_seconds is -0.5"),
        ({"ttl_seconds": float("nan")}, "ttl_seconds is nan"),
        ({"ttl_seconds": 1}, "ttl_seconds is 1"),
    ],
)
def test_a_put_names_the_field_that_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        put(**changes)


def test_the_longest_page_of_names_fits_into_a_frame() -> None:
    page = CacheNames(["\N{CJK UNIFIED IDEOGRAPH-20000}" * MAX_NAME] * NAMES_A_PAGE, False)
    assert len(encode([Envelope(1, page)])) < MAX_FRAME_BYTES
    with pytest.raises(ProtocolError, match=f"at most {NAMES_A_PAGE}"):
        CacheNames(["x"] * (NAMES_A_PAGE + 1), False)


def test_as_many_of_the_longest_loans_as_the_daemon_sends_at_once_fit_into_a_frame() -> None:
    dtype = "\N{CJK UNIFIED IDEOGRAPH-20000}" * MAX_DTYPE
    loan = CacheTensor(
        dtype=dtype,
        shape=[MAX_ID] * MAX_DIMENSIONS,
        nbytes=MAX_ID,
        part_bytes=1 << 20,
        first_entry=MAX_ID,
    )
    assert len(encode([Envelope(MAX_ID, loan)] * MESSAGES_A_FRAME)) < MAX_FRAME_BYTES
