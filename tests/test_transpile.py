"""The lower-level door: ``Program`` and ``DistributeTranspiler``, and the imports that choose a kind of job."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PATIENT, Job, assert_close, config, run_job, values
from inside import abort
from test_import import fresh_python
from test_parity_dense import OPTIMIZERS, STEPS, Make, loss_of, make_model
from test_parity_dense import distributed as through_fleet
from test_parity_dense import reference as through_torch

import fleet
import fleet.collective
import fleet.nn
import fleet.transpiler
from fleet import Fleet, Program
from fleet.base.cluster import Endpoint
from fleet.base.pointers import OF_A_PROGRAM, OF_A_TRAINER
from fleet.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    FleetError,
    NotInitializedError,
    StateError,
    UnknownNameError,
    UnsupportedError,
)
from fleet.ps.wire.loopback import LoopbackNetwork
from fleet.ps.wire.transport import Network
from fleet.role_maker import EnvRoleMaker, Role, UserDefinedCollectiveRoleMaker, UserDefinedRoleMaker
from fleet.transpiler import DistributeTranspiler, DistributeTranspilerConfig, HashName
from fleet.transpiler.program import TrainerProgram

#: Those of the source documents' examples.
TWO = "192.168.0.1:6174,192.168.0.2:6174"
FIRST, SECOND = TWO.split(",")


def program(make: Make = OPTIMIZERS["sgd"]) -> Program:
    model = make_model()
    return Program(model, make(list(model.parameters())))


def transpiled(settings: DistributeTranspilerConfig | None = None, **arguments: Any) -> DistributeTranspiler:
    """One that nothing is connected to yet."""
    made = DistributeTranspiler(settings, environ=PATIENT, network=LoopbackNetwork())
    made.transpile(**{"trainer_id": 0, "program": program(), "pservers": TWO, **arguments})
    return made


class TranspiledJob(Job):
    """A job whose every thread has a ``DistributeTranspiler`` and a program of its own."""

    def __init__(
        self,
        make: Callable[[int], Program],
        body: Callable[[TrainerProgram, int], Any],
        trainers: int = 1,
        servers: int = 1,
        settings: DistributeTranspilerConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(body, trainers, servers, **options)  # type: ignore[arg-type]
        self.make = make
        self.settings = settings

    def transpiler(self, index: int) -> DistributeTranspiler:
        made = DistributeTranspiler(config=self.settings, environ=self.environ, network=self.network)
        made.transpile(index, self.make(index), pservers=",".join(self.endpoints), trainers=self.workers)
        return made

    def serve(self, index: int) -> None:
        try:
            t = self.transpiler(0)
            server = t.get_pserver_program(self.endpoints[index])
            t.get_startup_program(self.endpoints[index], server).run(self.model_dir)
            server.run()
        except BaseException as error:
            self.errors[f"server {index}"] = error

    def work(self, index: int) -> None:
        trainer = None
        try:
            trainer = self.transpiler(index).get_trainer_program()
            self.results[index] = self.body(trainer, index)  # type: ignore[arg-type]
            trainer.close()
        except BaseException as error:
            self.errors[f"worker {index}"] = error
            if trainer is not None:
                abort(trainer.fleet, "".join(traceback.format_exception(error)))


@contextlib.contextmanager
def serving(network: Network, pservers: str = "a:1", trainers: int = 1) -> Iterator[None]:
    """Servers as threads, for a trainer that the test runs itself and closes."""
    job = Job(lambda *_: None, 0, network=network, endpoints=pservers.split(","))
    job.workers = trainers
    threads = [
        threading.Thread(target=job.serve, args=(index,), name=f"job-serve-{index}", daemon=True)
        for index in range(len(job.endpoints))
    ]
    for thread in threads:
        thread.start()
    yield
    job.join(threads)
    assert job.errors == {}


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.pairs(9)
def test_a_job_ends_where_torch_ends_and_to_the_bit_where_fleet_ends(name: str) -> None:
    make = OPTIMIZERS[name]

    def make_program(index: int) -> Program:
        made = program(make)
        with torch.no_grad():
            for param in made.model.parameters():
                param.add_(float(index))  # trainer 0's values win
        return made

    def body(trainer: TrainerProgram, index: int) -> list[torch.Tensor]:
        for step in range(STEPS):
            trainer.minimize(loss_of(trainer.model, step, index))
        return values(trainer.model)

    expected = through_torch(make, 2)
    by_fleet = through_fleet(make, 2, 2)[0]
    for got in TranspiledJob(make_program, body, 2, 2, config(min_block_size=20)).run():
        assert_close(got, expected)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, by_fleet, strict=True))


class Ranking(torch.nn.Module):
    """A table and a layer."""

    def __init__(self, table: torch.nn.Module) -> None:
        super().__init__()
        self.table = table
        self.head = torch.nn.Linear(3, 1)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([[0.5, -0.25, 1.0]]))
            self.head.bias.zero_()

    def loss(self, step: int, worker: int) -> torch.Tensor:
        ids = torch.randint(0, 9, (6,), generator=torch.Generator().manual_seed(step * 31 + worker))
        return torch.nn.functional.mse_loss(self.head(self.table(ids)).squeeze(1), ids.float() / 9)

    def state(self) -> list[torch.Tensor]:
        return [*values(self.head), self.table(torch.arange(9)).detach()]


def test_rows_of_an_embedding_as_well() -> None:
    def make_model() -> Ranking:
        return Ranking(fleet.nn.Embedding(None, 3, initializer="constant(0.5)"))

    def make_program(index: int) -> Program:
        model = make_model()
        return Program(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def by_transpiler(trainer: TrainerProgram, index: int) -> list[torch.Tensor]:
        for step in range(STEPS):
            trainer.minimize(trainer.model.loss(step, index))
        return trainer.model.state()

    def by_fleet(fleet_: Fleet, index: int) -> list[torch.Tensor]:
        model = make_model()
        optimizer = fleet_.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        fleet_.init_worker()
        for step in range(STEPS):
            optimizer.minimize(model.loss(step, index))
        return model.state()

    plain = Ranking(torch.nn.Embedding(9, 3, _weight=torch.full((9, 3), 0.5)))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        ((plain.loss(step, 0) + plain.loss(step, 1)) / 2).backward()
        optimizer.step()

    theirs = run_job(by_fleet, 2, 2)[0]
    for got in TranspiledJob(make_program, by_transpiler, 2, 2).run():
        assert_close(got, plain.state())
        assert all(torch.equal(one, other) for one, other in zip(got, theirs, strict=True))


def test_several_optimizers_are_one_program() -> None:
    def make_program(index: int) -> Program:
        model = make_model()
        first, last = list(model[0].parameters()), list(model[2].parameters())
        return Program(model, [torch.optim.SGD(first, lr=0.1), torch.optim.Adam(last, lr=0.01)])

    def body(trainer: TrainerProgram, index: int) -> list[torch.Tensor]:
        trainer.minimize(loss_of(trainer.model, 0, 0))
        return values(trainer.model)

    model = make_model()
    loss_of(model, 0, 0).backward()
    torch.optim.SGD(model[0].parameters(), lr=0.1).step()
    torch.optim.Adam(model[2].parameters(), lr=0.01).step()
    (got,) = TranspiledJob(make_program, body, 1, 2).run()
    assert_close(got, values(model))


def test_schedules_accumulation_and_clipping_go_through_the_optimizer_of_the_trainer() -> None:
    """Clipping acts on a worker's own gradients, before they are averaged."""

    def accumulate(model: torch.nn.Module, step: int, worker: int) -> None:
        for part in range(2):
            (loss_of(model, 2 * step + part, worker) / 2).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5, "otherwise there is nothing to clip"

    def body(trainer: TrainerProgram, index: int) -> list[torch.Tensor]:
        schedule = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2, 0.5)
        for step in range(STEPS):
            trainer.optimizer.zero_grad()
            accumulate(trainer.model, step, index)
            trainer.optimizer.step()
            schedule.step()
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** (STEPS // 2))
        return values(trainer.model)

    model = make_model()
    optimizer = OPTIMIZERS["sgd-momentum"](list(model.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(STEPS):
        grads = []
        for worker in range(2):
            optimizer.zero_grad()
            accumulate(model, step, worker)
            grads.append([param.grad.clone() for param in model.parameters()])
        for param, *each in zip(model.parameters(), *grads, strict=True):
            param.grad = sum(each) / 2
        optimizer.step()
        schedule.step()

    for got in TranspiledJob(lambda _: program(OPTIMIZERS["sgd-momentum"]), body, 2, 2).run():
        assert_close(got, values(model))


def test_a_checkpoint_of_a_trainer_is_where_a_startup_program_goes_on(tmp_path: Path) -> None:
    """Adam, so that state counts; on another number of servers; to the bit as if nothing had stopped."""
    saved = str(tmp_path / "ckpt")

    def steps(first: int, last: int, save: bool = False) -> Callable[[TrainerProgram, int], list[torch.Tensor]]:
        def body(trainer: TrainerProgram, index: int) -> list[torch.Tensor]:
            assert trainer.fleet.resume_step() == first
            for step in range(first, last):
                trainer.minimize(loss_of(trainer.model, step, index))
            if save:
                trainer.fleet.save_persistables(saved)
            return values(trainer.model)

        return body

    def run(body: Any, servers: int, model_dir: str | None = None) -> list[torch.Tensor]:
        return TranspiledJob(lambda _: program(OPTIMIZERS["adam"]), body, 2, servers, model_dir=model_dir).run()[0]

    whole = run(steps(0, 6), 2)
    run(steps(0, 3, save=True), 2)
    resumed = run(steps(3, 6), 3, saved)
    assert all(torch.equal(one, other) for one, other in zip(resumed, whole, strict=True))


def test_the_fleet_of_a_handle_answers_who_it_is() -> None:
    t = transpiled(trainers=3)
    server = t.get_pserver_program(SECOND)
    assert server.fleet.is_server()
    assert (server.fleet.server_index(), server.fleet.server_num(), server.fleet.worker_num()) == (1, 2, 3)
    assert server.fleet.server_endpoints(to_string=True) == TWO
    assert repr(server) == f"ServerProgram({SECOND!r})"

    def body(trainer: TrainerProgram, index: int) -> tuple[int, int, list[str]]:
        return trainer.fleet.worker_index(), trainer.fleet.worker_num(), trainer.fleet.split_files(["a", "b", "c"])

    assert TranspiledJob(lambda _: program(), body, 2).run() == [(0, 2, ["a", "b"]), (1, 2, ["c"])]


# --- how transpile may be called --------------------------------------------------------------------------------------

FORMS: dict[str, tuple[int, Callable[[DistributeTranspiler, Program], None]]] = {
    "000 and 002": (
        1,
        lambda t, p: t.transpile(0, program=p, pservers=TWO, trainers=1, sync_mode=True),
    ),
    "001": (4, lambda t, p: t.transpile(0, pservers=TWO, trainers=4)),
    "003": (2, lambda t, p: t.transpile(trainer_id=0, pservers=TWO, trainers=2)),
    "all by position": (2, lambda t, p: t.transpile(0, p, TWO, 2, True, p, FIRST)),
    "all by name": (
        2,
        lambda t, p: t.transpile(
            trainer_id=0,
            program=p,
            pservers=TWO,
            trainers=2,
            sync_mode=True,
            startup_program=p,
            current_endpoint=FIRST,
        ),
    ),
    "none where there may be none": (
        1,
        lambda t, p: t.transpile(0, None, TWO, sync_mode=None, startup_program=None, current_endpoint=None),
    ),
    "spaces after the comma, as in 003's table": (1, lambda t, p: t.transpile(0, p, f" {FIRST} ,  {SECOND}")),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_call(form: str) -> None:
    trainers, call = FORMS[form]
    t = DistributeTranspiler(environ=PATIENT, network=LoopbackNetwork())
    call(t, program())
    for index, endpoint in enumerate((FIRST, SECOND)):
        server = t.get_pserver_program(endpoint)
        assert (server.fleet.server_index(), server.fleet.worker_num()) == (index, trainers)
        assert server.fleet.server_endpoints() == [FIRST, SECOND]


def test_without_anything_it_is_one_server_here_and_one_trainer() -> None:
    t = DistributeTranspiler()
    program()
    t.transpile(0)
    server = t.get_pserver_program("127.0.0.1:6174")
    assert server.fleet.server_endpoints() == ["127.0.0.1:6174"]
    assert server.fleet.worker_num() == 1


def test_without_a_program_it_is_the_last_one_made() -> None:
    network = LoopbackNetwork()
    program()
    last = program()
    t = DistributeTranspiler(environ=PATIENT, network=network)
    t.transpile(0, pservers="a:1")
    program()  # too late
    with serving(network):
        trainer = t.get_trainer_program()
        assert trainer.model is last.model
        trainer.minimize(loss_of(last.model, 0, 0))
        trainer.close()


def test_a_program_that_could_not_be_made_is_not_the_last_one() -> None:
    good = program()
    with pytest.raises(ArgumentTypeError):
        Program(make_model(), "adam")  # type: ignore[arg-type]
    assert Program.last() is good


def test_without_any_program_the_error_says_how_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "_last", None)
    with pytest.raises(NotInitializedError, match=r"no program yet.*fleet\.Program\(model, optimizer\).*program="):
        DistributeTranspiler().transpile(0)


def test_a_startup_program_is_the_program_or_none() -> None:
    given = program()
    t = transpiled(program=given, startup_program=given)
    t.get_startup_program(FIRST, t.get_pserver_program(FIRST), given)
    with pytest.raises(ConfigurationError, match="startup_program is another program"):
        t.get_startup_program(FIRST, startup_program=program())
    with pytest.raises(ConfigurationError, match="startup_program is another program; expected the same as program"):
        transpiled(startup_program=program())


def test_a_startup_program_alone_is_no_program() -> None:
    """It is compared with the last one made, which here is another."""
    first = program()
    program()
    with pytest.raises(ConfigurationError, match="startup_program is another program"):
        DistributeTranspiler().transpile(0, startup_program=first)


@pytest.mark.parametrize(
    ("argument", "setting", "mode"),
    [
        (None, True, "sync"),
        (True, True, "sync"),
        (False, True, "async"),
        (None, False, "async"),
        (False, False, "async"),
    ],
)
def test_sync_mode_can_be_said_in_two_places(argument: bool | None, setting: bool, mode: str) -> None:
    settings = config(sync_mode=setting)
    t = transpiled(settings, sync_mode=argument)
    assert t._job is not None
    assert t._job.strategy.mode == mode
    assert settings.sync_mode is setting, "the user's own config stays as it is"


def test_sync_mode_must_not_be_said_in_both_ways() -> None:
    with pytest.raises(ConfigurationError, match=r"transpile\(sync_mode=True\) contradicts config.sync_mode = False"):
        transpiled(config(sync_mode=False), sync_mode=True)


@pytest.mark.parametrize("relaxed", ["half_async", "geo_sgd_mode", "enable_dc_asgd"])
def test_the_argument_reaches_what_the_config_says_besides(relaxed: str) -> None:
    job = transpiled(config(**{relaxed: True}), sync_mode=False)._job
    assert job is not None
    strategy = job.strategy
    assert {
        "half_async": strategy.mode == "half_async",
        "geo_sgd_mode": (strategy.mode, strategy.update_frequency) == ("geo", 100),
        "enable_dc_asgd": (strategy.mode, strategy.dc_lambda) == ("async", 1),
    }[relaxed]
    with pytest.raises(ConfigurationError, match=f"sync_mode=True and {relaxed}=True exclude each other"):
        transpiled(config(**{relaxed: True}))


def test_current_endpoint_is_the_default_of_both_server_calls() -> None:
    t = transpiled(current_endpoint=f" {SECOND} ")
    assert t.get_pserver_program() is t.get_pserver_program(SECOND)
    assert t.get_startup_program()._server is t.get_pserver_program(SECOND)
    assert t.get_pserver_programs()[0] is t.get_pserver_program(SECOND)
    assert t.get_pserver_program(FIRST).endpoint != t.get_pserver_program().endpoint, "an argument beats it"
    with pytest.raises(ConfigurationError, match=rf"which server this is; expected one of {FIRST}, {SECOND}"):
        transpiled().get_pserver_program()


def test_a_current_endpoint_that_is_no_server_only_matters_to_a_server() -> None:
    """Some scripts compute it on trainers too."""
    network = LoopbackNetwork()
    t = DistributeTranspiler(environ=PATIENT, network=network)
    t.transpile(0, program(), "a:1", current_endpoint="trainer0:6174")
    with serving(network):
        t.get_trainer_program().close()
    with pytest.raises(ConfigurationError, match="not among pservers; expected one of a:1; got trainer0:6174"):
        t.get_pserver_program()


def test_both_spellings_are_the_same_classes() -> None:
    assert fleet.transpiler.DistributedTranspiler is DistributeTranspiler
    assert fleet.transpiler.DistributedTranspilerConfig is DistributeTranspilerConfig


def test_the_config_may_be_changed_until_transpile() -> None:
    settings = config()
    t = DistributeTranspiler(settings)
    settings.sync_mode = False
    settings.geo_sgd_mode = True
    t.transpile(0, program(), "a:1")
    assert t._job is not None
    assert t._job.strategy.mode == "geo"


# --- the plan ---------------------------------------------------------------------------------------------------------


def printed_plan(out: str) -> list[tuple[str, int, int, int]]:
    head, *rows = [line.split() for line in out.splitlines()]
    assert head == ["parameter", "block", "server", "elements"]
    return [(name, int(block), int(server), int(elements)) for name, block, server, elements in rows]


def plan_of(capsys: pytest.CaptureFixture[str], **settings: Any) -> list[tuple[str, int, int, int]]:
    """What two trainers print, which is what trainer 0 prints."""

    def body(trainer: TrainerProgram, index: int) -> None:
        trainer.minimize(loss_of(trainer.model, 0, index))

    TranspiledJob(lambda _: program(), body, 2, 2, config(min_block_size=20, **settings)).run()
    return printed_plan(capsys.readouterr().out)


#: name and number of elements of each parameter of ``make_model``
SIZES = {name: param.numel() for name, param in make_model().named_parameters()}


def test_print_log_prints_the_plan_once(capsys: pytest.CaptureFixture[str]) -> None:
    rows = plan_of(capsys, print_log=True)
    assert {name: sum(row[3] for row in rows if row[0] == name) for name in SIZES} == SIZES
    assert [row[1] for row in rows if row[0] == "0.weight"] == [0, 1], "large enough to be cut"
    assert [row[2] for row in rows] == [position % 2 for position in range(len(rows))], "dealt in turn"


def test_without_slice_var_up_parameters_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    rows = plan_of(capsys, print_log=True, slice_var_up=False)
    assert rows == [(name, 0, position % 2, size) for position, (name, size) in enumerate(SIZES.items())]


def test_hash_name_goes_by_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (HashName, "HashName"):
        rows = plan_of(capsys, print_log=True, split_method=given)
        cut = {name for name, block, *_ in rows if block}
        names = [f"{name}.block{block}" if name in cut else name for name, block, *_ in rows]
        assert [row[2] for row in rows] == HashName(2).dispatch(names)
        assert [row[2] for row in rows] != [position % 2 for position in range(len(rows))]


def test_nothing_is_printed_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    TranspiledJob(lambda _: program(), lambda *_: None, 2, 2).run()
    assert capsys.readouterr().out == ""


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        *(("trainer_id", value, TypeError) for value in ("0", None, True, 1.0)),
        ("trainer_id", -1, ValueError),
        *(("program", value, TypeError) for value in (make_model(), "main", 0)),
        *(("startup_program", value, TypeError) for value in (make_model(), "main", 0)),
        *(("pservers", value, TypeError) for value in (None, 6174, TWO.split(","))),
        *(("pservers", value, ValueError) for value in ("", "a", "a:1,", "a:1,a:1", "a:1, a:01", "a:0", "a:1;b:1")),
        *(("trainers", value, TypeError) for value in (None, True, 1.5, "2", TWO)),
        *(("trainers", value, ValueError) for value in (0, -1)),
        *(("sync_mode", value, TypeError) for value in (1, 0, "True", "sync")),
        *(("current_endpoint", value, TypeError) for value in (0, 6174, [FIRST])),
        *(("current_endpoint", value, ValueError) for value in ("", "a", "a:0", ":6174")),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_wrong_argument_of_transpile_is_named(name: str, value: object, kind: type[Exception]) -> None:
    t = DistributeTranspiler()
    with pytest.raises(FleetError, match=rf"\b{name}\b") as caught:
        t.transpile(**{"trainer_id": 0, "program": program(), "pservers": TWO, name: value})
    assert isinstance(caught.value, kind)
    t.transpile(0, program())  # what was refused has left nothing behind


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: DistributeTranspiler("pserver"), "config must be a DistributeTranspilerConfig; got str"),
        (lambda t: DistributeTranspiler(DistributeTranspilerConfig), "config must be a DistributeTranspilerConfig"),
        (lambda t: Program(make_model, torch.optim.SGD(make_model().parameters())), "model must be a torch.nn.Module"),
        (lambda t: Program(make_model(), "adam"), "optimizer is of the wrong type.*got str"),
        (lambda t: Program(make_model(), torch.optim.Adam), "optimizer is of the wrong type"),
        (lambda t: Program(make_model(), []), "optimizer is an empty list"),
        (lambda t: t.get_trainer_program("yes"), "wait_port must be True, False or None; got 'yes'"),
        (lambda t: t.get_trainer_program(wait_port=0), "wait_port must be True, False or None"),
        (lambda t: t.get_pserver_program(6174), "endpoint must be text; expected 'host:port'; got 6174"),
        (lambda t: t.get_startup_program(6174), "endpoint must be text"),
        (lambda t: t.get_pserver_programs(6174), "endpoint must be text"),
    ],
)
def test_another_wrong_type_is_named(call: Callable[[DistributeTranspiler], object], words: str) -> None:
    with pytest.raises(TypeError, match=words) as caught:
        call(transpiled())
    assert isinstance(caught.value, FleetError)


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("192.168.0.3:6174", f"not among pservers; expected one of {FIRST}, {SECOND}; got 192.168.0.3:6174"),
        ("192.168.0.1:6175", "not among pservers"),
        ("192.168.0.1", "malformed endpoint; at endpoint; expected host:port"),
        (":6174", "malformed endpoint; at endpoint"),
    ],
)
def test_an_endpoint_that_is_no_server(endpoint: str, words: str) -> None:
    t = transpiled()
    for call in (t.get_pserver_program, t.get_startup_program, t.get_pserver_programs):
        with pytest.raises(ConfigurationError, match=words):
            call(endpoint)


