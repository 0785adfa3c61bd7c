"""Which keys a step reads together."""

import torch

from handlers.generation.layout import Layout, lay_out


def test_sequences_of_about_one_length_are_one_call() -> None:
    (group,), pieces, places = lay_out([0, 1, 2, 3], [0, 5, 9, 14])
    assert (pieces, group.rows, group.lengths.flatten().tolist(), group.length) == ([], None, [5, 4, 5], 5)
    assert places.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12, 13]
    mask, windowed = (group.mask(window, torch.float32) for window in (None, 2))
    assert mask is not None
    assert windowed is not None
    assert mask.flatten(1).isinf().int().tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]
    assert windowed.flatten(1).isinf().int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 1], [1, 1, 1, 0, 0]]


def test_a_long_sequence_pads_no_short_ones() -> None:
    groups, _, _ = lay_out([0, 1, 2, 3], [0, 10, 5010, 5020])
    assert [(len(group.lengths), group.length) for group in groups] == [(2, 10), (1, 5000)]
    assert groups[0].rows is not None
    assert groups[0].rows.tolist() == [0, 2]


def test_places_are_of_the_cache_and_each_heads_own() -> None:
    groups, pieces, row = lay_out([0, 1, 3, 4], [0, 2, 5, 6])  # a prompt's piece between two answers
    places = torch.tensor([40, 41, 70, 71, 72, 90])[row]
    layout = Layout(groups, pieces, {0}, None, places)
    ((by_head,), of_pieces) = layout.by_head(2), layout.of_pieces()
    # the shorter one first; its last key fills it up
    assert by_head.view(2, 2, 2).tolist() == [[[180, 180], [181, 181]], [[80, 82], [81, 83]]]
    assert of_pieces.tolist() == [70, 71, 72]
    assert layout.by_head(2)[0] is by_head
