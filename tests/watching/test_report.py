"""`slimpipe report`: what stands on the page is what stands in the files, and the page needs nothing else."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slimpipe.cli import app
from slimpipe.report import ReportError, Run, page, read_run
from slimpipe.report.chart import short, thinned, ticks

GIB = 2**30


def write(folder: Path, rows: list[dict[str, Any]], settings: str | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if settings is not None:
        (folder / "config.yaml").write_text(settings)
    return folder


def rows(steps: int, ranks: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    noise = random.Random(seed)
    return [
        {
            "step": step,
            "loss": 2 + 5 * math.exp(-step / 40) + noise.random(),
            "grad_norm": noise.random() + 1,
            "lr": 1e-3,
            "tokens_per_s": 1000.0 + 10 * noise.random(),
            "bubble": 0.1,
            "bubble_by_rank": [0.05 + 0.01 * rank for rank in range(ranks)],
            "peak_memory_bytes": 40 * GIB,
            "peak_memory_bytes_by_rank": [(40 - rank) * GIB for rank in range(ranks)],
        }
        for step in range(1, steps + 1)
    ]


class Reader(HTMLParser):
    """Elements by tag with their attributes and text; every tag must be closed, but for those that never are."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[tuple[str, list[str]]] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        text: list[str] = []
        self.found.append((tag, {key: value or "" for key, value in attrs}, text))
        if tag not in ("meta",):
            self._open.append((tag, text))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {key: value or "" for key, value in attrs}, []))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[-1][1].append(data)

    def texts(self, tag: str, **wanted: str) -> list[str]:
        return ["".join(text) for name, attrs, text in self.found if name == tag and wanted.items() <= attrs.items()]


class Drawing:
    """A chart read as a person does: by its axes' numbers."""

    def __init__(self, page: str, title: str) -> None:
        figure = next(part for part in page.split("<figure>")[1:] if f"<h2>{title}</h2>" in part)
        self.text = figure[: figure.index("</figure>")]
        self.lines = [
            [tuple(map(float, point.split())) for point in path.replace("M", "L").strip("L").split("L")]
            for path in re.findall(r'<path class="line c\d" d="([^"]+)"', self.text)
        ]

    def y(self, up: float) -> float:
        return self._read(r'<text class="tick y" x="[\d.]+" y="([\d.]+)">([^<]+)<', up, offset=4)

    def x(self, across: float) -> float:
        return self._read(r'<text class="tick x" x="([\d.]+)" y="[\d.]+">([^<]+)<', across)

    def _read(self, pattern: str, place: float, offset: float = 0) -> float:
        marks = [(float(at) - offset, number(label)) for at, label in re.findall(pattern, self.text)]
        (a, low), (b, high) = marks[0], marks[-1]
        return low + (place - a) / (b - a) * (high - low)


def number(label: str) -> float:
    scale = {"k": 1e3, "M": 1e6, "G": 1e9}.get(label[-1])
    return float(label[:-1]) * scale if scale else float(label)


# ---- what is drawn ----


@pytest.mark.parametrize(
    ("title", "key", "scale"),
    [("Loss", "loss", 1), ("Throughput", "tokens_per_s", 1), ("Gradient norm", "grad_norm", 1)],
)
def test_every_point_lies_where_the_axes_say(title: str, key: str, scale: float, tmp_path: Path) -> None:
    written = rows(60)
    drawing = Drawing(page([read_run(write(tmp_path / "run", written))]), title)
    (line,) = drawing.lines
    assert len(line) == 60
    spread = max(row[key] for row in written) - min(row[key] for row in written)
    for (across, up), row in zip(line, written, strict=True):
        assert drawing.x(across) == pytest.approx(row["step"], abs=0.05)
        # A tenth of a pixel of 210, and the tick's own rounding.
        assert drawing.y(up) == pytest.approx(
            row[key] * scale, abs=max(spread, row[key] if title == "Throughput" else 0) / 500
        )


def test_a_line_a_rank_of_one_run(tmp_path: Path) -> None:
    drawing = Drawing(page([read_run(write(tmp_path / "run", rows(5, ranks=3)))]), "Memory")
    assert [round(drawing.y(line[-1][1]), 1) for line in drawing.lines] == [40.0, 39.0, 38.0]
    assert re.findall(r"</i>(rank \d)<", drawing.text) == ["rank 0", "rank 1", "rank 2"]
    idle = Drawing(page([read_run(tmp_path / "run")]), "Idle share")
    assert [round(idle.y(line[0][1]), 1) for line in idle.lines] == [5.0, 6.0, 7.0]


