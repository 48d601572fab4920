"""Files that one process at a time may have for itself."""

from __future__ import annotations

import errno


def locked(descriptor: int) -> bool | None:
    """Say whether this process has the lock on a file now, and until it closes the file; None where there are no
    locks."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True
