"""Lists the settings in one table: a field of one of the classes below is a row of it.

A row has the variable's name, its type, its default, who reads it, and a sentence. Everything else comes from the rows:
what ``read`` parses, which names ``fleet.base.unknown_variables`` knows, and the tables of docs/environment.md, which
docs/variables.py writes. A variable of another system's, which role makers read, is a row in
``fleet.base.launcher_variables``.

This is the one file that reads the process environment. ``PROCESS_ENVIRONMENT`` is the live mapping, which is handed to
everything that takes an ``environ=`` argument.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from fleet.base.cluster import Binding
from fleet.base.setting_kinds import (
    ADDRESS,
    HOST,
    JOB_ID,
    LOCAL_PATH,
    MEBIBYTES,
    MILLISECONDS,
    PATH,
    PORT,
    PORT_OR_OFF,
    SECONDS,
    SWITCH,
    TEXT,
    Kind,
    choice,
    whole,
)
from fleet.errors import ConfigurationError

PROCESS_ENVIRONMENT: Mapping[str, str] = os.environ


def change_process_environment(environ: Mapping[str, str]) -> None:
    """Give this process other variables, for who starts a part of a job in a process that is there already."""
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)


#: A longer one is no token but a file given by mistake, and gRPC carries not much more beside a request.
_LONGEST_TOKEN = 1024

#: Who reads a setting. The processes of a collective job read those of everybody.
_ALL, _BOTH, _WORKERS, _SERVERS = "every process", "workers and servers", "workers", "servers"
_NOBODY = "nobody"

T = TypeVar("T")
D = TypeVar("D")


@dataclass(frozen=True)
class Setting:
    """Describes one row of the table."""

    name: str
    kind: Kind[Any]
    #: as the page says it, where the value alone does not
    default: str
    readers: str
    meaning: str
    #: the name that it had before, which is still read
    formerly: str = ""

    def values(self, environ: Mapping[str, str]) -> list[Any]:
        """Return what the environment says: one value, or none. Two names of one setting have to agree."""
        said = {name: environ.get(name, "").strip() for name in (self.name, self.formerly)}
        given = {name: text for name, text in said.items() if text}
        values = [self.kind.read(name, text) for name, text in given.items()]
        if len(values) > 1 and values[0] != values[1]:
            raise ConfigurationError(
                f"{self.formerly} and {self.name} are two names of one setting and say different things",
                expected="the same, or one of them",
                got=f"{given[self.formerly]!r} and {given[self.name]!r}",
                todo=f"Unset {self.formerly}, the older name.",
            )
        return values[:1]


def setting(
    name: str,
    kind: Kind[T],
    default: D,
    readers: str,
    meaning: str,
    *,
    default_in_words: str = "",
    formerly: str = "",
    secret: bool = False,
) -> T | D:
    """Return a field that is a row of the table: its value is what the variable ``name`` says, or else ``default``."""
    words = default_in_words or _in_words(default, kind)
    row = Setting(name, kind, words, readers, meaning, formerly)
    return field(default=default, repr=not secret, metadata={"setting": row})


def _in_words(default: object, kind: Kind[Any]) -> str:
    if isinstance(default, int | float):
        return f"{default / kind.unit:g}"
    return f"`{default}`" if default else "none"


def rows(table: type) -> list[Setting]:
    """Return the settings of one of the classes below, in their order."""
    return [each.metadata["setting"] for each in fields(table) if "setting" in each.metadata]


def _given(table: type, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what the environment says about the fields of ``table``, by their names."""
    of_a_row = {each.name: each.metadata["setting"] for each in fields(table) if "setting" in each.metadata}
    return {name: value for name, row in of_a_row.items() for value in row.values(environ)}


@dataclass(frozen=True)
class CommunicatorSettings:
    """Holds how workers of the relaxed modes merge, send and fetch; a strategy may say each of these itself."""

    max_merge_var_num: int = setting(
        *("FLAGS_communicator_max_merge_var_num", whole(), 1, _WORKERS),
        "asynchronous and half-asynchronous: how many steps' gradients become one push",
    )
    is_sgd_optimizer: bool | None = setting(
        *("FLAGS_communicator_is_sgd_optimizer", SWITCH, None, _WORKERS),
        "the same: `1` sums merged gradients, `0` averages them",
        default_in_words="found out from the optimizer",
    )
    send_queue_size: int = setting(
        *("FLAGS_communicator_send_queue_size", whole(), 2, _WORKERS),
        "asynchronous: how many steps may wait to be sent before `step()` does",
    )
    send_wait_times: int = setting(
        *("FLAGS_communicator_send_wait_times", whole(0), 5, _WORKERS),
        "asynchronous: how often, 10 ms each, the sender waits for more to merge",
    )
    min_send_grad_num_before_recv: int = setting(
        *("FLAGS_communicator_min_send_grad_num_before_recv", whole(), 1, _WORKERS),
        "asynchronous: after how many steps' gradients parameters are fetched",
    )
    independent_recv_thread: bool = setting(
        *("FLAGS_communicator_independent_recv_thread", SWITCH, True, _WORKERS),
        "asynchronous: whether a thread of its own fetches them if a server has 256 KiB or more, or they always come "
        "with the answer to a push",
    )
    thread_pool_size: int = setting(
        *("FLAGS_communicator_thread_pool_size", whole(), 5, _WORKERS),
        "asynchronous: how many servers the sender, and the receiver, talk to at once",
    )

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> CommunicatorSettings:
        return cls(**_given(cls, environ))


