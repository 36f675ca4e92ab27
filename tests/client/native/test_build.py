"""The module's build: by whom, where to, and what is there without it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import storm_client as storm
import torch
from storm_client.native import build
from storm_client.native import loader as native
from support.training import assert_identical, seeded
from support.waiting import wait_until


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of this user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[native._Loader]:
    """What a process knows that has not looked for the module yet."""
    monkeypatch.delenv(native.SWITCH, raising=False)
    found = native._Loader()
    monkeypatch.setattr(native, "_loader", found)
    yield found
    if found._builder is not None:
        found._builder.wait()


def compiler(path: Path, script: str) -> str:
    """Return a program that stands for a compiler."""
    program = path / "compiler"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_without_a_compiler_it_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler was found; install g"):
        build.build()
    reason = build.build_failure(build.module_path())
    assert reason is not None
    with pytest.raises(build.BuildError, match="no C"):
        build.check()


def test_what_a_compiler_says_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "CXX", compiler(cache, "echo some line >&2; echo 'x.h: error: no such' >&2; exit 3")
    )
    with pytest.raises(build.BuildError, match="exited with 3") as caught:
        build.build()
    assert str(caught.value).endswith(": x.h: error: no such")
    assert not build.module_path().exists()


def test_what_cannot_be_loaded_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where headers and libraries are of two versions."""
    script = 'while [ "$1" != -o ]; do shift; done; echo nothing > "$2"'
    monkeypatch.setenv("CXX", compiler(cache, script))
    with pytest.raises(build.BuildError, match="exited with 1"):
        build.build()
    assert not build.module_path().exists()
    assert [one.name for one in build.module_path().parent.iterdir()] != []


def test_a_module_of_other_sources_is_another(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.module_path()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-Dother"))
    assert build.module_path() != path


def test_steps_go_on_in_python_where_nothing_can_be_built(
    cache: Path,
    loader: native._Loader,
    client: storm.Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", compiler(cache, "exit 1"))
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
    offload = client.offload(net, min_bytes=1, budget=1.0)

    def step() -> torch.Tensor:
        net.zero_grad()
        with offload:
            loss = net(seeded("cpu", 16, 64)).square().sum()
        loss.backward()
        return net[0].weight.grad.clone()

    expected = step()
    wait_until(lambda: [native.module(), native.reason()][1], 60.0)
    assert "exited with 1" in native.reason()
    for _ in range(4):
        assert_identical([step()], [expected])
    assert native.module() is None
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert ["handled in Python, which is slower" in one for one in warned] == [True]


def test_only_a_build_beside_training_leaves_processors_to_others(
    cache: Path, loader: native._Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(cache, f"nice >>{cache}/levels; exit 1"))
    with pytest.raises(build.BuildError, match="exited with 1"):
        build.build()
    shutil.rmtree(build.module_path().parent)
    wait_until(lambda: [native.module(), native.reason()][1], 60.0)
    own = os.nice(0)
    assert (cache / "levels").read_text().split() == [str(own), str(min(own + 10, 19))]


def test_it_can_be_switched_off(loader: native._Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "off")
    assert native.module() is None
    assert native.reason() == "STORMD_NATIVE=off"


def test_a_module_that_others_may_write_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "_follow.so"
    path.write_bytes(b"")
    path.chmod(path.stat().st_mode | stat.S_IWOTH)
    with pytest.raises(ImportError, match="written by another user; delete it"):
        native._load(path)


def test_a_module_built_by_a_user_whose_group_may_write_is_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A umask of 2 is usual: each user has a group of their own."""

    def run(command: list[str]) -> None:
        if "-o" in command:
            Path(command[command.index("-o") + 1]).touch(0o777)

    monkeypatch.setattr(build, "_run", run)
    before = os.umask(0o002)
    try:
        path = build.build()
    finally:
        os.umask(before)
    with pytest.raises(ImportError, match="file too short"):
        native._load(path)


def test_without_a_home_steps_go_on_in_python(
    loader: native._Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert native.module() is None
    assert "Set HOME or XDG_CACHE_HOME" in native.reason()


def test_where_nothing_can_be_written_that_is_the_reason(
    cache: Path, loader: native._Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    wait_until(lambda: [native.module(), native.reason()][1], 60.0)
    assert "Not a directory" in native.reason()
    assert "Set XDG_CACHE_HOME to a directory that can be written to" in native.reason()
    with pytest.raises(build.BuildError, match=r"/file cannot be written to\. Set XDG_CACHE_HOME"):
        build.check()


def of_compiler(name: str) -> str:
    """Return the path of one of the compiler's own libraries."""
    program = shutil.which("g++")
    if program is None:
        pytest.skip("no g++ here")
    command = [program, f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"no {name} here")
    return found


@pytest.mark.slow
def test_compiled_code_is_clean_under_the_address_sanitizer(cache: Path) -> None:
    cases = "native/test_following.py", "eager/test_launches.py"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *(Path(__file__).parents[1] / one for one in cases),
            "-q",
            "-x",
            "-s",
            "-k",
            "compiled",
            "-m",
            "not gpu",
        ],
        check=True,
        timeout=540,
        cwd=Path(__file__).parents[3],
        env=os.environ
        | {
            "LD_PRELOAD": f"{of_compiler('libasan.so')} {of_compiler('libstdc++.so')}",
            "ASAN_OPTIONS": "detect_leaks=0",  # of Python's own
            "CXX": "g++ -fsanitize=address -fno-omit-frame-pointer",
        },
    )


ALONE = """
import runpy, sys
sys.argv = ["build", "--check"]
try:
    runpy.run_path({path!r}, run_name="__main__")
finally:
    print("torch" in sys.modules)
"""


def test_the_build_program_needs_the_standard_library_alone(cache: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE.format(path=build.__file__)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"CXX": "some"},
    )
    assert done.stdout.split()[-1] == "False"
