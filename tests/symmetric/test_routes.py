"""Who shares memory with whom, and what is said of it."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from slimpipe.config import ConfigError
from slimpipe.parallel import mesh
from slimpipe.parallel.mesh import pick_carrier, prepare_process
from slimpipe.runtime import routes
from slimpipe.runtime.carrier import Carrier
from slimpipe.runtime.routes import Routes, settle
from slimpipe.runtime.symmetric import cuda
from slimpipe.runtime.symmetric.neighbours import Site, apart, neighbourhoods, site_of
from slimpipe.schedule import Link
from slimpipe.train.planning import make_plan
from slimpipe.train.rings import pass_sizes, rings_by_rank
from tests.numerics.harness import case, config_of

LINKS = (Link("F", 0, 1), Link("F", 1, 2), Link("F", 2, 3), Link("B", 1, 0), Link("B", 2, 1), Link("B", 3, 2))


def sites(*hosts: str, cut: tuple[tuple[int, int], ...] = ()) -> list[Site]:
    """A GPU a rank; all GPUs of a host reach each other, but for the pairs in `cut`."""
    found = []
    for rank, host in enumerate(hosts):
        reach = {f"gpu {other}" for other, its in enumerate(hosts) if its == host and other != rank}
        reach -= {f"gpu {b if a == rank else a}" for a, b in cut if rank in (a, b)}
        found.append(Site(host, f"gpu {rank}", frozenset(reach)))
    return found


def test_ranks_of_a_node_are_neighbours() -> None:
    assert neighbourhoods(sites("a", "a", "a", "a")) == ((0, 1, 2, 3),)
    assert neighbourhoods(sites("a", "a", "b", "b")) == ((0, 1), (2, 3))
    assert neighbourhoods(sites("a", "b", "a", "b")) == ((0, 2), (1, 3))
    assert neighbourhoods(sites("a", "b")) == ((0,), (1,))


def test_within_a_neighbourhood_all_reach_all() -> None:
    assert neighbourhoods(sites("a", "a", "a", "a", cut=((0, 2), (0, 3), (1, 2), (1, 3)))) == ((0, 1), (2, 3))
    assert neighbourhoods(sites("a", "a", "a", cut=((0, 2),))) == ((0, 1), (2,))


def test_the_reason_is_told() -> None:
    one, other = sites("a", "a")
    assert apart(one, other) is None
    assert apart(one, replace(other, host="b")) == "they are on different hosts"
    assert apart(one, replace(other, namespaces="another's")) == "they are in different containers"
    assert "TMPDIRs differ (, /elsewhere)" in str(apart(one, replace(other, sockets="/elsewhere")))
    assert apart(one, replace(other, gpu="gpu 0")) == "they share a GPU"
    # One direction is not enough.
    assert "no access" in str(apart(one, replace(other, reach=frozenset())))
    assert "no access" in str(apart(replace(one, reach=frozenset()), other))
    assert apart(one, replace(other, lacks="no driver")) == "no driver"


def test_a_cpu_shares_nothing() -> None:
    site = site_of(torch.device("cpu"))
    assert apart(site, site) == "it computes on a CPU"
    assert site.host == site_of(torch.device("cpu")).host


def test_the_line_names_links_only_where_they_differ() -> None:
    pairs = [(0, 1), (1, 0), (3, 1)]
    assert Routes(tuple(sites(*"aaaa")), True, "NCCL").describe(LINKS, pairs) == (
        "sends symmetric memory, exchange symmetric memory, collectives NCCL"
    )
    assert Routes(tuple(sites(*"aaaa")), False, "NCCL").describe(LINKS, []) == "sends NCCL, collectives NCCL"
    assert Routes(tuple(sites(*"aaaa")), True, "NCCL").describe(LINKS, [], vocabulary=True) == (
        "sends symmetric memory, vocabulary passes symmetric memory, other collectives NCCL"
    )
    assert Routes(tuple(sites(*"aabb")), True, "NCCL").describe(LINKS, pairs) == (
        "sends symmetric memory (F 0>1; F 2>3; B 1>0; B 3>2) and NCCL (F 1>2; B 2>1: they are on different hosts), "
        "exchange symmetric memory (0-1) and NCCL (1-3: they are on different hosts), collectives NCCL"
    )


def test_the_line_says_why_no_memory_is_shared() -> None:
    one, other = (Link("F", 0, 1),), Link("B", 1, 0)
    assert Routes(tuple(sites("a", "b")), True, "NCCL").describe((*one, other), []) == (
        "sends NCCL (they are on different hosts), collectives NCCL"
    )
    ring = Routes(tuple(sites("a", "a", "a", cut=((0, 2),))), True, "NCCL")
    assert ring.describe((Link("F", 1, 2),), []) == (
        "sends NCCL (some GPU of the node reaches one of them and not the other), collectives NCCL"
    )


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> list[Site]:
    """Four ranks; what they say of themselves is what the list holds when it is asked for."""
    found: list[Site] = []

    def gather(into: list[Site], mine: Site, group: object) -> None:
        into[:] = found

    monkeypatch.setattr(routes, "site_of", lambda device: found[0])
    monkeypatch.setattr(routes.dist, "all_gather_object", gather)
    monkeypatch.setattr(routes.dist, "get_world_size", lambda group: len(found))
    return found


def test_auto_takes_it_where_it_can_and_nccl_elsewhere(on_gpus: list[Site]) -> None:
    on_gpus += sites(*"aabb")
    among = [(link.src, link.dst) for link in LINKS]
    group = object()
    gpu = torch.device("cuda", 0)
    auto = settle(Carrier(gpu, symmetric="auto"), group, among)  # type: ignore[arg-type]
    assert [auto.near(src, dst) for src, dst in among] == [True, False, True, True, False, True]
    never = settle(Carrier(gpu), group, among)  # type: ignore[arg-type]
    assert not any(never.near(src, dst) for src, dst in among)


def test_what_is_asked_for_and_cannot_be_is_refused(on_gpus: list[Site]) -> None:
    on_gpus += sites(*"aabb")
    always, group = Carrier(torch.device("cuda", 0), symmetric="always"), object()
    # Pairs that never send to each other may be apart.
    assert settle(always, group, [(0, 1), (2, 3)]).near(2, 3)  # type: ignore[arg-type]
    message = r"parallel\.carrier = symmetric: ranks 1 and 2 cannot share memory: they are on different hosts; use auto"
    with pytest.raises(ValueError, match=message):
        settle(always, group, [(0, 1), (1, 2)])  # type: ignore[arg-type]
    on_gpus[:] = sites("a", "a", "a", cut=((0, 2),))
    assert settle(always, group, [(0, 1)]).near(0, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks 1 and 2 .* reaches one of them and not the other"):
        settle(always, group, [(1, 2)])  # type: ignore[arg-type]


def test_symmetric_needs_gpus() -> None:
    with pytest.raises(ValueError, match=r"parallel\.carrier = symmetric: .*runs on a CPU; use auto"):
        pick_carrier(config_of(case(), parallel={"carrier": "symmetric"}), 0)
    assert pick_carrier(config_of(case()), 0).symmetric == "never"
    with pytest.raises(ValueError, match=r"parallel\.collectives = nccl: .*runs on a CPU; use auto"):
        pick_carrier(config_of(case(pp=2), parallel={"pp": 2, "collectives": "nccl"}), 0)


@pytest.fixture
def on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process on a GPU with a driver, as far as `site_of` asks."""
    properties = SimpleNamespace(uuid="gpu 0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "Driver", lambda: None)
    assert site_of(torch.device("cuda", 0)).lacks is None
    return monkeypatch


def test_a_torch_without_it_leaves_auto_with_nccl(on_one_gpu: pytest.MonkeyPatch) -> None:
    on_one_gpu.delattr("torch._C._distributed_c10d._SymmetricMemory")
    assert site_of(torch.device("cuda", 0)).lacks == "its torch was built without symmetric memory"


def test_sockets_that_torch_cannot_make(on_one_gpu: pytest.MonkeyPatch) -> None:
    """torch names them by process, in the folder of the first of four variables, and copies a name of any length."""
    on_one_gpu.setenv("TEMP", "/missing")
    for name in ("TMPDIR", "TMP"):
        on_one_gpu.delenv(name, raising=False)
    assert (
        site_of(torch.device("cuda", 0)).lacks == "TMPDIR = /missing cannot be written to, where torch has its sockets"
    )
    on_one_gpu.setattr(os, "access", lambda *_: True)
    room = 107 - len(f"/symm_mem-{os.getpid()}")
    on_one_gpu.setenv("TMPDIR", "/" + "x" * (room - 1))
    found = site_of(torch.device("cuda", 0))
    assert found.lacks is None and len(found.sockets) == room
    on_one_gpu.setenv("TMPDIR", "/" + "x" * room)
    assert "is too long for torch's sockets" in str(site_of(torch.device("cuda", 0)).lacks)


def test_collectives_share_memory_only_where_sends_do() -> None:
    message = r"parallel\.collectives = symmetric: needs parallel\.carrier: symmetric; set that, or this to auto"
    with pytest.raises(ConfigError, match=message):
        config_of(case(pp=2), parallel={"pp": 2, "collectives": "symmetric"})
    config_of(case(pp=2), parallel={"pp": 2, "carrier": "symmetric", "collectives": "symmetric"})
    with pytest.raises(
        ConfigError, match=r"parallel\.collectives = nccl: under parallel\.carrier: host gloo moves all"
    ):
        config_of(case(pp=2), parallel={"pp": 2, "carrier": "host", "collectives": "nccl"})


@pytest.mark.parametrize(("ranks", "auto"), [(1, "never"), (2, "auto"), (4, "never")])
def test_auto_shares_memory_in_pipelines_of_two_ranks(ranks: int, auto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer ones are set up as for NCCL, until they have run."""
    monkeypatch.setattr(mesh, "pick_device", lambda *_, **__: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    variables = ("CUDA_DEVICE_MAX_COPY_CONNECTIONS", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
    for named, expected in {"auto": auto, "nccl": "never", "host": "never", "symmetric": "always"}.items():
        for variable in variables:
            monkeypatch.setenv(variable, "")  # so that it is put back
            monkeypatch.delenv(variable)
        config = config_of(case(pp=ranks), parallel={"pp": ranks, "carrier": named})
        assert pick_carrier(config, 0).symmetric == expected
        prepare_process(config)
        assert [variable in os.environ for variable in variables] == [expected != "never"] * 2


@pytest.mark.parametrize(
    ("ranks", "carrier", "collectives", "shared"),
    [
        (2, "auto", "auto", True),
        (2, "auto", "nccl", False),
        (2, "symmetric", "auto", True),
        (2, "symmetric", "nccl", False),
        (2, "nccl", "auto", False),
        (2, "host", "auto", False),
        (4, "auto", "auto", False),
        (4, "symmetric", "auto", False),
        (4, "symmetric", "symmetric", True),
    ],
)
def test_vocabulary_passes_go_as_sends_do(ranks: int, carrier: str, collectives: str, shared: bool) -> None:
    config = config_of(
        case(pp=ranks, vocab_parallel=True), parallel={"pp": ranks, "carrier": carrier, "collectives": collectives}
    )
    assert (pass_sizes(config) is not None) is shared


def test_no_ring_is_counted_for_passes_where_ranks_share_by_groups() -> None:
    config = config_of(case(pp=4, n=4, vocab_parallel=True), parallel={"pp": 4, "carrier": "symmetric"})
    with_passes = config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"collectives": "symmetric"})}
    )
    planned = make_plan(config)
    by_groups, whole = ((0, 1), (2, 3)), ((0, 1, 2, 3),)
    assert rings_by_rank(with_passes, planned, by_groups) == rings_by_rank(config, planned, by_groups)
    assert min(rings_by_rank(with_passes, planned, whole)) > max(rings_by_rank(config, planned, whole))
