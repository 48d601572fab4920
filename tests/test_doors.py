"""Every door of docs/doors.md with real processes: its scripts and commands as they stand there, but for the ports.

Each job is held against one process that computes every trainer's gradient and averages them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import test_processes
import torch
from test_processes import CLEAN, ROOT, TRAIN, Processes, Started, ended

processes = test_processes.processes  # the fixture

DOORS = (ROOT / "docs" / "doors.md").read_text()
EXAMPLES = (ROOT / "examples" / "README.md").read_text()
DIST_TRAIN = ROOT / "examples" / "dist_train.py"

#: The first line of the tail of a page's script: above it stand its imports, its constants and its functions.
ROLE = "\nrole = "

#: Weights are printed with six digits.
PRINTED = 1e-5
#: Between the machine that the pages were written on and this one.
DOCUMENTED = 1e-3


def script(name: str) -> str:
    """A whole script of the page."""
    (code,) = re.findall(rf"<!-- file: {re.escape(name)} -->\n```python\n(.*?)```", DOORS, re.DOTALL)
    return str(code)


def commands(name: str, page: str = DOORS) -> list[str]:
    """The commands of a page that start ``name``, in its order."""
    blocks = [block.replace("\\\n", " ") for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL)]
    found = [line for block in blocks for line in block.splitlines()]
    return [line for line in found if re.search(rf"python {re.escape(name)}( |$)", line)]


def commands_with(name: str) -> list[str]:
    """The commands of the page that start ``name`` with variables in front."""
    page = DOORS.replace("\\\n", " ")
    return re.findall(rf"^PADDLE_\S+=.* python {re.escape(name)}$", page, re.MULTILINE)


#: In the place of ``python``: says how it was called.
CALLED = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def shell(processes: Processes, command: str, cwd: Path = ROOT) -> Started:
    """A command line, read by a shell."""
    line = re.sub(r"\bpython (?=\S+\.py)", f"{sys.executable} -I -c '{CALLED}' ", command)
    told = subprocess.run(["sh", "-c", f"env {line}"], env=CLEAN, capture_output=True, check=True).stdout
    arguments, variables = json.loads(told)
    return processes.start(*arguments, cwd=cwd, **variables)


def results(started: list[Started]) -> list[str]:
    """What each printed; all must have ended well."""
    printed = []
    for process in started:
        code, out, err = ended(process)
        assert code == 0, err
        printed.append(out)
    return printed


def weights(out: str) -> list[float]:
    (line,) = re.findall(r"^weights: (.*)$", out, re.MULTILINE)
    return [float(word) for word in line.split()]


def averaged(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    trainers: int,
    loss_of: Callable[[torch.nn.Module, int, int], torch.Tensor],
) -> list[float]:
    """One process in the place of all trainers."""
    for step in range(steps):
        optimizer.zero_grad()
        for trainer in range(trainers):
            (loss_of(model, step, trainer) / trainers).backward()
        optimizer.step()
    return [value for param in model.parameters() for value in param.flatten().tolist()]


def run_page_script(processes: Processes, tmp_path: Path, name: str, ports: dict[str, str], trainers: int) -> list[str]:
    """Its commands, and its result held against one process made of its own functions. What the trainers printed."""
    code = script(name)
    lines = commands(name)
    assert all(documented in code for documented in ports)
    any_of_them = re.compile("|".join(map(re.escape, ports)))

    def moved(text: str) -> str:
        """All ports at once: a free one may look like another that is documented."""
        return any_of_them.sub(lambda found: ports[found[0]], text)

    (tmp_path / name).write_text(moved(code))
    outs = results([shell(processes, moved(line), tmp_path) for line in lines])
    servers, working = outs[:2], outs[2:]
    assert servers == ["", ""]
    assert len(working) == trainers

    head: dict[str, Any] = {}
    exec(code.partition(ROLE)[0], head)  # the page's own words
    expected = averaged(*head["build"](), head["STEPS"], trainers, head["loss_of"])
    for out in working:
        assert weights(out) == pytest.approx(expected, abs=PRINTED)
    transcript = DOORS.partition(f"<!-- file: {name} -->")[2].partition("\nweights: ")[2].partition("\n")[0]
    assert weights(f"weights: {transcript}") == pytest.approx(expected, abs=DOCUMENTED)
    return working


def port_of(endpoint: str) -> str:
    return endpoint.partition(":")[2]


@pytest.mark.slow
def test_the_quick_start_by_the_commands_of_its_table(
    processes: Processes,
    free_endpoints: Callable[[int], list[str]],
) -> None:
    """Two servers at one port of two addresses, two trainers, and a space in PADDLE_PSERVER_IPS."""
    pytest.importorskip("sklearn", reason="the example's data come with the extra 'examples'")
    table = re.findall(r"^\| (.+?) \| `(.+ python examples/dist_train\.py)` \| (.+?) \|$", EXAMPLES, re.MULTILINE)
    assert len(table) == 4
    assert all('PADDLE_PSERVER_IPS="127.0.0.1, 127.0.0.2"' in command for _, command, _ in table)
    assert all("PADDLE_PSERVER_PORT=6174" in command for _, command, _ in table)
    port = port_of(free_endpoints(1)[0])
    outs = results([shell(processes, command.replace("6174", port)) for _, command, _ in table])
    assert outs[:2] == ["", ""]

    example = load(DIST_TRAIN)
    epochs = [
        [list(example.train_reader(trainer, 2, epoch)) for trainer in range(2)] for epoch in range(example.EPOCH_NUM)
    ]
    steps = len(epochs[0][0])
    assert steps == len(epochs[0][1]), "as many batches for one as for the other"

    def loss_of(model: torch.nn.Module, step: int, trainer: int) -> torch.Tensor:
        x, y = epochs[step // steps][trainer][step % steps]
        return torch.nn.functional.mse_loss(model(x), y)

    torch.manual_seed(0)
    model = torch.nn.Linear(10, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.001)
    expected = averaged(model, sgd, steps * len(epochs), 2, loss_of)
    for out in outs[2:]:
        assert weights(out) == pytest.approx(expected, abs=PRINTED)
        assert len(re.findall(r"^Epoch: \d+, Batch: \d+, loss: [\d.]+$", out, re.MULTILINE)) == len(epochs) * (
            steps // 10
        )
    assert weights(EXAMPLES) == pytest.approx(expected, abs=DOCUMENTED)


def test_the_quick_start_says_which_variable_it_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under fleetrun, which names the servers in another one, it ended in an endpoint without a host."""
    pytest.importorskip("sklearn", reason="the example's data come with the extra 'examples'")
    monkeypatch.setenv("PADDLE_TRAINING_ROLE", "TRAINER")
    monkeypatch.delenv("PADDLE_PSERVER_IPS", raising=False)
    with pytest.raises(SystemExit, match="PADDLE_PSERVER_IPS should name the servers' hosts, and is not set"):
        load(DIST_TRAIN).train()


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_part_of_the_quick_start_that_the_page_shows_is_in_the_example() -> None:
    (part,) = re.findall(r"<!-- part of: examples/dist_train\.py -->\n```python\n(.*?)```", DOORS, re.DOTALL)
    pieces = [piece.strip("\n") for piece in textwrap.indent(part, "    ").split("\n\n")]
    source = DIST_TRAIN.read_text()
    assert [piece for piece in pieces if piece not in source] == []


