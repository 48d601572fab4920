"""Plans which block of which parameter lives on which server, and computes the plan's fingerprint.

The plan is a pure function of the ``JobSpec``. Every process computes it for itself and proves with the fingerprint, in
its first hello, that it computed the same one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

from fleet.plan.dispatch import DISPATCHERS
from fleet.plan.slicing import block_sizes
from fleet.plan.specs import DTYPES, JobSpec, ParamSpec

#: What workers, servers and followers say to each other. It goes into the fingerprint, so that those of releases that
#: say it otherwise do not go on with each other.
PROTOCOL = 5


@dataclass(frozen=True)
class Block:
    """Names a contiguous range of a parameter's elements; ``param`` indexes ``JobSpec.params``."""

    param: int
    index: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Plan:
    """Holds a spec together with the server of every block (``servers[i]`` serves ``blocks[i]``).

    ``placement`` stands for the cuts and the servers alone: by it, anyone who keeps a server's blocks can tell that
    they are still that server's.
    """

    spec: JobSpec
    blocks: tuple[Block, ...]
    servers: tuple[int, ...]
    placement: str = field(repr=False)
    fingerprint: str = field(repr=False)

    @cached_property
    def by_server(self) -> tuple[tuple[Block, ...], ...]:
        """Return the blocks of each server, in plan order."""
        lists: list[list[Block]] = [[] for _ in range(self.spec.settings.server_num)]
        for block, server in zip(self.blocks, self.servers, strict=True):
            lists[server].append(block)
        return tuple(tuple(blocks) for blocks in lists)

    def param_of(self, block: Block) -> ParamSpec:
        return self.spec.params[block.param]

    def block_name(self, block: Block) -> str:
        return _name(self.param_of(block), block)

    def dense_bytes(self, server: int) -> int:
        """Return how many bytes the dense blocks of one server have."""
        return sum(block.numel * DTYPES[self.param_of(block).dtype] for block in self.by_server[server])

    def table(self) -> str:
        """Return the plan as text: parameter, block, server, elements."""
        rows = [("parameter", "block", "server", "elements")]
        for block, server in zip(self.blocks, self.servers, strict=True):
            rows.append((self.param_of(block).name, str(block.index), str(server), str(block.numel)))
        if self.spec.settings.has_dense_on_workers:
            rows += [(param.name, "whole", "workers", str(param.numel)) for param in self.spec.params]
        rows += [(t.name, "rows", "by id", f"{t.num_embeddings or '?'} x {t.dim}") for t in self.spec.tables]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)


def make_plan(spec: JobSpec) -> Plan:
    """Cut every parameter and place every block. Where dense parameters stay on the workers there are none."""
    settings = spec.settings
    blocks: list[Block] = []
    for position, param in enumerate(() if settings.has_dense_on_workers else spec.params):
        cut = settings.slice_var_up and spec.groups[param.group].sliceable
        offset = 0
        sizes = block_sizes(param.shape, settings.server_num if cut else 1, settings.min_block_size)
        for index, numel in enumerate(sizes):
            blocks.append(Block(position, index, offset, numel))
            offset += numel
    dispatcher = DISPATCHERS[settings.split_method](settings.server_num)
    servers = tuple(dispatcher.dispatch([_name(spec.params[block.param], block) for block in blocks]))
    placement = repr(([block.numel for block in blocks], servers)).encode()
    fingerprint = hashlib.sha256(spec.common.to_json().encode() + placement + b"protocol %d" % PROTOCOL)
    return Plan(spec, tuple(blocks), servers, hashlib.sha256(placement).hexdigest(), fingerprint.hexdigest())


def _name(param: ParamSpec, block: Block) -> str:
    """Return ``weight`` for a whole parameter, ``weight.block1`` for the second of several blocks."""
    return param.name if block.numel == param.numel else f"{param.name}.block{block.index}"
