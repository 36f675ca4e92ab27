"""The manifests: they agree with the daemon's settings, the images and each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from stormd.config import Config
from stormd.options import parse_host_port
from stormd.protocol import parse_address
from stormd.protocol.addresses import SYSTEM_DIRECTORY
from stormd.settings import load_config


def objects(path: Path) -> dict[str, dict[str, Any]]:
    """Return a file's objects by kind."""
    return {item["kind"]: item for item in yaml.safe_load_all(path.read_text())}


@pytest.fixture
def daemon_set(deploy: Path) -> dict[str, Any]:
    return objects(deploy / "kubernetes" / "stormd.yaml")["DaemonSet"]


@pytest.fixture
def daemon(daemon_set: dict[str, Any]) -> dict[str, Any]:
    """The pod's spec of the daemon."""
    spec: dict[str, Any] = daemon_set["spec"]["template"]["spec"]
    return spec


@pytest.fixture
def trainer(deploy: Path) -> dict[str, Any]:
    """The pod's spec of the trainer."""
    spec: dict[str, Any] = objects(deploy / "kubernetes" / "trainer.yaml")["Pod"]["spec"]
    return spec


@pytest.fixture
def config(deploy: Path, daemon: dict[str, Any]) -> Config:
    """The settings as the daemon in the pod reads them."""
    return load_config(environ=variables(daemon), path=deploy / "docker" / "stormd.toml")


def variables(spec: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in spec["containers"][0]["env"]}


def host_path(spec: dict[str, Any], mount_path: str) -> str:
    """Return the host's directory that a container sees at `mount_path`."""
    mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    path: str = volumes[mounts[mount_path]]["hostPath"]["path"]
    return path


def test_manifests_agree_with_each_other_and_the_image(
    daemon_set: dict[str, Any], daemon: dict[str, Any], trainer: dict[str, Any], deploy: Path
) -> None:
    labels = daemon_set["spec"]["template"]["metadata"]["labels"]
    assert daemon_set["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for spec in (daemon, trainer):
        mounted = {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
        assert spec["hostPID"] is True
        assert spec["containers"][0]["image"] == "stormd:cuda"
    assert "--tag stormd:cuda" in (deploy / "docker" / "Dockerfile").read_text()
    script = trainer["containers"][0]["command"][-1]
    assert (deploy.parent / "client/examples" / Path(script).name).exists()


def test_the_trainer_may_connect(
    trainer: dict[str, Any], daemon: dict[str, Any], config: Config
) -> None:
    directory = str(parse_address(config.address).parent)
    assert directory == str(SYSTEM_DIRECTORY)
    assert host_path(daemon, directory) == host_path(trainer, directory)
    assert variables(trainer)["STORMD_ADDRESS"] == config.address
    identity = trainer["securityContext"]
    group = daemon["containers"][0]["securityContext"]["runAsGroup"]
    assert identity["runAsUser"] in config.allowed_uids
    assert group in identity["supplementalGroups"]
    assert config.socket_mode & 0o060 == 0o060


def test_probes_and_scraping_ask_the_metrics_port(
    daemon_set: dict[str, Any], daemon: dict[str, Any], config: Config
) -> None:
    container = daemon["containers"][0]
    _, port = parse_host_port(config.metrics_address)
    ports = {item["name"]: item["containerPort"] for item in container["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]["httpGet"]
        assert (probe["path"], ports[probe["port"]]) == ("/healthz", port)
    annotations = daemon_set["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port)


def test_limits_leave_the_daemon_its_own(daemon: dict[str, Any], config: Config) -> None:
    limit = daemon["containers"][0]["resources"]["limits"]["memory"]
    assert config.host_bytes < int(limit.removesuffix("Gi")) << 30
    assert daemon["terminationGracePeriodSeconds"] > config.shutdown_seconds
