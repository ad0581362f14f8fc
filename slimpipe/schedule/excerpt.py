"""Errors that show their place: the lists of a few ranks around an action, with the action marked."""

from __future__ import annotations

from slimpipe.schedule.plan import Plan, PlanError


def refusal(plan: Plan, rank: int, index: int, why: str) -> PlanError:
    """An error that names rank, action and index, says why, and shows the place. `index` may be the list's end."""
    actions = plan.ranks[rank]
    token = str(actions[index]) if index < len(actions) else "end of list"
    return PlanError(f"{plan.name}: rank {rank}, action {index} ({token}): {why}\n{excerpt(plan, rank, index)}")


def excerpt(plan: Plan, rank: int, index: int, ranks: int = 2, actions: int = 3) -> str:
    """Rank x index around one place, `ranks` rows and `actions` columns to either side; the place in >...<."""
    rows = range(max(0, rank - ranks), min(plan.shape.p, rank + ranks + 1))
    columns = range(max(0, index - actions), index + actions + 1)
    cells = [["action", *map(str, columns)]]
    for row in rows:
        cells.append([f"rank {row}", *(_cell(plan, row, column, (row, column) == (rank, index)) for column in columns)])
    width = max(len(cell) for row_cells in cells for cell in row_cells[1:])
    return "\n".join("  ".join([row[0].ljust(8), *(cell.center(width) for cell in row[1:])]).rstrip() for row in cells)


def _cell(plan: Plan, rank: int, index: int, marked: bool) -> str:
    actions = plan.ranks[rank]
    token = str(actions[index]) if index < len(actions) else ""
    return f">{token or 'end'}<" if marked else token
