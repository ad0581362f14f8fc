"""Completes a prompt from a finished run, in one process: the model's own blocks over a growing key-value cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from slimpipe.config import Config, load_config
from slimpipe.data import DataError, load_tokenizer
from slimpipe.kernels.attention import AttentionBackend, select_backend
from slimpipe.models.contract import build_model
from slimpipe.parallel.mesh import pick_device
from slimpipe.runtime.stage import Stage, build_stages
from slimpipe.schedule import Shape
from slimpipe.train import checkpoint
from slimpipe.train.dtypes import DTYPES

T = TypeVar("T")


class CachedSlice:
    """The `Slice` of generation: new tokens attend to themselves and to all that the cache holds."""

    again = False

    def __init__(self, cache: dict[int, tuple[Tensor, Tensor]], positions: Tensor, backend: AttentionBackend) -> None:
        self.positions = positions
        self._cache, self._backend = cache, backend
        self._memo: dict[str, Any] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The whole prompt at once (an empty cache, causal), or one token at a time."""
        causal = q.shape[1] > 1
        if layer in self._cache:
            assert not causal, "several tokens behind a cache would need a mask aligned to its end"
            k, v = (torch.cat(pair, 1) for pair in zip(self._cache[layer], (k, v), strict=True))
        self._cache[layer] = (k, v)
        return self._backend.forward(q, k, v, causal)[0]

    def enter_layer(self, layer: int) -> None:
        pass

    def leave_layer(self, layer: int, x: Tensor) -> None:
        pass

    def memo(self, key: str, make: Callable[[], T]) -> T:
        if key not in self._memo:
            self._memo[key] = make()
        found: T = self._memo[key]
        return found


def load_run(run: Path, device: torch.device) -> tuple[Config, Stage]:
    """A finished run's settings, and its whole model in one stage with the newest checkpoint's weights."""
    if not (run / "config.yaml").exists():
        raise checkpoint.CheckpointError(f"{run}: no config.yaml; give the folder of a run (its train.output)")
    config = load_config(run / "config.yaml")
    (stage,) = build_stages(
        build_model(config),
        [range(config.model.layers)],
        Shape(1),
        0,
        std=config.model.init_std,
        seed=config.train.seed,
        dtype=DTYPES[config.train.dtype],
        device=device,
    )
    choice = checkpoint.newest(run)
    for line in choice.told():
        print(line, file=sys.stderr)
    checkpoint.load_weights(choice.checkpoint, {name: p.data for name, p in stage.parameters.items()}, verified=True)
    return config, stage


def generate(
    run: Path, prompt: str, max_tokens: int, temperature: float, top_k: int, seed: int, device: str = "auto"
) -> str:
    """The prompt and its completion of up to `max_tokens` tokens.

    Stops early at the end-of-text token and at the length the run was trained for. `temperature` 0 takes the
    likeliest token each time; `top_k` 0 keeps all. Raises ValueError for a prompt longer than the trained length.
    """
    place = pick_device(device, 0, "--device")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError("--prompt: is no valid UTF-8 text") from error
    config, stage = load_run(run, place)
    if not (run / "tokenizer.json").exists():
        raise DataError(
            f"{run}: has no tokenizer.json: it was trained on token files alone; set data.tokenizer, train anew"
        )
    tokenizer = load_tokenizer(run / "tokenizer.json")
    end = tokenizer.end_of_text
    tokens = tokenizer.encode(prompt) or [end]
    if len(tokens) >= config.data.sequence_length:
        raise ValueError(
            f"--prompt: {len(tokens)} tokens, but the run was trained on sequences of {config.data.sequence_length}; "
            "use a shorter prompt"
        )
    backend = select_backend("auto", place, DTYPES[config.train.dtype], False)
    room = min(max_tokens, config.data.sequence_length - len(tokens))
    made: list[int] = []
    for token in _sample(stage, tokens, backend, place, temperature, top_k, seed):
        if token == end:
            break
        made.append(token)
        if len(made) == room:
            break
    return prompt + tokenizer.decode(made)


@torch.no_grad()
def _sample(
    stage: Stage,
    tokens: list[int],
    backend: AttentionBackend,
    device: torch.device,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    cache: dict[int, tuple[Tensor, Tensor]] = {}
    generator = torch.Generator().manual_seed(seed)
    new, done = tokens, 0
    while True:
        positions = torch.arange(done, done + len(new), device=device)
        hidden = stage.forward(torch.tensor([new], device=device), CachedSlice(cache, positions, backend))
        assert stage.head is not None
        weight: Tensor = stage.head.weight  # type: ignore[assignment]
        logits = (hidden[0, -1] @ weight.T).float().cpu()
        done += len(new)
        new = [_pick(logits, temperature, top_k, generator)]
        yield new[0]


def _pick(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if not torch.isfinite(logits).all():
        raise ValueError("the run's weights give no finite logits: its training has diverged; use another checkpoint")
    if temperature < 1e-6:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
