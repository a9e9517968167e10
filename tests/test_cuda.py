"""The commands on a CUDA device: on a real one where there is one, and on a stand-in in torch's CPU builds.

The stand-in computes on the CPU, kernels in Triton's interpreter. It shows that whatever belongs on the device is moved
there, that the paths that only a CUDA device takes run to their ends, and that the bytes are those of a CPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.examples import THOROUGH, thorough

STAND_IN = Path(__file__).parent / "cuda_stand_in"
PROMPTS = [
    {"prompt": "def add(a, b):\n"},
    {"prompt": "class Stack:\n    def push(self, item):\n", "temperature": 0.8, "seed": 3, "logprobs": 2},
    {"prompt": "for i in range(10):\n    print(i)\nfor i in", "temperature": 0.9, "top_p": 0.9, "top_k": 20, "n": 2},
    {"prompt": "import os\n\n\ndef walk(path):\n", "logprobs": 3},
    {"prompt": "class Queue:\n", "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {"9": -100}},
    {"prompt": "class Tree:\n", "frequency_penalty": 0.7, "temperature": 0.8, "min_tokens": 3, "ignore_eos": True},
    {"prompt": "def scale(x):\n", "deterministic": False},
]

Command = Callable[..., str]


def _build(folder: Path) -> Path:
    """The stand-in as a library that torch loads; one that an earlier run of the tests has compiled, if it can be."""
    import torch
    from torch.utils.cpp_extension import include_paths

    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("this torch has a CUDA of its own")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = STAND_IN / "stand_in.cpp"
    known = hashlib.sha256(repr((source.read_bytes(), torch.__version__, torch.__file__, compiler)).encode())
    library = folder / f"{known.hexdigest()}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{os.getpid()}.so"
    headers = [part for path in include_paths() for part in ("-isystem", path)]
    libraries = Path(torch.__file__).parent / "lib"
    links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    options = ["-std=c++20", "-O0", "-DAT_PER_OPERATOR_HEADERS", "-shared", "-fPIC", abi, *headers]
    subprocess.run([compiler, *options, str(source), "-o", str(made), *links], check=True)
    return made.replace(library)


@pytest.fixture(scope="module", params=["stand-in", pytest.param("real", marks=pytest.mark.cuda)])
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables under which a process has the device."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    if request.param == "stand-in":
        path = os.pathsep.join([str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])])
        library = _build(request.config.cache.mkdir("stand-in"))
        environment |= {"PYTHONPATH": path, "DETGEN_CUDA_STAND_IN": str(library)}
    return environment


# Reads programs, a JSON string a line, and writes what each printed, or its traceback, and whether it ended well.
INTERPRETER = """
import contextlib, io, json, sys, traceback
for line in sys.stdin:
    printed, ended_well = io.StringIO(), True
    with contextlib.redirect_stdout(printed):
        try:
            exec(json.loads(line), {})
        except BaseException:
            printed, ended_well = io.StringIO(traceback.format_exc()), False
    print(json.dumps([printed.getvalue(), ended_well]), flush=True)
