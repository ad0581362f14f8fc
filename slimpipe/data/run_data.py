"""From the settings to what a run reads: samplers for training and evaluation, and the tokenizer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slimpipe.data.cache import Cache
from slimpipe.data.corpus import Corpus, find_tokens, open_corpus
from slimpipe.data.errors import DataError
from slimpipe.data.sampler import Part, SequenceSampler
from slimpipe.data.split import held_out
from slimpipe.data.tokenizer import TextTokenizer, load_tokenizer
from slimpipe.data.tokens import TokenFile, tokenizer_path

if TYPE_CHECKING:
    from slimpipe.config import DataConfig


@dataclass(frozen=True, eq=False)
class RunData:
    """What a run reads. `evaluation` shares no token with `train`; None where the settings keep nothing for it."""

    train: SequenceSampler
    evaluation: SequenceSampler | None
    tokenizer: TextTokenizer | None
    """None where the data came as tokens and nothing says of which tokenizer."""

    @property
    def fingerprint(self) -> str:
        """Of all tokens and their order, less the seed: equal on every process of a job."""
        samplers = [self.train, *([self.evaluation] if self.evaluation is not None else [])]
        return hashlib.sha256("\n".join(sampler.fingerprint for sampler in samplers).encode()).hexdigest()


def open_data(
    config: DataConfig, vocab_size: int, seed: int, progress: bool = True, processes: int | None = 1
) -> RunData:
    """Opens what `config` names, building token files of text into the cache where they are not there yet.

    `vocab_size` is the model's, `seed` that of the order. `progress`: show it on stderr. `processes`: how many encode;
    None: as many as pays. Raises DataError, one line with the key and the remedy, for whatever is wrong with the data.
    """
    sources = [_Source.find(*entry) for entry in config.sources()]
    kept = [_Source.find(*entry) for entry in config.eval_sources()]
    cache = Cache(Path(config.cache_dir), config.text_key, progress, processes)
    folder = _tokenizer(config, vocab_size, sources, [*sources, *kept], cache)
    tokenizer = load_tokenizer(folder) if folder is not None else None
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"model.vocab_size = {vocab_size}: the tokenizer has {tokenizer.vocab_size} tokens; set it to that or more"
        )
    files = {source: source.open(cache, folder, tokenizer, vocab_size) for source in {*sources, *kept}}

    train, evaluation = [], []
    for source in sources:
        tokens = files[source]
        cut = held_out(tokens.dataset, config.eval_share) if config.eval_share else tokens.count
        train.append(source.part(tokens, 0, cut))
        if config.eval_share:
            evaluation.append(source.part(tokens, cut, tokens.count))
            if tokens.count - cut <= config.sequence_length:
                raise DataError(
                    f"data.eval_share = {config.eval_share}: keeps {tokens.count - cut} tokens of {source.name} for "
                    f"evaluation, needs at least {config.sequence_length + 1} (data.sequence_length + 1); raise it"
                )
    for source in kept:
        tokens = files[source]
        same = next((other for other in sources if files[other].fingerprint == tokens.fingerprint), None)
        if same is not None:
            raise DataError(
                f"{source.key} = {source.name}: the same tokens as {same.key}, which are trained on; use other data, "
                "or data.eval_share"
            )
        evaluation.append(source.part(tokens, 0, tokens.count))
    length = config.sequence_length
    return RunData(
        SequenceSampler(train, length, seed, vocab_size),
        SequenceSampler(evaluation, length, seed, vocab_size) if evaluation else None,
        tokenizer,
    )


@dataclass(frozen=True)
class _Source:
    """One entry of the settings: tokens that are there, or text to be made into some."""

    key: str
    name: str
    weight: float
    corpus: Corpus | None
    prefix: Path | None

    @classmethod
    def find(cls, key: str, name: str, weight: float) -> _Source:
        prefix = find_tokens(name)
        return cls(key, name, weight, open_corpus(name, key) if prefix is None else None, prefix)

    def open(
        self, cache: Cache, tokenizer_folder: Path | None, tokenizer: TextTokenizer | None, vocab_size: int
    ) -> TokenFile:
        if self.corpus is not None:
            assert tokenizer_folder is not None
            return cache.tokens(self.corpus, tokenizer_folder)
        assert self.prefix is not None
        try:
            tokens = TokenFile.open(self.prefix)
        except DataError as error:
            raise DataError(f"{self.key} = {self.name}: {error}") from error
        description = tokens.description
        if description is None:
            return tokens
        if tokenizer is not None and description.tokenizer != tokenizer.digest:
            raise DataError(
                f"{self.key} = {self.name}: was built with another tokenizer than the run's; build it again with that "
                "one, or set data.tokenizer to the one beside it"
            )
        if description.vocab_size > vocab_size:
            raise DataError(
                f"model.vocab_size = {vocab_size}: {self.key} = {self.name} was built with {description.vocab_size} "
                "tokens; set it to that or more"
            )
        return tokens

    def part(self, tokens: TokenFile, start: int, stop: int) -> Part:
        return Part(self.key, self.name, tokens, start, stop, self.weight)


def _tokenizer(
    config: DataConfig, vocab_size: int, sources: list[_Source], everything: list[_Source], cache: Cache
) -> Path | None:
    """The folder of the run's tokenizer: the one named; else one beside a source of tokens; else learnt from the
    text."""
    if config.tokenizer is not None:
        try:
            return cache.given_tokenizer(load_tokenizer(config.tokenizer, config.end_of_text))
        except DataError as error:
            raise DataError(f"data.tokenizer = {config.tokenizer}: {error}") from error
    for source in everything:
        if source.prefix is not None and tokenizer_path(source.prefix).exists():
            return tokenizer_path(source.prefix)
    texts = [source for source in everything if source.corpus is not None]
    if not texts:
        return None
    ready = next((source for source in everything if source.prefix is not None), None)
    if ready is not None:
        raise DataError(
            f"data.tokenizer: missing; {ready.key} = {ready.name} is tokens already, and {texts[0].key} must be "
            "encoded like them; set it to the tokenizer that made them (beside it there is none)"
        )
    corpora = [source.corpus for source in sources if source.corpus is not None]
    where = f"{sources[0].key} = {sources[0].name}" if len(sources) == 1 else "data.blend"
    return cache.learnt_tokenizer(corpora, vocab_size, where)
