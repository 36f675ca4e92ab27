"""The data paths of the client, one module a kind of device."""