@dataclass(frozen=True)
class SecuritySettings:
    """Holds what decides who is let in. Paths are as they were given; ``token`` appears in no text made of this."""

    token: str = setting(
        *("FLEET_AUTH_TOKEN", TEXT, "", _BOTH),
        "the token that every process of the job shares; workers with another one, or none, are refused",
        secret=True,
    )
    token_file: str = setting("FLEET_AUTH_TOKEN_FILE", PATH, "", _BOTH, "a file that holds the token; not both")
    cert: str = setting(
        *("FLEET_TLS_CERT", PATH, "", _BOTH),
        "this process's certificate, PEM, with what lies between it and the authority; a server that has one speaks "
        "TLS only",
    )
    key: str = setting("FLEET_TLS_KEY", PATH, "", _BOTH, "the certificate's key, PEM, without a password")
    ca: str = setting(
        *("FLEET_TLS_CA", PATH, "", _BOTH),
        "the authorities that sign the other side's certificates, PEM; a worker that has it speaks TLS only, a server "
        "that has it lets in only workers with a certificate",
    )
    server_name: str = setting(
        *("FLEET_TLS_SERVER_NAME", TEXT, "", _WORKERS),
        "the name that servers' certificates have to be for",
        default_in_words="the host of the endpoint",
    )
    insecure: bool = setting(
        *("FLEET_INSECURE", SWITCH, False, _SERVERS),
        "`1`: a server without a token and without certificates of clients may listen on a public address",
    )
    max_message_bytes: int = setting(
        *("FLEET_MAX_MESSAGE_MB", MEBIBYTES, 8192 << 20, _BOTH),
        "the largest message that is sent, or taken, in tensors; the same everywhere",
    )

    @property
    def acting(self) -> list[str]:
        """Return the variables that were to protect this job, for the error of a job that cannot honour them."""
        given = {"AUTH_TOKEN": self.token, "TLS_CERT": self.cert, "TLS_KEY": self.key, "TLS_CA": self.ca}
        return [f"FLEET_{name}" for name, value in given.items() if value]

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> SecuritySettings:
        given = _given(cls, environ)
        cert, key = given.get("cert", ""), given.get("key", "")
        if bool(cert) != bool(key):
            there, missing = ("FLEET_TLS_CERT", "FLEET_TLS_KEY") if cert else ("FLEET_TLS_KEY", "FLEET_TLS_CERT")
            raise ConfigurationError(
                f"{there} is set and {missing} is not",
                expected="a certificate and its key",
                got=f"{there}={cert or key}",
                todo=f"Set {missing} to the path of the other one.",
            )
        if "server_name" in given and "ca" not in given:
            raise ConfigurationError(
                "FLEET_TLS_SERVER_NAME is set and FLEET_TLS_CA is not",
                got=f"FLEET_TLS_SERVER_NAME={given['server_name']}",
                todo="Set FLEET_TLS_CA as well: without it no certificate is checked for a name.",
            )
        return cls(**{**given, "token": _token(given.get("token", ""), given.get("token_file", ""))})


