from __future__ import annotations

import storm_client as storm
from storm_client import errors
from storm_client.errors import named


def test_all_are_storm_errors() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type):
            assert issubclass(kind, storm.StormError)


def test_the_daemon_names_errors() -> None:
    error = named("CorruptBlob", "entry 7")
    assert type(error) is storm.CorruptBlob
    assert str(error) == "entry 7"


def test_an_unknown_name_is_kept() -> None:
    error = named("Newer", "what happened")
    assert type(error) is storm.StormError
    assert str(error) == "Newer: what happened"