def test_of_many_ranks_the_extremes(tmp_path: Path) -> None:
    drawing = Drawing(page([read_run(write(tmp_path / "run", rows(5, ranks=20)))]), "Memory")
    assert [round(drawing.y(line[0][1])) for line in drawing.lines] == [40, 21]
    assert "highest of 20 ranks" in drawing.text and "lowest" in drawing.text


def test_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    runs = [read_run(write(tmp_path / name, rows(steps, seed=steps))) for name, steps in (("a", 30), ("b", 50))]
    text = page(runs)
    for title in ("Loss", "Throughput", "Memory", "Idle share"):
        drawing = Drawing(text, title)
        assert [len(line) for line in drawing.lines] == [30, 50] and re.findall(r"</i>(\w)<", drawing.text) == [
            "a",
            "b",
        ]
        # One axis for both.
        assert drawing.x(drawing.lines[0][-1][0]) == pytest.approx(30, abs=0.1)
    assert "<h1>2 runs</h1>" in text


def test_a_skipped_step_is_a_gap_and_counted(tmp_path: Path) -> None:
    written = rows(20)
    written[9] |= {"loss": None, "grad_norm": None, "skipped": True, "notes": ["skipped: <why>"]}
    text = page([read_run(write(tmp_path / "run", written))])
    drawing = Drawing(text, "Loss")
    (path,) = re.findall(r'<path class="line c0" d="([^"]+)"', drawing.text)
    assert [piece.count("L") + 1 for piece in path.split("M")[1:]] == [9, 10]
    assert Reader(text).texts("li") == ["skipped: <why>"] and Reader(text).texts("td")[-1] == "1"
    assert "<title>step 10: skipped: &lt;why&gt;</title>" in drawing.text


def test_a_spike_of_a_long_run_stays_to_be_seen(tmp_path: Path) -> None:
    """Of 6000 steps ten make a point: their mean is the line, their extremes its band."""
    written = rows(6000)
    written[3000]["loss"] = 6.9
    drawing = Drawing(page([read_run(write(tmp_path / "run", written))]), "Loss")
    (line,) = drawing.lines
    (band,) = re.findall(r'<path class="band c0" d="M([^"]+)Z"', drawing.text)
    assert len(line) == 600
    tops = [tuple(map(float, point.split())) for point in band.split("L")][:600]
    assert max(drawing.y(y) for x, y in tops if drawing.x(x) > 2000) == pytest.approx(6.9, abs=0.05)
    assert drawing.y(line[100][1]) == pytest.approx(sum(row["loss"] for row in written[1000:1010]) / 10, abs=0.03)


def test_one_number_far_out_does_not_press_the_others_flat(tmp_path: Path) -> None:
    written = rows(300)
    written[0]["grad_norm"] = 1e6
    drawing = Drawing(page([read_run(write(tmp_path / "run", written))]), "Gradient norm")
    places = [up for _, up in drawing.lines[0][1:]]
    assert max(places) - min(places) > 120


def test_evaluations_are_dots(tmp_path: Path) -> None:
    drawing = Drawing(page([read_run(write(tmp_path / "run", [*rows(10), {"step": 10, "eval_loss": 4.5}]))]), "Loss")
    (dot,) = re.findall(r'<circle class="dot c1" cx="([\d.]+)" cy="([\d.]+)"', drawing.text)
    assert (drawing.x(float(dot[0])), drawing.y(float(dot[1]))) == pytest.approx((10, 4.5), abs=0.05)
    assert len(drawing.lines[0]) == 10  # the training loss of that step is there still


# ---- what is read ----