@dataclass(frozen=True)
class ObservingSettings:
    """Holds where a process shows its figures, beside what ``fleet top`` asks for; nowhere unless told to."""

    record_dir: str = setting(
        *("FLEET_RECORD_DIR", LOCAL_PATH, "", _ALL),
        "a directory, where each process keeps a line a second, up to 8 MiB, for `fleet report`, `fleet top` and "
        "`fleet doctor`",
        default_in_words="none; under `fleetrun` its `--log_dir`",
    )
    metrics_port: int | None = setting(
        *("FLEET_METRICS_PORT", PORT_OR_OFF, None, _ALL),
        "a port with figures for Prometheus, 0 for any free one; `fleetrun` counts on from it, one a process",
    )
    metrics_host: str = setting(
        *("FLEET_METRICS_HOST", HOST, "127.0.0.1", _ALL),
        "the address for it; a public one is refused unless `FLEET_INSECURE` is set. Needs the port",
    )
    tensorboard_dir: str = setting(
        *("FLEET_TENSORBOARD_DIR", PATH, "", _ALL),
        "a directory, where each process writes scalars for TensorBoard",
    )

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> ObservingSettings:
        given = _given(cls, environ)
        if "metrics_host" in given and not environ.get("FLEET_METRICS_PORT", "").strip():
            raise ConfigurationError(
                "FLEET_METRICS_HOST is set and FLEET_METRICS_PORT is not",
                got=f"FLEET_METRICS_HOST={given['metrics_host']}",
                todo="Set FLEET_METRICS_PORT as well: without it there is no endpoint.",
            )
        return cls(**given)


@dataclass(frozen=True)
class ProcessSettings:
    """Holds deadlines and sizes that come from the environment; every duration is in seconds."""

    rpc_deadline_s: float = setting(
        *("FLAGS_rpc_deadline", MILLISECONDS, 180.0, _ALL),
        "how long a peer may be silent before it is given up on",
    )
    rpc_retry_times: int = setting(
        *("FLAGS_rpc_retry_times", whole(0), 3, _BOTH),
        "how often a request is repeated that keeps breaking *although the server's heartbeats are answered*",
    )
    rpc_get_thread_num: int = setting(
        *("FLAGS_rpc_get_thread_num", whole(), 12, _SERVERS),
        "threads that take requests in and send late replies out over gRPC",
    )
    startup_deadline_s: float = setting(
        *("FLEET_STARTUP_DEADLINE_S", SECONDS, 180.0, _ALL),
        "how long processes wait for each other when a job starts",
        formerly="FLEET_STARTUP_DEADLINE",
    )
    heartbeat_s: float = setting(
        *("FLEET_HEARTBEAT_S", SECONDS, 1.0, _ALL),
        "the time between heartbeats; at most half of `FLAGS_rpc_deadline`",
        default_in_words="1, or a quarter of `FLAGS_rpc_deadline` if that is less",
        formerly="FLEET_BEAT",
    )
    drain: bool = setting(
        *("FLEET_DRAIN", SWITCH, False, _SERVERS),
        "`1`: SIGTERM on a server asks the job to go on without it, and the server ends when that is so "
        "([more](scaling.md#to-drain-a-machine))",
    )
    check_finite: bool = setting(
        *("FLEET_CHECK_FINITE", SWITCH, False, _ALL),
        "`1`: a NaN or infinity in a gradient is an error that names the parameter "
        "([more](synchronous.md#nan-and-infinity))",
    )
    direct_port: int | None = setting(
        *("FLEET_DIRECT_PORT", PORT_OR_OFF, 0, _BOTH),
        "on servers, the port of [direct connections](protocol.md#direct-connections); `off`, on either: everything "
        "goes through gRPC",
        default_in_words="0: any free one",
    )
    binding: Binding = setting(  # noqa: RUF009 (a binding is frozen)
        *("FLEET_BIND_ADDRESS", ADDRESS, Binding(), _SERVERS),
        "where to listen, where that is not the address by which others reach this server "
        "([when](deploying/machines.md#where-a-server-listens))",
        default_in_words="the endpoint",
        formerly="FLEET_BIND",
    )
    health_port: int | None = setting(
        *("FLEET_HEALTH_PORT", PORT, None, _SERVERS),
        "where gRPC's health protocol is answered, to whoever asks "
        "([for Kubernetes](deploying/kubernetes.md#readiness)); takes the extra `health`",
    )
    durable_dir: str = setting(
        *("FLEET_DURABLE_DIR", LOCAL_PATH, "", _SERVERS),
        "the directory where servers keep what they have acknowledged, and go on from when they are started again "
        "([how](failures.md#durable-servers))",
    )
    durable_sync: str = setting(
        *("FLEET_DURABLE_SYNC", choice("always", "interval", "os"), "interval", _SERVERS),
        "when that is written to the disk itself: `always`, before anything is acknowledged; `interval`, once a "
        "second; `os`, when the system pleases",
    )
    durable_keep: str = setting(
        *("FLEET_DURABLE_KEEP", choice("needed", "all"), "needed", _SERVERS),
        "how much of that is kept: `needed`, what a server goes on from, until the job's end; `all`, everything, from "
        "the first step on and after the job's end, for [`fleet replay`](replay.md)",
    )
    table_memory_bytes: int | None = setting(
        *("FLEET_TABLE_MEMORY_MB", MEBIBYTES, None, _SERVERS),
        "the memory that all rows of a server, or of a replica, may take; the others lie in files "
        "([how](embeddings.md#tables-larger-than-memory))",
        default_in_words="as much as they need",
    )
    table_dir: str = setting(
        *("FLEET_TABLE_DIR", LOCAL_PATH, "", _SERVERS),
        "the directory of these files, on a local disk; servers of one host may share it",
        default_in_words="the system's temporary directory",
    )
    whole_table_bytes: int = setting(
        *("FLEET_WHOLE_TABLE_MB", MEBIBYTES, 256 << 20, _WORKERS),
        "the largest table of which a worker holds all rows, where a script uses its `weight` as a whole "
        "([when](embeddings.md#weight-as-a-whole))",
    )
    evict_every: int = setting(
        *("FLEET_EVICT_EVERY", whole(), 1000, _WORKERS),
        "after how many steps of a table rows leave it again, where it has rules for that "
        "([more](embeddings.md#rows-that-come-and-leave)); all workers have to say the same",
    )
    job_id: str = setting(
        *("FLEET_JOB_ID", JOB_ID, "", _ALL),
        "a name for the job: a server refuses a worker with a different one",
        default_in_words="none; `fleetrun` makes one up",
    )
    #: who looks after all processes of the job, and reports on them; empty: nobody does
    launcher: str = setting(
        *("FLEET_LAUNCHER", TEXT, "", _ALL),
        "says that somebody looks after all processes of the job: they leave to it what it "
        "[tells for all of them](observing.md#what-processes-say-by-themselves)",
        default_in_words="none; under `fleetrun` its name",
    )
    communicator: CommunicatorSettings = CommunicatorSettings()
    security: SecuritySettings = SecuritySettings()
    observing: ObservingSettings = ObservingSettings()
    #: the environment that all of it was read from, which may hold a token
    environ: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def joined(self, settings: Mapping[str, str]) -> ProcessSettings:
        """Return these settings with those of a strategy, by the names of their variables, which have to be unset or
        say the same."""
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
    def read(cls, environ: Mapping[str, str]) -> ProcessSettings:
        for idle in IDLE:
            idle.values(environ)
        given = _given(cls, environ)
        deadline_s = given.get("rpc_deadline_s", cls.rpc_deadline_s)
        # A short deadline alone is no contradiction: the heart just beats faster.
        heartbeat_s = given.setdefault("heartbeat_s", min(cls.heartbeat_s, deadline_s / 4))
        if heartbeat_s * 2 > deadline_s:
            raise ConfigurationError(
                "FLEET_HEARTBEAT_S (seconds between heartbeats) must be at most half of FLAGS_rpc_deadline "
                "(milliseconds)",
                expected=f"at most {deadline_s / 2:g} s",
                got=f"{heartbeat_s:g} s",
                todo="Raise FLAGS_rpc_deadline or lower FLEET_HEARTBEAT_S.",
            )
        security = SecuritySettings.read(environ)
        return cls(
            **given,
            communicator=CommunicatorSettings.read(environ),
            security=security,
            observing=ObservingSettings.read(environ),
            environ=dict(environ),
        )


