"""Checks whether a machine can run the daemon well, and says what to do where it cannot.

A check tries the thing itself where that is harmless, changes nothing, and always ends in a
Finding. Only "fail" means that the daemon would not do its work.
"""

from stormd.doctor.finding import Finding, State
from stormd.doctor.report import examine

__all__ = ["Finding", "State", "examine"]
