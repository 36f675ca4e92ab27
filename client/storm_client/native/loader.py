"""Loads the compiled module.

`build.py` builds the module once for each installed torch and Python, in another process during
the first steps. Python follows all steps until the module exists, or if it cannot be built.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

from storm_client.native import Native
from storm_client.native.build import BuildError, module_path
from storm_client.native.configuring import configured

__all__ = ["SWITCH", "module", "reason"]

SWITCH: Final = "STORMD_NATIVE"
"""An environment variable: if "off", Python follows all steps; if "on" or unset, compiled code."""

LOOK_EVERY: Final = 32
"""During a build, one in this many calls of `module` checks whether the build has finished."""

log = logging.getLogger("storm_client")


class _Loader:
    """The state of the module in this process: absent, being built, loaded or given up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects all below
        self.module: Any = None
        self.reason = ""
        """Why there is no module; empty before the first `look`, in a build, and once loaded."""
        self._path: Path | None = None
        self._builder: subprocess.Popen[bytes] | None = None
        self._calls = 0

    def look(self) -> None:
        """Load the module if it is built; otherwise start its build."""
        if self.module is not None or self.reason:
            return
        self._calls += 1
        if self._builder is not None and self._calls % LOOK_EVERY:
            return
        if not self._lock.acquire(blocking=False):
            return  # another thread does this already
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
            _, said = self._builder.communicate()
            self._give_up(said.decode().strip() or "the compiler's process was ended")

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        log.warning("stormd: saved tensors are handled in Python, which is slower: %s", reason)


_loader = _Loader()


def module() -> Native | None:
    """Return the compiled module; None while it is being built, or if it cannot be built."""
    if _loader.module is None:
        _loader.look()
    return _loader.module


def reason() -> str:
    """Return why there is no module; empty if it is loaded, or may be soon."""
    return _loader.reason


def _load(path: Path) -> Native:
    """Load the module if only this user or root can have written it.

    Raises:
        ImportError: another user could have written it, or it cannot be loaded.
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
    """Start a process that builds the module; it continues if this process ends."""
    builder = Path(__file__).with_name("build.py")
    return subprocess.Popen(  # noqa: S603 - this Python and a file beside this one
        [sys.executable, str(builder), "--background"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,  # its error, if it fails
        start_new_session=True,
    )
