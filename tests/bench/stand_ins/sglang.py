"""What its peer asks of SGLang: an engine with a process of its own and a loop, whose streams repeat the last token."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import time
from collections.abc import AsyncIterator
from typing import Any


class Engine:
    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(30,))
        self.process.start()
        atexit.register(self.shutdown)
        asyncio.set_event_loop(asyncio.new_event_loop())

    async def async_generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], stream: bool
    ) -> AsyncIterator[dict[str, list[int]]]:
        async def parts() -> AsyncIterator[dict[str, list[int]]]:
            for count in range(1, sampling_params["max_new_tokens"] + 1):
                yield {"output_ids": input_ids[-1:] * count}  # all so far

        return parts()

    def shutdown(self) -> None:
        self.process.kill()
        self.process.join()
