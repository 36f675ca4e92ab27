"""How to declare a message: as a class with typed fields, where each type limits the values.

The declaration yields the constructor, the check of every field and the order on the wire, so no
message has its own code to check, encode or decode it. A message object that exists is valid:
neither side repeats a check. A hostile frame ends in ProtocolError before any field is used.

Every operation decodes frames, so a class's constructor and decoder are compiled from its rules: a
loop over the rules took two to five times as long. The code is compiled when the first message of
the class is made, since a trainer imports all classes and uses few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import (
    Any,
    ClassVar,
    NamedTuple,
    NoReturn,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
    get_type_hints,
)

from stormd.protocol.errors import ProtocolError

__all__ = [
    "Message",
    "Rule",
    "binary",
    "flag",
    "integer",
    "list_of",
    "mapping",
    "message",
    "message_types",
    "name",
    "numbers",
    "one_of",
    "seconds",
    "text",
]

SHOWN_CHARACTERS = 60
"""Maximum characters of a value in an error message."""


# --- the values that a field may have -------------------------------------------------------


class Rule(NamedTuple):
    """The values that a field may have.

    `test` is an expression about `{0}`, `item` the rule of a list's items. `complaint` completes
    "FIELD is VALUE, ...". The cost of a test is at most proportional to the value's length, and no
    test raises, whatever the value is. The texts come from declarations alone, never from a peer.
    """

    test: str
    complaint: str
    item: Rule | None = None

    def accepts(self, value: object) -> bool:
        """Return whether a field may have the value."""
        return bool(eval(self.test.format("value"), {"value": value}))  # noqa: S307 - our own text


# `type(x) is int`, not isinstance: isinstance accepts True as an int, but True is no id.


def integer(least: int, most: int, meaning: str) -> Rule:
    """Return the rule of a number from `least` to `most`; `meaning` describes it for people."""
    return Rule(f"type({{0}}) is int and {least} <= {{0}} <= {most}", f"not {meaning}")


def seconds(*, above_zero: bool) -> Rule:
    """Return the rule of a number of seconds: above 0, or at least 0."""
    if above_zero:
        test, meaning = "0.0 < {0} < 1e9", "a positive number of seconds"
    else:
        test, meaning = "0.0 <= {0} < 1e9", "a number of seconds, 0 or more"
    return Rule(f"type({{0}}) is float and {test}", f"not {meaning}")


def text(most: int) -> Rule:
    """Return the rule of a text of at most `most` characters."""
    test = f"type({{0}}) is str and len({{0}}) <= {most}"
    return Rule(test, f"not text of at most {most} characters")


def name(most: int) -> Rule:
    """Return the rule of a name: 1 to `most` printable characters."""
    test = f"type({{0}}) is str and 0 < len({{0}}) <= {most} and {{0}}.isprintable()"
    return Rule(test, f"not 1 to {most} printable characters")


def one_of(*allowed: str) -> Rule:
    """Return the rule of a text that is one of `allowed`."""
    test = f"type({{0}}) is str and {{0}} in {allowed!r}"
    return Rule(test, f"not one of {', '.join(allowed)}")


def binary(most: int) -> Rule:
    """Return the rule of at most `most` bytes."""
    return Rule(f"type({{0}}) is bytes and len({{0}}) <= {most}", f"not at most {most} bytes")


def numbers(fields: int, most: int, plural: str) -> Rule:
    """Return the rule of packed numbers in 0 .. 2^63-1: `fields` for each of 1 to `most` items.

    Each number takes eight bytes, lowest byte first, so one test of all highest bytes checks the
    range of all numbers.
    """
    size = 8 * fields
    test = (
        f"type({{0}}) is bytes and 0 < len({{0}}) <= {size * most} and "
        f"not len({{0}}) % {size} and max({{0}}[7::8]) < 128"
    )
    return Rule(test, f"not {fields} numbers of 8 bytes for each of 1 to {most} {plural}")


def flag() -> Rule:
    """Return the rule of a bool."""
    return Rule("type({0}) is bool", "neither true nor false")


def mapping() -> Rule:
    """Return the rule of a map; its content is not checked."""
    return Rule("type({0}) is dict", "not a map")


def list_of(item: Rule, most: int, plural: str) -> Rule:
    """Return the rule of a list of at most `most` items; `plural` names the items in errors."""
    items = f"all([{item.test.format('one')} for one in {{0}}])"
    test = f"type({{0}}) is list and len({{0}}) <= {most} and {items}"
    return Rule(test, f"not a list of at most {most} {plural}", item)


# --- messages -------------------------------------------------------------------------------

_TYPES: dict[int, type[Message]] = {}

Kind = TypeVar("Kind", bound="type[Message]")


class Message:
    """Base class of all messages. Messages are equal if they have the same class and equal fields.

    OP is the number on the wire. COSTLY says whether the answer may take the daemon milliseconds.
    FIELDS has the names of the fields in wire order. The constructor raises ProtocolError with the
    field, its value and what the field must be. A message cannot be changed once it exists.
    """

    __slots__ = ()

    OP: ClassVar[int] = 0
    COSTLY: ClassVar[bool] = False
    FIELDS: ClassVar[tuple[str, ...]] = ()
    _declared: ClassVar[tuple[dict[str, Any], bool]]  # defaults, and whether all are keywords

    def __init__(self, *values: Any, **named: Any) -> None:
        """Compile the class's own constructor, which replaces this one, then call it."""
        _compile(type(self))
        type(self).__init__(self, *values, **named)

    def check_together(self) -> None:
        """Raise ProtocolError if valid fields contradict each other; few classes override this."""

    def to_wire(self) -> tuple[Any, ...]:
        """Return the fields in wire order."""
        return tuple(getattr(self, field) for field in self.FIELDS)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, in wire order."""
        return dict(zip(self.FIELDS, self.to_wire(), strict=True))

    @classmethod
    def from_wire(cls, values: list[Any]) -> Self:
        """Return the message with these fields; the first call replaces this by compiled code.

        Raises:
            ProtocolError: there are too few or too many fields, or one is not valid.
        """
        _compile(cls)
        return cls.from_wire(values)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.to_wire() == other.to_wire()

    def __hash__(self) -> int:
        return hash((self.OP, self.to_wire()))

    def __repr__(self) -> str:
        pairs = ", ".join(f"{name}={value!r}" for name, value in self.as_dict().items())
        return f"{type(self).__name__}({pairs})"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refuse: a checked message must not change."""
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set: messages do not change")


