"""What can go wrong in a run through no bug of ours; the command line shows the message alone."""

from __future__ import annotations


class EngineError(RuntimeError):
    """Base of errors whose message is written for the person at the keyboard."""
