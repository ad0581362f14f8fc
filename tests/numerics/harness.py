"""Runs a case on the engine, one process a rank, and lays its results beside the reference's."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimpipe.config import Config
from slimpipe.train.session import Session
from tests.numerics.mutations import mutated
from tests.support.cover import Case
from tests.support.pool import Pool
from tests.support.reference import IGNORED, LlamaSpec, RopeScaling, reference_loss_and_grads, relative_error

S = 64
INIT_STD = 0.1
"""Wide enough that attention is not uniform. Wider models of nine such layers are ill-conditioned: over all cases the
plain process itself, in fp32, is off the float64 one by up to 3.2e-6 in a gradient tensor at 0.05, 6.5e-6 at 0.1 and
2.2e-5 at 0.2, which would leave nothing of TOLERANCE."""
TOLERANCE = 1e-5
"""Relative L2 of each gradient tensor, and relative error of the loss, in fp32 against the float64 reference."""

_ROPE = {
    "plain": None,
    "linear": RopeScaling("linear", 4.0),
    # With head_dim 8 and theta 10000 the four frequencies turn 20, 2.0, 0.2 and 0.02 times: kept, between, stretched.
    "llama3": RopeScaling("llama3", 8.0, 1.0, 4.0, 128),
}


@dataclass(frozen=True)
class RankReport:
    """What one rank gives back."""

    loss: float
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    peak_units: int
    peak_kv_slots: tuple[int, ...]
    cut: tuple[str, ...] = ()
    """Names of which the rank has its rows only."""


def case(schedule: str = "slimpipe", pp: int = 1, v: int = 1, n: int = 1, m: int = 1, **options: Any) -> Case:
    """A case of its own choosing: GQA, untied, one sequence a microbatch, nothing masked, unless `options` say else."""
    plain: dict[str, Any] = {"kv": "gqa", "tied": False, "mask": "none", "recompute": "none", "qk_norm": False}
    return Case(schedule, pp, v, n, m, **plain | {"micro_batch": 1, "layers": "even", "rope": "plain"} | options)


def spec_of(case: Case) -> LlamaSpec:
    return LlamaSpec(
        layers=case.layer_count,
        hidden=32,
        heads=4,
        kv_heads=2 if case.kv == "gqa" else 4,
        head_dim=8,
        intermediate=48,
        vocab=61,
        rope_scaling=_ROPE[case.rope],
        qk_norm=case.qk_norm,
        tied=case.tied,
    )


def config_of(case: Case, **sections: Mapping[str, Any]) -> Config:
    """The case's settings; `sections` adds keys, such as `optim={"lr": 1e-2}`."""
    spec = spec_of(case)
    settings: dict[str, dict[str, Any]] = {
        "model": {
            "layers": spec.layers,
            "hidden_size": spec.hidden,
            "heads": spec.heads,
            "kv_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "intermediate_size": spec.intermediate,
            "vocab_size": spec.vocab,
            "norm_eps": spec.norm_eps,
            "rope_theta": spec.rope_theta,
            "rope_scaling": _rope_settings(spec.rope_scaling),
            "qk_norm": spec.qk_norm,
            "tie_embeddings": spec.tied,
            "init_std": INIT_STD,
        },
        "parallel": {"pp": case.pp},
        "pipeline": {
            "schedule": case.schedule,
            "slices": case.n,
            "virtual_stages": case.v,
            "vocab_parallel": case.vocab_parallel,
            "exchange": case.exchange,
            "exchange_granule": case.granule,
            "exchange_keep": case.keep,
        },
        "memory": {"recompute": case.recompute},
        "data": {"corpus": "unused", "sequence_length": S},
        "train": {
            "steps": 3,
            "output": "unused",
            "global_batch": case.m * case.micro_batch,
            "micro_batch": case.micro_batch,
            "device": "cpu",
            "ce_chunk": 48,  # does not divide a slice's tokens
        },
    }
    return Config.from_dict({key: settings.get(key, {}) | dict(sections.get(key, {})) for key in settings | sections})


