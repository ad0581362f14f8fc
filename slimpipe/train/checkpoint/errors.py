"""The one error of checkpoints."""


class CheckpointError(ValueError):
    """A checkpoint is missing or damaged, cannot be written, or is not what the settings describe. One line."""
