"""`slimpipe doctor`: what this machine has for training, and for what is missing why, and what brings it."""

from slimpipe.doctor.facts import Device, Facts, look
from slimpipe.doctor.judge import Finding, examine

__all__ = ["Device", "Facts", "Finding", "examine", "look"]
