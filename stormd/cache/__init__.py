"""The shared host cache: named tensors that outlive the session that put them.

items     what is held, for whom and how long; what is dropped when room is needed
names     which names a user may read, in order
requests  what the ledger answers to sessions that are for the cache
"""
