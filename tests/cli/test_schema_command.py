"""`detgen schema`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from detgen.cli import app
from detgen.prompts.schema import prompt_schema, score_schema


@pytest.mark.parametrize(("lines", "schema"), [("prompts", prompt_schema), ("scores", score_schema)])
def test_it_prints_the_schema(lines: str, schema: object) -> None:
    done = CliRunner().invoke(app, ["schema", lines])
    assert done.exit_code == 0
    assert json.loads(done.output) == schema()  # type: ignore[operator]
