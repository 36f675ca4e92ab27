"""Reports about offloading: counts, tables, figures, warnings."""
