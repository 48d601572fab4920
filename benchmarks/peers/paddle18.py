"""PaddlePaddle 1.8.5 with its Fleet on parameter servers (gRPC), which needs Python 3.7."""

from __future__ import annotations

import paddle.fluid as fluid
from paddle.fluid.incubate.fleet.base.role_maker import Role, UserDefinedRoleMaker
from paddle.fluid.incubate.fleet.parameter_server.distribute_transpiler import fleet
from paddle.fluid.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy import StrategyFactory
from work import FEATURES, ROW_RANGE, SLOTS, Meter, clicks, my_work, vectors

STRATEGIES = {
    "sync": StrategyFactory.create_sync_strategy,
    "async": StrategyFactory.create_async_strategy,
    "half-async": StrategyFactory.create_half_async_strategy,
    "geo": StrategyFactory.create_geo_strategy,
}


def click_loss(work):
    """Every slot is an input of its own here: a variable of one id an example."""
    slots = [fluid.data(f"slot{slot}", [None, 1], "int64") for slot in range(SLOTS)]
    numbers = fluid.data("numbers", [None, FEATURES], "float32")
    clicked = fluid.data("clicked", [None, 1], "int64")
    looked_up = []
    for place, slot in enumerate(slots):
        rows = fluid.ParamAttr(
            name=f"rows{place % work.tables}", initializer=fluid.initializer.Uniform(-ROW_RANGE, ROW_RANGE)
        )
        row = fluid.embedding(slot, [work.vocabulary, work.dim], is_sparse=True, param_attr=rows)
        looked_up.append(fluid.layers.reshape(row, [-1, work.dim]))
    hidden = fluid.layers.concat([*looked_up, numbers], axis=1)
    for _ in range(3):
        hidden = fluid.layers.fc(hidden, work.width, act="relu")
    odds = fluid.layers.fc(hidden, 2, act="softmax")
    return fluid.layers.reduce_mean(fluid.layers.cross_entropy(odds, clicked))


def click_feeds(work):
    feeds = []
    for ids, numbers, clicked in clicks(work):
        feed = {f"slot{slot}": ids[:, slot : slot + 1].copy() for slot in range(SLOTS)}
        feed.update(numbers=numbers, clicked=clicked[:, None])
        feeds.append(feed)
    return feeds


def dense_loss(work):
    given = fluid.data("given", [None, work.width], "float32")
    wanted = fluid.data("wanted", [None, work.width], "float32")
    hidden = given
    for act in ("relu", "relu", "relu", None):
        hidden = fluid.layers.fc(hidden, work.width, act=act)
    return fluid.layers.reduce_mean(fluid.layers.square_error_cost(hidden, wanted))


def dense_feeds(work):
    return [{"given": given, "wanted": wanted} for given, wanted in vectors(work)]


def main():
    work = my_work()
    role = Role.SERVER if work.role == "server" else Role.WORKER
    fleet.init(UserDefinedRoleMaker(work.index, role, work.workers, work.servers))
    loss = click_loss(work) if work.model == "ctr" else dense_loss(work)
    if work.optimizer == "sgd":
        optimizer = fluid.optimizer.SGD(work.rate)
    else:
        optimizer = fluid.optimizer.Adam(work.rate, lazy_mode=True)
    strategy = STRATEGIES[work.mode]()
    fleet.distributed_optimizer(optimizer, strategy).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    executor = fluid.Executor(fluid.CPUPlace())
    fleet.init_worker()
    executor.run(fleet.startup_program)
    program = fleet.main_program
    if work.mode != "sync":  # its communicator belongs to the parallel executor
        threads = strategy.get_execute_strategy()
        threads.num_threads = 1
        program = fluid.compiler.CompiledProgram(program).with_data_parallel(
            loss_name=loss.name, build_strategy=strategy.get_build_strategy(), exec_strategy=threads
        )
    meter = Meter(work)
    for feed in meter.batches(click_feeds(work) if work.model == "ctr" else dense_feeds(work)):
        (value,) = executor.run(program, feed=feed, fetch_list=[loss])
        meter.after_step(value.mean())
    meter.end()
    fleet.stop_worker()


if __name__ == "__main__":
    main()
