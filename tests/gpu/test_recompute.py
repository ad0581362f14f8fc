"""Each recompute mode on a GPU: bf16 gradients against an fp32 reference, and bytes by the allocator's own count.

In one process, which compiles and loads each kernel once. Bounds as in `test_gradients`. Two GPUs run `full` with
loans over NCCL too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slimpipe.parallel.mesh import prepare_process
from slimpipe.plan.memory import layer_bytes_per_token
from slimpipe.runtime.carrier import Carrier
from slimpipe.train.session import Session
from tests.gpu.test_gradients import SPEC, batch, errors, run, settings
from tests.support.reference import reference_loss_and_grads

pytestmark = pytest.mark.gpu
MODES = ("none", "norms", "mlp", "all_but_attention", "full")
CASES = [(mode, n) for n in (16, 64) for mode in MODES]


def gradients_of(session: Session) -> dict[str, Any]:
    loss = session.step_gradients(*batch())
    return {"loss": loss, "gradients": {name: gradient.cpu() for name, gradient in session.gradients().items()}}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The unsliced bf16 run that recomputes nothing, and the fp32 reference on its weights."""
    config = settings(1, 1, 1, recompute="none")
    prepare_process(config)
    session = Session(config, Carrier(torch.device("cuda", 0)))
    found = gradients_of(session)
    weights = {name: weight.float() for name, weight in session.weights().items()}
    tokens, labels = (data.cuda() for data in batch())
    with torch.device("cuda"):
        loss, gradients = reference_loss_and_grads(SPEC, weights, tokens, labels)
    found["reference"] = {name: gradient.cpu() for name, gradient in gradients.items()}
    found["reference_loss"] = float(loss)
    return found


def compare(what: str, found: dict[str, Any], plain: dict[str, Any]) -> None:
    together, by_tensor = errors(found["gradients"], plain["reference"])
    plain_together, plain_by_tensor = errors(plain["gradients"], plain["reference"])
    ratios = {name: by_tensor[name] / plain_by_tensor[name] for name in by_tensor}
    worst = max(ratios, key=lambda name: ratios[name])
    print(
        f"\n{what}: loss {found['loss']:.6f} (fp32 {plain['reference_loss']:.6f}); "
        f"error together {together:.3e} = {together / plain_together:.3f} x plain; "
        f"worst tensor {worst} {ratios[worst]:.3f} x plain"
    )
    assert set(found["gradients"]) == set(plain["reference"])
    assert abs(found["loss"] - plain["reference_loss"]) <= 2e-3 * plain["reference_loss"]
    assert together <= 1.05 * plain_together
    assert ratios[worst] <= 1.3


@pytest.mark.parametrize(("mode", "n"), CASES)
def test_gradients_and_bytes(mode: Any, n: int, plain: dict[str, Any]) -> None:
    config = settings(1, 1, n, recompute=mode)
    session = Session(config, Carrier(torch.device("cuda", 0)))
    compare(f"{mode} n={n}", gradients_of(session), plain)
    # What the warm-up's block keeps, by the allocator: K and V are in slots that were there; RoPE's tables (cosine and
    # sine of half a head in fp32) come on top, once a unit and so once for this block.
    kept = layer_bytes_per_token(config.model, mode)
    expected = (sum(kept.values()) - kept["k, v"] + 2 * 4 * SPEC.head_dim // 2) * session.slice_tokens
    measured = session.unit_bytes / len(session.stages[0].layers)
    print(f"{mode} n={n}: {measured / session.slice_tokens:.0f} B a token and layer, {measured / expected - 1:+.2%}")
    # Blocks of the allocator are multiples of 512 bytes. Of a tensor above 1 MiB, what is left of its block, up to
    # 1 MiB, is not split off: of the short slices of n = 64 a few per cent (none 7.8 %, norms 11.5 %, the others 0).
    assert abs(measured - expected) <= (0.02 if n == 16 else 0.12) * expected


def test_weight_gradients_of_three_slices_in_one_gemm(plain: dict[str, Any]) -> None:
    """Of m n = 32 backwards: ten waves of three, and two that are left."""
    session = Session(settings(1, 1, 16, recompute="mlp", weight_grad_slices=3), Carrier(torch.device("cuda", 0)))
    compare("mlp, weight_grad_slices=3", gradients_of(session), plain)


def test_full_with_loans(plain: dict[str, Any], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, here {torch.cuda.device_count()}")
    found = run(settings(2, 1, 16, True, recompute="full", exchange="balanced"), tmp_path)
    compare("full, p=2 n=16, balanced", found, plain)
