"""Completions: what bash itself offers with the script that is printed."""

from __future__ import annotations

import subprocess

import pytest

from stormd import cli
from stormd.commands import completion

COMPLETE = """
set -u
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
COMPREPLY=()
eval "$(cat)"
function_of() { while [ "$1" != -F ]; do shift; done; echo "$2"; }
$(function_of $(complete -p stormd))
echo "${COMPREPLY[@]}"
"""


def test_bash_offers_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for words, offered in (
        (["st"], {"status"}),
        (["run", "--b"], {"--budget"}),
        (["run", "--mps", "o"], {"on", "off"}),
        (["bench", "sc"], {"scan"}),
    ):
        done = subprocess.run(
            ["bash", "--norc", "-c", COMPLETE, "bash", "stormd", *words],
            input=script,
            capture_output=True,
            text=True,
            check=True,
        )
        assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_theirs(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "stormd" in out
    assert "budget" in out


def test_without_shtab_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(completion, "find_spec", lambda _name: None)
    assert cli.main(["completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err
