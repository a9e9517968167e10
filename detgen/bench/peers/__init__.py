"""The peers: one small file each, behind the protocol `detgen.bench.interface.Peer`."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import cast

from detgen.bench.interface import Peer
from detgen.errors import BenchError

_HOMES = {
    "detgen": "detgen.bench.peers.detgen_engine:DetgenPeer",
    "transformers": "detgen.bench.peers.transformers_generate:GeneratePeer",
    "transformers-assisted": "detgen.bench.peers.transformers_assisted:AssistedPeer",
    "transformers-continuous": "detgen.bench.peers.transformers_continuous:ContinuousPeer",
    "openvino": "detgen.bench.peers.openvino:OpenVinoPeer",
    "llama.cpp": "detgen.bench.peers.llama_cpp:LlamaCppPeer",
    "vllm": "detgen.bench.peers.vllm:VllmPeer",
    "sglang": "detgen.bench.peers.sglang:SglangPeer",
}
NAMES = tuple(_HOMES)


def make_peer(name: str) -> Peer:
    """The adapter of a peer; its library is not imported yet.

    Raises:
        BenchError: if there is no peer of this name.
    """
    if name not in _HOMES:
        raise BenchError(f"no peer {name!r}; use some of {', '.join(NAMES)}")
    module, _, kind = _HOMES[name].partition(":")
    return cast(Peer, getattr(importlib.import_module(module), kind)())


def versions(peer: Peer) -> dict[str, str]:
    """Versions of the distributions that the peer needs.

    Raises:
        BenchError: naming those that are not installed.
    """
    found: dict[str, str] = {}
    missing = []
    for package in peer.packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        raise BenchError(f"{' and '.join(missing)} not installed (pip install {' '.join(missing)})")
    return found
