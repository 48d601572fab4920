"""``fleet report``: what its page holds, and that a browser shows it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fleet.base.clock import wall_time
from fleet.launch import cli
from fleet.telemetry.html_report import page
from fleet.telemetry.record import Chronicle, Line, Record
from fleet.telemetry.story import MOST_MOMENTS, story_of

#: Elements that are never closed.
VOID = {"meta"}


def run(seconds: int, workers: int = 2, began: float = 1e9) -> list[Line]:
    """A run in which worker 0 waits for worker 1, which the servers give up on in the end."""
    lines = []
    for second in range(seconds):
        told = []
        for index in range(workers):
            figures = {
                "uptime_seconds": float(second),
                "steps": 10 * second,
                "auc": 0.5 + 0.01 * second,
                "examples": 640 * second,
                "loss": math.nan if second == 1 else 1.0 / (1 + second),
                "sent_bytes": 1e6 * second,
                "received_bytes": 2e6 * second,
                "memory_bytes": 3e8,
                "push_seconds": 0.5 * second,
                "pull_seconds": 0.1 * second,
                "meet_seconds": 0.0,
                "cpu_seconds": 0.4 * second,
            }
            lines.append(Line(began + second, f"worker {index}", "worker", figures))
            told.append(
                {
                    "standing": "lost" if index == 1 and second > 0.8 * seconds else "live",
                    "label": "host:1",
                    "heard_seconds": 0.1,
                    "steps": 10 * second,
                    "staleness": [30 * second, 10 * second],
                    "waits": None,
                    "waited": {"1": 0.25 * second} if index == 0 else {},
                    "figures": figures,
                }
            )
        of_server = dict.fromkeys(("version", "parked", "sent_bytes", "received_bytes", "busy_seconds"), 1.0 * second)
        status = {"phase": "training", "figures": {**of_server, "uptime_seconds": float(second)}, "workers": told}
        lines.append(Line(began + second, "server 0", "server", {"server": "a:1", "index": 0, "tables": {}, **status}))
    lines.append(Line(began + 3.5, "fleetrun of server 0", "event", {"process": "worker 1", "what": "started <again>"}))
    return sorted(lines, key=lambda line: line.at)


class Reader(HTMLParser):
    """A page taken apart; every element has to be closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def charts(self) -> list[dict[str, Any]]:
        return [json.loads(value) for _, name, value in self.attributes if name == "data-chart"]

    @property
    def text(self) -> str:
        return " ".join(self.words)


def test_the_page_holds_the_run() -> None:
    story = story_of(run(30))
    text = page(story, "logs")
    read = Reader(text)
    titles = re.findall("<h2>(.*?)</h2>", text)
    assert titles == [
        *(
            "Throughput",
            "Loss",
            "auc",
            "Staleness",
            "Time in exchanges",
            "Time waiting for other workers",
            "Bytes",
            "Memory",
        ),
        *("Who waited for whom", "Events", "At the end"),
    ]
    throughput, loss, auc, staleness, exchanges, waiting, moved, memory = read.charts()
    assert throughput["moments"] == [float(second) for second in range(30)]
    assert throughput["curves"]["worker 0"][5:25] == [640.0] * 20
    assert loss["curves"]["worker 1"][1] is None, "what is no number has no place in a chart"
    assert auc["curves"]["worker 0"][10] == 0.6
    assert staleness["curves"]["worker 0"][10] == 3.0
    assert exchanges["curves"]["worker 0"][10] == 60.0
    assert waiting["curves"]["worker 0"][10] == 25.0
    assert waiting["curves"]["worker 1"][10] == 0.0
    assert moved["curves"]["worker 0"][10] == 3.0
    assert memory["curves"]["worker 1"][10] == 300.0
    assert "started <again>" in read.text, "and not an element of that name"
    assert "was given up on by the servers" in read.text
    assert "mode" not in story.sentences[0]
    assert "2 workers" in read.text or "1 worker" in read.text
    assert story.waited == {0: {1: 0.25 * 29}, 1: {}}


def test_the_page_shows_tables_that_lie_partly_in_files() -> None:
    def of_table(second: int) -> dict[str, int]:
        figures = {"rows": 1000, "in_memory": 200, "on_disk": 800, "bytes": 20_000, "disk_bytes": 100_000}
        grown = {"asked_rows": 100, "read_rows": 25, "read_bytes": 10**6, "written_bytes": 10**6}
        return {**figures, **{name: by * second for name, by in grown.items()}}

    lines = []
    for line in run(10):
        second = int(line.at - 1e9)
        if line.kind == "server":
            figures = {**line.told["figures"], "updates": 4 * second}
            line = replace(line, told={**line.told, "figures": figures, "tables": {"t": of_table(second)}})
        lines.append(line)
    read = Reader(page(story_of(lines), "logs"))
    hits, moved = read.charts()[-2:]
    assert hits["curves"]["t"][5] == 75.0
    assert moved["curves"]["t"][5] == 0.5
    assert "Tables, over the whole run" in read.text
    assert "75.0%" in read.text


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = page(story_of(run(10)), "logs")
    read = Reader(text)
    assert [each for each in read.attributes if each[1] in ("src", "href", "action")] == []
    assert "url(" not in text
    assert "default-src 'none'" in text, "and a browser is told to ask for nothing"


def test_the_page_can_be_read_without_seeing_it() -> None:
    read = Reader(page(story_of(run(10)), "logs"))
    drawings = [value for tag, name, value in read.attributes if (tag, name) == ("svg", "aria-labelledby")]
    ids = {value for _, name, value in read.attributes if name == "id"}
    assert len(drawings) == len(read.charts())
    assert all(set(label.split()) <= ids for label in drawings)
    assert ("html", "lang", "en") in read.attributes
    assert read.text.count("As a table") == len(drawings)


