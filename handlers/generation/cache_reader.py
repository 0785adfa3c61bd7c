"""How a model's layers read transformers' paged cache on a CPU.

transformers hands the keys and values of all sequences to a layer in one row, and the layer to attention. Attention
reads better from the cache itself, head by head. It may where a layer hands over what it got as it is, which nearly all
do; others, such as DiffLlama's, which cuts the values in two, go on to get the row. A layer's first step that reads
tells which it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from handlers.generation.layout import Layout, lay_out

FULL = "full_attention"  # the kind of a layer that sees everything, as transformers calls it


@dataclass
class Handed:
    """What a layer got from its cache in this step.

    Args:
        key, value: as it got them.
        cached: (tokens, key heads, head dimension) keys and values of the cache, to be read there; None where `key`
            and `value` are the row.
        note: told whether the layer hands them over as they are.
    """

    key: Tensor
    value: Tensor
    cached: tuple[Tensor, Tensor] | None
    note: Callable[[bool], None]

    def read_there(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """What to read in the cache; None where it is the row that was handed over.

        Args:
            key, value: what the layer handed over.

        Raises:
            NotImplementedError: the layer changes what it got, and did not in an earlier step: the row is not there.
        """
        as_they_are = key is self.key and value is self.value
        self.note(as_they_are)
        if self.cached is not None and not as_they_are:
            raise NotImplementedError("a layer that changes the keys of its cache now and then")
        return self.cached


class CacheReader:
    """Reads one cache for all layers that see everything; the others read as transformers does.

    Args:
        cache: transformers' `PagedAttentionCache`; its `update` is replaced.
    """

    def __init__(self, cache: Any) -> None:
        kinds = cache.layer_to_allocator
        full = {number: allocator for number, allocator in kinds.items() if allocator.layer_type == FULL}
        self._index: int | None = next((allocator.index for allocator in full.values()), None)
        self._windows = {number: int(kinds[number].sliding_window) for number in kinds.keys() - full.keys()}
        self._cached: dict[int, tuple[Tensor, Tensor]] = {}
        for number, allocator in full.items():
            keys, values = (pages.view(-1, *pages.shape[2:]) for pages in allocator.get_cache_for_block_table(number))
            self._cached[number] = keys, values
        self._as_they_are: dict[int, bool] = {}
        self._stock = cache.update
        cache.update = self.update

    def arranged(self, step: Mapping[str, Any]) -> dict[str, Any]:
        """A step's arguments, transformers' `PagedAttentionArgs` → with a layout, by which the cache is read."""
        indices = list(step["read_index"])
        index = self._index
        if index is None or not indices[index].numel():
            # nothing is cached: what is new comes as it is
            return {**step, "layout": Layout((), (), (), self._windows)}
        groups, pieces, places = lay_out(step["cu_seq_lens_q"].tolist(), step["cu_seq_lens_k"][FULL].tolist())
        indices[index] = indices[index][places]
        layout = Layout(groups, pieces, self._cached.keys(), self._windows, indices[index])
        return {**step, "read_index": indices, "layout": layout}

    def arranging(self, compute: Callable[..., None]) -> Callable[..., None]:
        """What computes a step, `(model, arguments)` → the same with the step's keys laid out for `split_attention`."""
        # no closure: the trace of an error would hold it, and with it the cache
        return partial(self._compute, compute)

    def _compute(self, compute: Callable[..., None], model: Any, step: Mapping[str, Any]) -> None:
        compute(model, self.arranged(step))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Stands for `PagedAttentionCache.update`: write what is new, and return what attention is to get.

        Args:
            key_states, value_states: (1, key heads, new tokens, head dimension).
            layer_idx: the layer's number.
            kwargs: what goes to attention, changed in place.
        """
        layout: Layout | None = kwargs.get("layout")
        reads = layout is not None and layer_idx in layout.layers
        if reads and self._as_they_are.get(layer_idx):
            cached = self._cached[layer_idx]
            index = kwargs["write_index"][self._index]
            for whole, new in zip(cached, (key_states, value_states), strict=True):
                whole.index_copy_(0, index, new[0].transpose(0, 1))
        else:
            cached = None
            key_states, value_states = self._stock(key_states, value_states, layer_idx, kwargs)
        if reads:
            note = partial(self._as_they_are.__setitem__, layer_idx)
            kwargs["handed"] = Handed(key_states, value_states, cached, note)
        return key_states, value_states
