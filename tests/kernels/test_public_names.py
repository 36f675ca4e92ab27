"""The names that callers outside this repository may use."""

from __future__ import annotations

import inspect

import storm_kernels
from storm_kernels import ancf, nn, scan


def test_names_of_the_package():
    assert {"BackendInfo", "backends", "CorruptBlob", "UsageError"} <= set(storm_kernels.__all__)
    for name in storm_kernels.__all__:
        assert getattr(storm_kernels, name).__doc__


def test_names_of_the_codec():
    expected = {"encode", "decode", "Blob", "max_encoded_bytes", "read_header", "host_backend"}
    assert expected <= set(ancf.__all__)
    for name in ancf.__all__:
        assert getattr(ancf, name).__doc__


def test_arguments_of_encode_and_decode():
    encode = list(inspect.signature(ancf.encode).parameters)
    decode = list(inspect.signature(ancf.decode).parameters)
    assert encode[:5] == ["tensor", "mode", "speed", "tolerance", "backend"]
    assert decode[:4] == ["blob", "out", "device", "backend"]


def test_properties_of_blobs():
    for name in ("nbytes", "raw_nbytes", "ratio", "mode", "dtype", "shape"):
        assert isinstance(getattr(ancf.Blob, name), property)


def test_names_of_the_scans():
    assert set(scan.__all__) == {
        "OPERATIONS",
        "associative_scan",
        "cumsum",
        "fused_associative_scan",
        "linear_scan",
    }
    for name in set(scan.__all__) - {"OPERATIONS"}:
        assert getattr(scan, name).__doc__


def test_arguments_of_the_scans():
    taken = {
        name: list(inspect.signature(getattr(scan, name)).parameters)
        for name in ("cumsum", "linear_scan", "associative_scan", "fused_associative_scan")
    }
    assert taken["cumsum"][:5] == ["x", "dim", "reverse", "exclusive", "dtype"]
    assert taken["linear_scan"][:5] == ["a", "b", "initial", "dim", "reverse"]
    assert taken["associative_scan"][:4] == ["op", "x", "dim", "reverse"]
    assert taken["fused_associative_scan"] == ["x", "dim", "reverse"]


def test_arguments_of_the_layer():
    layer = inspect.signature(nn.AdaptiveRankSemiseparable).parameters
    assert {name: one.default for name, one in layer.items() if name != "d_model"} == {
        "max_rank": 32,
        "conv_size": 4,
        "decay": False,
        "use_fused_scan": True,
    }