def test_a_long_run_is_a_small_page() -> None:
    text = page(story_of(run(5000)), "logs")
    assert all(len(chart["moments"]) <= MOST_MOMENTS + 1 for chart in Reader(text).charts())
    assert len(text) < 400_000


def test_many_workers_and_a_run_of_one_moment() -> None:
    text = page(story_of(run(4, workers=40)), "<logs>")
    assert "&lt;logs&gt;" in text
    assert "and 24 more" in Reader(text).text
    Reader(page(story_of(run(1)), "logs"))


@pytest.mark.parametrize("values", [(0.0, 5e-324), (-1.7e308, 1.7e308), (0.0, 1e308), (-math.inf, 1.0), (1e300, 1e300)])
def test_the_largest_and_the_smallest_numbers_are_drawn_or_left_out(values: tuple[float, float]) -> None:
    lines = [
        replace(line, told={**line.told, "loss": values[place % 2], "auc": values[place % 2]})
        for place, line in enumerate(run(8, workers=1))
        if line.kind == "worker"
    ]
    assert "Loss" in Reader(page(story_of(lines), "logs")).text


def recorded(directory: Path) -> None:
    with Chronicle(directory, ["server 0"], is_whole=True) as chronicle:
        chronicle.write("server 0", "started")
    records: dict[str, Record] = {}
    for line in run(20, began=wall_time()):
        if line.kind != "event":
            record = records.setdefault(line.process, Record(directory, line.process))
            record.write(line.at, line.kind, line.told)
    for record in records.values():
        record.close()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path)
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    Reader((tmp_path / "report.html").read_text())
    assert cli.main(["report", str(tmp_path), "--output", str(tmp_path / "there.html")]) == 0
    assert (tmp_path / "there.html").exists()
    (tmp_path / "empty").mkdir()
    for wrong in ("empty", "missing", "x" * 300):
        assert cli.main(["report", str(tmp_path / wrong)]) == 2
        assert "no job has left a record here" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path), "--output", str(tmp_path / "missing" / "r.html")]) == 2
    assert "the report cannot be written; at" in capsys.readouterr().err


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

#: Points at the middle of the first chart, then says what the page has come to, in an attribute of its root.
PROBE = """
<script>
const svg = document.querySelector("svg"), box = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2}));
const pointed = document.querySelector(".readout").textContent;
svg.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
document.documentElement.dataset.found = JSON.stringify({
  pointed, moved: document.querySelector(".readout").textContent,
  drawn: [...document.querySelectorAll("path.curve")].filter((path) => path.getBBox().width > 0).length,
  asked: performance.getEntriesByType("resource").length, wide: document.body.scrollWidth <= innerWidth,
  ground: getComputedStyle(document.body).backgroundColor, text: getComputedStyle(document.body).color,
});
</script>
"""


def looked_at(html: Path, scheme: str) -> tuple[dict[str, Any], bytes]:
    """What the probe has found on a page in a Chromium, and a picture of it. There is no word in the console."""
    probed, picture = html.with_name("probed.html"), html.with_name("picture.png")
    probed.write_text(html.read_text().replace("</body>", f"{PROBE}</body>"))
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
        *(f"--user-data-dir={html.with_name(f'profile-{scheme}')}", "--window-size=1000,2600"),
        *("--enable-logging=stderr", "--dump-dom", f"--screenshot={picture}"),
        *(["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []),
    ]
    done = subprocess.run([*command, probed.as_uri()], capture_output=True, text=True, timeout=90)
    assert [line for line in done.stderr.splitlines() if ":CONSOLE" in line] == []
    found = re.search('data-found="([^"]*)"', done.stdout)
    assert found is not None, done.stderr
    return json.loads(unescape(found[1])), picture.read_bytes()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page(tmp_path: Path, scheme: str) -> None:
    recorded(tmp_path)
    assert cli.main(["report", str(tmp_path)]) == 0
    told, _ = looked_at(tmp_path / "report.html", scheme)
    assert re.fullmatch(r"(9|10) s: worker 0 640, worker 1 640", told["pointed"])
    assert int(told["moved"].split()[0]) == int(told["pointed"].split()[0]) + 1
    assert told["drawn"] == 8 * 2 + 1, "both workers in every chart, and the bytes of the server"
    assert told["asked"] == 0
    assert told["wide"]
    dark = sum(map(int, re.findall(r"\d+", told["ground"])[:3])) < 200
    assert dark is (scheme == "dark")
    assert told["ground"] != told["text"]


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_a_browser_shows_a_job_that_was_run(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "train.py"
    job = [sys.executable, "-m", "fleet.launch", "--server_num", "1", "--worker_num", "2", str(script), "brief"]
    subprocess.run(job, cwd=tmp_path, check=True, timeout=90, capture_output=True)
    html = tmp_path / "logs" / "report.html"
    assert cli.main(["report", str(html.parent)]) == 0
    assert "2 workers and 1 server, mode sync: " in Reader(html.read_text()).text
    told, picture = looked_at(html, "light")
    names = [set(chart["curves"]) for chart in Reader(html.read_text()).charts()]
    assert {"worker 0", "worker 1", "server 0"} in names
    assert told["drawn"] == sum(map(len, names)), "every process has a curve in every chart it is in"
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 50_000, "an empty page of this size takes 13 kB"
