"""Computes the CRC-32 of everything that is written to disks, by zlib-ng where it is installed: the same number, ten
times as fast."""

from __future__ import annotations

import json
from typing import Any

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # it is not made for every machine
    from zlib import crc32

__all__ = ["content_crc32", "crc32"]


def content_crc32(content: dict[str, Any]) -> int:
    """Return the checksum of what is written as JSON; without it an altered digit would go unnoticed."""
    return crc32(json.dumps(content, sort_keys=True).encode())
