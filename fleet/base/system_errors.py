"""Tells what the operating system has refused, as errors put it."""

from __future__ import annotations

import errno


def is_full(error: OSError) -> bool:
    """Say whether a disk, or what somebody may have of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def reason(error: OSError) -> str:
    """Return the system's reason, with its name."""
    if error.errno is None:
        return str(error)
    return f"{error.strerror} ({errno.errorcode.get(error.errno, error.errno)})"
