"""`slimpipe doctor` on the command line."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slimpipe.doctor.facts import look
from slimpipe.doctor.judge import Finding, examine

_MARKS = {"ok": ("yes", "green"), "missing": ("no", "yellow"), "broken": ("NO", "bold red")}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """What this machine has for training; for what is missing, why, and the command that brings it.

    Exit code 1 where something is missing that slimpipe does not run without.
    """
    findings = examine(look())
    if as_json:
        typer.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        # Wide enough for commands in one piece where the output is no terminal.
        console = Console() if Console().is_terminal else Console(width=160)
        console.print(shown(findings))
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


def shown(findings: list[Finding]) -> Table:
    """A row each; what is missing has its reason and, below it, its remedy."""
    table = Table("", "", "here", "what, or why not", box=None, padding=(0, 2, 0, 0), header_style="bold")
    group = ""
    for finding in findings:
        mark, colour = _MARKS[finding.state]
        text = Text("; ".join(part for part in (finding.value, finding.why) if part))
        if finding.command:
            text.append(f"\n-> {finding.command}", style="cyan")
        table.add_row(
            Text(finding.group if finding.group != group else "", style="bold"),
            finding.name,
            Text(mark, style=colour),
            text,
        )
        group = finding.group
    return table
