"""Moves bytes and messages between a training process and its daemon."""