@pytest.mark.parametrize("call", ["get_trainer_program", "get_pserver_program", "get_startup_program"])
def test_a_call_before_transpile(call: str) -> None:
    t = DistributeTranspiler()
    with pytest.raises(NotInitializedError, match=rf"{call}\(\) came before transpile\(\). Call transpile"):
        getattr(t, call)()
    with pytest.raises(NotInitializedError, match="came before transpile"):
        t.get_pserver_programs(FIRST)


def test_a_second_transpile() -> None:
    t = transpiled()
    with pytest.raises(StateError, match=r"transpile\(\) was called twice. Make another"):
        t.transpile(0, program())


def test_a_server_before_its_startup_program() -> None:
    server = transpiled().get_pserver_program(FIRST)
    with pytest.raises(NotInitializedError, match=rf"{FIRST} came before its startup program.*get_startup_program"):
        server.run()


def test_a_startup_program_run_twice() -> None:
    t = transpiled()
    t.get_startup_program(FIRST).run()
    for startup in (t.get_startup_program(FIRST), t.get_pserver_programs(FIRST)[1]):
        with pytest.raises(StateError, match=f"the startup program of {FIRST} was run twice"):
            startup.run()
    t.get_startup_program(SECOND).run()  # another server's is another one


def test_a_startup_program_that_failed_may_be_run_again(tmp_path: Path) -> None:
    t = transpiled()
    startup = t.get_startup_program(FIRST)
    with pytest.raises(CheckpointError, match="there is no checkpoint here"):
        startup.run(str(tmp_path / "nowhere"))
    startup.run()


