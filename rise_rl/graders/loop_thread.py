"""An event loop in a thread of its own: async work for callers that are not async, or whose own loop is running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for the result. An interrupt of the caller (Ctrl-C) cancels the work. Not from within the loop."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


async def run_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs all at once. The first exception cancels the others and is raised when they are gone."""
    await finish_all([asyncio.ensure_future(w) for w in work])


async def finish_all(tasks: Iterable[asyncio.Future[None]]) -> None:
    """run_all for what is already running."""
    tasks = list(tasks)
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Future[None]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
