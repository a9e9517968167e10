"""The documents are true to the code: options, names, links, terms and worked examples."""

from __future__ import annotations

import ast
import doctest
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from detgen import Completion, Engine, EngineConfig, Request, Score, ScoreRequest
from detgen.cli import app
from detgen.params import PARAMETERS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import kernel_floors  # noqa: E402
from reference import commands  # noqa: E402

# An environment, or what is built, has documents of its own beside these, and takes long to look through.
_OWN = ("benchmarks", "detgen", "docs", "sample_prompts", "tests", "tools")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for part in _OWN for path in (ROOT / part).rglob("*.md"))])
NAMING = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
DESIGN, ADDING = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("design.md", "adding.md"))

# Files of a run, paths of the batch API, and what other libraries call their own.
FOREIGN_FILES = re.compile(r".*\.(jsonl?|txt|csv|html|parquet|gz|zst|sqlite3)|/v1/.*|.*-out/")
FOREIGN_NAMES = {
    "AttentionInterface",
    "AttentionMaskInterface",
    "F.linear",
    "LLM.int8",
    "bench.md",
    "datasets.load_from_disk",
}


def shown(path: Path) -> str:
    """A document as tests call it."""
    return path.relative_to(ROOT).as_posix()


# The README


README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_readme_counts_the_model_types_that_run_whole() -> None:
    (counted,) = re.findall(r"(\d+) run whole in one call", (ROOT / "docs" / "models.md").read_text(encoding="utf-8"))
    assert f"For the {counted} model types\n" in README


def test_the_texts_of_forms_are_what_a_run_writes(tmp_path: Path) -> None:
    prompts, out = ROOT / "sample_prompts" / "structured.jsonl", tmp_path / "out"
    done = CliRunner().invoke(app, ["run", str(prompts), "-o", str(out), "-q"])
    assert done.exit_code == 0, done.output
    lines = map(json.loads, (out / "outputs.jsonl").read_bytes().splitlines())
    shown = "".join(f"    {line['id']}: {line['text']}\n" for line in lines)
    page = (ROOT / "docs" / "structured.md").read_text("utf-8")
    assert f"    $ jq -r '.id + \": \" + .text' out/outputs.jsonl\n{shown}\n" in page


def test_the_picture_is_what_a_run_writes(tmp_path: Path) -> None:
    """Prompts and texts line by line, and the digest, which the tutorial shows too."""
    prompts, out = ROOT / "sample_prompts" / "methods.jsonl", tmp_path / "out"
    done = CliRunner().invoke(app, ["run", str(prompts), "-o", str(out), "-q"])
    assert done.exit_code == 0, done.output
    svg = ElementTree.parse(ROOT / "docs" / "picture.svg").getroot()
    drawn = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    written = (out / "outputs.jsonl").read_bytes()
    digest = hashlib.sha256(written).hexdigest()
    given, texts = prompts.read_text("utf-8").splitlines(), [json.loads(line)["text"] for line in written.splitlines()]
    green = [e.text for e in svg.iter("{http://www.w3.org/2000/svg}text") if e.get("class") == "new"]
    assert green == [line for text in texts for line in text.splitlines()]
    assert {*given, digest} <= {*drawn}
    tutorial = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    assert all(f"    {line}\n" in tutorial for line in (*given, written.decode().splitlines()[1]))
    assert digest in tutorial


# Commands


OPTIONS = {name: {o for p in c.params for o in (*p.opts, *p.secondary_opts)} for name, c in commands().items()}
EVERYWHERE = {"--help", "-h"}
ROOT_OPTIONS = {"--version", "--debug", "--install-completion", "--show-completion", *EVERYWHERE}


def typed(text: str) -> Iterator[str]:
    """What is typed after `detgen` in the code of a document: in backticks, in a line of a block, behind a pipe."""
    lines = [line for line in text.splitlines() if re.match(r"    |\$ ", line)]
    for line in (*quoted(text), *lines):
        for part in line.split("|"):
            if found := re.match(r"\s*(?:\$ )?detgen (.+)", part):
                yield found[1]


