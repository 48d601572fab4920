"""PaddlePaddle 1.8.5's own reader of MultiSlot text, for benchmarks/data.py: what it reads, and in what time.

    python paddle18_reader.py FILE SLOTS BATCH

SLOTS is JSON, ``[[name, "float32" or "int64", width or null], …]``. Prints JSON: seconds by the clock and of all
processors, and for every slot a digest of its values in their order. With FILE ``-`` it writes, to stdout and with
Paddle's own generator, the lines of the samples that it finds as JSON on stdin.
"""

import hashlib
import json
import sys
import time


def read(file, slots, batch):
    import numpy as np
    import paddle.fluid as fluid

    program = fluid.Program()
    with fluid.program_guard(program):
        variables = [
            fluid.layers.data(name, shape=[width or 1], dtype=dtype, lod_level=0 if width else 1)
            for name, dtype, width in slots
        ]
    dataset = fluid.DatasetFactory().create_dataset("QueueDataset")
    dataset.set_batch_size(batch)
    dataset.set_use_var(variables)
    dataset.set_filelist([file])
    dataset.set_pipe_command("cat")
    loader = fluid.io.DataLoader.from_dataset(dataset, fluid.cpu_places(1), drop_last=False)
    digests = {name: hashlib.sha256() for name, _, _ in slots}
    read_s = computed_s = 0.0
    samples = 0
    batches = iter(loader)
    while True:
        began, computed = time.time(), time.process_time()
        found = next(batches, None)
        read_s += time.time() - began
        computed_s += time.process_time() - computed
        if found is None:
            break
        for name, tensor in found[0].items():
            values = np.array(tensor)
            digests[name].update(values.tobytes())
            if name == slots[0][0]:
                samples += len(values)
    digested = {name: digest.hexdigest() for name, digest in digests.items()}
    print(json.dumps({"seconds": read_s, "cpu_s": computed_s, "samples": samples, "digests": digested}))


def write():
    from paddle.fluid.incubate.data_generator import MultiSlotDataGenerator

    samples = json.load(sys.stdin)

    class Given(MultiSlotDataGenerator):
        def generate_sample(self, _):
            return lambda: iter(samples)

    Given().run_from_memory()


if __name__ == "__main__":
    if sys.argv[1] == "-":
        write()
    else:
        read(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
