"""Work that is recorded on a device once and replayed: graphs, and the copies before them.

On CUDA, what a function launches is recorded as a graph, and one call replays it, where launching it anew takes some
hundred. Elsewhere the function is called again. What would make a graph compute with stale memory is an error there:
a tensor that it did not see when it was recorded, or one whose memory is another now; and so is a look at a number,
for which a graph would have to stop. Knows no models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Replaying(Protocol):
    """How work is recorded."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do the work, and give what does the same again.

        Args:
            work: reads and writes tensors that stay where they are; has been called before.
        """
        ...


class Graphs:
    """Replays by CUDA's graphs, which share their memory: only one is replayed at a time.

    Args:
        device: where they run. They are recorded on a stream of it, since torch's own is that of the first device.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Replaying`."""
        graph = torch.cuda.CUDAGraph()
        # Threads that load weights or draft may allocate meanwhile, which is no part of it.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        replay: Callable[[], None] = graph.replay
        replay()
        return replay


class Calls:
    """Replays by calling the function again."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Replaying`.

        Raises:
            RuntimeError: by what it returns, where a graph would not do what the function does.
        """
        with _Watching(None) as recorded:
            work()

        def replay() -> None:
            with _Watching(recorded.seen):
                work()

        return replay


_LOOKS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.item.default}


class _Watching(TorchDispatchMode):
    """Notes which memory from outside of the block is used in it.

    Args:
        allowed: what may be; None for anything.

    Attributes:
        seen: addresses of the storages.
    """

    def __init__(self, allowed: set[int] | None) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self._allowed = allowed
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _LOOKS:
            raise RuntimeError(f"recorded work cannot look at numbers, as {func} does")
        for x in tree_iter((args, kwargs)):
            if isinstance(x, torch.Tensor) and x.numel() and x.data_ptr() and self._address(x) not in self._made:
                self._use(x)
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor) and self._address(x) not in self.seen:
                self._made.add(self._address(x))
        return out

    def _use(self, x: torch.Tensor) -> None:
        address = self._address(x)
        self.seen.add(address)
        if self._allowed is not None and address not in self._allowed:
            raise RuntimeError(f"recorded work used a tensor {list(x.shape)} that was not there when it was recorded")

    @staticmethod
    def _address(x: torch.Tensor) -> int:
        return x.untyped_storage().data_ptr()


def replaying(device: torch.device) -> Replaying:
    """That of a device."""
    return Graphs(device) if device.type == "cuda" and torch.version.cuda is not None else Calls()
