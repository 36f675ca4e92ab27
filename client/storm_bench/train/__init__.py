"""One training step by every method of keeping activations; the client's side of `bench train`.

Methods differ in what happens to saved tensors and in nothing else: same model, same seed, same
kernels. Each runs in a process of its own, so no allocator remembers another, unless they are to
be measured together.
"""

from typing import Final

__all__ = ["BUDGET_PREFIX"]

BUDGET_PREFIX: Final = "storm-budget="
"""Before a budget: the name of the method that offloads within it."""
