"""What is trained, as the job has it: the user's parameters and tables as they are described, and their plan."""

from __future__ import annotations

from fleet.nn.handle import RowSource
from fleet.plan.layout import dense_layout
from fleet.plan.plan import make_plan
from fleet.plan.specs import ParamSpec, TableSpec
from fleet.ps.worker.dense_buffers import ParameterWriter
from fleet.ps.worker.describe import Description


class Trained:
    def __init__(self, description: Description, server_num: int) -> None:
        self._server_num = server_num
        self.adopt(description)

    def adopt(self, description: Description) -> None:
        """From now on this is trained, which goes on from what was before."""
        self.description = description
        self.plan = make_plan(description.spec)
        self.layouts = [dense_layout(self.plan, server) for server in range(self._server_num)]
        self.writer = ParameterWriter(description.params, self.layouts)

    def attach(self, source: RowSource, first_table: int = 0) -> None:
        """Tables, from the given one on, have their rows from ``source``."""
        for handle in self.description.handles[first_table:]:
            handle.source = source
            if handle.uploaded:
                # The servers have the rows; no worker keeps a whole table.
                handle.weight.data = handle.weight.data.new_empty(0, handle.dim)

    def parts(self) -> tuple[dict[int, ParamSpec], dict[int, TableSpec]]:
        """The job's dense parameters, by their identities, and its tables, by those of their handles."""
        described = self.description
        return (
            {id(param): spec for param, spec in zip(described.params, described.spec.params, strict=True)},
            {id(handle): spec for handle, spec in zip(described.handles, described.spec.tables, strict=True)},
        )
