"""Checks whether a machine can run the daemon well, and says what to do if it cannot.

A check tries the operation itself where that is harmless, changes nothing, and always returns a
Finding. Only "fail" means that the daemon would not work.
"""

from stormd.doctor.finding import Finding, State
from stormd.doctor.report import examine

__all__ = ["Finding", "State", "examine"]
