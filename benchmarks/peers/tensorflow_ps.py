"""TensorFlow's ParameterServerStrategy with one worker, which computes inside the coordinator's process, so that all
that is not a server's is counted together. Ten steps are scheduled at once, which is faster than one by one."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from work import FEATURES, ROW_RANGE, SLOTS, Meter, Work, clicks, my_work

AT_ONCE = 10


def serve(cluster: tf.train.ClusterSpec, job: str, index: int) -> tf.distribute.Server:
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    return tf.distribute.Server(cluster, job_name=job, task_index=index, config=config, protocol="grpc")


class Step:
    """One step of training: what Keras would do, with the distinct ids of a batch looked up once."""

    def __init__(self, work: Work) -> None:
        self.work = work
        start = tf.random.uniform((work.vocabulary, work.dim), -ROW_RANGE, ROW_RANGE)
        self.table = tf.Variable(start)
        sizes = [SLOTS * work.dim + FEATURES, *[work.width] * 3, 2]
        glorot = tf.keras.initializers.GlorotUniform(seed=0)
        self.layers = [
            (tf.Variable(glorot(sizes[at : at + 2])), tf.Variable(tf.zeros(sizes[at + 1]))) for at in range(4)
        ]

    def __call__(self, ids: tf.Tensor, numbers: tf.Tensor, clicked: tf.Tensor) -> tf.Tensor:
        distinct, inverse = tf.unique(tf.reshape(ids, [-1]))
        rows = tf.nn.embedding_lookup(self.table, distinct)
        layers = [(tf.identity(weight), tf.identity(bias)) for weight, bias in self.layers]
        flat = tf.nest.flatten(layers)
        with tf.GradientTape() as tape:
            tape.watch([rows, *flat])
            looked_up = tf.reshape(tf.gather(rows, inverse), [-1, SLOTS * self.work.dim])
            hidden = tf.concat([looked_up, numbers], 1)
            for weight, bias in layers[:-1]:
                hidden = tf.nn.relu(hidden @ weight + bias)
            scores = hidden @ layers[-1][0] + layers[-1][1]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(clicked, scores))
        of_rows, *of_layers = tape.gradient(loss, [rows, *flat])
        if isinstance(of_rows, tf.IndexedSlices):
            of_rows = tf.math.unsorted_segment_sum(of_rows.values, of_rows.indices, tf.size(distinct))
        for variable, gradient in zip(tf.nest.flatten(self.layers), of_layers, strict=True):
            variable.assign_sub(self.work.rate * gradient)
        self.table.scatter_sub(tf.IndexedSlices(self.work.rate * of_rows, distinct))
        return loss


def train(work: Work, cluster: tf.train.ClusterSpec) -> None:
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        step = Step(work)

    def in_memory() -> tf.data.Dataset:
        arrays = [np.stack(each) for each in zip(*clicks(work), strict=True)]
        return tf.data.Dataset.from_tensor_slices(tuple(arrays)).cache().repeat().prefetch(2)

    batches = iter(coordinator.create_per_worker_dataset(in_memory))

    @tf.function
    def steps(iterator: tf.data.Iterator) -> tf.Tensor:
        losses = tf.TensorArray(tf.float32, AT_ONCE)
        for at in tf.range(AT_ONCE):
            losses = losses.write(at, step(*next(iterator)))
        return losses.stack()

    meter = Meter(work)
    for count in (work.warmup, work.steps):
        running = [coordinator.schedule(steps, args=(batches,)) for _ in range(count // AT_ONCE)]
        coordinator.join()
        for losses in running:
            for loss in losses.fetch():
                meter.after_step(loss)
    meter.end()


def main() -> None:
    work = my_work()
    chief, worker = work.meeting
    cluster = tf.train.ClusterSpec({"ps": work.servers, "worker": [worker], "chief": [chief]})
    if work.role == "server":
        serve(cluster, "ps", work.index).join()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    computing = serve(cluster, "worker", 0)
    train(work, cluster)
    del computing


if __name__ == "__main__":
    main()