"""

# Has the stand-in passed its self-test, which takes long in the interpreter; see test_self_test. The interpreter
# patches `triton.language` as in `kernels/triton/conftest.py`.
TRIED = """
from triton.runtime import interpreter
patch, known = interpreter._patch_lang, interpreter.InterpretedFunction.rewritten_fn
interpreter._patch_lang = lambda fn: None if fn in known else patch(fn)
import torch
from detgen.machine import Device
from detgen.runner.trying import keep, verdict_path
keep(verdict_path(Device("cuda"), torch.cuda.get_device_name()), [])
"""

# After one run: passes of further engines are not compared with the model's own forward, which takes long there, too.
COMPARED = """
from detgen.runner import preparing
preparing.compared = lambda runner, own, vocabulary: own
"""


@pytest.fixture(scope="module")
def python_on_cuda(environment: dict[str, str]) -> Iterator[Callable[[str], str]]:
    """Runs programs, all in one process, which loads its libraries once: what each wrote on its standard output."""
    command = [sys.executable, "-c", INTERPRETER]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin
        assert process.stdout

        def run(code: str) -> str:
            print(json.dumps(code), file=process.stdin, flush=True)
            answer = process.stdout.readline()
            assert answer, f"the process ended with {process.wait()}"
            printed, ended_well = json.loads(answer)
            assert ended_well, printed
            return str(printed)

        if "DETGEN_CUDA_STAND_IN" in environment:
            run(TRIED)
        yield run


@pytest.fixture(scope="module")
def detgen(python_on_cuda: Callable[[str], str]) -> Command:
    """Runs a command in a folder: what it wrote on its standard output."""

    def run(folder: Path, *arguments: str) -> str:
        return python_on_cuda(
            f"""
import os
from detgen.cli import app
os.chdir({str(folder)!r})
try:
    app({arguments!r}, prog_name="detgen")
except SystemExit as e:
    assert not e.code, e.code
"""
        )

    return run


SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 4096,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(random_model: Callable[..., Path]) -> str:
    """A folder with a model that the interpreter runs in milliseconds."""
    from transformers import LlamaConfig

    return str(random_model(LlamaConfig(**SIZES)))


@pytest.fixture(scope="module")
def folder(
    detgen: Command,
    model: str,
    environment: dict[str, str],
    python_on_cuda: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with prompts, and a finished run of them in `auto`."""
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PROMPTS))
    detgen(folder, "run", "prompts.jsonl", "-o", "auto", "--target", model, "--device", "cuda", "--max-tokens", "4")
    if "DETGEN_CUDA_STAND_IN" in environment and not THOROUGH:
        python_on_cuda(COMPARED)
    return folder


def test_a_tensor_on_the_wrong_device_is_refused(python_on_cuda: Callable[[str], str]) -> None:
    """By operators that have a CUDA kernel of their own, too: a test of the stand-in."""
    code = """
import torch
x, at = torch.ones(3, 2, device="cuda"), torch.tensor([1])
for wrong in (lambda: x.index_select(0, at), lambda: torch.cat([x, torch.ones(1, 2)]), lambda: x @ torch.ones(2, 2)):
    try:
        wrong()
    except RuntimeError:
        print("refused")
"""
    assert python_on_cuda(code).split() == ["refused"] * 3


def test_a_run_is_on_the_device(folder: Path) -> None:
    profile = json.loads((folder / "auto" / "manifest.json").read_text())["profile"]
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    assert cpu is None or profile["device"] != cpu[1]
    assert profile["arithmetic"] == "detgen-2"
    assert profile["cuda"].keys() == {"capability", "toolkit", "triton", "ptxas"}
    lines = [json.loads(line) for line in (folder / "auto" / "outputs.jsonl").read_text().splitlines()]
    assert [line.get("error") for line in lines] == [None] * 8
    assert all(line["token_ids"] for line in lines)


def test_it_has_the_bytes_of_a_cpu(detgen: Command, folder: Path, model: str) -> None:
    detgen(folder, "run", "prompts.jsonl", "-o", "cpu", "--target", model, "--device", "cpu", "--max-tokens", "4")
    assert _verified(folder / "cpu") == _verified(folder / "auto")


@thorough
def test_neither_drafter_nor_batch_size_changes_a_byte(detgen: Command, folder: Path, model: str) -> None:
    options = ["--target", model, "--device", "cuda", "--max-tokens", "4", "--drafter", "none", "--batch-size", "3"]
    detgen(folder, "run", "prompts.jsonl", "-o", "none", *options)
    assert _verified(folder / "none") == _verified(folder / "auto")


def _verified(folder: Path) -> list[str]:
    lines = (folder / "outputs.jsonl").read_text().splitlines()
    return lines[:-1]  # the last prompt asks not to be verified


