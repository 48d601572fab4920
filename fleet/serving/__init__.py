"""What a job has learnt, where it is used: in models that are saved, that are kept fresh, or that ask replicas."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fleet.base.pointers import missing

if TYPE_CHECKING:
    from fleet.serving.follower import Follower as Follower
    from fleet.serving.following import follow as follow
    from fleet.serving.remote_model import RemoteModel as RemoteModel

#: What is made of torch is imported when it is first asked for, as ``import fleet`` must stay light.
_HOMES = {"follow": "following", "Follower": "follower", "RemoteModel": "remote_model"}

__all__ = ["Follower", "RemoteModel", "follow"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise missing("module 'fleet.serving'", name)
    try:
        home = import_module(f"fleet.serving.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name != f"fleet.serving.{_HOMES[name]}":
            raise
        raise missing("module 'fleet.serving'", name) from None
    return getattr(home, name)
