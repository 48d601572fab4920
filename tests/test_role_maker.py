from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from fleet import Fleet, role_maker
from fleet.base.cluster import Assignment, Endpoint
from fleet.base.facade import collective, parameter_server
from fleet.errors import ArgumentTypeError, ConfigurationError, FleetError
from fleet.role_maker import (
    EnvRoleMaker,
    PaddleCloudRoleMaker,
    Role,
    RoleMakerBase,
    SlurmRoleMaker,
    UserDefinedCollectiveRoleMaker,
    UserDefinedRoleMaker,
)
from fleet.role_maker.alone import LocalRoleMaker
from fleet.role_maker.doubts import doubts
from fleet.role_maker.resolve import resolve
from fleet.role_maker.torchrun import TorchrunRoleMaker

Env = dict[str, str]


# --- Checked in the constructor, in order -----------------------------------------------------------------------------

BAD_ENDPOINTS: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, "must be a list"),
    ("a:1,b:2", TypeError, "must be a list"),
    (("a:1",), TypeError, "must be a list"),
    ([], ValueError, "empty"),
    (["a:1", "a:1", 3], ValueError, "twice"),
    (["a:1", "a:1", "bad"], ValueError, "twice"),
    ([3, 3], ValueError, "twice"),
    ([[], "a:1", "a:1"], ValueError, "twice"),
    (["bad", 3], TypeError, "strings only"),
    ([[], "a:1"], TypeError, "strings only"),
    ([[], []], TypeError, "strings only"),
    ([None], TypeError, "strings only"),
    ([b"a:1"], TypeError, "strings only"),
    (["a:1", "b"], ValueError, r"endpoints\[1\].*host:port"),
    (["a:0"], ValueError, "malformed"),
    (["a:65536"], ValueError, "malformed"),
    (["a:1", " a:1"], ValueError, "twice"),
    (["a:1", "a:01"], ValueError, "twice"),
]
BAD_IDS: list[tuple[Any, type[Exception], str]] = [
    ("0", TypeError, "current_id must be an int"),
    (0.0, TypeError, "current_id must be an int"),
    (True, TypeError, "current_id must be an int"),
    (-1, ValueError, "negative"),
    (2, ValueError, "current_id is out of range.*0 to 1"),
]


