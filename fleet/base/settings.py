"""The one file that reads the process environment.

``PROCESS_ENVIRONMENT`` is the live mapping, handed to whoever takes an ``environ=`` argument; ``Knobs`` are the
settings of the source documents and our own, parsed and checked once in ``fleet.init``.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleet.base.cluster import Binding, parse_address
from fleet.base.spelling import misspelt, nearest
from fleet.errors import ConfigurationError

_log = logging.getLogger("fleet")

PROCESS_ENVIRONMENT: Mapping[str, str] = os.environ

#: Settings of the source documents with nothing to act on here (docs/environment.md says why), checked all the same.
_IDLE = (
    "FLAGS_rpc_send_thread_num",
    "FLAGS_rpc_prefetch_thread_num",
)
_ACTING = (
    *("FLAGS_rpc_deadline", "FLAGS_rpc_retry_times", "FLAGS_rpc_get_thread_num", "FLEET_STARTUP_DEADLINE"),
    *("FLAGS_communicator_max_merge_var_num", "FLAGS_communicator_send_queue_size"),
    *("FLAGS_communicator_min_send_grad_num_before_recv", "FLAGS_communicator_independent_recv_thread"),
    *("FLAGS_communicator_send_wait_times", "FLAGS_communicator_thread_pool_size"),
    "FLAGS_communicator_is_sgd_optimizer",
)
_SECURITY = (
    *("FLEET_AUTH_TOKEN", "FLEET_AUTH_TOKEN_FILE", "FLEET_INSECURE", "FLEET_MAX_MESSAGE_MB"),
    *("FLEET_TLS_CERT", "FLEET_TLS_KEY", "FLEET_TLS_CA", "FLEET_TLS_SERVER_NAME"),
)
_KNOWN = {
    *(*_IDLE, *_ACTING, *_SECURITY),
    *("FLEET_BEAT", "FLEET_CHECK_FINITE", "FLEET_JOB_ID", "FLEET_LAUNCHER", "FLEET_DIRECT_PORT"),
    *("FLEET_DURABLE_DIR", "FLEET_DURABLE_SYNC"),
    *("FLEET_SLURM_SERVERS", "FLEET_SLURM_PORT", "FLEET_BIND", "FLEET_HEALTH_PORT"),
    *("FLEET_RECORD_DIR", "FLEET_METRICS_PORT", "FLEET_METRICS_HOST", "FLEET_TENSORBOARD_DIR"),
}
#: What role makers read of the source system's variables.
ROLE_VARIABLES = {
    *("PADDLE_TRAINING_ROLE", "PADDLE_TRAINER_ID", "PADDLE_PSERVER_ID", "PADDLE_CURRENT_ENDPOINT", "PADDLE_CURRENT_IP"),
    *("PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_PSERVER_IPS", "PADDLE_PSERVERS", "PADDLE_PSERVER_PORT", "PADDLE_PORT"),
    *("PADDLE_TRAINER_ENDPOINTS", "PADDLE_TRAINER_IPS", "PADDLE_TRAINERS", "PADDLE_TRAINERS_NUM"),
}
#: Others of its own, which mean nothing here and are no misspelling.
_OF_PADDLE = {
    *("PADDLE_MASTER", "PADDLE_NNODES", "PADDLE_SERVER_NUM", "PADDLE_TRAINER_NUM", "PADDLE_START_PORT"),
    *("PADDLE_SERVERS_ENDPOINTS", "PADDLE_TRAINERS_ENDPOINTS", "PADDLE_MAX_RESTART", "PADDLE_LOG_DIR"),
    *("PADDLE_ELASTIC_LEVEL", "PADDLE_ELASTIC_TIMEOUT", "PADDLE_ELASTIC_NP", "PADDLE_ELASTIC_SERVER"),
    *("PADDLE_WITH_GLOO", "PADDLE_GLOO_RENDEZVOUS", "PADDLE_GLOO_FS_PATH", "PADDLE_GLOO_FS_NAME", "PADDLE_GLOO_FS_UGI"),
    *("PADDLE_GLOO_HTTP_ENDPOINT", "PADDLE_IS_BARRIER_ALL_ROLE", "PADDLE_ENABLE_REMOTE_PREFETCH", "PADDLE_JOB_ID"),
    *("PADDLE_RANK_IN_NODE", "PADDLE_GLOBAL_RANK", "PADDLE_GLOBAL_SIZE", "PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE"),
    *("PADDLE_LOCAL_DEVICE_IDS", "PADDLE_WORLD_DEVICE_IDS", "PADDLE_CLUSTER_TRAIN", "PADDLE_IS_LOCAL"),
    *("PADDLE_COORDINATOR_ENDPOINTS", "PADDLE_COORDINATOR_ID", "PADDLE_HETER_TRAINER_ID", "PADDLE_INIT_TRAINER_ID"),
    *("PADDLE_INIT_PORT", "PADDLE_INIT_PSERVERS", "PADDLE_PSERVER_NUM", "PADDLE_TRAINER_COUNT"),
}
#: How Kubernetes tells every pod of a service; one may be called paddle.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP|SCTP)(_|$)")

#: What this process has been told of already.
_remarked: set[str] = set()

#: A longer one is no token but a file given by mistake, and gRPC carries not much more beside a request.
_LONGEST_TOKEN = 1024


@dataclass(frozen=True)
class CommunicatorKnobs:
    """How workers of the relaxed modes merge, send and fetch; a strategy may say each of them itself."""

    max_merge_var_num: int = 1
    send_queue_size: int = 2
    min_send_grad_num_before_recv: int = 1
    independent_recv_thread: bool = True
    send_wait_times: int = 5
    thread_pool_size: int = 5
    #: None: found out from the optimizer
    is_sgd_optimizer: bool | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> CommunicatorKnobs:
        def whole(name: str, least: int = 1) -> int:
            return int(_number(environ, f"FLAGS_communicator_{name}", getattr(cls, name), whole=True, least=least))

        independent = _maybe_flag(environ, "FLAGS_communicator_independent_recv_thread")
        return cls(
            max_merge_var_num=whole("max_merge_var_num"),
            send_queue_size=whole("send_queue_size"),
            min_send_grad_num_before_recv=whole("min_send_grad_num_before_recv"),
            independent_recv_thread=cls.independent_recv_thread if independent is None else independent,
            send_wait_times=whole("send_wait_times", least=0),
            thread_pool_size=whole("thread_pool_size"),
            is_sgd_optimizer=_maybe_flag(environ, "FLAGS_communicator_is_sgd_optimizer"),
        )


@dataclass(frozen=True)
class SecurityKnobs:
    """Who is let in. Paths are as they were given; ``token`` appears in no text that is made of this."""

    token: str = field(default="", repr=False)
    cert: str = ""
    key: str = ""
    ca: str = ""
    server_name: str = ""
    insecure: bool = False
    max_message_bytes: int = 8192 << 20

    @property
    def acting(self) -> list[str]:
        """The variables by which this job was to be protected, for whoever cannot honour them."""
        given = {"AUTH_TOKEN": self.token, "TLS_CERT": self.cert, "TLS_KEY": self.key, "TLS_CA": self.ca}
        return [f"FLEET_{name}" for name, value in given.items() if value]

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> SecurityKnobs:
        def text(name: str) -> str:
            return environ.get(name, "").strip()

        cert, key = text("FLEET_TLS_CERT"), text("FLEET_TLS_KEY")
        if bool(cert) != bool(key):
            given, missing = ("FLEET_TLS_CERT", "FLEET_TLS_KEY") if cert else ("FLEET_TLS_KEY", "FLEET_TLS_CERT")
            raise ConfigurationError(
                f"{given} is set and {missing} is not",
                expected="a certificate and its key",
                got=f"{given}={cert or key}",
                todo=f"Set {missing} to the path of the other one.",
            )
        name = text("FLEET_TLS_SERVER_NAME")
        if name and not text("FLEET_TLS_CA"):
            raise ConfigurationError(
                "FLEET_TLS_SERVER_NAME is set and FLEET_TLS_CA is not",
                got=f"FLEET_TLS_SERVER_NAME={name}",
                todo="Set FLEET_TLS_CA as well: without it no certificate is checked for a name.",
            )
        most = _number(environ, "FLEET_MAX_MESSAGE_MB", cls.max_message_bytes >> 20, whole=True)
        return cls(
            token=_token(environ),
            cert=cert,
            key=key,
            ca=text("FLEET_TLS_CA"),
            server_name=name,
            insecure=_flag(environ, "FLEET_INSECURE"),
            max_message_bytes=int(most) << 20,
        )


@dataclass(frozen=True)
class ObservingKnobs:
    """Where a process shows its figures, beside what ``fleet top`` asks for; nowhere unless told to."""

    record_dir: str = ""
    tensorboard_dir: str = ""
    #: 0: any free one; None: no Prometheus endpoint
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> ObservingKnobs:
        host = environ.get("FLEET_METRICS_HOST", "").strip()
        port = environ.get("FLEET_METRICS_PORT", "").strip()
        if host and not port:
            raise ConfigurationError(
                "FLEET_METRICS_HOST is set and FLEET_METRICS_PORT is not",
                got=f"FLEET_METRICS_HOST={host}",
                todo="Set FLEET_METRICS_PORT as well: without it there is no endpoint.",
            )
        return cls(
            record_dir=environ.get("FLEET_RECORD_DIR", "").strip(),
            tensorboard_dir=environ.get("FLEET_TENSORBOARD_DIR", "").strip(),
            metrics_port=_port_or_off(environ, "FLEET_METRICS_PORT") if port else None,
            metrics_host=host or cls.metrics_host,
        )


@dataclass(frozen=True)
class Knobs:
    """Deadlines and sizes that come from the environment; every duration is in seconds."""

    rpc_deadline_s: float = 180.0
    rpc_retry_times: int = 3
    rpc_get_thread_num: int = 12
    startup_deadline_s: float = 180.0
    beat_s: float = 1.0
    check_finite: bool = False
    job_id: str = ""
    #: who looks after all processes of the job, and tells what concerns them; empty: nobody does
    launcher: str = ""
    #: where a server takes direct connections, 0: at any free port; None: no direct connections
    direct_port: int | None = 0
    #: where a server listens, where that is not its endpoint
    binding: Binding = field(default_factory=Binding)
    #: where a server tells that it is ready; None: nowhere
    health_port: int | None = None
    #: where servers keep what they acknowledge; empty: nowhere
    durable_dir: str = ""
    durable_sync: str = "interval"
    communicator: CommunicatorKnobs = CommunicatorKnobs()
    security: SecurityKnobs = SecurityKnobs()
    observing: ObservingKnobs = ObservingKnobs()
    #: what all of it was read from, which may hold a token
    environ: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def joined(self, settings: Mapping[str, str]) -> Knobs:
        """With what a strategy says by the names of variables, which have to be unset or say the same."""
        if not settings:
            return self
        for name, value in settings.items():
            there = self.environ.get(name, "").strip()
            if there and there != value:
                raise ConfigurationError(
                    f"{name} says one thing in the environment and another in the strategy",
                    expected="the same, or one of them",
                    got=f"{there!r} and {value!r}",
                    todo=f"Unset {name}, or leave {name.removeprefix('FLEET_').lower()} out of with_settings().",
                )
        return self.read({**self.environ, **settings})

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Knobs:
        for name in _IDLE:
            _number(environ, name, 1, whole=True, least=0)
        deadline_s = _number(environ, "FLAGS_rpc_deadline", cls.rpc_deadline_s, unit=1e-3)
        # A short deadline alone is no contradiction: the heart just beats faster.
        beat_s = _number(environ, "FLEET_BEAT", min(cls.beat_s, deadline_s / 4), unit=1.0)
        if beat_s * 2 > deadline_s:
            raise ConfigurationError(
                "FLEET_BEAT (seconds between heartbeats) must be at most half of FLAGS_rpc_deadline (milliseconds)",
                expected=f"at most {deadline_s / 2:g} s",
                got=f"{beat_s:g} s",
                todo="Raise FLAGS_rpc_deadline or lower FLEET_BEAT.",
            )
        security = SecurityKnobs.read(environ)
        direct_port = _port_or_off(environ, "FLEET_DIRECT_PORT")
        if direct_port and (security.cert or security.ca):
            raise ConfigurationError(
                "FLEET_DIRECT_PORT chooses a port of direct connections, which would not be encrypted, beside TLS",
                expected="off or nothing where FLEET_TLS_* is set",
                got=direct_port,
                todo="Unset FLEET_DIRECT_PORT: with TLS, direct connections stay on their own machine.",
            )
        return cls(
            rpc_deadline_s=deadline_s,
            rpc_retry_times=int(_number(environ, "FLAGS_rpc_retry_times", cls.rpc_retry_times, least=0, whole=True)),
            rpc_get_thread_num=int(_number(environ, "FLAGS_rpc_get_thread_num", cls.rpc_get_thread_num, whole=True)),
            startup_deadline_s=_number(environ, "FLEET_STARTUP_DEADLINE", cls.startup_deadline_s, unit=1.0),
            beat_s=beat_s,
            check_finite=_flag(environ, "FLEET_CHECK_FINITE"),
            job_id=environ.get("FLEET_JOB_ID", "").strip(),
            launcher=environ.get("FLEET_LAUNCHER", "").strip(),
            direct_port=direct_port,
            binding=_binding(environ, "FLEET_BIND"),
            health_port=_port_if_any(environ, "FLEET_HEALTH_PORT"),
            durable_dir=environ.get("FLEET_DURABLE_DIR", "").strip(),
            durable_sync=_choice(environ, "FLEET_DURABLE_SYNC", cls.durable_sync, ("always", "interval", "os")),
            communicator=CommunicatorKnobs.read(environ),
            security=security,
            observing=ObservingKnobs.read(environ),
            environ=dict(environ),
        )


def remarks(environ: Mapping[str, str]) -> list[str]:
    """What there is to say of variables that are set and have no effect: misspelt ones, and those with nothing to act
    on."""
    said = []
    for name in sorted(environ):
        if name in _IDLE:
            said.append(f"the environment variable {name} has nothing to act on here (docs/environment.md says why)")
        elif name.startswith(("FLEET_", "FLAGS_rpc_", "FLAGS_communicator_")) and name not in _KNOWN:
            said.append(_unknown(name, nearest(name, _KNOWN)))
        elif not name.startswith("PADDLE_") and not _is_service_link(name, environ[name]):
            meant = misspelt(name, _KNOWN | ROLE_VARIABLES)
            said += [] if meant is None else [_unknown(name, meant)]
    of_paddle = {name: meant for name, meant in names_of_paddle(environ).items() if meant != name}
    # What would be another of Paddle's own is none of our business.
    return said + [_unknown(name, meant) for name, meant in of_paddle.items() if meant in ROLE_VARIABLES]


def names_of_paddle(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are Paddle's or nearly so, and what each probably means."""
    found = {
        name: nearest(name, ROLE_VARIABLES | _OF_PADDLE)
        for name in sorted(environ)
        if name.startswith("PADDLE_") and not _is_service_link(name, environ[name])
    }
    return {name: meant for name, meant in found.items() if meant is not None}


