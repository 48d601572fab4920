import re
from dataclasses import fields
from pathlib import Path

import pytest

import fleet
from fleet import Fleet
from fleet.base import launcher_variables
from fleet.base.settings import (
    SETTINGS,
    CommunicatorSettings,
    ObservingSettings,
    ProcessSettings,
    SecuritySettings,
    rows,
    under_present_names,
)
from fleet.base.unknown_variables import ROLE_VARIABLES, remarks
from fleet.errors import ConfigurationError


def test_defaults() -> None:
    assert ProcessSettings.read({}) == ProcessSettings()
    assert ProcessSettings().rpc_deadline_s == 180.0
    assert ProcessSettings().rpc_retry_times == 3


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("FLAGS_rpc_deadline", "5000", "rpc_deadline_s", 5.0),
        ("FLAGS_rpc_deadline", " 4500.0 ", "rpc_deadline_s", 4.5),
        ("FLAGS_rpc_retry_times", "0", "rpc_retry_times", 0),
        ("FLAGS_rpc_get_thread_num", "1", "rpc_get_thread_num", 1),
        ("FLEET_STARTUP_DEADLINE_S", "7", "startup_deadline_s", 7.0),
        ("FLEET_HEARTBEAT_S", "0.05", "heartbeat_s", 0.05),
        ("FLEET_CHECK_FINITE", "On", "check_finite", True),
        ("FLEET_CHECK_FINITE", "0", "check_finite", False),
        ("FLEET_JOB_ID", "j", "job_id", "j"),
        ("FLEET_JOB_ID", "a/b c é", "job_id", "a/b c é"),
    ],
)
def test_each_setting(name: str, text: str, field: str, value: object) -> None:
    settings = ProcessSettings.read({name: text})
    assert getattr(settings, field) == value
    assert type(getattr(settings, field)) is type(value)


