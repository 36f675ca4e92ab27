from __future__ import annotations

import os
import re
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client import connecting
from support.daemon_process import DaemonProcess, start_daemon
from support.scripts import Scripts

pytestmark = pytest.mark.usefixtures("no_daemon_by_convention")

# --- what connect is told -------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1", "ipc://relative", "nonsense", "", "ipc:///" + "x" * 200]
)
def test_a_malformed_address(address: str) -> None:
    with pytest.raises(storm.UsageError, match=r"ipc:///PATH|at most"):
        storm.connect(address, embedded="never")


@pytest.mark.parametrize("embedded", ["never", "auto"])
def test_a_named_address_is_never_replaced_by_another_daemon(embedded: Any, tmp_path: Path) -> None:
    with pytest.raises(
        storm.DaemonUnavailable, match=r"stormd\.sock.*does not exist.*stormd serve"
    ):
        storm.connect(f"ipc://{tmp_path}/stormd.sock", embedded=embedded)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embedded": "maybe"}, "maybe.*auto, never, always"),
        ({"embedded": "always", "address": "ipc:///run/s"}, "starts a daemon at an address of its"),
        ({"pool_bytes": 0}, "pool_bytes is 0.*1048576"),
        ({"pool_bytes": "4GB"}, "pool_bytes: '4GB' has the unit 'GB'.*as in 4GiB"),
        ({"pool_bytes": "1KiB"}, "pool_bytes is '1KiB'.*1048576"),
        ({"pool_bytes": 1.5}, "pool_bytes is 1.5; pass a number of bytes, or a size"),
        ({"pool_bytes": True}, "pool_bytes is True"),
        ({"timeout": 0}, "timeout is 0.*above 0"),
        ({"timeout": "soon"}, "timeout is 'soon'"),
        ({"on_daemon_loss": "ignore"}, "on_daemon_loss is 'ignore'.*raise, keep"),
    ],
)
def test_bad_values(options: dict[str, object], message: str) -> None:
    with pytest.raises(storm.UsageError, match=message):
        storm.connect(**options)


def test_no_daemon_and_none_allowed() -> None:
    with pytest.raises(storm.DaemonUnavailable, match="stormd serve"):
        storm.connect(embedded="never")


# --- where it looks -------------------------------------------------------------------------


