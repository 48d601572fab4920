"""Optimizers that PaddlePaddle has and torch lacks, and one that very large tables are trained with.

They are ordinary ``torch.optim.Optimizer`` classes: use them with ``fleet.distributed_optimizer``, or without any
server. On servers ``Ftrl``, ``DecayedAdagrad`` and ``RowWiseAdagrad`` also train the rows of sparse tables. ``Lamb``
and ``LarsMomentum`` need the norm of a whole parameter, so they train dense parameters only, which are not cut.
"""

from __future__ import annotations

from fleet.kernels.decayed_adagrad import DecayedAdagrad
from fleet.kernels.ftrl import Ftrl
from fleet.kernels.lamb import Lamb
from fleet.kernels.lars_momentum import LarsMomentum
from fleet.kernels.row_wise_adagrad import RowWiseAdagrad

__all__ = ["DecayedAdagrad", "Ftrl", "Lamb", "LarsMomentum", "RowWiseAdagrad"]
