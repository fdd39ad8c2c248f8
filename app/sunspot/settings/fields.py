"""Declares and describes fields that are read from environment variables, and parses those that contain JSON."""

import ast
import inspect
import json
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, BeforeValidator, Field, PlainSerializer


def setting(default: Any, takes: str, **limits: Any) -> Any:
    """Declare a field with its default, a description of its allowed values, and pydantic's limits."""
    return Field(default, json_schema_extra={"takes": takes}, validate_default=True, **limits)


def read_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field of a model, including inherited fields, keyed by field.

    Only help and documentation need these texts. With `use_attribute_docstrings`, pydantic would collect them in every
    process that imports the model, which takes 20 ms.
    """
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if owner.__module__.startswith("sunspot."):
            body = ast.parse(inspect.getsource(owner)).body[0].body  # type: ignore[attr-defined]
            for field, below in pairwise(body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = inspect.cleandoc(text)
    return found


MAX_DEPTH = 50
"""Maximum nesting depth of a setting's JSON. At a depth of a thousand, Python's own functions fail."""


def parse_json(text: str) -> Any:
    """Parse JSON of at most MAX_DEPTH levels. Raises `ValueError` if it is invalid or nested deeper."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    _refuse_depth(value, MAX_DEPTH)
    return value


def _refuse_depth(value: Any, levels: int) -> None:
    if isinstance(value, (dict, list)):
        if not levels:
            raise ValueError("nested too deep")
        for item in value.values() if isinstance(value, dict) else value:
            _refuse_depth(item, levels - 1)


def _parse_json_object(value: Any) -> dict[str, Any]:
    parsed = parse_json(value or "{}") if isinstance(value, str) else value
    if not isinstance(parsed, dict):
        raise ValueError("not a JSON object")
    return parsed


PARSED = BeforeValidator(_parse_json_object)
"""Parses the text of a field that contains a JSON object."""

DUMPED = PlainSerializer(lambda value: json.dumps(value, sort_keys=True, default=dict), return_type=str)
"""Converts the value of a field that contains a JSON object to text."""
