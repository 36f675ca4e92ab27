"""Limits that both sides must agree on before they exchange a byte.

A limit here is part of the protocol: raising one needs a new protocol version. Limits that an
operator may change are in the daemon's config; the client receives them in Welcome.
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

PROTOCOL_VERSION = 13

MAX_FRAME_BYTES = 1 << 20
"""Maximum bytes of one ZeroMQ frame; the daemon closes a connection that sends a larger one."""

MAX_BATCH = 4096
"""Maximum messages in one frame, and maximum chunks in one message that names several."""

MAX_COSTLY = 8
"""Maximum number of costly messages in one frame: a status request, a put, a get, a list of names.
Each may take the daemon milliseconds, and every other client waits until the frame is answered."""

MAX_ID = (1 << 63) - 1
"""Ids, offsets, sizes and sequence numbers are in 0 .. MAX_ID."""

MAX_ENTRY_BYTES = 1 << 30
"""Maximum bytes of one entry before encoding; the client splits a larger storage into entries."""

MAX_TEXT = 4096
"""Maximum characters of any string in a message."""

MAX_FEATURES = 64
"""Maximum features in a Hello or Welcome."""

MAX_HANDLE_BYTES = 512
"""Maximum bytes of any binary field: a CUDA IPC handle has 64, a token 16."""

MAX_PIECES_WAITING = 16
"""Maximum pieces that one session may have on offer at a time, each with an open descriptor."""

PIECE_NUMBER_BYTES = 8
"""Bytes of the number that the client sends with a descriptor on a lifeline."""

TOKEN_BYTES = 16
"""Bytes of the secret that ties a lifeline connection to its session."""

MAX_NAME = 256
"""Maximum characters of a name in the shared cache."""

MAX_DTYPE = 64
"""Maximum characters of the name of a cached tensor's element type. Hundreds of answers with such
a name must fit into one frame."""

MAX_DIMENSIONS = 64
"""Maximum dimensions of a tensor in the shared cache, as in PyTorch."""

MAX_BUDGET = 16
"""Maximum characters of a budget as text. A state has one for each of up to 1,024 sessions."""

FIRST_LEASED = 1 << 62
"""The first number of entries that the daemon lends to a session; a client's own are below it."""
