"""The names and signatures that scripts call. A change here is a change for users."""

from __future__ import annotations

import inspect
from importlib.metadata import entry_points
from importlib.util import find_spec

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


OPTIONS: list[tuple[object, list[str], dict[str, object]]] = [
    (
        storm_client.connect,
        ["address", "embedded", "pool_bytes", "timeout"],
        {"address": None, "embedded": "auto", "timeout": 5.0},
    ),
    (storm_client.Client.offload, ["self", "model"], {"min_bytes": 1 << 20, "codec": "ancf"}),
    (storm_client.compile, ["model", "budget", "client"], {"codec": "ancf", "min_bytes": 1 << 20}),
    (
        storm_client.compile_step,
        ["step", "budget", "client"],
        {"codec": "ancf", "min_bytes": 1 << 20},
    ),
    (storm_client.Feeder, ["iterable"], {}),
    (storm_client.Receiver, ["callback"], {}),
    (storm_client.linear_cross_entropy, ["hidden", "weight", "target", "bias"], {}),
    (ancf.encode, ["tensor", "mode", "speed", "tolerance", "backend"], {}),
    (ancf.decode, ["blob", "out", "device", "backend"], {}),
    (ternary.encode, ["values", "threshold"], {}),
    (ternary.dot, ["a0", "a1", "b0", "b1"], {}),
    (ternary.matvec, ["w0", "w1", "x"], {}),
    (ternary.matmul, ["w0", "w1", "x"], {}),
    (ternary_nn.SimpleRotorNet, ["inputs", "hidden", "outputs"], {}),
]
"""What is called, its first parameters, and the defaults of some."""


def _parameters(function: object) -> dict[str, object]:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    return {name: one.default for name, one in signature.parameters.items()}


def test_each_takes_what_is_promised() -> None:
    for function, names, defaults in OPTIONS:
        taken = _parameters(function)
        assert list(taken)[: len(names)] == names, function
        assert defaults.items() <= taken.items(), function
    theirs = _parameters(torch.nn.functional.cross_entropy)
    taken = _parameters(storm_client.cross_entropy)
    assert list(taken.items())[: len(theirs)] == list(theirs.items())


def test_torch_compile_finds_the_backend() -> None:
    (entry,) = entry_points(group="torch_dynamo_backends", name="stormd")
    assert entry.value == "storm_client.compile.backend:stormd"


def test_the_client_offers_what_is_promised() -> None:
    promised = {"Client", "Offload", "OffloadStats", "connect", "errors", "offload"}
    promised |= {"cross_entropy", "linear_cross_entropy"}
    assert promised | {"Feeder", "Receiver", "compile", "compile_step", "micro_batches"} <= set(
        storm_client.__all__
    )
    for name in storm_client.__all__:
        assert hasattr(storm_client, name)


def test_no_module_takes_the_place_of_a_name_that_is_loaded_at_its_first_use() -> None:
    """Importing a submodule binds its name in the package, where the function is expected."""
    for name in set(storm_client.__all__) - EAGER:
        assert find_spec(f"storm_client.{name}") is None, name


def test_a_name_that_the_client_lacks_is_told() -> None:
    with pytest.raises(AttributeError, match="'storm_client' has no attribute 'conect'"):
        storm_client.conect  # noqa: B018
    assert set(storm_client.__all__) <= set(dir(storm_client))


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


def test_the_codec_and_ternary_tensors_offer_what_is_promised() -> None:
    assert set(storm_kernels.backends()) == {"cuda", "cpu", "numpy"}
    promised = {"planes", "nbytes", "to_bytes", "from_bytes", "from_float"}
    assert promised <= set(dir(ternary.TernaryTensor))
    fields = ternary.TernaryTensor.__dataclass_fields__
    assert {"bit0", "bit1", "shape", "scale"} <= set(fields)
    assert {"SimpleRotorNet", "TernaryLinear", "convert"} <= set(ternary_nn.__all__)
    assert {"forward", "train", "save", "load"} <= set(dir(ternary_nn.SimpleRotorNet))


def test_all_names_that_are_exported_exist() -> None:
    for module in (storm_client, storm_kernels, ancf, ternary, stormd.protocol):
        assert len(set(module.__all__)) == len(module.__all__)
        for name in module.__all__:
            assert hasattr(module, name), f"{module.__name__}.{name}"
