"""The text grid and the SVG: what they show, not how pretty it is."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from slimpipe.schedule import (
    PlanError,
    Shape,
    build,
    draw_svg,
    equal_costs,
    grid,
    lower,
    simulate,
    sliced_costs,
)
from slimpipe.schedule.excerpt import excerpt, refusal

SVG = "{http://www.w3.org/2000/svg}"


def test_grid_of_a_plan() -> None:
    assert grid(build("1f1b", Shape(p=2, m=2))) == (
        "tick       0     1     2     3     4     5\n"
        "rank 0  F0.0  F1.0     .  B0.0     .  B1.0\n"
        "rank 1     .  F0.0  B0.0  F1.0  B1.0     .\n"
    )


def test_grid_of_a_timeline_shows_durations() -> None:
    timeline = simulate(build("1f1b", Shape(p=2, m=1)), equal_costs(1.0, 2.0))
    assert grid(timeline) == (
        "tick       0     1     2     3     4     5\n"
        "rank 0  F0.0     .     .     .  B0.0     -\n"
        "rank 1     .  F0.0  B0.0     -     .     .\n"
    )
    assert grid(timeline, first=2, last=4) == "tick       2     3\nrank 0     .     .\nrank 1  B0.0     -\n"
    assert grid(timeline, tick=2.0).splitlines()[2].split() == ["rank", "1", "F0.0", "B0.0", "."]


def test_grid_names_chunks_where_there_are_several() -> None:
    text = grid(build("slimpipe", Shape(p=2, v=2, n=2, m=1)))
    assert text.splitlines()[1].split()[2:6] == ["F0.0@0", "F0.1@0", "F0.0@1", "F0.1@1"]
    assert text == grid(lower(build("slimpipe", Shape(p=2, v=2, n=2, m=1))))


def test_grid_refuses_a_tick_of_nothing() -> None:
    with pytest.raises(ValueError, match="tick = 0"):
        grid(build("1f1b", Shape(1)), tick=0)


def test_excerpt_marks_the_place() -> None:
    plan = build("1f1b", Shape(p=3, m=4))
    assert excerpt(plan, 1, 2, ranks=1, actions=1).splitlines() == [
        "action       1         2         3",
        "rank 0     F1.0@0    F2.0@0    B0.0@0",
        "rank 1     F1.0@0   >B0.0@0<   F2.0@0",
        "rank 2     B0.0@0    F1.0@0    B1.0@0",
    ]
    assert isinstance(refusal(plan, 0, 8, "why"), PlanError)
    assert ">end<" in str(refusal(plan, 0, 8, "why"))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("slimpipe", Shape(4, 1, 8, 2)),
        ("slimpipe", Shape(4, 2, 8, 6)),
        ("1f1b", Shape(3, 1, 1, 5)),
        ("slimpipe", Shape(1, 1, 1, 1)),
        ("slimpipe", Shape(80, 1, 16, 1)),
    ],
)
def test_svg_holds_the_timeline(name: str, shape: Shape) -> None:
    timeline = simulate(build(name, shape), equal_costs())
    root = ET.fromstring(draw_svg(timeline, title="a <title> & more"))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert "a <title> & more" in texts
    assert any(f"Bubble {100 * timeline.bubble_fraction:.1f} %" in text for text in texts)
    assert {"rank 0", "forward", "backward", "idle"} <= set(texts)
    rectangles = sum((element.get("d") or "").count("M") for element in root.iter(f"{SVG}path"))
    legend = 1 + 2 * min(shape.m, 4)
    assert rectangles == 2 * shape.units * shape.p + shape.p + legend


def test_svg_is_self_contained_and_has_no_background() -> None:
    text = draw_svg(simulate(build("slimpipe", Shape(4, 1, 8, 2)), equal_costs()))
    assert "href" not in text
    assert "<script" not in text
    assert "<rect" not in text
    assert text.count("http") == 1  # the namespace


def test_svg_writes_slices_where_there_is_room() -> None:
    roomy = draw_svg(simulate(build("slimpipe", Shape(2, 2, 4, 1)), equal_costs()))
    assert ">3b</text>" in roomy
    assert "number: slice; letter: chunk" in roomy
    whole = draw_svg(simulate(build("1f1b", Shape(2, m=6)), equal_costs()))
    assert ">5</text>" in whole
    assert "number: microbatch" in whole
    cramped = draw_svg(simulate(build("slimpipe", Shape(8, 1, 64, 8)), sliced_costs(64, 0.8)))
    assert ">63</text>" not in cramped


def test_lowered_plans_draw_alike() -> None:
    plan = build("slimpipe", Shape(4, 1, 8, 2))
    assert draw_svg(simulate(plan, equal_costs())) == draw_svg(simulate(lower(plan), equal_costs()))
