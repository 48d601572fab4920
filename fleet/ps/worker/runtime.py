"""A worker of a running job: joins, looks rows up, pushes gradients, takes new values, says goodbye.

Everything here runs on the user's thread; the only other threads are the pulses of the lines to the servers.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from fleet.checkpoint.assembly import Assembly
from fleet.clock import Clock
from fleet.cluster import Assignment
from fleet.environ import Knobs
from fleet.errors import (
    CheckpointError,
    DeadlineError,
    FleetError,
    NonFiniteGradientError,
    ServerLostError,
    StateError,
    UnsupportedError,
)
from fleet.nn.handle import Lookup, TableHandle, Wanted
from fleet.observing.observer import Observer
from fleet.observing.worker import ProfilerRange, WorkerFigures
from fleet.ps.consistency import MODES
from fleet.ps.consistency.gathering import BARRIER
from fleet.ps.describe import Description
from fleet.ps.kernels.rows import noise, packed_ids, partition
from fleet.ps.layout import Slot, dense_layout
from fleet.ps.table.merge import merge
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.narrow import Narrow
from fleet.ps.wire.tensors import WireTensor
from fleet.ps.wire.transport import Network
from fleet.ps.worker.client import Pending, ServerClient
from fleet.ps.worker.communicator import Communicator
from fleet.ps.worker.dense import Flat, ParameterWriter, pack, without_zeros
from fleet.ps.worker.early import EarlyGradients, worthwhile
from fleet.ps.worker.exporting import exported
from fleet.ps.worker.feedback import ErrorFeedback, Sent, as_read, encoded
from fleet.ps.worker.foresight import Foresight
from fleet.ps.worker.geo import Replica
from fleet.ps.worker.merging import Clocks, GradientMerge, Gradients
from fleet.ps.worker.rows import Ahead, RowReader
from fleet.ps.worker.summary import summary
from fleet.strategy import Strategy
from fleet.transpiler.plan import make_plan
from fleet.transpiler.specs import ParamSpec, TableSpec
from fleet.values import UserValue, reduce_over_workers

_log = logging.getLogger("fleet.worker")

Array = np.ndarray[Any, Any]

#: Initial values travel in requests of about this size.
UPLOAD_BYTES = 8 << 20


@dataclass(frozen=True)
class Push:
    """What is sent to all servers as one step of the worker: how many of the user's are in it, the frame for each
    server, and what to do with the answers."""

    step: int
    steps: int
    frames: Sequence[Frame]
    take: Callable[[Sequence[Frame]], object]


class WorkerRuntime:
    def __init__(
        self,
        assignment: Assignment,
        describe: Callable[[], Description],
        strategy: Strategy,
        network: Network,
        knobs: Knobs,
        clock: Clock,
    ) -> None:
        self.assignment = assignment
        self.completed = 0
        #: how many of this worker's steps the servers have
        self.steps = 0
        #: how many it has taken; the difference is on its way, or still to be sent
        self._taken = 0
        self._calls: Counter[str] = Counter()
        self._calls_after = 0
        #: how often the values of each server had been replaced when this worker took them over
        self._loads: list[int] = []
        #: what this worker's pushes have weighed
        #: whether a server says that they have been since
        self._replaced = False
        self._in_doubt: Push | None = None
        self._gathered = 0
        self._gathering_in_doubt: tuple[int, Frame] | None = None
        incarnation = secrets.randbits(63)
        self.figures = WorkerFigures(clock)
        self.clients = [
            ServerClient(endpoint, network, knobs, clock, assignment.index, incarnation, self.told)
            for endpoint in assignment.servers
        ]
        self._rows = RowReader(self.clients, self._version_needed)
        self._describe = describe
        self._narrow = Narrow(strategy.wire_dtype)
        self._adopt(describe())
        self._feedback = ErrorFeedback(self._narrow, self._layouts)
        self._strategy = strategy
        self._knobs = knobs
        self.mode = MODES[strategy.mode]
        self._communication = replace(knobs.communicator, **dict(strategy.communicator))  # type: ignore[arg-type]
        self._merge = self._make_merge()
        self._communicator: Communicator | None = None
        self.replica: Replica | None = None
        self._unsent = 0  #: steps since the replica last agreed with the servers
        self._dense_read: dict[int, int] = {}
        self._foresight: Foresight | None = None
        self._early: EarlyGradients | None = None
        self.stopped = False
        try:
            self._observer = Observer(str(assignment), "worker", self.told, knobs)
        except BaseException:
            for client in self.clients:
                client.close()
            raise

    def _adopt(self, description: Description) -> None:
        self._description = description
        self.plan = make_plan(description.spec)
        self._rows.adopt(self.plan.spec.tables, description.handles)
        self._layouts = [dense_layout(self.plan, server) for server in range(self.assignment.server_num)]
        self._writer = ParameterWriter(description.params, self._layouts)

    def _make_merge(self) -> GradientMerge:
        """What merges on the user's thread: only the half-asynchronous mode does, over several steps."""
        steps = self._communication.max_merge_var_num if self.mode.name == "half_async" else 1
        return GradientMerge(self._description, steps, self._communication.is_sgd_optimizer)

    def _make_early(self) -> EarlyGradients | None:
        """What lets gradients leave ahead of their push, where each step is one push, of gradients as they are."""
        is_one_push = self._communicator is None and not self.mode.adds and self._merge.steps == 1
        if not (is_one_push and self._narrow.is_plain and worthwhile(self._description.params)):
            return None
        return EarlyGradients(self._description.params, self._send_early, str(self.assignment.index))

    # ---------------------------------------------------------------- joining and leaving

    def start(self) -> None:
        """Say hello to every server, bring the initial values if that is this worker's part, and take them over."""
        try:
            replies = [self._hello(server) for server in range(len(self.clients))]
            versions = [reply.version for reply in replies]
            # Servers may be a round apart where this worker starts again, while others train.
            is_mixed = max(versions) > 0 and len({reply.initialized for reply in replies}) > 1
            if self.mode.lockstep and (is_mixed or max(versions) - min(versions) > 1):
                raise ServerLostError(
                    "the servers are not at the same step: one was restarted without its state",
                    got=", ".join(f"{c.endpoint} at {r.version}" for c, r in zip(self.clients, replies, strict=True)),
                    todo="Start the whole job again, from its last checkpoint if there is one.",
                )
            if len({reply.about for reply in replies}) > 1:
                raise CheckpointError(
                    "the servers do not start from the same checkpoint",
                    got=", ".join(
                        f"{c.endpoint} from {r.about or 'none'}" for c, r in zip(self.clients, replies, strict=True)
                    ),
                    todo="Give every server the same directory, and let no other job save there meanwhile.",
                )
            # Where this worker starts again, some servers may have its last step and some not: it is taken once more.
            self.completed = min(reply.delivered for reply in replies)
            self.steps = self._taken = min(reply.steps for reply in replies)
            self._gathered = replies[0].gathered
            self._loads = [reply.loads for reply in replies]
            if self.assignment.index == 0:
                for server, reply in enumerate(replies):
                    if not reply.initialized:
                        self._upload(server)
            self._begin_from(self._take_dense(self._pull_dense()))
        except BaseException as error:
            # Servers that let this worker in would otherwise wait for it until their deadline.
            self.end(f"it could not start: {type(error).__name__}: {error}")
            raise
        self._attach(self._description.handles)
        if self.mode.name == "async":
            merge = GradientMerge(self._description, 0, self._communication.is_sgd_optimizer)
            name = str(self.assignment.index)
            self._communicator = Communicator(self._communication, merge, self._push_behind, self._fetch_behind, name)
        self._early = self._make_early()
        if self._strategy.print_log and self.assignment.index == 0:
            print(self.plan.table())

    def _begin_from(self, values: list[Flat]) -> None:
        """Train on these values of the servers from now on."""
        if self.mode.adds:
            self.replica = Replica(self._description, self._layouts, self._writer, self.assignment.worker_num, values)
            if self.steps:
                self._restore(self.replica)

    def begin_anew(self) -> None:
        """The servers' values have been replaced by others: take them over, and forget all that was known of theirs."""
        self.flush()
        replies = self._pull_dense("values that were loaded")
        self.steps = self._taken = replies[0].message.steps
        self._loads, self._replaced = [reply.message.loads for reply in replies], False
        self._rows.replaced(sum(self._loads))
        self._feedback = ErrorFeedback(self._narrow, self._layouts)
        self._begin_from(self._take_dense(replies))

    def _notice(self, replies: Sequence[Frame]) -> None:
        """Replies from the first servers on."""
        loads = [reply.message.loads for reply in replies]
        self._replaced = self._replaced or loads != self._loads[: len(loads)]

    @property
    def taken(self) -> int:
        """How many steps this worker has taken, those among them that the servers do not have yet."""
        return self._taken

    def name_of_call(self, call: str) -> str:
        """A name for a call that is carried out once for the job: the same on every worker that makes it."""
        if self.mode.lockstep and self._calls_after != self.completed:
            self._calls.clear()
            self._calls_after = self.completed
        self._calls[call] += 1
        after = f" after step {self.completed}" if self.mode.lockstep else ""
        return f"{call}{after}, call {self._calls[call]}"

    def extend(self) -> None:
        """Tell the servers of parameters that joined the optimizers. Every worker does, after the same step."""
        if not self.mode.lockstep:
            raise UnsupportedError(
                f"parameters cannot join a running job in the mode {self.mode.name!r}, whose workers share no step",
                todo="Give all parameters to the optimizer before fleet.init_worker().",
            )
        self.settle("add_param_group()")
        known = self._description
        description = known.continued_by(self._describe())
        spec, fingerprint = description.spec.to_json(), make_plan(description.spec).fingerprint
        extend = pb.Extend(spec=spec, fingerprint=fingerprint, options=description.options())
        replies = self.ask_all(
            lambda _, client: Frame(client.request(self.completed, extend=extend)),
            f"further parameters after step {self.completed}",
        )
        self._adopt(description)
        self._feedback = self._feedback.grown(self._layouts)
        self._merge = self._make_merge()
        if self._early is not None:
            self._early.close()
        self._early = self._make_early()
        if self.assignment.index == 0:
            for server, reply in enumerate(replies):
                if not reply.message.initialized:
                    self._upload(server, len(known.params), len(known.handles))
        self._take_dense(self._pull_dense())
        self._attach(description.handles[len(known.handles) :])

    def _attach(self, handles: Sequence[TableHandle]) -> None:
        for handle in handles:
            handle.source = self
            if handle.uploaded:
                # The servers have the rows; no worker keeps a whole table.
                handle.weight.data = handle.weight.data.new_empty(0, handle.dim)

    def _hello(self, server: int) -> pb.Reply:
        client = self.clients[server]
        hello = pb.Hello(
            spec=self.plan.spec.to_json(),
            fingerprint=self.plan.fingerprint,
            server=server,
            endpoints=[str(endpoint) for endpoint in self.assignment.servers],
            seed=torch.initial_seed() & (1 << 64) - 1,
            options=self._description.options(),
            label=f"{socket.gethostname()}:{os.getpid()}",
            job_id=self._knobs.job_id,
        )
        reply: pb.Reply = client.hello(Frame(client.request(0, hello=hello)), wait=self._strategy.wait_port).message
        client.start_pulse()
        return reply

    def stop(self) -> None:
        """Say goodbye. A second time does nothing, nor does it once the user knows that the job is over: what ended it
        was raised then, and must not be hidden behind a second error from somebody's ``finally``."""
        if self.stopped:
            return
        if any(client.reported for client in self.clients):
            self.abort("its job had already failed, and its script went on to stop_worker()")
            return
        try:
            self.settle("stop_worker()")
            self._flush_or_abort()
            self.ask_all(lambda _, client: Frame(client.request(self.completed, bye=pb.Bye())), "goodbye")
        except FleetError:
            raise
        except BaseException as error:
            # Without its goodbye the others would wait for this worker until their deadline.
            self.abort(f"it was interrupted before its goodbye: {type(error).__name__}")
            raise
        finally:
            self.close()

    def abort(self, reason: str) -> None:
        """Tell the servers, as far as they can be reached, that this worker failed and the job with it."""
        self._part(abort=pb.Abort(reason=reason[-4000:]))

    def end(self, reason: str) -> None:
        """This worker cannot go on, by no fault of the job's: an elastic one goes on without it."""
        if self._strategy.elastic:
            self._part(bye=pb.Bye())
        else:
            self.abort(reason)

    def _part(self, **word: object) -> None:
        if self.stopped:
            return
        for client in self.clients:
            client.farewell(Frame(client.request(self.completed, **word)))
        self.close()

    def close(self) -> None:
        self.stopped = True
        if self._foresight is not None:
            self._foresight.remove()
        if self._communicator is not None:
            self._communicator.end()
        for client in self.clients:
            client.close()
        if self._early is not None:
            self._early.close()
        if self._communicator is not None:
            self._communicator.join()
        self._observer.close()

    # ---------------------------------------------------------------- what is trained

    def parts(self) -> tuple[dict[int, ParamSpec], dict[int, TableSpec]]:
        """The job's dense parameters, by their identities, and its tables, by those of their handles."""
        described = self._description
        return (
            {id(param): spec for param, spec in zip(described.params, described.spec.params, strict=True)},
            {id(handle): spec for handle, spec in zip(described.handles, described.spec.tables, strict=True)},
        )

    # ---------------------------------------------------------------- initial values

    def _upload(self, server: int, first_param: int = 0, first_table: int = 0) -> None:
        """Send one server the values of its blocks and rows, from the given parameter and table on."""
        client = self.clients[server]
        for frame in self._initial_values(server, first_param, first_table):
            client.call(Frame(client.request(0, upload=frame.message), frame.tensors), "initial values")
        client.call(Frame(client.request(0, ready=pb.Ready())), "initial values")

    def replace(self, dense: Mapping[str, torch.Tensor], rows: Mapping[str, tuple[Array, torch.Tensor]]) -> None:
        """Give the servers other values of some parameters and rows, by name; rows come with their ids."""
        params = {index: dense[spec.name] for index, spec in enumerate(self.plan.spec.params) if spec.name in dense}
        for server, client in enumerate(self.clients):
            blocks = [slot for slot in self._layouts[server].slots if slot.block.param in params]
            tables = (
                frame
                for index, spec in enumerate(self.plan.spec.tables)
                if spec.name in rows
                for frame in self._rows_of(server, index, *rows[spec.name])
            )
            for frame in chain(self._blocks_of(blocks, params), tables):
                frame.message.anew = True
                client.call(Frame(client.request(self.completed, upload=frame.message), frame.tensors), "other values")

    def _initial_values(self, server: int, first_param: int, first_table: int) -> Iterator[Frame]:
        slots = [slot for slot in self._layouts[server].slots if slot.block.param >= first_param]
        yield from self._blocks_of(slots, dict(enumerate(self._description.params)))
        for index, handle in enumerate(self._description.handles):
            if index >= first_table and handle.uploaded:
                weight = handle.weight.detach()
                if len(weight) != handle.num_embeddings:
                    raise UnsupportedError(
                        f"the rows of {handle.name!r} went to an earlier job's servers and are gone from this model",
                        expected=f"{handle.num_embeddings} rows to start from",
                        got=len(weight),
                        todo="Build the model anew, or load a checkpoint with fleet.init_server(model_dir).",
                    )
                yield from self._rows_of(server, index, np.arange(len(weight)), weight)

    def _blocks_of(self, slots: Sequence[Slot], params: Mapping[int, torch.Tensor]) -> Iterator[Frame]:
        """Uploads of these blocks, with their values from ``params``."""
        upload, tensors, size = pb.Upload(), [], 0
        for slot in slots:
            values = params[slot.block.param].detach().reshape(-1)
            piece = WireTensor.of(values[slot.block.offset : slot.block.offset + slot.block.numel])
            upload.blocks.append(slot.position)
            tensors.append(piece)
            size += piece.array.nbytes
            if size >= UPLOAD_BYTES:
                yield Frame(upload, tensors)
                upload, tensors, size = pb.Upload(), [], 0
        yield Frame(upload, tensors)

    def _rows_of(self, server: int, index: int, ids: Array, rows: torch.Tensor) -> Iterator[Frame]:
        """Uploads of those of a table's rows that belong to a server."""
        rows_a_piece = max(1, UPLOAD_BYTES // max(1, rows.element_size() * rows.shape[1]))
        for start in range(0, len(ids), rows_a_piece):
            some = ids[start : start + rows_a_piece]
            here = partition(some, len(self.clients))[server]
            values = rows[torch.from_numpy(start + here).to(rows.device)]
            yield Frame(pb.Upload(rows=True, table=index), [WireTensor.of(some[here]), WireTensor.of(values)])

    def _pull_dense(self, what: str = "initial parameters", at_once: int | None = None) -> list[Frame]:
        version = self._version_needed()
        pull = pb.Pull(version=version, dense=True)
        return self.ask_all(lambda _, client: Frame(client.request(self.completed, pull=pull)), what, at_once)

    def _fetch_behind(self) -> list[Frame]:
        """Current parameters, for the communicator's thread."""
        return self._pull_dense(f"parameters after step {self.completed}", self._communication.thread_pool_size)

    # ---------------------------------------------------------------- a step

    def step(self) -> None:
        """Push what this worker's gradients are now, or keep them for a push that is due later; return with the values
        that the mode lets it go on with."""
        self.settle("step()")
        if self._description.has_newcomers():
            self.extend()
        options = self._description.options()
        dense = self._dense_gradients()
        ahead = 0
        if self._early is not None:
            ahead, sent = self._early.sent([param.grad for param in self._description.params])
            dense = [None if index in sent else grad for index, grad in enumerate(dense)]
        gradients = Gradients(dense, self._row_gradients(), self._when_read(), options, ahead=ahead)
        self._taken += 1
        if self._communicator is not None:
            with self.figures.push:
                self._communicator.put(gradients.copied())
            fresh = self._communicator.fresh()
            if fresh is not None:
                self._take_dense(fresh)
            if self._replaced:
                self.begin_anew()
            return
        due = self._merge.add(gradients)
        if due is not None:
            self._push(due)

    def during_backward(self) -> AbstractContextManager[None]:
        """What surrounds a backward that the step follows at once: its gradients may leave."""
        return nullcontext() if self._early is None else self._early.leaving()

    def _send_early(self, attempt: int, param: int, grad: torch.Tensor) -> bool:
        asked = []
        for client, layout in zip(self.clients, self._layouts, strict=True):
            cuts = [cut for each in layout.cuts.values() for cut in each if cut[1] == param]
            part = pb.Part(attempt=attempt, blocks=[position for position, *_ in cuts])
            tensors = [WireTensor.of(grad[start:stop]) for *_, start, stop in cuts]
            if cuts:
                frame = Frame(client.request(self.completed + 1, part=part), tensors)
                asked.append(client.start(frame, f"a part of step {self.completed + 1}"))
        for pending in asked:
            pending.send()
        replies = [pending.result() for pending in asked]
        return all(reply.message.granted for reply in replies)

    @property
    def trains_here(self) -> bool:
        return self.mode.adds

    def step_here(self, update: Callable[[], None]) -> None:
        """Take a step on this worker's own values; from time to time agree with the servers."""
        self.settle("step()")
        assert self.replica is not None
        if self._description.has_newcomers():
            self.extend()
        if self._check_finite:
            self._dense_gradients()
        self.replica.train(update, self._row_gradients(), self._fetch_to_train)
        self._taken += 1
        self._unsent += 1
        if self._unsent >= self._strategy.update_frequency:
            self._agree(self.replica)

    def flush(self) -> None:
        """Have everything applied that this worker has computed."""
        if self.replica is not None and self._unsent:
            self._agree(self.replica)
        if self._communicator is not None:
            self._communicator.flush()
        rest = self._merge.rest()
        if rest is not None:
            self._push(rest)

    def _flush_or_abort(self) -> None:
        try:
            self.flush()
        except FleetError as error:
            # Gradients are lost: the others must not take this for a goodbye, nor wait for one.
            self.abort(f"what it still had to send did not arrive: {error}")
            raise

    def _push(self, gradients: Gradients) -> None:
        dense, arrived = self._feedback.narrowed([pack(layout, gradients.dense) for layout in self._layouts])

        def take(replies: Sequence[Frame]) -> None:
            arrived()
            self._take_dense(replies)

        frames = self._push_frames(gradients, dense, self._encoded_rows(gradients.rows))
        self._finish(Push(self.completed + 1, gradients.steps, frames, take))

    def _push_behind(self, gradients: Gradients, bring: bool) -> list[Frame]:
        """A push from the communicator's thread, which takes no new values itself."""
        dense, arrived = self._feedback.narrowed([pack(layout, gradients.dense) for layout in self._layouts])
        frames = self._push_frames(gradients, dense, self._encoded_rows(gradients.rows), quiet=not bring)
        what = f"push of step {self.completed + 1}"
        replies = self.ask_all(lambda server, _: frames[server], what, self._communication.thread_pool_size)
        arrived()
        self._notice(replies)  # long before values are fetched again, perhaps
        self.completed, self.steps = self.completed + 1, self.steps + gradients.steps
        return replies

    def _agree(self, replica: Replica) -> None:
        """Tell the servers how far this worker has come, and take in what the others have done."""
        change = replica.change()
        packed = [without_zeros(layout, flat) for layout, flat in zip(self._layouts, change.dense, strict=True)]
        dense = [(present, encoded(self._narrow, flat)) for present, flat in packed]
        rows = self._encoded_rows(change.rows)
        told = as_read(self._narrow, self._layouts, change, dense, rows)
        clocks = Clocks(self._dense_read, self._rows.read_at)
        what = Gradients((), change.rows, clocks, self._description.options(), self._unsent)

        def take(replies: Sequence[Frame]) -> None:
            replica.agree(told, self._dense_values(replies), list(self._changed_rows(replies)))
            self._unsent = 0

        self._finish(Push(self.completed + 1, self._unsent, self._push_frames(what, dense, rows), take))

    def _push_frames(
        self,
        gradients: Gradients,
        dense: Sequence[Sent],
        rows: Mapping[int, Sequence[WireTensor]],
        *,
        quiet: bool = False,
    ) -> list[Frame]:
        """The push of the next step, with what travels of the blocks of every server and of the rows of every table."""
        by_table = {index: self._by_server(tensors) for index, tensors in rows.items()}

        def push(server: int, client: ServerClient) -> Frame:
            here = {index: parts[server] for index, parts in by_table.items() if parts[server][0].array.size}
            present, tensors = dense[server]
            message = pb.Push(
                options=gradients.options,
                present=present,
                row_tables=list(here),
                used_tables=sorted(rows),
                quiet=quiet,
                steps=gradients.steps,
                read_at=gradients.read.dense[server],
                attempt=gradients.ahead,
                rows_read_at=[gradients.read.rows[server, index] for index in here],
            )
            return Frame(client.request(self.completed + 1, push=message), [*tensors, *chain(*here.values())])

        return [push(server, client) for server, client in enumerate(self.clients)]

    def _finish(self, push: Push) -> None:
        """Bring one push to its end. Interrupted (Ctrl-C in a notebook) it stays in doubt: some servers may have it."""
        self._in_doubt = push
        try:
            with self.figures.push:
                replies = self.ask_all(lambda server, _: push.frames[server], f"push of step {push.step}")
        except DeadlineError:
            raise  # no answer: still in doubt
        except FleetError:
            self._in_doubt = None
            raise
        self.completed, self.steps, self._in_doubt = push.step, self.steps + push.steps, None
        push.take(replies)
        if self._replaced:
            self.begin_anew()

    def settle(self, call: str) -> None:
        """Before anything else happens: the same frames again, which no server applies twice."""
        self._refuse_stopped(call)
        if self._in_doubt is not None:
            self._finish(self._in_doubt)
        if self._gathering_in_doubt is not None:
            self._finish_gathering(*self._gathering_in_doubt)

    def _dense_gradients(self) -> list[torch.Tensor | None]:
        """The flat gradient of every parameter, on the CPU."""
        flat: list[torch.Tensor | None] = []
        check_finite = self._check_finite
        for index, param in enumerate(self._description.params):
            grad = param.grad
            if grad is None:
                flat.append(None)
                continue
            if grad.is_sparse:
                raise UnsupportedError(
                    f"the gradient of {self.plan.spec.params[index].name!r} is sparse",
                    todo="Hand the model to distributed_optimizer(…, model=…), so that its sparse tables go remote.",
                )
            if check_finite and not bool(torch.isfinite(grad).all()):
                raise NonFiniteGradientError(
                    f"the gradient of {self.plan.spec.params[index].name!r} holds NaN or infinity",
                    where=f"worker {self.assignment.index}, step {self._taken + 1}",
                )
            is_flat = grad.dim() == 1 and grad.is_cpu and not grad.requires_grad
            flat.append(grad if is_flat else grad.detach().reshape(-1).to("cpu"))
        return flat

    def _when_read(self) -> Clocks:
        """When the values were read that this step's gradients were computed on; rows are read anew in the next."""
        return Clocks(self._dense_read, self._rows.take_clocks())

    def _row_gradients(self) -> dict[int, tuple[Array, Array]]:
        """For every table that was used, distinct ids and the gradients of their rows."""
        rows: dict[int, tuple[Array, Array]] = {}
        for index, handle in enumerate(self._description.handles):
            collected = [(ids.numpy(), grads.numpy()) for ids, grads in handle.collected()]
            if not collected:
                continue
            ids, grads = collected[0] if len(collected) == 1 else merge(collected, 1)
            if self._check_finite and not np.isfinite(grads).all():
                raise NonFiniteGradientError(
                    f"the gradient of a row of {handle.name!r} holds NaN or infinity",
                    where=f"worker {self.assignment.index}, step {self._taken + 1}",
                    got=f"id {ids[~np.isfinite(grads).all(axis=1)][0]}",
                )
            rows[index] = (ids, grads)
        return rows

    def _encoded_rows(self, rows: Mapping[int, tuple[Array, Array]]) -> dict[int, list[WireTensor]]:
        """Of every table its ids, and what travels of their gradients."""
        sent = {}
        for index, (ids, grads) in rows.items():
            chance = None
            if self._narrow.is_whole:
                width = grads.shape[1]
                chance = torch.from_numpy(noise(packed_ids(ids), width, self.assignment.index, self.completed + 1))
            sent[index] = [WireTensor.of(ids), *self._narrow.encode(torch.from_numpy(grads), chance)]
        return sent

    def _by_server(self, tensors: Sequence[WireTensor]) -> list[Sequence[WireTensor]]:
        """For every server its part of what travels of some rows; ids come first."""
        if len(self.clients) == 1:
            return [tensors]
        parts = partition(tensors[0].array, len(self.clients))
        return [[replace(tensor, array=tensor.array[part]) for tensor in tensors] for part in parts]

    @property
    def _check_finite(self) -> bool:
        return self._strategy.check_finite or self._knobs.check_finite

    def _dense_values(self, replies: Sequence[Frame]) -> list[Flat]:
        """The values of every server's blocks, as it sent them."""
        self._notice(replies)
        self._dense_read = {server: reply.message.clock for server, reply in enumerate(replies)}
        return [
            # In GEO rows follow the dense values.
            dict(zip(layout.dtypes, (tensor.torch() for tensor in reply.tensors), strict=False))
            for layout, reply in zip(self._layouts, replies, strict=True)
        ]

    def _take_dense(self, replies: Sequence[Frame]) -> list[Flat]:
        """Write the servers' values into the user's parameters, in place."""
        values = self._dense_values(replies)
        self._writer.write(values)
        return values

    # ---------------------------------------------------------------- rows

    def watch(self, model: torch.nn.Module) -> None:
        """Learn what the model looks up, so that it can be asked for at once."""

        def fetch(wanted: Sequence[Wanted]) -> None:
            self.settle("a look-up")
            with self.figures.pull:
                self._rows.foresee(wanted, self.completed, self.replica)

        if self._description.handles:
            self._foresight = Foresight(model, fetch, self._rows.forget)

    def unwatched(self) -> dict[int, object]:
        """For a copy of the model that stands in no job: by identity, what it has in the place of what watches."""
        blind = Foresight(torch.nn.Module(), lambda _: None, lambda: None)
        return {} if self._foresight is None else {id(self._foresight): blind}

    def lookup(self, wanted: Sequence[Wanted]) -> list[Lookup]:
        self.settle("a look-up")
        if self._foresight is not None:
            self._foresight.saw(wanted)
        with self.figures.pull:
            return self._rows.lookup(wanted, self.completed, self.replica)

    def _fetch_to_train(self, index: int, ids: Array) -> Array:
        with self.figures.pull:
            return self._rows.fetch(index, ids, self.completed, training=True)

    def fetch_ahead(self, wanted: Sequence[Wanted], steps: int) -> dict[int, Ahead]:
        """Begin to fetch what a forward will ask for after so many more ``steps``."""
        self.settle("prefetch()")
        with self.figures.pull:
            return self._rows.fetch_ahead(wanted, self.completed, steps, self.replica)

    def present(self, ahead: Mapping[int, Ahead]) -> None:
        """From now on forwards may use what was fetched ahead."""
        self._rows.present(ahead)

    def give_up(self, ahead: Mapping[int, Ahead]) -> None:
        """Nobody will use what was fetched ahead."""
        self._rows.give_up(ahead)

    def _changed_rows(self, replies: Sequence[Frame]) -> Iterator[tuple[int, Array, Array]]:
        """Table, ids and values of the rows that the servers say others have changed."""
        for server, (layout, reply) in enumerate(zip(self._layouts, replies, strict=True)):
            tensors = iter(reply.tensors[len(layout.dtypes) :])
            for index in reply.message.changed:
                yield index, next(tensors).numpy(), next(tensors).numpy()
            self._rows.read_at.update(
                {(server, index): clock for index, clock in enumerate(reply.message.table_clocks)}
            )

    def _restore(self, replica: Replica) -> None:
        """Take over the optimizer state that the job's checkpoint has for the dense parameters."""
        assembly = Assembly({spec.name: spec.numel for spec in self.plan.spec.params}, "what the servers restored")
        for client in self.clients:
            for piece in exported(client, self.completed):
                if "dense" not in piece.about:
                    break
                assembly.add(piece.about["dense"], [torch.as_tensor(each) for each in piece.tensors.values()])
        for spec in self.plan.spec.params:
            replica.restore(spec.name, *assembly.whole(spec.name))

    # ---------------------------------------------------------------- among workers

    def barrier(self) -> None:
        """Return when every worker has come here."""
        self.settle("barrier_worker()")
        self.flush()  # what this worker computed before the barrier is applied when the others have passed it
        self._gather("barrier_worker()", BARRIER)

    def all_reduce(self, call: str, value: object, output: object, op: object) -> Any:
        """``value`` of all workers made one, in the kind it came in; written into ``output`` if that is given."""

        def meet(op: str, mine: UserValue) -> WireTensor:
            tensor = self._gather(call, op, mine.dtype, mine.wire())
            assert tensor is not None
            return tensor

        return reduce_over_workers(call, value, output, op, meet)

    def _gather(self, call: str, op: str, dtype: str = "", mine: WireTensor | None = None) -> WireTensor | None:
        self.settle(call)
        client, number = self.clients[0], self._gathered + 1
        message = pb.Gather(number=number, op=op, dtype=dtype)
        frame = Frame(client.request(self.completed, gather=message), [] if mine is None else [mine])
        return self._finish_gathering(number, frame)

    def _finish_gathering(self, number: int, frame: Frame) -> WireTensor | None:
        """Bring one gathering to its end. Interrupted it stays in doubt, as a step does: the server may have it."""
        self._gathering_in_doubt = (number, frame)
        op = frame.message.gather.op
        try:
            with self.figures.meet:
                reply = self.clients[0].call(
                    frame, f"barrier {number}" if op == BARRIER else f"all_reduce {number} ({op})"
                )
        except DeadlineError:
            raise  # no answer: still in doubt
        except FleetError:
            self._gathered, self._gathering_in_doubt = number, None
            raise
        self._gathered, self._gathering_in_doubt = number, None
        self._notice([reply])
        if self._replaced:
            self.begin_anew()
        return reply.tensors[0] if reply.tensors else None

    # ---------------------------------------------------------------- what happened

    def summary(self) -> dict[str, Any]:
        self.settle("summary()")
        replies = self.ask_all(lambda _, client: Frame(client.request(self.completed, survey=pb.Survey())), "summary")
        surveys = [reply.message.about for reply in replies]
        return summary(self.assignment.index, self.mode.name, self.steps, surveys, self.told())

    def told(self) -> dict[str, float]:
        """What this worker tells of itself, from any thread."""
        return self.figures.read(
            steps=self._taken,
            queue=0 if self._communicator is None else self._communicator.queued,
            sent_bytes=sum(client.sent_bytes for client in self.clients),
            received_bytes=sum(client.received_bytes for client in self.clients),
        )

    # ---------------------------------------------------------------- shorthands

    def ask_all(self, make: Callable[[int, ServerClient], Frame], what: str, at_once: int | None = None) -> list[Frame]:
        """One request to every server, all under way at once, or so many."""
        failure: FleetError | None = None
        replies = []
        numbered = list(enumerate(self.clients))
        for start in range(0, len(numbered), at_once or len(numbered)):
            some = numbered[start : start + (at_once or len(numbered))]
            pendings: list[Pending] = []
            try:
                for server, client in some:
                    pendings.append(client.start(make(server, client), what))
                for pending in pendings:
                    pending.send()
                with ProfilerRange("fleet.wait"):
                    for pending in pendings:
                        try:
                            replies.append(pending.result())
                        except FleetError as error:  # the others still get their answer
                            failure = failure or error
            except BaseException:  # interrupted: what nobody reads any more must hold nothing up
                for pending in pendings:
                    pending.abandon()
                raise
        if failure is not None:
            raise failure
        return replies

    def _version_needed(self, more_steps: int = 0) -> int:
        """The version that this worker needs to go on, now or when it has completed some more steps."""
        return self.mode.version_needed(self.completed + more_steps, self._strategy.staleness)

    def _refuse_stopped(self, what: str) -> None:
        if self.stopped:
            raise StateError(f"{what} came after the job ended for this worker (fleet.stop_worker)")
