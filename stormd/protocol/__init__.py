"""What the daemon and its clients share: messages and their framing."""
