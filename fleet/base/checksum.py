"""Computes the CRC-32 of everything that is written to disks, by zlib-ng where it is installed: the same number, ten
times as fast."""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # it is not made for every machine
    from zlib import crc32

__all__ = ["crc32"]
