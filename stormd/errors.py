"""What can go wrong in the daemon, by whose fault.

What stays true: a message names the value, the limit and the next step, and nothing was changed
by the call that raised.
"""

__all__ = ["ConfigError", "StormdError"]


class StormdError(Exception):
    """Base of all errors of the daemon."""


class ConfigError(StormdError):
    """The operator's: a setting that cannot be used."""
