"""The pages of docs/ as a reader uses them: what stands in their blocks of Python runs when it is pasted, and whatever
variable, extra, option or name of the package they mention is there.

What other files run is left to them: docs/guide.md (test_guide.py), doors.md (test_doors.py), deploying/
(test_deploying.py), reference/ (test_docstrings.py) and data.md (test_data_arrow.py).
"""

from __future__ import annotations

import contextlib
import importlib
import re
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import until
from inside import is_writing

import fleet
from fleet.base.unknown_variables import KNOWN
from fleet.launch import cli

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))])
} | {f"{folder}/README.md": (ROOT / folder / "README.md").read_text() for folder in ("examples", "benchmarks")}


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_is_python(page: str) -> None:
    for index, code in enumerate(blocks(page, "python")):
        try:
            compile(code, f"{page}, block {index}", "exec")
        except SyntaxError as error:
            pytest.fail(f"{error}: {error.text}")


#: What a column of the site shows; more is cut off, or has to be scrolled to.
COLUMNS = 88


@pytest.mark.parametrize("page", PAGES)
def test_code_is_as_wide_as_the_site_shows(page: str) -> None:
    shown = [line for kind in ("python", "sh", "yaml") for block in blocks(page, kind) for line in block.splitlines()]
    assert [line for line in shown if len(line) > COLUMNS] == []


# ---------------------------------------------------------------- pasted into a script

CHECKPOINTS = "docs/checkpoints.md"

#: A script of a reader's before its job is there, and what makes a job of it.
SCRIPT = """
import torch
import fleet
fleet.init()
torch.manual_seed(0)
def Net():
    return torch.nn.Sequential(torch.nn.Embedding(100, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(8, 1))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randint(0, 100, (16, 2)), torch.rand(16, 1)
loss_fn = torch.nn.functional.mse_loss
"""
JOB = f"""{SCRIPT}
optimizer = fleet.distributed_optimizer(optimizer, model=model)
fleet.init_worker()
loss = loss_fn(model(x), y)
"""
#: What a reader's script has by then, before each block of Python of a page.
BEFORE: dict[str, Sequence[str]] = {
    CHECKPOINTS: [
        f"{JOB}\noptimizer.minimize(loss)",
        "fleet.stop_worker()",
        "",
        """
fleet.init()
model = torch.nn.Linear(1, 1)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
fleet.init_worker()
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
data = MultiSlot(["numbers.txt"], slots, batch_size=100)
state, batches, STEPS = {"schedule": schedule, "data": data}, iter(data), 3
checkpoints = fleet.Checkpoints("ckpt/kept", every_steps=2, state=state)
loss_of = lambda batch: model(batch["x"]).mean()
""",
        "checkpoints.close(); fleet.stop_worker()",
        "",
    ],
    "docs/embeddings.md": [
        SCRIPT,
        """
model = torch.nn.Sequential(torch.nn.Embedding(9, 4))
adam = torch.optim.Adam(model.parameters())
""",
        "",
        "",
        "fleet.init()",
        "users, items = x, x",
        """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.score, self.clicks, self.group = Score(), Clicks(slots=2), group

    def forward(self, batch):
        rows = self.group({"user": batch.users, "item": batch.items})
        scores = self.score(batch.users) + self.clicks(batch.ids, {"id": batch.users})
        return scores.mean() + rows["user"].mean() + rows["item"].mean()

model = Net()
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
fleet.init_worker()
""",
        """
from types import SimpleNamespace
loader = [SimpleNamespace(ids=x, users=x[:, 0], items=x[:, 1])] * 3
table = model.score.user
loss = lambda model, batch: model(batch)
""",
        'device = "cpu"',
    ],
    "docs/deploying/ray.md": [""],
    "docs/metrics.md": [
        f"{JOB}\ntensor, predictions, labels = torch.rand(3), torch.rand(9), torch.arange(9) % 2",
        "batches = [(x, torch.arange(16).reshape(-1, 1) % 2)] * 2",
    ],
    "docs/modes/asynchronous.md": [SCRIPT],
    "docs/modes/dc-asgd.md": [SCRIPT],
    "docs/modes/geo.md": [SCRIPT],
    "docs/modes/all-reduce.md": [SCRIPT],
    "docs/modes/auto.md": [SCRIPT, "fleet.init_worker()"],
    "docs/modes/gba.md": [SCRIPT],
    "docs/modes/half-asynchronous.md": [SCRIPT],
    "docs/modes/index.md": [""],
    "docs/modes/staleness.md": [SCRIPT],
    "docs/synchronous.md": [SCRIPT],
    "docs/observing.md": [JOB],
    "docs/security.md": ["import fleet"],
    "docs/serving.md": [
        f"{JOB}\nbatch = x",
        "batch = x",
        "",
        f"""{JOB}
with fleet.Checkpoints("ckpt/run", every_steps=1, background=False) as checkpoints:
    optimizer.minimize(loss)
    checkpoints.after_step()
fleet.stop_worker()
""",
        f"follower.close(); import shutil; shutil.rmtree('ckpt')\n{SCRIPT}\nfrom fleet import StrategyFactory",
        "fleet.init_worker(); loader = [(x, y)] * 10",
        "fleet.stop_worker()",
        "",
    ],
}


