"""Locks files that one process at a time may have for itself."""

from __future__ import annotations

import errno


def locked(descriptor: int) -> bool | None:
    """Lock a file until this process closes it, and say whether that worked; None on systems without locks."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True
