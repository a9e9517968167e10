"""Finds what is wrong with an unconstrained tool call, according to the schema of its arguments."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import validators
from referencing import Registry


def misfit(schema: Any, arguments: str) -> str | None:
    """Return where arguments do not fit a schema, and the keyword that they violate; None if they fit.

    This is the first place in the order of names, because the messages of jsonschema, and which one it finds best,
    change with its version.

    Args:
        schema: a JSON schema; references are within it.
        arguments: a JSON object.

    Raises:
        Exception: if it is not a schema; jsonschema may raise anything.
    """
    validator = validators.validator_for(schema)
    validator.check_schema(schema)
    checked = validator(schema, registry=Registry())  # without one, it would fetch what a reference names
    errors = checked.iter_errors(json.loads(arguments))
    found = min(((error.json_path, str(error.validator)) for error in errors), default=None)
    return None if found is None else f"{found[0]} ({found[1]})"