#: Run elsewhere, or by nobody: a job without servers, which one process of the tests should not be.
ELSEWHERE = ("docs/guide.md", "docs/doors.md", "docs/data.md", "docs/reference/", "README.md", "docs/collective.md")


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Of a script in an empty folder, whose job is ended with it."""
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {}
    yield given
    with contextlib.suppress(fleet.errors.NotInitializedError):
        fleet.stop_worker()


def test_every_block_of_python_is_run_by_somebody() -> None:
    assert {page for page in PAGES if blocks(page, "python") and not page.startswith(ELSEWHERE)} == set(BEFORE)


@pytest.mark.parametrize("page", [page for page in BEFORE if page != CHECKPOINTS])
def test_python_of_a_page_runs(page: str, names: dict[str, Any]) -> None:
    paste(page, names)


def paste(page: str, names: dict[str, Any]) -> None:
    found = blocks(page, "python")
    assert len(BEFORE[page]) == len(found)
    for index, (before, code) in enumerate(zip(BEFORE[page], found, strict=True)):
        exec(before, names)
        exec(compile(code, f"{page}, block {index}", "exec"), names)


def printed(text: str) -> list[str]:
    """Its lines without what differs from run to run, and from machine to machine: times, ids, folders, and of what was
    computed all digits but the first two."""
    text = re.sub(r"[0-9a-f]{16}|/\S*/(?=ckpt)|\d{4}-\d\d-\d\d [\d:+]+|in [\d.]+ s", "…", text)
    text = re.sub(r"\b\d+\.\d+(e-\d+)?", lambda found: f"{float(found[0]):.2g}", text)
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.slow
def test_what_the_page_shows_of_checkpoints(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that its script, alone, has written, on a machine that is done with each before the next is due."""
    after_step = fleet.Checkpoints.after_step

    def unhurried(checkpoints: fleet.Checkpoints) -> None:
        after_step(checkpoints)
        until(lambda: not is_writing(checkpoints))

    monkeypatch.setattr(fleet.Checkpoints, "after_step", unhurried)
    paste(CHECKPOINTS, names)
    for block in re.findall(r"^```\n(\$ .*?)^```", PAGES[CHECKPOINTS], re.DOTALL | re.MULTILINE):
        for shown in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, expected = shown.partition("\n")
            cli.main(command.split()[1:])
            wanted, said = printed(expected), printed(capsys.readouterr().out)
            assert [line for line in wanted if line != "…" and line not in said] == []
            assert len(said) == len(wanted) or "…" in wanted


# ---------------------------------------------------------------- what is mentioned is there


def test_every_variable_is_known_and_on_its_page() -> None:
    mentioned = {
        name for page in PAGES.values() for name in re.findall(r"\b(?:FLEET|FLAGS)_\w*[A-Za-z]\b(?!_|\*)", page)
    }
    assert mentioned - KNOWN - {"FLAGS_communicator", "FLAGS_rpc", "FLEET_TLS"} == set()
    assert [name for name in KNOWN if f"`{name}`" not in PAGES["docs/environment.md"]] == []


def test_the_page_of_variables_says_what_the_table_says() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "variables.py"))
    page = PAGES["docs/environment.md"]
    assert {found["name"] for found in script["TABLE"].finditer(page)} == set(script["TABLES"])
    assert script["written"](page) == page, "python docs/variables.py writes it"


def test_every_extra_is_there() -> None:
    declared = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", declared, re.MULTILINE))
    for page, text in PAGES.items():
        asked = re.findall(r"(?:torch-fleet|'\.)\[([\w,]+)\]", text) + re.findall(
            r"extra `(?:torch-fleet\[)?(\w+)", text
        )
        assert {name for each in asked for name in each.split(",")} <= extras, page


