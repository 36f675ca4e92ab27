from __future__ import annotations

import pytest
import torch
from storm_client.arguments import check_options, modules_of
from storm_client.errors import UsageError

NET = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("model", "modules"),
    [(None, []), (NET, [NET]), ([NET, NET], [NET, NET]), (iter([NET]), [NET])],
)
def test_modules_are_one_or_several_or_none(model: object, modules: list[torch.nn.Module]) -> None:
    assert modules_of(model) == modules


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (5, "got int 5; pass the module, or a list of modules"),
        ("gpt", "got str 'gpt'; pass"),
        (torch.ones(2), "got Tensor; pass"),
        ({"net": NET}, "got str 'net' among its modules"),
        ([NET, None], "got NoneType among its modules"),
    ],
)
def test_what_is_no_module_is_named(model: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        modules_of(model)


def test_options_are_those_that_are_known() -> None:
    known, of_connect = ["min_bytes", "codec"], ["address"]
    check_options(["min_bytes", "codec"], known, of_connect)
    with pytest.raises(UsageError, match="no option 'codecs': did you mean 'codec'"):
        check_options(["min_bytes", "codecs"], known, of_connect)
    with pytest.raises(UsageError, match=r"address is an option of connect\(\)"):
        check_options(["address"], known, of_connect)