def test_the_environment_names_the_daemon(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORMD_ADDRESS", daemon.address)
    with storm.connect(timeout=30) as client:
        assert client.address == daemon.address


def test_an_unknown_variable_is_warned_of(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORMD_ADRESS", "ipc:///n")
    with (
        pytest.warns(UserWarning, match="'STORMD_ADDRESS'.*no effect") as warned,
        storm.connect(daemon.address, timeout=30),
    ):
        pass
    assert [str(one.filename) for one in warned] == [__file__]


def test_the_warning_names_the_line_that_offloads(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORMD_ADRESS", "ipc:///n")
    monkeypatch.setenv("STORMD_ADDRESS", daemon.address)
    shared = connecting._Shared()
    monkeypatch.setattr(connecting, "_SHARED", shared)
    with pytest.warns(UserWarning, match="no effect") as warned:
        storm.offload()
    shared.connected().close()
    assert [str(one.filename) for one in warned] == [__file__]


@pytest.mark.parametrize(
    ("value", "warned"), [("0", 1), ("OFF", 1), ("off", 0), ("on", 0), ("", 0)]
)
def test_a_value_of_the_switch_that_has_no_effect_is_warned_of(
    value: str, warned: int, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORMD_NATIVE", value)
    with warnings.catch_warnings(record=True, action="always") as found:
        storm.connect(daemon.address, timeout=30).close()
    message = f"variable STORMD_NATIVE is {value!r}: write off or on; it has no effect"
    assert [str(one.message) for one in found] == [message] * warned


def test_a_running_daemon_is_found(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "_defaults", lambda: ["ipc:///n", daemon.address])
    with storm.connect(embedded="never", timeout=30) as client:
        assert client.address == daemon.address


# --- who may --------------------------------------------------------------------------------

AS_ANOTHER_USER = """
    import os, pathlib, sys, storm_client as storm, storm_client.client, stormd.query
    from stormd.protocol import addresses
    addresses.SYSTEM_DIRECTORY = pathlib.Path(sys.argv[2])
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    for call in sys.argv[3:]:
        try:
            eval(call)
        except Exception as error:
            print("@@", type(error).__name__, error)
"""
"""It becomes another user after its imports: that one may not read the interpreter."""

CALLS = (
    "storm.connect(sys.argv[1])",
    "storm.connect(embedded='never')",
    "stormd.query.StatusQuery(sys.argv[1]).ask()",
    "stormd.query.find_address(None, {'XDG_RUNTIME_DIR': '/proc/nowhere'})",
)
"""Of a daemon by its address, and by convention as the system's."""


PLACES = {
    0o755: r"the socket \S+/stormd\.sock belongs to user 0 \(root\) and has mode 0600",
    0o700: r"the directory \S+ belongs to user 0 \(root\) and has mode 0700",
}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_told_that_permission_is_denied_and_by_whom(
    place_for_all: Path, scripts: Scripts, tmp_path: Path
) -> None:
    daemon = start_daemon(place_for_all, "--pool-bytes=8MiB", "--cache-bytes=0", "--device=cpu")
    script = written(tmp_path, AS_ANOTHER_USER)
    try:
        for mode, place in PLACES.items():
            place_for_all.chmod(mode)
            said = scripts.lines(script, daemon.address, str(place_for_all), *CALLS)
            assert_denied(" ".join(said).split("@@ ")[1:], place)
    finally:
        daemon.stop()


def assert_denied(said: list[str], place: str) -> None:
    for call, answer in zip(CALLS, said, strict=True):
        assert answer.startswith(("DaemonUnavailable", "NoDaemon")), answer
        assert re.search(rf"permission denied for user 65534 \(nobody\): {place}", answer), answer
        assert "no daemon listens" not in answer
        if "argv" in call:
            assert "ask user 0 (root) to let you in (allowed_uids" in answer
            assert "stormd serve" not in answer


@pytest.fixture
def place_for_all() -> Iterator[Path]:
    """A directory that any user can walk to, as one of pytest's is not."""
    with tempfile.TemporaryDirectory(prefix="stormd-test-", dir="/tmp") as name:
        yield Path(name)


# --- in other processes ---------------------------------------------------------------------


def written(folder: Path, text: str) -> Path:
    """Return a file with a script."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_the_process_shares_one_client(
    daemon: DaemonProcess, scripts: Scripts, tmp_path: Path
) -> None:
    script = """
        import os, threading, torch, storm_client as storm
        from storm_client import offloading
        offloading.SETTLE_SECONDS = 30
        one, two = storm.offload(min_bytes=1), storm.offload(torch.nn.Linear(2, 2), codec="raw")
        x = torch.ones(64, 64, requires_grad=True)
        with one:
            y = x.exp()
        with two:
            loss = (y * y).sum()
        loss.backward()
        print(one.stats().offloaded_bytes, sum(t.name == "storm-io" for t in threading.enumerate()))
    """
    printed = scripts.lines(written(tmp_path, script), STORMD_ADDRESS=daemon.address)
    assert printed == [f"{64 * 64 * 4} 1"]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("storm.offload(None, pool_bytes=1)", "connect(pool_bytes=...)"),
        ("storm.offload(None, min_byte=1)", "did you mean 'min_bytes'"),
        ("storm.offload(5)", "got int 5"),
        ("storm.Offload(torch.nn.Linear(2, 2))", "made by storm_client.offload(model)"),
    ],
)
def test_misuse_is_told_before_anything_is_started(script: str, words: str) -> None:
    with pytest.raises(storm.UsageError, match=re.escape(words)):
        eval(script, {"storm": storm, "torch": torch})
    assert connecting._SHARED._connected is None


def test_a_child_that_was_forked_while_the_process_connected(
    daemon: DaemonProcess, scripts: Scripts, tmp_path: Path
) -> None:
    script = """
        import os, signal, threading, torch, storm_client as storm
        from storm_client import connecting
        held, forked = threading.Event(), threading.Event()

        def hold():
            with connecting._SHARED._lock:
                held.set()
                forked.wait(30)

        threading.Thread(target=hold).start()
        held.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends a child that hangs
        else:
            forked.set()
            print(os.waitpid(child, 0)[1], flush=True)
        with storm.offload(min_bytes=1) as offload:
            torch.ones(64, 64, requires_grad=True).exp().sum().backward()
        print(offload.stats().saved_bytes > 0)
    """
    printed = scripts.lines(written(tmp_path, script), STORMD_ADDRESS=daemon.address)
    assert printed == ["True", "0", "True"]
