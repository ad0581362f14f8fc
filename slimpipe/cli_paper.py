"""From the options of `slimpipe simulate` and `draw` to a schedule on paper; refuses what does not go together."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from slimpipe.config import ConfigError, load_config
from slimpipe.plan.exchange import ExchangeSetting
from slimpipe.plan.hardware_file import load_hardware
from slimpipe.plan.on_paper import Head, PaperPlan, Vocab
from slimpipe.plan.swap import Amount, KeysSetting, SwapSetting, host_link, key_stream, unit_bytes
from slimpipe.schedule import MODES, Costs, Mode, PlanError, Shape, equal_costs, place_layers, sliced_costs

_VOCAB: Final[tuple[Vocab, ...]] = ("off", "last", "parallel")
_OPTIONS: Final = {
    "parallel.pp": "--pp",
    "pipeline.exchange": "--exchange",
    "pipeline.schedule": "--schedule",
    "pipeline.slices": "--slices",
    "pipeline.virtual_stages": "--virtual-stages",
    "pipeline.vocab_parallel = true": "--vocab = parallel",
    "train.global_batch": "--microbatches",
}
"""What the schedule's refusals call by the settings' keys, as these commands call it."""
_KEYS: Final = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, _OPTIONS))})(?!\w)")


@dataclass(frozen=True)
class PaperOptions:
    """The options as they were given, under their own names."""

    schedule: str
    pp: int
    slices: int
    virtual_stages: int
    microbatches: int
    attention_share: float | None
    backward_cost: float | None
    vocab: str
    head_share: float | None
    exchange: str
    hardware: Path | None
    model: Path | None
    sequence: int | None
    swap: str
    activation_budget: float | None
    copy_cost: float | None
    kv_swap: bool

    def plan(self) -> PaperPlan:
        """Raises ConfigError, or PlanError, with the option's name and what to change."""
        try:
            shape = self._shape()
            setting = self._setting(shape)
            costs = self._costs()
            swaps, keys, mode = self._swaps(shape, setting), self._keys(shape), cast(Mode, self.exchange)
            return PaperPlan.of(self.schedule, shape, costs, self._head(), mode, setting, swaps, keys)
        except PlanError as error:
            raise PlanError(_KEYS.sub(lambda key: _OPTIONS[key[0]], str(error))) from error

    def _shape(self) -> Shape:
        options = ("pp", "virtual_stages", "slices", "microbatches")
        values = {name.replace("_", "-"): getattr(self, name) for name in options}
        problems = [f"--{name} = {value}: must be a whole number > 0" for name, value in values.items() if value < 1]
        if problems:
            raise ConfigError(problems)
        return Shape(self.pp, self.virtual_stages, self.slices, self.microbatches)

    def _costs(self) -> Costs:
        share, backward = self.attention_share, self.backward_cost
        if share is None:
            if backward is not None and not 0 < backward < float("inf"):
                raise ConfigError([f"--backward-cost = {backward}: must be a number > 0"])
            return equal_costs(1.0, 2.0 if backward is None else backward)
        if backward is not None:
            raise ConfigError([f"--backward-cost = {backward}: --attention-share sets it; leave one of them out"])
        if not 0 <= share <= 1:
            raise ConfigError([f"--attention-share = {share}: must be a number >= 0 and <= 1"])
        return sliced_costs(self.slices, share)

    def _setting(self, shape: Shape) -> ExchangeSetting | None:
        """What exchange has to work with; None where there is nothing to share, or nobody in phase to share it with."""
        share, exchange, hardware, model = self.attention_share, self.exchange, self.hardware, self.model
        if exchange not in MODES:
            raise ConfigError([f"--exchange = {exchange}: must be one of {', '.join(MODES)}"])
        if hardware is None:
            for name, value in (("model", model), ("sequence", self.sequence)):
                if value is not None:
                    raise ConfigError([f"--{name} = {value}: says something with --hardware alone; leave it out"])
            if exchange != "off" and not share:
                raise ConfigError(
                    [f"--exchange = {exchange}: needs --attention-share above 0, or --hardware and --model"]
                )
        elif model is None:
            raise ConfigError([f"--hardware = {hardware}: needs --model, whose sizes it is applied to"])
        if self.schedule != "slimpipe":
            if exchange != "off" or hardware is not None:
                option = f"--exchange = {exchange}" if exchange != "off" else f"--hardware = {hardware}"
                raise ConfigError([f"{option}: needs --schedule slimpipe, whose ranks are in phase"])
            return None
        if hardware is None or model is None:
            return ExchangeSetting.on_paper(shape.n, share) if share and share <= 1 else None
        settings = load_config(model)
        tokens = self.sequence or settings.data.sequence_length
        profile, recompute = load_hardware(hardware, "--hardware"), settings.memory.recompute
        return ExchangeSetting.on_hardware(profile, settings.model, shape, tokens, share, recompute)

    def _swaps(self, shape: Shape, setting: ExchangeSetting | None) -> SwapSetting | None:
        """What is to move of activations; None where nothing is. Keys and values count as one with them, unless they
        are elsewhere (`kv_swap`)."""
        amount, budget, copy = self._amount(), self.activation_budget, self.copy_cost
        if amount == "off":
            for name, value in (("activation-budget", budget), ("copy-cost", copy)):
                if value is not None:
                    raise ConfigError([f"--{name} = {value}: says something with --swap alone; leave it out"])
            return None
        if self.hardware is None or self.model is None:
            mean = 1.0 if setting is None else setting.work.mean_forward(shape.n)
            return SwapSetting.on_paper(amount, shape, mean * (1.0 if copy is None else copy), budget)
        if copy is not None:
            raise ConfigError([f"--copy-cost = {copy}: --hardware and --model set it; leave one of them out"])
        settings = load_config(self.model)
        tokens = (self.sequence or settings.data.sequence_length) // shape.n
        placement = place_layers(settings.model.layers, shape.stages)
        recompute, slots = settings.memory.recompute, not self.kv_swap
        sizes = unit_bytes(settings.model, recompute, shape, placement, tokens, with_slots=slots)
        return SwapSetting(amount, sizes, host_link(load_hardware(self.hardware, "--hardware"))).within(shape, budget)

    def _keys(self, shape: Shape) -> KeysSetting | None:
        """Keys and values in host memory, on every rank."""
        if not self.kv_swap:
            return None
        if self.hardware is None or self.model is None:
            raise ConfigError(["--kv-swap: needs --hardware and --model, for what keys and values weigh"])
        settings = load_config(self.model)
        tokens = (self.sequence or settings.data.sequence_length) // shape.n
        placement = place_layers(settings.model.layers, shape.stages)
        stream = key_stream(settings.model, shape, placement, tokens, (True,) * shape.p)
        return KeysSetting(stream, host_link(load_hardware(self.hardware, "--hardware")))

    def _amount(self) -> Amount:
        if self.swap in ("off", "auto"):
            return cast(Amount, self.swap)
        try:
            share = float(self.swap)
        except ValueError:
            share = -1.0
        if not 0 < share <= 1:
            raise ConfigError([f"--swap = {self.swap}: must be off, auto or a number > 0 and <= 1"])
        return share

    def _head(self) -> Head:
        vocab, share = self.vocab, self.head_share
        if vocab not in _VOCAB:
            raise ConfigError([f"--vocab = {vocab}: must be one of {', '.join(_VOCAB)}"])
        if vocab == "off" and share is not None:
            raise ConfigError([f"--head-share = {share}: --vocab = off costs nothing; use --vocab last or parallel"])
        if vocab != "off" and share is None:
            raise ConfigError([f"--vocab = {vocab}: needs --head-share, what the output layer costs"])
        if share is not None and not 0 <= share < float("inf"):
            raise ConfigError([f"--head-share = {share}: must be a number >= 0"])
        return Head(vocab, share)
