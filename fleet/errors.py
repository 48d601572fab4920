"""Defines one family of errors, each told in four parts: what happened, where, expected and got, what to do.

Every class also derives from the built-in a caller would naturally catch (``ValueError`` for a bad value,
``TimeoutError`` for a deadline), so nobody needs to import this module to handle an error sensibly.
"""

from __future__ import annotations


class FleetError(Exception):
    """Every error that this package raises on purpose derives from this one.

    Examples:
        >>> try:
        ...     fleet.StrategyFactory.create_ssp_strategy(staleness=-1)
        ... except fleet.errors.FleetError as error:
        ...     print(error.what, error.expected, error.got, sep=" | ")
        staleness is out of range | at least 0 | -1
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: object = None,
        got: object = None,
        todo: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.got = got
        self.todo = todo
        #: whether a server says by it that the job is over
        self.ends_job = False
        super().__init__(self._sentence())

    def again(self) -> FleetError:
        """Return an equal error to raise elsewhere: one that is kept must not collect the traceback of everybody it
        meets."""
        made = type(self)(self.what, where=self.where, expected=self.expected, got=self.got, todo=self.todo)
        made.ends_job = self.ends_job
        return made

    def _sentence(self) -> str:
        parts = [self.what]
        if self.where is not None:
            parts.append(f"at {self.where}")
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.got is not None:
            parts.append(f"got {self.got}")
        text = "; ".join(parts)
        return text if self.todo is None else f"{text}. {self.todo}"


class ArgumentTypeError(FleetError, TypeError):
    """An argument has the wrong type.

    Examples:
        >>> fleet.distributed_optimizer("adam")
        Traceback (most recent call last):
            ...
        fleet.errors.ArgumentTypeError: optimizer is of the wrong type; ... got str
    """


class ConfigurationError(FleetError, ValueError):
    """An argument, a configuration or an environment variable has an impossible value.

    Examples:
        >>> fleet.StrategyFactory.create_geo_strategy(update_frequency=0)
        Traceback (most recent call last):
            ...
        fleet.errors.ConfigurationError: update_frequency is out of range; expected at least 1; got 0
    """


class IdOutOfRangeError(FleetError, IndexError):
    """An id is outside of the range its table was made for.

    Examples:
        >>> fleet.stop_worker()
        >>> fleet.init()
        >>> table = fleet.nn.Embedding(3, 2)
        >>> optimizer = fleet.distributed_optimizer(torch.optim.SGD(table.parameters(), lr=0.1), model=table)
        >>> fleet.init_worker()
        >>> table(torch.tensor([3]))
        Traceback (most recent call last):
            ...
        fleet.errors.IdOutOfRangeError: an id is out of range for weight; expected 0 <= id < 3; got 3
    """


class UnsupportedError(FleetError, ValueError):
    """What was asked for is understood and cannot be honoured; it is refused rather than ignored.

    Examples:
        >>> import copy
        >>> copy.deepcopy(optimizer)
        Traceback (most recent call last):
            ...
        fleet.errors.UnsupportedError: the optimizer of a job cannot be copied or pickled: it stands for the job, ...
    """


class NotInitializedError(FleetError, RuntimeError):
    """A call came before the call it needs.

    Examples:
        >>> fleet.Fleet().worker_index()
        Traceback (most recent call last):
            ...
        fleet.errors.NotInitializedError: fleet.worker_index() came before fleet.init(). Call fleet.init() first.
    """


class StateError(FleetError, RuntimeError):
    """A call came at a moment when it makes no sense.

    Examples:
        >>> fleet.init()
        Traceback (most recent call last):
            ...
        fleet.errors.StateError: fleet.init() was called while a job is running. Call fleet.stop_worker() first.
    """


class UnknownNameError(FleetError, AttributeError):
    """A name is in the source documents and not in this package; the message says what to write instead.

    Examples:
        >>> fleet.main_program
        Traceback (most recent call last):
            ...
        fleet.errors.UnknownNameError: module 'fleet' has no attribute 'main_program'. PyTorch is eager and runs no ...
        >>> hasattr(fleet, "main_program")
        False
    """


class DeadlineError(FleetError, TimeoutError):
    """A peer was silent, or something did not come up, for longer than its deadline.

    Examples:
        >>> from fleet.role_maker import Role, UserDefinedRoleMaker
        >>> config = fleet.transpiler.DistributeTranspilerConfig()
        >>> config.wait_port = False
        >>> another = fleet.Fleet()
        >>> another.init(UserDefinedRoleMaker(0, Role.WORKER, 1, ["127.0.0.1:1"]))
        >>> _ = another.distributed_optimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters()), config)
        >>> another.init_worker()
        Traceback (most recent call last):
            ...
        fleet.errors.DeadlineError: the server at 127.0.0.1:1 did not come up; at worker 0, hello; ...
    """


class PortInUseError(FleetError, OSError):
    """A server cannot listen where it was told to.

    Examples:
        >>> import socket
        >>> from fleet.role_maker import Role, UserDefinedRoleMaker
        >>> server = fleet.Fleet()
        >>> with socket.create_server(("127.0.0.1", 0)) as taken:
        ...     address, port = taken.getsockname()
        ...     server.init(UserDefinedRoleMaker(0, Role.SERVER, 1, [f"{address}:{port}"]))
        ...     server.init_server()
        ...     server.run_server()
        Traceback (most recent call last):
            ...
        fleet.errors.PortInUseError: port ... is in use; at 127.0.0.1:...; got held by process ...
    """


class PlanMismatchError(FleetError, ValueError):
    """Two processes of one job do not agree on the model, the optimizer or the cluster.

    Examples:
        >>> serve()
        >>> join(worker_num=2)
        Traceback (most recent call last):
            ...
        fleet.errors.PlanMismatchError: worker and server were started with different numbers of workers; ...
        >>> join().stop_worker()
    """


class IdentityError(FleetError, RuntimeError):
    """A process claims a place that is taken, or one it was removed from.

    Examples:
        >>> serve(FLEET_JOB_ID="a")
        >>> join(FLEET_JOB_ID="b")
        Traceback (most recent call last):
            ...
        fleet.errors.IdentityError: this server serves another job; at ...; expected job a; got job b. ...
        >>> join(FLEET_JOB_ID="a").stop_worker()
    """


class AuthenticationError(FleetError, PermissionError):
    """A process did not prove to another one who it is: no token or a wrong one, no certificate or a wrong one.

    Examples:
        >>> serve(FLEET_AUTH_TOKEN="ours")
        >>> join(FLEET_AUTH_TOKEN="theirs")
        Traceback (most recent call last):
            ...
        fleet.errors.AuthenticationError: the token is not the server's; at the server at .... Give every process ...
        >>> join(FLEET_AUTH_TOKEN="ours").stop_worker()
    """


class DuplicateWorkerError(IdentityError):
    """Another process has this worker's place, and was heard of lately. If it has died, the place is free soon.

    Examples:
        >>> serve()
        >>> first = join()
        >>> join(FLEET_HEARTBEAT_S="0.05")  # four heartbeats later
        Traceback (most recent call last):
            ...
        fleet.errors.DuplicateWorkerError: there is already a worker 0; at ...; got a second one at ...
        >>> first.stop_worker()
    """


class ServerBusyError(FleetError, RuntimeError):
    """A server has not finished an earlier job yet. A worker that waits for its servers asks again.

    Examples:
        >>> serve(worker_num=2)
        >>> first, second = join(0, worker_num=2), join(1, worker_num=2)
        >>> first.stop_worker()
        >>> join(0, worker_num=2, FLEET_STARTUP_DEADLINE_S="0.2")  # one of the next job, which waits no longer
        Traceback (most recent call last):
            ...
        fleet.errors.ServerBusyError: this server has not finished an earlier job yet; at ...; the earlier one ...
        >>> second.stop_worker()
    """


class ServersMovedError(FleetError, ConnectionError):
    """The job has moved to other servers. Workers ask where, and go on there; a call ends with it only if they cannot.

    Examples:
        >>> raise fleet.errors.ServersMovedError("the job has moved to other servers", where="10.0.0.1:7164")
        Traceback (most recent call last):
            ...
        fleet.errors.ServersMovedError: the job has moved to other servers; at 10.0.0.1:7164
    """


class ServerLostError(FleetError, ConnectionError):
    """A server answers but no longer knows the job: it was restarted without its state.

    Examples:
        >>> serve(FLAGS_rpc_deadline="300")
        >>> worker = join(FLEET_HEARTBEAT_S="60")  # its heart beats too rarely
        >>> second_job().join()  # so its server gives it up, and ends
        >>> serve()
        >>> worker.barrier_worker()
        Traceback (most recent call last):
            ...
        fleet.errors.ServerLostError: this server does not know the worker's job: it was restarted and has lost its ...
        >>> worker.stop_worker()
        >>> join().stop_worker()
    """


class JobAbortedError(FleetError, RuntimeError):
    """The job ended because one of its processes failed; the message carries that failure.

    Examples:
        >>> fleet.save_persistables("ckpt")
        >>> fleet.stop_worker()
        >>> fleet.init()
        >>> other = torch.nn.Linear(3, 1)
        >>> optimizer = fleet.distributed_optimizer(torch.optim.SGD(other.parameters(), lr=0.1), model=other)
        >>> fleet.init_server("ckpt")
        >>> fleet.init_worker()
        Traceback (most recent call last):
            ...
        fleet.errors.JobAbortedError: server ... could not set up the job; got the checkpoint does not fit ...
    """


class ProtocolError(FleetError, RuntimeError):
    """A peer sent bytes that are not a valid message.

    Examples:
        >>> from fleet.ps.wire.fleet_pb2 import Request
        >>> from fleet.ps.wire.frame import read_frame
        >>> read_frame(Request, [b"GET / HTTP/1.1"])  # a browser that came to a server's port
        Traceback (most recent call last):
            ...
        fleet.errors.ProtocolError: ...
    """


class NonFiniteGradientError(FleetError, ArithmeticError):
    """A gradient holds NaN or infinity and the strategy asked for a check.

    Examples:
        >>> fleet.stop_worker()
        >>> fleet.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> strategy = fleet.StrategyFactory.create_sync_strategy(check_finite=True)
        >>> optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
        >>> fleet.init_worker()
        >>> optimizer.minimize(model(torch.full((1, 2), float("nan"))).mean())
        Traceback (most recent call last):
            ...
        fleet.errors.NonFiniteGradientError: the gradient of 'weight' holds NaN or infinity; at worker 0, step 1
    """


class CheckpointError(FleetError, RuntimeError):
    """A checkpoint is missing, damaged, or does not fit the job.

    Examples:
        >>> fleet.load_persistables("nowhere")
        Traceback (most recent call last):
            ...
        fleet.errors.CheckpointError: there is no checkpoint here; at ...nowhere; ...
    """


class TableFileError(FleetError, OSError):
    """Rows that memory has no room for cannot be kept in their files.

    Examples:
        >>> issubclass(fleet.errors.TableFileError, OSError)
        True
    """


class DataError(FleetError, ValueError):
    """A file of training data cannot be read, or something in it is malformed.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("clicks.txt").write_text("1 seven")
        >>> list(fleet.data.MultiSlot(["clicks.txt"], {"user": fleet.data.Ids()}, batch_size=1))
        Traceback (most recent call last):
            ...
        fleet.errors.DataError: ...clicks.txt...
    """


class MissedError(CheckpointError):
    """A server that was started again has gone on from the step that was to be saved: another checkpoint is due.

    Only what is written behind the training can miss its step, and ``fleet.Checkpoints``, which does that, sees to it:
    it logs this error, and saves the next step instead.

    Examples:
        >>> with fleet.Checkpoints("ckpt", every_steps=1) as checkpoints:
        ...     optimizer.minimize(loss())
        ...     checkpoints.after_step()  # a server that is killed now raises nothing here
    """


#: Names that two of them had before; still the same classes.
PlaceTakenError = DuplicateWorkerError
StillBusyError = ServerBusyError