@dataclass_transform(frozen_default=True, kw_only_default=False)
def message(number: int, *, kw_only: bool = False, costly: bool = False) -> Callable[[Kind], Kind]:
    """Declare the decorated class as the message of that number, with its fields in wire order.

    With `kw_only` the constructor takes keywords alone. Use it for messages with several numbers,
    where swapping two would pass the checks.
    """

    def declare(declared: Kind) -> Kind:
        if number in _TYPES:
            raise TypeError(f"{declared.__name__} and {_TYPES[number].__name__} are both {number}")
        fields = tuple(declared.__annotations__)
        own = dict(vars(declared))
        defaults = {field: own.pop(field) for field in fields if field in own}
        for unslotted in ("__dict__", "__weakref__"):
            own.pop(unslotted, None)
        own.update(
            __slots__=fields,
            OP=number,
            COSTLY=costly,
            FIELDS=fields,
            _declared=(defaults, kw_only),
        )
        kind: Any = type(declared.__name__, declared.__bases__, own)
        _TYPES[number] = kind
        return kind  # type: ignore[no-any-return]  # the class that was made of it

    return declare


def message_types() -> dict[int, type[Message]]:
    """Return every message type by its OP."""
    return dict(_TYPES)


def _compile(kind: Any) -> None:
    """Give a class its constructor, its encoder and its decoder."""
    hints = get_type_hints(kind, include_extras=True)
    rules: dict[str, Rule] = {field: get_args(hints[field])[1] for field in kind.FIELDS}
    known = _known_to(kind, rules)
    # Compile first: exec of a text makes CPython forget that an interrupt is to end the process.
    exec(compile(_source(kind, rules), kind.__name__, "exec"), known)  # noqa: S102 - our own text
    kind.to_wire = known["to_wire"]
    kind.from_wire = staticmethod(known["from_wire"])
    kind.__init__ = known["init"]


def _source(kind: type[Message], rules: dict[str, Rule]) -> str:
    defaults, kw_only = kind._declared
    read = [f"v_{field}" for field in rules]
    together = kind.check_together is not Message.check_together
    taken = [f"{field}=default_{field}" if field in defaults else field for field in rules]
    head = ["self", *(["*"] if kw_only and taken else []), *taken]
    lines = [
        f"def init({', '.join(head)}):",
        f"    if not ({_test(list(rules), rules)}):",
        f"        complain(({''.join(f'{field}, ' for field in rules)}))",
        *(f"    put_{field}(self, {field})" for field in rules),
        "    self.check_together()" if together else "    return",
        "def to_wire(self):",
        f"    return ({''.join(f'self.{field}, ' for field in rules)})",
        "def from_wire(values):",
        f"    if len(values) != {len(rules)}:",
        "        miscount(values)",
        f"    [{', '.join(read)}] = values",
        f"    if not ({_test(read, rules)}):",
        "        complain(values)",
        "    made = new(kind)",
        *(f"    put_{field}(made, v_{field})" for field in rules),
        "    made.check_together()" if together else "",
        "    return made",
    ]
    return "\n".join(lines)


def _known_to(kind: type[Message], rules: dict[str, Rule]) -> dict[str, Any]:

    def complain(values: Sequence[Any]) -> NoReturn:
        for (field, rule), value in zip(rules.items(), values, strict=True):
            if not rule.accepts(value):
                wrong, complaint = _culprit(rule, value)
                raise ProtocolError(f"{kind.__name__}.{field} is {_shown(wrong)}, {complaint}")
        raise AssertionError("the rules are the test, taken one by one")

    def miscount(values: Sequence[Any]) -> NoReturn:
        raise ProtocolError(f"{kind.__name__} has {len(rules)} fields, not {len(values)}")

    return {
        "complain": complain,
        "miscount": miscount,
        "new": object.__new__,
        "kind": kind,
        **{f"put_{field}": getattr(kind, field).__set__ for field in rules},
        **{f"default_{field}": value for field, value in kind._declared[0].items()},
    }


def _test(places: Sequence[str], rules: dict[str, Rule]) -> str:
    """Return an expression that is true if the values in `places` are valid."""
    tests = zip(places, rules.values(), strict=True)
    return " and ".join(f"({rule.test.format(place)})" for place, rule in tests) or "True"


def _culprit(rule: Rule, value: Any) -> tuple[object, str]:
    """Return the value that is wrong, in a list the wrong item, and the complaint about it."""
    if rule.item is not None and type(value) is list:
        for item in value:
            if not rule.item.accepts(item):
                return item, rule.item.complaint
    return value, rule.complaint


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[: SHOWN_CHARACTERS - 3] + "..."
