"""The inner loop and its instructions, on listings small enough to count by hand."""

from __future__ import annotations

import pytest

from results.measure.static.listing import Loop, inner_loop, parse, spent

# As nvdisasm -c prints it: a loop over k (.L_x_2) with a barrier's spin out of line (.L_x_5), inside a loop over tiles (.L_x_1); before
# it a loop that clears memory and multiplies nothing, after it a product of its own.
SASS = """
.text.main_kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   STS [R2], RZ ;
        /*0020*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/                   MOV R4, RZ ;
.L_x_2:
        /*0040*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*0050*/              @!P0 BRA `(.L_x_5) ;
.L_x_3:
        /*0060*/                   LDS.128 R8, [R2] ;
        /*0070*/                   LDS.U16 R12, [R3+0x800] ;
        /*0080*/                   LDSM.16.M88.2 R14, [R5] ;
        /*0090*/                   LOP3.LUT R16, R8, 0xf000f, RZ, 0xc0, !PT ;
        /*00a0*/                   SHF.R.U32.HI R17, RZ, 0x8, R8 ;
        /*00b0*/                   HFMA2.MMA R18, R16, R12, -RZ ;
        /*00c0*/                   HMMA.16816.F32 R20, R16, R14, R20 ;
        /*00d0*/                   HMMA.16816.F32 R24, R16, R14, R24 ;
        /*00e0*/                   BRA.DIV UR4, `(.L_x_4) ;
.L_x_4:
        /*00e8*/               @P6 BRA `(.L_x_7) ;
        /*00f0*/                   LDGSTS.E.BYPASS.128 [R6], [R30.64] ;
.L_x_7:
        /*0100*/               @P1 BRA `(.L_x_2) ;
        /*0110*/                   LDS.128 R8, [R40] ;
        /*0120*/               @P5 BRA `(.L_x_2) ;
        /*0130*/               @P2 BRA `(.L_x_1) ;
        /*0140*/                   HMMA.16816.F32 R24, R16, R14, R24 ;
        /*0150*/                   EXIT ;
.L_x_5:
        /*0160*/                   NANOSLEEP 0x20 ;
        /*0170*/              @!P3 BRA `(.L_x_5) ;
        /*0180*/                   BRA `(.L_x_3) ;
.L_x_6:
        /*0190*/                   BRA `(.L_x_6);
"""

PTX = """
$L__BB0_1:
 mov.u32 %r1, 0;
$L__BB0_2:
 ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%r9];
 lop3.b32 %r6, %r2, 983055, %r7, 0xea;
 { fma.rn.f16x2 %r8,%r6,%r6,%r6;
 }
 mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r2, %r3, %r4, %r5}, {%r6, %r8}, {%f1, %f2, %f3, %f4};
 setp.lt.s32 %p1, %r1, 8;
 @%p1 bra $L__BB0_2;
 ret;
"""


def test_the_inner_loop_is_the_innermost_that_multiplies() -> None:
    listing = parse(SASS, "sass")
    loop = inner_loop(listing, "sass")
    assert loop == Loop(4, 19, tuple(range(4, 18)))  # only some passes reach the second LDS.128 and its branch back
    assert listing[loop.first].name.startswith("SYNCS") and listing[loop.last].target == loop.first


def test_a_jump_back_from_out_of_line_code_is_no_loop() -> None:
    """.L_x_3 does not dominate the jump to it, though everything that multiplies lies between the two."""
    jump = next(n for n, i in enumerate(parse(SASS, "sass")) if i.target == 6)
    assert jump > 21  # the last product
    assert inner_loop(parse(SASS, "sass"), "sass").last < jump


def test_instructions_are_counted_by_kind_and_weight() -> None:
    found = spent(SASS, "sass")
    assert (found.instructions, found.looped) == (14, True)
    assert found.by_class == {
        "mma": 2,
        "bits": 2,
        "arithmetic": 1,
        "shared": 3,
        "global": 1,
        "other": 5,
    }  # the copy too, which the last passes skip
    assert found.weight_bytes == 512  # one LDS.128 in every pass; LDGSTS.128 goes to shared memory
    assert found.per_kib("bits") == 4 and found.per_kib() == 28
    assert found.flops == 2 * 2 * 16 * 8 * 16


