"""What tests of compiled graphs need of a machine."""

from support.compile_fixtures import cpu_costs, full_link, kernels

__all__ = ["cpu_costs", "full_link", "kernels"]
