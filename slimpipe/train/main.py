"""`slimpipe train`: from settings to a finished run."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import tempfile
import threading
import time
import traceback
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch.distributed as dist
from filelock import BaseFileLock, FileLock, Timeout
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from slimpipe.config import ConfigError
from slimpipe.data import Loader, RunData, open_data
from slimpipe.kernels.attention import select_backend
from slimpipe.models.contract import build_model
from slimpipe.parallel.mesh import Processes, pick_carrier, prepare_process, start_processes
from slimpipe.plan.hardware_file import load_hardware
from slimpipe.runtime.contact import LostContact
from slimpipe.runtime.watchdog import Progress, Watchdog
from slimpipe.train.checkpoint import WRITER, CheckpointError, Peers
from slimpipe.train.checkpoint.folders import home
from slimpipe.train.collector import heap_set_aside
from slimpipe.train.dtypes import DTYPES
from slimpipe.train.forecast import Forecast
from slimpipe.train.held_out import HeldOut
from slimpipe.train.init_from import refuse_source, start_from
from slimpipe.train.nonfinite import NonFinite
from slimpipe.train.planning import make_plan
from slimpipe.train.profiling import Profiling
from slimpipe.train.resume import refuse_changes
from slimpipe.train.saving import Saving
from slimpipe.train.session import Session
from slimpipe.train.startup import describe
from slimpipe.train.stop import Stop
from slimpipe.train.swapping import plan_swaps
from slimpipe.train.watching import Watching

if TYPE_CHECKING:
    from slimpipe.config import Config

_LET_THE_CAUSE_BE_SEEN: Final = 5.0  # seconds


def train(config: Config) -> None:
    """Trains as `config` says, in this process as one rank of the job. Problems of the model's class and of the data
    raise before any group starts.

    In a job of several processes an error ends this process at once, after its traceback, so that the launcher ends the
    others: a process that unwinds slowly would leave them waiting for it.
    """
    _write_whole_lines()
    _try_what_can_fail(config)
    refuse_changes(config)
    refuse_source(config)
    data = open_data(config.data, config.model.vocab_size, config.train.seed, _leads())
    loader = Loader(data.train, config.train.global_batch)
    held_out = HeldOut(config, data.evaluation)
    prepare_process(config)
    claim = _claim(Path(config.train.output)) if _leads() else None

    progress, stop = Progress(), Stop()
    processes = start_processes(config)
    try:
        _run(config, data, loader, held_out, processes, progress, stop)
    except BaseException as error:
        if processes.world == 1 and not _still_writing():
            raise
        _fail(error, processes.rank, progress, stop)
    finally:
        if claim is not None:
            claim.release()
    if dist.is_initialized():
        dist.destroy_process_group()


def _run(
    config: Config,
    data: RunData,
    loader: Loader,
    held_out: HeldOut,
    processes: Processes,
    progress: Progress,
    stop: Stop,
) -> None:
    _agree(config, data.fingerprint, processes)
    saving = Saving(config, loader, progress, stop, lambda line: print(line, flush=True))
    if saving.nothing_left:
        if processes.rank == 0:
            print(f"{config.train.output}: all {config.train.steps} steps are done; raise train.steps to go on")
        return
    session: Session | None = None
    watchdog = Watchdog(
        progress,
        config.train.watchdog_seconds,
        processes.rank,
        processes.world,
        processes.store,
        lambda: session.device_doing() if session is not None else None,
    )
    try:
        trace = (lambda line: print(line, flush=True)) if config.pipeline.trace else None
        device = processes.carrier.device
        planned = plan_swaps(config, make_plan(config, progress.now), device, progress.now)
        forecast = Forecast(config, planned, device)
        if processes.rank == 0:
            # Before any memory is taken: what does not fit is said first.
            print(describe(forecast), flush=True)
        session = Session(config, processes.carrier, progress, trace, planned=forecast.planned)
        if processes.rank == 0 and session.attention is not None:
            print(f"attention: {session.attention}", flush=True)
        if processes.rank == 0 and session.carriers is not None:
            print(f"carriers: {session.carriers}", flush=True)
        if not saving.start(session) and config.train.init_from is not None:
            peers = Peers.of_job("weights to start from", config.train.checkpoint_seconds)
            lines = start_from(config, session, peers, progress)
            if processes.rank == 0:
                print("\n".join(lines), flush=True)
        with stop, heap_set_aside():  # until now a signal loses nothing
            _steps(config, session, forecast, data, loader, held_out, saving, processes.rank == 0)
    finally:
        # After an error too: it would end a process that lives on, as one of a single rank does.
        watchdog.stop()


def _steps(
    config: Config,
    session: Session,
    forecast: Forecast,
    data: RunData,
    loader: Loader,
    held_out: HeldOut,
    saving: Saving,
    lead: bool,
) -> None:
    """Every step; on the lead also the run's files and what is shown."""
    output = Path(config.train.output)
    if lead:
        config.dump_yaml(output / "config.yaml")
        if data.tokenizer is not None:
            data.tokenizer.save(output)
    if config.train.eval_every is not None:
        _ = session.evaluation  # what it cannot plan or run shows before the first step
    watching = Watching(config, forecast, lead, session.carriers)
    profiling = Profiling(config, session.rank, session.progress)
    try:
        goes_on = True
        while goes_on:
            step = session.steps_done
            started = time.perf_counter()
            session.progress.now("reading data")
            with profiling.step(step + 1):
                row = session.train_step(*loader.next(), loader.places)
                took = time.perf_counter() - started
            watching.after(step + 1, row, took)
            found = session.evaluation.run(held_out.batches(), saving.stopping) if held_out.due(step + 1) else None
            if found is not None:
                watching.evaluated(step + 1, found)
            goes_on = saving.after_step()
    finally:
        watching.close()


