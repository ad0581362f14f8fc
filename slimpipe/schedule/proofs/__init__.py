"""One question about a plan a file; `schedule.check` asks them all."""
