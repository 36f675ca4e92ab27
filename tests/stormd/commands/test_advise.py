"""`stormd advise`, with real scripts and real daemons."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stormd import cli
from stormd.commands import advise as module

SCRIPT = """
import torch, storm_client as storm
net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8))
offload = storm.offload(net)
for _ in range(10**9):
    with offload:
        loss = net(torch.ones(4096, 64)).square().sum()
    loss.backward()
"""


Advise = Callable[..., tuple[int, str, str]]


@pytest.fixture
def advise(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Advise:
    """Run the command; return its status and what it and the script wrote."""
    monkeypatch.delenv("STORMD_ADDRESS", raising=False)
    monkeypatch.setattr(module, "_GATHER_SECONDS", 0.1)  # there is one trainer

    def run(*command: str) -> tuple[int, str, str]:
        return cli.main(["advise", "--json", "--", *command]), *capfd.readouterr()

    return run


def test_a_script_is_run_until_its_budgets_are_known(advise: Advise, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    status, out, err = advise(sys.executable, str(script))
    assert status == 0, err
    told = json.loads(out)
    (trainer,) = told["trainers"]
    assert trainer["saved_bytes"] == 9 << 20
    assert trainer["step_seconds"] >= trainer["forward_seconds"] > 0
    least, *_, all_kept = trainer["budgets"]
    assert least["budget"] == "least"
    # What is asked for at once may stay: that depends on the machine's speed.
    assert sum(least[f"{name}_bytes"] for name in ("keep", "offload", "replay")) == 9 << 20
    assert least["keep_bytes"] < 9 << 20
    assert (all_kept["keep_bytes"], all_kept["pool_bytes"]) == (9 << 20, 0)
    assert told["pool_bytes"] == 64 << 20


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (["true"], 1, "with status 0 before eight steps were seen: it has to train that many"),
        (["sh", "-c", "exit 7"], 1, "with status 7 before eight steps were seen\n"),
        ([], 2, "no command to run"),
    ],
)
def test_what_ends_before_is_told_why(
    advise: Advise, command: list[str], status: int, said: str
) -> None:
    ended, out, err = advise(*command)
    assert (ended, out) == (status, "")
    assert said in err


def test_printed_it_is_a_table_with_a_line_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    budget = {
        "budget": "least",
        **{f"{name}_bytes": 1 << 30 for name in ("keep", "offload", "replay", "pool")},
        **{f"{name}_seconds": 0.25 for name in ("link", "wait", "replay")},
    }
    trainer = {
        "pid": 1,
        "device": "cuda:0",
        "step_seconds": 2.0,
        "forward_seconds": 0.5,
        "saved_bytes": 14 << 30,
        "ratio": 1.4,
        "peak_bytes": 3 << 30,
        "link_bytes_per_second": 55e9,
        "budgets": [budget],
    }
    module._print(["python", "train.py"], [trainer, trainer])
    printed = " ".join(capsys.readouterr().out.split())
    for part in (
        "trainer 1 of 2, on cuda:0: a step takes 2000.0 ms and saves 14.0 GiB",
        "at a peak of 3.0 GiB",
        "link 55.0 GB/s",
        "least 1.0 GiB 1.0 GiB 1.0 GiB 250.0 250.0 250.0 1.0 GiB",
        "wait: the predicted transfer time beyond the forward pass. The first steps offload",
        "stormd run --pool-bytes 25GiB --budget least -- python train.py",
    ):
        assert part in printed
    module._print(["python", "train.py", "models=[gpt2,bert]", "a b"], [trainer])
    copied = "-- python train.py 'models=[gpt2,bert]' 'a b'"
    assert copied in capsys.readouterr().out
    module._print(["python", "train.py"], [{**trainer, "device": "cpu"}])
    assert "transfer time both ways" in " ".join(capsys.readouterr().out.split())
    module._print(["python", "train.py"], [{**trainer, "saved_bytes": 0, "budgets": []}])
    assert "no saved tensor is large enough" in capsys.readouterr().out
