"""layout.py: which dimensions are outer and inner, and what has to be copied."""

from __future__ import annotations

import torch
from storm_kernels.scan.layout import arrange


def _sizes(result: torch.Tensor, dim: int) -> tuple[int, int, int]:
    space = arrange(result, dim)
    return space.outer, space.length, space.inner


def test_slower_dimensions_are_outer_and_faster_ones_inner():
    x = torch.empty(2, 3, 5, 7)
    assert [_sizes(x, dim) for dim in range(4)] == [
        (1, 2, 105),
        (2, 3, 35),
        (6, 5, 7),
        (30, 7, 1),
    ]
    assert _sizes(x.permute(0, 3, 2, 1), 1) == (30, 7, 1)


def test_single_elements_do_not_matter():
    assert _sizes(torch.empty(1, 4, 1, 1), 1) == (1, 4, 1)
    assert _sizes(torch.empty(3, 1, 5), 1)[1] == 1


def test_slices_transposed_and_broadcast_tensors_are_not_copied():
    result = torch.empty(4, 10, 6)
    space = arrange(result, 1)
    wide = torch.empty(4, 10, 18)
    for source, strides in (
        (wide[..., 6:12], (180, 18, 1)),
        (torch.empty(6), (0, 0, 1)),
        (torch.empty(4, 10, 1), (10, 1, 0)),
        (torch.empty(4, 6, 10).transpose(1, 2), (60, 1, 10)),
    ):
        view = source.expand(4, 10, 6)
        placed, found = space.place(view)
        assert placed is view
        assert found == strides


def test_what_no_three_strides_describe_is_copied_in_the_results_order():
    result = torch.empty(4, 5, 10, 6).permute(0, 1, 3, 2)
    source = torch.randn(4, 9, 6, 10)[:, :5]
    space = arrange(result, 3)
    placed, strides = space.place(source)
    assert torch.equal(placed, source)
    assert strides == (60, 6, 1)
    assert placed.stride() == result.stride()


def test_states_have_the_sequences_strides():
    space = arrange(torch.empty(4, 10, 6), 1)
    _, strides = space.place_state(torch.empty(4, 6))
    assert strides == (6, 1)


def test_a_single_outer_sequence_has_no_stride_to_spoil_alignment():
    x = torch.empty(1, 6, 5)
    assert arrange(x, 1).place(x)[1] == (0, 5, 1)
