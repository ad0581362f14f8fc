"""slimpipe and what people use today, on the same GPUs, model and data: see the README beside this."""
