"""A model that knows nothing of swapping, trained plainly and with a swap manager: the same losses, bit for bit.

    python -m slimpipe.swap.example [--gpu-budget BYTES] [--steps N]

The model is a small Llama of Hugging Face's transformers, unmodified, where that is installed, else torch.nn's
Transformer. On a GPU it is larger, and moves to the host for real; without one the streams are simulated.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from slimpipe.swap import SwapManager, SwapSettings

VOCABULARY = 512


class PlainTransformer(nn.Module):
    """torch.nn's encoder as a causal language model."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def loss(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        logits = self.head(self.body(self.words(tokens), mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build(width: int, layers: int) -> tuple[nn.Module, Callable[[Tensor], Tensor], str]:
    """(model, its loss of tokens [b, s], its name)."""
    if importlib.util.find_spec("transformers") is None:
        plain = PlainTransformer(width, layers)
        return plain, plain.loss, "torch.nn.TransformerEncoder"
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    llama = LlamaForCausalLM(config)
    return llama, lambda tokens: llama(input_ids=tokens, labels=tokens).loss, "transformers.LlamaForCausalLM"


def train(
    steps: int, step: Callable[[], AbstractContextManager[None]], device: torch.device, width: int, layers: int
) -> tuple[list[float], str]:
    torch.manual_seed(0)
    model, loss_of, name = build(width, layers)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for i in range(steps):
        generator = torch.Generator().manual_seed(i)
        tokens = torch.randint(0, VOCABULARY, (2, width), generator=generator).to(device)
        with step():
            loss = loss_of(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses], name


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu-budget", type=float, help="bytes; by default so few that most must move")
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    width, layers = (1024, 8) if device.type == "cuda" else (64, 4)
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    budget = arguments.gpu_budget if arguments.gpu_budget is not None else (3e9 if device.type == "cuda" else 1e6)
    settings = SwapSettings() if device.type == "cuda" else SwapSettings(min_bytes=4096, arena_bytes=1 << 20)
    manager = SwapManager(int(budget), host_budget=8 << 30, device=device, settings=settings)
    plain, name = train(arguments.steps, contextlib.nullcontext, device, width, layers)
    swapped, _ = train(arguments.steps, manager.step, device, width, layers)
    print(f"{name} on {device}, {arguments.steps} steps; last loss {plain[-1]:.6f} plain, {swapped[-1]:.6f} swapped")
    print("all losses equal" if plain == swapped else "losses differ")
    print(manager.summary())


if __name__ == "__main__":
    main()
