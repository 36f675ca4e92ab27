"""Associative scans along any dimension, at about the speed of a copy, with gradients.

    from storm_kernels import scan
    sums = scan.cumsum(x, dim=1)
    h, last = scan.linear_scan(a, b)        # h_t = a_t h_(t-1) + b_t

The backends are Triton kernels on CUDA devices, C on CPUs, and NumPy as the reference.
`backends("scan")` reports which of them work here, and why one does not. DESIGN.md specifies the
order in which numbers are combined.
"""

from __future__ import annotations

from .api import OPERATIONS, associative_scan, cumsum, fused_associative_scan, linear_scan

__all__ = ["OPERATIONS", "associative_scan", "cumsum", "fused_associative_scan", "linear_scan"]
