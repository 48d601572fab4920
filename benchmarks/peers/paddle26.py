"""PaddlePaddle 2.6.2 with its Fleet on parameter servers (brpc). Of its modes only the asynchronous one runs there."""

from __future__ import annotations

import os

from work import FEATURES, ROW_RANGE, SLOTS, Meter, clicks, my_work


def describe_job(work):
    """Its role maker reads the environment only, and only once, when it is imported."""
    trainers = work.meeting[: work.workers]
    mine = (work.servers if work.role == "server" else trainers)[work.index]
    os.environ.update(
        TRAINING_ROLE="PSERVER" if work.role == "server" else "TRAINER",
        PADDLE_PSERVERS_IP_PORT_LIST=",".join(work.servers),
        PADDLE_TRAINER_ENDPOINTS=",".join(trainers),
        PADDLE_TRAINERS_NUM=str(work.workers),
        PADDLE_TRAINER_ID=str(work.index),
        POD_IP="127.0.0.1",
        PADDLE_PORT=mine.rpartition(":")[2],
        PADDLE_WITH_GLOO="0",
    )


def click_loss(paddle, work):
    slots = [paddle.static.data(f"slot{slot}", [None, 1], "int64") for slot in range(SLOTS)]
    numbers = paddle.static.data("numbers", [None, FEATURES], "float32")
    clicked = paddle.static.data("clicked", [None, 1], "int64")
    looked_up = []
    for place, slot in enumerate(slots):
        rows = paddle.ParamAttr(
            name=f"rows{place % work.tables}", initializer=paddle.nn.initializer.Uniform(-ROW_RANGE, ROW_RANGE)
        )
        row = paddle.static.nn.sparse_embedding(input=slot, size=[work.vocabulary, work.dim], param_attr=rows)
        looked_up.append(paddle.reshape(row, [-1, work.dim]))
    hidden = paddle.concat([*looked_up, numbers], axis=1)
    for _ in range(3):
        hidden = paddle.static.nn.fc(hidden, work.width, activation="relu")
    odds = paddle.static.nn.fc(hidden, 2, activation="softmax")
    return paddle.mean(paddle.nn.functional.cross_entropy(odds, clicked, use_softmax=False))


def main():
    work = my_work()
    describe_job(work)
    import paddle
    import paddle.distributed.fleet as fleet

    paddle.enable_static()
    fleet.init(is_collective=False)
    # It prints its strategy, which takes a protobuf compiled in C++ that is not there.
    fleet.DistributedStrategy.__repr__ = lambda _: "strategy"
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    loss = click_loss(paddle, work)
    if work.optimizer == "sgd":
        optimizer = paddle.optimizer.SGD(work.rate)
    else:
        optimizer = paddle.optimizer.Adam(work.rate, lazy_mode=True)
    fleet.distributed_optimizer(optimizer, strategy).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    feeds = []
    for ids, numbers, clicked in clicks(work):
        feed = {f"slot{slot}": ids[:, slot : slot + 1].copy() for slot in range(SLOTS)}
        feeds.append({**feed, "numbers": numbers, "clicked": clicked[:, None]})
    meter = Meter(work)
    for feed in meter.batches(feeds):
        (value,) = executor.run(paddle.static.default_main_program(), feed=feed, fetch_list=[loss])
        meter.after_step(value.mean())
    meter.end()
    fleet.stop_worker()


if __name__ == "__main__":
    main()
