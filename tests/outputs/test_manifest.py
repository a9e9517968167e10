"""The schema of manifests: what detgen writes passes, anything else is one line that names the key and the reason."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.fakes import go, manifest_of, stopping_at

import detgen
from detgen.errors import OutputError, RequestError, RunError
from detgen.outputs import parse_manifest, sampling_params
from detgen.params import PARAMETERS, SamplingParams

PATH = Path("out/manifest.json")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("manifest")
    (folder / "prompts.txt").write_text("one\ntwo\n")
    go(folder / "prompts.txt", folder / "out", params=SamplingParams(max_tokens=3, stop=("a", "b"), logprobs=2))
    return manifest_of(folder / "out")


def parse(manifest: object) -> dict[str, Any]:
    return parse_manifest(json.dumps(manifest).encode(), PATH)


def test_what_detgen_writes_passes(written: dict[str, Any], tmp_path: Path) -> None:
    assert parse(written) == written
    assert sampling_params(written["parameters"]) == SamplingParams(max_tokens=3, stop=("a", "b"), logprobs=2)
    (tmp_path / "prompts.txt").write_text("one\n" * 20)
    go(tmp_path / "prompts.txt", tmp_path / "out", build=stopping_at(3))
    interrupted = manifest_of(tmp_path / "out")
    assert parse(interrupted) == interrupted
    running = {k: v for k, v in interrupted.items() if k not in ("deterministic", "summary")} | {"status": "running"}
    assert parse(running) == running


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**63, 10**20])
def test_a_parameter_is_refused_or_a_manifest_holds_it(written: dict[str, Any], name: str, size: int) -> None:
    default = getattr(SamplingParams(max_tokens=2**31 - 1), name)
    value = [size] if isinstance(default, tuple) else size
    try:
        given = SamplingParams(**{"max_tokens": 2**31 - 1, name: value})
    except RequestError:
        return
    manifest = copy.deepcopy(written)
    manifest["parameters"] |= dict(given)
    assert sampling_params(parse(manifest)["parameters"]) == given


@pytest.mark.parametrize("name", [*PARAMETERS, "limit", "seed_per_line", "echo"])
def test_every_parameter_is_there(written: dict[str, Any], name: str) -> None:
    manifest = copy.deepcopy(written)
    del manifest["parameters"][name]
    with pytest.raises(OutputError, match=rf"parameters\.{name} is missing"):
        parse(manifest)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.pop("created"), "created is missing"),
        (lambda m: m.update(extra=1), "extra is unknown"),
        (lambda m: m["input"].pop("prompt_column"), "input.prompt_column is missing"),
        (lambda m: m["input"].update(prompt_column=1), "input.prompt_column must be a string, got 1"),
        (lambda m: m["parameters"].update(echo="yes"), "parameters.echo must be true or false, got 'yes'"),
        (lambda m: m["settings"].update({"\x1b[31m": 1}), r"settings.'\x1b[31m' is unknown"),
        (lambda m: m["parameters"].update(top_p=[1]), "parameters.top_p must be a number from 0 to 1, got [1]"),
        (lambda m: m["parameters"].update(top_p=7.5), "parameters.top_p must be a number from 0 to 1, got 7.5"),
        (lambda m: m["parameters"].update(n=True), "parameters.n must be a whole number"),
        (
            lambda m: m["parameters"].update(stop=["a", 7]),
            "parameters.stop must be a non-empty string or a list",
        ),
        (lambda m: m["parameters"].update(stop=[""]), "parameters.stop must be a non-empty string"),
        (lambda m: m["parameters"].update(limit=0), "parameters.limit must be at least 1, got 0"),
        (lambda m: m.update(seconds=-1), "seconds must be at least 0, got -1"),
        (lambda m: m.update(seconds=10**400), "seconds must be a number, got 1000"),
        (lambda m: m.update(created="yesterday"), "created must be a time in UTC"),
        (lambda m: m["settings"].update(drafter="sorcery"), "settings.drafter must be one of auto, self, model, ngram"),
        (lambda m: m["settings"].update(speculative_prefill="on"), "settings.speculative_prefill must be auto, off or"),
        (lambda m: m["settings"].update(speculative_prefill=True), "settings.speculative_prefill must be auto, off or"),
        (
            lambda m: m["settings"].update(speculative_prefill=0),
            "speculative_prefill must be auto, off or a number of chunks of at least 1, got 0",
        ),
        (lambda m: m["profile"].update(target=None), "profile.target must be an object, got null"),
        (lambda m: m["profile"]["versions"].update(torch=2), "profile.versions.torch must be a string, got 2"),
        (lambda m: m["files"].pop("acceptance.jsonl"), "files.'acceptance.jsonl' is missing"),
        (lambda m: m["files"]["outputs.jsonl"].update(sha256="x"), "sha256 must be 64 hexadecimal digits, got 'x'"),
        (lambda m: m["summary"]["drafters"]["ngram"].pop("bonus"), "summary.drafters.ngram.bonus is missing"),
        (lambda m: m["summary"]["drafters"].update(you={}), "summary.drafters.you is unknown"),
        (
            lambda m: m["summary"].update(tokens=10**300),
            "summary.tokens must be below 9223372036854775808, got 1000",
        ),
        (lambda m: m.pop("files"), "files is missing, though the status is finished"),
        (lambda m: m.update(status="interrupted"), "files is given, though the status is interrupted"),
        (lambda m: m.update(probe={"row_invariant": True}), "probe is unknown"),
        (lambda m: m.update(deterministic=True), "deterministic is unknown"),
        (lambda m: m.update(detgen=1), "detgen must be a version such as 1.2.3, got 1"),
        (lambda m: m.update(detgen="1\n2"), "detgen must be a version such as 1.2.3, got '1\\n2'"),
    ],
)
def test_anything_else_is_named(written: dict[str, Any], change: Callable[[dict[str, Any]], Any], words: str) -> None:
    manifest = copy.deepcopy(written)
    change(manifest)
    with pytest.raises(OutputError) as caught:
        parse(manifest)
    message = str(caught.value)
    assert message.startswith("out/manifest.json: ")
    assert words in message
    assert message.endswith("restore the file, or use another folder")
    assert message.isascii()
    assert message.isprintable()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "it must be an object, got a list"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"seconds": NaN}', "NaN is not a JSON value"),
        (b'{"status": "a", "status": "b"}', "'status' is given twice"),
        ('{"detgen": "1"}'.encode("utf-16"), "it is not UTF-8"),
        (b'{"seconds": ' + b"9" * 5000 + b"}", "a number of too many digits"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
    ],
)
def test_bytes_that_are_no_manifest(data: bytes, words: str) -> None:
    with pytest.raises(OutputError) as caught:
        parse_manifest(data, PATH)
    assert words in str(caught.value)


def test_another_version_is_read_as_far_as_saying_so_needs(written: dict[str, Any], tmp_path: Path) -> None:
    """An older run is refused for its version, not for keys that it does not have yet."""
    (tmp_path / "prompts.txt").write_text("one\n")
    go(tmp_path / "prompts.txt", tmp_path / "out")
    manifest = manifest_of(tmp_path / "out") | {"detgen": "0.0.1", "unheard of": 1}
    del manifest["settings"]
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=f"detgen: 0.0.1 -> {detgen.__version__}"):
        go(tmp_path / "prompts.txt", tmp_path / "out")
    with pytest.raises(OutputError, match=r"input\.path must be a string, got 7"):
        parse({"detgen": "0.0.1", "status": "x", "parameters": {}, "input": {**written["input"], "path": 7}})
