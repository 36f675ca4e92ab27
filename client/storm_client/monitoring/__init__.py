"""What is told of offloading: counts, tables, pictures, warnings."""