def test_the_server_program_of_another_endpoint() -> None:
    t = transpiled()
    for wrong in (t.get_pserver_program(SECOND), transpiled().get_pserver_program(FIRST), "server"):
        with pytest.raises(ConfigurationError, match=rf"pserver_program does not belong.*get_pserver_program.'{FIRST}"):
            t.get_startup_program(FIRST, wrong)  # type: ignore[arg-type]


def test_a_server_says_what_it_could_not_train() -> None:
    model = make_model()
    t = transpiled(program=Program(model, torch.optim.LBFGS(model.parameters())))
    with pytest.raises(UnsupportedError, match="LBFGS cannot be honoured"):
        t.get_startup_program(FIRST).run()


def test_a_trainer_id_out_of_range_only_matters_to_a_trainer() -> None:
    t = transpiled(trainer_id=2, trainers=2)
    t.get_pserver_program(FIRST)
    with pytest.raises(ConfigurationError, match="trainer_id is out of range; expected 0 to 1, for 2 trainers; got 2"):
        t.get_trainer_program()


def test_addresses_of_trainers_belong_to_another_mode() -> None:
    with pytest.raises(ArgumentTypeError, match=r"trainers must be an int.*mode='nccl2'; got '192"):
        transpiled(trainers=TWO)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"trainers": 2}, ArgumentTypeError, "trainers must be text in a collective mode.*got 2"),
        ({"pservers": "a:1"}, ConfigurationError, "pservers: a collective job has no servers; got 'a:1'"),
        ({"trainers": "a:1,a:1"}, ConfigurationError, "trainers"),
        ({"trainers": "a"}, ConfigurationError, "malformed endpoint"),
        ({"trainer_id": 2}, ConfigurationError, "trainer_id"),
        ({"current_endpoint": "192.168.0.2:6174"}, ConfigurationError, f"expected {FIRST}; got 192.168.0.2:6174"),
        ({"sync_mode": False}, ConfigurationError, "sync_mode: nothing to act on in a collective job"),
    ],
)
def test_what_a_collective_mode_is_told(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        transpiled(config(mode="nccl2"), **{"pservers": "127.0.0.1:6174", "trainers": TWO, **arguments})


def test_a_collective_mode_has_no_servers() -> None:
    t = transpiled(config(mode="nccl2"), pservers="127.0.0.1:6174", trainers=TWO, current_endpoint=FIRST)
    for call in (t.get_pserver_program, t.get_startup_program, t.get_pserver_programs):
        with pytest.raises(StateError, match="collective job, which has no servers"):
            call(FIRST)
    with pytest.raises(ConfigurationError, match="wait_port=False: in a collective job"):
        t.get_trainer_program(wait_port=False)


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({}, {"trainers": 2}),
        ({"sync_mode": False}, {"trainers": 2}),
        ({"geo_sgd_mode": True, "sync_mode": False}, {"trainers": 2}),
        ({"mode": "nccl2"}, {"pservers": "127.0.0.1:6174", "trainers": TWO, "current_endpoint": FIRST}),
        ({"mode": "collective", "collective_mode": "local_sgd"}, {"pservers": "127.0.0.1:6174", "trainers": TWO}),
    ],
    ids=["sync", "async", "geo", "nccl2", "collective"],
)
def test_a_transpiled_programs_optimizers_do_not_step_alone(settings: dict[str, Any], arguments: Any) -> None:
    """As scripts would that end at ``transpile``, which converted a Fluid program."""
    model = make_model()
    params = list(model.parameters())
    optimizers = [torch.optim.SGD(params[:1], lr=0.1), torch.optim.Adam(params[1:], lr=0.1)]
    transpiled(config(**settings), program=Program(model, optimizers), **arguments)
    before = values(model)
    loss_of(model, 0, 0).backward()
    for optimizer in optimizers:
        with pytest.raises(
            StateError, match=r"would train this worker alone\. Make the trainer with get_trainer_program"
        ):
            optimizer.step()
    assert_close(values(model), before, 0)


