"""Runs ``fleet env``: says what a bug report needs about a machine, whatever is missing or broken on it.

Whatever may crash or hang, torch first of all, is asked in a process of its own. Secrets are not shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from fleet.base.settings import ProcessSettings
from fleet.bootstrap.mpi_world import launcher_of
from fleet.bootstrap.rendezvous import own_addresses
from fleet.errors import FleetError
from fleet.launch.parser import Parser
from fleet.role_maker.resolve import resolve
from fleet.role_maker.variables_of_launchers import mentions_job

Report: TypeAlias = dict[str, dict[str, str]]

#: Loading torch from a slow disk takes its time; more than this is a finding in itself.
_TORCH_S = 120
_MPI_S = 10

_PACKAGES = (
    *("torch-fleet", "torch", "numpy", "grpcio", "protobuf", "numba", "llvmlite", "safetensors"),
    *("fsspec", "pyarrow", "mpi4py", "grpcio-health-checking"),
)
#: The abilities of a processor that decide which loops run on it.
_CPU_FLAGS = ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")

_VARIABLES = re.compile(
    r"FLEET_|FLAGS_|PADDLE_|SLURM_|OMPI_|PMI|TORCHELASTIC_|MASTER_|OMP_|MKL_|NUMBA_|GRPC_|GLOO_|NCCL_|CUDA_|MPI4PY_"
    r"|(TRAINING_ROLE|POD_IP|RANK|WORLD_SIZE|LOCAL_RANK|JOB_COMPLETION_INDEX|PYTHONPATH|LD_LIBRARY_PATH|LD_PRELOAD)$"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)

_ASK_TORCH = """
import json, torch, torch.distributed as distributed
found = {"version": torch.__version__, "file": torch.__file__, "threads": str(torch.get_num_threads())}
found["built with CUDA"] = str(torch.version.cuda or torch.version.hip or "no")
found["CUDA devices"] = ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))) or "none"
if distributed.is_available():
    backends = {"gloo": distributed.is_gloo_available, "nccl": distributed.is_nccl_available}
    found["collective over"] = ", ".join(name for name, there in backends.items() if there()) or "nothing"
found["build"] = "; ".join(line.strip(" -") for line in torch.__config__.show().splitlines()[1:6])
print(json.dumps(found))
"""


def tell(argv: list[str], prog: str, environ: Mapping[str, str]) -> int:
    """Run the ``fleet env`` command, and return the exit code."""
    parser = Parser(prog, description="Print what a bug report needs. Tokens are not shown.", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="for programs")
    as_json = parser.parse_args(argv).json
    report = about(environ)
    if as_json:
        print(json.dumps(report, indent=2))
        return 0
    for title, lines in report.items():
        print(f"{title}:")
        width = max(map(len, lines), default=0)
        for name, value in lines.items():
            print(f"  {name:{width}}  {value}")
    return 0


def about(environ: Mapping[str, str]) -> Report:
    return {
        "fleet": {"version": version_of("torch-fleet"), "file": str(Path(__file__).parent.parent)},
        "this process": _job(environ),
        "python": {
            "version": f"{platform.python_version()} ({platform.python_implementation()})",
            "executable": sys.executable,
        },
        "system": {"platform": platform.platform(), "libc": " ".join(platform.libc_ver()) or "unknown"},
        "processor": _processor(),
        "memory": _memory(),
        "network": {"host name": socket.gethostname(), "addresses": ", ".join(own_addresses())},
        "packages": {name: version_of(name) for name in _PACKAGES},
        "torch": _torch(),
        "MPI": _mpi(environ),
        "environment": _variables(environ),
    }


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what ``fleet.init()`` would find here, short of starting MPI for it."""
    told = {}
    launcher = launcher_of(environ)
    try:
        if launcher is not None and not mentions_job(environ):
            told["role"] = f"MPI says, whose launcher has set {launcher}"
        else:
            me = resolve(None, environ)
            told["role"] = f"{me} of {me.worker_num} workers and {me.server_num} servers ({me.origin})"
    except FleetError as error:
        told["role"] = f"none: {error}"
    try:
        ProcessSettings.read(environ)
        told["settings"] = "sound"
    except FleetError as error:
        told["settings"] = str(error)
    return told


def _processor() -> dict[str, str]:
    text = _read("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.+)$", text, re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": named[1] if named else platform.processor() or platform.machine(),
        "cores": f"{os.cpu_count()}, of which {usable} for this process",
        "quota": _quota(_read("/sys/fs/cgroup/cpu.max")),
        "abilities": " ".join(flag for flag in _CPU_FLAGS if flag in has) or "unknown",
    }


def _quota(text: str) -> str:
    words = text.split()
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        return "none"
    return f"{int(words[0]) / int(words[1]):g} cores"


def _memory() -> dict[str, str]:
    kibi = {
        name: int(number) for name, number in re.findall(r"^(\w+):\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    }
    limit = _read("/sys/fs/cgroup/memory.max") or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    bounded = limit.strip().isdigit() and int(limit) < kibi.get("MemTotal", 0) << 10
    return {
        "installed": _gibi(kibi.get("MemTotal", 0) << 10),
        "available": _gibi(kibi.get("MemAvailable", 0) << 10),
        "limit": _gibi(int(limit)) if bounded else "none",
    }


def _gibi(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size else "unknown"


def _torch() -> dict[str, str]:
    code, out, err = _run([sys.executable, "-c", _ASK_TORCH], _TORCH_S)
    with contextlib.suppress(ValueError, IndexError):
        found: dict[str, str] = json.loads(out.splitlines()[-1])
        return found
    why = err.strip().splitlines()[-1:] or [f"it ended with {code} and said nothing"]
    return {"cannot be imported": why[0]}


def _mpi(environ: Mapping[str, str]) -> dict[str, str]:
    mpirun = shutil.which("mpirun", path=environ.get("PATH"))
    if mpirun is None:
        return {"mpirun": "none on the path"}
    _, out, err = _run([mpirun, "--version"], _MPI_S)
    return {"mpirun": mpirun, "version": next(iter((out or err).splitlines()), "it does not say")}


def _run(command: list[str], within_s: float) -> tuple[int | str, str, str]:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=within_s
        )
    except subprocess.TimeoutExpired:
        return "", "", f"no answer within {within_s:g} s"
    except OSError as error:
        return "", "", str(error)
    return done.returncode, done.stdout, done.stderr


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: shown(name, value) for name, value in sorted(environ.items()) if _VARIABLES.match(name)}


def shown(name: str, value: str) -> str:
    """Return a variable's value, unless that is a secret itself; a path to a secret is none."""
    if _SECRET.search(name) and not name.endswith("_FILE"):
        return "(set, and not shown)"
    return re.sub(r"//[^/@\s]+@", "//***@", value)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
