"""options.py: what may be asked of an encoder, and how a refusal reads."""

from __future__ import annotations

import pytest
from storm_kernels import UsageError
from storm_kernels.ancf import DType, Mode
from storm_kernels.ancf.options import POLICIES, SPEEDS, check_request, parse_mode


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_names_of_modes(speed, policy):
    assert parse_mode("auto", speed, policy) is None
    for mode in Mode:
        assert parse_mode(mode.name.lower(), speed, policy) is mode


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("WINDOW",), "mode 'WINDOW' is unknown; choose one of auto, raw, window"),
        (("auto", "slow"), "speed 'slow' is unknown; choose one of fast, dense"),
        (("auto", "fast", "bold"), "policy 'bold' is unknown; choose one of conservative"),
    ],
)
def test_other_names_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        parse_mode(*arguments)


def test_sizes():
    check_request(0, DType.FLOAT64, 256)
    check_request(16, DType.COMPLEX128, 272)
    with pytest.raises(UsageError, match="12 bytes are no whole number of float64 elements"):
        check_request(12, DType.FLOAT64, 1000)
    with pytest.raises(UsageError, match="-8 bytes"):
        check_request(-8, DType.FLOAT64, 1000)
    with pytest.raises(UsageError, match="output of 263 bytes, max_encoded_bytes says 264"):
        check_request(8, DType.FLOAT64, 263)
