"""A worker process for each device, and one front process that has the address and all counters."""
