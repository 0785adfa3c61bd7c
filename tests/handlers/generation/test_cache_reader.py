"""What a layer gets from the cache, and where attention reads it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from handlers.generation.cache_reader import CacheReader

PAGES, PAGE, HEADS, SIZE = 3, 4, 2, 8


def cumulated(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


class Cache:
    """transformers' cache, as far as it is looked at: layer 0 keeps a window, the others everything."""

    def __init__(self) -> None:
        self.layers = torch.randn(3, 2, PAGES, PAGE, HEADS, SIZE)
        self.pages = self.layers[1]
        full = SimpleNamespace(
            layer_type="full_attention", index=1, get_cache_for_block_table=lambda layer: tuple(self.layers[layer])
        )
        window = SimpleNamespace(layer_type="sliding_attention", index=0, sliding_window=7)
        self.layer_to_allocator = {0: window, 1: full, 2: full}
        self.updated: list[int] = []

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, kwargs: dict[str, Any]) -> Any:
        self.updated.append(layer)
        return key + 1, value + 1


def step(*, cached: bool = True) -> dict[str, Any]:
    """Two sequences with a new token each: 4 and 2 keys."""
    index = [9, 10, 11, 0, 5, 6] if cached else []
    return {
        "read_index": [torch.arange(4), torch.tensor(index, dtype=torch.int64)],
        "write_index": [torch.tensor([0, 1]), torch.tensor([0, 6])],
        "cu_seq_lens_q": cumulated(0, 1, 2),
        "cu_seq_lens_k": {"full_attention": cumulated(0, 4, 6), "sliding_attention": cumulated(0, 2, 4)},
    }


def test_what_reads_no_cache_stays_as_it_is() -> None:
    given = step(cached=False)
    found = CacheReader(Cache()).arranged(given)
    layout = found.pop("layout")
    assert found == given
    assert (layout.groups, layout.layers, layout.windows) == ((), (), {0: 7})


def test_a_cache_of_windows_is_read_as_it_was() -> None:
    given = step()
    before = list(given["read_index"])
    found = CacheReader(Cache()).arranged(given)
    assert found["read_index"][0] is before[0]
    assert found["read_index"][1].tolist() == [9, 10, 11, 0, 5, 6, 6, 6]
    assert given["read_index"] == before  # transformers' own stays
    assert (set(found["layout"].layers), found["layout"].windows) == ({1, 2}, {0: 7})


def test_the_cache_is_read_there_once_a_layer_has_handed_on_what_it_got() -> None:
    cache, (key, value) = Cache(), torch.randn(2, 1, HEADS, 2, SIZE)
    reader = CacheReader(cache)
    first = reader.arranged(step())
    got = cache.update(key, value, 1, first)
    assert torch.equal(got[0], key + 1)
    assert first["handed"].read_there(*got) is None

    before, second = cache.pages.clone(), reader.arranged(step())
    assert cache.update(key, value, layer_idx=1, kwargs=second) == (key, value)  # type: ignore[call-arg]
    cached = second["handed"].read_there(key, value)
    assert cached is not None
    for kind, (whole, new) in enumerate(zip(cached, (key, value), strict=True)):
        before[kind].view(-1, HEADS, SIZE)[[0, 6]] = new[0].transpose(0, 1)
        assert torch.equal(whole, before[kind].view(-1, HEADS, SIZE))
        assert whole.data_ptr() == cache.pages[kind].data_ptr()
    assert cache.updated == [1]


def test_a_layer_that_changes_what_it_gets_goes_on_to_get_its_row() -> None:
    cache, (key, value) = Cache(), torch.randn(2, 1, HEADS, 2, SIZE)
    reader = CacheReader(cache)
    for _ in range(3):
        given = reader.arranged(step())
        key_row, value_row = cache.update(key, value, 2, given)
        assert given["handed"].read_there(key_row * 2, value_row) is None
    assert cache.updated == [2, 2, 2]


def test_a_layer_that_changes_what_it_gets_now_and_then_is_refused() -> None:
    cache, (key, value) = Cache(), torch.randn(2, 1, HEADS, 2, SIZE)
    reader = CacheReader(cache)
    first, second = reader.arranged(step()), reader.arranged(step())
    first_row = cache.update(key, value, 1, first)
    assert first["handed"].read_there(*first_row) is None
    cache.update(key, value, 1, second)
    with pytest.raises(NotImplementedError, match="changes the keys"):
        second["handed"].read_there(key * 2, value)


def test_layers_that_a_layout_is_not_for_get_what_transformers_gives_them() -> None:
    cache, (key, value) = Cache(), torch.randn(2, 1, HEADS, 2, SIZE)
    reader = CacheReader(cache)
    for layer, given in ((0, reader.arranged(step())), (1, reader.arranged(step(cached=False))), (1, step())):
        cache.update(key, value, layer, given)
        assert "handed" not in given
    assert cache.updated == [0, 1, 1]


def test_a_step_is_computed_with_its_layout() -> None:
    seen: list[dict[str, Any]] = []
    CacheReader(Cache()).arranging(lambda model, given: seen.append(given))("model", step())
    assert seen[0]["layout"].layers == {1, 2}
