"""Where CUDA is missing, importing the wrappers says what to install or what is not there."""

from __future__ import annotations

import subprocess
import sys


def test_a_missing_driver_or_binding_is_one_error_with_its_cause() -> None:
    code = (
        "import sys; sys.modules['cuda.bindings'] = None\n"
        "from storm_kernels.errors import BackendUnavailable\n"
        "try:\n"
        "    import storm_kernels.cuda_driver\n"
        "except BackendUnavailable as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert "pip install cuda-bindings" in done.stdout
