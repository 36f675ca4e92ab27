"""How a message is declared: a class with typed fields, each type with the values it may have.

From the declaration come the constructor, the check of every field and the order on the wire, so no
message is checked, encoded or decoded by code of its own. A message object that exists is valid:
neither side repeats a check, and a hostile frame ends in ProtocolError before any field is used.

Frames are decoded for every operation, so a class's constructor and decoder are compiled from its
rules: a loop over rules took two to five times as long. They are compiled when the first message of
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
"""Of a value in an error."""


# --- the values that a field may have -------------------------------------------------------


class Rule(NamedTuple):
    """What a field may be: `test` is an expression about `{0}`, `item` the rule of a list's items.

    `complaint` completes "FIELD is VALUE, ...". No test costs more than the value is long, and none
    raises, whatever the value is. Its parts come from declarations alone, never from a peer.
    """

    test: str
    complaint: str
    item: Rule | None = None

    def accepts(self, value: object) -> bool:
        """Tell whether a field may have the value."""
        return bool(eval(self.test.format("value"), {"value": value}))  # noqa: S307 - our own text


# `type(x) is int` and not isinstance: True is an int to isinstance, and no id.


def integer(least: int, most: int, meaning: str) -> Rule:
    """Return the rule of a number from `least` to `most`; `meaning` says so for people."""
    return Rule(f"type({{0}}) is int and {least} <= {{0}} <= {most}", f"not {meaning}")


def seconds(*, above_zero: bool) -> Rule:
    """Return the rule of a time, which is above 0 or may be 0."""
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
    """Return the rule of a name: some characters, at most `most`, that can be printed."""
    test = f"type({{0}}) is str and 0 < len({{0}}) <= {most} and {{0}}.isprintable()"
    return Rule(test, f"not 1 to {most} printable characters")


def one_of(*allowed: str) -> Rule:
    """Return the rule of a text that is one of a few."""
    test = f"type({{0}}) is str and {{0}} in {allowed!r}"
    return Rule(test, f"not one of {', '.join(allowed)}")


def binary(most: int) -> Rule:
    """Return the rule of at most `most` bytes."""
    return Rule(f"type({{0}}) is bytes and len({{0}}) <= {most}", f"not at most {most} bytes")


def numbers(fields: int, most: int, plural: str) -> Rule:
    """Return the rule of `fields` numbers in 0 .. 2^63-1 for each of 1 to `most` things, packed.

    Each takes eight bytes, the lowest first, so all are checked at once: by the highest bits.
    """
    size = 8 * fields
    test = (
        f"type({{0}}) is bytes and 0 < len({{0}}) <= {size * most} and "
        f"not len({{0}}) % {size} and max({{0}}[7::8]) < 128"
    )
    return Rule(test, f"not {fields} numbers of 8 bytes for each of 1 to {most} {plural}")


def flag() -> Rule:
    """Return the rule of a truth value."""
    return Rule("type({0}) is bool", "neither true nor false")


def mapping() -> Rule:
    """Return the rule of a map; what is in it is not looked at."""
    return Rule("type({0}) is dict", "not a map")


def list_of(item: Rule, most: int, plural: str) -> Rule:
    """Return the rule of a list of at most `most` items, which are called `plural`."""
    items = f"all([{item.test.format('one')} for one in {{0}}])"
    test = f"type({{0}}) is list and len({{0}}) <= {most} and {items}"
    return Rule(test, f"not a list of at most {most} {plural}", item)


# --- messages -------------------------------------------------------------------------------

_TYPES: dict[int, type[Message]] = {}

Kind = TypeVar("Kind", bound="type[Message]")


class Message:
    """Base of all messages: equal where they are of one class and have equal fields.

    OP is the number on the wire, COSTLY whether the answer may take the daemon milliseconds, FIELDS
    the names of the fields in the order they travel. Construction raises ProtocolError with the
    field, its value and what it must be; a message that exists cannot be changed.
    """

    __slots__ = ()

    OP: ClassVar[int] = 0
    COSTLY: ClassVar[bool] = False
    FIELDS: ClassVar[tuple[str, ...]] = ()
    _declared: ClassVar[_Declaration]

    def __init__(self, *values: Any, **named: Any) -> None:
        """Compile the class's own constructor, which replaces this one, and call it."""
        _compile(type(self))
        type(self).__init__(self, *values, **named)

    def check_together(self) -> None:
        """Raise ProtocolError where valid fields do not go together; few messages have such."""

    def to_wire(self) -> tuple[Any, ...]:
        """Return the fields in the order they travel."""
        return tuple(getattr(self, field) for field in self.FIELDS)

    @classmethod
    def from_wire(cls, values: list[Any]) -> Self:
        """Return the message of these fields; the class's own decoder replaces this at first use.

        Raises:
            ProtocolError: they are too few, too many, or not valid.
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
        pairs = zip(self.FIELDS, self.to_wire(), strict=True)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in pairs)})"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refuse: what was checked stays as it is."""
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set: messages do not change")


class _Declaration(NamedTuple):
    """What the compiled functions of a class are made of."""

    defaults: dict[str, Any]
    kw_only: bool


@dataclass_transform(frozen_default=True, kw_only_default=False)
def message(number: int, *, kw_only: bool = False, costly: bool = False) -> Callable[[Kind], Kind]:
    """Declare the decorated class as the message of that number, and its fields as they travel.

    With `kw_only` it is made by keywords alone: for those with several numbers, where a swapped
    pair would be valid.
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
            _declared=_Declaration(defaults, kw_only),
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
    # Compiled first: exec of a text has CPython forget that an interrupt is to end the process.
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
        **{f"default_{field}": value for field, value in kind._declared.defaults.items()},
    }


def _test(places: Sequence[str], rules: dict[str, Rule]) -> str:
    """Return the expression that is true where what is in these places is valid."""
    tests = zip(places, rules.values(), strict=True)
    return " and ".join(f"({rule.test.format(place)})" for place, rule in tests) or "True"


def _culprit(rule: Rule, value: Any) -> tuple[object, str]:
    """Return what exactly is wrong, of a list the item, and the complaint."""
    if rule.item is not None and type(value) is list:
        for item in value:
            if not rule.item.accepts(item):
                return item, rule.item.complaint
    return value, rule.complaint


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[: SHOWN_CHARACTERS - 3] + "..."
