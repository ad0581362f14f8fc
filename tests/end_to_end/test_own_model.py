"""slimpipe.models.example: trained through the pipeline, and against its mathematics written down plainly."""

from __future__ import annotations

import ast
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import slimpipe.models.example
from slimpipe.config import Config
from slimpipe.train.session import Session
from tests.numerics.harness import RankReport, batch_of, case, config_of, gathered, report, spec_of
from tests.support.cover import Case
from tests.support.pool import Pool
from tests.support.reference import IGNORED, relative_error, rope_tables

NAME = "slimpipe.models.example:ParallelBlocks"
TOLERANCE = 1e-5
STEPS = 5
LAYERS = 4

MODES = {(1, False): "none", (1, True): "mlp", (2, False): "all_but_attention", (2, True): "full"}
LAYOUTS = {
    f"v{v}-{'cut' if cut else 'whole'}-vocabulary-{mode}": case(
        pp=2, v=v, n=4, m=2, mask="ragged", vocab_parallel=cut, recompute=mode
    )
    for (v, cut), mode in MODES.items()
}
LAYOUTS["loans-full"] = case(pp=2, n=8, m=1, exchange="balanced", granule=2, recompute="full")


def settings(case: Case) -> Config:
    return config_of(case, model={"name": NAME, "layers": LAYERS}, optim={"lr": 1e-2})


# ---- on the ranks ----


def first_gradients(rank: int, world: int, case: Case) -> RankReport:
    session = Session(settings(case))
    for name, weight in session.weights().items():
        # Biases start at zero and norms at one, where much would not be missed, and the rest near linearity.
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    return report(session, session.step_gradients(*batch_of(case)))


def losses_of_training(rank: int, world: int, case: Case) -> list[float]:
    session = Session(settings(case))
    return [session.train_step(*batch_of(case)).loss for _ in range(STEPS)]


# ---- the same by hand ----


def plain_loss(w: Mapping[str, Tensor], case: Case) -> Tensor:
    """GPT-J's parallel blocks over whole sequences. B sequences, S tokens, h heads, g of keys and values, d width."""
    tokens_BS, labels_BS = batch_of(case)
    spec = spec_of(case)
    x_BSH = w["embedding.weight"][tokens_BS]
    turn_Sd = torch.complex(*rope_tables(spec, tokens_BS.shape[1], torch.float64))
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        y_BSH = layer_norm(x_BSH, w, f"{at}.norm")
        heads = affine(y_BSH, w, f"{at}.qkv").unflatten(-1, (-1, spec.head_dim)).transpose(1, 2)
        q_BhSd, k_BgSd, v_BgSd = heads.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        share = spec.heads // spec.kv_heads
        k_BhSd, v_BhSd = rotated(k_BgSd, turn_Sd).repeat_interleave(share, 1), v_BgSd.repeat_interleave(share, 1)
        attended_BhSd = F.scaled_dot_product_attention(rotated(q_BhSd, turn_Sd), k_BhSd, v_BhSd, is_causal=True)
        attention_BSH = affine(attended_BhSd.transpose(1, 2).flatten(2), w, f"{at}.out")
        x_BSH = x_BSH + attention_BSH + affine(F.gelu(affine(y_BSH, w, f"{at}.up")), w, f"{at}.down")
    logits_BSV = layer_norm(x_BSH, w, "head.norm") @ w["head.weight"].T
    return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=IGNORED)


def affine(x: Tensor, w: Mapping[str, Tensor], at: str) -> Tensor:
    return F.linear(x, w[f"{at}.weight"], w.get(f"{at}.bias"))


def rotated(x: Tensor, turn_Sd: Tensor) -> Tensor:
    turned = torch.complex(*x.chunk(2, dim=-1)) * turn_Sd
    return torch.cat([turned.real, turned.imag], dim=-1)


def layer_norm(x: Tensor, w: Mapping[str, Tensor], at: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * w[f"{at}.weight"] + w[f"{at}.bias"]


# ---- tests ----


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_loss_and_every_gradient_equal_those_of_a_plain_process(case: Case, pool: Callable[[int], Pool]) -> None:
    ranks = pool(2).run(first_gradients, case)
    weights = gathered("weight", (rank.weights for rank in ranks), ranks[0].cut)
    gradients = gathered("gradient", (rank.gradients for rank in ranks), ranks[0].cut)
    leaves = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    assert len(leaves) == 9 * LAYERS + 4
    loss = plain_loss(leaves, case)
    expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    assert [rank.loss for rank in ranks] == pytest.approx([float(loss.detach())] * 2, rel=TOLERANCE)
    assert gradients.keys() == expected.keys()
    errors = {name: relative_error(gradients[name], expected[name]) for name in expected}
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_it_trains(case: Case, pool: Callable[[int], Pool]) -> None:
    losses, same = pool(2).run(losses_of_training, case)
    assert losses == same
    assert losses[-1] < losses[0] - 0.3


def test_it_is_short() -> None:
    """Fewer than 60 lines, blank ones and the page's own docstring aside."""
    text = Path(slimpipe.models.example.__file__).read_text()
    docstring = ast.parse(text).body[0]
    assert isinstance(docstring, ast.Expr) and docstring.end_lineno is not None
    assert sum(bool(line.strip()) for line in text.splitlines()[docstring.end_lineno :]) < 60
