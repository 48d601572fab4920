"""Collective jobs on CUDA devices: NCCL, AMP, and what overlaps. Skipped where there are too few."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from prepared import Prepared
from ranks import run

pytestmark = pytest.mark.gpu

SCRIPT = "collective_gpu.py"
CHECKS = ("parity_with_ddp", "half_precision_with_a_grad_scaler", "sending_overlaps_backward", "uneven_data")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_on_devices(prepared: Prepared, size: int, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    if torch.cuda.device_count() < size:
        pytest.skip(f"there are {torch.cuda.device_count()} CUDA devices, and {size} are needed")
    names = [name for name in CHECKS if size > 1 or name != "uneven_data"]
    told = run(prepared, SCRIPT, size, names, tmp_path)
    failures = [f"{name}: {each['error']}" for name in names for each in told[name] if "error" in each]
    assert not failures, "\n".join(failures)
