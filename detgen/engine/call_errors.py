"""What is wrong with a call that a model was free to write, as far as the schema of its arguments says."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import validators
from referencing import Registry


def misfit(schema: Any, arguments: str) -> str | None:
    """Where arguments do not fit a schema, and the keyword that says so; None if they fit.

    The first place of all in the order of their names: messages, and which of them is the best one, change with the
    version of jsonschema.

    Args:
        schema: a JSON schema; references are within it.
        arguments: a JSON object.

    Raises:
        Exception: it is no schema; jsonschema may raise anything.
    """
    validator = validators.validator_for(schema)
    validator.check_schema(schema)
    checked = validator(schema, registry=Registry())  # without one, it would fetch what a reference names
    errors = checked.iter_errors(json.loads(arguments))
    found = min(((error.json_path, str(error.validator)) for error in errors), default=None)
    return None if found is None else f"{found[0]} ({found[1]})"
