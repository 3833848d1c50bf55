"""Errors written for the person who must act on them: what, where, what is allowed, what to do."""

from __future__ import annotations


class ColibriError(Exception):
    """Any failure that this project explains in one sentence; shown without a traceback."""


class UsageError(ColibriError):
    """Wrong input from the user: an unknown profile, a bad file, a bad option (exit status 4)."""


class HostMismatch(ColibriError):
    """The machine lacks what a profile or a request needs (exit status 7)."""


class Unavailable(ColibriError):
    """An optional part (a library, a tool, a driver) is missing; the message says how to get it."""
