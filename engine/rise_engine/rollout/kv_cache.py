"""A key-value cache for rows that are decoded together and leave one by one.

transformers' dynamic cache copies everything at every token, and its static one hands attention the whole buffer. This
one writes in place and hands out views of what is filled; a finished row's place is taken by the last one.
"""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache


class DecodeLayer(CacheLayerMixin):
    """keys, values [rows, kv_heads, columns, head_dim]; the first `rows` rows and `length` columns are in use."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.rows, self.length = len(keys), length
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("made from a prefilled cache")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[-2]
        self.keys[: self.rows, :, self.length : end] = key_states
        self.values[: self.rows, :, self.length : end] = value_states
        self.length = end
        return self.keys[: self.rows, :, :end], self.values[: self.rows, :, :end]

    def reorder(self, order: list[int]) -> None:
        """Row order[i] moves to place i, i <= order[i]; the rows that are left are in use."""
        for place, old in enumerate(order):
            if place != old:
                for buffer in (self.keys, self.values):
                    buffer[place, :, : self.length] = buffer[old, :, : self.length]
        self.rows = len(order)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.keys.shape[-2]


class DecodeCache(Cache):
    """Rows expanded from prefilled prompts: row i continues prompt owners[i]. `columns`: the longest it can become."""

    def __init__(self, prompts: DynamicCache, owners: Tensor, columns: int) -> None:
        layers: list[CacheLayerMixin] = []
        for layer in prompts.layers:
            keys, values = layer.keys, layer.values
            assert keys is not None
            assert values is not None
            length = keys.shape[-2]
            shape = (len(owners), keys.shape[1], columns, keys.shape[-1])
            pair = keys.new_empty(shape), values.new_empty(*shape[:-1], values.shape[-1])
            for buffer, filled in zip(pair, (keys, values)):
                buffer[:, :, :length] = filled[owners]
            layers.append(DecodeLayer(*pair, length))
            layer.reset()
        super().__init__(layers=layers)

    def drop(self, rows: list[int], count: int) -> list[int]:
        """Removes `rows` of the `count` in use. Returns the order of those that stay: old indices, new places."""
        order = list(range(count))
        for row in sorted(rows, reverse=True):
            last = order.pop()
            if row < len(order):
                order[row] = last
        for layer in self.layers:
            assert isinstance(layer, DecodeLayer)
            layer.reorder(order)
        return order