#: Settings of the source documents with nothing to act on here, checked all the same.
IDLE = (
    Setting(
        *("FLAGS_rpc_send_thread_num", whole(0), "none", _NOBODY),
        "a worker sends to all servers at once from the thread that called `step()`; the requests are under way "
        "together, each on a connection of its own, so there is no pool to size",
    ),
    Setting(
        *("FLAGS_rpc_prefetch_thread_num", whole(0), "none", _NOBODY),
        "rows are asked for in the same way, one request a server, from the thread that runs the forward",
    ),
)

#: Every setting by its name; one that has an older name is there under both.
SETTINGS: Mapping[str, Setting] = {
    name: row
    for table in (ProcessSettings, CommunicatorSettings, ObservingSettings, SecuritySettings)
    for row in rows(table)
    for name in (row.name, row.formerly)
    if name
} | {row.name: row for row in IDLE}


def under_present_names(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with every setting under its present name, for processes that are started with it."""
    present = dict(environ)
    for row in {row.formerly: row for row in SETTINGS.values() if row.formerly in environ}.values():
        row.values(environ)  # refuses two names that do not agree
        older = present.pop(row.formerly)
        if not present.get(row.name, "").strip():
            present[row.name] = older
    return present


def _token(token: str, path: str) -> str:
    """Return the shared token. No error here may show it, nor the content of a file that a wrong path happened to
    name."""
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
