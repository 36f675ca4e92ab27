"""The marks of a test that needs a CUDA device and its bindings."""

from importlib.util import find_spec

import pytest
import torch

_MISSING = "no CUDA device here" if not torch.cuda.is_available() else ""
if not _MISSING and find_spec("cuda") is None:
    _MISSING = "the CUDA bindings are not installed"

cuda_only = [pytest.mark.gpu, pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "there is one")]
