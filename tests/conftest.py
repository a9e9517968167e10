"""What all tests share: no network, two threads, the embedded models, and no CUDA test without CUDA."""

from __future__ import annotations

import gc
import os

# Read by the libraries when they are first imported, hence set before anything else is.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads starve each other where cores are shared
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", os.path.expanduser("~/.cache/zig"))
os.environ["XDG_CACHE_HOME"] = os.devnull  # no folder: a test finds nothing that another one, or a user, has kept
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # where no GPU is, Triton's kernels run in its interpreter

# Any of these would colour the output that tests compare.
for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
    os.environ.pop(name, None)

import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest

import detgen

sys.path.insert(0, str(Path(__file__).parent))  # for `helpers`

# A shell that starts pytest in the background has it ignore Ctrl-C, and child processes would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So does nohup with the signal of a terminal that is closed.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

pytest_plugins = [
    "helpers.checks",
    "helpers.commands",
    "helpers.engines",
    "helpers.interpreting",
    "helpers.oracle",
    "helpers.packings",
]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which may be left out
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """As many as there are processors; no more than the memory is for.

    `-n auto`, with which all tests run, takes one more, as some wait for other processes.
    """
    return min((os.cpu_count() or 1) + (config.option.numprocesses == "auto"), 4)


# The same examples every time: a red test stays red until its cause is gone. `explore` draws new ones.
hypothesis.settings.register_profile("thorough", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("detgen", hypothesis.settings.get_profile("thorough"), max_examples=10)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "detgen"))


class DemoModels(NamedTuple):
    """Folders of the embedded models."""

    target: Path
    draft: Path


@pytest.fixture(scope="session")
def demo_models() -> DemoModels:
    """The models that detgen ships and runs when no other is named."""
    folder = Path(detgen.__file__).parent / "demo_models"
    return DemoModels(folder / "target", folder / "draft")


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    """Each test finds the thread count that the process began with."""
    from detgen.kernels.c import threads

    torch: Any = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    yield
    threads._own.__dict__.clear()
    threads._last = None
    if before and torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def kept_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Models are kept between the runs of a module, and of others that ask for it, as a user's are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "kept"))
        yield


@pytest.fixture(scope="session")
def random_model(demo_models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes model folders with random weights: `random_model(config, seed=0)`, the embedded tokenizer beside it.

    Weights are scaled so that attention and the layers behind it have a say in the logits; fresh transformers models
    repeat one token for ever.
    """
    import torch

    from detgen.models.wrappers import auto_class

    def make(config: Any, seed: int = 0) -> Path:
        folder = tmp_path_factory.mktemp(config.model_type.replace("_", "-"))
        torch.manual_seed(seed)
        model = auto_class(config).from_config(config)
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            trained = "correction_bias", "expert_bias", "layer_scalar"
            buffers = [x for name, x in model.named_buffers() if name.endswith(trained)]
            for p in (*model.parameters(), *buffers):
                scale = 1.5 * p.shape[-1] ** -0.5 if p.dim() > 1 else 0.1
                noise = torch.randn(p.shape, generator=g) * scale
                p.copy_(noise if p.dim() > 1 else p + noise)
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo_models.target / name, folder / name)
        return folder

    return make


def pytest_collection_finish() -> None:
    """Collecting garbage need not go over all modules again and again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first what waits for other processes: at the end, nothing would be left to run meanwhile.

    Skip the tests marked `cuda` where torch finds no CUDA device.
    """
    items.sort(key=lambda item: "workers" not in item.path.parts and "bench_command" not in item.path.name)
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
