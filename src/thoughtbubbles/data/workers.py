"""A function applied to many items by several processes, with the results in the order of the items."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from thoughtbubbles.files import named

Item = TypeVar("Item")
Found = TypeVar("Found")

PATIENCE = 5.0  # seconds without a result before checking that all processes are alive
AHEAD = 3  # items in flight per process


def in_order(
    function: Callable[..., Found],
    items: Iterable[Item],
    *shared: Any,
    processes: int,
    name: str,
    remedy: str = "give fewer",
    kept: Callable[[Item], Item] = lambda item: item,
) -> Generator[tuple[Item, Found], None, None]:
    """Each item with `function(item, *shared)`; with one process, computed in this one.

    shared  the same for all items: each process gets it when it starts, so that building it takes no time later
    name    what the caller calls the number of processes, and what to do about it: for errors
    kept    what is handed back of an item, which may be large

    Raises BrokenProcessPool if a process dies.
    """
    if processes == 1:
        for item in items:
            yield kept(item), function(item, *shared)
        return
    waiting: deque[tuple[Item, Future[Found]]] = deque()
    # Spawned, not forked: a fork would share this process's threads and open files.
    with named(name, remedy):
        pool = ProcessPoolExecutor(
            processes, mp_context=multiprocessing.get_context("spawn"), initializer=_start, initargs=shared
        )
    try:
        for item in items:
            with named(name, remedy):  # submit starts processes on demand
                waiting.append((kept(item), pool.submit(function, item, *shared)))
            if len(waiting) > AHEAD * processes:
                first, future = waiting.popleft()
                yield first, _result(pool, future)
        for item, future in waiting:
            yield item, _result(pool, future)
    finally:
        pool.shutdown(cancel_futures=True)


def _result(pool: ProcessPoolExecutor, future: "Future[Found]") -> Found:
    """Detects a process that was killed while sending its result: the pool would wait forever for the rest."""
    while True:
        try:
            return future.result(timeout=PATIENCE)
        except TimeoutError:
            processes = list((pool._processes or {}).values())
            if all(process.is_alive() for process in processes):
                continue
        for process in processes:
            process.kill()
        queue: Any = pool._result_queue
        queue._writer.close()  # the last open end of the pipe: now the pool sees its end
        raise BrokenProcessPool("a process died while sending its result")


def _start(*_: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Without this, workers would wait for work forever after their parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def processors() -> int:
    """The number that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
