"""What a CUDA driver call can raise: one error that names the call, its outcome and the object."""

__all__ = ["CudaDriverError", "CudaUnavailable"]


class CudaUnavailable(RuntimeError):
    """There is no usable CUDA here; the message says what is missing."""


class CudaDriverError(RuntimeError):
    """A driver call failed. Nothing that the call was to create exists.

    Attributes:
        call: the driver's name of the call, such as "cuMemAlloc".
        code: the driver's name of the outcome, such as "CUDA_ERROR_OUT_OF_MEMORY".
    """

    def __init__(self, call: str, code: str, detail: str) -> None:
        super().__init__(f"{call} failed with {code}{': ' + detail if detail else ''}")
        self.call = call
        self.code = code