@pytest.mark.parametrize(
    "name", ["FLAGS_rpc_deadline", "FLAGS_rpc_retry_times", "FLEET_HEARTBEAT_S", "FLEET_CHECK_FINITE"]
)
def test_blank_is_unset(name: str) -> None:
    assert ProcessSettings.read({name: " "}) == ProcessSettings()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("FLAGS_rpc_deadline", "soon", "a number above zero, 1e+12 at most"),
        ("FLAGS_rpc_deadline", "0", "a number above zero, 1e+12 at most"),
        ("FLAGS_rpc_deadline", "-1", "a number above zero, 1e+12 at most"),
        ("FLAGS_rpc_deadline", "nan", "a number above zero, 1e+12 at most"),
        ("FLAGS_rpc_deadline", "inf", "a number above zero, 1e+12 at most"),
        ("FLAGS_rpc_deadline", "1.1e12", "a number above zero, 1e+12 at most"),
        ("FLAGS_rpc_retry_times", "-1", "a whole number of at least 0"),
        ("FLAGS_rpc_retry_times", "1.5", "a whole number of at least 0"),
        ("FLAGS_rpc_retry_times", "9" * 400, "a whole number of at least 0"),
        ("FLAGS_rpc_get_thread_num", "0", "a whole number of at least 1"),
        ("FLEET_STARTUP_DEADLINE_S", "0", "a number above zero, 1e+09 at most"),
        ("FLEET_STARTUP_DEADLINE_S", "1e10", "a number above zero, 1e+09 at most"),
        ("FLEET_HEARTBEAT_S", "1e10", "a number above zero, 1e+09 at most"),
        ("FLEET_HEARTBEAT_S", "x", "a number above zero, 1e+09 at most"),
        ("FLEET_CHECK_FINITE", "maybe", "1 or 0"),
        ("FLEET_DURABLE_DIR", "s3://bucket/kept", "a path on this machine, and no URL"),
        ("FLEET_TABLE_DIR", "file:///rows", "a path on this machine, and no URL"),
        ("FLEET_RECORD_DIR", "gs://bucket/record", "a path on this machine, and no URL"),
        ("FLEET_DURABLE_DIR", "a\0b", "a path on this machine, and no URL"),
        ("FLEET_TLS_CA", "a\0b", "a path"),
        ("FLEET_JOB_ID", "a\nb", "at most 200 letters, in one line"),
        ("FLEET_JOB_ID", "a\udcffb", "at most 200 letters, in one line"),
        ("FLEET_JOB_ID", "a" * 201, "at most 200 letters, in one line"),
        ("FLEET_BIND_ADDRESS", "a..b", "an address of this machine, as 10.0.0.1, [fd00::1], 0.0.0.0 or 10.0.0.1:6174"),
    ],
)
def test_unusable(name: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ProcessSettings.read({name: text})
    assert name in str(caught.value)
    assert caught.value.expected == expected
    assert caught.value.got == repr(text)


def test_heartbeats_fit_in_the_deadline() -> None:
    assert ProcessSettings.read({"FLAGS_rpc_deadline": "1000", "FLEET_HEARTBEAT_S": "0.5"}).heartbeat_s == 0.5
    with pytest.raises(ConfigurationError, match=r"FLEET_HEARTBEAT_S.*FLAGS_rpc_deadline"):
        ProcessSettings.read({"FLAGS_rpc_deadline": "1000", "FLEET_HEARTBEAT_S": "0.6"})
    assert ProcessSettings.read({"FLAGS_rpc_deadline": "1000"}).heartbeat_s == 0.25


def test_how_surely_servers_keep_things() -> None:
    assert ProcessSettings.read({"FLEET_DURABLE_DIR": " x ", "FLEET_DURABLE_SYNC": "Always"}).durable_sync == "always"
    assert ProcessSettings.read({"FLEET_DURABLE_DIR": ""}) == ProcessSettings()
    with pytest.raises(ConfigurationError, match=r"FLEET_DURABLE_SYNC.*always or interval or os; got 'often'"):
        ProcessSettings.read({"FLEET_DURABLE_SYNC": "often"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PADDLE_TRAINERS_NUMBER", "PADDLE_TRAINERS_NUM"),
        ("PADDLE_TRAINER_IDX", "PADDLE_TRAINER_ID"),
        ("PADDLE_PSERVERS_IP_PORTS_LIST", "PADDLE_PSERVERS_IP_PORT_LIST"),
        ("PADDLE_TRAINING_ROLES", "PADDLE_TRAINING_ROLE"),
        ("FLEET_DURABLE_DRI", "FLEET_DURABLE_DIR"),
        ("FLAGS_rpc_dealine", "FLAGS_rpc_deadline"),
        ("FLAGS_communicator_send_queue", "FLAGS_communicator_send_queue_size"),
        ("FLAGS_RPC_DEADLINE", "FLAGS_rpc_deadline"),
        ("FLAG_rpc_deadline", "FLAGS_rpc_deadline"),
        ("PADLE_TRAINERS", "PADDLE_TRAINERS"),
        ("paddle_trainers_num", "PADDLE_TRAINERS_NUM"),
        ("FLEETDURABLEDIR", "FLEET_DURABLE_DIR"),
        ("FLETE_JOB_ID", "FLEET_JOB_ID"),
    ],
)
def test_a_misspelt_variable_and_what_was_meant(name: str, meant: str) -> None:
    assert remarks({name: "2"}) == [
        f"the environment variable {name} is not known here and has no effect; did you mean {meant}?"
    ]


def test_a_name_of_ours_that_is_like_none() -> None:
    assert remarks({"FLEET_MOON": "2"}) == ["the environment variable FLEET_MOON is not known here and has no effect"]


@pytest.mark.parametrize(
    "environ",
    [
        dict.fromkeys(ROLE_VARIABLES, "1"),
        {"PADDLE_TRAINERS_ENDPOINTS": "a:1", "PADDLE_TRAINER_NUM": "2", "PADDLE_WITH_GLOO": "1"},  # Paddle's own
        {"PADDLE_HOME": "/opt/paddle"},
        {"PADDLE_SERVICE_PORT": "80", "PADDLE_PSERVER_SERVICE_PORT": "80", "PADDLE_PSERVERX_PORT": "tcp://10.0.0.1:80"},
        {"FLAGS_allocator_strategy": "x", "FLEETING": "1", "FLEETFOOT": "1", "FLAGSHIP": "1", "PADLOCK_PORT": "1"},
        {"PADDLER_PORT": "tcp://10.0.0.1:80", "TRAINING_ROLE": "TRAINER", "TRAINING_MODE": "x"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "PYTHONUNBUFFERED": "1", "POD_IP": "10.0.0.1"},
    ],
)
def test_names_that_are_no_misspelling(environ: dict[str, str]) -> None:
    assert remarks(environ) == []


@pytest.mark.parametrize(
    ("rows", "reader", "pattern"),
    [
        (launcher_variables.CLUSTER, "role_maker/variables_of_launchers.py", r"PADDLE_[A-Z_]+|TRAINING_ROLE|POD_IP"),
        (launcher_variables.TORCHRUN, "role_maker/torchrun.py", r"[A-Z]+_RANK|RANK|WORLD_SIZE|[A-Z]+_[A-Z_]+"),
        (launcher_variables.MPI, "bootstrap/mpi_world.py", r"(?:OMPI|PMI|PMIX)_[A-Z_]+"),
        (launcher_variables.SLURM, "role_maker/slurm.py", r"(?:SLURM|FLEET_SLURM)_[A-Z_]+"),
    ],
    ids=["cluster", "torchrun", "mpi", "slurm"],
)
def test_the_rows_of_a_role_maker_are_what_it_reads(
    rows: tuple[launcher_variables.Row, ...], reader: str, pattern: str
) -> None:
    source = (Path(fleet.__file__).parent / reader).read_text()
    assert set(re.findall(rf'"({pattern})"', source)) == launcher_variables.names(rows)


@pytest.mark.parametrize(
    ("older", "newer", "text", "other"),
    [
        ("FLEET_BEAT", "FLEET_HEARTBEAT_S", "0.5", "0.25"),
        ("FLEET_STARTUP_DEADLINE", "FLEET_STARTUP_DEADLINE_S", "7", "8"),
        ("FLEET_BIND", "FLEET_BIND_ADDRESS", "10.0.0.1:6174", "10.0.0.1"),
    ],
)
def test_a_setting_under_the_name_it_had(older: str, newer: str, text: str, other: str) -> None:
    assert SETTINGS[older] is SETTINGS[newer]
    read = ProcessSettings.read({older: text})
    assert (
        read
        == ProcessSettings.read({newer: text})
        == ProcessSettings.read({older: f" {text} ", newer: text})
        != ProcessSettings()
    )
    assert remarks({older: text}) == []
    with pytest.raises(ConfigurationError, match=f"{older} is not usable"):
        ProcessSettings.read({older: "a b"})
    with pytest.raises(ConfigurationError, match=f"{older} and {newer} .*; got '{text}' and '{other}'. Unset {older}"):
        ProcessSettings.read({older: text, newer: other})


def test_what_a_launcher_hands_on_has_the_names_of_now() -> None:
    given = {"FLEET_BEAT": "0.5", "FLEET_STARTUP_DEADLINE": "7", "FLEET_STARTUP_DEADLINE_S": "7.0", "PATH": "/bin"}
    handed_on = {"FLEET_HEARTBEAT_S": "0.5", "FLEET_STARTUP_DEADLINE_S": "7.0", "PATH": "/bin"}
    assert under_present_names(given) == handed_on
    assert under_present_names({"FLEET_BEAT": " ", "FLEET_HEARTBEAT_S": "2"}) == {"FLEET_HEARTBEAT_S": "2"}
    with pytest.raises(ConfigurationError, match="FLEET_BEAT and FLEET_HEARTBEAT_S"):
        under_present_names({**given, "FLEET_HEARTBEAT_S": "1"})


def test_a_misspelt_older_name_means_the_newer() -> None:
    assert remarks({"FLEET_STARTUP_DEADLIN": "2"})[0].endswith("did you mean FLEET_STARTUP_DEADLINE_S?")


def test_every_setting_has_a_row() -> None:
    """But for what is no setting of its own, each field is one; its default is what the row says."""
    for table in (ProcessSettings, CommunicatorSettings, SecuritySettings, ObservingSettings):
        without = {each.name for each in fields(table) if "setting" not in each.metadata}
        assert without <= {"communicator", "security", "observing", "environ"}
        assert all(row.meaning and row.readers and row.default for row in rows(table))
    assert "sesame" not in repr(ProcessSettings.read({"FLEET_AUTH_TOKEN": "sesame"}))


@pytest.mark.parametrize("name", ["FLAGS_rpc_send_thread_num", "FLAGS_rpc_prefetch_thread_num"])
def test_a_setting_with_nothing_to_act_on_is_told_of_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        Fleet(environ={name: "12"}).init()
    assert [name in message for message in caplog.messages if "nothing to act on" in message] == [True]
    caplog.clear()
    Fleet(environ={name: "12", "FLEET_LAUNCHER": "fleetrun", "FLEET_X": "1"}).init()  # the launcher has said it
    assert caplog.messages == []
