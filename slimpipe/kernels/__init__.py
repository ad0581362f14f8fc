"""One file an operation. Each has a plain PyTorch form that runs anywhere; faster forms are chosen by device."""
