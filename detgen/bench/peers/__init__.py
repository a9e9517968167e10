"""The peers: one small file per library, behind the protocol `detgen.bench.peer_interface.Peer`."""

from __future__ import annotations

import importlib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import cast

from detgen.bench.peer_interface import Peer
from detgen.errors import BenchError

_HOMES = {
    "detgen": "detgen_engine:DetgenPeer",
    "transformers": "transformers_generate:GeneratePeer",
    "transformers-assisted": "transformers_generate:AssistedPeer",
    "transformers-continuous": "transformers_generate:ContinuousPeer",
    "openvino": "openvino:OpenVinoPeer",
    "llama.cpp": "llama_cpp:LlamaCppPeer",
    "ctranslate2": "ctranslate2:CTranslate2Peer",
    "onnxruntime": "onnxruntime_genai:OnnxRuntimePeer",
    "vllm": "vllm:VllmPeer",
    "sglang": "sglang:SglangPeer",
}
NAMES = tuple(_HOMES)
APART = (
    "openvino",
    "llama.cpp",
    "ctranslate2",
    "onnxruntime",
    "vllm",
    "sglang",
)  # these may have an environment of their own


def peer_class(name: str) -> type[Peer]:
    """Return the class of a peer, without importing its library.

    Raises:
        BenchError: if there is no peer of this name.
    """
    if name not in _HOMES:
        raise BenchError(f"there is no peer {name!r}; choose from {', '.join(NAMES)}")
    module, _, kind = _HOMES[name].partition(":")
    return cast(type[Peer], getattr(importlib.import_module(f"{__name__}.{module}"), kind))


def versions(peer: type[Peer]) -> dict[str, str]:
    """Return the versions of the distributions that a peer needs.

    Raises:
        BenchError: if some are not installed; names them.
    """
    found: dict[str, str] = {}
    missing = []
    for package in peer.packages:
        for name in package.split("|"):
            with suppress(PackageNotFoundError):
                found[name] = version(name)
                break
        else:
            missing.append(package.split("|")[0])
    if missing:
        raise BenchError(f"{' and '.join(missing)} not installed (pip install {' '.join(missing)})")
    return found
