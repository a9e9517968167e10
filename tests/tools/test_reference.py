"""The tables of docs/ are those of the declarations."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import reference  # noqa: E402

PAGES = {page.name: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_tables_as_they_are_declared(name: str) -> None:
    assert PAGES[name] == reference.filled(PAGES[name]), "python tools/reference.py writes them anew"


def test_each_table_stands_in_one_page() -> None:
    assert sorted(re.findall(r"<!-- table: (.+) -->", "".join(PAGES.values()))) == sorted(reference.TABLES)


def test_a_table_that_is_not_as_declared_is_written_anew() -> None:
    made = reference.TABLES["exit statuses"]()
    page = "before\n\n<!-- table: exit statuses -->\n\n{}\n\n<!-- end -->\n\nafter\n"
    assert reference.filled(page.format("| old |")) == page.format(made)
    assert "| `detgen audit` | nothing differs | faults found | refused |" in made


@pytest.mark.parametrize(
    ("table", "row"),
    [
        ("options of run", r"| `--drafter NAME` | `auto` |"),
        ("options of run", r"| `--output DIR`, `-o` | STEM-out |"),
        ("options of run", r"| `--device auto\|cpu\|cuda\|cuda:N` | `auto` | Where the models run. "),
        ("options of export", r"| `OUT` | required | The output folder of a finished run. |"),
        ("options of cache prune", r"| `--older-than AGE` | none |"),
        ("parameters", r"| `stop_token_ids` | a list of token ids | `[]` | `--stop-token-id` |"),
        ("attributes of EngineConfig", r"| `kv_memory` | bytes for the KV caches, or a text"),
        ("TextLine", r"| `finish_reason` | `stop` (it ended, or was stopped) or `length` |"),
    ],
)
def test_rows(table: str, row: str) -> None:
    assert row in reference.TABLES[table]()