def wrong_in(command: str) -> list[str]:
    """Words that no command of detgen takes."""
    words = shlex.split(command, comments=True)
    taken = 2 if words[0] == "cache" else 1
    name = " ".join(words[:taken])
    if name == "COMMAND" or name.startswith("-"):
        return [word for word in words if word.startswith("-") and word not in ROOT_OPTIONS]
    if name not in OPTIONS:
        return [] if name == "cache" else [name]
    given = (word.partition("=")[0] for word in words[taken:] if re.match(r"--?[a-z]", word))
    return [word for word in given if word not in OPTIONS[name] | EVERYWHERE]


@pytest.mark.parametrize("path", DOCUMENTS, ids=shown)
def test_commands_and_options_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not [word for command in typed(text) for word in wrong_in(command)]
    alone = {word for name in quoted(text) for word in name.split() if re.fullmatch(r"--[a-z][a-z-]+", word)}
    if path.parent == ROOT / "docs":
        assert not alone - ROOT_OPTIONS - set().union(*OPTIONS.values())


def test_a_wrong_command_and_a_wrong_option_are_found() -> None:
    text = (
        "    $ detgen go prompts.jsonl\n    cat x | detgen run -o - --no-such 3 # --more\n`detgen cache info --check`\n"
    )
    assert [wrong_in(command) for command in typed(text)] == [[], ["go"], ["--no-such"]]


# Names


