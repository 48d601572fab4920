"""A click model moved from PaddlePaddle Fluid: migrate_from_paddle_original.py, of which every line is here.

A line in a comment is the original's; what stands below it took its place. Lines without one stayed as they were. Both
scripts find their roles in the same variables, are started by the same four commands and print the same losses.
"""

from __future__ import annotations

import numpy as np

# import paddle.fluid as fluid
import torch

from fleet import StrategyFactory, nn

# from paddle.fluid.incubate.fleet.base.role_maker import PaddleCloudRoleMaker
from fleet.role_maker import PaddleCloudRoleMaker

# from paddle.fluid.incubate.fleet.parameter_server.distribute_transpiler import fleet
# from paddle.fluid.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy import StrategyFactory
from fleet.transpiler import fleet

IDS, DIM, BATCH, STEPS = 200, 8, 64, 300


def batch_of(step):
    draw = np.random.RandomState(1000 * fleet.worker_index() + step)
    ids = draw.randint(0, IDS, (BATCH, 2))
    return ids, (np.cos(ids).sum(1, keepdims=True) > 0).astype("float32")


# def click_model(ids):
class ClickModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # constant, slope = fluid.initializer.Constant(0.1), fluid.initializer.NumpyArrayInitializer(SLOPE)
        # rows = fluid.embedding(ids, size=[IDS, DIM], is_sparse=True, param_attr=fluid.ParamAttr("rows", constant))
        self.rows = nn.Embedding(IDS, DIM, initializer="constant(0.1)")
        # return fluid.layers.fc(both, 1, param_attr=fluid.ParamAttr("slope", slope))
        self.slope = torch.nn.Linear(DIM, 1)
        self.slope.weight.data = torch.from_numpy(SLOPE.T.copy())
        torch.nn.init.zeros_(self.slope.bias)

    def forward(self, ids):
        # both = fluid.layers.reduce_sum(fluid.layers.reshape(rows, [-1, 2, DIM]), dim=1)
        both = self.rows(ids).sum(1)
        return self.slope(both)


SLOPE = np.linspace(-1, 1, DIM, dtype="float32").reshape(DIM, 1)
fleet.init(PaddleCloudRoleMaker())
# ids, clicked = fluid.data("ids", [None, 2], "int64"), fluid.data("clicked", [None, 1], "float32")
# logit = click_model(ids)
model = ClickModel()
# loss = fluid.layers.reduce_mean(fluid.layers.sigmoid_cross_entropy_with_logits(logit, clicked))
loss_of = torch.nn.BCEWithLogitsLoss()
# optimizer = fluid.optimizer.SGD(learning_rate=2.0)
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
# optimizer = fleet.distributed_optimizer(optimizer, StrategyFactory.create_sync_strategy())
# optimizer.minimize(loss)
optimizer = fleet.distributed_optimizer(optimizer, StrategyFactory.create_sync_strategy(), model=model)

if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
elif fleet.is_worker():
    fleet.init_worker()
    # exe = fluid.Executor(fluid.CPUPlace())
    # exe.run(fleet.startup_program)
    for step in range(STEPS):
        values, clicks = batch_of(step)
        # (told,) = exe.run(fleet.main_program, feed={"ids": values, "clicked": clicks}, fetch_list=[loss])
        loss = loss_of(model(torch.from_numpy(values)), torch.from_numpy(clicks))
        told = [loss.item()]
        optimizer.minimize(loss)
        if step % 50 == 49:
            print(f"step {step + 1:3d}  loss {told[0]:.4f}")
    fleet.stop_worker()