def test_cuobjdump_gives_the_same() -> None:
    """It prints addresses where nvdisasm prints labels, and each instruction's encoding."""
    addresses = {
        ".L_x_0": 0x10,
        ".L_x_1": 0x30,
        ".L_x_2": 0x40,
        ".L_x_3": 0x60,
        ".L_x_4": 0xE8,
        ".L_x_5": 0x160,
        ".L_x_6": 0x190,
        ".L_x_7": 0x100,
    }
    text = "\n".join(line for line in SASS.splitlines() if not line.startswith("."))
    for label, address in addresses.items():
        text = text.replace(f"`({label})", f"{address:#x}")
    text = text.replace(" ;", " ;   /* 0x000fe20000000f00 */\n   /* 0x000fe40000000f00 */")
    assert parse(text, "sass") == parse(SASS, "sass")
    assert spent(text, "sass") == spent(SASS, "sass")


def test_the_most_multiplications_win_and_then_the_shortest() -> None:
    def loop(label: str, products: int, fill: int) -> str:
        body = "/*0000*/ HMMA.16816.F32 R0, R1, R2, R3 ;\n" * products + "/*0000*/ NOP ;\n" * fill
        return f".{label}:\n{body}@P0 BRA `(.{label}) ;\n"

    def numbered(text: str) -> str:
        lines = iter(range(0, 1 << 16, 16))
        return "\n".join(
            f"/*{next(lines):04x}*/ {line.replace('/*0000*/', '').strip()}" if line.endswith(";") else line for line in text.splitlines()
        )

    listing = parse(numbered(loop("L_a", 1, 0) + loop("L_b", 2, 5) + loop("L_c", 2, 0) + "EXIT ;"), "sass")
    assert inner_loop(listing, "sass") == Loop(10, 12, (10, 11, 12))


def test_code_without_a_loop_counts_whole() -> None:
    text = "\n".join(line for line in SASS.splitlines() if "BRA" not in line)
    found = spent(text, "sass")
    assert not found.looped and found.by_class["mma"] == 3


def test_ptx_is_counted_likewise() -> None:
    found = spent(PTX, "ptx")
    assert (found.instructions, found.looped, found.weight_bytes) == (6, True, 512)
    assert found.by_class == {"mma": 1, "bits": 1, "arithmetic": 1, "shared": 1, "global": 0, "other": 2}
    assert found.flops == 4096


@pytest.mark.parametrize(
    ("name", "flops"),
    [("HGMMA.64x256x16.F32", 2 * 16 * 256 * 16), ("HGMMA.64x8x16.F32", 2 * 16 * 32 * 16), ("HMMA.16816.F32.BF16", 4096), ("FFMA", 0)],
)
def test_operations_of_the_tensor_cores(name: str, flops: int) -> None:
    assert spent(f"/*0000*/ LDS.128 R0, [R1] ;\n/*0010*/ {name} R0, R1, R2, R3 ;\n/*0020*/ EXIT ;", "sass").flops == flops


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no code here", "no instruction in"),
        ("/*0000*/ BRA `(.L_x_9) ;", "jumps to a place"),
        ("/*0000*/ HMMA.16816.F32 R0, R1, R2, R3 ;", "no 128-bit load"),
    ],
)
def test_what_cannot_be_counted_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spent(text, "sass")


def test_labels_of_inline_assembly_are_many_of_one_name() -> None:
    """Each wait jumps to its own labels: else the loop around the second would be entered from the first."""
    wait = "{\nLAB_WAIT:\n mbarrier.try_wait.shared::cta.b64 P1, [%r1], %r2;\n @P1 bra DONE;\n bra LAB_WAIT;\nDONE:\n}\n"
    ptx = f"{wait}$L1:\n{wait}mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%f1}}, {{%r1}}, {{%r2}}, {{%f1}};\n@%p1 bra $L1;\nret;\n"
    listing = parse(ptx, "ptx")
    loop = inner_loop(listing, "ptx")
    assert loop.looped and (loop.first, loop.last) == (3, 7)
    assert [listing[index].target for index in (1, 2, 4, 5)] == [3, 0, 6, 3]
