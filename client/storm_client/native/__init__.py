"""The native path: compiled code that follows steps whose plan is made, beside its Python twin.

The module is built once for each torch and Python (`build.py`), by another process beside the first
steps, and Python does everything until it is there, or where it cannot be built.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final, TypeAlias

from storm_client.native.build import BuildError, module_path, why_not
from storm_client.native.configuring import configured

__all__ = ["SWITCH", "Native", "module", "reason"]

Native: TypeAlias = Any
"""The compiled module; `_follow.pyi` says what it has."""

SWITCH: Final = "STORMD_NATIVE"
"""A variable: "off" has Python follow all steps; "on", or nothing, has compiled code do so."""

LOOK_EVERY: Final = 32
"""One in so many calls of `module` looks whether the module has been built by now."""

log = logging.getLogger("storm_client")


class _Loader:
    """What is known of the module in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects all below
        self.module: Any = None
        self.reason = ""
        """Why there is none; empty before anybody has asked, and while it is being built."""
        self._path: Path | None = None
        self._builder: subprocess.Popen[bytes] | None = None
        self._calls = 0

    def look(self) -> None:
        """Load the module if it is there, or have it built."""
        if self.module is not None or self.reason:
            return
        self._calls += 1
        if self._builder is not None and self._calls % LOOK_EVERY:
            return
        if not self._lock.acquire(blocking=False):
            return  # another thread is at it
        try:
            self._find()
        except (BuildError, OSError, ImportError) as error:
            self._give_up(str(error))
        finally:
            self._lock.release()

    def _find(self) -> None:
        if os.environ.get(SWITCH, "on") == "off":
            self.reason = f"{SWITCH}=off"
            return
        if self._path is None:
            self._path = module_path()
        if self._path.exists():
            self.module = _load(self._path)
        elif self._builder is None:
            self._builder = _start_building()
        elif self._builder.poll() is not None:
            self._give_up(why_not(self._path) or "the compiler's process was ended")

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        log.warning("stormd: saved tensors are followed by Python, which is slower: %s", reason)


_loader = _Loader()


def module() -> Native | None:
    """Return the compiled module; None while it is being built, and where it cannot be."""
    if _loader.module is None:
        _loader.look()
    return _loader.module


def reason() -> str:
    """Return why there is no module; empty where there is one, or may be soon."""
    return _loader.reason


def _load(path: Path) -> Native:
    """Load the module, which nobody but this user, or root, may have written.

    Raises:
        ImportError: somebody else could have, or it cannot be loaded.
    """
    for one in (path, path.parent):
        status = one.stat()
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            raise ImportError(f"{one} could have been written by another user; delete it")
    spec = importlib.util.spec_from_file_location("storm_client.native._follow", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no extension module of this Python")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return configured(found)


def _start_building() -> subprocess.Popen[bytes]:
    """Have another process build the module; it goes on if this one ends."""
    builder = Path(__file__).with_name("build.py")
    return subprocess.Popen(  # noqa: S603 - this Python and a file beside this one
        [sys.executable, str(builder), "--background"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
