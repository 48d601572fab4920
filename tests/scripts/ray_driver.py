"""Runs the job of ray_job.py on the cluster at an address: a driver, which is to be interrupted."""

from __future__ import annotations

import sys
from pathlib import Path

import ray
import ray_job

import fleet

ray.init(sys.argv[1], log_to_driver=False)
fleet.ray.run(ray_job.train, Path(sys.argv[2]), server_num=1, worker_num=1)
