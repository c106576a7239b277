"""Mistakes a person can mend. The command line shows their message alone; everything else is a bug with a traceback."""

from __future__ import annotations


class RiseError(Exception):
    """Base of every error whose message is written for the person at the keyboard."""