def test_transpiling_again_leaves_a_running_trainer_alone() -> None:
    network, again = LoopbackNetwork(), program()
    t = DistributeTranspiler(config(geo_sgd_mode=True, sync_mode=False), environ=PATIENT, network=network)
    t.transpile(0, again, "a:1")
    with serving(network):
        trainer = t.get_trainer_program()
        before = values(trainer.model)
        transpiled(program=again)
        trainer.minimize(loss_of(trainer.model, 0, 0))
        assert not any(torch.equal(was, now) for was, now in zip(before, values(trainer.model), strict=True))
        trainer.close()


# --- a trainer's life -------------------------------------------------------------------------------------------------


def test_a_trainer_is_made_once_and_closed_once() -> None:
    network = LoopbackNetwork()
    t = DistributeTranspiler(environ=PATIENT, network=network)
    t.transpile(0, program(), "a:1")
    with serving(network):
        trainer = t.get_trainer_program()
        assert t.get_trainer_program() is trainer
        with pytest.raises(StateError, match="wait_port comes too late"):
            t.get_trainer_program(wait_port=False)
        trainer.minimize(loss_of(trainer.model, 0, 0))
        trainer.close()
    trainer.close()  # the servers are gone, and it says nothing to them
    trainer.fleet.stop_worker()
    before = values(trainer.model)
    with pytest.raises(StateError, match="after the job ended for this worker"):
        trainer.minimize(loss_of(trainer.model, 1, 0))
    assert_close(values(trainer.model), before, 0)


