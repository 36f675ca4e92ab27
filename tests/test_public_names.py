"""The names and signatures that scripts call. A change here is a change for users."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from textwrap import dedent

import pytest
import storm_client
import storm_kernels
import torch
from storm_client import OffloadStats, errors
from storm_kernels import ancf, ternary
from storm_kernels.ternary import nn as ternary_nn

import stormd
import stormd.protocol

EAGER = {"compile", "errors"}
"""Modules of the client with the names of what `import storm_client` has bound."""

ERRORS = {
    "ActivationLost",
    "CorruptBlob",
    "DaemonLost",
    "DaemonUnavailable",
    "ProtocolMismatch",
    "QuotaExceeded",
    "UsageError",
}


def _parameters(function: object) -> dict[str, object]:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    return {name: one.default for name, one in signature.parameters.items()}


def test_the_client_offers_what_is_promised() -> None:
    promised = {"Client", "Offload", "OffloadStats", "connect", "errors", "offload"}
    promised |= {"cross_entropy", "linear_cross_entropy"}
    assert promised | {"Feeder", "Receiver", "compile", "compile_step", "micro_batches"} <= set(
        storm_client.__all__
    )
    for name in storm_client.__all__:
        assert hasattr(storm_client, name)


def test_importing_the_client_loads_little() -> None:
    script = """
        import sys, torch
        before = set(sys.modules)
        import storm_client
        print(*sorted(name for name in set(sys.modules) - before if name != "storm_client"))
    """
    loaded = subprocess.run(
        [sys.executable, "-c", dedent(script)], capture_output=True, check=True, text=True
    ).stdout.split()
    assert loaded == ["storm_client.compile", "storm_client.errors"]


def test_no_module_takes_the_place_of_a_name_that_is_loaded_at_its_first_use() -> None:
    """Importing a submodule binds its name in the package, where the function is expected."""
    for name in set(storm_client.__all__) - EAGER:
        assert find_spec(f"storm_client.{name}") is None, name


def test_a_name_that_the_client_lacks_is_told() -> None:
    with pytest.raises(AttributeError, match="'storm_client' has no attribute 'conect'"):
        storm_client.conect  # noqa: B018
    assert set(storm_client.__all__) <= set(dir(storm_client))


def test_connect_takes_what_is_promised() -> None:
    taken = _parameters(storm_client.connect)
    assert list(taken)[:4] == ["address", "embedded", "pool_bytes", "timeout"]
    assert (taken["address"], taken["embedded"], taken["timeout"]) == (None, "auto", 5.0)


def test_offload_takes_what_is_promised() -> None:
    taken = _parameters(storm_client.Client.offload)
    assert list(taken)[:2] == ["self", "model"]
    assert taken["min_bytes"] == 1 << 20
    assert taken["codec"] == "ancf"


def test_compile_takes_what_is_promised() -> None:
    taken = _parameters(storm_client.compile)
    assert list(taken)[:3] == ["model", "budget", "client"]
    assert (taken["codec"], taken["min_bytes"]) == ("ancf", 1 << 20)
    taken = _parameters(storm_client.compile_step)
    assert list(taken)[:3] == ["step", "budget", "client"]
    assert (taken["codec"], taken["min_bytes"]) == ("ancf", 1 << 20)
    assert next(iter(_parameters(storm_client.Feeder))) == "iterable"
    assert next(iter(_parameters(storm_client.Receiver))) == "callback"
    (entry,) = entry_points(group="torch_dynamo_backends", name="stormd")
    assert entry.value == "storm_client.compile.backend:stormd"


def test_losses_take_what_is_promised() -> None:
    theirs = _parameters(torch.nn.functional.cross_entropy)
    taken = _parameters(storm_client.cross_entropy)
    assert list(taken.items())[: len(theirs)] == list(theirs.items())
    taken = _parameters(storm_client.linear_cross_entropy)
    assert list(taken)[:4] == ["hidden", "weight", "target", "bias"]


def test_the_statistics_have_their_fields() -> None:
    fields = {name for name in dir(OffloadStats) if not name.startswith("_")}
    assert {
        "saved_bytes",
        "skipped_bytes",
        "deduplicated_bytes",
        "offloaded_bytes",
        "stored_bytes",
        "ratio",
        "kept_bytes",
        "store_seconds",
        "restore_wait_seconds",
    } <= fields


def test_every_error_is_a_storm_error() -> None:
    for name in ERRORS:
        assert issubclass(getattr(errors, name), errors.StormError)


def test_the_codec_offers_what_is_promised() -> None:
    assert list(_parameters(ancf.encode))[:5] == ["tensor", "mode", "speed", "tolerance", "backend"]
    assert list(_parameters(ancf.decode))[:4] == ["blob", "out", "device", "backend"]
    assert set(storm_kernels.backends()) == {"cuda", "cpu", "numpy"}


def test_ternary_tensors_offer_what_is_promised() -> None:
    assert list(_parameters(ternary.encode))[:2] == ["values", "threshold"]
    assert list(_parameters(ternary.dot))[:4] == ["a0", "a1", "b0", "b1"]
    assert list(_parameters(ternary.matvec))[:3] == ["w0", "w1", "x"]
    assert list(_parameters(ternary.matmul))[:3] == ["w0", "w1", "x"]
    promised = {"planes", "nbytes", "to_bytes", "from_bytes", "from_float"}
    assert promised <= set(dir(ternary.TernaryTensor))
    fields = ternary.TernaryTensor.__dataclass_fields__
    assert {"bit0", "bit1", "shape", "scale"} <= set(fields)
    for name in ("SimpleRotorNet", "TernaryLinear", "convert"):
        assert name in ternary_nn.__all__
    for name in ("forward", "train", "save", "load"):
        assert hasattr(ternary_nn.SimpleRotorNet, name)
    assert list(_parameters(ternary_nn.SimpleRotorNet))[:3] == ["inputs", "hidden", "outputs"]


def test_all_names_that_are_exported_exist() -> None:
    for module in (storm_client, storm_kernels, ancf, ternary, stormd.protocol):
        assert len(set(module.__all__)) == len(module.__all__)
        for name in module.__all__:
            assert hasattr(module, name), f"{module.__name__}.{name}"


def test_the_daemon_says_its_version() -> None:
    assert stormd.__version__.count(".") == 2
