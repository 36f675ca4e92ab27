"""How a message is declared: a class with typed fields, each type with the values it may have.

From the declaration come the constructor, the check of every field and the order on the wire, so no
message is checked, encoded or decoded by code of its own. A message object that exists is valid:
neither side repeats a check, and a hostile frame ends in ProtocolError before any field is used.

Frames are decoded for every operation, so a class's check and decoder are compiled once from its
rules, as dataclasses compiles constructors: a loop over rules took two to five times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """Base of all messages.

    OP is the number on the wire, COSTLY whether the answer may take the daemon milliseconds.
    Construction raises ProtocolError with the field, its value and what it must be.
    """

    __slots__ = ()

    OP: ClassVar[int] = 0
    COSTLY: ClassVar[bool] = False

    def check_together(self) -> None:
        """Raise ProtocolError where valid fields do not go together; few messages have such."""

    def to_wire(self) -> tuple[Any, ...]:
        """Return the fields in the order they travel."""
        raise NotImplementedError  # `message` gives each its own

    @classmethod
    def from_wire(cls, values: list[Any]) -> Self:
        """Return the message of these fields.

        Raises:
            ProtocolError: they are too few, too many, or not valid.
        """
        raise NotImplementedError  # `message` gives each its own


@dataclass_transform(frozen_default=True, kw_only_default=False)
def message(number: int, *, kw_only: bool = False, costly: bool = False) -> Callable[[Kind], Kind]:
    """Declare the decorated class as the message of that number, and its fields as they travel.

    With `kw_only` it is made by keywords alone: for those with several numbers, where a swapped
    pair would be valid.
    """

    def declare(declared: Kind) -> Kind:
        if number in _TYPES:
            raise TypeError(f"{declared.__name__} and {_TYPES[number].__name__} are both {number}")
        hints = get_type_hints(declared, include_extras=True)
        rules = {field: get_args(hints[field])[1] for field in declared.__annotations__}
        compiled = _compiled(declared, rules)
        made: Any = declared
        made.__post_init__, made.to_wire = compiled["check"], compiled["to_wire"]
        kind: Any = dataclass(frozen=True, slots=True, kw_only=kw_only)(made)
        compiled["kind"] = kind
        compiled.update({f"put_{field}": getattr(kind, field).__set__ for field in rules})
        kind.from_wire = staticmethod(compiled["from_wire"])
        kind.OP, kind.COSTLY = number, costly
        _TYPES[number] = kind
        return kind  # type: ignore[no-any-return]  # the class that dataclass made of it

    return declare


def message_types() -> dict[int, type[Message]]:
    """Return every message type by its OP."""
    return dict(_TYPES)


def _compiled(declared: type[Message], rules: dict[str, Rule]) -> dict[str, Any]:
    """Return the functions of a class by name, with the globals that they look up."""
    own = [f"self.{field}" for field in rules]
    read = [f"v_{field}" for field in rules]
    together = declared.check_together is not Message.check_together
    lines = [
        "def check(self):",
        f"    if not ({_test(own, rules)}):",
        "        complain(self.to_wire())",
        "    self.check_together()" if together else "    return",
        "def to_wire(self):",
        f"    return ({''.join(f'{one}, ' for one in own)})",
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

    def complain(values: Sequence[Any]) -> NoReturn:
        for (field, rule), value in zip(rules.items(), values, strict=True):
            if not rule.accepts(value):
                wrong, complaint = _culprit(rule, value)
                raise ProtocolError(f"{declared.__name__}.{field} is {_shown(wrong)}, {complaint}")
        raise AssertionError("the rules are the test, taken one by one")

    def miscount(values: Sequence[Any]) -> NoReturn:
        raise ProtocolError(f"{declared.__name__} has {len(rules)} fields, not {len(values)}")

    known = {"complain": complain, "miscount": miscount, "new": object.__new__}
    exec("\n".join(lines), known)  # noqa: S102 - of our own declarations, at import
    return known


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
