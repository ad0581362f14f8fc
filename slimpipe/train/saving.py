"""A run's life beyond its process: where it starts from, when it saves, when it is asked to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slimpipe.data import DataError
from slimpipe.runtime.watchdog import Progress
from slimpipe.train import randomness, resume
from slimpipe.train.checkpoint import CheckpointError, Keeping, Note, Peers, Saver, choose, folders, read_note
from slimpipe.train.rows import DROPPED, METRICS, keep_rows
from slimpipe.train.stop import Stop

if TYPE_CHECKING:
    from slimpipe.config import Config
    from slimpipe.train.session import Session


class Position(Protocol):
    """Where a run is in its data."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Saving:
    """Every rank has one; every method is collective. The lead tells, through `say`.

    Errors of its own (CheckpointError, ConfigError) are raised on every rank.
    """

    def __init__(
        self, config: Config, data: Position, progress: Progress, stop: Stop, say: Callable[[str], None]
    ) -> None:
        """Looks for where the run starts from, before anything is built, and has `data` start there. The lead owns the
        run's folder by now."""
        self._config, self._data, self._progress, self._stop, self._say = config, data, progress, stop, say
        self._output = Path(config.train.output)
        seconds = config.train.checkpoint_seconds
        # Beside a checkpoint's files, ranks wait here for each other's steps, which are the watchdog's business.
        self._peers = Peers.of_job("agreement", max(seconds, 60.0, 2 * config.train.watchdog_seconds))
        keeping = Keeping(config.train.keep_last, config.train.keep_every)
        # A rank's own limit comes first: it knows what it waits for.
        writers = Peers.of_job("checkpoint", seconds + 60)
        self._saver = Saver(self._output, writers, keeping, seconds, progress, (self._output / METRICS,))
        blind = folders.blind(folders.home(self._output), self._peers)
        if blind:
            raise CheckpointError(
                f"train.output = {config.train.output}: ranks {blind} do not see what rank 0 writes there; put it on a "
                "disk that all nodes share"
            )
        if self._peers.leads:
            folders.sweep(self._output)
        self._choice = choose(self._output, self._peers)
        self._note: Note = {}
        self._saved = 0
        if self._choice.taken is not None:
            self._note, self._saved = read_note(self._choice.taken), folders.step_of(self._choice.taken)
            resume.refuse(config, self._choice.taken, self._note)
            try:
                data.load_state_dict(self._note["data"])
            except DataError as error:
                raise CheckpointError(str(error)) from error

    @property
    def nothing_left(self) -> bool:
        """Whether the run has done all its steps."""
        return self._saved >= self._config.train.steps

    def start(self, session: Session) -> bool:
        """Gives the session the state of the newest whole checkpoint. False: there is none, the run is new.

        Before the first step: memory for copies of the state is taken here.
        """
        self._session = session
        randomness.seed(self._config.train.seed, self._peers.rank, self._saved, session.device)
        if self._choice.taken is not None:
            with self._progress.patience(f"reading {self._choice.taken}"):
                self._tell(*resume.resume(self._config, self._choice, self._note, session, self._peers))
        self._tidy()
        self._prepare()
        return self._choice.taken is not None

    def _tidy(self) -> None:
        """By the lead, once the start has succeeded."""
        failure: CheckpointError | None = None
        if self._peers.leads:
            self._tell(*resume.set_aside(self._choice))
            try:
                dropped = keep_rows(self._output, self._session.steps_done)
            except OSError as error:
                why = error.strerror or error
                failure = CheckpointError(
                    f"{self._output / METRICS}: cannot be rewritten ({why}); make room, and start again"
                )
            else:
                if dropped:
                    moved = f"{dropped} rows of steps that will be done again moved to {DROPPED}"
                    self._tell(f"{METRICS}: {moved}")
        failure = self._peers.from_lead(failure)
        if failure is not None:
            raise failure

    @property
    def _beside_steps(self) -> bool:
        return self._config.train.async_checkpoint and self._config.train.checkpoint_every is not None

    def _prepare(self) -> None:
        if not self._beside_steps:
            return
        failure: CheckpointError | None = None
        try:
            self._saver.go_beside_steps(self._session.state(), self._session.device)
        except CheckpointError as error:
            failure = error
        failure = next(filter(None, self._peers.from_all(failure)), None)
        if failure is not None:
            raise failure
        self._session.before_update = self._saver.hold

    def stopping(self) -> bool:
        """Whether a signal asks the run to save and end; `after_step` is what does it."""
        return self._stop.agreed(self._peers) is not None

    def after_step(self) -> bool:
        """To be called when all else of the step is done and recorded. False: the run ends here, saved."""
        train, step = self._config.train, self._session.steps_done
        self._tell(*self._saver.told())
        signal = self._stop.agreed(self._peers)
        ends = signal is not None or step >= train.steps
        if ends or (train.checkpoint_every is not None and step % train.checkpoint_every == 0):
            self._save(step)
            if not ends and not self._beside_steps:
                self._tell(*self._saver.told(patiently=True))
        if not ends:
            return True
        self._tell(*self._saver.finish())
        if signal is not None:
            self._tell(f"stopped by {signal} after step {step} of {train.steps}: the same command goes on from here")
        return False

    def _save(self, step: int) -> None:
        note = resume.make_note(self._config, step, self._data.state_dict(), self._peers.world)
        self._progress.now("copying the state for a checkpoint")
        self._tell(*self._saver.save(resume.state_of(self._session, self._peers.rank), note, step))

    def _tell(self, *lines: str) -> None:
        if self._peers.leads:
            for line in lines:
                self._say(line)
