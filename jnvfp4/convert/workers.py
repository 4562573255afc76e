"""Work on several tensors at once, with the result of one after the other."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Results in the order of the items; an exception or interrupt leaves what was not begun.

    Threads are enough: kernels, copies and files let go of the interpreter.
    """
    if workers == 1:
        yield from map(work, items)
        return
    executor = ThreadPoolExecutor(workers, thread_name_prefix="jnvfp4-convert")
    try:
        yield from executor.map(work, items)
    finally:
        executor.shutdown(cancel_futures=True)
