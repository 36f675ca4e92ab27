"""Numbers that both sides must agree on before a byte is exchanged.

A limit here is part of the protocol: raising one is a new protocol version. Limits that an
operator may change live in the daemon's config and reach the client in Welcome.
"""

__all__ = [
    "FIRST_LEASED",
    "MAX_BATCH",
    "MAX_BUDGET",
    "MAX_COSTLY",
    "MAX_DIMENSIONS",
    "MAX_DTYPE",
    "MAX_ENTRY_BYTES",
    "MAX_FEATURES",
    "MAX_FRAME_BYTES",
    "MAX_HANDLE_BYTES",
    "MAX_ID",
    "MAX_NAME",
    "MAX_PIECES_WAITING",
    "MAX_TEXT",
    "PIECE_NUMBER_BYTES",
    "PROTOCOL_VERSION",
    "TOKEN_BYTES",
]

PROTOCOL_VERSION = 11

MAX_FRAME_BYTES = 1 << 20
"""Bytes of one ZeroMQ frame; a larger one ends its connection."""

MAX_BATCH = 4096
"""Messages in one frame, and chunks of those that have several."""

MAX_COSTLY = 8
"""Messages in one frame that may take the daemon milliseconds each: a state, a put, a get, a list
of names. All others wait until a frame has been answered."""

MAX_ID = (1 << 63) - 1
"""Ids, offsets, sizes and sequence numbers lie in 0 .. MAX_ID."""

MAX_ENTRY_BYTES = 1 << 30
"""Bytes of one entry before encoding; larger storages travel as several entries."""

MAX_TEXT = 4096
"""Characters of any string in a message."""

MAX_FEATURES = 64
"""Features in a Hello or Welcome."""

MAX_HANDLE_BYTES = 512
"""Bytes of any binary field: a CUDA IPC handle has 64, a token 16."""

MAX_PIECES_WAITING = 16
"""Pieces of one session that are on offer at one time: so many descriptors of it may be open."""

PIECE_NUMBER_BYTES = 8
"""Bytes of the number that comes with a descriptor on a lifeline."""

TOKEN_BYTES = 16
"""Bytes of the secret that ties a lifeline connection to its session."""

MAX_NAME = 256
"""Characters of a name in the shared cache."""

MAX_DTYPE = 64
"""Characters of the name of a cached tensor's element type. Hundreds of answers that carry one
leave in one frame."""

MAX_DIMENSIONS = 64
"""Dimensions of a tensor in the shared cache; what PyTorch allows."""

MAX_BUDGET = 16
"""Characters of a budget as people read it. A state has one of each of up to 1,024 sessions."""

FIRST_LEASED = 1 << 62
"""Entries that the daemon lends to a session are numbered from here, a client's own below."""
