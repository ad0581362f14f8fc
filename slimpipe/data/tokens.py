"""Token files: a Megatron pair (`PREFIX.bin`, `PREFIX.idx`), and beside it what slimpipe knows of it
(`PREFIX.json`)."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from slimpipe.data.errors import DataError
from slimpipe.data.fingerprint import fingerprint
from slimpipe.data.indexed import IndexedDataset, bin_path, idx_path, prefix_of

_REBUILD = "build it again"


@dataclass(frozen=True)
class Description:
    """How a token file was made. It is written last: what has one is whole."""

    source: str  # the corpus, as it was named
    vocab_size: int
    end_of_text: int | None  # the token behind each document; None: there is none
    tokenizer: str  # sha256 of its tokenizer.json
    fingerprint: str  # of the pair
    sha256: str  # of all tokens' bytes

    def write(self, prefix: Path) -> None:
        path = description_path(prefix)
        temporary = path.with_name(f".{path.name}.unfinished")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    @classmethod
    def read(cls, prefix: Path) -> Description | None:
        """None where there is none, as with pairs of Megatron's. Raises DataError if it is malformed."""
        path = description_path(prefix)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            end = found["end_of_text"]
            return cls(
                str(found["source"]),
                int(found["vocab_size"]),
                None if end is None else int(end),
                str(found["tokenizer"]),
                str(found["fingerprint"]),
                str(found["sha256"]),
            )
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: does not describe a token file ({error!r}); {_REBUILD}") from error


@dataclass(frozen=True, eq=False)
class TokenFile:
    """A token file that is trained on, open for reading."""

    dataset: IndexedDataset
    fingerprint: str
    description: Description | None

    @classmethod
    def open(cls, path: Path | str) -> TokenFile:
        """Opens a pair by its prefix or one of its files.

        Raises DataError if one of its files is missing, malformed, cut, not of integers, or other than its description
        says.
        """
        prefix = prefix_of(path)
        dataset = IndexedDataset.open(prefix)
        if dataset.tokens.dtype.kind not in "iu":
            raise DataError(
                f"{bin_path(prefix)}: holds numbers of type {dataset.tokens.dtype.name}, no tokens; use a pair of an "
                "integer type"
            )
        description = Description.read(prefix)
        mark = pair_fingerprint(prefix)
        if description is not None and description.fingerprint != mark:
            raise DataError(
                f"{bin_path(prefix)}: not the tokens that {description_path(prefix).name} describes: corrupted, or "
                f"replaced; {_REBUILD}, or delete {description_path(prefix).name} if they are right"
            )
        return cls(dataset, mark, description)

    @property
    def prefix(self) -> Path:
        return self.dataset.prefix

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """All of them, [count], mapped into memory."""
        return self.dataset.tokens

    @property
    def count(self) -> int:
        return len(self.dataset.tokens)

    def verify(self) -> None:
        """Reads the whole file. Raises DataError if its contents are not what was written, or nobody knows."""
        if self.description is None:
            raise DataError(f"{self.prefix}: has no {description_path(self.prefix).name} to be verified against")
        digest = hashlib.sha256()
        for start in range(0, self.count, 1 << 22):
            digest.update(self.tokens[start : start + (1 << 22)].tobytes())
        if digest.hexdigest() != self.description.sha256:
            raise DataError(f"{bin_path(self.prefix)}: its contents do not match its sha256: corrupted; {_REBUILD}")


def pair_fingerprint(prefix: Path) -> str:
    """Of both files of a pair: `slimpipe.data.fingerprint`. Raises DataError if one cannot be read."""
    try:
        both = [fingerprint(path) for path in (idx_path(prefix), bin_path(prefix))]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return hashlib.sha256("\0".join(both).encode()).hexdigest()


def description_path(prefix: Path) -> Path:
    """Where the description of a pair lies."""
    return prefix.with_name(f"{prefix.name}.json")


def tokenizer_path(prefix: Path) -> Path:
    """The folder of the tokenizer that a pair was built with."""
    return prefix.with_name(f"{prefix.name}.tokenizer")