def _claim(output: Path) -> BaseFileLock:
    """Makes the run's folder and takes it for this run alone, before any group starts. Raises ValueError where it
    cannot be made or another run has it. The system releases it should this process die."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = FileLock(output / ".lock")
        lock.acquire(timeout=0)
        home(output).mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=home(output)):  # better now than after the first hours
            pass
    except Timeout as error:
        raise ValueError(f"train.output = {output}: another run is writing there; choose another folder") from error
    except OSError as error:
        within = "" if error.filename in (None, str(output)) else f"{Path(error.filename).name}: "
        reason = f"{within}{error.strerror or error}"
        raise ValueError(f"train.output = {output}: cannot be written ({reason}); choose another folder") from error
    return lock


def _try_what_can_fail(config: Config) -> None:
    """Raises ValueError, naming the key, for what would fail on every rank once the group has started."""
    build_model(config)
    device = pick_carrier(config, int(os.environ.get("LOCAL_RANK", "0"))).device
    select_backend(config.train.attention, device, DTYPES[config.train.dtype], config.train.deterministic)
    if config.pipeline.hardware is not None:
        load_hardware(config.pipeline.hardware, "pipeline.hardware")
    if config.log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("log.tensorboard = true: tensorboard is not installed; pip install 'slimpipe[log]'")
    if config.log.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise ValueError(f"log.wandb = {config.log.wandb}: wandb is not installed; pip install 'slimpipe[wandb]'")


def _write_whole_lines() -> None:
    """Ranks share a pipe. torchrun starts Python unbuffered, where a line and its end are two writes: another rank's
    line would come between them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _leads() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _agree(config: Config, tokens: str, processes: Processes) -> None:
    """Raises ValueError unless every process has the same settings and the same tokens."""
    if not dist.is_initialized():
        return
    hardware = config.pipeline.hardware
    mine = {
        "settings": config.to_yaml(),
        "tokens": tokens,
        "hardware": "" if hardware is None else Path(hardware).read_text(encoding="utf-8"),
    }
    seen: list[dict[str, str]] = [{} for _ in range(processes.world)]
    dist.all_gather_object(seen, mine)
    for what, remedy in (
        ("settings", "start every node with the same YAML file and overrides"),
        ("hardware", "give every node the same file pipeline.hardware: the plan follows from it"),
        ("tokens", "give every node the same corpus and Python version, or one data.cache_dir on a shared disk"),
    ):
        other = [rank for rank, theirs in enumerate(seen) if theirs[what] != seen[0][what]]
        if other:
            raise ValueError(f"ranks {other} have other {what} than rank 0; {remedy}")


def _still_writing() -> bool:
    """Whether a checkpoint is. A thread that is inside of torch while the interpreter ends aborts the process."""
    return any(thread.name == WRITER for thread in threading.enumerate())


def _fail(error: BaseException, rank: int, progress: Progress, stop: Stop) -> None:
    """Says which rank failed, at what, and why; then ends the process."""
    if isinstance(error, (CheckpointError, ConfigError)):
        # The user's to mend, and the same on every rank: one says it, and first.
        if rank != 0:
            time.sleep(_LET_THE_CAUSE_BE_SEEN)
        else:
            print(error, file=sys.stderr, flush=True)
        os._exit(2)
    # Every rank stops at the same step for the same reason: one tells it.
    agreed = isinstance(error, NonFinite)
    if not agreed:
        sys.stderr.write(_failure(error, rank, progress.doing))
    elif rank == 0:
        sys.stderr.write(f"{error}\n")
    sys.stderr.flush()
    if (_is_lost_contact(error) and not stop.requested) or (agreed and rank != 0):
        # torchrun reports the first process to end as the cause, and ends the others: wait for that.
        time.sleep(_LET_THE_CAUSE_BE_SEEN)
    elif isinstance(error, Exception) and not agreed:
        get_error_handler().record_exception(error)
    sys.stdout.flush()
    os._exit(1)


def _failure(error: BaseException, rank: int, doing: str) -> str:
    stamp = datetime.now().strftime("%H:%M:%S")
    where = f"[{stamp}] rank {rank} failed at: {doing}"
    if _is_lost_contact(error):
        # The peer's own message says what happened; this one's stack would only bury it.
        whom = error.whom if isinstance(error, LostContact) else "another rank"
        cause = str(error.__cause__ or error).splitlines()[0][:200]
        return f"{where}: lost contact with {whom}, which has failed, was killed or does not answer ({cause})\n"
    return f"{where}\n{''.join(traceback.format_exception(error))}"


def _is_lost_contact(error: BaseException) -> bool:
    return isinstance(error, LostContact) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
