"""Text to batches: corpora, tokenising, token files, and samplers that do not depend on the layout of the run.

`open_data` is the way in: it turns the settings into a `SequenceSampler` for training, one for evaluation, and the
tokenizer. A `Loader` keeps the run's place.
"""

from slimpipe.data.errors import DataError
from slimpipe.data.indexed import IndexedDataset, IndexedWriter
from slimpipe.data.loader import Loader
from slimpipe.data.run_data import RunData, open_data
from slimpipe.data.sampler import Part, Place, SequenceSampler
from slimpipe.data.tokenizer import END_OF_TEXT, TextTokenizer, load_tokenizer
from slimpipe.data.tokens import TokenFile

__all__ = [
    "END_OF_TEXT",
    "DataError",
    "IndexedDataset",
    "IndexedWriter",
    "Loader",
    "Part",
    "Place",
    "RunData",
    "SequenceSampler",
    "TextTokenizer",
    "TokenFile",
    "load_tokenizer",
    "open_data",
]
