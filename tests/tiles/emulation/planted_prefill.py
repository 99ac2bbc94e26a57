"""Bugs to plant in the prefill programs: edits of their own files, and of what they call on the device."""

from __future__ import annotations

from dataclasses import replace

from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.schedule import Schedule

from .planted_attention import Bug, bug, once

# Two key heads of two queries each: a row of k or v that is another head's shows.
PLAIN = AttentionWorkload("prefill", 4, 100, 300, 4, 2, 64, KVFormat(), lse=True)
WINDOWED = replace(PLAIN, window=100, sink_tokens=20)
RING = Schedule("attention_prefill", 64, 64, 64, 2, 4)
TURNS = Schedule("attention_prefill", 64, 128, 64, 2, 8)  # two warpgroups
WIDE, SIDE_BY_SIDE = replace(PLAIN, head_dim=128), Schedule("attention_prefill", 64, 128, 128, 2, 8)
MMA = Schedule("attention_prefill_mma", 32, 64, 64, 2, 4)
RELEASE_V = "release(shared.empty_v, (i - 1) % stages, thread)\n"
RELEASE_K = "release(shared.empty_k, i % stages, thread)\n"
WAIT_V = "await_stage(shared.full_v, (i - 1) % stages, (i - 1) // stages & 1)\n"
PRODUCT_S = " " * 12 + "T.wgmma_gemm(shared.Qs, shared.Ks[i % stages, :, :], mine.S, transpose_B=True, clear_accum=True, policy=policy)\n"
PRODUCT_V = "T.wgmma_gemm(mine.P, shared.Vs[(i - 1) % stages, :, :], mine.O, policy=policy)\n"
ROUND = 'T.call_extern("handle", calls.round_weights, mine.S.access_ptr("r"), mine.P.access_ptr("w"))\n'
RESCALE = 'T.call_extern("handle", calls.rescale, mine.O.access_ptr("rw"), T.address_of(mine.state[0]))\n'
ZERO_TAIL = 'T.call_extern("handle", zero_tail, T.address_of(shared.Vs[0, 0, 0]), T.address_of(mine.tile[0]), thread)\n'
FIRST_PRODUCT = "T.wgmma_gemm(shared.Qs, shared.Ks[0, :, :], mine.S, transpose_B=True, clear_accum=True, policy=policy)\n"
INDENT, WAIT_S = " " * 8, "T.wait_wgmma(1)\n"
BEFORE_WAIT = 'T.call_extern("handle", "tilebit::weights_before_wait", T.address_of(mine.state[0]))\n' + INDENT
RESCALE_MMA = 'T.call_extern("handle", calls.rescale, O.access_ptr("rw"), T.address_of(state[0]))'
DIAGONAL = "for i in T.serial(1, mine.tile[MASKED]):\n            next_step(shared, mine, i, MASK, thread)"
LAST_V = "await_stage(shared.full_v, (mine.tile[STEPS] - 1) % stages, (mine.tile[STEPS] - 1) // stages & 1)\n"


def loop(name: str, schedule: Schedule, *pairs: tuple[str, str], workload: AttentionWorkload = PLAIN, sign: str = "") -> Bug:
    """A bug in the program's own file."""
    return Bug(name, workload, schedule, {f"{schedule.program.removeprefix('attention_')}.py": once(*pairs)}, sign)


STAGE_K, STAGE_V = "shared.empty_k[i % stages], ", "shared.full_v, (i - 1) % stages, "
COMMIT = 'T.call_extern("handle", commit)'

