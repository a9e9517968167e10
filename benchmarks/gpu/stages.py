"""The stages, the most decisive first. Imports nothing, so that they can be listed and started without any library."""

from __future__ import annotations

from typing import NamedTuple


class Stage(NamedTuple):
    """A part of the suite.

    Attributes:
        name: as `--stage` takes it.
        seconds: that it may take; what the stages before it did not need comes on top.
        module: of this package.
        title: what it measures.
        environment: variables that its process starts with; without those that are None.
        packages: that have to be there.
    """

    name: str
    seconds: int
    module: str
    title: str
    environment: tuple[tuple[str, str | None], ...] = ()
    packages: tuple[str, ...] = ()


_MODELS = ("numpy", "transformers", "psutil")
_COMMANDS = (*_MODELS, "typer", "rich")

STAGES = (
    Stage("environment", 20, "environment", "the device, its driver, versions, packages"),
    Stage("kernels", 55, "kernels", "detgen's kernels: the bits of its compiled library", packages=("triton",)),
    Stage("tensor-cores", 15, "tensor_cores", "bf16 products: the rule that emulates them", packages=("triton",)),
    Stage("bytes", 40, "bytes", "the SHA-256 of runs on the processor and on the device", packages=_COMMANDS),
    Stage("ceilings", 15, "ceilings", "copies, matrix products, launches"),
    Stage("passes", 60, "passes", "passes of the model by row count", packages=_MODELS),
    Stage("kernel-times", 45, "kernel_times", "times of detgen's kernels", packages=("triton",)),
    Stage("generations", 70, "generations", "whole generations by detgen", packages=_MODELS),
    Stage("generations-peer", 40, "generations", "the same by transformers' generate_batch", packages=_MODELS),
    Stage("long", 50, "long", "10,000 prompts: memory, graphs, what the host adds", packages=_MODELS),
    Stage("quick", 55, "commands", "detgen verify-determinism --quick", packages=_COMMANDS),
    Stage("cuda-tests", 35, "commands", "the tests marked cuda", packages=(*_COMMANDS, "pytest", "hypothesis")),
)
