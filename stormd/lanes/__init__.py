"""The data paths of the daemon, one module a kind of device."""
