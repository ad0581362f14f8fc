"""What surrounds every step of a run: guards on all ranks; on the lead also the record and what is shown."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from slimpipe.plan.flops import step_flops
from slimpipe.plan.peaks import peak_tflops
from slimpipe.train.display import make_display
from slimpipe.train.metrics import StepRecord, open_metrics
from slimpipe.train.nonfinite import Skips
from slimpipe.train.outliers import Outliers
from slimpipe.train.spikes import Spikes

if TYPE_CHECKING:
    from slimpipe.config import Config
    from slimpipe.train.evaluation import EvaluationMetrics
    from slimpipe.train.forecast import Forecast
    from slimpipe.train.step_metrics import StepMetrics


class Watching:
    """Every rank makes one and calls `after` with each step's metrics; `lead` on one of them, which records.

    `carriers`: what moves tensors between ranks, kept with the first step of the process."""

    def __init__(self, config: Config, forecast: Forecast, lead: bool, carriers: str | None = None) -> None:
        self._config, self._carriers = config, carriers
        self._skips = Skips(config.train.max_skips)
        self._metrics = open_metrics(config) if lead else None
        self._display = make_display(config, lead)
        self._spikes = Spikes(config.log.window, config.log.spike_threshold)
        self._outliers = None
        if lead:
            memory = [footprint.total for footprint in forecast.memory]
            self._outliers = Outliers(config.log.window, config.log.outlier_threshold, forecast.work, memory)
        device = torch.cuda.get_device_name(forecast.device) if forecast.device.type == "cuda" else "cpu"
        self._peak_tflops = config.log.peak_tflops or peak_tflops(device, config.train.dtype)
        self._tokens = config.train.global_batch * config.data.sequence_length
        # Of a model of one's own nobody knows how many operations a token takes.
        self._tera = None
        if config.model.name == "llama":
            flops = step_flops(config.model, config.data.sequence_length, config.train.global_batch)
            self._tera = flops / config.parallel.world_size / 1e12

    def after(self, step: int, metrics: StepMetrics, seconds: float) -> None:
        """Step `step` (from 1) took `seconds`, reading its data included. Raises NonFinite where too many were
        skipped."""
        if self._metrics is not None:
            record = self._record(step, metrics, seconds)
            self._metrics.write(record.row())
            self._display.step(record)
            for note in record.notes:
                self._display.note(f"step {step}: {note}")
        self._skips.after(metrics.bad)

    def evaluated(self, step: int, found: EvaluationMetrics) -> None:
        """An evaluation behind step `step`."""
        if self._metrics is not None:
            self._metrics.write({"step": step, **found.row()})
            self._display.note(f"step {step}: {found}")

    def close(self) -> None:
        self._display.close()
        if self._metrics is not None:
            self._metrics.close()

    def _record(self, step: int, metrics: StepMetrics, seconds: float) -> StepRecord:
        spike = self._spikes.see(metrics.loss)
        notes = [] if spike is None else [spike]
        if self._outliers is not None:
            notes += self._outliers.see(metrics.busy_seconds, metrics.peak_memory_bytes)
        if metrics.bad is not None:
            notes.append(f"skipped (train.on_nonfinite): {metrics.bad}")
        tflops = None if self._tera is None else self._tera / seconds
        carriers, self._carriers = self._carriers, None
        return StepRecord(
            step=step,
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            lr=metrics.lr,
            seconds=seconds,
            tokens_per_s=self._tokens / seconds,
            tflops=tflops,
            mfu=None if tflops is None or self._peak_tflops is None else tflops / self._peak_tflops,
            bubble=metrics.bubble,
            bubble_by_rank=metrics.bubble_by_rank,
            waits=metrics.waits,
            peak_memory_bytes_by_rank=metrics.peak_memory_bytes,
            busy_seconds_by_rank=metrics.busy_seconds,
            exchange=None if metrics.exchange is None else asdict(metrics.exchange),
            swap=None if metrics.swap is None else asdict(metrics.swap),
            skipped=metrics.bad is not None,
            notes=tuple(notes),
            carriers=carriers,
        )
