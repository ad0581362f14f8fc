"""Evaluation in mid-training: forward only, through the same pipeline, stages and key-value slots.

Its plan is `schedule.forward_only`'s. A microbatch's slots are free behind its last slice, and no activation outlives
its unit, so an evaluation takes less memory than a training step. It leaves training as it was, to the bit: weights,
gradients, optimizer, random numbers. (What lies in the KV slots between two steps belongs to nobody.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from slimpipe.kernels.cross_entropy import IGNORE, Loss
from slimpipe.parallel.gradients import sum_over
from slimpipe.runtime.engine import Engine
from slimpipe.runtime.loans import Loans
from slimpipe.runtime.warm_up import warm_up_evaluation
from slimpipe.train.planning import make_evaluation_plan

if TYPE_CHECKING:
    from slimpipe.train.session import Session


@dataclass(frozen=True)
class EvaluationMetrics:
    """One evaluation's numbers, the same on every rank but for `seconds`."""

    loss: float
    """Cross-entropy, the mean over all valid tokens of all batches; smoothing and z-loss belong to training."""
    tokens: int
    batches: int
    seconds: float

    def row(self) -> dict[str, float]:
        """As `metrics.jsonl` has it, beside the step."""
        return {"eval_loss": self.loss, "eval_tokens": self.tokens, "eval_seconds": self.seconds}

    def __str__(self) -> str:
        took = f"{self.seconds:.1f} s, {self.tokens / self.seconds:,.0f} tokens/s"
        return f"evaluation loss {self.loss:.4f} over {self.tokens:,} tokens ({took})"


class Evaluation:
    """Evaluates a session's model. Collective: all ranks make it, and call it, together."""

    def __init__(self, session: Session) -> None:
        config, trained = session.config, session.engine
        self._session = session
        self.planned = make_evaluation_plan(config, session.planned, session.progress.now)
        trained.transport.allow(self.planned.send_window)
        loans = None
        if self.planned.exchange is not None:
            assert trained.loans is not None
            loans = Loans(
                self.planned.exchange,
                session.rank,
                trained.loans.traffic,
                trained.backend,
                session.clock,
                keep=False,
                buffers=trained.loans.buffers,
            )
        self.engine = Engine(
            self.planned.plan,
            session.rank,
            trained.stages,
            trained.transport,
            session.clock,
            trained.backend,
            trained.slice_tokens,
            Loss(),
            trained.ce_chunk,
            trained.vocabulary,
            loans,
            session.progress,
            trained.trace,
            trained.layer_slots,
            slot_streams=trained.slot_streams,
        )
        with self._training_left_alone():
            warm_up_evaluation(
                self.engine, config.train.micro_batch, config.model.hidden_size, session.dtype, session.device
            )

    @property
    def peak_units(self) -> int:
        """Most units whose keys and values were kept at once in the last batch, counted."""
        return self.engine.units.peak

    @property
    def peak_kv_slots(self) -> tuple[int, ...]:
        """Most KV slots in use in the last batch, counted, by chunk."""
        return tuple(counter.peak for counter in self.engine.kv_slots)

    def run(
        self, batches: Iterable[tuple[Tensor, Tensor]], cut_short: Callable[[], bool] = lambda: False
    ) -> EvaluationMetrics | None:
        """The mean loss over (tokens, labels) batches, each as `Session.step_gradients` takes it.

        `cut_short`, the same on all ranks, is asked before each batch; None where it has said yes. Raises ValueError
        where there is no valid token in any batch.
        """
        started = time.perf_counter()
        total, valid, count = torch.zeros((), dtype=torch.float64, device=self._session.device), 0, 0
        for tokens, labels in batches:
            if cut_short():
                return None
            total += self._losses(tokens, labels).sum(dtype=torch.float64)
            valid += int((labels != IGNORE).sum())
            count += 1
        if valid == 0:
            raise ValueError("the evaluation's labels are all masked (-100): there is nothing to average")
        return EvaluationMetrics(float(self._summed(total)) / valid, valid, count, time.perf_counter() - started)

    def token_losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss of every token [global batch, S] fp32 on the host of every rank, 0 where masked."""
        return self._summed(self._losses(tokens, labels)).flatten(0, 1).cpu()

    def _losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """[m, b, S] on the last stage's rank, zero elsewhere."""
        self._session.clock.start()
        with self._training_left_alone():
            return self.engine.evaluate(self._session.make_batch(tokens, labels, scale=1.0))

    def _summed(self, losses: Tensor) -> Tensor:
        self._session.progress.now("sum of the evaluation's losses")
        return sum_over(losses, self._session.group, self._session.carrier)

    @contextmanager
    def _training_left_alone(self) -> Iterator[None]:
        """Evaluation mode, and random numbers as they were: a user's model may have dropout."""
        device = self._session.device
        modules = [module for part in self._parts() for module in part.modules()]
        modes = [module.training for module in modules]
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for module in modules:
                module.training = False
            try:
                yield
            finally:
                for module, mode in zip(modules, modes, strict=True):
                    module.training = mode

    def _parts(self) -> Iterator[nn.Module]:
        for stage in self.engine.stages:
            yield from (part for part in (stage.embedding, *stage.blocks, stage.head) if part is not None)
