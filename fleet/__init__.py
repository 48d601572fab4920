"""Fleet: distributed training for PyTorch behind two calls.

``fleet.init(role_maker)`` says who this process is, ``fleet.distributed_optimizer(optimizer)`` makes its optimizer
train with all the others. The functions here are the bound methods of one default ``Fleet``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fleet.api import Fleet
from fleet.api import default as _default
from fleet.checkpoints import Checkpoints
from fleet.strategy.parameter_server import StrategyFactory
from fleet.transpiler.program import Program

if TYPE_CHECKING:
    from fleet import data as data
    from fleet import nn as nn
    from fleet import optim as optim
    from fleet import ray as ray
    from fleet import serving as serving

__version__ = "0.1.0"

Checkpoints.default = _default

init = _default.init
is_worker = _default.is_worker
is_server = _default.is_server
is_first_worker = _default.is_first_worker
worker_index = _default.worker_index
worker_num = _default.worker_num
server_index = _default.server_index
server_num = _default.server_num
worker_endpoints = _default.worker_endpoints
server_endpoints = _default.server_endpoints
split_files = _default.split_files
distributed_optimizer = _default.distributed_optimizer
join = _default.join
resume_from = _default.resume_from
init_server = _default.init_server
run_server = _default.run_server
init_worker = _default.init_worker
stop_worker = _default.stop_worker
barrier_worker = _default.barrier_worker
all_reduce_worker = _default.all_reduce_worker
prefetch = _default.prefetch
metrics = _default.metrics
save_persistables = _default.save_persistables
load_persistables = _default.load_persistables
load_state = _default.load_state
keep_state = _default.keep_state
save_inference_model = _default.save_inference_model
load_inference_model = _default.load_inference_model
state_dict = _default.state_dict
load_state_dict = _default.load_state_dict
summary = _default.summary
report = _default.report
resume_step = _default.resume_step
shrink = _default.shrink
resize_servers = _default.resize_servers

__all__ = [
    "Checkpoints",
    "Fleet",
    "Program",
    "StrategyFactory",
    "all_reduce_worker",
    "barrier_worker",
    "data",
    "distributed_optimizer",
    "init",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "join",
    "keep_state",
    "load_inference_model",
    "load_persistables",
    "load_state",
    "load_state_dict",
    "metrics",
    "nn",
    "optim",
    "prefetch",
    "report",
    "resize_servers",
    "resume_from",
    "resume_step",
    "run_server",
    "save_inference_model",
    "save_persistables",
    "server_endpoints",
    "server_index",
    "server_num",
    "serving",
    "shrink",
    "split_files",
    "state_dict",
    "stop_worker",
    "summary",
    "worker_endpoints",
    "worker_index",
    "worker_num",
]


def __getattr__(name: str) -> Any:
    # These are imported when they are first asked for, as ``import fleet`` must stay light.
    if name in ("data", "nn", "optim", "ray", "serving"):
        return import_module(f"fleet.{name}")
    from fleet.base.pointers import missing

    raise missing("module 'fleet'", name)
