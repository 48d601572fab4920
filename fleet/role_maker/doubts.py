"""Finds signs that a process which found no job was meant to be part of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fleet.base.unknown_variables import names_of_paddle
from fleet.role_maker.variables import Variables


@dataclass(frozen=True)
class _Sign:
    """Names a sign that somebody starts several processes: the variables that ``given`` finds. ``todo`` says how to
    make them one job."""

    given: Callable[[Mapping[str, str]], tuple[str, ...]]
    todo: str


def doubts(environ: Mapping[str, str]) -> str | None:
    """Return why a process that trains alone, as nothing describes its job, perhaps should not; None where nothing says
    so."""
    for sign in _SIGNS:
        names = sign.given(environ)
        if names:
            found = Variables(environ).found(*names)
            return (
                f"fleet.init() has found no job, so this process trains alone; {found} looks like one of several. "
                f"{sign.todo} If it is meant to train alone, all is well."
            )
    return None


def _paddle(environ: Mapping[str, str]) -> tuple[str, ...]:
    return Variables(environ).given(*names_of_paddle(environ))


def _slurm(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables of a batch script, the first process of a job of several tasks. The tasks of a step are
    found by their role maker, and an interactive shell is no task."""
    variables = Variables(environ)
    in_a_step = bool(variables.given("SLURM_STEP_NUM_TASKS"))
    is_task = bool(variables.given("SLURM_PROCID")) and not in_a_step
    return ("SLURM_PROCID", "SLURM_NTASKS") if is_task and _several(environ, "SLURM_NTASKS") else ()


def _torchrun(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return torchrun's variables where the meeting point and one of the two others are set: cluster managers set one
    of these for purposes of their own, but not the meeting point as well."""
    given = Variables(environ).given("RANK", "WORLD_SIZE", "MASTER_ADDR")
    is_half = given == ("RANK", "MASTER_ADDR") or (
        given == ("WORLD_SIZE", "MASTER_ADDR") and _several(environ, given[0])
    )
    return given if is_half else ()


def _tensorflow(environ: Mapping[str, str]) -> tuple[str, ...]:
    return ("TF_CONFIG",) if '"cluster"' in environ.get("TF_CONFIG", "") else ()


def _others(environ: Mapping[str, str]) -> tuple[str, ...]:
    counted = (name for name in ("HOROVOD_SIZE", "MV2_COMM_WORLD_SIZE") if _several(environ, name))
    return (*counted, *Variables(environ).given("JOB_COMPLETION_INDEX", "DMLC_ROLE"))


def _several(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "").strip()
    return text.isascii() and text.isdigit() and text.lstrip("0") not in ("", "1")


_BY_VARIABLES = "Give each process the variables of docs/environment.md, or start them with fleetrun."
_SIGNS = (
    _Sign(_paddle, "Half a set describes no process: docs/environment.md has what each needs."),
    _Sign(_slurm, "Start it with srun (docs/deploying/slurm.md)."),
    _Sign(_torchrun, "torchrun sets RANK and WORLD_SIZE: start it with torchrun, or set both."),
    _Sign(_tensorflow, _BY_VARIABLES),
    _Sign(_others, _BY_VARIABLES),
)