@pytest.mark.slow
def test_the_transpiler_with_whole_parameters(
    processes: Processes,
    free_endpoints: Callable[[int], list[str]],
    tmp_path: Path,
) -> None:
    """000 and 002: slice_var_up False, one trainer, two servers."""
    ports = {"6174": port_of(free_endpoints(1)[0])}
    (out,) = run_page_script(processes, tmp_path, "sync.py", ports, 1)
    plan = [line.split() for line in out.splitlines()[:3]]
    assert plan == [
        ["parameter", "block", "server", "elements"],
        ["weight", "0", "0", "4"],
        ["bias", "0", "1", "1"],
    ]


@pytest.mark.slow
def test_four_trainers_and_two_servers_on_one_host(
    processes: Processes,
    free_endpoints: Callable[[int], list[str]],
    tmp_path: Path,
) -> None:
    ports = dict(zip(("6170", "6171"), map(port_of, free_endpoints(2)), strict=True))
    run_page_script(processes, tmp_path, "several.py", ports, 4)


@pytest.mark.slow
def test_the_fleet_api_on_three_workers_and_two_servers(
    processes: Processes,
    free_endpoints: Callable[[int], list[str]],
    tmp_path: Path,
) -> None:
    ports = dict(zip(("6001", "6002"), map(port_of, free_endpoints(2)), strict=True))
    for out in run_page_script(processes, tmp_path, "fleet_api.py", ports, 3):
        costs = [float(cost) for cost in re.findall(r"^Pass \d+, cost = ([\d.]+)$", out, re.MULTILINE)]
        assert len(costs) == 10
        assert costs[-1] < costs[0]


