"""The outputs of the sample prompts are these bytes: on every kind of processor, with every drafter, in every version.

Whoever changes one of them has changed the arithmetic, a model or what an output line says, and says so.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from helpers.batch_types import check
from helpers.examples import usual
from typer.testing import CliRunner

from detgen.cli import app
from detgen.kernels.c import library
from detgen.outputs.batch_results import digested
from detgen.outputs.lines import dump

pytestmark = pytest.mark.usefixtures("kept_models")

PROMPTS = Path(__file__).parents[2] / "sample_prompts"
# SHA-256 of outputs.jsonl with 32 tokens a sample, by the file and the temperature, without keys that came later.
KNOWN = {
    ("batch.jsonl", "0"): "8dbe858b6b3f05204e1878eed2ba135dd8b4287a149dd2eec2bbffa4327606ec",
    ("code.jsonl", "0"): "f0287f841f3ff64be05297fa4f4943f5ded70c8b4fcf0dae1f10b1422e86f833",
    ("code.jsonl", "0.8"): "318b57f4d76a80d982e900d53e91f17672166b18a68906117753252f2e4ad86f",
    ("mistakes.jsonl", "0"): "2abd2957f31158275428bbe043c3a5905f05843bd94e8be9c482eba607b12154",
    ("parameters.jsonl", "0"): "7faf92cb973c96c1b34cb90c4cebd7f59e5315c3b00cb6e7939becda0fd178ff",
    ("prompts.csv", "0.8"): "3870399cb4d0e270462ed06f7984451c9125a7315f56bcdb4aaf65f1d068a6ea",
    ("prompts.json", "0.8"): "48b1cfbd565cc06ae03fd709f75e6bc097765da4d03f94edb60a58037365da27",
    ("prompts.txt", "0.8"): "c326d633c886ed1114b9676b8f7598f9fc026d3d724f41134c001cb7fb9e4ebe",
    ("structured.jsonl", "0"): "f871acdae482b499074526ca40caa6a5b59b4a699f78cff9f0dafb00e2fd6901",
    ("tools.jsonl", "0"): "835f36be713a89b9b48c0be0b0d748dc996c777f883c04152f72d288af7b0f58",
    ("chat.jsonl", "0.8"): "9487db59ad586dff29986daa927825bb32d91e51f9e0de2dba938e6b370911f6",
    ("coin_flips.jsonl", "0"): "e8a1fc002ae8b4c7a17ad4d554b65dd5c8b28822986ae83da9239118afe577b1",
}
SCORES = "cebd77d5b0e3d075ac592ffce6873f853a572e802cf58cfd338576ad70b9f200"
# With every build; that their passes agree bit for bit is tested in kernels/c/test_processors.py.
EVERYWHERE = usual(
    [("avx2", ("parameters.jsonl", "0"))],
    [("plain", ("prompts.txt", "0.8")), ("avx2", ("structured.jsonl", "0")), ("avx2", ("tools.jsonl", "0"))],
)


@pytest.fixture
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One kind of processor, for everything that was compiled."""
    if library.build(request.param) is None:
        pytest.skip(f"this processor has no {request.param}, or it was not built")
    monkeypatch.setattr(library, "BUILDS", (request.param,))
    return request.param


def digest(folder: Path, file: str, *options: str, command: str = "run") -> str:
    target = ["--target", "demo-thinking"] if file == "coin_flips.jsonl" else []
    arguments = [command, str(PROMPTS / file), "-o", str(folder), "-q", "--kv-memory", "128MiB", *target, *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = [dump(digested(json.loads(line))) for line in (folder / "outputs.jsonl").read_text().splitlines()]
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


@pytest.mark.parametrize(("file", "temperature"), KNOWN)
def test_outputs_are_known(tmp_path: Path, file: str, temperature: str) -> None:
    assert digest(tmp_path, file, "--max-tokens", "32", "--temperature", temperature) == KNOWN[file, temperature]


@pytest.mark.parametrize(("build", "known"), EVERYWHERE, indirect=["build"])
@pytest.mark.usefixtures("build")
def test_every_build_gives_them(tmp_path: Path, known: tuple[str, str]) -> None:
    file, temperature = known
    assert digest(tmp_path, file, "--max-tokens", "32", "--temperature", temperature) == KNOWN[known]


@pytest.mark.parametrize("options", usual([("--drafter", "ngram")], [("--batch-size", "1", "--drafter", "none")]))
def test_results_are_known(tmp_path: Path, options: tuple[str, ...]) -> None:
    digest(tmp_path, "batch.jsonl", "--output-format", "openai", *options)
    data = (tmp_path / "results.jsonl").read_bytes()
    kinds = [type(check(line)).__name__ for line in data.splitlines()]
    assert kinds == ["ChatCompletion", "ChatCompletion", "Completion", "Failure"]
    assert hashlib.sha256(data).hexdigest() == "6b9fcd3ecb30ecedc50c8d3a6cfd57d123452587e3e755b88099d30ab96c773f"


@pytest.mark.parametrize("size", usual(["16"], ["1"]))
def test_scores_are_known(tmp_path: Path, size: str) -> None:
    assert digest(tmp_path, "scores.jsonl", "--batch-size", size, command="score") == SCORES


@pytest.mark.parametrize("drafter", usual(["model"], ["none", "ngram"]))  # all other runs here are of "auto"
def test_they_are_those_of_all_drafters(tmp_path: Path, drafter: str) -> None:
    known = KNOWN["code.jsonl", "0"]
    assert digest(tmp_path, "code.jsonl", "--max-tokens", "32", "--drafter", drafter, "--batch-size", "5") == known
