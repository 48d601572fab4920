"""What a process that only serves does without."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
from patience import PATIENCE_S

_AREAS = """
import ctypes, sys, threading
if sys.argv[1:]:
    from fleet.ps.server.lean import be_lean
    be_lean()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.fdopen.restype = ctypes.c_void_p, ctypes.c_void_p
libc.malloc.argtypes, libc.malloc_info.argtypes = [ctypes.c_size_t], [ctypes.c_int, ctypes.c_void_p]
libc.fflush.argtypes = [ctypes.c_void_p]
together = threading.Barrier(4)
def take():
    together.wait()
    libc.malloc(1 << 16)
    together.wait()
threads = [threading.Thread(target=take) for _ in range(4)]
for each in threads: each.start()
for each in threads: each.join()
out = libc.fdopen(1, b"w")
libc.malloc_info(0, out)
libc.fflush(out)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such areas")
def test_threads_of_a_server_share_an_area_of_memory() -> None:
    def areas(*given: str) -> int:
        command = [sys.executable, "-c", _AREAS, *given]
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
        return told.count("<heap nr=")

    assert areas() > 1
    assert areas("lean") == 1
