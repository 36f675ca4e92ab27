"""The version of the distribution, the same for daemon and client; the build reads it here."""

from typing import Final

__all__ = ["__version__"]

__version__: Final = "0.1.0"
