"""The shared host cache: named tensors that outlive the session that put them.

items     which tensors are held, for whom and how long, and which are dropped to make room
names     which names a user may read, in order
(the ledger's cache_requests answers the sessions that use the cache)
"""