@thorough
def test_another_family(detgen: Command, folder: Path, random_model: Callable[..., Path]) -> None:
    """With windows, two rotations and weights in few bits: the bytes of a CPU."""
    from transformers import Gemma3TextConfig

    sizes = SIZES | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = str(random_model(Gemma3TextConfig(**sizes, head_dim=16, sliding_window=20)))
    for name in ("cuda", "cpu"):
        options = ["--target", model, "--target-quant", "q8", "--device", name, "--max-tokens", "4", "--limit", "3"]
        detgen(folder, "run", "prompts.jsonl", "-o", f"other-{name}", *options)
    assert _verified(folder / "other-cuda") == _verified(folder / "other-cpu")
    assert not any("error" in line for line in _verified(folder / "other-cpu"))


@thorough
def test_products_on_tensor_cores(detgen: Command, folder: Path, model: str) -> None:
    """By the rule of the device, which a processor audits; there are none on the stand-in, which emulates them."""
    import torch

    rule = "tc24" if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0) else "tc25"
    for name in ("cuda", "cpu"):
        options = [
            "--target",
            model,
            "--dtype",
            f"bfloat16-{rule}",
            "--device",
            name,
            "--max-tokens",
            "3",
            "--limit",
            "2",
        ]
        detgen(folder, "run", "prompts.jsonl", "-o", f"{rule}-{name}", *options)
    assert len({(folder / f"{rule}-{name}" / "outputs.jsonl").read_bytes() for name in ("cuda", "cpu")}) == 1
    assert "nothing differs" in detgen(folder, "audit", f"{rule}-cuda", "--device", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["none", "q8"])
def test_the_embedded_pair(detgen: Command, folder: Path, quant: str) -> None:
    """Drafts of the smaller model, too: the same `outputs.jsonl`."""
    found = set()
    for name in ("cuda", "cpu"):
        out = f"pair-{quant}-{name}"
        options = ["--target-quant", quant, "--device", name, "--drafter", "model", "--max-tokens", "3"]
        detgen(folder, "run", "prompts.jsonl", "-o", out, "--limit", "2", *options)
        found.add((folder / out / "outputs.jsonl").read_bytes())
    assert len(found) == 1


@pytest.mark.slow
def test_the_check_finds_nothing(detgen: Command, folder: Path, model: str) -> None:
    """Among chains: other axes take long in the interpreter."""
    (folder / "two.jsonl").write_text("".join(json.dumps({**p, "max_tokens": 6}) + "\n" for p in PROMPTS[:2]))
    command = ["verify-determinism", "two.jsonl", "--target", model, "--device", "cuda", "--axis", "chains"]
    found = detgen(folder, *command)
    assert "every bit equal" in found


@pytest.mark.slow
def test_an_audit_finds_nothing(detgen: Command, folder: Path) -> None:
    found = detgen(folder, "verify-determinism", "--against", "auto", "--device", "cuda")
    assert "7 samples" in found
    assert "nothing differs" in found


# A benchmark without workers, whose processes would load the libraries and probe the kernels again, and without a copy
# that takes seconds where the device is none.
HERE = """
import contextlib
from detgen.bench import processes, roofline

class Here(contextlib.AbstractContextManager):
    alive = True

    def __init__(self, *_):
        self.call = lambda function, *arguments: function(*arguments)

    def __exit__(self, *_):
        pass

    close = __exit__

processes.Worker, roofline._CUDA_BYTES, roofline._SECONDS = Here, 1 << 20, 0.01
"""


@pytest.fixture
def _workers_here(environment: dict[str, str], python_on_cuda: Callable[[str], str]) -> Iterator[None]:
    """A benchmark on the stand-in runs in one process; a real device stays with the workers."""
    if "DETGEN_CUDA_STAND_IN" in environment:
        python_on_cuda(HERE)
    yield
    python_on_cuda("from detgen.bench import processes; from detgen.worker import Worker; processes.Worker = Worker")