@pytest.mark.slow
def test_a_job_by_the_variables_of_the_first_table(
    processes: Processes,
    free_endpoints: Callable[[int], list[str]],
) -> None:
    """The page's commands, with a script whose end is known in the place of the quickstart."""
    port = port_of(free_endpoints(1)[0])
    lines = commands("examples/quickstart.py")
    assert len(lines) == 4
    lines = [line.replace("6174", port).replace("examples/quickstart.py", TRAIN) for line in lines]
    outs = results([shell(processes, line) for line in lines])
    assert [out.split()[0] for out in outs[:2]] == ["served", "served"]
    # Weight -1 a round; row 0 gets half a gradient a round, from worker 0 alone.
    assert all("weight -5.0 row -2.5" in out for out in outs[2:])


def test_trainers_without_servers(processes: Processes, tmp_path: Path, free_endpoints: Any) -> None:
    """The page's nccl2 job; the first trainer's port is free, and the other one is not listened at."""
    code, lines = script("nccl2.py"), commands("nccl2.py")
    assert len(lines) == 2
    port = port_of(free_endpoints(1)[0])
    (tmp_path / "nccl2.py").write_text(code.replace("6174", port))
    outs = results([shell(processes, line.replace("6174", port), tmp_path) for line in lines])
    head: dict[str, Any] = {}
    exec(code.partition(ROLE)[0], head)
    expected = averaged(*head["build"](), head["STEPS"], 2, head["loss_of"])
    for out in outs:
        assert weights(out) == pytest.approx(expected, abs=PRINTED)
    transcript = DOORS.partition("<!-- file: nccl2.py -->")[2].partition("\nweights: ")[2].partition("\n")[0]
    assert weights(f"weights: {transcript}") == pytest.approx(expected, abs=DOCUMENTED)


@pytest.mark.slow
def test_the_second_table_of_variables(processes: Processes, free_endpoints: Any) -> None:
    pytest.importorskip("sklearn", reason="the example's data come with the extra 'examples'")
    lines = commands_with("examples/collective.py")
    port = port_of(free_endpoints(1)[0])
    outs = results([shell(processes, line.replace("6174", port)) for line in lines])
    accuracies = [float(re.findall(r"^worker \d of 2: accuracy (.*)$", out, re.MULTILINE)[0]) for out in outs]
    assert len(accuracies) == 2
    assert accuracies[0] == accuracies[1] > 0.95


def test_what_is_refused_says_why_and_as_the_page_says(processes: Processes) -> None:
    pytest.importorskip("sklearn", reason="the example's data come with the extra 'examples'")
    code, out, err = ended(processes.start(str(DIST_TRAIN)))
    assert code != 0
    assert out == ""
    assert "PADDLE_TRAINING_ROLE should be one of [TRAINER, PSERVER]" in err
    assert len(err.splitlines()) == 1, "no traceback"
    assert err in DOORS


def test_every_python_script_of_the_page_is_one_that_is_run() -> None:
    names = re.findall(r"<!-- file: (\S+) -->", DOORS)
    assert names == ["sync.py", "nccl2.py", "several.py", "fleet_api.py"]
    assert DOORS.count("```python") == len(names) + DOORS.count("<!-- part of: ")
