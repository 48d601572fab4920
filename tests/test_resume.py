"""``fleet.resume_from``: a job goes on where it was, whatever is there of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import Job, run_job
from small_job import join, same, train

from fleet import Checkpoints, Fleet
from fleet.role_maker import Role


class Resuming(Job):
    """A job in which every role resumes."""

    def __init__(self, root: object, *given: Any, strict: bool = True, **options: Any) -> None:
        self.root = root
        self.strict = strict
        self.steps: dict[str, int] = {}
        super().__init__(self._resumes(given[0]), *given[1:], **options)

    def _resumes(self, body: Any) -> Any:
        def resumed(fleet: Fleet, index: int) -> Any:
            self.steps[f"worker {index}"] = fleet.resume_from(self.root, strict=self.strict)
            return body(fleet, index)

        return resumed

    def serve(self, index: int) -> None:
        fleet = None
        try:
            fleet = self.fleet(Role.SERVER, index)
            self.steps[f"server {index}"] = fleet.resume_from(self.root, strict=self.strict)
            fleet.init_server()
            fleet.run_server()
        except BaseException as error:
            self.errors[f"server {index}"] = error


def trains(root: Path, until: int, every: int = 3) -> Any:
    def body(fleet: Fleet, index: int) -> Any:
        model, optimizer = join(fleet)
        first = fleet.resume_step()
        with Checkpoints(root, every_steps=every, fleet=fleet) as checkpoints:
            for step in range(first, until):
                train(model, optimizer, [step])
                checkpoints.after_step()
        fleet.barrier_worker()
        return first, model.seen()

    return body


def test_first(tmp_path: Path) -> None:
    whole = run_job(trains(tmp_path / "other", 8, 100), 2, 2)
    job = Resuming(tmp_path / "run", trains(tmp_path / "run", 5), 2, 2)
    assert [first for first, _ in job.run()] == [0, 0]
    assert set(job.steps.values()) == {0}
    job = Resuming(tmp_path / "run", trains(tmp_path / "run", 8), 2, 2)
    results = job.run()
    assert [first for first, _ in results] == [3, 3]
    assert job.steps == {"worker 0": 3, "worker 1": 3, "server 0": 3, "server 1": 3}
    assert same(results[0][1], whole[0][1])
