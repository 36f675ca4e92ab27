"""Losses computed in tiles, so that no float32 copy of the logits is made."""
