"""TorchRec: all processes are workers, and each holds a part of the rows. SGD is part of the backward, and dense
gradients are averaged by all-reduce. Its kernels want rows of a multiple of four numbers: 12 here instead of 10."""

from __future__ import annotations

import torch
import torchrec
from torch import distributed
from torch_model import batches, top
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from work import ROW_RANGE, SLOTS, Meter, Work, my_work

NAMES = [f"slot{slot}" for slot in range(SLOTS)]


class RowWise(EmbeddingBagCollectionSharder):
    """The sharder as it is offers this way of sharing out on CUDA only."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [*super().sharding_types(compute_device_type), ShardingType.ROW_WISE.value]


class Model(torch.nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        table = torchrec.EmbeddingBagConfig(
            name="rows",
            embedding_dim=work.dim,
            num_embeddings=work.vocabulary,
            feature_names=NAMES,
            init_fn=lambda rows: torch.nn.init.uniform_(rows, -ROW_RANGE, ROW_RANGE),
        )
        self.rows = torchrec.EmbeddingBagCollection([table], device=torch.device("meta"))
        apply_optimizer_in_backward(torch.optim.SGD, self.rows.parameters(), {"lr": work.rate})
        self.top = top(work)

    def forward(self, ids: torchrec.KeyedJaggedTensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.rows(ids).values(), numbers], 1))


def sharded(model: Model, workers: int) -> DistributedModelParallel:
    sharders = [RowWise()]
    constraints = {
        "rows": ParameterConstraints(sharding_types=[ShardingType.ROW_WISE.value], compute_kernels=["fused"])
    }
    planner = EmbeddingShardingPlanner(Topology(world_size=workers, compute_device="cpu"), constraints=constraints)
    plan = planner.collective_plan(model, sharders, distributed.group.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def main() -> None:
    work = my_work()
    work.dim += -work.dim % 4
    distributed.init_process_group(
        "gloo", init_method=f"tcp://{work.meeting[0]}", rank=work.index, world_size=work.workers
    )
    model = sharded(Model(work), work.workers)
    dense = [parameter for name, parameter in model.named_parameters() if "top." in name]
    optimizer = torch.optim.SGD(dense, work.rate)
    once = torch.ones(SLOTS * work.batch, dtype=torch.int32)
    made = [
        (torchrec.KeyedJaggedTensor(NAMES, ids.t().flatten(), lengths=once, stride=work.batch), numbers, clicked)
        for ids, numbers, clicked in batches(work)
    ]
    meter = Meter(work)
    for ids, numbers, clicked in meter.batches(made):
        loss = torch.nn.functional.cross_entropy(model(ids, numbers), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.after_step(loss)
    meter.end()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
