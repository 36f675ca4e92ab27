"""The demo: two trainers share a daemon, and nothing about their training changes.

What stays true: every figure comes from real processes of this run; runs with and without
offload differ in offload alone, and are compared step by step, bit for bit.
"""

from stormd.demo.report import Comparison, Report
from stormd.demo.run import Plan, run_demo

__all__ = ["Comparison", "Plan", "Report", "run_demo"]