def test_of_a_step_done_twice_the_later_counts_and_a_cut_line_none(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 9.0, "skipped": True}])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 2.5}\n{"step": 3, "lo')
    run = read_run(folder)
    assert run.series("loss") == [(1, 3.0), (2, 2.5)] and run.skipped == 0
    assert read_run(folder / "metrics.jsonl").series("loss") == run.series("loss")


def test_the_table_shows_what_a_run_usually_does(tmp_path: Path) -> None:
    written = rows(9)
    for row, rate in zip(written, (1, 1, 1, 1, 500, 700, 600, 600, 600), strict=True):
        row |= {"tokens_per_s": rate, "mfu": rate / 1000}
    settings = "parallel: {pp: 4}\npipeline: {schedule: slimpipe, slices: 16, virtual_stages: 2, exchange: balanced}\n"
    cells = Reader(page([read_run(write(tmp_path / "run", written, settings))])).texts("td")
    assert cells[1:3] == ["slimpipe, pp 4, v 2, n 16, exchange balanced", "9"]
    assert cells[4:] == ["600", "60.0%", "10.0%", "40.0", "0"]


@pytest.mark.parametrize("settings", [None, "", "- a\n", "pipeline: [", "pipeline:\n"])
def test_settings_that_are_missing_or_broken_leave_a_blank(settings: str | None, tmp_path: Path) -> None:
    assert read_run(write(tmp_path / "run", rows(2), settings)).layout == ""


def test_one_step_alone_makes_a_page(tmp_path: Path) -> None:
    assert "<svg" in page([read_run(write(tmp_path / "run", rows(1)))])


# ---- the page ----


def test_the_page_needs_nothing_else_and_is_light_and_dark(tmp_path: Path) -> None:
    text = page([read_run(write(tmp_path / "run", rows(40)))])
    reader = Reader(text)
    assert {tag for tag, _, _ in reader.found} & {"link", "img", "iframe", "object", "embed", "base"} == set()
    assert not [attrs for _, attrs, _ in reader.found if attrs.keys() & {"src", "href", "srcset", "data"}]
    assert "//" not in re.sub(r"^// .*$", "", text, flags=re.MULTILINE) and "@import" not in text
    assert re.findall(r"url\(([^)]*)\)", text) == [f"#chart{index}-clip" for index in range(6)]
    # Every colour is a variable that both schemes set.
    light, dark = text.split("@media (prefers-color-scheme: dark)", 1)
    names = set(re.findall(r"(--\w+): #", light))
    assert names == set(re.findall(r"(--\w+): #", dark[: dark.index("}")])) and len(names) == 15
    assert set(re.findall(r"var\((--\w+)\)", text)) <= names
    assert re.findall(r"#[0-9a-f]{3,6}\b", dark[dark.index("}") :].split("<script")[0]) == []


def test_names_and_notes_are_text_and_nothing_else(tmp_path: Path) -> None:
    written = rows(3)
    written[0]["notes"] = ["</script><script>alert(1)</script>"]
    first = read_run(write(tmp_path / "<b>&amp;", written))
    reader = Reader(page([first, Run("</script><b>", first.rows, {})]))
    assert [tag for tag, _, _ in reader.found].count("script") == 2 and "b" not in {tag for tag, _, _ in reader.found}
    assert reader.texts("td")[0] == "<b>&amp;"
    (data,) = reader.texts("script", id="data")
    assert [line["label"] for line in json.loads(data)[0]["lines"]] == ["<b>&amp;", "</script><b>"]


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(write(tmp_path / "run", rows(4))), "-o", str(target)])
    assert (result.exit_code, result.stdout) == (0, f"wrote {target}\n")
    assert target.read_text().startswith("<!DOCTYPE html>")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ReportError, match=r"metrics.jsonl: cannot be read \(No such file or directory\); give the folder"
    ):
        read_run(tmp_path)
    with pytest.raises(ReportError, match="holds no step yet; wait for the first one"):
        read_run(write(tmp_path / "empty", []))
    run = read_run(write(tmp_path / "run", rows(1)))
    with pytest.raises(ReportError, match="9 runs: no more than 8 can be told apart; give fewer"):
        page([run] * 9)


# ---- axes ----


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.19, 11.3), (-3, 5), (0, 18400), (1e-5, 3e-4), (7, 7.0001)])
def test_ticks_are_round_and_enough(low: float, high: float) -> None:
    found = ticks(low, high, 6)
    steps = {round((b - a) / (high - low), 6) for a, b in zip(found, found[1:], strict=False)}
    assert 3 <= len(found) <= 8 and len(steps) == 1 and low - 1e-12 <= found[0] and found[-1] <= high + 1e-12 * high
    step = found[1] - found[0]
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 5)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.1 + 0.2 - 0.3, "0"),
        (0.25, "0.25"),
        (5000, "5000"),
        (20000, "20k"),
        (1.5e6, "1.5M"),
        (3e-5, "3e-05"),
    ],
)
def test_numbers_on_axes_are_short(value: float, shown: str) -> None:
    assert short(value) == shown


def test_thinned_lines_keep_their_ends_and_their_gaps() -> None:
    points = [(float(x), None if 30_000 <= x < 31_000 else float(x)) for x in range(60_000)]
    found = thinned(points)
    assert len(found) == 600 and (found[0][0], found[-1][0]) == (0, 59_999)
    assert [x for x, y in found if y is None] == [30_050 + 100 * i for i in range(10)]
    assert found[10] == (1050, sum(range(1000, 1100)) / 100)
