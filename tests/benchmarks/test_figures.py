from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.examples import usual
from helpers.rows import make_row

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from figures.__main__ import by_fraction
from figures.draw import draw, need_matplotlib
from figures.measure import linear_layers, pass_costs, windows

from detgen.bench.peer_interface import ModelSource, Prompt
from detgen.bench.peers.detgen_engine import DetgenPeer
from detgen.engine.config import EngineConfig
from detgen.errors import BenchError

WINDOWS = {"windows": [2, 4], "requests": [1, 2], "recomputed": [[0.0, 0.01], [0.1, 0.2]], "speed": [[9, 8], [7, 6]]}
DATA: dict[int, tuple[dict[str, Any], tuple[str, ...]]] = {
    4: (
        {"rows": [1, 2], "invariant": [1.0, 1.1], "plain": [2.0, 2.1], "shape": [8, 4], "dtype": "float32"},
        ("rows (tokens)", "time of the layer (ms)"),
    ),
    9: ({"rows": [1, 2], "ms": [1.0, 1.5], "windows": WINDOWS}, ("latency (ms)", "recomputed tokens (%")),
    10: (
        {"sample, batch 4": {"none": [[50, 0.9], [100, 1.1]], "auto": [[50, 0.8], [100, 0.7]]}},
        ("verified requests (%)", "throughput over that without drafts"),
    ),
    13: (WINDOWS, ("requests per pass", "window (drafted tokens)")),
}


@pytest.mark.parametrize("number", usual([9], DATA))
def test_figures_are_drawn_with_units_on_their_axes(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    need_matplotlib()
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text stays text
    data, texts = DATA[number]
    png, svg = draw(number, data, tmp_path, "some machine")
    assert png.read_bytes().startswith(b"\x89PNG")
    for text in (*texts, "some machine"):
        assert text in svg.read_text()


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fail(name: str, *rest: Any) -> Any:
        if name == "matplotlib":
            raise ImportError
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(BenchError, match=r"pip install 'detgen\[plots\]'"):
        need_matplotlib()


def test_measurements_have_a_value_for_every_point(tmp_path: Path) -> None:
    engine = EngineConfig(device="cpu", dtype="float32", threads=2, kv_memory=64 << 20)
    source = ModelSource(engine, random_weights="tiny", seed=0, positions=64, scratch=tmp_path)
    peer = DetgenPeer(source, DetgenPeer.contenders(source)[0], (1, 2))
    prompts = tuple(Prompt(tuple(range(7 * i + 1, 7 * i + 5 + 2 * i)), 6 + i) for i in range(5))
    found = linear_layers(peer, 1, most_rows=256)
    assert found["rows"] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert found["shape"] == [128, 64]
    assert all(ms > 0 for ms in found["invariant"] + found["plain"])
    assert len(found["invariant"]) == len(found["plain"]) == 9
    costs = pass_costs(peer, 1)
    assert len(costs["ms"]) == len(costs["rows"]) > 3
    grid = windows(peer, prompts, [2, 4], [1, 2], 1)
    assert [len(line) for line in grid["speed"]] == [2, 2]
    assert all(0 <= share < 1 for line in grid["recomputed"] for share in line)


def test_fractions_are_taken_from_the_rows() -> None:
    rows = [
        make_row(over_none=[1.0, 1.2, 1.1]),
        make_row("detgen none, 50% verified", fraction=0.5, over_none=[0.8]),
        make_row("detgen ngram", over_none=[2.0]),
        make_row("detgen none, q8", over_none=[3.0], reference="detgen none, q8"),
        make_row("transformers generate", fraction=None, over_none=[0.5]),
    ]
    assert by_fraction(rows) == {"sample, batch 4": {"none": [[50.0, 0.8], [100.0, 1.1]]}}