BUGS = (
    # wgmma: what is loaded
    loop("values of the query's head", RING, ("v[at : at + bn, head // w.group,", "v[at : at + bn, head % w.heads_kv,")),
    loop("keys of the query's head", RING, ("k[at : at + bn, head // w.group,", "k[at : at + bn, head % w.heads_kv,")),
    loop("queries a row late", RING, ("q[tile[FIRST_ROW] : tile[FIRST_ROW] + bm,", "q[tile[FIRST_ROW] + 1 : tile[FIRST_ROW] + 1 + bm,")),
    # wgmma: who waits for whom
    loop("parity of the keys never turns", RING, ("shared.full_k, i % stages, i // stages & 1)", "shared.full_k, i % stages, 0)")),
    loop("parity of the values is the other one", RING, (WAIT_V, WAIT_V.replace("& 1)", "& 1 ^ 1)"))),
    loop("parity of an emptied stage never turns", RING, (STAGE_K + "(i // stages & 1) ^ 1)", STAGE_K + "1)")),
    loop("queries not waited for", RING, ("await_stage(shared.full_q, 0, 0)\n", "pass\n")),
    loop("first keys not waited for", RING, ("await_stage(shared.full_k, 0, 0)\n", "pass\n")),
    loop("values not waited for", RING, (WAIT_V, "pass\n")),
    loop("last values not waited for", RING, (LAST_V, "pass\n")),
    loop("values waited for after their product", RING, (WAIT_V, "pass\n"), (PRODUCT_V, PRODUCT_V + INDENT + WAIT_V)),
    loop("keys released before their product", RING, (RELEASE_K, "pass\n"), (WAIT_S, RELEASE_K + INDENT + WAIT_S)),
    loop("values released before their product", RING, (RELEASE_V, "pass\n"), (WAIT_S, RELEASE_V + INDENT + WAIT_S)),
    loop("values never released", RING, (RELEASE_V, "pass\n"), sign="wait"),
    loop("another stage released", RING, (RELEASE_K, RELEASE_K.replace("i %", "(i + 1) %"))),
    loop("a warp's release not counted", RING, ("empty_v = T.alloc_barrier([schedule.num_warps]", "empty_v = T.alloc_barrier([2]")),
    loop("nobody has the first turn", TURNS, ("thread // 128 == groups - 1:", "thread // 128 == groups:"), sign="wait"),
    # wgmma: products
    loop("O not cleared", RING, ("T.clear(mine.O)", "pass")),
    loop("S not cleared", RING, (FIRST_PRODUCT, FIRST_PRODUCT.replace("clear_accum=True", "clear_accum=False"))),
    loop("S of all steps", RING, (PRODUCT_S, PRODUCT_S.replace("clear_accum=True", "clear_accum=False"))),
    loop("values of this step", RING, (PRODUCT_V, PRODUCT_V.replace("(i - 1)", "i"))),
    loop("last product lost", RING, ("last_product(shared, mine)\n\n", "pass\n\n")),
    loop("softmax before S is there", RING, (WAIT_S, "T.wait_wgmma(2)\n")),
    loop("O rescaled before its product ends", RING, (BEFORE_WAIT + "T.wait_wgmma(0)", BEFORE_WAIT + "T.wait_wgmma(1)")),
    loop("O not rescaled", RING, (RESCALE, "pass\n")),
    loop("P of the step before", RING, (RESCALE + INDENT + ROUND, RESCALE)),
    loop("values after the sequence not zeroed", RING, (ZERO_TAIL, "pass\n")),
    # wgmma: fences; zero_tail has one of its own, and TileLang adds another
    bug("barriers not fenced", PLAIN, RING, ("tl::fence_barrier_init();", ""), sign="without a fence"),
    bug("zeroed values not fenced", PLAIN, RING,
        ("  fence_before_bulk_copies();\n  sync_group", "  sync_group"), ("tl::fence_proxy_async();", ""),
    ),
    # wgmma: masks
    loop("diagonal not masked", RING, (DIAGONAL, DIAGONAL.replace("MASK,", "NO_MASK,"))),
    loop("tiles at the window's border lost", RING, ("if w.window:", "if False:"), workload=WINDOWED),
    # mma.sync
    loop("O not cleared, mma.sync", MMA, ("T.clear(O)", "pass")),
    loop("values of the query's head, mma.sync", MMA, ("v[row, head // w.group, 0]", "v[row, head % w.heads_kv, 0]")),
    loop("keys of the query's head, mma.sync", MMA, ("k[row, head // w.group, 0]", "k[row, head % w.heads_kv, 0]")),
    loop("copies not waited for, mma.sync", MMA, ("await_copies<{stages - 1}>", "await_copies<{stages}>")),
    loop("a stage loaded while it is read", MMA, ("tile, i + stages - 1, head, thread)", "tile, i + stages, head, thread)")),
    loop("a step's group of copies missing", MMA, (" " * 8 + COMMIT, " " * 12 + COMMIT)),
    loop("stages handed over without a meeting", MMA, ("T.sync_threads()  # the next load", "pass  # the next load")),
    loop("keys of another stage", MMA, ("T.gemm(Qs, Ks[i % stages, :, :]", "T.gemm(Qs, Ks[(i + 1) % stages, :, :]")),
    loop("values of another stage", MMA, ("T.gemm(P, Vs[i % stages, :, :]", "T.gemm(P, Vs[(i + 1) % stages, :, :]")),
    loop("O not rescaled, mma.sync", MMA, (RESCALE_MMA, "pass")),
    loop("S not cleared, mma.sync", MMA, ("S, transpose_B=True, clear_accum=True", "S, transpose_B=True, clear_accum=False")),
    loop("keys past the end", MMA, ("T.min(tile[FIRST_KEY] + first, k.shape[0] - 1)", "tile[FIRST_KEY] + first + bn")),
    # the device's
    bug("rows of the next sequence stored", PLAIN, RING, ("if (row < rows) target[", "if (row < rows + 1) target[")),
    bug("output staged over the queries of another warpgroup", WIDE, SIDE_BY_SIDE,
        ("(staging) + warp * 16 * 32;", "(staging) + warp * 16 * (HEAD_DIM / 2);"),
        ("staged[n / 8 * PANEL + row * 32 + (n % 8 ^ (row & 7)) * 4", "staged[row * (HEAD_DIM / 2) + (n ^ (row & 7)) * 4"),
        ("chunks[chunk / 8 * (PANEL / 4) + row * 8 + (chunk % 8 ^ (row & 7))]", "chunks[row * CHUNKS + (chunk ^ (row & 7))]"),
    ),
    bug("log-sum-exp of base 2", PLAIN, RING, ("(maximum + log2f(sum)) * LN_2", "(maximum + log2f(sum))")),
    bug("tiles in another order", PLAIN, RING, ("/ ROWS - 1 - (index - place.first)) * ROWS", "/ ROWS - (index - place.first)) * ROWS")),
    bug("warps of a turn miscounted", PLAIN, TURNS, ('"bar.arrive %0, 256;"', '"bar.arrive %0, 288;"'), sign="wait"),
)  # fmt: skip
