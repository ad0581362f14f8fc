"""The one error of this package."""


class DataError(ValueError):
    """A corpus, tokenizer or token file cannot be used. The message is one line: what is wrong, and what to change."""
