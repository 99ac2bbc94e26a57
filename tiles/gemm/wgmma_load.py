"""What the two loading warps of ``gemm_wgmma`` do: one brings weights, scales and zero points, one
x, by TMA.

Each walks over all steps of its block. For every part of a step it waits until ``empty`` says that
the part's place in the ring has been read, has TMA fill it, and arrives at ``full``, which the
bytes complete. Part ``part`` of iteration i lies in stage i % num_stages; both barriers have one
element for every part of every stage.
"""

from types import SimpleNamespace
from typing import Any

from .wgmma_plan import Plan

# Rows of x that a load of a tile with fewer than its height fetches: those beyond the last take TMA
# longer to fill with zeros than to load (results/notes/wgmma-few-rows.md). Whole tiles come in one
# box (wgmma-one-box.md).
MANY_ROWS, FEW_ROWS = 64, 16


def load_macros(plan: Plan, m: Any) -> SimpleNamespace:
    """TileLang macros: ``weights`` and ``x`` are all that one warp does; ``m`` is the kernel's
    dynamic number of rows.

    ``step``, ``bx``, ``top`` and ``left`` are variables: the step, the tile's place and the steps
    left of a piece of a tile. Where a piece begins is found once, because divisions of loading
    warps keep the tensor cores waiting (results/notes/wgmma-places.md).
    """
    import tilelang.language as T

    p, s, parts, lines = plan.operands, plan.operands.schedule, plan.parts, plan.lines
    bn, bk, stages, cluster = s.block_n, s.block_k, s.num_stages, s.cluster
    together = 1 if s.joined else p.step_groups  # rows of parameters that lie one behind the other in a stage
    rows_of_parameters = tuple(range(0, p.step_groups, together))

    def ask(what, *where):
        return plan.ask(T, what, m, *where)

    def weight_part(part):
        @T.macro
        def load(halves, scales, zeros, Ws, Ss, Zs, full, step, bx, stage):
            slab, line, group = bx * (bn // 64), (step * parts + part) * lines, p.group_of(step)
            T.tma_copy(
                halves[slab : slab + bn // 64, line : line + lines, 0:256], Ws[stage, part, 0 : bn // 64, :, :],
                barrier=full[stage * parts + part],
            )  # fmt: skip
            for first in rows_of_parameters:
                if part == plan.scales_part:
                    T.tma_copy(
                        scales[group + first : group + first + together, bx * bn : bx * bn + bn],
                        Ss[stage, first : first + together, 0:bn],
                        barrier=full[stage * parts + part],
                    )
                if part == 0 and p.asymmetric:  # for all parts, the last of which is dequantized before the first is released
                    T.tma_copy(
                        zeros[group + first : group + first + together, bx * bn : bx * bn + bn],
                        Zs[stage, first : first + together, 0:bn],
                        barrier=full[stage * parts],
                    )

        return load

    def joined_part(part):
        @T.macro
        def load(halves, scales, zeros, Ws, Ss, Zs, full, step, bx, stage):
            """Of a tile of bytes: their nibbles, two rows each, which need no zero points; their scales
            if those are of groups' sums."""
            row, line = p.first_joined + (bx - plan.whole_tiles) * (2 * bn), (step * parts + part) * lines
            T.tma_copy(
                halves[row // 64 : row // 64 + bn // 32, line : line + lines, 0:256], Ws[stage, part, :, :, :],
                barrier=full[stage * parts + part],
            )  # fmt: skip
            if p.step_sums and part == plan.scales_part:
                T.tma_copy(
                    scales[p.group_of(step) : p.group_of(step) + 1, row : row + 2 * bn], Ss[stage, 0:1, :],
                    barrier=full[stage * parts + part],
                )  # fmt: skip

        return load

    def part_of_either(part):
        of_codes, of_bytes = weight_part(part), joined_part(part)

        @T.macro
        def load(halves, scales, zeros, Ws, Ss, Zs, full, step, bx, stage):
            if bx < plan.whole_tiles:
                of_codes(halves, scales, zeros, Ws, Ss, Zs, full, step, bx, stage)
            else:
                of_bytes(halves, scales, zeros, Ws, Ss, Zs, full, step, bx, stage)

        return load

    def x_part(part, height):
        @T.macro
        def load_rows(x, Xs, full, step, top, stage, first, rows):
            k0 = (step * parts + part) * (bk // parts)
            T.tma_copy(
                x[top + first : top + first + rows, k0 : k0 + bk // parts], Xs[stage, part, first : first + rows, :],
                barrier=full[stage * parts + part], cluster_mask=(1 << cluster) - 1 if cluster > 1 else None,
            )  # fmt: skip

        @T.macro
        def load_few(x, Xs, full, step, top, stage, first, boxes):
            for few in T.unroll(boxes):
                if m - top > first + few * FEW_ROWS:
                    load_rows(x, Xs, full, step, top, stage, first + few * FEW_ROWS, FEW_ROWS)

        @T.macro
        def load(x, Xs, full, step, top, stage):
            if m - top > height - FEW_ROWS:
                load_rows(x, Xs, full, step, top, stage, 0, height)
            elif height >= MANY_ROWS:
                for box in T.unroll(height // MANY_ROWS):
                    if m - top > box * MANY_ROWS + MANY_ROWS - FEW_ROWS:
                        load_rows(x, Xs, full, step, top, stage, box * MANY_ROWS, MANY_ROWS)
                    else:
                        load_few(x, Xs, full, step, top, stage, box * MANY_ROWS, MANY_ROWS // FEW_ROWS - 1)
                if height % MANY_ROWS:
                    load_few(x, Xs, full, step, top, stage, height // MANY_ROWS * MANY_ROWS, height % MANY_ROWS // FEW_ROWS)
            else:
                load_few(x, Xs, full, step, top, stage, 0, height // FEW_ROWS)

        return load

    each_part = tuple(range(parts))
    kinds = tuple(range(len(plan.heights)))
    load_weights = [(part_of_either if s.joined else weight_part)(part) for part in each_part]
    load_x = [[x_part(part, height) for part in each_part] for height in plan.heights]

    @T.macro
    def weights(halves, scales, zeros, Ws, Ss, Zs, full, empty, block, step: T.Ref, bx: T.Ref, left: T.Ref):
        for i in T.serial(ask("iterations", block)):
            if left == 0:
                step, bx, left = ask("step", block, i), ask("n_block", block, i), ask("left", block, i)
            for part in each_part:
                T.mbarrier_wait_parity(empty[i % stages * parts + part], (i // stages & 1) ^ 1)
                load_weights[part](halves, scales, zeros, Ws, Ss, Zs, full, step, bx, i % stages)
                T.barrier_arrive(full[i % stages * parts + part])
            step, left = step + 1, left - 1

    @T.macro
    def rows_of_x(x, token_scales, Xs, As, full, empty, block, thread, step: T.Ref, top: T.Ref, left: T.Ref):
        for kind in kinds:
            for i in T.serial(*plan.run(T, kind, m, block)):
                if left == 0:
                    step, top, left = ask("step", block, i), ask("first_row", block, i), ask("left", block, i)
                for part in each_part:
                    T.mbarrier_wait_parity(empty[i % stages * parts + part], (i // stages & 1) ^ 1)
                    load_x[kind][part](x, Xs, full, step, top, i % stages)
                    if p.x_grouped and part == plan.scales_part:
                        T.call_extern(
                            "handle", plan.bring_token_scales(kind), T.address_of(As[i % stages, 0]), T.address_of(token_scales[0, 0]),
                            step, top, m, T.address_of(full[i % stages * parts + part]), thread,
                        )  # fmt: skip
                    else:
                        T.barrier_arrive(full[i % stages * parts + part])
                step, left = step + 1, left - 1

    return SimpleNamespace(weights=weights, x=rows_of_x)
