"""`slimpipe simulate --swap`: what it reports and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_cli import assert_refused, run_line
from tests.test_cli_exchange import HARDWARE, report

SHAPE = "--pp 2 --slices 16 --microbatches 2"


def test_share() -> None:
    found = report(f"{SHAPE} --swap 0.8")
    kept = report(SHAPE)
    assert found["swap"] == 0.8
    assert kept["swap"] == "off"
    assert all(0.75 < share <= 0.8 for share in found["moved_share"])
    assert max(found["device_activation"]) < 0.5 * kept["peak_activation"]
    assert found["makespan_without_swap"] == kept["makespan"] <= found["makespan"]
    assert found["peak_activation"] == kept["peak_activation"]


def test_auto_keeps_within_the_budget_and_hides_it() -> None:
    found = report(f"{SHAPE} --swap auto --activation-budget 0.3")
    assert max(found["device_activation"]) <= 0.3
    assert found["swap_fits"]
    assert found["makespan"] == found["makespan_without_swap"]
    assert max(found["swap_waited"]) == 0
    roomy = report(f"{SHAPE} --swap auto --activation-budget 1")
    assert roomy["moved_share"] == [0.0, 0.0]
    none = report(f"{SHAPE} --swap auto --activation-budget 0.001")
    assert not none["swap_fits"]


def test_copies_that_cost_nothing_take_no_time() -> None:
    found = report(f"{SHAPE} --swap 1 --copy-cost 0")
    assert found["makespan"] == found["makespan_without_swap"]
    assert found["swap_waited"] == [0.0, 0.0]


def test_with_exchange_vocabulary_and_several_chunks() -> None:
    options = "--pp 4 --slices 8 --virtual-stages 2 --microbatches 2 --attention-share 0.6 --exchange balanced"
    found = report(f"{options} --vocab parallel --head-share 0.2 --swap auto --activation-budget 0.2")
    assert max(found["device_activation"]) <= 0.2
    assert found["loans"] > 0


def test_hardware() -> None:
    """In seconds and bytes: keys and values, 4 of 94 KB a token and layer, stay; at 64K most hides."""
    found = report(f"{SHAPE} {HARDWARE} --sequence 65536 --swap 0.8")
    assert found["time_unit"] == "seconds"
    assert found["makespan"] < 1.02 * found["makespan_without_swap"]
    assert min(found["moved_share"]) > 0.75
    # At 8K copies take far longer than compute: what is asked for is moved all the same, and is waited for.
    short = report(f"{SHAPE} {HARDWARE} --sequence 8192 --swap 0.8")
    assert short["makespan"] > 1.1 * short["makespan_without_swap"]
    assert max(short["swap_waited"]) > 0


def test_shown_in_table_and_picture(tmp_path: Path) -> None:
    shown = run_line(f"simulate {SHAPE} --swap auto --activation-budget 0.2 --grid").stdout
    for words in ("swap, auto: moved on one rank", "waits for copies", "  out ", "  back "):
        assert words in shown
    assert "above the budget" in run_line(f"simulate {SHAPE} --swap auto --activation-budget 0.001").stdout
    assert run_line(f"draw {SHAPE} --swap 0.5 -o {tmp_path}/swap.svg").exit_code == 0
    assert "to host" in (tmp_path / "swap.svg").read_text()


def test_keys_and_values(tmp_path: Path) -> None:
    """At 256K their copies hide behind compute; at 16K they do not."""
    long, short = (report(f"{SHAPE} {HARDWARE} --sequence {tokens} --kv-swap") for tokens in (262144, 16384))
    kept = report(f"{SHAPE} {HARDWARE} --sequence 262144")
    assert long["kv_swap"] and not kept["kv_swap"]
    assert kept["makespan"] <= long["makespan"] < 1.001 * kept["makespan"]
    assert long["kv_in_bytes"][0] == 16 * short["kv_in_bytes"][0] > long["kv_out_bytes"][0]
    assert max(short["kv_waited"]) > 0.01 * short["makespan"]
    both = report(f"{SHAPE} {HARDWARE} --sequence 262144 --kv-swap --swap 0.5")
    assert both["swap"] == 0.5 and both["kv_host_bytes"] == long["kv_host_bytes"]
    options = f"{SHAPE} {HARDWARE} --sequence 65536 --kv-swap"
    assert "waits for keys and values" in run_line(f"simulate {options}").stdout
    assert run_line(f"draw {options} -o {tmp_path}/keys.svg").exit_code == 0
    assert "keys to host" in (tmp_path / "keys.svg").read_text()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--kv-swap", "--kv-swap: needs --hardware and --model, for what keys and values weigh"),
        ("--swap on", "--swap = on: must be off, auto or a number > 0 and <= 1"),
        ("--swap 0", "--swap = 0: must be off, auto or a number > 0 and <= 1"),
        ("--swap 1.1", "--swap = 1.1: must be off, auto or a number > 0 and <= 1"),
        ("--swap nan", "--swap = nan: must be off, auto or a number > 0 and <= 1"),
        ("--swap auto", "--swap = auto: needs --activation-budget, in activations of one microbatch"),
        ("--swap auto --activation-budget 0", "--activation-budget = 0.0: must be a number > 0"),
        (
            "--swap 0.5 --activation-budget 0.3",
            "--activation-budget = 0.3: says something with --swap auto alone; leave it out",
        ),
        ("--activation-budget 0.3", "--activation-budget = 0.3: says something with --swap alone; leave it out"),
        ("--copy-cost 2", "--copy-cost = 2.0: says something with --swap alone; leave it out"),
        ("--swap 0.5 --copy-cost -1", "--copy-cost = -1.0: must be a number >= 0"),
        (
            f"--swap 0.5 --copy-cost 1 {HARDWARE}",
            "--copy-cost = 1.0: --hardware and --model set it; leave one of them out",
        ),
    ],
)
def test_refusals(options: str, line: str) -> None:
    assert_refused(run_line(f"simulate --pp 2 {options}"), line)
