"""For every test: the pool of gloo workers, jobs in forked processes, a settled hypothesis profile, the order of the
files, and a reason where a GPU test is skipped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from tests.support.pool import Pool, Workers  # noqa: E402  (needs the search path above)

if TYPE_CHECKING:
    from tests.support.jobs import Jobs

hypothesis.settings.register_profile("slimpipe", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("slimpipe")


# Where files run beside each other, a long one that comes last keeps one core busy while the others are done.
FIRST = (
    "tests/checkpoints/test_killed.py",
    "tests/numerics/test_exchange.py",
    "tests/numerics/test_gradients.py",
    "tests/numerics/test_vocabulary.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(FIRST)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is false here"))


def pytest_configure() -> None:
    """Started in the background, a process ignores interrupts, and so would those that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The workers share the machine, and sums taken by one thread come out the same on every machine."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """`pool(world).run(function, *args)`: see tests/support/pool.py. Workers start when first asked for."""
    workers = Workers()
    yield lambda world: Pool(workers, world)
    workers.close()


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """`jobs.run("config.yaml", "train.steps=2", ranks=2)`: see tests/support/jobs.py."""
    from tests.support.jobs import Jobs  # which imports torch: not every test needs it

    return Jobs(tmp_path_factory.mktemp("jobs"))
