"""The whole command line: every option says its default and what it is for."""

from __future__ import annotations

import argparse

import pytest

from stormd.cli import parser
from stormd.commands.parsing import Parser, all_commands

COMMANDS = list(all_commands(parser()))


def test_all_commands_are_there_with_those_below_them() -> None:
    programs = [command.prog for command in COMMANDS]
    assert {"stormd", "stormd run", "stormd bench", "stormd bench train"} <= set(programs)
    assert len(set(programs)) == len(programs)


def test_every_argument_says_what_it_is_for_and_its_default() -> None:
    for command in COMMANDS:
        assert command.description, command.prog
        formatter = command._get_formatter()
        for action in command._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            assert action.help, (command.prog, action)
            if action.option_strings and action.nargs != 0 and not action.required:
                assert "default: " in formatter._expand_help(action), (command.prog, action)


def test_the_default_that_is_said_is_the_one_that_is_taken() -> None:
    made = Parser(prog="p")
    made.add_argument("--count", default=7, help="how many")
    made.add_argument("--percent", default="5%", help="how much")
    made.add_argument("--quiet", action="store_true", help="say less")
    made.add_argument("--other", help="no default")
    text = " ".join(made.format_help().split())
    assert "how many (default: 7)" in text
    assert "how much (default: 5%)" in text
    assert text.count("default: ") == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "serve --pool-byte 1GiB",
            "stormd serve: unknown argument --pool-byte: did you mean --pool",
        ),
        ("serve --uid 4", "stormd serve: unknown argument --uid: stormd serve --help has all"),
        ("bench codec --mebibytes=1", "stormd bench codec: unknown argument --mebibytes: "),
        ("--verbose status", "stormd: unknown argument --verbose: "),
    ],
)
def test_an_unknown_argument_is_told_by_its_command(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(line.split())
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(said)
    assert error.count("\n") == 1


def test_what_a_command_runs_keeps_its_own_options() -> None:
    chosen = parser().parse_args(["run", "--", "python", "train.py", "--pool", "7"])
    assert chosen.argv == ["--", "python", "train.py", "--pool", "7"]
