"""Attention masks: a compact description, and the dense mask."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from qkattn.errors import SpecError


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['first_query', 'valid_BS', 'segments_BT', 'segments_BS', 'mask_BTS'],
    meta_fields=['causal', 'window', 'hides_self'],
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Mask:
    """A query may attend to a key that every field allows. Mask() allows all keys.

    Queries have positions t, keys have positions s = 0 .. S - 1.
    """

    causal: bool = False  # allows s <= t
    window: int | None = None  # allows |t - s| < window
    # The position of the first query. In decoding, the number of cached tokens; None is 0.
    first_query: jax.Array | int | None = None
    valid_BS: jax.Array | None = None  # False on padding
    # If rows hold several sequences: the index, from 1, of the sequence of each query and each key.
    # Allows keys of the same sequence. 0 is padding.
    segments_BT: jax.Array | None = None
    segments_BS: jax.Array | None = None
    mask_BTS: jax.Array | None = None  # any other mask; B may be 1
    hides_self: bool = False  # allows t = s only if no other key is allowed

    @classmethod
    def from_array(cls, mask: 'Mask | jax.Array') -> 'Mask':
        """Converts an array mask_BTS to a Mask; returns a Mask unchanged."""
        return mask if isinstance(mask, Mask) else cls(mask_BTS=mask)

    def check(self, num_rows: int, num_queries: int, num_keys: int) -> None:
        """Raises SpecError if an array has a wrong shape or dtype."""
        if (self.segments_BT is None) != (self.segments_BS is None):
            raise SpecError('a mask must have both segments_BT and segments_BS, or neither')
        sizes = {'B': num_rows, 'T': num_queries, 'S': num_keys}
        for field in ('valid_BS', 'segments_BT', 'segments_BS', 'mask_BTS'):
            array = getattr(self, field)
            if array is None:
                continue
            _, _, axes = field.partition('_')  # 'valid_BS' -> 'BS'
            shape = tuple(sizes[letter] for letter in axes)
            shape_for_all_rows = (1, *shape[1:])
            has_wrong_shape = array.shape not in (shape, shape_for_all_rows)
            must_be_boolean = field in ('valid_BS', 'mask_BTS')
            has_wrong_dtype = must_be_boolean and array.dtype != bool
            if has_wrong_shape or has_wrong_dtype:
                dtype_text = 'boolean and ' if must_be_boolean else ''
                raise SpecError(
                    f'{field} is {array.dtype} of shape {array.shape}; it must be {dtype_text}of '
                    f'shape {shape}, where B may be 1'
                )

    @property
    def start(self) -> jax.Array | int:
        """The position of the first query."""
        return 0 if self.first_query is None else self.first_query

    def queries(self, num_queries: int) -> jax.Array:
        """Returns the positions of the queries, t_T."""
        return self.start + jnp.arange(num_queries)

    def dense(self, num_queries: int, num_keys: int) -> jax.Array:
        """Returns mask_BTS, True where a query may attend to a key; B is 1 if no field has rows."""
        mask_BTS = self.block(
            query_begin=0, num_queries=num_queries, key_begin=0, num_keys=num_keys
        )
        if not self.hides_self:
            return mask_BTS
        # Hide each token from itself if it has other visible keys.
        query_position_T1 = self.queries(num_queries)[:, None]
        key_position_S = jnp.arange(num_keys)
        others_BTS = mask_BTS & (query_position_T1 != key_position_S)
        has_others_BT1 = others_BTS.any(-1, keepdims=True)
        return jnp.where(has_others_BT1, others_BTS, mask_BTS)

    def block(
        self,
        query_begin: int | jax.Array,
        num_queries: int,
        key_begin: int | jax.Array,
        num_keys: int,
    ) -> jax.Array:
        """Returns a block of the dense mask.

        The field `hides_self` is not applied, because its effect depends on all keys.

        Args:
            query_begin: Index of the first query in the block.
            num_queries: Number of queries, T.
            key_begin: Index of the first key in the block.
            num_keys: Number of keys, S.

        Returns:
            mask_BTS, True where a query may attend to a key; B is 1 if no field has rows.
        """

        def slice_queries(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, query_begin, num_queries, axis=1)

        def slice_keys(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, key_begin, num_keys, axis=-1)

        mask_BTS = jnp.ones((1, num_queries, num_keys), bool)

        # In decoding, `start` is the number of cached tokens, and otherwise 0.
        first_position = self.start + query_begin
        query_position_T1 = first_position + jnp.arange(num_queries)[:, None]
        key_position_1S = key_begin + jnp.arange(num_keys)[None, :]
        if self.causal:
            is_not_later_TS = key_position_1S <= query_position_T1
            mask_BTS = mask_BTS & is_not_later_TS
        if self.window is not None:
            distance_TS = jnp.abs(query_position_T1 - key_position_1S)
            mask_BTS = mask_BTS & (distance_TS < self.window)

        if self.valid_BS is not None:
            valid_B1S = slice_keys(self.valid_BS)[:, None, :]
            mask_BTS = mask_BTS & valid_B1S
        if self.segments_BS is not None:
            segments_BT1 = slice_queries(self.segments_BT)[:, :, None]
            segments_B1S = slice_keys(self.segments_BS)[:, None, :]
            is_same_BTS = segments_BT1 == segments_B1S
            is_token_B1S = segments_B1S > 0  # 0 is padding
            mask_BTS = mask_BTS & is_same_BTS & is_token_B1S
        if self.mask_BTS is not None:
            mask_of_queries_BTS = slice_queries(self.mask_BTS)
            mask_BTS = mask_BTS & slice_keys(mask_of_queries_BTS)
        return mask_BTS

    def padded(self, num_keys: int, *, more_queries: int, more_keys: int) -> 'Mask':
        """Returns the mask with queries and hidden keys added at the end."""

        def pad(array: jax.Array | None, *num_zeros: int) -> jax.Array | None:
            """Appends zeros to each axis after the batch axis."""
            if array is None:
                return None
            widths_before_and_after = [(0, 0)]
            for number in num_zeros:
                widths_before_and_after.append((0, number))
            return jnp.pad(array, widths_before_and_after)

        valid_BS = self.valid_BS
        if more_keys and valid_BS is None:
            valid_BS = jnp.ones((1, num_keys), bool)  # padded with False, which hides keys
        return dataclasses.replace(
            self,
            valid_BS=pad(valid_BS, more_keys),
            segments_BT=pad(self.segments_BT, more_queries),
            segments_BS=pad(self.segments_BS, more_keys),
            mask_BTS=pad(self.mask_BTS, more_queries, more_keys),
        )


def visible(num_queries: int, num_keys: int, *, causal: bool, **fields: Any) -> jax.Array:
    """Returns the dense mask_BTS of a `Mask` with these fields."""
    return Mask(causal=causal, **fields).dense(num_queries, num_keys)
