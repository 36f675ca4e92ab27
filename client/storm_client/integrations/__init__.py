"""One line in the frameworks that people configure instead of writing a training loop.

Each module is for one framework and imports it when it is used, if at all: importing
`storm_client`, or one of these, loads none. They only decide where an Offload's `with` block
begins and ends; what happens inside is the same as in a loop of one's own. Options are those of
`Client.offload`, which also checks them.
"""

__all__: list[str] = []
