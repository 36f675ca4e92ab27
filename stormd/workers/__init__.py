"""A worker process for each device, and one front that has the address and all that is counted."""
