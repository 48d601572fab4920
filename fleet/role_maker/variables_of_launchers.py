"""Reads a cluster from environment variables, in every spelling that launchers have used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleet.base import checks
from fleet.base.cluster import Assignment, Endpoint, Role
from fleet.base.settings import PROCESS_ENVIRONMENT
from fleet.plan.specs import MOST_PROCESSES
from fleet.role_maker import arguments, torchrun
from fleet.role_maker.base import RoleMakerBase, collective
from fleet.role_maker.variables import Variables, whole

DEFAULT_PORT = 6174

_ROLE = ("PADDLE_TRAINING_ROLE", "TRAINING_ROLE")
_SERVER_LIST = "PADDLE_PSERVERS_IP_PORT_LIST"
_SERVER_HOSTS = ("PADDLE_PSERVER_IPS", "PADDLE_PSERVERS")
_SERVER_ID = "PADDLE_PSERVER_ID"
_WORKER_LIST = "PADDLE_TRAINER_ENDPOINTS"
_WORKER_HOSTS = ("PADDLE_TRAINER_IPS",)
_WORKER_ID = "PADDLE_TRAINER_ID"
_WORKER_NUM = ("PADDLE_TRAINERS", "PADDLE_TRAINERS_NUM")
_PORT = ("PADDLE_PSERVER_PORT", "PADDLE_PORT")
_OWN_ENDPOINT = "PADDLE_CURRENT_ENDPOINT"
_OWN_HOST = ("PADDLE_CURRENT_IP", "POD_IP")

#: What only one process has.
_OF_ONE = (_SERVER_ID, _WORKER_ID, _OWN_ENDPOINT, "PADDLE_CURRENT_IP")

_ORIGIN = "PADDLE_* environment variables"
_ROLES = {"PSERVER": Role.SERVER, "TRAINER": Role.WORKER}


def names_servers(environ: Mapping[str, str]) -> bool:
    return bool(Variables(environ).given(_SERVER_LIST, *_SERVER_HOSTS))


def names_workers(environ: Mapping[str, str]) -> bool:
    return bool(Variables(environ).given(_WORKER_LIST, *_WORKER_HOSTS))


def mentions_job(environ: Mapping[str, str]) -> bool:
    """Say whether any variable speaks of a job, even if only half of one is described.

    Addresses and ports of this pod do not count: Kubernetes sets them for every pod, and a service called
    ``paddle`` sets ``PADDLE_PORT`` for all its neighbours.
    """
    half = bool(Variables(environ).given(*_ROLE, *_WORKER_NUM, *_OF_ONE))
    return half or names_servers(environ) or names_workers(environ)


class EnvRoleMaker(RoleMakerBase):
    """Describes this process as ``PADDLE_*`` variables say; a collective job may be torchrun's instead, and where they
    name nothing but servers, torchrun's processes are the workers.

    One error tells everything that is missing, malformed or contradictory at once.

    Examples:
        >>> from fleet.role_maker import EnvRoleMaker
        >>> EnvRoleMaker(environ={"PADDLE_TRAINING_ROLE": "TRAINER", "PADDLE_TRAINERS": "2", "PADDLE_TRAINER_ID": "2"})
        Traceback (most recent call last):
            ...
        fleet.errors.ConfigurationError: the environment does not describe this process of a parameter-server job:
          PADDLE_PSERVERS_IP_PORT_LIST or PADDLE_PSERVER_IPS or PADDLE_PSERVERS: expected the servers' addresses ...
          PADDLE_TRAINER_ID: expected a whole number from 0 to 1, found '2'
    """

    def __init__(self, is_collective: bool = False, environ: Mapping[str, str] = PROCESS_ENVIRONMENT) -> None:
        checks.switch("is_collective", is_collective)
        if is_collective and torchrun.at_work(environ) and not mentions_job(environ):
            self._assignment = torchrun.TorchrunRoleMaker(environ).assignment()
        elif is_collective:
            self._assignment = _collective(Variables(environ))
        else:
            self._assignment = _parameter_server(Variables(environ))

    def assignment(self) -> Assignment:
        return self._assignment


PaddleCloudRoleMaker = EnvRoleMaker


def _parameter_server(variables: Variables) -> Assignment:
    if torchrun.has_started(variables) and _only_servers(variables):
        return torchrun.worker_beside(_members(variables, _SERVER_LIST, _SERVER_HOSTS), variables)
    role = variables.need(_ROLE, _role, "PSERVER or TRAINER", otherwise=None)
    servers = _members(variables, _SERVER_LIST, _SERVER_HOSTS)
    if not variables.given(_SERVER_LIST, *_SERVER_HOSTS):
        variables.missing(
            (_SERVER_LIST, *_SERVER_HOSTS), f"the servers' addresses (or {_WORKER_LIST}, for a collective job)"
        )
    # PADDLE_TRAINER_IPS says nothing here: the common port is the servers'.
    workers = _members(variables, _WORKER_LIST, ())
    worker_num = _worker_num(variables, workers)
    if not variables.given(*_WORKER_NUM, _WORKER_LIST):
        variables.missing(_WORKER_NUM, "how many trainers there are")
    index = 0
    likely = _likely_role(variables) if role is None else role
    if likely is Role.SERVER:
        index = _place(variables, servers, _SERVER_ID)
    elif likely is Role.WORKER:
        index = variables.need((_WORKER_ID,), *whole(0, below=worker_num), otherwise=0)
    variables.raise_complaints("a parameter-server job")
    assert role is not None, "raise_complaints has raised"
    return Assignment(role, index, worker_num, servers, workers, origin=_ORIGIN)


def _likely_role(variables: Variables) -> Role | None:
    """Return the role that other variables speak for, where none is given or none that is known: what is wrong with
    them is told in the same error."""
    if variables.given(_WORKER_ID):
        return Role.WORKER
    return Role.SERVER if variables.given(_SERVER_ID, _OWN_ENDPOINT, "PADDLE_CURRENT_IP") else None


def _only_servers(variables: Variables) -> bool:
    """Say whether servers are named, and nothing that tells one process from another."""
    others = variables.given(*_ROLE, *_WORKER_NUM, _WORKER_LIST, *_OF_ONE)
    return bool(variables.given(_SERVER_LIST, *_SERVER_HOSTS)) and not others


def _collective(variables: Variables) -> Assignment:
    if variables.read(_ROLE, _role, "TRAINER, the only role of a collective job") is Role.SERVER:
        variables.complain(variables.given(*_ROLE), "TRAINER, the only role of a collective job")
    workers = _members(variables, _WORKER_LIST, _WORKER_HOSTS)
    if not variables.given(_WORKER_LIST, *_WORKER_HOSTS):
        variables.missing((_WORKER_LIST, *_WORKER_HOSTS), "the workers' addresses (or a start by torchrun)")
    _worker_num(variables, workers)
    index = _place(variables, workers, _WORKER_ID)
    variables.raise_complaints("a collective job")
    return collective(workers, index, _ORIGIN)


def _role(text: str) -> Role:
    if text not in _ROLES:
        raise ValueError(text)
    return _ROLES[text]


def _worker_num(variables: Variables, workers: Sequence[Endpoint]) -> int:
    """Return the number of workers, 0 where nothing sound says it; a list of them has to be as long.

    paddle-operator puts the workers' hosts where others put their number, and the number into the other spelling.
    """
    parse, expected = whole(1, below=MOST_PROCESSES + 1)
    hosts = [worker.host for worker in workers]

    def parse_either(text: str) -> int:
        if hosts and [host for host, _ in _addresses(text)] == hosts:
            return len(hosts)
        return parse(text)

    number = variables.read(_WORKER_NUM, parse_either, expected)
    if number is not None and workers and number != len(workers):
        names = variables.given(*_WORKER_NUM) + variables.given(_WORKER_LIST, *_WORKER_HOSTS)
        variables.complain(names, "as many trainers as are listed")
    return number or len(workers)


def _members(variables: Variables, listed: str, hosts: Sequence[str]) -> tuple[Endpoint, ...]:
    """Return the endpoints in ``listed``, or else those in ``hosts``; a host without a port of its own has the common
    one."""
    whole_list = variables.read((listed,), _endpoints, "host:port,host:port,... with ports 1 to 65535")
    host_list = variables.read(hosts, _addresses, "host,host,... or host:port,host:port,...")
    if whole_list and host_list:
        # A host without a port agrees with any: PADDLE_PORT may be this server's own and not the others'.
        agree = len(whole_list) == len(host_list) and all(
            host == member.host and port in (None, member.port)
            for member, (host, port) in zip(whole_list, host_list, strict=True)
        )
        if not agree:
            variables.complain((listed, *variables.given(*hosts)), "the same addresses in the same order")
    members = whole_list or ()
    if not whole_list and variables.given(*hosts):
        # Of hosts that cannot be read, some would need the common port: it is checked together with them.
        common = _port(variables) if host_list is None or any(port is None for _, port in host_list) else None
        members = tuple(Endpoint(host, port or common or DEFAULT_PORT) for host, port in host_list or ())
    if len(set(members)) < len(members):
        names = (listed,) if whole_list else (*variables.given(*hosts), *variables.given(*_PORT))
        variables.complain(names, "no endpoint twice")
    return tuple(dict.fromkeys(members))


def _place(variables: Variables, members: tuple[Endpoint, ...], identity: str) -> int:
    """Return which member this process is: each variable that says so leaves some candidates, and all together leave
    one."""
    claims: dict[tuple[str, ...], set[int]] = {}
    number = variables.read((identity,), *whole(0, below=len(members)))
    if number is not None:
        claims[(identity,)] = {number}
    endpoint = variables.read((_OWN_ENDPOINT,), arguments.endpoint, "host:port with a port from 1 to 65535")
    if endpoint is not None:
        claims[(_OWN_ENDPOINT,)] = {i for i, member in enumerate(members) if member == endpoint}
    own = variables.read(_OWN_HOST, arguments.address, "this process's host")
    if own is not None:
        names, (host, port) = variables.given(*_OWN_HOST), own
        if port is None:
            port = _port(variables)
            names += variables.given(*_PORT)
        candidates = {i for i, member in enumerate(members) if member.host == host and port in (None, member.port)}
        # A pod's address that is in no list is just that, where something else says who this is.
        if candidates or "PADDLE_CURRENT_IP" in names or not claims:
            claims[names] = candidates
    elif variables.given(*_OWN_HOST):
        _port(variables)  # it may belong to the host that cannot be read
    everyone = ",".join(map(str, members))
    if not variables.given(identity, _OWN_ENDPOINT, *_OWN_HOST):
        whose = f"which of {everyone} this process is" if members else "which of them this process is"
        variables.missing((identity, _OWN_ENDPOINT, *_OWN_HOST), whose)
    strangers = [names for names, candidates in claims.items() if not candidates]
    common = set(range(len(members))).intersection(*claims.values())
    if members and strangers:
        for names in strangers:
            variables.complain(names, f"one of {everyone}")
    elif members and claims and len(common) != 1:
        variables.complain([name for names in claims for name in names], f"one and the same of {everyone}")
    return min(common, default=0)


def _port(variables: Variables) -> int | None:
    return variables.read(_PORT, *whole(1, below=65536))


def _endpoints(text: str) -> tuple[Endpoint, ...]:
    return tuple(map(arguments.endpoint, text.split(",")))


def _addresses(text: str) -> tuple[tuple[str, int | None], ...]:
    return tuple(map(arguments.address, text.split(",")))