@pytest.mark.parametrize(("endpoints", "error", "match"), BAD_ENDPOINTS)
def test_endpoints_are_checked_first(endpoints: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        UserDefinedRoleMaker("no id", "no role", "no number", endpoints)  # type: ignore[arg-type]
    assert isinstance(caught.value, FleetError)
    with pytest.raises(error, match=match):
        UserDefinedCollectiveRoleMaker("no id", endpoints)  # type: ignore[arg-type]


@pytest.mark.parametrize("role", [1, 2, "WORKER", None, Role])
def test_then_the_role(role: Any) -> None:
    with pytest.raises(TypeError, match="role must be a Role"):
        UserDefinedRoleMaker("no id", role, "no number", ["a:1"])  # type: ignore[arg-type]


@pytest.mark.parametrize(("current_id", "error", "match"), BAD_IDS)
def test_then_the_id(current_id: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        UserDefinedRoleMaker(current_id, Role.SERVER, "no number", ["a:1", "b:2"])  # type: ignore[arg-type]
    with pytest.raises(error, match=match):
        UserDefinedRoleMaker(current_id, Role.WORKER, 2, ["a:1"])
    with pytest.raises(error, match=match):
        UserDefinedCollectiveRoleMaker(current_id, ["a:1", "b:2"])


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    ("worker_num", "error", "match"),
    [
        ("2", TypeError, "worker_num must be an int"),
        (None, TypeError, "worker_num must be an int"),
        (True, TypeError, "worker_num must be an int"),
        (0, ValueError, "worker_num must be greater than 0"),
        (-1, ValueError, "worker_num must be greater than 0"),
        (10**20, ValueError, "worker_num is out of range; expected at most 65536"),
    ],
)
def test_then_the_number_of_workers(role: Role, worker_num: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        UserDefinedRoleMaker(0, role, worker_num, ["a:1"])


def test_ids_count_within_the_role() -> None:
    with pytest.raises(ValueError, match="0 to 0, for 1 servers"):
        UserDefinedRoleMaker(1, Role.SERVER, 5, ["a:1"])
    assert UserDefinedRoleMaker(4, Role.WORKER, 5, ["a:1"]).assignment().index == 4


def test_signatures_are_the_documented_ones() -> None:
    def defaults(kind: type) -> list[tuple[str, object]]:
        return [(p.name, p.default) for p in inspect.signature(kind).parameters.values()]

    assert defaults(UserDefinedRoleMaker) == [
        ("current_id", 0),
        ("role", Role.WORKER),
        ("worker_num", 0),
        ("server_endpoints", None),
    ]
    assert defaults(UserDefinedCollectiveRoleMaker) == [("current_id", 0), ("worker_endpoints", None)]
    assert [name for name, _ in defaults(EnvRoleMaker)] == ["is_collective", "environ"]
    assert PaddleCloudRoleMaker is EnvRoleMaker
    assert all(hasattr(role_maker, name) for name in role_maker.__all__)


def test_a_role_maker_is_one_class_with_one_method() -> None:
    assert RoleMakerBase.__abstractmethods__ == {"assignment"}


@pytest.mark.parametrize(
    "returned", [None, 3, UserDefinedRoleMaker(0, Role.WORKER, 1, ["a:1"])], ids=["nothing", "int", "maker"]
)
def test_what_its_method_returns_is_checked(returned: Any) -> None:
    class Own(RoleMakerBase):
        def assignment(self) -> Assignment:
            return returned

    for init in (Fleet(environ={}).init, parameter_server.init, collective.init):
        with pytest.raises(ArgumentTypeError, match=r"Own.assignment\(\) returns something that is no assignment"):
            init(Own())


# --- The same cluster seen from every node ----------------------------------------------------------------------------

SERVERS = ["127.0.0.1:6174", "127.0.0.2:6174"]
WORKERS = ["10.0.0.1:7000", "10.0.0.1:7001", "10.0.0.2:7000"]
PS: Env = {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(SERVERS), "PADDLE_TRAINERS": "3"}
TRAINER: Env = {**PS, "PADDLE_TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "1"}
PSERVER: Env = {**PS, "PADDLE_TRAINING_ROLE": "PSERVER", "PADDLE_CURRENT_ENDPOINT": SERVERS[1]}
COLLECTIVE: Env = {"PADDLE_TRAINER_ENDPOINTS": ",".join(WORKERS), "PADDLE_TRAINER_ID": "1"}
TORCHRUN: Env = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7000"}


def _user(role: Role, i: int) -> RoleMakerBase:
    return UserDefinedRoleMaker(i, role, 3, list(SERVERS))


def _env(role: Role, i: int) -> RoleMakerBase:
    if role is Role.WORKER:
        return EnvRoleMaker(environ={**TRAINER, "PADDLE_TRAINER_ID": str(i)})
    return EnvRoleMaker(environ={**PSERVER, "PADDLE_CURRENT_ENDPOINT": SERVERS[i]})


def _env_ips(role: Role, i: int) -> RoleMakerBase:
    ips = [server.partition(":")[0] for server in SERVERS]
    environ = {"PADDLE_PSERVER_IPS": ", ".join(ips), "PADDLE_TRAINERS_NUM": "3", "POD_IP": ips[i % 2]}
    mine = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(i)}
    return EnvRoleMaker(environ={**environ, **(mine if role is Role.WORKER else {"TRAINING_ROLE": "PSERVER"})})


def _user_collective(role: Role, i: int) -> RoleMakerBase:
    return UserDefinedCollectiveRoleMaker(i, list(WORKERS))


def _env_collective(role: Role, i: int) -> RoleMakerBase:
    return EnvRoleMaker(True, {**COLLECTIVE, "PADDLE_TRAINER_ID": str(i)})


def _torchrun(role: Role, i: int) -> RoleMakerBase:
    return TorchrunRoleMaker({**TORCHRUN, "RANK": str(i), "LOCAL_RANK": str(i % 2)})


def _slurm(role: Role, i: int) -> RoleMakerBase:
    tasks = {Role.WORKER: [1, 2, 4], Role.SERVER: [0, 3]}
    step = {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NODELIST": "127.0.0.[1-2]", "SLURM_STEP_TASKS_PER_NODE": "3,2"}
    own = {"SLURM_PROCID": str(tasks[role][i]), "SLURM_NODEID": str(int(tasks[role][i] > 2))}
    return SlurmRoleMaker(environ={**step, **own, "FLEET_SLURM_SERVERS": "2", "FLEET_SLURM_PORT": "6174"})


def _local(role: Role, i: int) -> RoleMakerBase:
    return LocalRoleMaker()


def _cluster(assignment: Assignment) -> Assignment:
    return replace(assignment, role=Role.WORKER, index=0, local_rank=None, origin="")


@pytest.mark.parametrize(
    ("make", "workers", "servers"),
    [
        (_user, 3, 2),
        (_env, 3, 2),
        (_env_ips, 3, 2),
        (_slurm, 3, 2),
        (_user_collective, 3, 0),
        (_env_collective, 3, 0),
        (_torchrun, 3, 0),
        (_local, 1, 0),
    ],
)
def test_every_node_sees_one_cluster(make: Callable[[Role, int], RoleMakerBase], workers: int, servers: int) -> None:
    places = [(Role.WORKER, i) for i in range(workers)] + [(Role.SERVER, i) for i in range(servers)]
    seen = [make(*place).assignment() for place in places]
    assert [(each.role, each.index) for each in seen] == places
    assert len({_cluster(each) for each in seen}) == 1
    assert all(each.worker_num == workers for each in seen)
    assert [str(each.endpoint) for each in seen if each.is_server] == SERVERS[:servers]


def test_makers_of_one_kind_agree() -> None:
    ps = {_cluster(make(Role.SERVER, 1).assignment()) for make in (_user, _env, _env_ips, _slurm)}
    assert len(ps) == 1
    collective = [make(Role.WORKER, 1).assignment() for make in (_user_collective, _env_collective, _torchrun)]
    assert {each.local_rank for each in collective} == {1}
    assert {each.workers[0] for each in collective} == {Endpoint("10.0.0.1", 7000)}
    assert all(each.collective for each in collective)


def test_local() -> None:
    alone = LocalRoleMaker().assignment()
    assert (alone.is_worker, alone.index, alone.worker_num, alone.embedded) == (True, 0, 1, True)
    assert alone.servers == (Endpoint("in-process", 0),)
    assert alone.origin == "alone: one worker with its server inside the process"


# --- Every spelling ---------------------------------------------------------------------------------------------------


def _servers(environ: Env) -> list[str]:
    everything = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINERS": "1", "PADDLE_TRAINER_ID": "0", **environ}
    return [str(server) for server in EnvRoleMaker(environ=everything).assignment().servers]


@pytest.mark.parametrize(
    ("environ", "servers"),
    [
        ({"PADDLE_PSERVERS_IP_PORT_LIST": "a:1 , b:2"}, ["a:1", "b:2"]),
        ({"PADDLE_PSERVER_IPS": "a,b"}, ["a:6174", "b:6174"]),
        ({"PADDLE_PSERVERS": " a , b "}, ["a:6174", "b:6174"]),
        ({"PADDLE_PSERVER_IPS": "a, b", "PADDLE_PSERVER_PORT": "80"}, ["a:80", "b:80"]),
        ({"PADDLE_PSERVERS": "a,b", "PADDLE_PORT": " 80 "}, ["a:80", "b:80"]),
        ({"PADDLE_PSERVER_IPS": "a:1,b:2"}, ["a:1", "b:2"]),
        ({"PADDLE_PSERVER_IPS": "a:1,b", "PADDLE_PORT": "80"}, ["a:1", "b:80"]),
        (
            {"PADDLE_PSERVER_IPS": "a", "PADDLE_PSERVERS": " a", "PADDLE_PORT": "1", "PADDLE_PSERVER_PORT": "01"},
            ["a:1"],
        ),
        ({"PADDLE_PSERVER_IPS": "fd00::1,[fd00::2],[fd00::3]:7"}, ["[fd00::1]:6174", "[fd00::2]:6174", "[fd00::3]:7"]),
        ({"PADDLE_PSERVERS_IP_PORT_LIST": "a:1,b:2", "PADDLE_PSERVERS": "a,b", "PADDLE_PORT": "2"}, ["a:1", "b:2"]),
        ({"PADDLE_PSERVERS_IP_PORT_LIST": "a:1", "PADDLE_PORT": "tcp://10.0.0.1:80"}, ["a:1"]),
        ({"PADDLE_PSERVERS_IP_PORT_LIST": "a:1", "PADDLE_PSERVERS": " "}, ["a:1"]),
    ],
)
def test_spellings_of_the_servers(environ: Env, servers: list[str]) -> None:
    assert _servers(environ) == servers


@pytest.mark.parametrize(
    ("servers", "environ", "index"),
    [
        ("a:1,b:2", {"PADDLE_CURRENT_ENDPOINT": " b:2 "}, 1),
        ("a:1,b:2", {"PADDLE_PSERVER_ID": "1"}, 1),
        ("a:1,b:2", {"PADDLE_CURRENT_IP": "b", "PADDLE_PSERVER_PORT": "2"}, 1),
        ("a:1,a:2", {"POD_IP": "a", "PADDLE_PORT": "2"}, 1),
        ("a:1,b:2", {"PADDLE_CURRENT_IP": "b"}, 1),
        ("a:1,b:2", {"PADDLE_CURRENT_IP": "b:2", "PADDLE_PORT": "1"}, 1),
        ("a:1,a:2", {"PADDLE_CURRENT_IP": "a", "PADDLE_PSERVER_ID": "1"}, 1),
        ("[fd00::1]:1,[fd00::2]:1", {"POD_IP": "fd00::2", "PADDLE_PORT": "1"}, 1),
        ("ps0:1,ps1:1", {"POD_IP": "10.0.0.9", "PADDLE_PSERVER_ID": "1"}, 1),
        ("ps0:1,ps1:1", {"PADDLE_CURRENT_ENDPOINT": "ps1:1", "PADDLE_PSERVER_ID": "1", "PADDLE_TRAINER_ID": "x"}, 1),
    ],
)
def test_spellings_of_this_server(servers: str, environ: Env, index: int) -> None:
    job = {"PADDLE_TRAINING_ROLE": "PSERVER", "PADDLE_PSERVERS_IP_PORT_LIST": servers, "PADDLE_TRAINERS": "2"}
    me = EnvRoleMaker(environ={**job, **environ}).assignment()
    assert (me.role, me.index) == (Role.SERVER, index)


@pytest.mark.parametrize("role", ["PADDLE_TRAINING_ROLE", "TRAINING_ROLE"])
@pytest.mark.parametrize("number", ["PADDLE_TRAINERS", "PADDLE_TRAINERS_NUM"])
def test_spellings_of_a_worker(role: str, number: str) -> None:
    environ = {role: "TRAINER", number: "2", "PADDLE_TRAINER_ID": "1", "PADDLE_PSERVERS": "a", "POD_IP": "elsewhere"}
    me = EnvRoleMaker(environ={**environ, "PADDLE_CURRENT_IP": "a", "PADDLE_CURRENT_ENDPOINT": "?"}).assignment()
    assert (me.role, me.index, me.worker_num, me.collective) == (Role.WORKER, 1, 2, False)


def test_a_list_of_workers_says_how_many_there_are() -> None:
    environ = {**TRAINER, "PADDLE_TRAINER_ENDPOINTS": ",".join(WORKERS)}
    del environ["PADDLE_TRAINERS"]
    me = EnvRoleMaker(environ=environ).assignment()
    assert (me.worker_num, str(me.endpoint)) == (3, WORKERS[1])


@pytest.mark.parametrize(
    ("environ", "workers"),
    [
        ({"PADDLE_TRAINER_ENDPOINTS": "a:1, b:2", "PADDLE_TRAINER_ID": "1"}, ["a:1", "b:2"]),
        ({"PADDLE_TRAINER_IPS": "a, b", "PADDLE_TRAINER_ID": "1"}, ["a:6174", "b:6174"]),
        ({"PADDLE_TRAINER_IPS": "a,b", "PADDLE_PORT": "9", "PADDLE_CURRENT_IP": "b"}, ["a:9", "b:9"]),
        ({"PADDLE_TRAINER_ENDPOINTS": "a:1,b:2", "PADDLE_CURRENT_ENDPOINT": "b:2"}, ["a:1", "b:2"]),
        ({"PADDLE_TRAINER_IPS": "a,b", "PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2"}, ["a:6174", "b:6174"]),
        ({"PADDLE_TRAINER_IPS": "a,b", "PADDLE_TRAINER_ID": "1", "TRAINING_ROLE": "TRAINER"}, ["a:6174", "b:6174"]),
        ({"PADDLE_TRAINER_IPS": "a,b", "PADDLE_TRAINER_ID": "1", "PADDLE_PSERVERS": "s"}, ["a:6174", "b:6174"]),
    ],
)
def test_spellings_of_a_collective_job(environ: Env, workers: list[str]) -> None:
    me = EnvRoleMaker(True, environ).assignment()
    assert ([str(worker) for worker in me.workers], me.index, me.worker_num) == (workers, 1, 2)
    assert (me.collective, me.role, me.servers) == (True, Role.WORKER, ())


# --- The tables of the source documents, word for word ----------------------------------------------------------------


def _commands(text: str) -> list[Env]:
    """One environment a line; a value may hold spaces, as the documents' own lists do."""
    environments = []
    for line in text.strip().splitlines():
        environ: Env = {}
        name = ""
        for word in line.split():
            if "=" in word:
                name, _, environ[name] = word.partition("=")
            else:
                environ[name] += " " + word
        environments.append(environ)
    return environments


_HOWTO = """
PADDLE_TRAINING_ROLE=PSERVER PADDLE_CURRENT_IP=ps0.paddlepaddle.com PADDLE_PSERVER_IPS=ps0.paddlepaddle.com, ps1.paddlepaddle.com PADDLE_TRAINERS=2 PADDLE_PSERVER_PORT=6174
PADDLE_TRAINING_ROLE=PSERVER PADDLE_CURRENT_IP=ps1.paddlepaddle.com PADDLE_PSERVER_IPS=ps0.paddlepaddle.com, ps1.paddlepaddle.com PADDLE_TRAINERS=2 PADDLE_PSERVER_PORT=6174
PADDLE_TRAINING_ROLE=TRAINER PADDLE_PSERVER_IPS=ps0.paddlepaddle.com, ps1.paddlepaddle.com PADDLE_TRAINERS=2 PADDLE_TRAINER_ID=0 PADDLE_PSERVER_PORT=6174
PADDLE_TRAINING_ROLE=TRAINER PADDLE_PSERVER_IPS=ps0.paddlepaddle.com, ps1.paddlepaddle.com PADDLE_TRAINERS=2 PADDLE_TRAINER_ID=1 PADDLE_PSERVER_PORT=6174
"""  # noqa: E501


def test_the_commands_of_the_howto() -> None:
    seen = [resolve(None, environ) for environ in _commands(_HOWTO)]
    assert [str(each) for each in seen] == ["server 0", "server 1", "worker 0", "worker 1"]
    assert len({_cluster(each) for each in seen}) == 1
    assert [str(server) for server in seen[0].servers] == ["ps0.paddlepaddle.com:6174", "ps1.paddlepaddle.com:6174"]


def test_the_parameter_server_table() -> None:
    table = {
        "PADDLE_PSERVER_PORT": "6170",
        "PADDLE_PSERVER_IPS": "127.0.0.1,127.0.0.2",
        "PADDLE_TRAINERS": "4",
        "PADDLE_CURRENT_IP": "127.0.0.2",
        "PADDLE_TRAINER_ID": "0",
    }
    server = resolve(None, {**table, "PADDLE_TRAINING_ROLE": "PSERVER"})
    assert (str(server), str(server.endpoint), server.worker_num) == ("server 1", "127.0.0.2:6170", 4)
    assert str(resolve(None, {**table, "PADDLE_TRAINING_ROLE": "TRAINER"})) == "worker 0"


def test_the_nccl2_table() -> None:
    table = {
        "PADDLE_TRAINER_IPS": "192.168.0.1,192.168.0.2",
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_PSERVER_PORT": "6174",
        "PADDLE_CURRENT_IP": "192.168.0.2",
    }
    me = resolve(None, table)
    assert (me.collective, me.index, str(me.endpoint)) == (True, 1, "192.168.0.2:6174")


# --- What is missing or contradicts itself, all at once ---------------------------------------------------------------


def _complaints(is_collective: bool, environ: Env) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        EnvRoleMaker(is_collective, environ)
    return str(caught.value).split("\n  ")[1:]


def _has(lines: list[str], *parts: str) -> bool:
    return any(all(part in line for part in parts) for line in lines)


def _without(environ: Env, *names: str) -> Env:
    return {name: text for name, text in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (_without(TRAINER, "PADDLE_TRAINING_ROLE"), ["PADDLE_TRAINING_ROLE", "TRAINING_ROLE"]),
        (_without(TRAINER, "PADDLE_TRAINERS"), ["PADDLE_TRAINERS", "PADDLE_TRAINERS_NUM"]),
        (_without(TRAINER, "PADDLE_TRAINER_ID"), ["PADDLE_TRAINER_ID"]),
        (
            _without(TRAINER, "PADDLE_PSERVERS_IP_PORT_LIST"),
            ["PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_PSERVER_IPS", "PADDLE_PSERVERS"],
        ),
        (_without(PSERVER, "PADDLE_TRAINERS"), ["PADDLE_TRAINERS", "PADDLE_TRAINERS_NUM"]),
        (
            _without(PSERVER, "PADDLE_CURRENT_ENDPOINT"),
            ["PADDLE_CURRENT_IP", "POD_IP", "PADDLE_CURRENT_ENDPOINT", "PADDLE_PSERVER_ID", *SERVERS],
        ),
    ],
)
def test_one_missing_variable_is_named_alone(environ: Env, names: list[str]) -> None:
    lines = _complaints(False, environ)
    assert len(lines) == 1
    assert _has(lines, "found nothing", *names)


@pytest.mark.parametrize(
    ("base", "change", "parts"),
    [
        (TRAINER, {"PADDLE_TRAINING_ROLE": "TRANERR"}, ["PADDLE_TRAINING_ROLE", "PSERVER or TRAINER", "'TRANERR'"]),
        (TRAINER, {"TRAINING_ROLE": "PSERVER"}, ["PADDLE_TRAINING_ROLE and TRAINING_ROLE", "one value", "'PSERVER'"]),
        (TRAINER, {"PADDLE_TRAINER_ID": "3"}, ["PADDLE_TRAINER_ID", "from 0 to 2", "'3'"]),
        (TRAINER, {"PADDLE_TRAINER_ID": "-1"}, ["PADDLE_TRAINER_ID", "from 0 to 2", "'-1'"]),
        (TRAINER, {"PADDLE_TRAINER_ID": "one"}, ["PADDLE_TRAINER_ID", "whole number", "'one'"]),
        (TRAINER, {"PADDLE_TRAINERS": "two"}, ["PADDLE_TRAINERS", "whole number from 1 to 65536", "'two'"]),
        (TRAINER, {"PADDLE_TRAINERS": "65537"}, ["PADDLE_TRAINERS", "whole number from 1 to 65536"]),
        (TRAINER, {"PADDLE_TRAINERS": "0"}, ["PADDLE_TRAINERS", "whole number from 1 to 65536", "'0'"]),
        (TRAINER, {"PADDLE_TRAINERS_NUM": "4"}, ["PADDLE_TRAINERS and PADDLE_TRAINERS_NUM", "'3' and '4'"]),
        (TRAINER, {"PADDLE_TRAINER_ENDPOINTS": "a:1,b:1"}, ["PADDLE_TRAINERS and PADDLE_TRAINER_ENDPOINTS", "'3'"]),
        (TRAINER, {"PADDLE_PSERVERS_IP_PORT_LIST": "a:1,,b:1"}, ["PADDLE_PSERVERS_IP_PORT_LIST", "'a:1,,b:1'"]),
        (TRAINER, {"PADDLE_PSERVERS_IP_PORT_LIST": "a,b"}, ["PADDLE_PSERVERS_IP_PORT_LIST", "host:port", "'a,b'"]),
        (TRAINER, {"PADDLE_PSERVERS_IP_PORT_LIST": "a:1, a:1"}, ["PADDLE_PSERVERS_IP_PORT_LIST", "twice", "a:1, a:1"]),
        (TRAINER, {"PADDLE_PSERVERS": "x,y"}, ["PADDLE_PSERVERS_IP_PORT_LIST and PADDLE_PSERVERS", "same", "'x,y'"]),
        (
            PSERVER,
            {"PADDLE_CURRENT_ENDPOINT": "c:1"},
            ["PADDLE_CURRENT_ENDPOINT", f"one of {','.join(SERVERS)}", "c:1"],
        ),
        (PSERVER, {"PADDLE_CURRENT_ENDPOINT": "c"}, ["PADDLE_CURRENT_ENDPOINT", "host:port", "'c'"]),
        (PSERVER, {"PADDLE_PSERVER_ID": "0"}, ["PADDLE_PSERVER_ID and PADDLE_CURRENT_ENDPOINT", "one and the same"]),
        (PSERVER, {"PADDLE_PSERVER_ID": "2"}, ["PADDLE_PSERVER_ID", "from 0 to 1", "'2'"]),
        (PSERVER, {"PADDLE_CURRENT_IP": "127.0.0.1"}, ["PADDLE_CURRENT_ENDPOINT and PADDLE_CURRENT_IP", "one and the"]),
        (PSERVER, {"POD_IP": "127.0.0.1"}, ["PADDLE_CURRENT_ENDPOINT and POD_IP", "one and the same"]),
        (PSERVER, {"PADDLE_CURRENT_IP": "c"}, ["PADDLE_CURRENT_IP", "one of", "'c'"]),
        (PSERVER, {"PADDLE_CURRENT_IP": "127.0.0.2", "PADDLE_PORT": "1"}, ["PADDLE_CURRENT_IP and PADDLE_PORT", "'1'"]),
        (PSERVER, {"PADDLE_CURRENT_IP": "127.0.0.2", "POD_IP": "c"}, ["PADDLE_CURRENT_IP and POD_IP", "one value"]),
        (PSERVER, {"PADDLE_CURRENT_IP": "127.0.0.2", "PADDLE_PORT": "x"}, ["PADDLE_PORT", "from 1 to 65535", "'x'"]),
    ],
)
def test_one_wrong_variable_is_told_alone(base: Env, change: Env, parts: list[str]) -> None:
    lines = _complaints(False, {**base, **change})
    assert len(lines) == 1, lines
    assert _has(lines, "expected", "found", *parts), lines


@pytest.mark.parametrize("role", [{}, {"PADDLE_TRAINING_ROLE": "TRANERR"}])
@pytest.mark.parametrize(
    ("own", "part"),
    [
        ({"PADDLE_TRAINER_ID": "-1"}, "PADDLE_TRAINER_ID: expected a whole number of at least 0, found '-1'"),
        ({"PADDLE_PSERVER_ID": "x"}, "PADDLE_PSERVER_ID: expected a whole number of at least 0, found 'x'"),
        ({"PADDLE_CURRENT_ENDPOINT": "c"}, "PADDLE_CURRENT_ENDPOINT: expected host:port"),
        ({"PADDLE_CURRENT_IP": "a b"}, "PADDLE_CURRENT_IP: expected this process's host, found 'a b'"),
    ],
)
def test_one_mistake_hides_no_other(role: Env, own: Env, part: str) -> None:
    lines = _complaints(
        False, {"PADDLE_PSERVER_IPS": "a,,b", "PADDLE_PSERVER_PORT": "x", "PADDLE_TRAINERS": "two", **role, **own}
    )
    wrong = ["PADDLE_TRAINING_ROLE", "PADDLE_PSERVER_IPS", "PADDLE_PSERVER_PORT", "PADDLE_TRAINERS", part]
    assert [name for name in wrong if not any(name in line for line in lines)] == []
    assert len(lines) == len(wrong)


@pytest.mark.parametrize("identity", [{"PADDLE_CURRENT_IP": "a b"}, {"PADDLE_TRAINER_ID": "x"}])
def test_one_mistake_hides_no_other_in_a_collective_job(identity: Env) -> None:
    lines = _complaints(True, {"PADDLE_TRAINER_IPS": "a,,b", "PADDLE_PSERVER_PORT": "x", **identity})
    wrong = ["PADDLE_TRAINER_IPS", "PADDLE_PSERVER_PORT", *identity]
    assert [name for name in wrong if not any(name in line for line in lines)] == []
    assert len(lines) == len(wrong)


def test_a_host_with_several_servers_needs_a_port() -> None:
    environ = {**PSERVER, "PADDLE_PSERVERS_IP_PORT_LIST": "a:1,a:2", "PADDLE_CURRENT_IP": "a"}
    lines = _complaints(False, _without(environ, "PADDLE_CURRENT_ENDPOINT"))
    assert _has(lines, "PADDLE_CURRENT_IP", "one and the same of a:1,a:2")
    lines = _complaints(
        False, {"PADDLE_PSERVER_IPS": "a,a", "PADDLE_PORT": "7", **_without(TRAINER, *PS), "PADDLE_TRAINERS": "3"}
    )
    assert lines == ["PADDLE_PSERVER_IPS and PADDLE_PORT: expected no endpoint twice, found 'a,a' and '7'"]


@pytest.mark.parametrize("port", ["0", "65536", "x", "6001,6002"])
def test_a_port_that_is_used_is_checked(port: str) -> None:
    environ = {**_without(TRAINER, "PADDLE_PSERVERS_IP_PORT_LIST"), "PADDLE_PSERVERS": "a,b", "PADDLE_PORT": port}
    assert _has(_complaints(False, environ), "PADDLE_PORT", "from 1 to 65535", repr(port))


def test_everything_wrong_is_told_at_once() -> None:
    lines = _complaints(
        False,
        {
            "TRAINING_ROLE": "BOSS",
            "PADDLE_PSERVER_IPS": "a,a",
            "PADDLE_PSERVER_PORT": "x",
            "PADDLE_PORT": "y",
            "PADDLE_TRAINERS": "none",
        },
    )
    assert [line.partition(":")[0] for line in lines] == [
        "TRAINING_ROLE",
        "PADDLE_PSERVER_PORT",
        "PADDLE_PORT",
        "PADDLE_PSERVER_IPS and PADDLE_PSERVER_PORT and PADDLE_PORT",
        "PADDLE_TRAINERS",
    ]
    assert len(_complaints(False, {})) == 3
    assert len(_complaints(False, {"TRAINING_ROLE": "PSERVER"})) == 3
    assert len(_complaints(False, {"TRAINING_ROLE": "TRAINER"})) == 3


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"PADDLE_TRAINING_ROLE": "PSERVER"}, ["PADDLE_TRAINING_ROLE", "TRAINER", "'PSERVER'"]),
        ({"PADDLE_TRAINER_ID": "3"}, ["PADDLE_TRAINER_ID", "from 0 to 2", "'3'"]),
        ({"PADDLE_TRAINERS": "2"}, ["PADDLE_TRAINERS and PADDLE_TRAINER_ENDPOINTS", "'2'"]),
        (
            {"PADDLE_CURRENT_ENDPOINT": WORKERS[2]},
            ["PADDLE_TRAINER_ID and PADDLE_CURRENT_ENDPOINT", "one and the same"],
        ),
        ({"PADDLE_TRAINER_IPS": "a,b,c"}, ["PADDLE_TRAINER_ENDPOINTS and PADDLE_TRAINER_IPS", "same addresses"]),
        ({"PADDLE_TRAINER_ENDPOINTS": "a"}, ["PADDLE_TRAINER_ENDPOINTS", "host:port", "'a'"]),
        ({"PADDLE_TRAINER_ID": " "}, ["PADDLE_TRAINER_ID", "found nothing"]),
    ],
)
def test_a_wrong_collective_job(change: Env, parts: list[str]) -> None:
    lines = _complaints(True, {**COLLECTIVE, **change})
    assert len(lines) == 1, lines
    assert _has(lines, "expected", "found", *parts), lines


