"""Work that is recorded on a device once and replayed: graphs, with copies before them.

On CUDA, a function's launches are recorded as a graph, which one call replays instead of some hundred launches.
Elsewhere the function is called again. Whatever would make a graph compute with stale memory is an error there: a
tensor that it did not see while recording, or whose memory has moved; and so is reading a number, for which a graph
would have to stop. Knows no models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Replaying(Protocol):
    """A way to record work."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do the work, and return a function that repeats it.

        Args:
            work: reads and writes tensors that stay in place; has been called before.
        """
        ...


class Graphs:
    """Replays CUDA graphs, which share their memory: only one is replayed at a time.

    Args:
        device: where they run. They are recorded on a stream of it, since torch's default stream is the first device's.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Replaying`."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, which load weights or draft, may allocate meanwhile without being recorded.
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
            RuntimeError: in the returned function, where a graph would do something else.
        """
        with _Watching(None) as recorded:
            work()

        def replay() -> None:
            with _Watching(recorded.seen):
                work()

        return replay


_LOOKS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.item.default}


class _Watching(TorchDispatchMode):
    """Records which memory from outside the block is used in it.

    Args:
        allowed: addresses that may be used; None for any.

    Attributes:
        seen: addresses of the storages used.
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
    """Return the way to record on a device."""
    return Graphs(device) if device.type == "cuda" and torch.version.cuda is not None else Calls()