@functools.cache
def sources() -> dict[str, ast.Module]:
    """The syntax tree of each module, by its path under `detgen/` with dots."""
    found = {}
    for path in sorted((ROOT / "detgen").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "detgen").with_suffix("").parts).removesuffix("__init__").rstrip(".")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def members(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Names that a module or class binds, attributes that its methods set on self among them."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            yield from ((name.id, node) for t in targets for name in ast.walk(t) if isinstance(name, ast.Name))
    for node in (n for part in body if isinstance(part, ast.FunctionDef) for n in ast.walk(part)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node


@functools.cache
def endings() -> dict[str, list[ast.Module]]:
    """The trees of the modules whose paths are a path, or end by it."""
    found: dict[str, list[ast.Module]] = {}
    for path, tree in sources().items():
        parts = path.split(".")
        for at in range(len(parts)):
            found.setdefault(".".join(parts[at:]), []).append(tree)
    return found


@functools.cache
def classes() -> dict[str, ast.ClassDef]:
    """Those of all modules, by their names."""
    nodes = (node for tree in sources().values() for node in ast.walk(tree))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def exists(name: str) -> bool:
    """Whether a dotted name is there: of a module by its whole path or the end of it, or of a class."""
    parts = name.removeprefix("detgen.").split(".")
    for at in range(len(parts), 0, -1):
        if any(_has(tree.body, parts[at:]) for tree in endings().get(".".join(parts[:at]), [])):
            return True
    return parts[0] in classes() and _has(classes()[parts[0]].body, parts[1:])


def _has(body: list[ast.stmt], parts: list[str]) -> bool:
    if not parts:
        return True
    found = [node for name, node in members(body) if name == parts[0]]
    if len(parts) == 1:
        return bool(found)
    return any(isinstance(node, ast.ClassDef) and _has(node.body, parts[1:]) for node in found)


def quoted(text: str) -> list[str]:
    """What stands in backticks outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def unknown(text: str) -> list[str]:
    """Files, dotted names, classes and registered names in backticks that the tree does not have."""
    missing = []
    for name in quoted(text):
        if name in FOREIGN_NAMES or FOREIGN_FILES.fullmatch(name):
            continue
        if re.fullmatch(r"[\w./-]*(/[\w.-]*|\.(py|c|md|toml))", name):
            known = (ROOT / name).exists()
        elif re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name):
            known = exists(name)
        elif re.fullmatch(r"([A-Z][a-z0-9]+){2,}", name):
            known = name in classes()
        else:
            continue
        if not known:
            missing.append(name)
    for name, file in re.findall(r"`(\w+)`\s+in\s+`(detgen/[\w/]+\.py)`", text):
        if (ROOT / file).exists() and not exists(f"{file[:-3].replace('/', '.')}.{name}"):
            missing.append(name)
    return missing


def test_the_floors_of_kernels_are_as_computed() -> None:
    text = kernel_floors.PAGE.read_text(encoding="utf-8")
    assert kernel_floors.page(text) == text


@pytest.mark.parametrize("path", NAMING, ids=shown)
def test_names_in_backticks_exist(path: Path) -> None:
    assert not unknown(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name", ["detgen/engine/nothing.py", "Scheduler.nothing", "detgen.engine.nothing", "NoSuchClass", "verification.no"]
)
def test_a_wrong_name_is_found(name: str) -> None:
    assert unknown(f"see `{name}`, `Scheduler.admit`, `verification.judge`") == [name]


def test_a_function_of_another_file_is_found() -> None:
    assert unknown("`admit_all` in\n`detgen/engine/scheduler.py`, `pack` in `detgen/kernels/input_batch.py`") == [
        "admit_all"
    ]


# What docstrings say

PLAIN = (EngineConfig, Request, Completion, ScoreRequest, Score)  # that users fill in or read


@pytest.mark.parametrize("plain", PLAIN, ids=lambda plain: plain.__name__)
def test_a_docstring_has_each_attribute(plain: Any) -> None:
    said = re.findall(r"^        (\w+): ", str(plain.__doc__).partition("Attributes:\n")[2], flags=re.MULTILINE)
    inherited = {f.name for base in plain.__mro__[1:-1] for f in fields(base)}
    assert sorted(said) == sorted({f.name for f in fields(plain)} - inherited)


def test_each_parameter_says_what_it_does() -> None:
    assert all(re.fullmatch(r"[A-Z0-9].+\.", parameter.help) for parameter in PARAMETERS.values())


@pytest.mark.parametrize("option", ["--target-quant", "--draft-quant", "--speculative-prefill"])
def test_what_an_option_takes_is_in_the_docstring_of_its_setting(option: str) -> None:
    metavar = next(p.metavar for p in commands()["run"].params if option in p.opts)
    values = re.findall(r"[a-z][a-z0-9]+", metavar)
    name = option.removeprefix("--").replace("-", "_")
    said = re.search(rf"^        {name}: (.*(?:\n            .*)*)", str(EngineConfig.__doc__), flags=re.MULTILINE)
    assert said is not None
    assert not [value for value in values if value not in said[1] and "as for" not in said[1]]


# Links


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=shown)
def test_relative_links_resolve(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), f"{shown(path)} links to {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{shown(path)} links to {link}"


# Terms


def test_the_glossary_is_in_order_and_has_each_term_once() -> None:
    terms = re.findall(r"^\*\*(.+?)\*\*: ", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(terms) > 50
    assert terms == sorted(set(terms), key=str.lower)


def test_the_listing_of_a_program_is_what_is_printed(demo_models: Any) -> None:
    """Line by line, in their order; dots stand for what is left out."""
    found = re.search(r"^\$ python -c .*\n([^`]+)```", DESIGN, re.MULTILINE)
    assert found is not None
    decoder: Any = Engine(target=demo_models.draft, kv_memory=4 << 20).canonical.decoder
    printed = (" ".join(line.split()) for line in str(decoder.program()).splitlines())
    for line in found[1].splitlines():
        wanted = " ".join(line.split()).removesuffix("...")
        assert any(other.startswith(wanted) for other in printed), line


# What Python shows


def test_the_examples_in_python_give_what_they_show() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    test = doctest.DocTestParser().get_doctest(page, {}, "python.md", None, 0)
    assert len(test.examples) > 12
    told: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    assert not told, "".join(told)


# Worked examples


def examples() -> dict[str, str]:
    """The diffs of `docs/adding.md`, by the headings that they stand under."""
    parts = re.split(r"^##+ (.+)$", ADDING, flags=re.MULTILINE)
    blocks = {
        title: re.findall(r"^```diff\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    return {title: found[0] for title, found in blocks.items() if found}


def changed(diff: str, root: Path = ROOT) -> dict[str, str]:
    """The files of a diff as they are after it, by path. Its hunks have no line numbers: each must fit in one place."""
    files = {}
    for part in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]:
        old, new, rest = part.split("\n", 2)
        path = new.removeprefix("+++ b/")
        text = "" if old == "/dev/null" else (root / path).read_text(encoding="utf-8")
        for hunk in re.split(r"^@@.*\n", rest, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines()
            before, after = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != sign) for sign in "+-")
            assert not text or text.count(before) == 1, f"{text.count(before)} places in {path} for:\n{before}"
            text = text.replace(before, after) if text else after
        files[path] = text
    return files


EXAMPLES = {
    "A drafter": {"detgen/drafters/repeat.py", "detgen/drafters/registry.py"},
    "A sampling filter": {
        "detgen/params.py",
        "detgen/kernels/filters.py",
        "detgen/kernels/c/layout.py",
        "detgen/kernels/c/choosing.c",
        "detgen/kernels/triton/sampling_kernels.py",
    },
    "A parameter without a kernel": {"detgen/params.py", "detgen/engine/stopping.py"},
    "An argument of attention": {
        "detgen/kernels/attention.py",
        "detgen/kernels/c/attend.c",
        "detgen/program/attention.py",
        "detgen/program/steps.py",
        "detgen/models/attaching.py",
        "detgen/kernels/generic/paged_attention.py",
        "detgen/models/layer_steps.py",
    },
    "A model family": {"detgen/models/families.py"},
    "A step": {
        "detgen/program/steps.py",
        "detgen/program/interpreter.py",
        "detgen/kernels/c/pass.c",
        "detgen/kernels/triton/rowwise.py",
        "detgen/kernels/triton/runner.py",
    },
    "A weight format": {"detgen/models/gguf/kinds.py", "detgen/program/storage.py"},
}


def test_each_example_is_tried() -> None:
    assert examples().keys() == EXAMPLES.keys()


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_applies_and_touches_few_files(title: str) -> None:
    assert changed(examples()[title]).keys() == EXAMPLES[title]


TRIED = """
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import detgen
import gguf
import numpy as np
import torch
from detgen import Engine
from detgen.kernels.attention import AttentionTraits
from detgen.kernels.c.call import Call
from detgen.kernels.c.panels import panels
from detgen.kernels.sampling import Choice, Choices, choose
from detgen.machine import CPU
from detgen.program.arrays import FLOAT32, each, tensor
from detgen.runner.kv_cache import KVCache
from detgen.kernels.generic.paged_attention import PagedAttention
from detgen.kernels.input_batch import Window, Windows, pack
from detgen.runner.block_manager import BlockManager
from detgen.models.stored import Place
from detgen.program.interpreter import Interpreter
from detgen.program.operands import Buffer, Cache, Into
from detgen.program.program import Program
from detgen.program.rows import Rows
from detgen.program.steps import Attend, Clamp, Linear
from transformers import YoutuConfig, YoutuForCausalLM

engine = Engine(drafter="repeat", kv_memory=64 << 20)
plain = engine.with_settings(drafter="none")
found = []
for chosen in (engine, plain):
    for sigma in (0.0, 1.0):
        done = chosen.generate(["def add(a, b):", "for"], max_tokens=12, temperature=1.1, top_n_sigma=sigma)
        found.append([c.token_ids for c in done])
assert engine.stats.drafters["repeat"].drafted
assert found[:2] == found[2:], "the drafter changed the output"
assert found[0] != found[1], "the filter changed nothing"

Path("p.jsonl").write_text('{"prompt": "def add(a, b):", "trim": true}\\n{"prompt": "def add(a, b):"}\\n')
command = [sys.executable, "-m", "detgen"]
subprocess.run([*command, "run", "p.jsonl", "--max-tokens", "12", "-o", "out"], check=True)
trimmed, whole = (json.loads(line)["text"] for line in Path("out/outputs.jsonl").read_text().splitlines())
assert trimmed == whole.strip() != whole
subprocess.run([*command, "audit", "out"], check=True)
subprocess.run([*command, "run", "p.jsonl", "--max-tokens", "12", "-o", "out2", "--trim"], check=True)
assert [json.loads(line)["text"] for line in Path("out2/outputs.jsonl").read_text().splitlines()] == [trimmed] * 2

q, (k, v) = torch.randn(2, 2, 6, 16), torch.randn(2, 2, 64, 2, 16)
scores = torch.einsum("shrd,skhd->shrk", q, k).clamp(-3.0, 3.0)
want = torch.einsum("shrk,skhd->shrd", scores.softmax(-1), v)

cache = KVCache([(2, 16, 16)], BlockManager(2), FLOAT32, CPU)
cache.pages.lay_out(1, 64)
packed = pack(Windows.of([Window(0, 0, [0] * 64, 0)]), cache.pages.tables, 1)
last = q[0, :, :1].transpose(0, 1)
rows = torch.cat([torch.zeros(63, 2, 16), last])
out = PagedAttention(cache).attend(0, rows, k[0], v[0], packed, AttentionTraits(1.0, bound=3.0))
torch.testing.assert_close(out[63], want[0, :, 0])
heads = Cache(heads=2, kv_heads=2, size=16, values=16, keys=cache.keys[0], kept=cache.values[0])
program, out = Program(Buffer("qkv", 96)), torch.empty(64, 32)
program.add(Attend(name="attended", qkv=Buffer("qkv", 96), cache=heads, to=Buffer("to", 32), scale=1.0, bound=3.0))
given = {Buffer("qkv", 96): torch.cat([rows.flatten(1), torch.zeros(64, 64)], 1), Buffer("to", 32): out}
Interpreter(program).run(packed.rows, given)
torch.testing.assert_close(out[63].view(2, 16), want[0, :, 0])

x, read, to, program = torch.randn(5, 21), Buffer("x", 21), Buffer("to", 21), Program(Buffer("x", 21))
program.add(Clamp(name="bounded", x=read, to=to, most=0.5))
assert torch.equal(Call(program, (read,), (to,))(x)[0], x.clamp(-0.5, 0.5))
found, along = torch.empty(5, 21), torch.arange(5)
rows = Rows(*[along] * 4, *[along[:0]] * 2)
Interpreter(program).run(rows, {read: x, to: found})
assert torch.equal(found, x.clamp(-0.5, 0.5))
bounded = program, rows, x

folder = Path("youtu")
shutil.copytree(Path(detgen.__file__).parent / "demo_models" / "draft", folder)
sizes = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "v_head_dim": 16}
sizes |= {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
config = YoutuConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512)
YoutuForCausalLM(config).save_pretrained(folder)
family = Engine(target=str(folder), drafter="none", kv_memory=8 << 20)
assert "versions" not in family.profile(), "the family does not run whole in one call"

file, blocks = Path("blocks"), np.random.default_rng(1).integers(0, 256, (70, 66), np.uint8)
blocks[:, 64:] %= 60  # finite scales
file.write_bytes(blocks.tobytes())
weight = Place(file, "TQ2_0", (35, 512), 0).read()
want = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.TQ2_0)).view(35, 512)
assert torch.equal(tensor(weight.weight()), want)
few, numbers, read, to = panels([weight]), torch.randn(40, 512), Buffer("x", 512), Buffer("to", 35)
assert few.data.size == 2 * 512 * 8, "not four weights a byte"
layer = Program(read)
layer.add(Linear(name="linear", x=read, to=Into(to), weight=few))
product, along = torch.empty(40, 35), torch.arange(40)
Interpreter(layer).run(Rows(*[along] * 4, *[along[:0]] * 2), {read: numbers, to: product})
assert (product - numbers @ want.T).norm() < 0.02 * product.norm()
assert torch.equal(Call(layer, (read,), (to,))(numbers)[0], product)
assert torch.equal(Call(layer, (read,), (to,))(numbers[:1])[0], product[:1])

if importlib.util.find_spec("triton") is None:
    raise SystemExit
from detgen.kernels.triton import linear as triton_linear
from detgen.kernels.triton import sampling_kernels as sampling
from detgen.kernels.triton.runner import TritonRunner

program, rows, x = bounded
found = torch.empty(5, 21)
TritonRunner(program).run(rows, {Buffer("x", 21): x, Buffer("to", 21): found})
assert torch.equal(found, x.clamp(-0.5, 0.5))

found = torch.empty(40, 35)
triton_linear.linear(numbers, each(few, tensor), found)
assert torch.equal(found, product)

choices = Choices.of([Choice(1.1, top_n_sigma=1.0, seed=seed) for seed in range(8)])
logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(1))
on_device = sampling.unpack(sampling.choose_by(logits, choices)).tokens
assert on_device.tolist() == choose(logits, choices).tokens.tolist(), "the filter is skipped on a GPU"
"""


@pytest.mark.slow
def test_the_examples_do_what_they_say(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "detgen", tmp_path / "detgen", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    for diff in examples().values():
        for path, text in changed(diff, tmp_path).items():
            (tmp_path / path).write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, "-c", TRIED], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False
    )
    assert done.returncode == 0
