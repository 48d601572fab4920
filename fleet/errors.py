"""One family of errors, each told in four parts: what happened, where, expected and got, what to do.

Every class also derives from the built-in a caller would naturally catch (``ValueError`` for a bad value,
``TimeoutError`` for a deadline), so nobody needs to import this module to handle an error sensibly.
"""

from __future__ import annotations


class FleetError(Exception):
    """Base of every error this package raises on purpose."""

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
        super().__init__(self._sentence())

    def again(self) -> FleetError:
        """An equal error to raise elsewhere: one that is kept must not collect the traceback of everybody it meets."""
        return type(self)(self.what, where=self.where, expected=self.expected, got=self.got, todo=self.todo)

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
    """An argument has the wrong type."""


class ConfigurationError(FleetError, ValueError):
    """An argument, a configuration or an environment variable has an impossible value."""


class IdOutOfRangeError(FleetError, IndexError):
    """An id is outside of the range its table was made for."""


class UnsupportedError(FleetError, ValueError):
    """What was asked for is understood and cannot be honoured; it is refused rather than ignored."""


class NotInitializedError(FleetError, RuntimeError):
    """A call came before the call it needs."""


class StateError(FleetError, RuntimeError):
    """A call came at a moment when it makes no sense."""


class DeadlineError(FleetError, TimeoutError):
    """A peer was silent, or something did not come up, for longer than its deadline."""


class PortInUseError(FleetError, OSError):
    """A server cannot listen where it was told to."""


class PlanMismatchError(FleetError, ValueError):
    """Two processes of one job do not agree on the model, the optimizer or the cluster."""


class IdentityError(FleetError, RuntimeError):
    """A process claims a place that is taken, or one it was removed from."""


class AuthenticationError(FleetError, PermissionError):
    """A process did not prove to another one who it is: no token or a wrong one, no certificate or a wrong one."""


class PlaceTakenError(IdentityError):
    """Another process has this worker's place, and was heard of lately. If it has died the place is free soon."""


class StillBusyError(FleetError, RuntimeError):
    """A server has not finished an earlier job yet. A worker that waits for its servers asks again."""


class ServerLostError(FleetError, ConnectionError):
    """A server answers but no longer knows the job: it was restarted without its state."""


class JobAbortedError(FleetError, RuntimeError):
    """The job ended because one of its processes failed; the message carries that failure."""


class ProtocolError(FleetError, RuntimeError):
    """A peer sent bytes that are not a valid message."""


class NonFiniteGradientError(FleetError, ArithmeticError):
    """A gradient holds NaN or infinity and the strategy asked for a check."""


class CheckpointError(FleetError, RuntimeError):
    """A checkpoint is missing, damaged, or does not fit the job."""


class MissedError(CheckpointError):
    """A server that was started again has gone on from the step that was to be saved: another checkpoint is due."""