@pytest.mark.slow
@pytest.mark.usefixtures("_workers_here")
def test_a_benchmark(detgen: Command, folder: Path) -> None:
    what = ["--random-weights", "tiny", "--device", "cuda", "--peer", "detgen", "-o", "bench"]
    detgen(folder, "bench", *what, "--batch-size", "2", "--requests", "2", "--max-tokens", "4", "--rounds", "1")
    results = json.loads((folder / "bench" / "bench.json").read_text())
    assert [(row["variant"], row["error"]) for row in results["rows"] if row["error"] or row["wrong"]] == []
    assert all(row["precision"] == "bfloat16" and row["gpu_memory"] for row in results["rows"])


# Counts what crosses between host and device.
COUNTING = """
from collections import Counter
from dataclasses import replace
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from detgen import Engine, Request, SamplingParams, ScoreRequest
from detgen.kernels.input_batch import Window, Windows
from detgen.kernels.sampling import Choice, Choices
from detgen.kernels.triton import launching, shapes, triton_decoder

class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        took, gave = ({x.device.type for x in tree_iter(of) if isinstance(x, torch.Tensor)} for of in (args, out))
        looks = "local_scalar" in str(func) or "nonzero" in str(func) or "item" in str(func)
        if "cuda" in took and ("cpu" in gave or looks):
            self.found["to the host"] += 1
        elif "cpu" in took and "cuda" in took | gave:
            self.found["to the device"] += 1
        return out
"""

# In passes of a model, whose folder is put in front.
PASSES = """
runner = Engine(target=model, device="cuda", drafter="none", kv_memory=16 << 20).canonical
runner.cache.pages.lay_out(3, 64)
windows = Windows.of([Window(slot, 0, [5 + slot], 1) for slot in range(3)])
read = Windows.of([Window(2, 0, [7, 8, 9], 1)])
choices = Choices.of([Choice(0.8 * slot, 0.9, seed=slot) for slot in range(3)])
passes = {
    "run": lambda: runner.run(windows, []),
    "chosen": lambda: runner.run(windows, [], scored=False, choices=lambda: replace(choices, likely=np.arange(3))),
    "sample": lambda: runner.sample(windows, np.array([1, 3, 3]), choices),
    "reading": lambda: runner.sample(windows.part(0, 2), np.array([3, 1, 2]), choices, None, [read]),
}
for name, call in passes.items():
    with Counting() as counting:
        call()
    print(name, counting.found["to the host"], counting.found["to the device"])
"""

# In whole runs, and what of it is by the two functions that may.
CROSSING = """
params = [{}, {"temperature": 0.8, "logprobs": 3}, {"frequency_penalty": 0.5, "min_tokens": 2}]
params.append({"guided_regex": "[a-z]{9}"})
lengths = 30, 9, 20, 12
requests = [
    Request(i, i, token_ids=[5 + 7 * j % (9 + i) for j in range(n)], params=SamplingParams(max_tokens=5, **params[i]))
    for i, n in enumerate(lengths)
]
cases = ("none", requests), ("ngram", requests), ("none", requests[:3]), ("ngram", requests[:3])
for drafter, some in (*cases, ("model", requests[:2])):
    draft = model if drafter == "model" else None
    engine = Engine(target=model, draft=draft, device="cuda", drafter=drafter, batch_size=4, kv_memory=2 << 20)
    by = Counter()
    own = {name: getattr(launching, name) for name in ("send", "fetched")}
    def counted(name):
        return lambda *given: (by.update([name]), own[name](*given))[1]
    launching.send = shapes.send = counted("send")
    triton_decoder.fetched = counted("fetched")
    with Counting() as counting:
        engine.generate(some)
        engine.score([ScoreRequest(0, 0, token_ids=[5, 6, 7], completions=((8, 9), (1,)))])
    launching.send = shapes.send = own["send"]
    triton_decoder.fetched = own["fetched"]
    others = [counting.found[to] - by[name] for to, name in (("to the host", "fetched"), ("to the device", "send"))]
    print(*others, by["fetched"] / engine.stats.target_passes)
"""


