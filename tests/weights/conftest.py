"""The small corpus of the end-to-end tests, and no job around the tests of this folder."""

from tests.end_to_end.conftest import _no_torchrun, small

__all__ = ["_no_torchrun", "small"]
