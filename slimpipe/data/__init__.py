"""Text to batches: corpora, tokenising, token files, and a sampler that does not depend on the layout of the run."""

from slimpipe.data.build import PreparedData, prepare
from slimpipe.data.errors import DataError
from slimpipe.data.sampler import SequenceSampler
from slimpipe.data.tokenizer import END_OF_TEXT, BytePairTokenizer, load_tokenizer
from slimpipe.data.tokens import TokenFile

__all__ = [
    "END_OF_TEXT",
    "BytePairTokenizer",
    "DataError",
    "PreparedData",
    "SequenceSampler",
    "TokenFile",
    "load_tokenizer",
    "prepare",
]
