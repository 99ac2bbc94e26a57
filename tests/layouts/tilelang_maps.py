"""Prints, as JSON, TileLang's own fragment maps: {name: [[thread, value] of each element, row-major]}. Run in a process of its own."""

import json
from itertools import product

from tilelang.cuda.intrinsics.layout import mma_layout
from tilelang.cuda.intrinsics.macro.wgmma_macro_generator import TensorCoreIntrinEmitter
from tvm import tirx


def table(function, rows, cols):
    """A map (row, col) -> (thread, value)."""
    return [[int(x) for x in function(i, j)] for i, j in product(range(rows), range(cols))]


def inverse_table(function, rows, cols):
    """A map (thread, value) -> (row, col)."""
    owners = {tuple(map(int, function(t, v))): [t, v] for t, v in product(range(32), range(rows * cols // 32))}
    return [owners[cell] for cell in product(range(rows), range(cols))]


def fragment_table(fragment, rows, cols):
    return table(lambda i, j: (fragment.map_forward_thread([i, j])[0], fragment.map_forward_index([i, j])[0]), rows, cols)


def wgmma(dtype, accumulator, k, n):
    emitter = TensorCoreIntrinEmitter(
        a_dtype=dtype, b_dtype=dtype, accum_dtype=accumulator, a_transposed=False, b_transposed=True,
        block_row_warps=4, block_col_warps=1, warp_row_tiles=16, warp_col_tiles=n, chunk=k,
    )  # fmt: skip
    operand = tirx.decl_buffer((64, k), dtype, scope="local.fragment")
    result = tirx.decl_buffer((64, n), accumulator, scope="local.fragment")
    return {
        f"wgmma.m64nNk{k}.A": fragment_table(emitter.make_mma_load_layout(operand, "A"), 64, k),
        f"wgmma.m64n{n}.C": fragment_table(emitter.make_mma_store_layout(result), 64, n),
    }


maps = {
    "mma.m16n8k16.A": table(mma_layout.shared_16x16_to_mma_32x8_layout_sr_a, 16, 16),
    "mma.m16n8k16.Bx2": table(mma_layout.shared_16x16_to_mma_32x8_layout_sr_b, 16, 16),
    "mma.m16n8k32.A": table(mma_layout.shared_16x32_to_mma_32x16_layout_sr_a, 16, 32),
    "mma.m16n8k32.Bx2": table(mma_layout.shared_16x32_to_mma_32x16_layout_sr_b, 16, 32),
    "mma.m16n16.C": inverse_table(mma_layout.mma_store_32x8_to_shared_16x16_layout, 16, 16),
    "load mma.m16n8k16.A": inverse_table(mma_layout.mma_load_a_32x8_to_shared_16x16_layout, 16, 16),
    "load mma.m16n8k32.A": inverse_table(mma_layout.mma_load_a_32x16_to_shared_16x32_layout, 16, 32),
    "load mma.m16n8k16.Bx2": inverse_table(mma_layout.mma_load_b_32x8_to_shared_16x16_layout, 16, 16),
    "load mma.m16n8k32.Bx2": inverse_table(mma_layout.mma_load_b_32x16_to_shared_16x32_layout, 16, 32),
    **wgmma("float16", "float32", 16, 8),
    **wgmma("float16", "float32", 16, 64),
    **wgmma("int8", "int32", 32, 16),
}
print(json.dumps(maps))
