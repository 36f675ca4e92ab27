"""Named tensors that processes of a node share through the daemon."""
