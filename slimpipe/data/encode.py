"""Batches of text to tokens, in this process or in several; the tokens do not depend on how many."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import numpy.typing as npt

from slimpipe.data.errors import DataError
from slimpipe.data.readers import Batch
from slimpipe.data.tokenizer import TextTokenizer, load_tokenizer


@dataclass(frozen=True)
class Encoded:
    """The tokens of a batch."""

    tokens: npt.NDArray[Any]
    ends: list[int]  # where documents end: the number of tokens before
    size: int  # bytes that the batch took of its file


def encode(batch: Batch, tokenizer: TextTokenizer, dtype: npt.DTypeLike, end_of_text: bool) -> Encoded:
    """The tokens of `batch`; with `end_of_text`, that token behind each document. Documents without text are left
    out."""
    pieces = list(batch.pieces())
    ids = tokenizer.encode_batch([text for text, _ in pieces])
    parts, ends, count = [], [], 0
    for (_, last), part in zip(pieces, ids, strict=True):
        if last and end_of_text:
            part.append(tokenizer.end_of_text)
        parts.append(np.asarray(part, dtype))
        count += len(part)
        if last:
            ends.append(count)
    return Encoded(np.concatenate(parts) if parts else np.empty(0, dtype), ends, batch.size)


def encode_all(
    batches: Iterable[Batch],
    tokenizer: TextTokenizer,
    dtype: npt.DTypeLike,
    end_of_text: bool,
    processes: int = 1,
    saved: str = "",
) -> Iterator[Encoded]:
    """The tokens of all `batches`, in their order. With `processes` above 1 as many take turns; each loads the
    tokenizer that lies at `saved`. Else this one uses threads.

    Raises DataError, naming file and line, for text that cannot be parsed, and where a process dies.
    """
    if processes == 1:
        for batch in batches:
            yield encode(batch, tokenizer, dtype, end_of_text)
        return
    work = functools.partial(_encode_here, saved=saved, dtype=np.dtype(dtype).str, end_of_text=end_of_text)
    # Not forked: threads of this process may hold locks.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _start_worker)
    under_way: deque[tuple[Batch, Future[Encoded]]] = deque()
    try:
        for batch in batches:
            under_way.append((batch, _submit(pool, work, batch)))
            # Bounded: reading may be much faster than encoding.
            if len(under_way) > 2 * processes:
                yield _result(*under_way.popleft())
        while under_way:
            yield _result(*under_way.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, work: Callable[[Batch], Encoded], batch: Batch) -> Future[Encoded]:
    try:
        return pool.submit(work, batch)
    except BrokenProcessPool as error:
        failed: Future[Encoded] = Future()
        failed.set_exception(error)
        return failed


def _result(batch: Batch, future: Future[Encoded]) -> Encoded:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise DataError(
            f"{batch.place}: a process that encoded this, or text soon after, died (killed from outside, or out of "
            "memory?); look at the text there, or use fewer processes (--processes)"
        ) from error


def _encode_here(batch: Batch, saved: str, dtype: str, end_of_text: bool) -> Encoded:
    return encode(batch, _loaded(saved), dtype, end_of_text)


@functools.lru_cache(maxsize=1)
def _loaded(saved: str) -> TextTokenizer:
    return load_tokenizer(saved)


def _start_worker() -> None:
    """One thread each; an interrupt is the parent's affair, and its death is this process's end."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
