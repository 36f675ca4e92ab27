"""The client's side of `stormd bench`: measurements through the public API.

What stays true: a benchmark measures what a training script would call, in a process of its own.
"""
