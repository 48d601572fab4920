"""Makes the pictures of docs/observing.md and of the README from a real job: two servers and three workers, one slower.

    python docs/pictures.py

needs rich and a Chromium, and takes a minute.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich._export_format import CONSOLE_SVG_FORMAT

import fleet
from fleet.telemetry.live_table import rich_table
from fleet.telemetry.record import newest, view_of
from fleet.telemetry.view import History, rows

#: rich's own picture asks another site for its font.
WITHOUT_FONTS = re.sub(r"\s*@font-face \{\{.*?\}\}\n", "\n", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
FIGURES = Path(__file__).parent / "figures"
SECONDS, BATCH, USERS = 40.0, 512, 20_000


def train() -> None:
    """One process of the job."""
    fleet.init()
    torch.manual_seed(0)
    taste = torch.randn(USERS)
    model = torch.nn.Sequential(fleet.nn.Embedding(USERS, 16), torch.nn.Linear(16, 1))
    strategy = fleet.StrategyFactory.create_ssp_strategy(staleness=3)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), strategy, model=model)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    torch.manual_seed(fleet.worker_index())
    until = time.monotonic() + SECONDS
    step = 0
    while time.monotonic() < until:
        users = (USERS * torch.rand(BATCH) ** 3).long()
        loss = torch.nn.functional.mse_loss(model(users).squeeze(1), taste[users])
        optimizer.minimize(loss)
        fleet.report(examples=BATCH)
        time.sleep(0.03 if fleet.worker_index() == 2 else 0.012)
        if step % 400 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        step += 1
    fleet.stop_worker()


def main() -> None:
    from rich.console import Console
    from rich.text import Text

    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder) / "logs"
        command = [
            sys.executable,
            "-m",
            "fleet.launch",
            "--server_num",
            "2",
            "--worker_num",
            "3",
            "--log_dir",
            str(logs),
        ]
        with subprocess.Popen([*command, __file__], stdout=subprocess.PIPE, text=True) as job:
            history, shown = History(), []
            while job.poll() is None:
                time.sleep(1.0)
                history.add(view_of(time.time(), newest(logs) if logs.exists() else []))
                now = rows(*history.ends)
                if sum(bool(row.examples_a_second) for row in now) == 3:
                    shown = now
            printed = job.stdout.read().splitlines()
        console = Console(record=True, width=132, file=io.StringIO())
        console.print("$ fleetrun --server_num 2 --worker_num 3 train.py")
        for line in printed[:4]:
            console.print(Text(line))
        console.print(rich_table(shown, 132, 40))
        console.save_svg(str(FIGURES / "live-view.svg"), title="fleetrun", code_format=WITHOUT_FONTS)
        subprocess.run([sys.executable, "-m", "fleet", "report", str(logs)], check=True)
        for scheme in ("light", "dark"):
            subprocess.run(
                [
                    *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
                    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
                    *("--window-size=960,1180", "--hide-scrollbars", f"--user-data-dir={folder}/profile"),
                    *(["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []),
                    *(f"--screenshot={FIGURES / f'report-{scheme}.png'}", (logs / "report.html").as_uri()),
                ],
                check=True,
                stderr=subprocess.DEVNULL,
            )


if __name__ == "__main__":
    if "PADDLE_TRAINING_ROLE" in os.environ:
        train()
    else:
        main()
