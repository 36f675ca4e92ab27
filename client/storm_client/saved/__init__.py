"""Saved tensors: their stored ranges, versions and views, and who else can reach their storage."""