@pytest.mark.parametrize(("setting", "argument"), [(False, None), (True, False), (False, False)])
def test_without_waiting_a_server_that_is_not_there_is_an_error_at_once(setting: bool, argument: bool | None) -> None:
    patient = {**PATIENT, "FLEET_STARTUP_DEADLINE_S": "1000"}
    network = LoopbackNetwork()
    t = DistributeTranspiler(config(wait_port=setting), environ=patient, network=network)
    t.transpile(0, program(), "a:1")
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="the server at a:1 did not come up; at worker 0"):
        t.get_trainer_program(argument)
    assert time.monotonic() - began < 10
    with serving(network):
        trainer = t.get_trainer_program(wait_port=True)  # it may be asked again
        trainer.minimize(loss_of(trainer.model, 0, 0))
        trainer.close()


@pytest.mark.parametrize(("setting", "argument"), [(True, None), (False, True), (True, True)])
def test_with_waiting_a_server_may_come_later(setting: bool, argument: bool | None) -> None:
    """The server starts when the trainer has knocked three times."""
    knocked = threading.Event()

    class Knocking(LoopbackNetwork):
        knocks = 0

        def listener(self, endpoint: Endpoint) -> Any:
            self.knocks += 1
            if self.knocks == 3:
                knocked.set()
            return super().listener(endpoint)

    network = Knocking()
    t = DistributeTranspiler(config(wait_port=setting), environ=PATIENT, network=network)
    t.transpile(0, program(), "a:1")
    failures: list[BaseException] = []

    def train() -> None:
        try:
            trainer = t.get_trainer_program(argument)
            trainer.minimize(loss_of(trainer.model, 0, 0))
            trainer.close()
        except BaseException as error:
            failures.append(error)
            knocked.set()

    thread = threading.Thread(target=train, name="job-train", daemon=True)
    thread.start()
    assert knocked.wait(30)
    assert failures == []
    with serving(network):
        thread.join(30)
    assert not thread.is_alive()
    assert failures == []