@pytest.mark.usefixtures("folder")
def test_the_host_waits_once(python_on_cuda: Callable[[str], str], model: str) -> None:
    """In a pass, and at the end of a chain of three, also if the second one reads a prompt; what goes to the device is
    the rows of each pass, who of them goes on, and how they are sampled."""
    lines = python_on_cuda(f"model = {model!r}\n{COUNTING}{PASSES}").splitlines()
    assert [line.split()[:2] for line in lines] == [[name, "1"] for name in ("run", "chosen", "sample", "reading")]
    assert [int(line.split()[2]) for line in lines] == [1, 1 + 2, 3 + 1 + 3, 3 + 1 + 3]


@pytest.mark.usefixtures("folder")
def test_nothing_crosses_otherwise(python_on_cuda: Callable[[str], str], model: str) -> None:
    """Whatever is asked, one function waits, at most once a pass, and one sends."""
    lines = python_on_cuda(f"model = {model!r}\n{COUNTING}{CROSSING}").splitlines()
    assert [line.split()[:2] for line in lines] == [["0", "0"]] * 5
    waits = [float(line.split()[2]) for line in lines]
    assert max(waits) <= 1
    assert waits[2] < 0.6, "a call of several passes"
    assert max(waits[3:]) < 0.8, "a call of several rounds, which draft"


# Generates twice, the second time with an error for whoever waits for the device, but where the decoder does it.
WAITING = """
import torch
from detgen import Engine, Request, SamplingParams
from detgen.kernels.triton import triton_decoder

fetched = triton_decoder.fetched

def waiting(x):
    torch.cuda.set_sync_debug_mode("default")
    try:
        return fetched(x)
    finally:
        torch.cuda.set_sync_debug_mode("error")

def texts():
    return [(done.token_ids, done.logprobs) for done in engine.generate(requests)]

params = SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, temperature=0.8, seed=3, n=2, logprobs=2)
requests = [Request(i, i, token_ids=range(5 + i, 90), params=params[i % 2]) for i in range(6)]
engine = Engine(target=model, device="cuda", drafter="none", batch_size=4, kv_memory=16 << 20)
wanted = texts()  # kernels are compiled and passes recorded, for which one has to wait
triton_decoder.fetched = waiting
torch.cuda.set_sync_debug_mode("error")
try:
    print(texts() == wanted)
finally:
    torch.cuda.set_sync_debug_mode("default")
    triton_decoder.fetched = fetched
"""


@pytest.mark.usefixtures("folder")
def test_nobody_else_waits(python_on_cuda: Callable[[str], str], model: str, environment: dict[str, str]) -> None:
    if "DETGEN_CUDA_STAND_IN" in environment:
        pytest.skip("nobody waits for the stand-in; what crosses is counted there")
    assert python_on_cuda(f"model = {model!r}\n{WAITING}").strip() == "True"


def test_scores(folder: Path, detgen: Command, model: str) -> None:
    """The same bytes in any batch, and they pass an audit."""
    lines = [
        {"prompt": "def add(a, b):\n", "completions": ["    return a + b\n", "    pass\n"]},
        {"text": "for i in range(10):\n    print(i)\n"},
    ]
    (folder / "scores.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for size in ("1", "8"):
        detgen(
            folder,
            "score",
            "scores.jsonl",
            "-o",
            f"scores-{size}",
            "--target",
            model,
            "--device",
            "cuda",
            "--batch-size",
            size,
            "-q",
        )
    one, several = ((folder / f"scores-{size}" / "outputs.jsonl").read_bytes() for size in ("1", "8"))
    assert one == several
    assert b'"error"' not in one
    assert "nothing differs" in detgen(folder, "audit", "scores-1", "--device", "cuda")
