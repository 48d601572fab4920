"""Changes a model's forward as options say: recomputation of activations, and half precision.

Both replace ``forward`` on an instance, which leaves modules, parameters and the keys of ``state_dict`` as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from fleet.errors import ConfigurationError


def recompute(model: torch.nn.Module, names: Sequence[str]) -> None:
    """Let the named submodules keep no activations: backward computes them again (``torch.utils.checkpoint``)."""
    known = dict(model.named_modules())
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigurationError(
            "recompute_checkpoints names submodules that the model does not have",
            expected=", ".join(name for name in known if name)[:500],
            got=", ".join(unknown),
        )
    for name in names:
        module: Any = known[name]
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


def half_precision(device: torch.device) -> torch.dtype:
    """Return what AMP computes in: float16 on CUDA, and bfloat16 where float16 would be slow."""
    return torch.float16 if device.type == "cuda" else torch.bfloat16


def autocast(model: torch.nn.Module, device: torch.device) -> None:
    """Let the model's forward compute in half precision where that is safe."""
    whole: Any = model
    # Not torch's decorator: a copy of what that makes would go on computing with this model.
    whole.forward = functools.partial(_in_half_precision, model.forward, device)


def _in_half_precision(forward: Callable[..., Any], device: torch.device, /, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device.type, half_precision(device)):
        return forward(*args, **kwargs)
