from __future__ import annotations

import storm_client as storm
from storm_client import errors
from storm_client.errors import ConnectionClosed, lost_in_backward, lost_in_forward, named


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


def test_a_loss_says_what_to_do_next() -> None:
    loss = storm.DaemonLost("the daemon ended")
    for advised in (lost_in_forward(loss), lost_in_backward(loss, keeps=False)):
        assert type(advised) is storm.DaemonLost
        assert str(advised).startswith("the daemon ended; ")
        assert "storm_client.connect()" in str(advised)
        assert 'on_daemon_loss="keep"' in str(advised)


def test_what_is_done_already_is_not_advised() -> None:
    text = str(lost_in_backward(storm.DaemonLost("the daemon ended"), keeps=True))
    assert text == "the daemon ended; repeat the step from its forward pass"


def test_a_closed_client_says_itself_what_to_do() -> None:
    closed = ConnectionClosed("closed")
    assert isinstance(closed, storm.DaemonLost)
    assert lost_in_forward(closed) is closed
    assert lost_in_backward(closed, keeps=False) is closed
