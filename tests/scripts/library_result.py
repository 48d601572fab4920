"""Runs a script of examples/libraries and writes down where it ends: ``library_result.py [--sparse] OUT SCRIPT``.

``OUT`` gets the model's parameters and what the script has predicted; of worker 0 in a job. With ``--sparse`` the
script's embeddings and its Adam are torch's own sparse ones.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


class AdamWithSparseAdam(torch.optim.Optimizer):
    """Trains embeddings as ``SparseAdam`` does and everything else as ``Adam`` does."""

    def __init__(self, params: Iterable[torch.nn.Parameter], **options: Any) -> None:
        params = list(params)
        super().__init__(params, options)
        rows = [p for p in params if hasattr(p, "is_of_rows")]
        others = [p for p in params if not hasattr(p, "is_of_rows")]
        self._parts = [torch.optim.SparseAdam(rows, **options), Adam(others, **options)]
        self.param_groups = [group for part in self._parts for group in part.param_groups]  # for schedules

    def step(self, closure: Any = None) -> Any:
        """Take a step of both."""
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss


def be_sparse() -> None:
    """Make every embedding sparse from now on, and every Adam one that takes sparse gradients."""
    made = torch.nn.Embedding.__init__

    def make(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **{**options, "sparse": True})
        self.weight.is_of_rows = True

    torch.nn.Embedding.__init__ = make  # type: ignore[method-assign]
    torch.optim.Adam = AdamWithSparseAdam  # type: ignore[misc,assignment]


Adam = torch.optim.Adam

if __name__ == "__main__":
    *flags, out, script = sys.argv[1:]
    if flags == ["--sparse"]:
        be_sparse()
    sys.argv = [script]
    sys.path.insert(0, str(Path(script).parent))
    left = runpy.run_path(script, run_name="__main__")
    state = {name: torch.as_tensor(value) for name, value in left["model"].state_dict().items()}
    if os.environ.get("PADDLE_TRAINER_ID", "0") == "0":
        torch.save({**state, "predictions": torch.as_tensor(left["predictions"])}, out)
