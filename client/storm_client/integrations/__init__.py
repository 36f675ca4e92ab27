"""Integrations of one line each, for frameworks that run the training loop for the user.

Each module is for one framework and imports it only on use, if at all: importing `storm_client` or
one of these modules imports no framework. The modules only decide where an Offload's `with` block
begins and ends; inside, everything is the same as in a user's own loop. Options are those of
`Client.offload`, which also checks them.
"""

__all__: list[str] = []