def test_every_file_that_the_sources_name_is_there() -> None:
    """In ``quotes`` or by its path, in docstrings and comments: what is moved is moved there as well."""
    named = re.compile(r"(?:(?<=``)|(?<![\w./-])(?=(?:fleet|docs|tests|benchmarks)/))((?:\w[\w.-]*/)*\w+\.(?:py|md))\b")
    there = [f"/{path.relative_to(ROOT)}" for end in ("py", "md") for path in ROOT.glob(f"[!.]*/**/*.{end}")]
    missing = [
        f"{source.relative_to(ROOT)}: {name}"
        for source in sorted((ROOT / "fleet").rglob("*.py"))
        for name in named.findall(source.read_text(encoding="utf-8"))
        if name not in OF_READERS and not any(path.endswith(f"/{name}") for path in there)
    ]
    assert missing == []


def test_every_name_of_the_package_is_there() -> None:
    ranges = {"fleet.push", "fleet.pull", "fleet.meet", "fleet.reduce", "fleet.copy", "fleet.wait"}  # in a profile
    programs = {"fleet.startup_program", "fleet.main_program"}  # of which a page says that they are not there
    extras = {"fleet.lightning", "fleet.lightning.FleetStrategy"}  # it takes Lightning to import
    others = ranges | programs | extras | {"fleet.observing", "fleet.job"}  # a logger, a name of DCP's
    missing = set()
    for page, text in PAGES.items():
        text = re.sub(r"^```text\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)  # what the original had
        if page.startswith("docs/migrating/"):  # the other systems' names stand on the left
            text = "\n".join(line.rstrip(" |").rpartition("|")[2] for line in text.splitlines())
        for name in re.findall(r"(?<![\w./])fleet(?:\.[A-Za-z_]\w*)+(?![\w/])", text):
            if name not in others and not name.endswith((".md", ".proto")) and not there(name):
                missing.add(f"{page}: {name}")
        factory = fleet.StrategyFactory
        missing |= {
            f"{page}: {made}" for made in re.findall(r"\bcreate_\w+_strategy", text) if not hasattr(factory, made)
        }
    assert missing == set()


def there(name: str) -> bool:
    first, *rest = name.split(".")
    found: Any = importlib.import_module(first)
    for depth, part in enumerate(rest, 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(name.split(".")[:depth]))
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


#: What pages name and a reader writes, or somebody else has.
OF_READERS = {"train.py", "script.py", "plain.py", "clicks.py", "score.py"}
OF_READERS |= {"sync.py", "nccl2.py", "several.py", "fleet_api.py"}  # docs/doors.md


def test_every_file_is_there() -> None:
    """By its path, or by the end of one: what is moved is moved in the pages as well."""
    folders = ("fleet", "tests", "examples", "benchmarks", "docs")
    there = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    missing = [
        f"{page}: {name}"
        for page, text in PAGES.items()
        for name in sorted(set(re.findall(r"(?<![\w./-])(?:\.\./)*((?:\w[\w.-]*/)*\w+\.py)\b", text)))
        if name not in OF_READERS and not any(path.endswith(f"/{name}") for path in there)
    ]
    assert missing == []


def test_every_test_is_there() -> None:
    """`test_x.py::test_y`, or `::test_z` behind one, which is of the same file."""
    missing = set()
    for page, text in PAGES.items():
        for line in text.splitlines():
            file = ""
            for named, test in re.findall(r"(test_\w+\.py)?::(test_\w+)", line):
                file = named or file
                if not re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE):
                    missing.add((page, file, test))
    assert missing == set()


def test_every_option_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Of commands of the package, and of scripts of the repository, wherever they are written."""
    asked: dict[str, set[str]] = {}
    for text in (text for page, text in PAGES.items() if not page.startswith("docs/migrating/")):
        for command, arguments in re.findall(
            r"(fleetrun|fleet (?:server|top|doctor|report|env|checkpoint \w+)|(?:examples|benchmarks)/\w+\.py)\b"
            r"([^`\n|]*)",
            re.sub(r"\\\n", " ", text),
        ):
            asked.setdefault(command, set()).update(
                re.findall(r"(?<!\S)--\w[\w-]*", arguments.partition("examples/")[0])
            )
    for command, options in asked.items():
        if command.endswith(".py"):
            told = (ROOT / command).read_text()
        else:
            with contextlib.suppress(SystemExit):
                cli.main(["run" if command == "fleetrun" else command.split()[1], *command.split()[2:], "--help"])
            told = capsys.readouterr().out
        assert [option for option in options - {"--help"} if option not in told] == [], command
    assert {"fleetrun", "fleet checkpoint export", "examples/flight_delays.py"} <= set(asked)


def test_what_is_to_be_copied_has_no_prompt() -> None:
    """A block of commands alone is pasted as a whole; beside what they print, a prompt tells them apart."""
    found = []
    for path, text in PAGES.items():
        for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            lines = block.splitlines()
            if lines and all(line.startswith("$ ") for line in lines):
                found.append(f"{path}: {lines[0]}")
    assert found == []
