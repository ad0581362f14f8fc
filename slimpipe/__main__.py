"""`python -m slimpipe` is `slimpipe`."""

from slimpipe.cli import app

app(prog_name="slimpipe")
