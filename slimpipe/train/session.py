"""One process's part of a run, put together: plan, stages, engine, gradients, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slimpipe.kernels.cross_entropy import IGNORE, Loss
from slimpipe.models.contract import build_model
from slimpipe.parallel.gradients import GradientBuffer, clip, norm_and_loss, sum_over, sum_tied
from slimpipe.parallel.mesh import build_mesh
from slimpipe.parallel.optimizer import MasterAdamW, learning_rate
from slimpipe.plan.footprint import Footprint
from slimpipe.plan.memory import output_chunk
from slimpipe.runtime.carrier import Carrier
from slimpipe.runtime.clock import make_clock
from slimpipe.runtime.collectives import Collectives
from slimpipe.runtime.engine import Batch, Engine
from slimpipe.runtime.exchange import ExchangeTraffic
from slimpipe.runtime.loans import Loans
from slimpipe.runtime.routes import Routes
from slimpipe.runtime.stage import build_stages, parameter_names
from slimpipe.runtime.transport import Transport
from slimpipe.runtime.vocabulary import Shard, Shards, VocabularyPasses, build_shards
from slimpipe.runtime.watchdog import Progress
from slimpipe.schedule import place_layers
from slimpipe.swap.streams import Streams
from slimpipe.train.attention import choose_attention
from slimpipe.train.batch import check_batch, to_device
from slimpipe.train.between import BetweenRanks
from slimpipe.train.checkpoint import State
from slimpipe.train.dtypes import DTYPES
from slimpipe.train.evaluation import Evaluation
from slimpipe.train.first_bad import find_bad_step
from slimpipe.train.nonfinite import refusal
from slimpipe.train.planning import Planned, make_plan
from slimpipe.train.state import live_state, real_rows
from slimpipe.train.step_memory import bytes_to_reserve, footprint, warm_up_and_reserve
from slimpipe.train.step_metrics import StepMetrics
from slimpipe.train.step_rows import StepRows
from slimpipe.train.swapping import make_slot_streams, make_swaps, moving_anywhere, plan_swaps

if TYPE_CHECKING:
    from slimpipe.config import Config


class Session:
    """Everything a rank needs to train. Collective: every rank of the process group makes one, from the same config.

    With no process group it is a whole run of one rank. `transport` and `collectives` replace the distributed ones
    (tests); `rank` then says which pipeline rank this is, and what needs a group (norms, tied weights, metrics) is
    the caller's. `planned`: what `plan_swaps` gives for `config`, where it has been made already. `streams`: what swaps
    run on; None: the device's.
    """

    def __init__(
        self,
        config: Config,
        carrier: Carrier | None = None,
        progress: Progress | None = None,
        trace: Callable[[str], None] | None = None,
        transport: Transport | None = None,
        collectives: Collectives | None = None,
        exchange_traffic: ExchangeTraffic | None = None,
        rank: int | None = None,
        planned: Planned | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.config, self.shape, self.trace = config, config.shape, trace
        self.carrier = carrier or Carrier(torch.device("cpu"))
        self.device = self.carrier.device
        self.dtype = DTYPES[config.train.dtype]
        self.progress = progress or Progress()
        self.mesh = build_mesh(config, self.carrier) if transport is None else None
        self.group = None if self.mesh is None else self.mesh.get_group("pp")
        self.rank = rank if rank is not None else 0 if self.mesh is None else self.mesh.get_local_rank("pp")
        if planned is None:
            planned = plan_swaps(config, make_plan(config, self.progress.now), self.device, self.progress.now)
        self.planned = planned
        self.plan, self.exchange = self.planned.plan, self.planned.exchange
        self.placement = place_layers(config.model.layers, self.shape.stages, config.pipeline.layers_per_stage)

        self.progress.now("choosing carriers")
        self._between = None
        if transport is None:
            self._between = BetweenRanks(config, self.planned, self.carrier, self.group, self.rank)
        self.routes: Routes | None = None if self._between is None else self._between.routes
        self.progress.now("choosing attention")
        backend, self.attention = choose_attention(config, self.carrier, self.group)
        self.progress.now("building the model")
        model = build_model(config)
        # Asked before the stages are cut out: those take their own parameters off the whole model.
        self._tied = None if config.vocab_parallel else _tied_name(model)
        self.names = tuple(parameter_names(model).values())
        """Of the whole model's parameters, the embedding's first."""
        values: Any = {
            "std": config.model.init_std,
            "seed": config.train.seed,
            "dtype": self.dtype,
            "device": self.device,
        }
        shards: Shards | None = None
        self.shards: dict[str, Shard] = {}
        if config.vocab_parallel:
            shards, self.shards = build_shards(model, self.shape.p, self.rank, **values)
        self.stages = build_stages(
            model,
            self.placement,
            self.shape,
            self.rank,
            **values,
            vocabulary=config.vocab_parallel,
            recompute=config.memory.recompute,
        )
        self.parameters = {name: shard.weight for name, shard in self.shards.items()}
        for stage in self.stages:
            self.parameters |= stage.parameters
        self.gradient_buffer = GradientBuffer(self.parameters, config.train.weight_grad_slices)
        self._tied_group = self._make_tied_group()
        self._optimizer: MasterAdamW | None = None
        self._evaluation: Evaluation | None = None
        self.steps_done = 0
        self.before_update: Callable[[], None] = lambda: None
        """Called in each step before weights and moments change: whoever is still copying them has them wait."""

        self.clock = make_clock(self.device)
        self.slice_tokens = config.data.sequence_length // self.shape.n
        loss = Loss(config.train.z_loss, config.train.label_smoothing)
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else None
        self.ce_chunk = output_chunk(config, free)
        vocabulary = None
        if shards is not None:
            traffic = collectives if collectives is not None else self._own_between().collectives()
            vocabulary = VocabularyPasses(shards, traffic, self.shape.p, self.rank, self.clock, self.ce_chunk)
        loans = None
        if self.exchange is not None:
            between = exchange_traffic if exchange_traffic is not None else self._own_between().exchange()
            keep = config.pipeline.exchange_keep == "kv"
            loans = Loans(self.exchange, self.rank, between, backend, self.clock, keep)
        weights = [shard.weight for shard in self.shards.values()]
        self.moving = moving_anywhere(config, self.planned, self.carrier.memory, self.gather)
        self.swaps = make_swaps(config, self.planned, self.rank, self.stages, weights, self.device, self.clock, streams)
        self.slot_streams = make_slot_streams(config, self.planned, self.rank, self.device, self.clock, streams)
        self.engine = Engine(
            self.plan,
            self.rank,
            self.stages,
            transport if transport is not None else self._own_between().transport(self.dtype),
            self.clock,
            backend,
            self.slice_tokens,
            loss,
            self.ce_chunk,
            vocabulary,
            loans,
            self.progress,
            trace,
            swaps=self.swaps,
            slot_streams=self.slot_streams,
        )
        self.unit_bytes, self.swap_bytes = warm_up_and_reserve(self)
        """Bytes that one unit keeps for its backward in the largest chunk; and of a unit of each chunk what can go to
        the host, nothing where none does. Measured; the first on a GPU alone."""

    @property
    def optimizer(self) -> MasterAdamW:
        """Made at first use: gradients alone need no moments and no masters."""
        if self._optimizer is None:
            self._optimizer = MasterAdamW(self.parameters, self.config)
        return self._optimizer

    @property
    def peak_units(self) -> int:
        """Most units in flight in the last step, counted."""
        return self.engine.units.peak

    @property
    def peak_kv_slots(self) -> tuple[int, ...]:
        """Most KV slots in use in the last step, counted, by chunk."""
        return tuple(counter.peak for counter in self.engine.kv_slots)

    def weights(self) -> dict[str, Tensor]:
        """This rank's parameters by layout-free name; of those in `shards` only the rank's rows."""
        return {name: real_rows(name, parameter.data, self.shards) for name, parameter in self.parameters.items()}

    def gradients(self) -> dict[str, Tensor]:
        """This rank's fp32 gradients of the last step by layout-free name; of those in `shards` only its own rows."""
        return {name: real_rows(name, gradient, self.shards) for name, gradient in self.gradient_buffer.views().items()}

    def state(self) -> State:
        """What a checkpoint holds of this rank (`slimpipe.train.checkpoint`): fp32 weights, moments, counts of steps.

        The tensors are the live ones: filling them restores the state, once `restored` has been called.
        """
        return live_state(self.steps_done, self.optimizer, self.shards)

    def restored(self, state: State) -> None:
        """To be called with what `state` gave, once its tensors hold the values of a checkpoint."""
        self.steps_done = int(state["step"].tensor)
        self.optimizer.restored()

    def step_gradients(self, tokens: Tensor, labels: Tensor) -> float:
        """Forward and backward of one global batch, no update. The loss, the same on every rank.

        tokens, labels [global batch, S] int64 on any device; labels already shifted, -100 where not counted. The loss
        is the mean over all valid tokens of the batch. Raises ValueError if there is none.
        """
        self.clock.start()
        return float(sum_over(self._run(tokens, labels), self.group, self.carrier))

    @property
    def evaluation(self) -> Evaluation:
        """Forward passes that leave training as it is. Made at first use, by all ranks together."""
        if self._evaluation is None:
            self._evaluation = Evaluation(self)
        return self._evaluation

    def token_losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Forward only: every token's cross-entropy [global batch, S] fp32 on the host of every rank, 0 where masked.

        Arguments as for `step_gradients`. Leaves training state as it is.
        """
        return self.evaluation.token_losses(tokens, labels)

    def train_step(self, tokens: Tensor, labels: Tensor, places: Sequence[object] = ()) -> StepMetrics:
        """One optimizer step on one global batch; arguments as for `step_gradients`. `places[i]`: where sequence i was
        taken from, for messages.

        Where loss or gradient norm is not finite, weights and optimizer stay as they were, to the bit. Raises
        NonFinite then, on every rank, unless `train.on_nonfinite` is skip.
        """
        optimizer, clip_at = self.optimizer, self.config.optim.grad_clip
        self.clock.start()  # after the optimizer: making it is no part of the first step
        loss = self._run(tokens, labels)
        self.progress.now("gradient norm")
        norm, loss = norm_and_loss(self._counted_once(), loss, self.group, self.carrier)
        skip = (~(norm.isfinite() & loss.isfinite())).float()
        self.progress.now("optimizer")
        rate = learning_rate(self.config, self.steps_done)
        self.before_update()
        with self.clock.busy("optimizer"):
            if clip_at is not None:
                clip(self.gradient_buffer.buffer, norm, clip_at)
            optimizer.step(rate, skip)
        self.progress.now("waiting for the device at the end of the step")
        time = self.clock.stop()
        self.progress.now("metrics")
        rows = StepRows.gather(self, time)
        bad = find_bad_step(self, float(loss), float(norm), tokens, labels, places) if float(skip) else None
        if bad is not None and self.config.train.on_nonfinite == "stop":
            raise refusal(bad)
        self.steps_done += 1
        return rows.metrics(float(loss), float(norm), rate, bad)

    def _run(self, tokens: Tensor, labels: Tensor) -> Tensor:
        valid = int((labels != IGNORE).sum())
        if valid == 0:
            raise ValueError("the step's labels are all masked (-100): there is nothing to learn from")
        self.gradient_buffer.zero()
        loss = self.engine.step(self.make_batch(tokens, labels, scale=1.0 / valid))
        with self.clock.busy("weight gradients"):
            self.gradient_buffer.flush()
        if self._tied_group is not None and self._tied is not None:
            self.progress.now("sum of the tied embedding's gradients")
            sum_tied(self.gradients()[self._tied], self._tied_group, self.carrier)
        return loss

    def make_batch(self, tokens: Tensor, labels: Tensor, scale: float) -> Batch:
        """One global batch as the engine takes it, on this rank's device. Raises ValueError where it is none."""
        split = (self.shape.m, self.config.train.micro_batch, self.config.data.sequence_length)
        check_batch(tokens, labels, self.config)
        on_device = torch.tensor(scale, dtype=self.gradient_buffer.buffer.dtype, device=self.device)
        tokens, labels = to_device(tokens, self.device), to_device(labels, self.device)
        return Batch(tokens.view(split), labels.view(split), on_device)

    def _counted_once(self) -> Mapping[str, Tensor]:
        """This rank's gradients, less the last stage's copy of a tied weight that the first stage counts."""
        found = self.gradients()
        if self._tied_group is not None and self.rank != 0:
            found = {name: gradient for name, gradient in found.items() if name != self._tied}
        return found

    @property
    def footprint(self) -> Footprint:
        """This rank's memory as predicted, by term."""
        return footprint(self)

    @property
    def to_reserve(self) -> int:
        """Bytes that torch's allocator should have for a step, shared memory not among them."""
        return bytes_to_reserve(self)

    def _own_between(self) -> BetweenRanks:
        assert self._between is not None, "whoever brings a transport brings the rest of the traffic"
        return self._between

    @property
    def carriers(self) -> str | None:
        """What moves what between ranks, in words; None for a run of one rank, and in tests with a transport of their
        own."""
        return None if self._between is None else self._between.carriers

    @property
    def shared_bytes(self) -> int:
        """Memory that other ranks read, beside what torch's allocator counts."""
        return 0 if self._between is None else self._between.shared_bytes

    def device_doing(self) -> str | None:
        """The first thing that the device has not finished, and whom it waits for, for the watchdog; None without."""
        waits = None if self._between is None else self._between.waits()
        return ", waiting ".join(filter(None, (self.clock.unfinished(), waits))) or None

    def _make_tied_group(self) -> dist.ProcessGroup | None:
        """The group of first and last pipeline rank, on those two, where they hold copies of one weight."""
        if self._tied is None or self.mesh is None or self.group is None or self.shape.p == 1:
            return None
        ranks = dist.get_process_group_ranks(self.group)
        group = dist.new_group([ranks[0], ranks[-1]], group_desc="tied embedding")
        return group if self.rank in (0, self.shape.p - 1) else None

    def gather(self, row: Tensor) -> Tensor:
        """Every pipeline rank's row, [p, len(row)] on the host."""
        if self.group is None:
            return row[None].cpu()
        rows = [torch.empty_like(row) for _ in range(self.shape.p)]
        dist.all_gather(rows, row, group=self.group)
        return torch.stack(rows).cpu()


def _tied_name(model: nn.Module) -> str | None:
    """Layout-free name of the weight that embedding and head share; None where they have their own."""
    if model.head.weight is not model.embedding.weight:  # type: ignore[union-attr]
        return None
    return parameter_names(model)[model.embedding.weight]  # type: ignore[union-attr,index]