def remark(environ: Mapping[str, str]) -> None:
    """Log the remarks, each once. A launcher has made them for all processes that it started."""
    if environ.get("FLEET_LAUNCHER", "").strip():
        return
    for said in remarks(environ):
        if said not in _remarked:
            _remarked.add(said)
            _log.warning("%s", said)


def _is_service_link(name: str, value: str) -> bool:
    """Whether it is one of the variables that Kubernetes gives every pod for each service."""
    return bool(_SERVICE_LINK.search(name)) or (name.endswith("_PORT") and "://" in value)


def _unknown(name: str, meant: str | None) -> str:
    hint = "" if meant is None else f"; did you mean {meant}?"
    return f"the environment variable {name} is not known here and has no effect{hint}"


def _number(
    environ: Mapping[str, str], name: str, default: float, *, unit: float = 1.0, least: int = 1, whole: bool = False
) -> float:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(int(text)) if whole else float(text)
    except (ValueError, OverflowError):
        value = float("nan")
    if not (least if whole else 1e-9) <= value < float("inf"):
        kind = "a whole number" if whole else "a number"
        bound = f"of at least {least}" if whole else "above zero"
        raise ConfigurationError(f"{name} is not usable", expected=f"{kind} {bound}", got=repr(text))
    return value * unit


