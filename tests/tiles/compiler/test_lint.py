"""Lint: each finding fires on code that deserves it and stays silent on code that does not."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tilebit.schedules.operations import programs
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cuda import NvccError, parse_ptxas
from tilebit.tiles.compiler.lint import ABSENT, Instructions, Resources, count_instructions, errors, lint

WGMMA = Schedule("gemm_wgmma", 128, 64, 128, num_stages=4, num_warps=8)
MMA = Schedule("gemm_mma", 128, 64, 64, num_stages=3, num_warps=8)
STREAM = Schedule("gemm_stream", 64, 8, 128, num_stages=4, num_warps=8)
BULK = Schedule("gemm_stream_bulk", 64, 8, 128, num_stages=4, num_warps=8, split_k=2)
OTHER = Schedule("sample.w4a16", 1, 1, 1)
HOPPER, AMPERE, ADA = target_from_name("sm_90a"), target_from_name("sm_80"), target_from_name("sm_89")
FINE = Resources(registers=168, spills=0, stack=0, static_smem=1024, barriers=2, smem=100 * 1024, threads=384)
SMALL = replace(FINE, threads=256, registers=120)
NOTHING = Instructions("ptx", *[0] * (len(fields(Instructions)) - 1))
WGMMA_CODE = replace(NOTHING, wgmma=8, tma=4, dependent_waits=2, wide_shared_loads=8, register_reallocations=2)
MMA_CODE = replace(NOTHING, mma=64, ldmatrix=16, cp_async=6, wide_shared_loads=8)
STREAM_CODE = replace(NOTHING, mma=16, ldmatrix=4, cp_async=25, wide_shared_loads=2)
BULK_CODE = replace(STREAM_CODE, bulk_copies=6, cp_async=9, dependent_waits=1)
SERIALIZED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources"
)


def test_good_kernels_have_no_findings() -> None:
    assert lint(WGMMA_CODE, FINE, WGMMA, HOPPER) == []
    assert lint(MMA_CODE, SMALL, MMA, AMPERE) == []
    assert lint(STREAM_CODE, SMALL, STREAM, AMPERE) == []
    assert lint(BULK_CODE, SMALL, BULK, HOPPER) == []


CASES = [
    ("spills", WGMMA_CODE, replace(FINE, spills=64, stack=32), WGMMA, HOPPER, "error: 64 bytes of register spills"),
    ("stack", WGMMA_CODE, replace(FINE, stack=128), WGMMA, HOPPER, "warning: 128 bytes of local memory"),
    (
        "shared memory",
        WGMMA_CODE,
        replace(FINE, smem=228 * 1024),
        WGMMA,
        HOPPER,
        "error: 233472 bytes of shared memory a block; accepted on sm_90a: 232448",
    ),
    ("registers", WGMMA_CODE, replace(FINE, registers=255), WGMMA, HOPPER, "error: 255 registers x 384 threads exceed"),
    ("occupancy", WGMMA_CODE, FINE, replace(WGMMA, min_blocks=2), HOPPER, "warning: 1 blocks fit on one SM where the schedule asks for 2"),
    ("no producer", WGMMA_CODE, replace(FINE, threads=256), WGMMA, HOPPER, "error: 256 threads a block; accepted: 384, 8 computing warps"),
    (
        "registers to hand on",
        WGMMA_CODE,
        replace(FINE, registers=160),
        WGMMA,
        HOPPER,
        "error: setmaxnreg takes 64512 registers of the 61440",
    ),
    ("no wgmma", replace(WGMMA_CODE, wgmma=0), FINE, WGMMA, HOPPER, "error: no wgmma in the ptx"),
    ("no TMA", replace(WGMMA_CODE, tma=0, bulk_copies=4), FINE, WGMMA, HOPPER, "error: no TMA load"),
    ("wgmma waits for nobody", replace(WGMMA_CODE, dependent_waits=0), FINE, WGMMA, HOPPER, "error: no wait for the preceding kernel"),
    (
        "even registers of two blocks",
        replace(WGMMA_CODE, register_reallocations=0),
        replace(SMALL, threads=384, registers=80),
        replace(WGMMA, min_blocks=2),
        HOPPER,
        "warning: no setmaxnreg",
    ),
    ("even registers", replace(WGMMA_CODE, register_reallocations=0), FINE, WGMMA, HOPPER, "warning: no setmaxnreg"),
    ("narrow loads", replace(WGMMA_CODE, wide_shared_loads=0), FINE, WGMMA, HOPPER, "warning: no 128-bit shared-memory load"),
    ("no mma", replace(MMA_CODE, mma=0), SMALL, MMA, AMPERE, "error: no mma.sync"),
    ("no cp.async", replace(MMA_CODE, cp_async=0), SMALL, MMA, AMPERE, "error: no cp.async"),
    ("stream without mma", replace(STREAM_CODE, mma=0), SMALL, STREAM, AMPERE, "error: no mma.sync"),
    ("stream without ldmatrix", replace(STREAM_CODE, ldmatrix=0), SMALL, STREAM, AMPERE, "error: no ldmatrix"),
    ("stream without cp.async", replace(STREAM_CODE, cp_async=0), SMALL, STREAM, AMPERE, "error: no cp.async"),
    ("stream's narrow loads", replace(STREAM_CODE, wide_shared_loads=0), SMALL, STREAM, AMPERE, "warning: no 128-bit"),
    ("bulk without mma", replace(BULK_CODE, mma=0), SMALL, BULK, HOPPER, "error: no mma.sync"),
    ("bulk without ldmatrix", replace(BULK_CODE, ldmatrix=0), SMALL, BULK, HOPPER, "error: no ldmatrix"),
    ("no bulk copies", replace(BULK_CODE, bulk_copies=0, tma=3), SMALL, BULK, HOPPER, "error: no bulk copy"),
    ("bulk waits for nobody", replace(BULK_CODE, dependent_waits=0), SMALL, BULK, HOPPER, "error: no wait for the preceding kernel"),
    ("bulk spills", BULK_CODE, replace(SMALL, spills=112), BULK, HOPPER, "error: 112 bytes of register spills"),
    (
        "ada's memory",
        MMA_CODE,
        SMALL,
        MMA,
        ADA,
        "error: 102400 bytes of shared memory a block; accepted on sm_89: 101376",
    ),
    ("float atomics", replace(MMA_CODE, float_atomics=3), SMALL, MMA, AMPERE, "error: 3 floating-point atomics"),
    ("serialized wgmma", WGMMA_CODE, replace(FINE, warnings=(SERIALIZED,)), WGMMA, HOPPER, f"error: {SERIALIZED}"),
    ("another warning", WGMMA_CODE, replace(FINE, warnings=("kernel.cu(3): warning x",)), WGMMA, HOPPER, "warning: kernel.cu(3)"),
]


@pytest.mark.parametrize(
    ("code", "resources", "schedule", "target", "finding"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_each_finding_fires(code: Instructions, resources: Resources, schedule: Schedule, target, finding: str) -> None:
    found = lint(code, resources, schedule, target)
    assert any(text.startswith(finding) for text in found), found
    assert bool(errors(found)) == finding.startswith("error")


def test_other_programs_promise_nothing_but_must_fit() -> None:
    assert lint(NOTHING, replace(FINE, threads=64), OTHER, AMPERE) == []
    assert errors(lint(NOTHING, replace(FINE, threads=64, smem=1 << 20), OTHER, AMPERE))


def test_every_promise_is_of_a_program_and_can_be_broken() -> None:
    moved = ("append", "pack", "gather", "quantize", "norm", "gated", "expand")  # what only moves rows promises nothing
    assert all(rule.promises for rule in programs(arch="sm_90a").values() if not any(op in rule.program for op in moved))
    assert set(ABSENT) == {instruction for rule in programs().values() for instruction in rule.promises}


PTX = """
  setmaxnreg.dec.sync.aligned.u32 24;
  cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r1], [%rd1], %r2, [%r3], %rd2;
  cp.async.commit_group;
  griddepcontrol.launch_dependents;
  griddepcontrol.wait;
  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];
  ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [%r5];
  ld.shared.v2.u64 {%rd1, %rd2}, [%r5];
  ld.shared.v2.u32 {%r1, %r2}, [%r5];
  ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd5];
  wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%f1}, {%r1}, %rd1, p, 1, 1, 0;
  mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1};
  cp.async.cg.shared.global [%r1], [%rd1], 16;
  atom.add.release.gpu.global.u32 %r1, [%rd1], 1;
  red.global.add.f32 [%rd1], %f1;
  atom.global.add.noftz.f16x2 %r1, [%rd1], %r2;
