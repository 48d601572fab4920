"""A click model on PaddlePaddle Fluid (1.8.5, Python 3.7), which migrate_from_paddle.py has line by line."""

import numpy as np
import paddle.fluid as fluid
from paddle.fluid.incubate.fleet.base.role_maker import PaddleCloudRoleMaker
from paddle.fluid.incubate.fleet.parameter_server.distribute_transpiler import fleet
from paddle.fluid.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy import StrategyFactory

IDS, DIM, BATCH, STEPS = 200, 8, 64, 300


def batch_of(step):
    draw = np.random.RandomState(1000 * fleet.worker_index() + step)
    ids = draw.randint(0, IDS, (BATCH, 2))
    return ids, (np.cos(ids).sum(1, keepdims=True) > 0).astype("float32")


def click_model(ids):
    constant, slope = fluid.initializer.Constant(0.1), fluid.initializer.NumpyArrayInitializer(SLOPE)
    rows = fluid.embedding(ids, size=[IDS, DIM], is_sparse=True, param_attr=fluid.ParamAttr("rows", constant))
    both = fluid.layers.reduce_sum(fluid.layers.reshape(rows, [-1, 2, DIM]), dim=1)
    return fluid.layers.fc(both, 1, param_attr=fluid.ParamAttr("slope", slope))


SLOPE = np.linspace(-1, 1, DIM, dtype="float32").reshape(DIM, 1)
fleet.init(PaddleCloudRoleMaker())
ids, clicked = fluid.data("ids", [None, 2], "int64"), fluid.data("clicked", [None, 1], "float32")
logit = click_model(ids)
loss = fluid.layers.reduce_mean(fluid.layers.sigmoid_cross_entropy_with_logits(logit, clicked))
optimizer = fluid.optimizer.SGD(learning_rate=2.0)
optimizer = fleet.distributed_optimizer(optimizer, StrategyFactory.create_sync_strategy())
optimizer.minimize(loss)

if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
elif fleet.is_worker():
    fleet.init_worker()
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fleet.startup_program)
    for step in range(STEPS):
        values, clicks = batch_of(step)
        (told,) = exe.run(fleet.main_program, feed={"ids": values, "clicked": clicks}, fetch_list=[loss])
        if step % 50 == 49:
            print(f"step {step + 1:3d}  loss {told[0]:.4f}")
    fleet.stop_worker()
