"""What servers and workers do without."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from harness import until
from patience import PATIENCE_S
from prepared import Prepared

from fleet.numeric import elementary

_AREAS = """
import ctypes, sys, threading
if sys.argv[1:]:
    from fleet.ps.server.lean import be_lean
    be_lean()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.fdopen.restype = ctypes.c_void_p, ctypes.c_void_p
libc.malloc.argtypes, libc.malloc_info.argtypes = [ctypes.c_size_t], [ctypes.c_int, ctypes.c_void_p]
libc.fflush.argtypes = [ctypes.c_void_p]
together = threading.Barrier(4)
def take():
    together.wait()
    libc.malloc(1 << 16)
    together.wait()
threads = [threading.Thread(target=take) for _ in range(4)]
for each in threads: each.start()
for each in threads: each.join()
out = libc.fdopen(1, b"w")
libc.malloc_info(0, out)
libc.fflush(out)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such areas")
@pytest.mark.slow
def test_threads_of_a_server_share_an_area_of_memory() -> None:
    def areas(*given: str) -> int:
        command = [sys.executable, "-c", _AREAS, *given]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
        return done.stdout.count("<heap nr=")

    assert areas() > 1
    assert areas("lean") == 1


_SEARCHES = """
import gc, torch
from fleet.ps.server.lean import be_lean
gc.unfreeze()
before = len(gc.get_objects())
be_lean()
after = len(gc.get_objects())
kept = [[number] for number in range(1000)]
print(before > 100_000, after < 1000, len(gc.get_objects()) > 1000)
"""


_PUT_OFF = """
import sys, torch
from fleet.numeric.compiler import put_off_compiler, uncompiled
compiles = torch.compiler.is_compiling
left_alone = uncompiled(lambda: compiles())
put_off_compiler()
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
print(left_alone(), "torch._dynamo" in sys.modules)
def step(x):
    optimizer.zero_grad()
    x = x + compiles()
    return x + 2 * left_alone()
print(torch.compile(step, backend="eager")(torch.zeros(())).item(), "torch._dynamo" in sys.modules)
zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
print(vars(zero_grad)["__dynamo_disable"] is zero_grad)
"""


def told(prepared: Prepared, folder: Path, program: str) -> list[str]:
    """The lines that a process prints which has imported torch, and no compiler."""
    script = folder / "script.py"
    script.write_text(program)
    out, err = prepared.start([str(script)], os.environ, bare=True).communicate(PATIENCE_S)
    assert not err
    return out.splitlines()


def test_a_server_looks_for_garbage_among_what_came_since(prepared: Prepared, tmp_path: Path) -> None:
    assert told(prepared, tmp_path, _SEARCHES) == ["True True True"]


def test_the_compiler_comes_with_what_is_compiled(prepared: Prepared, tmp_path: Path) -> None:
    """It takes longer than torch to import. Once it is there it looks into no function that it is to leave alone."""
    assert told(prepared, tmp_path, _PUT_OFF) == ["False False", "1.0 True", "False"]


_BEGUN = """
import contextlib, sys, functools, torch
from fleet.numeric import compiler
class Over:
    def find_spec(self, name, *_):
        if name == "torch._dynamo": raise ImportError("it takes seconds, and that it begins is enough")
class Elsewhere(dict):
    def __setitem__(self, name, function):
        super().__setitem__(name, function)
        sys.meta_path.insert(1, Over())
        with contextlib.suppress(ImportError):
            import torch._dynamo  # as another thread may at this moment
class Late:
    def __init__(self): self.__dict__ = Elsewhere()
late = Late()
left_alone = compiler.uncompiled(lambda: 1)
again = functools.wraps(left_alone)(lambda: 2)
compiler._import.call_plainly(late)
compiler.uncompiled(lambda: 3)
print([name for each in (left_alone, again, late) for name in vars(each) if name.startswith("__dynamo")])
compiler.put_off_compiler()
print(torch.optim.Optimizer.zero_grad.__wrapped__.__dict__.get("__dynamo_disable"))
"""


def test_nothing_is_left_behind_by_whatever_order_the_compiler_comes_in(prepared: Prepared, tmp_path: Path) -> None:
    """A wrapper has no copy of what was remembered, and a function that comes while the import begins has none left."""
    assert told(prepared, tmp_path, _BEGUN) == ["[]", "None"]


_ROOTS = """
import os, torch
asked, root = [], torch.sqrt
torch.sqrt = lambda of: asked.append(of.dtype) or root(of)
import fleet
from fleet.role_maker import UserDefinedRoleMaker, Role
roles = [UserDefinedRoleMaker(0, role, 1, ["127.0.0.1:1"]) for role in (Role.SERVER, Role.WORKER)]
for _ in range(2):
    fleet.init({})
    print(*sorted(map(str, asked)))
"""


@pytest.mark.parametrize("role", ["roles[0]", "roles[1]", ""], ids=["server", "worker", "alone"])
def test_elementary_functions_are_called_before_any_thread_begins(
    prepared: Prepared, tmp_path: Path, role: str
) -> None:
    """MKL looks for the code of each then, and gives a thread that comes meanwhile another one."""
    assert told(prepared, tmp_path, _ROOTS.format(role)) == ["torch.float32 torch.float64"] * 2


def test_threads_wait_until_elementary_functions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, may_end = list[torch.dtype](), threading.Event()

    def root(of: torch.Tensor) -> torch.Tensor:
        asked.append(of.dtype)
        may_end.wait(PATIENCE_S)
        return of

    monkeypatch.setattr(torch, "sqrt", root)
    monkeypatch.setattr(elementary, "_are_found", False)
    threads = [threading.Thread(target=elementary.find_elementary_functions) for _ in range(2)]
    for each in threads:
        each.start()
    try:
        until(lambda: bool(asked))
        threads[1].join(0.1)
        assert all(each.is_alive() for each in threads)
    finally:
        may_end.set()
        for each in threads:
            each.join(PATIENCE_S)
    assert asked == [torch.float32, torch.float64]