def _rope_settings(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    settings: dict[str, Any] = {"type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        settings |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        settings["original_max_position"] = scaling.original_length
    return settings


def batch_of(case: Case) -> tuple[Tensor, Tensor]:
    """Tokens and shifted labels [m micro_batch, S].

    `ragged`: each sequence ends early by a length of its own and has holes, and one slice has no valid token in any of
    its microbatch's sequences (with n = 1 that is a whole microbatch; with m = 1 too, nothing would be left: none is).
    """
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    B = case.m * case.micro_batch
    text = torch.randint(61, (B, S + 1), generator=generator)
    tokens, labels = text[:, :-1], text[:, 1:].clone()
    if case.mask == "ragged":
        labels[torch.rand(B, S, generator=generator) < 0.2] = IGNORED
        for row, length in zip(labels, torch.randint(S // 2, S + 1, (B,), generator=generator), strict=True):
            row[int(length) :] = IGNORED
        if case.n > 1 or case.m > 1:
            microbatch, slice_ = (int(torch.randint(k, (), generator=generator)) for k in (case.m, case.n))
            s = S // case.n
            rows = slice(microbatch * case.micro_batch, (microbatch + 1) * case.micro_batch)
            labels[rows, slice_ * s : (slice_ + 1) * s] = IGNORED
    return tokens, labels


def run_case(pool: Callable[[int], Pool], case: Case, mutation: str | None = None) -> list[RankReport]:
    """Every rank's report of one forward and backward of the case's batch, under a mutation if one is named."""
    return pool(case.pp).run(report_gradients, case, mutation)


def report_gradients(rank: int, world: int, case: Case, mutation: str | None) -> RankReport:
    """On a rank: builds the session, roughens the norm weights, runs the batch."""
    with mutated(mutation):
        session = Session(config_of(case))
        roughen(session.weights())
        return report(session, session.step_gradients(*batch_of(case)))


def report(session: Session, loss: float) -> RankReport:
    """What the session's last step left behind."""
    weights, gradients = copies(session.weights()), copies(session.gradients())
    return RankReport(loss, weights, gradients, session.peak_units, session.peak_kv_slots, tuple(session.shards))


def roughen(weights: Mapping[str, Tensor]) -> None:
    """Norm weights start at one, where a product with them would not be missed: changes them in place, by name."""
    for name, weight in weights.items():
        if weight.dim() == 1:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            weight.mul_(1 + 0.2 * torch.randn(weight.shape, generator=generator))


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of their own: a view would take its whole buffer through the pipe."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def gathered(what: str, parts: Iterable[Mapping[str, Tensor]], cut: Sequence[str] = ()) -> dict[str, Tensor]:
    """All ranks' tensors by name. Those that two ranks hold (a tied embedding) must be the same bits.

    Of the names in `cut` every rank holds some rows: they are put one under the other.
    """
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            if name in cut:
                found[name] = torch.cat([found[name], tensor]) if name in found else tensor
                continue
            if name in found and not torch.equal(found[name], tensor):
                raise AssertionError(
                    f"{what} {name} differs between ranks by {relative_error(tensor, found[name]):.1e}"
                )
            found[name] = tensor
    return found


def discrepancies(case: Case, reports: Sequence[RankReport]) -> list[str]:
    """Everything in which the engine differs from the reference by more than TOLERANCE, worst first; [] is a pass."""
    losses = {report.loss for report in reports}
    if len(losses) != 1:
        return [f"loss differs between ranks: {losses}"]
    try:
        weights = gathered("weight", (report.weights for report in reports), reports[0].cut)
        gradients = gathered("gradient", (report.gradients for report in reports), reports[0].cut)
    except AssertionError as error:
        return [str(error)]
    spec = spec_of(case)
    if gradients.keys() != spec.shapes().keys():
        return [f"names of gradients: {sorted(gradients.keys() ^ spec.shapes().keys())} missing or unknown"]
    loss, expected = reference_loss_and_grads(spec, weights, *batch_of(case), torch.float64)
    errors = {"loss": relative_error(torch.tensor(reports[0].loss, dtype=torch.float64), loss)}
    for name, gradient in gradients.items():
        if gradient.dtype != torch.float32 or gradient.shape != expected[name].shape:
            return [f"{name}: gradient is {gradient.dtype} {list(gradient.shape)}, not float32 as the weight is shaped"]
        errors[name] = relative_error(gradient, expected[name])
    worst_first = sorted(errors.items(), key=lambda item: -item[1])
    return [f"{name}: relative error {error:.1e}" for name, error in worst_first if not error <= TOLERANCE]
