"""Budgets: what each way to write one means, and what is none."""

from __future__ import annotations

import pytest

from stormd.protocol import Budget, PlanLearned, budget_text, parse_budget


@pytest.mark.parametrize(
    ("value", "budget"),
    [
        ("least", "least"),
        (" fit ", "fit"),
        ("12GiB", 12 << 30),
        ("1.5 MiB", 3 << 19),
        ("4096", 4096),
        ("0", 0),
        ("0.5", 0.5),
        ("1.0", 1.0),
        (".25", 0.25),
        (0, 0),
        (1 << 40, 1 << 40),
        (0.0, 0.0),
        (1.0, 1.0),
    ],
)
def test_each_way_to_write_one(value: str | float, budget: object) -> None:
    found = parse_budget(value)
    assert (found, type(found)) == (budget, type(budget))


@pytest.mark.parametrize(
    "value",
    ["", "most", "LEAST", "12GB", "1.5", "-1", "-0.1", "50%", "nan", "inf", "1e-1x", "0.5.5"],
)
def test_other_texts_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="least, fit, a size in KiB, MiB or GiB") as caught:
        parse_budget(value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [-1, 1.01, -0.5, float("nan"), True, None, b"least"])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="budget is"):
        parse_budget(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        ("least", "least"),
        ("fit", "fit"),
        (0, "0 B"),
        (12 << 30, "12.0 GiB"),
        (0.5, "0.5"),
        (1.0, "1.0"),
        (1 / 3, "0.3333"),
        (1e-12, "1e-12"),
        (10**40, "8388608.0 TiB"),
    ],
)
def test_any_budget_is_a_text_that_a_message_may_carry(budget: Budget, text: str) -> None:
    assert budget_text(budget) == text
    PlanLearned(kept_bytes=0, offloaded_bytes=0, replayed_bytes=0, budget=text)
