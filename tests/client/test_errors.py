from __future__ import annotations

import storm_client as storm
from storm_client.errors import named


def test_the_daemon_names_errors() -> None:
    error = named("CorruptBlob", "entry 7")
    assert type(error) is storm.CorruptBlob
    assert str(error) == "entry 7"
    unknown = named("Newer", "what happened")
    assert type(unknown) is storm.StormError
    assert str(unknown) == "Newer: what happened"
