"""NVIDIA's programs as scripts: a GPU that is listed, and an MPS that notes what it is asked."""

from __future__ import annotations

from pathlib import Path

SMI = """#!/bin/sh
echo "GPU 0: Fake (UUID: GPU-00000000-0000-0000-0000-000000000000)"
"""

CONTROL = """#!/bin/sh
pipes=${CUDA_MPS_PIPE_DIRECTORY:?}
note() { echo "$*" >>"$FAKE_MPS_NOTES"; }
if [ "$1" = -f ]; then
    note "start visible=${CUDA_VISIBLE_DEVICES-all}"
    if [ -n "$FAKE_MPS_TROUBLE" ]; then echo "$FAKE_MPS_TROUBLE"; exit 1; fi
    [ -z "$FAKE_MPS_MUTE" ] && : >"$pipes/control"
    sleep 1000 &
    echo $! >"$pipes/server"
    trap 'note term; kill $!; exit 0' TERM
    while [ ! -e "$pipes/quit" ]; do sleep 0.02; done
    kill $!
    note end
    exit 0
fi
read -r question
case "$question" in
    quit) note quit; : >"$pipes/quit" ;;
    get_server_list) [ -e "$pipes/control" ] ;;
    *) exit 1 ;;
esac
"""
"""Its server is a child that outlives it, unless it is asked to quit."""


class FakeMps:
    """The two scripts in a directory that is put on PATH."""

    def __init__(self, directory: Path) -> None:
        self._programs = directory / "programs"
        self._programs.mkdir()
        self._notes = directory / "mps-notes"
        self.install("nvidia-smi", SMI)
        self.install("nvidia-cuda-mps-control", CONTROL)

    def install(self, name: str, script: str) -> None:
        program = self._programs / name
        program.write_text(script)
        program.chmod(0o755)

    def remove(self, name: str) -> None:
        (self._programs / name).unlink()

    def variables(self, **more: str) -> dict[str, str]:
        """Return the variables of a run; what else is on PATH is what scripts need."""
        path = f"{self._programs}:/usr/bin:/bin"
        return {"PATH": path, "FAKE_MPS_NOTES": str(self._notes), "STORMD_DEVICE": "auto", **more}

    def notes(self) -> list[str]:
        return self._notes.read_text().splitlines() if self._notes.exists() else []
