"""What documents show and how they say it: commands that are taken, sentences that are short."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import storm_client
from bench.saved_bytes import line
from bench.zoo_tables import RESULTS, filled

from stormd import cli
from stormd.config import Option, config_options, default_of
from stormd.example_config import render_value
from stormd.protocol.variables import CLIENT_SETTINGS, PREFIX

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    path
    for folder in ("docs", "deploy", "client", "kernels", "stormd", ".")
    for path in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
    if path.name != "CHANGELOG.md"
)

SHOWN = re.compile(r"(?:^|[`$&'/ ])stormd((?: +[^\s`'|>&#]+)+)", re.MULTILINE)
"""In a line of code, or between backquotes: up to what is the shell's or ends the quotation."""

PLACEHOLDER = re.compile(r"\[|\.\.\.|\u2026|[A-Z]{3,}")


def shown(text: str) -> Iterator[str]:
    """Yield what follows \"stormd\" in the code of a document."""
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    indented = "\n".join(line for line in text.splitlines() if line.startswith("    "))
    quoted = "\n".join(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
    commands = "|".join(("run", "serve", "status", "top", "doctor", "bench", "demo"))
    for found in SHOWN.findall("\n".join((fenced, indented, quoted))):
        if re.match(rf" +(?:{commands})\b", found) and not PLACEHOLDER.search(found):
            yield found.partition(": ")[0].strip()


def test_documents_show_commands() -> None:
    found = {command for path in DOCUMENTS for command in shown(path.read_text("utf-8"))}
    assert len(found) > 20
    assert "bench train --together --budgets 0.1 0.25 0.4 0.55 0.7 0.85" in found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_taken(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in shown(path.read_text("utf-8")):
        try:
            cli.parser().parse_args(shlex.split(command))
        except SystemExit as end:
            if end.code:
                pytest.fail(f"stormd {command}: {capsys.readouterr().err}")


# --- sentences ------------------------------------------------------------------------------

MAX_WORDS = 35
PAGES = sorted(
    [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        ROOT / "deploy" / "README.md",
    ]
)

NOT_PROSE = re.compile(
    r"^```.*?^```|<!--.*?-->|^(?: {4,}(?![-*\d])|\||#+ |:::|!!! |---$)[^\n]*$",
    re.MULTILINE | re.DOTALL,
)
"""Code, comments, tables, headings, and what mkdocs reads as its own."""

ITEM = re.compile(r"^ *(?:[-*]|\d+\.) ", re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_`]*[A-Z0-9`])")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a document's prose: quoted code is a word, a link is its text."""
    prose = ITEM.sub("\n\n", NOT_PROSE.sub("\n", text))
    for paragraph in re.split(r"\n\s*\n", prose):
        plain = re.sub(r"`+[^`]+`+", "`code`", LINK.sub(r"\1", paragraph))
        yield from (part for part in END.split(" ".join(plain.split())) if part)


def words(sentence: str) -> list[str]:
    """Return what is read as words: dashes and signs are none."""
    return [word for word in sentence.split() if re.search(r"\w", word)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_can_be_read_once(path: Path) -> None:
    long = [part for part in sentences(path.read_text("utf-8")) if len(words(part)) > MAX_WORDS]
    assert not long, f"more than {MAX_WORDS} words: " + "\n\n".join(long)


# --- files and tests that are named ----------------------------------------------------------

FILES = [
    path.relative_to(ROOT)
    for folder in ("client", "deploy", "docs", "kernels", "stormd", "tests", ".")
    for path in (ROOT / folder).glob("*" if folder == "." else "**/*")
    if path.is_file() and "__pycache__" not in path.parts
]
SOURCES = sorted(ROOT / path for path in FILES if path.suffix == ".py" and path.parts[0] != "tests")
TESTS = {
    name
    for path in FILES
    if path.parts[0] == "tests" and path.suffix == ".py"
    for name in re.findall(
        r"^ *(?:async )?def (test_\w+)", (ROOT / path).read_text("utf-8"), re.MULTILINE
    )
}
QUOTED_FILE = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|md|c|h|cu|json))`")
QUOTED_FOLDER = re.compile(r"`((?:[\w-]+/)+)`")
QUOTED_TEST = re.compile(r"`(test_\w+)(\u2026?)`")
OTHERS = {"train.py"}
"""What examples call a file of the reader's."""


def _missing(text: str) -> Iterator[str]:
    """Yield the files, folders and tests between backquotes that the repository does not have."""
    names = [f"/{path}" for path in FILES]
    for found in QUOTED_FILE.findall(text):
        if found not in OTHERS and not any(name.endswith(f"/{found}") for name in names):
            yield found
    for found in QUOTED_FOLDER.findall(text):
        if not any(f"/{found}" in name for name in names):
            yield found
    for found, cut in QUOTED_TEST.findall(text):
        if not any(name == found or (cut and name.startswith(found)) for name in TESTS):
            yield found


def test_named_files_and_tests_exist() -> None:
    missing = {path: list(_missing(path.read_text("utf-8"))) for path in (*DOCUMENTS, *SOURCES)}
    assert not {str(path.relative_to(ROOT)): found for path, found in missing.items() if found}


# --- the page of settings -------------------------------------------------------------------

CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text("utf-8")


def settings_table() -> str:
    """The daemon's settings as the page has to have them."""
    head = ["| Setting | Default | Limits | Reload | Meaning |", "|---|---|---|---|---|"]
    return "\n".join([*head, *map(_setting, config_options())])


def _setting(option: Option) -> str:
    default = option.default_note or f"`{_shown(option, default_of(option))}`"
    cells = (
        f"`{option.name}`",
        "nothing" if default in ("empty", '`""`', "`[]`") else default,
        ", ".join(f"`{choice}`" for choice in option.choices) or _limits(option),
        "yes" if option.reloadable else "",
        option.help.replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |"


def _limits(option: Option) -> str:
    least, most = (
        None if limit is None else _shown(option, type(default_of(option))(limit))
        for limit in (option.least, option.most)
    )
    if most is None:
        return "" if least is None else f"from {least}"
    return f"{least} to {most}"


def _shown(option: Option, value: Any) -> str:
    return render_value(option, value).strip('"') if value != "" else '""'


def test_the_page_has_the_settings_of_the_code() -> None:
    assert settings_table() in CONFIGURATION, f"docs/configuration.md needs\n{settings_table()}"


@pytest.mark.parametrize("function", [storm_client.connect, storm_client.Client.offload])
def test_the_page_has_the_options_of_a_script(function: Callable[..., Any]) -> None:
    table = CONFIGURATION.partition(f"| Option of `{function.__name__}` |")[2].partition("\n\n")[0]
    options = [name for name in inspect.signature(function).parameters if name != "self"]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [
        name for name in options if name != "unknown"
    ]


def test_the_page_has_the_variables_of_a_script() -> None:
    for name in CLIENT_SETTINGS:
        assert f"| `{PREFIX}{name.upper()}` |" in CONFIGURATION


# --- the page of the API --------------------------------------------------------------------

API = (ROOT / "docs" / "api.md").read_text("utf-8")


def _named(identifier: str) -> Any:
    """Return what the page names by its module and its name there."""
    module, _, name = identifier.rpartition(".")
    return getattr(import_module(module), name)


def test_the_api_begins_with_what_scripts_call() -> None:
    """`compile` by its module: mkdocstrings takes `storm_client.compile` for the package."""
    found = [_named(name) for name in re.findall(r"^::: (\S+)$", API, re.MULTILINE)[:3]]
    assert found == [storm_client.connect, storm_client.offload, storm_client.compile]


def test_the_api_has_every_public_name() -> None:
    shown = re.findall(r"\w+", API)
    for name in storm_client.__all__:
        assert name in shown or name.startswith("__"), name


# --- tables that are made of results -----------------------------------------------------------


@pytest.mark.parametrize(("name", "tables"), [("README.md", 1), ("docs/performance.md", 1)])
def test_tables_are_what_the_results_beside_them_say(name: str, tables: int) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert filled(text) == text, f"run `python tests/bench/zoo_tables.py {name}`"
    emptied = re.sub(r"^(\| [^|]+ \|)(?: [\d.]* \|)+$", r"\1", text, flags=re.MULTILINE)
    made = set(filled(emptied).splitlines()) - set(emptied.splitlines())
    assert len(made) >= 4 * tables
    assert made <= set(text.splitlines())


def test_what_models_save_is_what_was_recorded_of_each() -> None:
    rows = json.loads((RESULTS / "saved_bytes.json").read_text("utf-8"))["rows"]
    table = "\n".join(line(name, row) for name, row in rows.items())
    assert table in (ROOT / "docs" / "budget.md").read_text("utf-8"), f"it needs\n{table}"