def test_one_transpiler_may_serve_several_servers() -> None:
    """001 starts two on one machine; nothing says that each needs a process."""
    network = LoopbackNetwork()
    t = DistributeTranspiler(environ=PATIENT, network=network)
    t.transpile(0, program(), "a:1,b:1", current_endpoint="a:1")
    servers = [t.get_pserver_program(), t.get_pserver_program("b:1")]
    for server in servers:
        t.get_startup_program(str(server.endpoint), server).run()
    threads = [threading.Thread(target=server.run, name=f"job-{server}", daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    other = DistributeTranspiler(environ=PATIENT, network=network)
    other.transpile(0, program(), "a:1,b:1")
    trainer = other.get_trainer_program()
    trainer.minimize(loss_of(trainer.model, 0, 0))
    trainer.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


# --- the import that chooses ------------------------------------------------------------------------------------------

DOORS = {"fleet.transpiler": fleet.transpiler.fleet, "fleet.collective": fleet.collective.fleet}


@pytest.fixture
def default_fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """The one behind ``import fleet``, as it is before ``init``, and put back afterwards."""
    default: Fleet = fleet._default  # type: ignore[attr-defined]
    for name, value in {"_assignment": None, "_chosen": None, "_environ": {}, "_settings": None}.items():
        monkeypatch.setattr(default, name, value, raising=False)
    return default


def test_programs_point_at_what_to_write_instead() -> None:
    def body(trainer: TrainerProgram, index: int) -> list[str]:
        told = []
        for name in OF_A_TRAINER:
            with pytest.raises(UnknownNameError) as caught:
                getattr(trainer, name)
            told.append(str(caught.value.todo))
        return told

    made = program()
    (told,) = TranspiledJob(lambda _: made, body).run()
    assert "call trainer.minimize(" in told[0]
    for name in OF_A_PROGRAM:
        with pytest.raises(UnknownNameError, match="'Program' object"):
            getattr(made, name)
        assert not hasattr(made, name)


@pytest.mark.parametrize("package", DOORS)
def test_every_name_is_the_one_of_import_fleet(package: str) -> None:
    door = DOORS[package]
    assert [name for name in fleet.__all__ if name != "init" and getattr(door, name) is not getattr(fleet, name)] == []
    assert set(fleet.__all__) <= set(dir(door))
    assert repr(door) == f"<fleet, as {package} has it>"
    with pytest.raises(AttributeError, match="no_such_name"):
        door.no_such_name  # noqa: B018


@pytest.mark.parametrize("package", DOORS)
def test_a_job_that_one_door_began_is_known_at_the_others(package: str, default_fleet: Fleet) -> None:
    maker = (
        UserDefinedRoleMaker(1, Role.WORKER, 3, ["a:1"])
        if package == "fleet.transpiler"
        else UserDefinedCollectiveRoleMaker(1, ["a:1", "b:1", "c:1"])
    )
    DOORS[package].init(role_maker=maker)
    for module in (fleet, *DOORS.values()):
        assert (module.worker_index(), module.worker_num()) == (1, 3)


@pytest.mark.parametrize(
    ("package", "maker", "words"),
    [
        (
            "fleet.transpiler",
            lambda: UserDefinedCollectiveRoleMaker(0, ["a:1"]),
            r"fleet.transpiler is for parameter-server jobs.*a collective one.*UserDefinedCollective.*import fleet",
        ),
        (
            "fleet.transpiler",
            lambda: EnvRoleMaker(True, {"PADDLE_TRAINER_ENDPOINTS": "a:1", "PADDLE_TRAINER_ID": "0"}),
            "fleet.transpiler is for parameter-server jobs.*EnvRoleMaker",
        ),
        (
            "fleet.collective",
            lambda: UserDefinedRoleMaker(0, Role.WORKER, 1, ["a:1"]),
            r"fleet.collective is for collective jobs.*a parameter-server one.*UserDefinedRoleMaker.*import fleet",
        ),
    ],
)
def test_a_role_maker_of_the_other_kind_fails(
    package: str, maker: Callable[[], Any], words: str, default_fleet: Fleet
) -> None:
    with pytest.raises(StateError, match=words):
        DOORS[package].init(maker())
    with pytest.raises(NotInitializedError):
        fleet.is_worker()


@pytest.mark.parametrize(("package", "kind"), [("fleet.transpiler", False), ("fleet.collective", True)])
def test_is_collective_must_not_contradict_the_import(package: str, kind: bool, default_fleet: Fleet) -> None:
    door = DOORS[package]
    with pytest.raises(StateError, match=rf"is_collective={not kind} was given to the fleet of {package}. Leave it"):
        door.init(is_collective=not kind)
    with pytest.raises(ArgumentTypeError, match="is_collective must be True, False or None; got 'no'"):
        door.init(is_collective="no")
    agreeing: Any = UserDefinedRoleMaker(0, Role.WORKER, 1, ["a:1"])
    if kind:
        agreeing = UserDefinedCollectiveRoleMaker(0, ["a:1"])
    door.init(agreeing, is_collective=kind)
    assert fleet.is_first_worker()


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TRAINERS_ONLY = {"PADDLE_TRAINER_IPS": "127.0.0.1,127.0.0.2", "PADDLE_TRAINER_ID": "1"}
SERVERS_TOO = {
    "PADDLE_TRAINING_ROLE": "TRAINER",
    "PADDLE_PSERVER_IPS": "127.0.0.1",
    "PADDLE_TRAINERS": "2",
    "PADDLE_TRAINER_ID": "1",
}


@pytest.mark.parametrize(
    ("package", "environ", "words"),
    [
        ("fleet.transpiler", TORCHRUN, "under torchrun, which starts workers only"),
        ("fleet.transpiler", TRAINERS_ONLY, "parameter-server job:(.|\n)*PADDLE_PSERVERS_IP_PORT_LIST"),
        ("fleet.collective", SERVERS_TOO, "collective job:(.|\n)*PADDLE_TRAINER_ENDPOINTS"),
        ("fleet.collective", {}, "collective job:(.|\n)*PADDLE_TRAINER_ENDPOINTS"),
    ],
)
def test_an_environment_of_the_other_kind_fails(
    package: str, environ: dict[str, str], words: str, default_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_fleet, "_environ", environ)
    with pytest.raises(ConfigurationError, match=words):
        DOORS[package].init()


@pytest.mark.parametrize(
    ("package", "environ"),
    [
        ("fleet.transpiler", SERVERS_TOO),
        ("fleet.collective", TRAINERS_ONLY),
        ("fleet.collective", {**TORCHRUN, "RANK": "1"}),
    ],
)
def test_an_environment_of_its_own_kind(
    package: str, environ: dict[str, str], default_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_fleet, "_environ", environ)
    DOORS[package].init()
    assert (fleet.worker_index(), fleet.worker_num()) == (1, 2)


def test_a_job_of_one_behind_the_collective_door(
    default_fleet: Fleet, free_endpoints: Callable[[int], list[str]]
) -> None:
    door = DOORS["fleet.collective"]
    door.init(UserDefinedCollectiveRoleMaker(0, free_endpoints(1)))
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = door.distributed_optimizer(torch.optim.SGD([weight], lr=1.0))
    door.init_worker()
    optimizer.minimize(weight.sum())
    door.stop_worker()
    assert weight.tolist() == [-1.0] * 3


@pytest.mark.slow
def test_the_import_is_light_and_a_script_behind_it_trains_alone() -> None:
    """In an interpreter of its own, without any variable of a job."""
    code = """
import json, os, sys
for name in list(os.environ):
    if name.startswith(("PADDLE_", "TRAINING_ROLE", "FLEET_", "FLAGS_", "RANK", "WORLD_SIZE", "PMI", "OMPI")):
        del os.environ[name]
from fleet.collective import fleet
from fleet.transpiler import DistributeTranspiler, DistributeTranspilerConfig, fleet
heavy = sorted({"torch", "numpy", "grpc", "google.protobuf", "numba", "llvmlite"} & set(sys.modules))

import torch
fleet.init()
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = fleet.distributed_optimizer(torch.optim.SGD([weight], lr=1.0), DistributeTranspilerConfig())
fleet.init_worker()
optimizer.minimize(weight.sum())
fleet.stop_worker()
import fleet as whole
print(json.dumps([heavy, weight.tolist(), whole.is_first_worker(), whole.server_num()]))
"""
    assert fresh_python(code) == [[], [-1.0] * 3, True, 1]
