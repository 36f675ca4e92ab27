"""The variables: all that are read are known, and what Kubernetes sets is no typo."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from stormd.config import config_options
from stormd.protocol import daemon_environment, unknown_variables
from stormd.protocol.variables import CLIENT_SETTINGS, PREFIX, SETTINGS

ROOT = Path(__file__).parents[3]
LITERAL = re.compile(r"""["'](STORMD_[A-Z_]*[A-Z])["']""")


def _named_in_sources() -> Iterator[str]:
    for folder in ("stormd", "client", "kernels", "tests/bench", "tests/support"):
        for path in (ROOT / folder).rglob("*.py"):
            yield from LITERAL.findall(path.read_text())


def test_the_settings_are_those_of_the_daemon() -> None:
    assert list(SETTINGS) == [option.name for option in config_options()]
    assert unknown_variables({option.variable: "" for option in config_options()}) == {}


def test_every_variable_that_the_sources_read_is_known() -> None:
    read = set(_named_in_sources())
    assert "STORMD_ADDRESS" in read
    assert not unknown_variables(dict.fromkeys(read, ""))


def test_a_script_s_own_settings_are_known() -> None:
    assert unknown_variables({PREFIX + name.upper(): "" for name in CLIENT_SETTINGS}) == {}
    assert unknown_variables({"STORMD_BUGDET": ""})["STORMD_BUGDET"].endswith("'STORMD_BUDGET'?")
    assert not set(CLIENT_SETTINGS) & set(SETTINGS)


def test_an_unknown_one_gets_the_closest_known() -> None:
    found = unknown_variables({"STORMD_ADRESS": "", "STORMD_HOME": "", "PATH": "", "STORM_X": ""})
    assert list(found) == ["STORMD_ADRESS", "STORMD_HOME"]
    assert found["STORMD_ADRESS"].endswith(
        "STORMD_ADRESS is no setting: did you mean 'STORMD_ADDRESS'?"
    )
    assert "known are STORMD_ADDRESS, STORMD_SOCKET_MODE" in found["STORMD_HOME"]


def test_what_kubernetes_tells_of_a_service_is_no_typo() -> None:
    links = [
        "STORMD_SERVICE_HOST",
        "STORMD_SERVICE_PORT",
        "STORMD_SERVICE_PORT_METRICS",
        "STORMD_PORT",
        "STORMD_PORT_9464_TCP",
        "STORMD_PORT_9464_TCP_PROTO",
        "STORMD_METRICS_SERVICE_HOST",
        "STORMD_METRICS_PORT_9464_TCP_ADDR",
    ]
    assert all(link.startswith(PREFIX) for link in links)
    assert unknown_variables(dict.fromkeys(links, "10.0.0.1")) == {}
    assert unknown_variables({"STORMD_PORT_BYTES_CPU": "8MiB"})


def test_a_daemon_gets_nothing_of_its_starters_service_manager() -> None:
    others = {"PATH": "/bin", "STORMD_POOL_BYTES": "1GiB"}
    found = daemon_environment(
        others | {"NOTIFY_SOCKET": "/s", "WATCHDOG_USEC": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    )
    assert found == others