def test_collective_with_nothing_there_says_what_to_set() -> None:
    lines = _complaints(True, {})
    assert _has(lines, "PADDLE_TRAINER_ENDPOINTS", "PADDLE_TRAINER_IPS", "torchrun", "found nothing")
    assert _has(lines, "PADDLE_TRAINER_ID", "found nothing")


def test_is_collective_is_a_bool() -> None:
    with pytest.raises(TypeError, match="is_collective"):
        EnvRoleMaker("yes", {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is_collective"):
        resolve("yes", {})  # type: ignore[arg-type]


# --- paddle-operator's PaddleJob --------------------------------------------------------------------------------------


def _pod(kind: str, index: int, servers: int, workers: int, intranet: str = "PodIP") -> Env:
    """What the operator gives the container: its own variables and a config map, the same for all. In a
    ``Service`` network pods have names; every pod has a PADDLE_TRAINER_ID, servers too."""

    def host(kind: str, i: int) -> str:
        return f"job-{kind}-{i}" if intranet == "Service" else f"10.244.{len(kind)}.{i + 1}"

    def listed(kind: str, count: int, port: str = ":2379") -> str:
        return ",".join(f"{host(kind, i)}{port}" for i in range(count))

    role = {"ps": "PSERVER", "worker": "TRAINER", "heter": "HETER"}[kind]
    config_map = {"TRAINER_PORTS_NUM": "20", "PADDLE_PORT": "2379"}
    if servers:
        config_map |= {"PADDLE_PSERVERS_IP_PORT_LIST": listed("ps", servers)}
    config_map |= {
        "PADDLE_TRAINER_ENDPOINTS": listed("worker", workers),
        "PADDLE_TRAINERS": listed("worker", workers, ""),
        "PADDLE_TRAINERS_NUM": str(workers),
    }
    if servers and intranet == "PodIP":
        config_map |= {"PADDLE_WITH_GLOO": "1", "PADDLE_GLOO_RENDEZVOUS": "3"}
        config_map |= {"PADDLE_GLOO_HTTP_ENDPOINT": f"{host('ps', 0)}:2397"}
    own = {"POD_IP": host(kind, index), "PADDLE_TRAINER_ID": str(index)}
    return {**own, "TRAINING_ROLE": role, "PADDLE_TRAINING_ROLE": role, **config_map}


@pytest.mark.parametrize("intranet", ["PodIP", "Service"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_paddle_job_with_servers(intranet: str, workers: int) -> None:
    places = [("worker", i) for i in range(workers)] + [("ps", i) for i in range(2)]
    everyone = [resolve(None, _pod(kind, i, 2, workers, intranet)) for kind, i in places]
    names = {"worker": Role.WORKER, "ps": Role.SERVER}
    assert [(each.role, each.index) for each in everyone] == [(names[kind], i) for kind, i in places]
    assert len({_cluster(each) for each in everyone}) == 1
    assert all(each.worker_num == workers and not each.collective for each in everyone)
    assert all(server.port == 2379 for server in everyone[0].servers)


@pytest.mark.parametrize("intranet", ["PodIP", "Service"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_paddle_job_without_servers(intranet: str, workers: int) -> None:
    everyone = [resolve(None, _pod("worker", i, 0, workers, intranet)) for i in range(workers)]
    assert [(each.index, each.worker_num, each.collective) for each in everyone] == [
        (i, workers, True) for i in range(workers)
    ]
    assert len({_cluster(each) for each in everyone}) == 1


def test_a_paddle_job_that_contradicts_itself() -> None:
    pod = _pod("worker", 0, 2, 2)
    lines = _complaints(False, {**pod, "PADDLE_TRAINERS": "10.244.6.1,10.244.6.9"})
    assert len(lines) == 1
    assert _has(lines, "PADDLE_TRAINERS", "a whole number", "10.244.6.9")
    assert _has(_complaints(False, _pod("heter", 0, 2, 2)), "TRAINING_ROLE", "PSERVER or TRAINER", "'HETER'")


# --- torchrun ---------------------------------------------------------------------------------------------------------


def test_torchrun() -> None:
    me = TorchrunRoleMaker(TORCHRUN).assignment()
    assert (me.index, me.worker_num, me.local_rank, me.collective) == (1, 3, 1, True)
    assert me.workers == (Endpoint("10.0.0.1", 7000),)
    assert me.endpoint is None
    assert EnvRoleMaker(True, TORCHRUN).assignment() == me
    assert TorchrunRoleMaker(_without(TORCHRUN, "LOCAL_RANK")).assignment().local_rank is None


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"RANK": "3"}, ["RANK"]),
        ({"LOCAL_RANK": "3"}, ["LOCAL_RANK"]),
        ({"WORLD_SIZE": "x"}, ["WORLD_SIZE"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE"]),
        ({"WORLD_SIZE": "65537"}, ["WORLD_SIZE"]),
        ({"MASTER_ADDR": ""}, ["MASTER_ADDR"]),
        ({"MASTER_ADDR": "a:1"}, ["MASTER_ADDR"]),
        ({"MASTER_PORT": "0"}, ["MASTER_PORT"]),
        ({"MASTER_PORT": "", "MASTER_ADDR": "a b", "RANK": "-1"}, ["RANK", "MASTER_ADDR", "MASTER_PORT"]),
    ],
)
def test_wrong_torchrun_variables(change: Env, names: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TorchrunRoleMaker({**TORCHRUN, **change})
    assert [line.partition(":")[0] for line in str(caught.value).split("\n  ")[1:]] == names


SERVED: Env = {**TORCHRUN, "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.8:6174, 10.0.0.9:6174"}


def test_workers_of_torchrun_beside_servers() -> None:
    me = EnvRoleMaker(environ=SERVED).assignment()
    assert (me.role, me.index, me.worker_num, me.local_rank, me.collective) == (Role.WORKER, 1, 3, 1, False)
    assert me.servers == (Endpoint("10.0.0.8", 6174), Endpoint("10.0.0.9", 6174))
    assert me.workers == ()
    by_hosts = {**TORCHRUN, "PADDLE_PSERVER_IPS": "10.0.0.8,10.0.0.9"}
    assert EnvRoleMaker(environ=by_hosts).assignment() == me


@pytest.mark.parametrize("variables", [TRAINER, PSERVER], ids=["worker", "server"])
def test_a_whole_set_of_variables_is_not_torchruns(variables: Env) -> None:
    assert EnvRoleMaker(environ={**variables, **TORCHRUN}).assignment() == EnvRoleMaker(environ=variables).assignment()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"RANK": "3"}, ["RANK"]),
        ({"LOCAL_RANK": "x", "WORLD_SIZE": "0"}, ["WORLD_SIZE", "LOCAL_RANK"]),
        ({"PADDLE_PSERVERS_IP_PORT_LIST": "nowhere"}, ["PADDLE_PSERVERS_IP_PORT_LIST"]),
        ({"PADDLE_TRAINING_ROLE": "TRAINER"}, ["PADDLE_TRAINERS or PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID"]),
    ],
    ids=lambda value: ",".join(value),
)
def test_wrong_variables_of_torchrun_beside_servers(change: Env, names: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EnvRoleMaker(environ={**SERVED, **change})
    assert [line.partition(":")[0] for line in str(caught.value).split("\n  ")[1:]] == names


# --- Who am I, with nothing said in code ------------------------------------------------------------------------------

MPI: Env = {"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}
STRAY: Env = {"POD_IP": "10.0.0.1", "PADDLE_PORT": "tcp://10.0.0.1:80", "PADDLE_PSERVER_PORT": "1", "WORLD_SIZE": "2"}
ALONE = LocalRoleMaker().assignment()


@pytest.mark.parametrize(
    ("is_collective", "environ", "maker"),
    [
        (None, {**TRAINER, **MPI, **TORCHRUN}, EnvRoleMaker(environ=TRAINER)),
        (None, PSERVER, EnvRoleMaker(environ=PSERVER)),
        (None, {**COLLECTIVE, **MPI, **TORCHRUN}, EnvRoleMaker(True, COLLECTIVE)),
        (None, {**TRAINER, **COLLECTIVE}, EnvRoleMaker(environ={**TRAINER, **COLLECTIVE})),
        (False, TRAINER, EnvRoleMaker(environ=TRAINER)),
        (True, {**TRAINER, **COLLECTIVE}, EnvRoleMaker(True, COLLECTIVE)),
        (None, TORCHRUN, TorchrunRoleMaker(TORCHRUN)),
        (None, SERVED, EnvRoleMaker(environ=SERVED)),
        (False, SERVED, EnvRoleMaker(environ=SERVED)),
        (True, TORCHRUN, TorchrunRoleMaker(TORCHRUN)),
        (True, {**TORCHRUN, **MPI}, TorchrunRoleMaker(TORCHRUN)),
        (None, {**TORCHRUN, **STRAY, "WORLD_SIZE": "3"}, TorchrunRoleMaker(TORCHRUN)),
        (None, {}, LocalRoleMaker()),
        (False, {}, LocalRoleMaker()),
        (None, STRAY, LocalRoleMaker()),
        (None, {"PADDLE_TRAINING_ROLE": " ", "PADDLE_TRAINERS": ""}, LocalRoleMaker()),
    ],
)
def test_resolve(is_collective: bool | None, environ: Env, maker: RoleMakerBase) -> None:
    assert resolve(is_collective, environ) == maker.assignment()


class Pair:
    """Two ranks, of which this is the second."""

    rank, size = 1, 2

    def exchange(self, card: Mapping[str, Any], deadline_s: float, what: str) -> list[dict[str, Any]]:
        raise AssertionError("nobody else is here")


@pytest.mark.parametrize(
    "environ", [MPI, {"PMI_SIZE": "2"}, {"PMI_SIZE": "1"}, {"PMIX_RANK": "0"}, {**TORCHRUN, **MPI}]
)
@pytest.mark.parametrize("is_collective", [None, False])
def test_an_mpi_launcher_is_found(environ: Env, is_collective: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.role_maker.mpi.world", lambda *_: Pair())
    with pytest.raises(AssertionError, match="nobody else is here"):
        resolve(is_collective, environ)


@pytest.mark.parametrize(
    "name",
    [
        "PADDLE_TRAINING_ROLE",
        "TRAINING_ROLE",
        "PADDLE_TRAINERS",
        "PADDLE_TRAINERS_NUM",
        "PADDLE_TRAINER_ID",
        "PADDLE_PSERVER_ID",
        "PADDLE_CURRENT_IP",
        "PADDLE_CURRENT_ENDPOINT",
    ],
)
@pytest.mark.parametrize("others", [{}, TORCHRUN, MPI])
def test_half_an_environment_is_not_alone(name: str, others: Env) -> None:
    with pytest.raises(ConfigurationError, match=r"PADDLE_PSERVERS_IP_PORT_LIST.*PADDLE_TRAINER_ENDPOINTS"):
        resolve(None, {name: "TRAINER" if "ROLE" in name else "1", **others})


def test_is_collective_overrides_what_the_variables_name() -> None:
    with pytest.raises(ConfigurationError, match="PADDLE_TRAINER_ENDPOINTS"):
        resolve(True, TRAINER)
    with pytest.raises(ConfigurationError, match="PADDLE_PSERVERS_IP_PORT_LIST"):
        resolve(False, COLLECTIVE)
    with pytest.raises(ConfigurationError, match="torchrun"):
        resolve(False, TORCHRUN)
    with pytest.raises(ConfigurationError, match="PADDLE_TRAINER_ENDPOINTS"):
        resolve(True, {})


def test_torchrun_tells_who_hosts_the_store_and_how_often_it_has_restarted() -> None:
    base = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    plain = EnvRoleMaker(True, base).assignment()
    assert (plain.store_launched, plain.attempt) == (False, 0)
    elastic = {**base, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    restarted = EnvRoleMaker(True, elastic).assignment()
    assert (restarted.store_launched, restarted.attempt) == (True, 2)
    with pytest.raises(ConfigurationError, match="TORCHELASTIC_USE_AGENT_STORE: expected True or False, found 'maybe'"):
        EnvRoleMaker(True, {**elastic, "TORCHELASTIC_USE_AGENT_STORE": "maybe"})


# --- Alone, and perhaps not meant to be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"PADDLE_PSERVER_PORT": "6174"}, ["PADDLE_PSERVER_PORT=6174", "docs/environment.md"]),
        ({"PADDLE_MASTER": "10.0.0.1:80", "PADDLE_NNODES": "2"}, ["PADDLE_MASTER=10.0.0.1:80 PADDLE_NNODES=2"]),
        ({"PADDLE_TRAINERS_NUMBER": "2"}, ["PADDLE_TRAINERS_NUMBER=2"]),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, ["SLURM_NTASKS=4", "srun"]),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "node1"}, ["WORLD_SIZE=2", "torchrun"]),
        ({"RANK": "1", "MASTER_ADDR": "node1"}, ["RANK=1", "torchrun sets RANK and WORLD_SIZE"]),
        ({"TF_CONFIG": '{"cluster": {"ps": ["a:1"]}}'}, ["TF_CONFIG"]),
        ({"JOB_COMPLETION_INDEX": "0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ["JOB_COMPLETION_INDEX=0"]),
        ({"HOROVOD_SIZE": "2"}, ["HOROVOD_SIZE=2"]),
        ({"HOROVOD_SIZE": "9" * 5000}, ["HOROVOD_SIZE=9"]),
    ],
)
def test_alone_among_the_variables_of_a_cluster(
    environ: Env, parts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    Fleet(environ=environ).init()
    (told,) = [message for message in caplog.messages if "trains alone" in message]
    assert [part for part in parts if part not in told] == []


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "POD_IP": "10.0.0.2"},  # a notebook in a pod
        {"PADDLE_PORT": "tcp://10.0.0.1:80", "PADDLE_SERVICE_HOST": "10.0.0.1"},  # beside a service of that name
        {"PADDLE_HOME": "/opt/paddle", "FLEET_JOB_ID": "a"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},  # an interactive shell
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},  # srun -n 1
        {"WORLD_SIZE": "2"},
        {"RANK": "1"},
        {"MASTER_ADDR": "node1"},
        {"WORLD_SIZE": "1", "MASTER_ADDR": "node1", "HOROVOD_SIZE": "1"},
    ],
)
def test_alone_and_no_doubt_about_it(environ: Env) -> None:
    assert resolve(None, environ) == LocalRoleMaker().assignment()
    assert doubts(environ) is None
