"""Persistent single-threaded workers that own static shares of one job.

Two Python threads with one OpenMP thread each reach the memory bandwidth that one OpenMP team of two loses
as soon as anything else runs on the cores (its threads spin); static shares keep results independent of
timing.
"""

import queue
import threading
from collections.abc import Callable
from functools import partial

import torch

Share = Callable[[int], None]


class Workers:
    """``count`` workers; number 0 is the thread that calls :meth:`run`, the others wait for it.

    Args:
        count: workers, and so threads, that a job is split over.
    """

    def __init__(self, count: int) -> None:
        assert count >= 1, count
        self.count = count
        self._errors: list[BaseException] = []
        self._done = threading.Semaphore(0)
        self._inboxes: list[queue.SimpleQueue[Share | None]] = [queue.SimpleQueue() for _ in range(1, count)]
        self.threads = [
            start_thread(f"headrace-worker-{index}", partial(self._serve, index, inbox))
            for index, inbox in enumerate(self._inboxes, start=1)
        ]

    def run(self, share: Share) -> None:
        """Call ``share(i)`` once for every worker ``i`` and return when all have ended.

        Raises whatever a share raised, after all of them have ended.
        """
        for inbox in self._inboxes:
            inbox.put(share)
        self._attempt(share, 0)
        for _ in self._inboxes:
            self._done.acquire()
        if self._errors:
            error = self._errors[0]
            self._errors.clear()
            raise error

    def close(self) -> None:
        """End the threads."""
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self.threads:
            thread.join()

    def _serve(self, index: int, inbox: "queue.SimpleQueue[Share | None]") -> None:
        while (share := inbox.get()) is not None:
            self._attempt(share, index)
            self._done.release()

    def _attempt(self, share: Share, index: int) -> None:
        try:
            share(index)
        except BaseException as error:
            self._errors.append(error)


def start_thread(name: str, body: Callable[[], None]) -> threading.Thread:
    """A daemon thread in which torch runs on one OpenMP thread; the caller's own setting stays."""
    ready = threading.Event()
    threads = torch.get_num_threads()

    def run() -> None:
        torch.get_num_threads()  # torch sets a thread up at its first use, which would undo the next line
        torch.set_num_threads(1)
        ready.set()
        body()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    ready.wait()
    # set_num_threads changes this thread's OpenMP team and the default of threads to come: undo the latter.
    torch.set_num_threads(threads)
    return thread
