"""Failures that say nothing about a schedule, because the machine was at fault: told by their words,
which is all that a record keeps of them.

A schedule that failed so is as good as untried: the tuner ends its run without a record of it, and
records of such failures, which it once wrote, count nowhere."""

from __future__ import annotations

import re

# What can become of a candidate that a machine's fault looks like; "wrong", "hang" and
# "compile_timeout" are the candidate's own.
STATUSES = ("compile_error", "crash", "error")
# Disk, memory, other limits; ended from outside, as by a system that is short of memory; the device.
_LIMITS = (
    "No space left on device", "disk is full", "Disk quota exceeded", "File too large", "Read-only file system", "Input/output error",
    "Stale file handle", "Too many open files", "Resource temporarily unavailable", "[Cc]annot allocate memory", "can't allocate memory",
    "[Nn]ot enough memory", "[Oo]ut of memory", "virtual memory exhausted", "MemoryError", "bad_alloc", "can't start new thread",
    r"ended by SIG(?:KILL|TERM|INT|HUP)\b", r"ended with status -(?:1|2|9|15)\b", "Killed signal terminated program", "did not start",
    "no CUDA-capable device", "busy or unavailable", "driver version is insufficient", "uncorrectable ECC", "system not yet initialized",
    "fallen off the bus", "GPU is lost",
)  # fmt: skip
# No compiler, or one that does not work whatever it is given. What a process that crashed has
# written to standard error may say so of something else.
_TOOLS = (
    "no C compiler", "nvcc was not found", "is not on PATH", "is not installed", "No module named", "ImportError", "cannot be imported",
    "--version says", r"failed on cpu_launch\.c", "the C compiler failed on the host stub", "No such file or directory", "cannot execute",
    "Exec format error", "Text file busy", "Permission denied", "Operation not permitted", "error while loading shared libraries",
    "cannot open shared object file", "cannot find -l", "Unsupported gpu architecture", "unsupported GNU version",
)  # fmt: skip
_LIMIT, _TOOL = re.compile("|".join(_LIMITS)), re.compile("|".join(_TOOLS))


def machines_fault(status: str, reason: str) -> bool:
    """Whether a failure of ``status`` (``records.STATUSES``) for this ``reason`` is the machine's.
    "corrupt" always is: a compiled kernel was damaged, or does not load here."""
    if status not in STATUSES:
        return status == "corrupt"
    crashed = status == "crash" or reason.startswith("crash:")
    return _LIMIT.search(reason) is not None or (not crashed and _TOOL.search(reason) is not None)
