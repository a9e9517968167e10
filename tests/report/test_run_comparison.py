"""Two folders: what differs between them, and where first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from helpers.pages import Element, read_page

from detgen.report.page import render
from detgen.report.reporting import read_report
from detgen.report.run_comparison import Comparison

Log = list[dict[str, Any]]


def compared(one: Path, other: Path) -> tuple[Comparison, Element]:
    report = read_report(one, against=other)
    assert not report.faults.count, report.faults.first
    assert report.other is not None
    return report.other[2], read_page(render(report))


def edit_manifest(folder: Path, change: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_the_same_run_twice(finished: Path, out: Path) -> None:
    found, page = compared(finished, out)
    assert (found.equal, found.samples, found.kinds) == (10, 10, {})
    assert "outputs.jsonl has the same bytes in both folders" in page.one(id="verdict").text


def test_a_token_that_differs(finished: Path, out: Path, rewrite: Any, log: Log, outputs: Log) -> None:
    """Its position, both tokens, both margins, and the texts from there on."""

    def change(name: str, lines: Log) -> Log:
        for line in lines:
            if line["id"] == "greedy" and name == "outputs.jsonl":
                line["token_ids"][7] = 9
                line["text"] = line["text"][:20] + "<other>"
            elif line["id"] == "greedy" and (line["position"], line["status"]) == (7, "accepted"):
                line.update(token=9, drafted=9, margin=0.125)
            elif line["id"] == "greedy" and line["position"] == 7 and line["token"] is not None:
                line.update(token=9, margin=0.125)
        return lines

    rewrite(out, change)
    found, page = compared(finished, out)
    assert (found.equal, found.samples) == (9, 10)
    assert found.kinds == {"has another token": 1}
    line = next(line for line in outputs if line["id"] == "greedy")
    entry = next(e for e in log if e["id"] == "greedy" and e["position"] == 7 and e["token"] is not None)
    (row,) = page.one(id="differing").rows()
    assert row[:3] == ["greedy", "has another token", "7"]
    assert row[4] == f"{entry['margin']:.4g}"
    assert row[6] == "0.125"
    assert row[3] != row[5]
    assert row[9].startswith("<other>")
    (difference,) = found.kept
    assert difference.tokens == (line["token_ids"][7], 9)
    assert difference.common == line["text"][:20]
    assert page.one(id="first").rows() == [["4 to 7", "1"]]
    assert "this must not happen" in page.one(id="verdict").text


def test_another_profile_may_differ(finished: Path, out: Path, rewrite: Any) -> None:
    def change(name: str, lines: Log) -> Log:
        if name == "outputs.jsonl":
            for line in lines:
                if line["id"] == "repeats":
                    del line["token_ids"][-1]
        return lines

    rewrite(out, change)
    edit_manifest(out, lambda m: (m["profile"].update(dtype="bfloat16"), m["settings"].update(batch_size=3)))
    report = read_report(finished, against=out)
    assert not report.faults.count
    page = read_page(render(report))
    assert page.one(id="manifests").text == "profile.dtype: float32 -> bfloat16"
    assert "so they may differ" in page.one(id="verdict").text
    assert any("batch_size: 16 → 3" in li.text for li in page.all("li"))
    assert page.one(id="kinds").rows() == [["is longer in one run", "1"]]
    assert page.one(id="differing").rows()[0][5] == "(ended)"


def test_another_order_is_no_difference(finished: Path, out: Path, rewrite: Any) -> None:
    """Samples are told apart by their ids; the places in the input are not compared."""

    def change(name: str, lines: Log) -> Log:
        last = max(line["index"] for line in lines)
        for line in lines:
            line["index"] = last - line["index"]
        return sorted(lines, key=lambda line: (line["index"], line["sample"]))

    shutil.rmtree(out)
    shutil.copytree(finished, out)
    rewrite(out, change)
    found, page = compared(finished, out)
    assert (found.equal, found.samples, found.kinds) == (10, 10, {})
    assert "but the order" in page.one(id="verdict").text


def test_what_else_may_differ(finished: Path, out: Path, rewrite: Any) -> None:
    def change(name: str, lines: Log) -> Log:
        kept = []
        for line in lines:
            if line["id"] == "stopped":
                continue
            if name == "outputs.jsonl":
                match line["id"]:
                    case "greedy":
                        line["seed"] = 5
                    case "repeats":
                        line["prompt_tokens"] += 1
                    case "last":
                        line["logprobs"][0]["logprob"] -= 0.5
                    case "too long":
                        line["error"] += "!"
                    case "broken<i>":
                        line.update(text="x", token_ids=[1], finish_reason="stop")
                        line.update(prompt_tokens=1, completion_tokens=1, seed=0, stop_reason=None)
                        del line["error"]
            if line["id"] == "unverified":
                line["id"] = "new"
            kept.append(line)
        return kept

    rewrite(out, change)
    report = read_report(finished, against=out)
    assert report.other is not None
    assert report.other[2].kinds == {
        "has another seed": 1,
        "has another prompt": 1,
        "has the same tokens, but differs in logprobs": 1,
        "has another error": 1,
        "ends with an error in one run": 1,
        "is only in the first run": 2,
        "is only in the second run": 1,
    }
    read_page(render(report))


def test_lines_that_no_run_writes_are_faults_of_their_folder(finished: Path, out: Path) -> None:
    path = out / "outputs.jsonl"
    lines = path.read_text().splitlines()
    lines[0] = '{"id": ["x"], "index": 0, "sample": 0, "text": 3}'
    lines[1] = "{"
    path.write_text("\n".join(lines) + "\n")
    report = read_report(finished, against=out)
    assert report.faults.first[:2] == [f"{out}: outputs.jsonl:{n}: is not a line of a run" for n in (1, 2)]
    report = read_report(out, against=finished)
    assert report.faults.count
    read_page(render(report))
