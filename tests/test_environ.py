import re
from pathlib import Path

import pytest

import fleet.role_maker.variables_of_launchers
from fleet import Fleet
from fleet.base.settings import ROLE_VARIABLES, Knobs, remarks
from fleet.errors import ConfigurationError


def test_defaults() -> None:
    assert Knobs.read({}) == Knobs()
    assert Knobs().rpc_deadline_s == 180.0
    assert Knobs().rpc_retry_times == 3


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("FLAGS_rpc_deadline", "5000", "rpc_deadline_s", 5.0),
        ("FLAGS_rpc_deadline", " 4500.0 ", "rpc_deadline_s", 4.5),
        ("FLAGS_rpc_retry_times", "0", "rpc_retry_times", 0),
        ("FLAGS_rpc_get_thread_num", "1", "rpc_get_thread_num", 1),
        ("FLEET_STARTUP_DEADLINE", "7", "startup_deadline_s", 7.0),
        ("FLEET_BEAT", "0.05", "beat_s", 0.05),
        ("FLEET_CHECK_FINITE", "On", "check_finite", True),
        ("FLEET_CHECK_FINITE", "0", "check_finite", False),
        ("FLEET_JOB_ID", "j", "job_id", "j"),
    ],
)
def test_each_knob(name: str, text: str, field: str, value: object) -> None:
    knobs = Knobs.read({name: text})
    assert getattr(knobs, field) == value
    assert type(getattr(knobs, field)) is type(value)


@pytest.mark.parametrize("name", ["FLAGS_rpc_deadline", "FLAGS_rpc_retry_times", "FLEET_BEAT", "FLEET_CHECK_FINITE"])
def test_blank_is_unset(name: str) -> None:
    assert Knobs.read({name: " "}) == Knobs()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("FLAGS_rpc_deadline", "soon", "a number above zero"),
        ("FLAGS_rpc_deadline", "0", "a number above zero"),
        ("FLAGS_rpc_deadline", "-1", "a number above zero"),
        ("FLAGS_rpc_deadline", "nan", "a number above zero"),
        ("FLAGS_rpc_deadline", "inf", "a number above zero"),
        ("FLAGS_rpc_retry_times", "-1", "a whole number of at least 0"),
        ("FLAGS_rpc_retry_times", "1.5", "a whole number of at least 0"),
        ("FLAGS_rpc_retry_times", "9" * 400, "a whole number of at least 0"),
        ("FLAGS_rpc_get_thread_num", "0", "a whole number of at least 1"),
        ("FLEET_STARTUP_DEADLINE", "0", "a number above zero"),
        ("FLEET_BEAT", "x", "a number above zero"),
        ("FLEET_CHECK_FINITE", "maybe", "1 or 0"),
    ],
)
def test_unusable(name: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Knobs.read({name: text})
    assert name in str(caught.value)
    assert caught.value.expected == expected
    assert caught.value.got == repr(text)


def test_heartbeats_fit_in_the_deadline() -> None:
    assert Knobs.read({"FLAGS_rpc_deadline": "1000", "FLEET_BEAT": "0.5"}).beat_s == 0.5
    with pytest.raises(ConfigurationError, match=r"FLEET_BEAT.*FLAGS_rpc_deadline"):
        Knobs.read({"FLAGS_rpc_deadline": "1000", "FLEET_BEAT": "0.6"})
    assert Knobs.read({"FLAGS_rpc_deadline": "1000"}).beat_s == 0.25


def test_how_surely_servers_keep_things() -> None:
    assert Knobs.read({"FLEET_DURABLE_DIR": " x ", "FLEET_DURABLE_SYNC": "Always"}).durable_sync == "always"
    assert Knobs.read({"FLEET_DURABLE_DIR": ""}) == Knobs()
    with pytest.raises(ConfigurationError, match=r"FLEET_DURABLE_SYNC.*always or interval or os; got 'often'"):
        Knobs.read({"FLEET_DURABLE_SYNC": "often"})


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


def test_every_variable_of_a_role_maker_is_known() -> None:
    source = Path(fleet.role_maker.variables_of_launchers.__file__).read_text()
    assert set(re.findall(r"\bPADDLE_[A-Z_]*[A-Z]\b", source)) == ROLE_VARIABLES


@pytest.mark.parametrize("name", ["FLAGS_rpc_send_thread_num", "FLAGS_rpc_prefetch_thread_num"])
def test_a_setting_with_nothing_to_act_on_is_told_of_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        Fleet(environ={name: "12"}).init()
    assert [name in message for message in caplog.messages if "nothing to act on" in message] == [True]
    caplog.clear()
    Fleet(environ={name: "12", "FLEET_LAUNCHER": "fleetrun", "FLEET_X": "1"}).init()  # the launcher has said it
    assert caplog.messages == []
