"""Puts a worker of a running job together: what the user's calls do, and the order in which its parts are asked.

Everything here runs on the user's threads, which take turns (``Turns``). What else may run are the heartbeats of the
connections to the servers, and the threads that push and fetch behind an asynchronous step or send gradients ahead of
a push.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from fleet.base.clock import Clock
from fleet.base.cluster import Assignment, Endpoint
from fleet.base.exit_guard import is_dismissed
from fleet.base.settings import ProcessSettings
from fleet.base.turns import Turns
from fleet.checkpoint.resume_choice import Resumed
from fleet.errors import FleetError, IdentityError, ServersMovedError, StateError, UnsupportedError
from fleet.nn.handle import Lookup, TableHandle, Wanted
from fleet.numeric.jit import Array, Ids
from fleet.numeric.reduction import BARRIER
from fleet.numeric.tensors import WireTensor
from fleet.numeric.values import UserValue, reduce_over_workers
from fleet.plan.plan import Plan, make_plan
from fleet.ps.consistency import policy_of
from fleet.ps.wire import fleet_pb2 as pb
from fleet.ps.wire.frame import Frame
from fleet.ps.wire.transport import Network
from fleet.ps.worker.barrier import Barrier
from fleet.ps.worker.connection import FATAL, Connection, Connections, Whereabouts
from fleet.ps.worker.dense_group import DenseGroup
from fleet.ps.worker.dense_training import DenseTraining
from fleet.ps.worker.describe import Description
from fleet.ps.worker.edits import Edits
from fleet.ps.worker.forked_lookup import ForkedReader
from fleet.ps.worker.geo_replica import GeoTraining, Replica
from fleet.ps.worker.handshake import check_loads, join
from fleet.ps.worker.lookup_prediction import LookupPrediction
from fleet.ps.worker.lookups import Prefetched, RowReader
from fleet.ps.worker.new_servers import Hop, Move, WayAhead, refuse_if_moved, take_leave, tell_those_between
from fleet.ps.worker.object_states import OwnStates
from fleet.ps.worker.progress import Progress
from fleet.ps.worker.push import Pusher
from fleet.ps.worker.row_cuts import RowCuts
from fleet.ps.worker.state_reader import dense_record, exported_dense
from fleet.ps.worker.step import RemoteTraining, UserGradients
from fleet.ps.worker.summary import summary
from fleet.ps.worker.trained_model import DenseValues, TrainedModel
from fleet.ps.worker.upload import initialize
from fleet.strategy.parameter_server import Strategy
from fleet.telemetry.cause import claim
from fleet.telemetry.observer import Observer
from fleet.telemetry.worker_figures import WorkerFigures

_log = logging.getLogger("fleet.worker")

#: All rows of a table are fetched in requests of about this size.
WHOLE_BYTES = 8 << 20
#: A call that meets more moves than these to other servers ends with an error.
MOST_MOVES = 8

T = TypeVar("T")


class WorkerRuntime:
    """Carries out what the user calls while the job runs."""

    def __init__(
        self,
        assignment: Assignment,
        describe: Callable[[], Description],
        strategy: Strategy,
        network: Network,
        settings: ProcessSettings,
        clock: Clock,
        model: torch.nn.Module | None = None,
        former: int = 0,
    ) -> None:
        """``describe`` returns what the user's optimizers and ``model`` are now; ``former`` is the incarnation of this
        process in the job that it has left before."""
        self.assignment = assignment
        #: moves the job to the servers that somebody outside wants it to have
        self.move_as_asked: Callable[[], None] = lambda: None
        #: gives that up
        self.before_close: Callable[[], None] = lambda: None
        #: what has to end before the goodbye, the last to come first; to end it twice does nothing
        self.before_goodbye: list[Callable[[], object]] = []
        self._describe = describe
        self._strategy = strategy
        self._settings = settings
        self.turns = turns = Turns()
        self.figures = figures = WorkerFigures(clock)
        self.mode = strategy.mode
        self.policy = policy = policy_of(strategy, strategy.update_frequency)
        self.progress = progress = Progress(policy)
        #: the number that tells this process from others in its place
        self.incarnation = secrets.randbits(63)
        worker, self._former = assignment.index, former
        #: by thread, what it has asked to do for all, and how that ended (lease.py)
        self.claimed: dict[int, tuple[str, str]] = {}
        #: whether it has said goodbye to all servers
        self.has_left = False
        self._whereabouts = Whereabouts()
        self._network, self.clock = network, clock
        self.connections = connections = Connections(
            self.connect(assignment.servers, self.incarnation),
            progress,
            partial(claim, settings.observing.record_dir, settings.job_id, str(assignment)),
        )
        self._ahead = WayAhead(
            connections,
            lambda servers, moves: Connections(
                self.connect(servers, self.incarnation + moves), progress, connections.claim_cause
            ),
            clock,
            settings.rpc_deadline_s,
        )
        self.trained = trained = TrainedModel(describe(), assignment.server_num)
        self._values = values = DenseValues(connections, progress, trained, remembers=not policy.trains_on_workers)
        self.rows = rows = RowReader(connections.by_server, progress.version_needed, policy.most_steps_ahead)
        rows.adopt(trained.plan.spec.tables, trained.description.handles)
        self.own_states = own = OwnStates(connections, progress, settings.security.max_message_bytes)
        check_finite = strategy.check_finite or settings.check_finite
        gradients = UserGradients(trained, values, rows, own, progress, worker, figures.copy, check_finite=check_finite)
        self.cuts = cuts = RowCuts(connections, trained, progress, shares_steps=policy.shares_steps)
        self._pusher = pusher = Pusher(
            connections,
            trained,
            progress,
            own,
            figures,
            worker,
            strategy.wire_dtype,
            cuts,
            self.reload,
            clock,
            lambda: self._edits.send_with_step(),
            places=policy.fills_buffers,
        )
        communication = replace(settings.communicator, **dict(strategy.communicator))  # type: ignore[arg-type]
        self._training = RemoteTraining(policy, communication, str(worker), gradients, pusher, trained, values, figures)
        self._geo: GeoTraining | None = None
        if policy.trains_on_workers:
            every, fetch = policy.steps_per_push(communication.max_merge_var_num), self._fetch_to_train
            self._geo = GeoTraining(
                every, assignment.worker_num, gradients, pusher, progress, trained, values, rows, fetch
            )
        #: what trains dense parameters, in a job whose workers do
        self.dense: DenseTraining | None = None
        if trained.plan.spec.settings.has_dense_on_workers:
            group = DenseGroup(
                connections, self._whereabouts, worker, figures.reduce, self.following, network.own_address
            )
            self.dense = DenseTraining(
                group,
                trained,
                model,
                progress,
                turns,
                worker,
                strategy.wire_dtype,
                lambda begins: dense_record(connections.by_server[0], progress.completed, begins=begins),
                check_finite=check_finite,
            )
        training, geo, waits = self._training, self._geo, policy.shares_steps and assignment.worker_num > 1
        self._edits = Edits(
            connections, trained, values, rows, training, geo, progress, turns, worker, waits_for_step=waits
        )
        self._barrier = Barrier(connections, progress, figures, turns, self.reload)
        #: how many parameters and tables there were before others joined, until all is done for these
        self._before_newcomers: tuple[int, int] | None = None
        self._prediction: LookupPrediction | None = None
        self._forked: ForkedReader | None = None
        self._given_up = deque[Callable[[], None]]()
        self.stopped = False
        self._has_begun = False
        try:
            self._observer = Observer(str(assignment), "worker", self.read_figures, settings)
        except BaseException:
            connections.close()
            raise

    # ---------------------------------------------------------------- joining

    def start(self, resumed: Resumed | None = None) -> None:
        """Say hello to every server, bring the initial values if that is this worker's part, and take them over. It
        goes on from what it was told when it ``resumed``."""
        trained = self.trained
        with self._ending_if_it_fails():
            answers = self.following(lambda: self._join(self.connections, trained.plan))
            self.connections.moves = answers[0].moves
            self.progress.resume(answers)
            if resumed is not None:
                self.progress.go_back(resumed)
            # A step may be over, and lack what its worker was to find out with the servers before it was killed.
            if trained.plan.spec.settings.max_grad_norm and self.dense is None and answers[0].delivered:
                self.following(self.agree_on_norms)
            if not self.policy.shares_steps or len({answer.version for answer in answers}) == 1:
                self.cuts.notice(answers)
                self.following(self.cuts.tell_due)
            if self.assignment.index == 0:
                initialize(self.connections, trained, answers)
            # Others that are yet to take the step that this worker has pushed already may wait for it to join them.
            back = -1 if self.dense is not None else 0
            self.following(lambda: self._begin_from(self._values.fetch("initial parameters", more_steps=back)))
            if self.dense is not None:
                missed = self.dense.start(self._miss_step)
                if missed:
                    _log.warning(
                        "worker %d goes on after step %d: the others have taken %d without this process, and rows that "
                        "an earlier one had not pushed have not",
                        self.assignment.index,
                        self.progress.taken,
                        missed,
                    )

    def begin(self) -> None:
        """Begin to train: the rows are the servers' alone from now on."""
        with self._ending_if_it_fails():
            self.trained.attach(self)
            self._training.start()
            self._has_begun = True
            if self._strategy.print_log and self.assignment.index == 0:
                print(self.trained.plan.table())

    def _miss_step(self) -> None:
        """Push nothing for a step that the others have taken with an earlier process in this one's place."""
        self.progress.miss_step()
        self._until_pushed(self._training.miss_step)

    @contextmanager
    def _ending_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # Servers that let this worker in would otherwise wait for it until their deadline.
            self.end(f"it could not start: {type(error).__name__}: {error}")
            raise

    def connect(self, servers: Sequence[Endpoint], incarnation: int) -> list[Connection]:
        """Make connections to these servers."""
        network, settings, clock, worker = self._network, self._settings, self.clock, self.assignment.index
        return [
            Connection(
                endpoint,
                network,
                settings,
                clock,
                worker,
                incarnation,
                self.read_figures,
                logs_absent=server == 0,
                look_ahead=lambda connection: self._ahead.look(connection),
                whereabouts=None if server else self._whereabouts,
                completed=lambda: self.progress.completed if self._has_begun else None,
            )
            for server, endpoint in enumerate(servers)
        ]

    def _join(self, connections: Connections, plan: Plan) -> list[pb.Reply]:
        return join(
            connections,
            plan,
            self.trained.description.options(),
            self.policy,
            self._settings.job_id,
            self._former,
            wait=self._strategy.wait_port,
            watch=lambda: refuse_if_moved(connections, self._former),
        )

    def _begin_from(self, replies: Sequence[Frame]) -> None:
        values = self._values.write(replies)
        if self._geo is not None:
            # What a checkpoint has of the optimizers' state; they start without any.
            completed, is_restored = self.progress.completed, self.progress.steps > 0 or self._geo.replica is not None
            self._geo.begin_from(values, exported_dense(self.connections, completed) if is_restored else None)

    def reload(self) -> None:
        """Take over the servers' values, which others have replaced, and forget everything known of the former ones."""
        self.flush()
        self.following(self._reload)

    def _reload(self) -> None:
        replies = self._values.fetch("values that were loaded")
        check_loads(self.connections, self.progress.loads, replies)
        self.progress.reload(replies)
        self.rows.discard_fetched()
        self._edits.drop()
        self._pusher.drop_residues()
        self.own_states.forget_given()
        self._begin_from(replies)
        if self.dense is not None:
            self.dense.reload()
        self.trained.forget_whole_tables()

    def reload_in_turn(self) -> None:
        """Take over other values, which this worker's own call has brought. A thread that trains beside it takes them
        over after its next step: nothing changes under one."""
        if self.turns.is_other_thread:
            self.progress.replaced = True
        else:
            self.reload()

    def extend(self) -> None:
        """Tell the servers of parameters that joined the optimizers. Every worker does, after the same step."""
        self.in_turn("add_param_group()", self._extend)

    def _extend(self) -> None:
        trained = self.trained
        if not self.policy.shares_steps:
            raise UnsupportedError(
                f"parameters cannot join a running job in the mode {self.mode!r}, whose workers share no step",
                todo="Give all parameters to the optimizer before fleet.init_worker().",
            )
        known = trained.description
        if self._before_newcomers is None:  # else they have been sent, and newcomers have nothing to differ from yet
            self._edits.send_found()
        params, handles = self._before_newcomers or (len(known.params), len(known.handles))
        description = known.continued_by(self._describe())
        spec, fingerprint = description.spec.to_json(), make_plan(description.spec).fingerprint
        extend = pb.Extend(spec=spec, fingerprint=fingerprint, options=description.options())
        replies = self.connections.ask(f"further parameters after step {self.progress.completed}", extend=extend)
        self._before_newcomers = params, handles  # if the job moves or Ctrl-C comes before the end, all is done again
        trained.adopt(description)
        self.rows.adopt(trained.plan.spec.tables, description.handles)
        self._pusher.grow()
        self._training.grow()
        if self.assignment.index == 0:
            answers = [reply.message for reply in replies]
            initialize(self.connections, trained, answers, params, handles)
        self._values.write(self._values.fetch("initial parameters"))
        trained.attach(self, handles)
        if self.dense is not None:
            self.dense.extend(params)
        self._before_newcomers = None

    # ---------------------------------------------------------------- other servers

    def following(self, act: Callable[[], T]) -> T:
        """Return what ``act`` returns. If the job has moved to other servers, go over and let it act again."""
        for _ in range(MOST_MOVES):
            try:
                return act()
            except ServersMovedError:
                self._follow()
        return act()

    def _follow(self) -> None:
        """Go over to where the job is now; stay, if its move was given up."""
        with self.turns.take():
            hops = self._take_way()
            if hops:
                self._go_over(hops)
            else:
                self._training.communicator.go_on()

    def go_over(self, move: Move) -> None:
        """Go on where the job is after this move, which has been made."""
        self._go_over(self._take_way(move))

    def _take_way(self, known: Move | None = None) -> list[Hop]:
        """Return all moves from here to where the job is. If a server there has lost what it had taken over, there is
        no way, and no going back."""
        try:
            return self._ahead.take(known)
        except FATAL as error:
            self.connections.end_job(error)
            raise

    def _go_over(self, hops: Sequence[Hop]) -> None:
        try:
            self._come_to(hops)
        finally:
            self._ahead.arrive()

    def _come_to(self, hops: Sequence[Hop]) -> None:
        for connection in self.connections.by_server:
            connection.fail(ServersMovedError("the job has moved to other servers", where=str(connection.endpoint)))
        layouts, (move, connections) = [*self.trained.layouts], hops[-1]
        servers = len(move.servers)
        try:
            self._training.communicator.rest()
            answers = self._join(connections, make_plan(self.trained.plan.spec.on_servers(servers)))
        except BaseException:
            for hop in hops:
                hop.connections.close()
            raise
        known = self.connections.moves
        self.incarnation += move.number - known
        self.connections.moves = move.number
        self.assignment = replace(self.assignment, servers=move.servers)
        former = self.connections.replace(connections.by_server)
        if self.stopped:  # by another thread meanwhile, which has closed those that there were
            self.connections.close()
        self.trained.move(servers)
        self.rows.move(servers)
        self._pusher.move(layouts)
        self.progress.move(answers)
        self.cuts.move(answers)
        for hop in hops:
            first = hop.move.first_since(known)  # which is all that servers know that have left the job by then
            take_leave(first, [each for each in former if each.endpoint not in first.servers])
            for connection in former:
                connection.close()
            former = hop.connections.by_server
            tell_those_between(hop.move, known, lambda servers: self.connect(servers, self.incarnation))
            known = hop.move.number
        if self._values.read_at:  # while it starts it may wait for other workers with what it has read
            self._values.move(layouts)
        if self._has_begun:
            if self._geo is not None:
                self._geo.move()
            self._training.grow()
            self._forked = None
            self.trained.forget_whole_tables()
        self._training.communicator.go_on()

    def agree_on_norms(self) -> None:
        """Find the norms for which updates wait on the servers."""
        self._pusher.agree_on_norms()

    # ---------------------------------------------------------------- a step

    @property
    def trains_here(self) -> bool:
        return self._geo is not None or self.dense is not None

    @property
    def replica(self) -> Replica | None:
        """Return the parameters and rows that are trained here, where any are."""
        return None if self._geo is None else self._geo.replica

    def during_backward(self) -> AbstractContextManager[None]:
        return self._training.during_backward()

    def step(self) -> None:
        self._take_step(self._push_step)

    def step_here(self, update: Callable[[], None], *, if_finite: bool = False) -> None:
        """Take a step on this worker's own values, some or all; from time to time agree with the servers. With
        ``if_finite`` it changes nothing, neither here nor on the servers, if a gradient is not finite."""
        if self._geo is not None:
            self._take_step(partial(self._until_pushed, partial(self._geo.step, update)))
        else:
            assert self.dense is not None
            self._take_step(partial(self._step_on_dense, self.dense, update, if_finite=if_finite))

    def _take_step(self, take: Callable[[], None]) -> None:
        with self.turns.take():
            try:
                self.turns.train()
                self.in_turn("step()", self._prepare_step)
                self.trained.outdate_whole_tables()
                self._edits.begin_step()
                take()
                self.trained.forget_whole_tables()
                if self.connections.wanted_servers:
                    self.move_as_asked()
            except FleetError:
                self.connections.note_reported()
                raise

    def _prepare_step(self) -> None:
        if self._prediction is not None:
            self._prediction.clear()
        description = self.trained.description
        description.check_types()
        description.check_memory()
        description.check_steps()
        if description.has_newcomers():
            self._extend()
        self._edits.send_found(in_step=True)

    def _step_on_dense(self, dense: DenseTraining, update: Callable[[], None], *, if_finite: bool) -> None:
        is_taken = dense.begin_step(if_finite=if_finite)
        with nullcontext() if is_taken else self.trained.description.tables_aside():
            self._push_step(lambda: dense.take_step(update if is_taken else None))
        dense.end_step()

    def _push_step(self, update: Callable[[], None] | None = None) -> None:
        def push() -> None:
            with self.trained.writer.standing_still():
                self._training.step(update)

        self._until_pushed(push)

    def _until_pushed(self, push: Callable[[], None]) -> None:
        """Take a step that makes a ``push``; if the job moves meanwhile, finish it there."""
        try:
            push()
        except ServersMovedError:
            self._follow()
            self.following(self._finish_push)

    def _finish_push(self) -> None:
        with self.trained.writer.standing_still():
            self._pusher.finish_interrupted()

    def set_synchronized(self, wanted: bool) -> bool:
        """Set whether backwards average dense gradients from now on, and return what it was before."""
        assert self.dense is not None
        return self.dense.set_synchronized(wanted)

    # ---------------------------------------------------------------- a call

    def in_turn(self, call: str, act: Callable[[], T]) -> T:
        """Return what ``act`` returns, which is a user's ``call``: in its turn, when what was interrupted is finished,
        and where the job is."""

        def finish_and_act() -> T:
            self._finish_interrupted(call)
            return act()

        with self.turns.take():
            return self.following(finish_and_act)

    def read_rows(self, call: str, handles: Collection[TableHandle], read: Callable[[], T]) -> T:
        """Return what ``read`` returns in its turn: what servers have of these tables, or the request for it."""

        def act() -> T:
            self._edits.send_rows_of(handles)
            with self.figures.pull:
                return read()

        return self.in_turn(call, act)

    def flush(self) -> None:
        """Have everything applied that this worker has computed, and that its script has changed."""
        self._edits.send_found()
        self.following(self._flush)
        self.following(self.own_states.wait_until_given)

    def _flush(self) -> None:
        self._pusher.finish_interrupted()  # the servers may have moved while a rest of gradients was pushed
        if self._geo is not None:
            self._geo.flush(edits=not self.turns.is_other_thread)
        self._training.flush()

    def finish_interrupted(self, call: str) -> None:
        """Finish what was interrupted, before anything else happens in a call's turn."""
        self.in_turn(call, lambda: None)

    def _finish_interrupted(self, call: str) -> None:
        self._finish_giving_up()
        self._refuse_late(call)
        self._training.communicator.refuse_if_moved()
        if self._before_newcomers is not None and not self.turns.is_other_thread:
            self._extend()
        if self._pusher.is_in_doubt:
            self._edits.find()  # lest they are written over
            self._pusher.finish_interrupted()
        if self._geo is not None:
            self._geo.finish_rows()
        if self.dense is not None and not self.turns.is_other_thread:
            self.dense.finish_interrupted()
        self.cuts.tell_due()
        self._barrier.finish_interrupted()

    def _refuse_late(self, call: str) -> None:
        if self.stopped:
            raise StateError(
                f"{call} came after the job ended for this worker (fleet.stop_worker)",
                todo="Call it before fleet.stop_worker(), which is the last call of all.",
            )

    # ---------------------------------------------------------------- rows

    def watch(self, model: torch.nn.Module) -> None:
        """Learn what the model looks up, so that all of it can be asked for at once."""

        def fetch(wanted: Sequence[Wanted]) -> Mapping[int, Prefetched]:
            return self.read_rows(
                "a look-up",
                [each.handle for each in wanted],
                lambda: self.rows.fetch_predicted(wanted, self.progress.completed, self.replica),
            )

        if self.trained.description.handles:
            self._prediction = LookupPrediction(model, self.turns, fetch, self.rows.drop_predicted)

    def lookup(self, wanted: Sequence[Wanted]) -> list[Lookup]:
        if self.turns.is_fork:
            return self._forked_reader().lookup(wanted, self.replica)

        def look_up() -> list[Lookup]:
            self._edits.send_rows_of(each.handle for each in wanted)
            with self.figures.pull:
                found = self.rows.lookup(wanted, self.progress.completed, self.replica)
            if self._prediction is not None:
                self._prediction.observe(wanted)
            self._training.communicator.looked_up()
            return self._edits.laid_over(wanted, found)

        return self.in_turn("a look-up", look_up)

    def averaged(self, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
        """Return the mean over all workers of gradients of rows, where workers have to agree on it."""
        if self.dense is None or self.dense.group.size == 1 or self.turns.is_other_thread:
            return None
        return self.dense.averaged(ids, values)

    @property
    def most_whole_bytes(self) -> int:
        return self._settings.whole_table_bytes

    def whole(self, handle: TableHandle) -> torch.Tensor:
        """Fetch all rows of a table, in requests of a limited size."""
        at_once = min(WHOLE_BYTES, self._settings.security.max_message_bytes // 2)
        if self.turns.is_fork:
            return self._forked_reader().whole(handle, self.replica, at_once)

        def read() -> torch.Tensor:
            return self.rows.whole(handle, self.progress.completed, self.replica, at_once)

        with self.turns.take():
            # What is changed in them begins with all that this worker has done.
            self.in_turn("a look at all rows", self._training.communicator.flush)
            return self._edits.lay_over_whole(handle, self.read_rows("a look at all rows", [handle], read))

    def _forked_reader(self) -> ForkedReader:
        if self._forked is None or self._forked.turns.is_fork:
            self._forked = ForkedReader(self.connections, self.trained, self.progress, self.mode, self.policy)
        return self._forked

    def _fetch_to_train(self, index: int, ids: Ids) -> Array:
        with self.figures.pull:
            return self.following(lambda: self.rows.fetch(index, ids, self.progress.completed, training=True))

    def give_up(self, work: Callable[[], None], *, is_here: bool) -> None:
        """Do the ``work`` of giving something up: at once where ``is_here``, if no call is under way, and else when the
        next one begins. Garbage is collected on any thread, in the middle of any call, and must not wait for one."""
        self._given_up.append(work)
        with self.turns.if_free() if is_here else nullcontext(False) as is_free:
            if is_free:
                self._finish_giving_up()

    def _finish_giving_up(self) -> None:
        while self._given_up:
            self._given_up.popleft()()

    def forget_rows(self) -> None:
        """Forget rows that were fetched ahead, or as a whole: others are there now."""
        self.rows.discard_fetched()
        self.trained.forget_whole_tables()

    # ---------------------------------------------------------------- among workers

    def barrier(self) -> None:
        """Return when every worker has come here."""
        # What this worker computed is applied when the others have passed the barrier.
        self.in_turn("barrier_worker()", self.flush)
        self._gather("barrier_worker()", BARRIER)

    def all_reduce(self, call: str, value: object, output: object, op: object) -> Any:
        """Reduce the ``value`` of all workers to one, in the kind it came in, and write it into ``output`` if that is
        given."""

        def meet(op: str, mine: UserValue) -> WireTensor:
            self.finish_interrupted(call)
            tensor = self._gather(call, op, mine.dtype, mine.wire())
            assert tensor is not None
            return tensor

        return reduce_over_workers(call, value, output, op, meet)

    def _gather(self, call: str, op: str, dtype: str = "", mine: WireTensor | None = None) -> WireTensor | None:
        try:
            return self.following(lambda: self._barrier.gather(call, op, dtype, mine))
        except (IdentityError, StateError):
            self._refuse_late(call)  # another thread has said goodbye meanwhile
            raise

    # ---------------------------------------------------------------- what happened

    def summary(self) -> dict[str, Any]:
        replies = self.in_turn("summary()", lambda: self.connections.ask("summary", survey=pb.Survey()))
        surveys = [reply.message.about for reply in replies]
        return summary(self.assignment.index, self.mode, self.progress.steps, surveys, self.read_figures())

    def read_figures(self) -> dict[str, float]:
        """Read this worker's figures, from any thread."""
        return self.figures.read(
            step=self.progress.taken,
            steps=self.progress.own,
            lockstep=self.policy.shares_steps,
            round_trip_seconds=self.connections.round_trip_s,
            queue=self._training.communicator.queued,
            sent_bytes=self.connections.sent_bytes,
            received_bytes=self.connections.received_bytes,
        )

    # ---------------------------------------------------------------- leaving

    def stop(self) -> None:
        """Say goodbye. A second call does nothing, nor does a call after the user knows that the job is over: what
        ended it was raised then, and must not be hidden behind a second error from somebody's ``finally``."""
        if self.stopped:
            return
        if is_dismissed():
            self.close()
            return
        if self.connections.reported:
            # With the cause: who fails in turn may be the first of whom a server hears.
            cause = self.connections.failure
            told = "" if cause is None else f" ({cause})"
            self.abort(f"its job had already failed{told}, and its script went on to stop_worker()")
            return
        try:
            with ExitStack() as to_end:  # all of it, by each call: a signal, or another thread, may come meanwhile
                for finish in self.before_goodbye:
                    to_end.callback(finish)
        finally:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        try:
            with self.turns.take():
                if self.stopped:
                    return
                self.finish_interrupted("stop_worker()")
                self._flush_or_abort()
                if self.dense is not None:
                    self.dense.leave()
                if self.policy.fills_buffers and len(self.connections.by_server) > 1:
                    self.following(self._pusher.part)
                self.following(lambda: self.connections.ask("goodbye", bye=pb.Bye()))
                self.has_left = True
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
            self.following(self.flush)
        except FleetError as error:
            # Gradients are lost: the others must not take this for a goodbye, nor wait for one.
            self.abort(f"what it still had to send did not arrive: {error}")
            raise

    def abort(self, reason: str) -> None:
        """Tell the servers, as far as they can be reached, that this worker failed and the job with it."""
        if not self.stopped:
            self.connections.claim_cause(reason)
        self._part(abort=pb.Abort(reason=reason[-4000:]))

    def end(self, reason: str) -> None:
        """Leave a job in which this worker cannot go on, by no fault of the job's; an elastic job goes on."""
        if self._strategy.elastic:
            self._part(bye=pb.Bye())
        else:
            self.abort(reason)

    def _part(self, **word: object) -> None:
        if self.stopped:
            return
        self.connections.farewell(**word)
        self._ahead.farewell(**word)
        self.close()

    def close(self) -> None:
        self.stopped = True
        self.before_close()
        self._ahead.close()
        for handle in self.trained.description.handles:
            handle.end()
        if self._prediction is not None:
            self._prediction.remove()
        self._training.communicator.end()
        if self.dense is not None:
            self.dense.close()
        self.connections.close()
        self._training.close()
        self._observer.close()
