"""Plans as CSV: two lines of heading, then a rank a line. What is written reads back the same, and nothing else reads.

schedule,p,v,n,m
1f1b,2,1,1,2
0,F0.0@0,F1.0@0,B0.0@0,B1.0@0
1,F0.0@0,B0.0@0,F1.0@0,B1.0@0
"""

from __future__ import annotations

import re

from slimpipe.schedule.action import Action
from slimpipe.schedule.plan import Plan, PlanError, Shape

HEADING = "schedule,p,v,n,m"
_NAME = re.compile(r"[\w.+-]+", re.ASCII)
_NUMBER = re.compile(r"0|[1-9]\d*", re.ASCII)


def to_csv(plan: Plan) -> str:
    """The plan as text, with a line feed after each line."""
    if _NAME.fullmatch(plan.name) is None:
        raise PlanError(f"schedule name {plan.name!r}: CSV takes letters, digits and . + - _")
    shape = plan.shape
    lines = [HEADING, f"{plan.name},{shape.p},{shape.v},{shape.n},{shape.m}"]
    lines += [",".join([str(rank), *map(str, actions)]) for rank, actions in enumerate(plan.ranks)]
    return "\n".join(lines) + "\n"


def from_csv(text: str) -> Plan:
    """The plan that `to_csv` wrote. Raises PlanError naming the line; does not `check` what it read."""
    lines = text.split("\n")
    if lines[0] != HEADING:
        raise PlanError(f"line 1: expected {HEADING!r}, found {lines[0]!r}")
    if len(lines) < 2:
        raise PlanError("line 2: expected the schedule's name and shape, found the end")
    name, shape = _name_and_shape(lines[1])
    if len(lines) < shape.p + 3:
        raise PlanError(
            f"line {len(lines)}: expected a line for each of p = {shape.p} ranks, each ended, found the end"
        )
    if len(lines) > shape.p + 3 or lines[-1] != "":
        raise PlanError(f"line {shape.p + 3}: expected the end after {shape.p} ranks, found {lines[shape.p + 2]!r}")
    return Plan(name, shape, tuple(_rank(rank, lines[rank + 2]) for rank in range(shape.p)))


def _name_and_shape(line: str) -> tuple[str, Shape]:
    name, *numbers = line.split(",")
    if _NAME.fullmatch(name) is None:
        raise PlanError(f"line 2: schedule name {name!r}: expected letters, digits and . + - _")
    if len(numbers) != 4 or any(_NUMBER.fullmatch(number) is None for number in numbers):
        raise PlanError(f"line 2: expected four numbers p,v,n,m after the name, found {','.join(numbers)!r}")
    p, v, n, m = map(int, numbers)
    try:
        return name, Shape(p, v, n, m)
    except PlanError as error:
        raise PlanError(f"line 2: {error}") from None


def _rank(rank: int, line: str) -> tuple[Action, ...]:
    first, *tokens = line.split(",")
    if first != str(rank):
        raise PlanError(f"line {rank + 3}: expected rank {rank} first, found {first!r}")
    try:
        return tuple(map(Action.parse, tokens))
    except ValueError as error:
        raise PlanError(f"line {rank + 3}: {error}") from None
