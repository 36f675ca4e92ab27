"""The client's side of `stormd bench`: measures what a training script would call.

Each benchmark uses the public API, in a process of its own.
"""
