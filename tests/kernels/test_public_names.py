"""The names that callers outside this repository may use."""

from __future__ import annotations

import inspect

import storm_kernels
from storm_kernels import ancf


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
