"""The stages, the most decisive first. Imports nothing, so that they can be listed and started without any library."""

from __future__ import annotations

from typing import NamedTuple


class Stage(NamedTuple):
    """A part of the suite.

    Attributes:
        name: name for `--stage`.
        seconds: seconds that it may take, plus what the stages before it did not need.
        module: module of this package.
        title: what it measures.
        packages: packages that must be installed.
        model: configuration that gives the shapes, if none is asked for.
    """

    name: str
    seconds: int
    module: str
    title: str
    packages: tuple[str, ...] = ()
    model: str = "llama-3.1-8b"


_MODELS = ("numpy", "transformers", "psutil")
_SMALLER = "llama-3.2-1b"  # its weights are ready within seconds
_COMMANDS = (*_MODELS, "typer", "rich")

STAGES = (
    Stage("environment", 20, "environment", "the device, its driver, versions, packages"),
    Stage("kernels", 55, "kernels", "detgen's kernels: the bits of its compiled library", packages=("triton",)),
    Stage("tensor-cores", 15, "tensor_cores", "bf16 products: the rule that emulates them", packages=("triton",)),
    Stage("bytes", 40, "bytes", "the SHA-256 of runs on the processor and on the device", packages=_COMMANDS),
    Stage("ceilings", 15, "ceilings", "copies, matrix products, launches"),
    Stage("passes", 45, "passes", "passes of a model by row count", packages=_MODELS, model=_SMALLER),
    Stage("kernel-times", 45, "kernels", "times of detgen's kernels", packages=("triton",)),
    Stage("generations", 50, "generations", "whole generations by detgen", packages=_MODELS, model=_SMALLER),
    Stage("generations-peer", 35, "generations", "the same by transformers", packages=_MODELS, model=_SMALLER),
    Stage("long", 45, "long", "10,000 prompts: memory, graphs, what the host adds", packages=_MODELS),
    Stage("quick", 50, "commands", "detgen verify-determinism --quick", packages=_COMMANDS),
    Stage("cuda-tests", 35, "commands", "the tests marked cuda", packages=(*_COMMANDS, "pytest", "hypothesis")),
    Stage("large-passes", 90, "passes", "passes of a larger model", packages=_MODELS),
)
