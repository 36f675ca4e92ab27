"""The memory that the daemon takes from the machine."""
