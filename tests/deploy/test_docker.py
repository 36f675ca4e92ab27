"""The images and the compose file: what they name exists, and they agree with the daemon."""

from __future__ import annotations

import fnmatch
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from stormd.config import Config, config_options
from stormd.options import parse_host_port
from stormd.protocol import parse_address
from stormd.protocol.addresses import SYSTEM_DIRECTORY
from stormd.settings import load_config

Stage = list[tuple[str, str]]


def instructions(text: str) -> Stage:
    """Return (instruction, rest) of each, continuation lines joined, comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    parts = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(word.upper(), rest) for word, rest in parts]


@pytest.fixture
def stages(deploy: Path) -> dict[str, Stage]:
    """The Dockerfile's stages by name."""
    found: dict[str, Stage] = {}
    current: Stage = []
    for word, rest in instructions((deploy / "docker" / "Dockerfile").read_text()):
        if word == "FROM":
            current = found[rest.split()[-1]] = []
        current.append((word, rest))
    return found


@pytest.fixture
def compose(deploy: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((deploy / "docker" / "compose.yaml").read_text())
    return loaded


def copied(stage: Stage) -> list[str]:
    """Return what a stage copies out of the checkout."""
    return [path for word, rest in stage if word == "COPY" for path in shlex.split(rest)[:-1]]


def test_what_is_copied_exists_and_reaches_the_build(
    stages: dict[str, Stage], repository: Path
) -> None:
    ignore = repository / "deploy" / "docker" / "Dockerfile.dockerignore"
    sent = [line[1:] for line in ignore.read_text().splitlines() if line.startswith("!")]
    for path in (path for stage in stages.values() for path in copied(stage)):
        assert (repository / path).exists(), path
        assert any(fnmatch.fnmatch(path, pattern) for pattern in sent), path
    assert all((repository / path).exists() for path in sent)
    match = re.search(r"wheel\.packages = \[(.*)\]", (repository / "pyproject.toml").read_text())
    folders = {package.strip(' "').split("/")[0] for package in match[1].split(",")}
    assert folders <= set(copied(stages["build"]))


def test_images_run_the_daemon_as_its_own_user_with_the_settings_that_they_have(
    deploy: Path, stages: dict[str, Stage]
) -> None:
    def tail(stage: Stage) -> Stage:
        start = next(index for index, (_, rest) in enumerate(stage) if "groupadd" in rest)
        return stage[start:]

    assert tail(stages["cpu"]) == tail(stages["cuda"])
    stage = dict(stages["cpu"])
    assert stage["ENTRYPOINT"] == '["stormd"]'
    assert stage["CMD"] == '["serve", "--config", "/etc/stormd/stormd.toml"]'
    uid = stage["USER"].split(":")[0]
    assert any(f"--uid {uid} " in rest for _, rest in stages["cpu"])
    config = load_config(environ={}, path=deploy / "docker" / "stormd.toml")
    assert parse_address(config.address).parent == SYSTEM_DIRECTORY
    host, port = parse_host_port(config.metrics_address)
    assert (host, str(port)) == ("0.0.0.0", stage["EXPOSE"])


def test_compose_builds_targets_that_exist_with_settings_of_the_daemon(
    compose: dict[str, Any], stages: dict[str, Stage], deploy: Path, repository: Path
) -> None:
    services = compose["services"]
    built = [service["build"] for service in services.values() if "build" in service]
    assert {build["target"] for build in built} == {"cpu", "cuda"} <= set(stages)
    for build in built:
        context = (deploy / "docker" / build["context"]).resolve()
        assert context == repository
        assert (context / build["dockerfile"]).exists()
    for name in ("stormd", "stormd-cpu"):
        environment = services[name]["environment"]
        assert set(environment) <= {option.variable for option in config_options()}
        values = {key: re.sub(r"\$\{\w+:-(.*)\}", r"\1", environment[key]) for key in environment}
        assert load_config(environ=values).allowed_uids == (0, 64300)


def test_what_containers_share_and_are_granted(
    compose: dict[str, Any], deploy: Path, repository: Path
) -> None:
    services = compose["services"]
    assert all(f"run:{SYSTEM_DIRECTORY}" in one["volumes"] for one in services.values())
    daemon, trainer = services["stormd"], services["trainer"]
    assert parse_address(trainer["environment"]["STORMD_ADDRESS"]).parent == SYSTEM_DIRECTORY
    assert daemon["pid"] == trainer["pid"] == "host"
    assert daemon["deploy"] == trainer["deploy"]
    assert daemon["ulimits"]["memlock"] == -1
    config = load_config(environ={}, path=deploy / "docker" / "stormd.toml")
    _, port = parse_host_port(config.metrics_address)
    assert daemon["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert float(daemon["stop_grace_period"].removesuffix("s")) > Config().shutdown_seconds
    assert (repository / "client/examples" / Path(trainer["command"][0]).name).exists()