"""
SASS = """
  USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
  UTMALDG.2D [UR8], [UR4], desc[UR6] ;
  UBLKCP.S.G [UR4], [UR6], UR8, desc[UR10] ;
  LDGDEPBAR ;
  PREEXIT ;
  ACQBULK ;
  LDSM.16.M88.4 R4, [R2] ;
  LDS.128 R4, [R2] ;
  LDS.U.128 R8, [R2+0x10] ;
  LDS.64 R4, [R2] ;
  HGMMA.64x64x16.F32 R24, R4, gdesc[UR4], R24 ;
  HMMA.16816.F32 R4, R8, R12, R4 ;
  LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64] ;
  ATOMG.E.ADD.STRONG.GPU PT, R3, desc[UR4][R2.64], R5 ;
  RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5 ;
  ATOMG.E.ADD.F16x2.RN.STRONG.GPU PT, R3, desc[UR4][R2.64], R5 ;
"""


@pytest.mark.parametrize("product", ("HMMA.16816.F32", "IMMA.16832.S8.S8", "QMMA.16832.F32.E4M3.E4M3", "BMMA.168256.AND.POPC"))
def test_products_of_all_kinds_are_products(product: str) -> None:
    assert count_instructions(f"  {product} R4, R8, R12, R4 ;", "sass").mma == 1


@pytest.mark.parametrize(("level", "text"), [("ptx", PTX), ("sass", SASS)])
def test_instructions_are_counted(level: str, text: str) -> None:
    assert count_instructions(text, level) == Instructions(
        level,
        wgmma=1,
        mma=1,
        ldmatrix=1,
        tma=1,
        bulk_copies=1,
        cp_async=1,
        dependent_waits=1,
        wide_shared_loads=2,
        register_reallocations=1,
        float_atomics=2,
    )


REPORT = f"""
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other_kernel' for 'sm_90a'
ptxas info    : Function properties for other_kernel
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
{SERIALIZED} in function 'main_kernel'
/opt/cutlass/x.h(621): warning #1444-D: type "longlong4" was declared deprecated
kernel.cu(12): warning #550-D: variable "x" was set but never used
ptxas info    : Compiling entry function 'main_kernel' for 'sm_90a'
ptxas info    : Function properties for main_kernel
    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 7 barriers, 1024 bytes smem
ptxas info    : Compile time = 12.3 ms
"""


def test_ptxas_report_is_read() -> None:
    found = parse_ptxas(REPORT, "main_kernel", 4096, 384)
    assert found == Resources(168, 12, 0, 1024, 7, 5120, 384, found.warnings)
    assert len(found.warnings) == 2 and "C7510" in found.warnings[0] and "#550-D" in found.warnings[1]
    with pytest.raises(NvccError, match="did not report kernel 'missing'"):
        parse_ptxas(REPORT, "missing", 0, 32)
