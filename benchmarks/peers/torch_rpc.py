"""A parameter server written by hand on torch.distributed.rpc, over TCP: the least that does this work, for SGD.

Ids are shared out to servers by their remainder, dense parameters by their place. "sync" waits for each push to be
applied before it goes on; "async" lets up to four steps' pushes be on their way; "async+prefetch" moreover asks for the
next batch's rows and parameters before it trains this one's. Workers never wait for each other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch.distributed import rpc
from torch_model import batches, top
from work import ROW_RANGE, SLOTS, Meter, Work, my_work

ON_THEIR_WAY = 4
DEADLINE_S = 60


class Shard:
    """What one server holds. Requests are not locked against each other."""

    def __init__(self, work: Work) -> None:
        servers = len(work.servers)
        rows = -(-work.vocabulary // servers)
        self.rate = work.rate
        self.rows = torch.empty(rows, work.dim).uniform_(-ROW_RANGE, ROW_RANGE)
        self.dense = [each.detach() for each in list(top(work).parameters())[work.index :: servers]]


shard: Shard


def pull(places: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return shard.rows[places], [each.clone() for each in shard.dense]


def push(places: torch.Tensor, gradients: torch.Tensor, dense: list[torch.Tensor]) -> None:
    shard.rows.index_add_(0, places, gradients, alpha=-shard.rate)
    for value, gradient in zip(shard.dense, dense, strict=True):
        value.add_(gradient, alpha=-shard.rate)


@dataclass
class Asked:
    """A batch's rows and parameters on their way. ``mine[s]``: which of the distinct ids are server ``s``'s."""

    batch: tuple[torch.Tensor, ...]
    inverse: torch.Tensor
    mine: list[torch.Tensor | slice]
    places: list[torch.Tensor]
    futures: list[torch.futures.Future]


def ask(batch: tuple[torch.Tensor, ...], servers: int) -> Asked:
    ids, inverse = torch.unique(batch[0], return_inverse=True)
    if servers == 1:
        mine: list[torch.Tensor | slice] = [slice(None)]
    else:
        mine = [torch.nonzero(ids % servers == server).squeeze(1) for server in range(servers)]
    places = [ids[each] // servers for each in mine]
    futures = [rpc.rpc_async(f"server{server}", pull, (places[server],)) for server in range(servers)]
    return Asked(batch, inverse, mine, places, futures)


def train(work: Work) -> None:
    servers = len(work.servers)
    model = top(work)
    parameters = list(model.parameters())
    meter = Meter(work)
    stream = meter.batches(batches(work))
    most = 0 if work.mode == "sync" else ON_THEIR_WAY * servers
    ahead = work.mode.endswith("+prefetch")
    pushes: deque[torch.futures.Future] = deque()
    following = next(stream)
    asked = ask(following, servers)
    for following in [*stream, None]:
        replies = [future.wait() for future in asked.futures]
        upcoming = ask(following, servers) if ahead and following else None
        rows = torch.empty(sum(map(len, asked.places)), work.dim)
        with torch.no_grad():
            for server, (values, dense) in enumerate(replies):
                rows[asked.mine[server]] = values
                for parameter, value in zip(parameters[server::servers], dense, strict=True):
                    parameter.copy_(value)
        rows.requires_grad_()
        _, numbers, clicked = asked.batch
        given = torch.cat([rows[asked.inverse].view(-1, SLOTS * work.dim), numbers], 1)
        loss = torch.nn.functional.cross_entropy(model(given), clicked)
        model.zero_grad()
        loss.backward()
        for server in range(servers):
            gradients = [each.grad for each in parameters[server::servers]]
            sent = (asked.places[server], rows.grad[asked.mine[server]], gradients)
            pushes.append(rpc.rpc_async(f"server{server}", push, sent))
        while len(pushes) > most:
            pushes.popleft().wait()
        meter.after_step(loss)
        if following:
            asked = upcoming or ask(following, servers)
    while pushes:
        pushes.popleft().wait()
    meter.end()


def main() -> None:
    work = my_work()
    servers = len(work.servers)
    if work.role == "server":
        global shard  # what the functions that workers call by name work on
        shard = Shard(work)
    rpc.init_rpc(
        f"{work.role}{work.index}",
        rank=work.index + (servers if work.role == "worker" else 0),
        world_size=servers + work.workers,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=2,
            rpc_timeout=DEADLINE_S,
            init_method=f"tcp://{work.meeting[0]}",
            _transports=["uv"],  # TCP: as between machines, where memory is not shared
            _channels=["basic"],
        ),
    )
    if work.role == "worker":
        train(work)
    rpc.shutdown()


if __name__ == "__main__":
    main()
