"""A program whose ``build`` misbehaves in the way that the workload's n asks for. It needs no compiler: it never gets that far."""

import os
import signal
import sys
import time

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import Rule
from tilebit.schedules.schedule import Schedule
from tilebit.tiles.program import TileProgram

HANG, SEGFAULT, EXIT, RAISE, NOISE, ILLEGAL, SURPRISE = range(1, 8)


def build(workload: Workload, schedule: Schedule, target):
    if workload.n == HANG:
        time.sleep(3600)
    if workload.n == SEGFAULT:
        print("about to fall", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if workload.n == EXIT:
        os._exit(7)
    if workload.n == NOISE:
        print("a compiler that talks on standard output " * 1000, flush=True)
    if workload.n == SURPRISE:
        raise SystemExit("no more today")
    raise RuntimeError(f"cannot build n = {workload.n}, process {os.getpid()}")


def legal(workload: Workload, schedule: Schedule, target) -> list[str]:
    return ["n is the number of illegality"] if workload.n == ILLEGAL else []


RULE = Rule("sample.faulty", "sample.faulty", arches=("cpu",), legal=legal)
PROGRAM = TileProgram("sample.faulty", "tvm", build)
