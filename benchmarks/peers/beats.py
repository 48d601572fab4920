"""What a heartbeat costs a worker and its server: each step is one, and nothing else is done."""

from __future__ import annotations

from crowd import member, serve
from work import Meter, my_work

from fleet.ps.wire.wire_errors import raise_if_error
from fleet.role_maker import Role


def main() -> None:
    work = my_work()
    if work.role == "server":
        serve(work)
        return
    part, optimizer = member(work, Role.WORKER, work.index)
    part.init_worker()
    (connection,) = optimizer._stepper().connections.by_server
    meter = Meter(work)
    for _ in range(work.warmup + work.steps):
        raise_if_error(connection._beat().result())
        meter.after_step(0.0)
    meter.end()
    part.stop_worker()


if __name__ == "__main__":
    main()
