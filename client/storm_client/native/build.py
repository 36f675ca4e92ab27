"""Builds the module `_follow` from this folder against the installed torch, into a cache.

    python -m storm_client.native            build it now; print its path, or why that failed
    python -m storm_client.native --check    print whether it exists or can be built

This file imports only the standard library, so that a training process can run it in a second
process without loading PyTorch twice. A separate process loads and tests each module before it
enters the cache, so a module that does not fit the installed torch never gets there. Processes that
start at the same time build the module once.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

__all__ = ["BuildError", "build", "build_failure", "check", "module_path"]

FOLDER = Path(__file__).resolve().parent

NAME = "_follow"

BUILD_SECONDS = 900.0
"""Timeout for each command of a build; compiling takes half a minute on one processor."""

FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-g0", "-DNDEBUG")
"""NDEBUG matches PyTorch's own build: with its debug checks some of its classes are larger."""

_TRY = """
import sys, torch, importlib.machinery as m, importlib.util as u
from types import SimpleNamespace as S
spec = u.spec_from_file_location("_follow", sys.argv[1])
follow = u.module_from_spec(spec); spec.loader.exec_module(follow)
follow.configure(torch.nn.Parameter, lambda *_: RuntimeError("changed"), lambda *_: None, None, (),
                 bool, set(), frozenset, 0)
tallies = follow.Tallies(); rows = [tallies.add_row() for _ in range(3)]
x = torch.ones(64, requires_grad=True); w = torch.full((64,), 2.0)
call = ("aten::exp", "", None, 0, "", 0, None, True, False, False, 0, ())
script = follow.Script([(0, 0, 256, (), rows[2], 0, False, True, None),
                        (1, 3, 0, (), 0, -1, False, False, call)], [(256, True)], 1, False)
unexpected = lambda *_: sys.exit("unexpected")
model = follow.ModelStorages([], [w]); python = (*[unexpected] * 10, lambda: None)
hooks = follow.Follower(script, tallies, model, python, 128, rows[0], rows[1])
hooks.watch()
with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
    y = (x * w).exp()
hooks.unwatch()
y.sum().backward()
assert hooks.end() == 1 and hooks.sizes == (256, []) and torch.equal(x.grad, 2 * y.detach())
assert tallies.drain()[0] == [(1, 1, 256), (2, 1, 256)]
told = []; sink = S(launched=lambda *one: told.append(one[3:]), overwritten=told.append)
new = follow.Launches(print, sink); new.watch(); e = torch.empty(4); assert not told
kernel = S(updates=(), writes=(0,), reads=(1,), numbers=(2,))
for number in 1, 1, "": new.report(kernel, {"made": e, "read": w, "number": number}, (1,))
assert follow.launch_listener() is print and told[2] is e and [one[1] for one in told[:2]] == [0, 1]
new.unwatch()
draw = follow.note_draw(w); drawn = torch.rand(4); draw.end(); after = torch.get_rng_state()
assert torch.equal(draw.again(torch.rand, [4], {}), drawn)
assert torch.equal(torch.get_rng_state(), after)
"""
"""Fails if the module at a given path does not fit the installed torch."""


class BuildError(Exception):
    """The module cannot be built; the message says why."""


def module_path() -> Path:
    """Return the path of the module for this Python, torch and these sources; it may not exist yet.

    Raises:
        BuildError: torch is not installed, or this user has no home.
    """
    return _cache() / _key() / f"{NAME}{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def build_failure(path: Path) -> str | None:
    """Return why building the module at that path failed; None if no failure is recorded."""
    try:
        return path.with_name("failed").read_text()
    except OSError:
        return None


def build() -> Path:
    """Build the module unless it exists, and return its path; wait if another process builds it.

    Raises:
        BuildError: there is no compiler, its output cannot be loaded, or there is no place for it.
            The first two reasons are recorded for `build_failure`; the next call tries again.
    """
    path = module_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise _no_place(str(error)) from error
    with path.with_name("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            try:
                _build(path)
            except BuildError as error:
                path.with_name("failed").write_text(str(error))
                raise
    return path


def _build(path: Path) -> None:
    torch = _torch()
    compiler = _compiler()
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        unit, made = Path(directory) / "all.cpp", Path(directory) / path.name
        unit.write_text("".join(f'#include "{one}"\n' for one in sorted(FOLDER.glob("*.cpp"))))
        _run([*compiler.split(), *_flags(torch), str(unit), "-o", str(made), *_libraries(torch)])
        _run([sys.executable, "-c", _TRY, str(made)])
        made.chmod(0o755)  # a module that a group may write to is not loaded
        made.replace(path)
    path.with_name("failed").unlink(missing_ok=True)


def _compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if found is None:
        raise BuildError("no C++ compiler was found; install g++ 11 or later, or set CXX")
    return found


def _flags(torch: Path) -> list[str]:
    """Return the compiler flags; all files are one unit, so PyTorch's headers compile only once."""
    include = torch / "include"
    folders = (sysconfig.get_paths()["include"], include, include / "torch/csrc/api/include")
    return [*FLAGS, f"-I{FOLDER}", *(f"-isystem{folder}" for folder in folders)]


def _libraries(torch: Path) -> list[str]:
    names = ("torch_python", "torch", "torch_cpu", "c10")
    library = torch / "lib"
    return [f"-L{library}", *(f"-l{name}" for name in names), f"-Wl,-rpath,{library}"]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(  # noqa: S603 - the compiler, or this Python
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=BUILD_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        first = next((line for line in said.splitlines() if "error" in line.lower()), said[-400:])
        raise BuildError(f"{command[0]} exited with {done.returncode}: {first}")


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed")
    return Path(spec.origin).parent


def _key() -> str:
    """Return a hash of what the module depends on: sources, flags, Python, and torch's library."""
    digest = hashlib.sha256(repr((FLAGS, sys.implementation.cache_tag, sys.abiflags)).encode())
    library = _torch() / "lib" / "libtorch_python.so"
    try:
        status = library.stat()
    except OSError as error:
        raise BuildError(f"{library}: {error.strerror}") from error
    digest.update(repr((str(library), status.st_size, status.st_mtime_ns)).encode())
    for source in sorted((*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h"))):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:20]


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "stormd" / "native"
    except RuntimeError as error:  # as in a container, for a user that it does not know
        raise BuildError(f"{error} Set HOME or XDG_CACHE_HOME") from error


def check() -> str:
    """Return the path of the module, or a message that names the compiler that will build it.

    Raises:
        BuildError: it cannot be built, or an earlier build failed.
    """
    path = module_path()
    if path.exists():
        return str(path)
    reason = build_failure(path)
    if reason is not None:
        raise BuildError(reason)
    place = next(one for one in path.parents if one.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        raise _no_place(f"{place} cannot be written to")
    return f"{_compiler()} builds it beside the first steps"


def _no_place(why: str) -> BuildError:
    return BuildError(f"{why}. Set XDG_CACHE_HOME to a directory that can be written to")


def main() -> int:
    """Build the module, or check for it, and print its path, or why there is none."""
    parser = argparse.ArgumentParser(prog="python -m storm_client.native")
    parser.add_argument("--check", action="store_true", help="only say whether it is there")
    parser.add_argument("--background", action="store_true", help="leave processors to others")
    args = parser.parse_args()
    if args.background:
        os.nice(10)
    try:
        print(check() if args.check else build())  # noqa: T201 - a command
    except (BuildError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
