import torch

from handlers.packing import agree


def test_one_label_in_half_precision_must_be_near_and_not_only_of_the_same_sign() -> None:
    """A cosine over one number is its sign."""
    expected = torch.tensor([[1.0], [2.0], [-3.0]])
    assert agree(expected, expected * 1.02, torch.float16)
    assert not agree(expected, torch.tensor([[3.0], [0.1], [-1.0]]), torch.float16)


def test_in_half_precision_every_row_must_point_the_same_way() -> None:
    expected = torch.tensor([[100.0, 0.0], [0.0, 1.0]])
    assert not agree(expected, torch.tensor([[100.0, 0.0], [1.0, 0.0]]), torch.bfloat16)
    assert agree(expected, expected + 0.01, torch.bfloat16)


def test_outputs_of_another_shape_or_without_numbers_never_agree() -> None:
    expected = torch.ones(2, 3)
    assert agree(expected, torch.ones(2, 3) + 1e-6, torch.float32)
    assert not agree(expected, torch.ones(2, 3) + 1e-2, torch.float32)
    assert not agree(expected, torch.ones(1, 3), torch.float32)
    assert not agree(expected, torch.full((2, 3), torch.nan), torch.float32)
