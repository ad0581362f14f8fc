"""Token files that training makes for itself, once, whatever the number of processes that ask."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from slimpipe.data.build import build_tokens, learn_tokenizer, processes_for
from slimpipe.data.corpus import Corpus
from slimpipe.data.errors import DataError
from slimpipe.data.tokenizer import TextTokenizer, load_tokenizer
from slimpipe.data.tokens import TokenFile

T = TypeVar("T")

# Part of the cache's keys: raise it when the same corpus would give other tokens.
_FORMAT = 2


class Cache:
    """A folder of tokenizers and token files, each under a name made from all that it depends on.

    Of several processes one builds and the others wait; what is damaged is built again. `progress` shows progress on
    stderr: let one process of a node have it. `processes`: how many encode; None: as many as
    pays.
    """

    def __init__(self, folder: Path, text_key: str, progress: bool = True, processes: int | None = 1) -> None:
        self.folder, self.text_key, self.progress, self.processes = folder.expanduser(), text_key, progress, processes

    def given_tokenizer(self, tokenizer: TextTokenizer) -> Path:
        """The folder of a copy of `tokenizer`."""
        folder = self._folder("tokenizer", tokenizer.vocab_size, tokenizer.digest)
        self._once(folder, _tokenizer_in(folder), lambda: tokenizer.save(folder))
        return folder

    def learnt_tokenizer(self, corpora: Sequence[Corpus], vocab_size: int, where: str) -> Path:
        """The folder of a tokenizer of `vocab_size` tokens learnt from `corpora`, which messages call `where`."""
        texts = [part for corpus in corpora for part in (corpus.name, corpus.digest)]
        folder = self._folder("tokenizer", vocab_size, self.text_key, *texts)
        self._once(
            folder,
            _tokenizer_in(folder),
            lambda: learn_tokenizer(corpora, vocab_size, folder, self.text_key, where, progress=self.progress),
        )
        return folder

    def tokens(self, corpus: Corpus, tokenizer_folder: Path) -> TokenFile:
        """The token file of `corpus` with that tokenizer. Raises DataError if its text cannot be read."""
        tokenizer = load_tokenizer(tokenizer_folder)
        parts = (self.text_key, corpus.name, corpus.digest, tokenizer.digest)
        folder = self._folder(Path(corpus.name).stem, tokenizer.vocab_size, *parts)
        prefix = folder / "tokens"

        def find() -> TokenFile | None:
            try:
                found = TokenFile.open(prefix)
            # A cache is there to be made again: no reason to stop the run.
            except DataError:
                return None
            return found if found.description is not None else None

        def build() -> object:
            return build_tokens(
                [corpus],
                tokenizer_folder,
                prefix,
                self.text_key,
                processes=self.processes or processes_for([corpus]),
                progress=self.progress,
            )

        return self._once(folder, find, build)

    def _folder(self, label: str, vocab_size: int, *parts: str) -> Path:
        key = hashlib.sha256("\0".join([str(_FORMAT), str(vocab_size), *parts]).encode()).hexdigest()[:16]
        folder = self.folder / f"{re.sub(r'[^A-Za-z0-9_-]+', '_', label)[:40]}-v{vocab_size}-{key}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"data.cache_dir: cannot create {folder} ({error.strerror}); use another folder") from error
        return folder

    def _once(self, folder: Path, find: Callable[[], T | None], build: Callable[[], Any]) -> T:
        """What `find` finds, after `build` has made it where that is needed."""
        if (found := find()) is not None:
            return found
        try:
            # flock: released by the system should the builder die.
            lock = FileLock(folder / "build.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if self.progress:
                    print(f"data: another process is preparing {folder}; waiting for it", file=sys.stderr)
                lock.acquire()
            try:
                # Built while this process waited?
                if (found := find()) is None:
                    build()
                    found = find()
            finally:
                lock.release()
        except OSError as error:
            raise DataError(f"data.cache_dir: cannot write {folder} ({error.strerror}); use another folder") from error
        if found is None:
            raise DataError(f"the data cache {folder} changes while it is read; is something else writing there?")
        return found


def _tokenizer_in(folder: Path) -> Callable[[], TextTokenizer | None]:
    def find() -> TextTokenizer | None:
        try:
            return load_tokenizer(folder)
        except DataError:
            return None

    return find
