from __future__ import annotations

import storm_client as storm
from storm_client.errors import lost_in_forward, named


def test_the_daemon_names_errors() -> None:
    error = named("CorruptBlob", "entry 7")
    assert type(error) is storm.CorruptBlob
    assert str(error) == "entry 7"
    unknown = named("Newer", "what happened")
    assert type(unknown) is storm.StormError
    assert str(unknown) == "Newer: what happened"


def test_advice_is_given_once() -> None:
    told = lost_in_forward(lost_in_forward(storm.DaemonLost("it ended")))
    assert str(told).startswith("it ended; call storm_client.connect() again")
    assert str(told).count("connect()") == 1
    closed = storm.errors.ConnectionClosed("this process closed it")
    assert lost_in_forward(closed) is closed