def _choice(environ: Mapping[str, str], name: str, default: str, among: tuple[str, ...]) -> str:
    text = environ.get(name, "").strip().lower() or default
    if text not in among:
        raise ConfigurationError(f"{name} is not usable", expected=" or ".join(among), got=repr(text))
    return text


def _token(environ: Mapping[str, str]) -> str:
    """The shared token. No error here may show it, nor what a wrong path happened to point to."""
    token, path = environ.get("FLEET_AUTH_TOKEN", "").strip(), environ.get("FLEET_AUTH_TOKEN_FILE", "").strip()
    if token and path:
        raise ConfigurationError(
            "FLEET_AUTH_TOKEN and FLEET_AUTH_TOKEN_FILE are both set", todo="Leave one of them: they name one token."
        )
    if path:
        try:
            token = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "not text"
            raise ConfigurationError("FLEET_AUTH_TOKEN_FILE cannot be read", where=path, got=why) from None
        if not token:
            raise ConfigurationError("FLEET_AUTH_TOKEN_FILE holds no token", where=path, got="an empty file")
    if len(token) > _LONGEST_TOKEN:
        raise ConfigurationError(
            "the token is too long", expected=f"up to {_LONGEST_TOKEN} characters", got=f"{len(token)}"
        )
    return token


def _port_or_off(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip().lower()
    if text == "off":
        return None
    if not text.isascii() or not (text or "0").isdigit() or int(text or "0") > 65535:
        raise ConfigurationError(f"{name} is not usable", expected="a port, 0 for any, or off", got=repr(text))
    return int(text or "0")


def _port_if_any(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise ConfigurationError(f"{name} is not usable", expected="a port from 1 to 65535", got=repr(text))
    return int(text)


def _binding(environ: Mapping[str, str], name: str) -> Binding:
    text = environ.get(name, "").strip()
    if not text:
        return Binding()
    try:
        host, port = parse_address(text)
    except ConfigurationError:
        host, port = "", 0
    if port == 0:
        raise ConfigurationError(
            f"{name} is not usable",
            expected="an address of this machine, as 10.0.0.1, [fd00::1], 0.0.0.0 or 10.0.0.1:6174",
            got=repr(text),
        )
    return Binding(host, port)


def _flag(environ: Mapping[str, str], name: str) -> bool:
    return bool(_maybe_flag(environ, name))


def _maybe_flag(environ: Mapping[str, str], name: str) -> bool | None:
    """None where it is not set."""
    text = environ.get(name, "").strip().lower()
    if not text:
        return None
    if text in ("0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise ConfigurationError(f"{name} is not usable", expected="1 or 0", got=repr(text))
