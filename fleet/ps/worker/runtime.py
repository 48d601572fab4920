"""A worker of a running job, put together: what the user's calls come to, and the order in which its parts are asked.

Everything here runs on the user's threads, which take turns (``Callers``). What else may run are the pulses of the
lines to the servers, and the threads that push and fetch behind an asynchronous step or send gradients ahead of a push.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from fleet.base.clock import Clock
from fleet.base.cluster import Assignment
from fleet.base.settings import Knobs
from fleet.base.turns import Callers
from fleet.checkpoint.resume_choice import Resumed
from fleet.errors import FleetError, IdentityError, StateError, UnsupportedError
from fleet.nn.handle import Lookup, Wanted
from fleet.numeric.reduction import BARRIER
from fleet.numeric.tensors import WireTensor
from fleet.numeric.values import UserValue, reduce_over_workers
from fleet.plan.plan import make_plan
from fleet.ps.consistency import policy_of
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.transport import Network
from fleet.ps.worker.barrier import Meeting
from fleet.ps.worker.connection import ServerClient
from fleet.ps.worker.connections import Lines
from fleet.ps.worker.context import Floor
from fleet.ps.worker.delivery import Delivering
from fleet.ps.worker.describe import Description
from fleet.ps.worker.fetch import Fetching
from fleet.ps.worker.forked_lookup import ForkedReader
from fleet.ps.worker.geo_exchange import Agreeing
from fleet.ps.worker.geo_training import Replica
from fleet.ps.worker.gradients import UserGradients
from fleet.ps.worker.handshake import check_loads, join
from fleet.ps.worker.lookup_prediction import Foresight
from fleet.ps.worker.lookups import Ahead, RowReader
from fleet.ps.worker.object_states import OwnStates
from fleet.ps.worker.progress import Progress
from fleet.ps.worker.push import Pushing
from fleet.ps.worker.step import Stepping
from fleet.ps.worker.summary import summary
from fleet.ps.worker.trained_model import Trained
from fleet.ps.worker.upload import initialize
from fleet.strategy.parameter_server import Strategy
from fleet.telemetry.cause import claim
from fleet.telemetry.observer import Observer
from fleet.telemetry.worker_figures import WorkerFigures


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
        """``describe`` tells what the user's optimizers and model are now."""
        self._describe = describe
        self.callers = Callers()
        self.figures = WorkerFigures(clock)
        policy = policy_of(strategy, strategy.update_frequency)
        progress = Progress(policy)
        incarnation = secrets.randbits(63)
        clients = [
            ServerClient(endpoint, network, knobs, clock, assignment.index, incarnation, self.told, place == 0)
            for place, endpoint in enumerate(assignment.servers)
        ]
        lines = Lines(clients, progress)
        rows = RowReader(clients, progress.version_needed)
        trained = Trained(describe(), assignment.server_num)
        fetching = Fetching(lines, progress, trained)
        own = OwnStates(clients[0], progress, knobs.security.max_message_bytes)
        self.floor = floor = Floor(
            assignment, strategy, knobs, policy, self.figures, progress, lines, trained, fetching, rows, own
        )
        rows.adopt(trained.plan.spec.tables, trained.description.handles)
        gradients = UserGradients(floor)
        self._pushing = Pushing(floor)
        self._delivering = Delivering(floor, self.begin_anew)
        self._stepping = Stepping(floor, gradients, self._pushing, self._delivering, self.begin_anew)
        self._agreeing = Agreeing(floor, gradients, self._pushing, self._delivering)
        self._meeting = Meeting(floor, self.callers, self.begin_anew)
        self._foresight: Foresight | None = None
        self._forked: ForkedReader | None = None
        self.stopped = False
        try:
            self._observer = Observer(str(assignment), "worker", self.told, knobs)
        except BaseException:
            lines.close()
            raise

    # ---------------------------------------------------------------- joining

    def start(self, resumed: Resumed | None = None) -> None:
        """Say hello to every server, bring the initial values if that is this worker's part, and take them over. What
        it was told when it ``resumed`` is where it goes on."""
        floor = self.floor
        try:
            answers = join(floor)
            floor.progress.resume(answers)
            if resumed is not None:
                floor.progress.go_back(resumed)
            initialize(floor, answers)
            self._agreeing.begin_from(floor.fetching.take(floor.fetching.ask("initial parameters")))
        except BaseException as error:
            # Servers that let this worker in would otherwise wait for it until their deadline.
            self.end(f"it could not start: {type(error).__name__}: {error}")
            raise
        floor.trained.attach(self)
        self._stepping.start()
        if floor.strategy.print_log and floor.assignment.index == 0:
            print(floor.trained.plan.table())

    def begin_anew(self) -> None:
        """The servers' values have been replaced by others: take them over, and forget all that was known of theirs."""
        floor = self.floor
        self.flush()
        replies = floor.fetching.ask("values that were loaded")
        check_loads(floor, replies)
        floor.rows.replaced(floor.progress.begin_anew(replies))
        self._pushing.forget_rounding()
        floor.own.forgotten()
        self._agreeing.begin_from(floor.fetching.take(replies))

    def take_replaced(self) -> None:
        """Other values are there by this worker's own call. A thread that trains beside it has them after its next
        step: nothing changes under one."""
        if self.callers.are_beside:
            self.floor.progress.replaced = True
        else:
            self.begin_anew()

    def extend(self) -> None:
        """Tell the servers of parameters that joined the optimizers. Every worker does, after the same step."""
        with self.callers:
            self._extend()

    def _extend(self) -> None:
        floor, trained = self.floor, self.floor.trained
        if not floor.policy.shares_steps:
            mode = floor.strategy.mode
            raise UnsupportedError(
                f"parameters cannot join a running job in the mode {mode!r}, whose workers share no step",
                todo="Give all parameters to the optimizer before fleet.init_worker().",
            )
        self.settle("add_param_group()")
        known = trained.description
        description = known.continued_by(self._describe())
        spec, fingerprint = description.spec.to_json(), make_plan(description.spec).fingerprint
        extend = pb.Extend(spec=spec, fingerprint=fingerprint, options=description.options())
        replies = floor.lines.ask(f"further parameters after step {floor.progress.completed}", extend=extend)
        trained.adopt(description)
        floor.rows.adopt(trained.plan.spec.tables, description.handles)
        self._pushing.grow()
        self._stepping.grow()
        initialize(floor, [reply.message for reply in replies], len(known.params), len(known.handles))
        floor.fetching.take(floor.fetching.ask("initial parameters"))
        trained.attach(self, len(known.handles))

    # ---------------------------------------------------------------- a step

    @property
    def trains_here(self) -> bool:
        return self.floor.policy.trains_on_workers

    @property
    def replica(self) -> Replica | None:
        """What is trained here, where anything is."""
        return self._agreeing.replica

    def during_backward(self) -> AbstractContextManager[None]:
        return self._stepping.during_backward()

    def step(self) -> None:
        with self.callers:
            self._prepare_step()
            self._stepping.step()

    def step_here(self, update: Callable[[], None]) -> None:
        """Take a step on this worker's own values; from time to time agree with the servers."""
        with self.callers:
            self._prepare_step()
            self._agreeing.step(update)

    def _prepare_step(self) -> None:
        self.callers.train()
        self.settle("step()")
        if self._foresight is not None:
            self._foresight.clear()
        self.floor.trained.description.check_types()
        if self.floor.trained.description.has_newcomers():
            self.extend()

    def flush(self) -> None:
        """Have everything applied that this worker has computed."""
        self._agreeing.flush()
        self._stepping.flush()
        self.floor.own.arrive()

    def settle(self, call: str) -> None:
        """Before anything else happens in a call's turn, what was interrupted comes to its end."""
        with self.callers:  # what another thread has under way is not interrupted
            self._refuse_late(call)
            self._delivering.settle()
            self._meeting.settle()

    def _refuse_late(self, call: str) -> None:
        if self.stopped:
            raise StateError(
                f"{call} came after the job ended for this worker (fleet.stop_worker)",
                todo="Call it before fleet.stop_worker(), which is the last call of all.",
            )

    # ---------------------------------------------------------------- rows

    def watch(self, model: torch.nn.Module) -> None:
        """Learn what the model looks up, so that it can be asked for at once."""

        def fetch(wanted: Sequence[Wanted]) -> Mapping[int, Ahead]:
            self.settle("a look-up")
            with self.figures.pull:
                return self.floor.rows.foresee(wanted, self.floor.progress.completed, self.replica)

        if self.floor.trained.description.handles:
            self._foresight = Foresight(model, self.callers, fetch, self.floor.rows.forget)

    def unwatched(self) -> dict[int, object]:
        """For a copy of the model that stands in no job: by identity, what it has in the place of what watches."""
        blind = Foresight(torch.nn.Module(), self.callers, lambda _: {}, lambda _: None)
        return {} if self._foresight is None else {id(self._foresight): blind}

    def lookup(self, wanted: Sequence[Wanted]) -> list[Lookup]:
        if self.callers.are_forked:
            return self._forked_reader().lookup(wanted, self.replica)
        with self.callers:
            self.settle("a look-up")
            with self.figures.pull:
                found = self.floor.rows.lookup(wanted, self.floor.progress.completed, self.replica)
            if self._foresight is not None:
                self._foresight.saw(wanted)
            self._stepping.looked_up()
            return found

    def _forked_reader(self) -> ForkedReader:
        if self._forked is None or self._forked.callers.are_forked:
            self._forked = ForkedReader(self.floor)
        return self._forked

    def fetch_ahead(self, wanted: Sequence[Wanted], steps: int) -> dict[int, Ahead]:
        """Begin to fetch what a forward will ask for after so many more ``steps``."""
        with self.callers:
            self.settle("prefetch()")
            with self.figures.pull:
                return self.floor.rows.fetch_ahead(wanted, self.floor.progress.completed, steps, self.replica)

    def present(self, ahead: Mapping[int, Ahead]) -> None:
        """From now on forwards may use this, which was fetched ahead; what was there before is given up."""
        with self.callers:
            self.floor.rows.present(ahead)

    # ---------------------------------------------------------------- among workers

    def barrier(self) -> None:
        """Return when every worker has come here."""
        with self.callers:
            self.settle("barrier_worker()")
            self.flush()  # what this worker computed before the barrier is applied when the others have passed it
        self._gather("barrier_worker()", BARRIER)

    def all_reduce(self, call: str, value: object, output: object, op: object) -> Any:
        """``value`` of all workers made one, in the kind it came in; written into ``output`` if that is given."""

        def meet(op: str, mine: UserValue) -> WireTensor:
            with self.callers:
                self.settle(call)
            tensor = self._gather(call, op, mine.dtype, mine.wire())
            assert tensor is not None
            return tensor

        return reduce_over_workers(call, value, output, op, meet)

    def _gather(self, call: str, op: str, dtype: str = "", mine: WireTensor | None = None) -> WireTensor | None:
        try:
            return self._meeting.gather(call, op, dtype, mine)
        except IdentityError:
            self._refuse_late(call)  # another thread has said goodbye meanwhile
            raise

    # ---------------------------------------------------------------- what happened

    def summary(self) -> dict[str, Any]:
        floor = self.floor
        with self.callers:
            self.settle("summary()")
            surveys = [reply.message.about for reply in floor.lines.ask("summary", survey=pb.Survey())]
        return summary(floor.assignment.index, floor.strategy.mode, floor.progress.steps, surveys, self.told())

    def told(self) -> dict[str, float]:
        """What this worker tells of itself, from any thread."""
        return self.figures.read(
            step=self.floor.progress.taken,
            steps=self.floor.progress.own,
            lockstep=self.floor.policy.shares_steps,
            queue=self._stepping.queued,
            sent_bytes=self.floor.lines.sent_bytes,
            received_bytes=self.floor.lines.received_bytes,
        )

    # ---------------------------------------------------------------- leaving

    def stop(self) -> None:
        """Say goodbye. A second time does nothing, nor does it once the user knows that the job is over: what ended it
        was raised then, and must not be hidden behind a second error from somebody's ``finally``."""
        if self.stopped:
            return
        if self.floor.lines.reported:
            self.abort("its job had already failed, and its script went on to stop_worker()")
            return
        try:
            with self.callers:
                self.settle("stop_worker()")
                self._flush_or_abort()
                self.floor.lines.ask("goodbye", bye=pb.Bye())
        except FleetError:
            raise
        except BaseException as error:
            # Without its goodbye the others would wait for this worker until their deadline.
            self.abort(f"it was interrupted before its goodbye: {type(error).__name__}")
            raise
        finally:
            self.close()

    def _flush_or_abort(self) -> None:
        try:
            self.flush()
        except FleetError as error:
            # Gradients are lost: the others must not take this for a goodbye, nor wait for one.
            self.abort(f"what it still had to send did not arrive: {error}")
            raise

    def abort(self, reason: str) -> None:
        """Tell the servers, as far as they can be reached, that this worker failed and the job with it."""
        if not self.stopped and self.floor.lines.sound:  # else it follows another one's failure
            knobs = self.floor.knobs
            claim(knobs.observing.record_dir, knobs.job_id, str(self.floor.assignment), reason)
        self._part(abort=pb.Abort(reason=reason[-4000:]))

    def end(self, reason: str) -> None:
        """This worker cannot go on, by no fault of the job's: an elastic one goes on without it."""
        if self.floor.strategy.elastic:
            self._part(bye=pb.Bye())
        else:
            self.abort(reason)

    def _part(self, **word: object) -> None:
        if self.stopped:
            return
        self.floor.lines.farewell(**word)
        self.close()

    def close(self) -> None:
        self.stopped = True
        if self._foresight is not None:
            self._foresight.remove()
        self._stepping.end()
        self.floor.lines.close()
        self._stepping.close()
        self._observer.close()
