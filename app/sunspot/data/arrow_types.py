"""Converts Arrow types to plain types, without views, dictionaries or run-end encoding."""

from collections.abc import Callable

import pyarrow as pa


def map_type(stored: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a type after applying `change` to it, or to each type inside its lists and structs.

    List views are kept, because pyarrow 26 would cast them to lists with wrong lengths. They need
    not be cast, because Arrow can select rows from list views.
    """
    types = pa.types
    if types.is_struct(stored):
        return pa.struct([field.with_type(map_type(field.type, change)) for field in stored])
    if types.is_fixed_size_list(stored):
        return pa.list_(_map_items(stored, change), stored.list_size)
    if types.is_list(stored):
        return pa.list_(_map_items(stored, change))
    if types.is_large_list(stored):
        return pa.large_list(_map_items(stored, change))
    return change(stored)


def _map_items(stored: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.Field:
    field = stored.value_field
    return field.with_type(map_type(field.type, change))


def plain_type(stored: pa.DataType) -> pa.DataType:
    """Return the plain type that can store the same values.

    Arrow cannot select rows from columns of string views, binary views or run-end encoded values.
    """
    return map_type(stored, _plain_leaf)


def _plain_leaf(stored: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_dictionary(stored) or types.is_run_end_encoded(stored):
        return plain_type(stored.value_type)
    if types.is_string_view(stored):
        return pa.large_string()
    return pa.large_binary() if types.is_binary_view(stored) else stored


def to_plain(table: pa.Table) -> pa.Table:
    """Return a table with all columns cast to plain types."""
    for index, field in enumerate(table.schema):
        plain = plain_type(field.type)
        if plain != field.type:
            table = table.set_column(index, field.with_type(plain), _cast(table.column(index), plain))
    return table


def _cast(values: pa.ChunkedArray, plain: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_run_end_encoded(values.type):  # Arrow cannot decode runs of views or dictionaries
        return pa.chunked_array([pa.array(chunk.to_pylist(), plain) for chunk in values.chunks], plain)
    if pa.types.is_dictionary(values.type):  # dictionaries of views cannot be cast in one step
        values = values.cast(pa.dictionary(values.type.index_type, plain))
    return values.cast(plain)
