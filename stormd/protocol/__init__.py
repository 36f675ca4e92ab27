"""What the daemon and its clients share: messages, framing, addresses and the timeline page.

It imports the standard library and msgpack alone, so that a client never loads the daemon.
"""

from stormd.protocol.addresses import default_addresses, lifeline_path, parse_address
from stormd.protocol.errors import ProtocolError
from stormd.protocol.framing import Envelope, decode, encode, hello_version
from stormd.protocol.limits import PROTOCOL_VERSION
from stormd.protocol.messages import (
    CODECS,
    DEVICES,
    REJECTIONS,
    Admitted,
    Failed,
    Goodbye,
    Hello,
    Mapped,
    MapSegment,
    Message,
    Ping,
    Pong,
    Refused,
    Rejected,
    Release,
    Restore,
    Restored,
    Status,
    StatusRequest,
    Store,
    Stored,
    UnmapSegment,
    Welcome,
    message_types,
)

__all__ = [
    "CODECS",
    "DEVICES",
    "PROTOCOL_VERSION",
    "REJECTIONS",
    "Admitted",
    "Envelope",
    "Failed",
    "Goodbye",
    "Hello",
    "MapSegment",
    "Mapped",
    "Message",
    "Ping",
    "Pong",
    "ProtocolError",
    "Refused",
    "Rejected",
    "Release",
    "Restore",
    "Restored",
    "Status",
    "StatusRequest",
    "Store",
    "Stored",
    "UnmapSegment",
    "Welcome",
    "decode",
    "default_addresses",
    "encode",
    "hello_version",
    "lifeline_path",
    "message_types",
    "parse_address",
]
