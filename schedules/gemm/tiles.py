"""The schedules of ``gemm_wgmma`` and ``gemm_mma`` that are worth trying for a workload: tiles that
fit m, grids that fill the SMs.

What won on an H200 (4 bits, groups of 128, seven shapes): m = 32: 256 x 32 by eight warps, or 192 x
32 by twelve in splits; m = 64: 256 x 64, or 128 x 64 and 192 x 64 in splits; m = 128: 256 x 128, or
192 x 128 in splits (where pairs of 64 rows have an SM a block, these: 4096 x 4096); m = 256: 128 x
128, 192 x 128 or 128 x 256; from 512 on 128 x 256 or 256 x 128 by eight warps (6144 x 4096: 192 x
128), and where the last wave would be short stream_k, row tiles visited in groups of four or eight
at m = 4096."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from ..schedule import Schedule, in_turn
from ..target import Target
from .joined import n_blocks
from .waves import TAILS, cut_places
from .workload import Workload

Legal = Callable[[Workload, Schedule, Target], list[str]]

BLOCK_M = {"gemm_wgmma": (16, 32, 64, 128, 256), "gemm_mma": (8, 16, 32, 64, 128)}
EXACT_M = 65  # from this many rows on tiles of gemm_wgmma are as high as m asks: multiples of 16 rows
LEAST_EXACT, MOST_EXACT = 96, 240  # of these tiles
MOST_ROW_TILES = 8  # for more rows any height leaves little over
ROOM = 0.9  # of the places of whole waves that such tiles must fill
# (block_n, num_warps), the likely winner first. Sixteen warps on 256 rows gain nothing (28672 x
# 4096, m = 64: 36.8 us, eight 36.1). Twelve on 192 fill a wave where others do not (6144 x 4096, m
# = 512, 128 tiles of 128 columns: 65,600 cycles, 128 x 256 84,600, H200).
TILES = {"gemm_wgmma": ((128, 8), (256, 8), (128, 4), (64, 4), (192, 12)), "gemm_mma": ((128, 8), (256, 16), (64, 4))}
BLOCK_K = (128, 64, 32)
BLOCK_K_INT8 = (256, 128, 64, 32)
# Of these, how many legal ones are tried: half as deep was 3 to 32 % slower with wgmma (H200, m =
# 64 and 4096); mma.sync's targets have less shared memory and may want more stages instead.
BLOCK_KS = {"gemm_wgmma": 1, "gemm_mma": 2}
BLOCK_KS_INT8 = 2  # deep and long steps are close
MIN_BLOCKS = (1, 2, 4)
# Computing warps of an SM: four dequantize while four multiply. Four are tried, too, where pairs of
# blocks that share the narrowest tiles would have an SM each (wgmma-narrow-pairs.md).
FEWEST_WARPS = 8
STAGES = range(8, 1, -1)
SHALLOWER, SHALLOWER_M = 4, range(17, 129)  # stages that are tried too for so many rows: within 4 % of the deepest, before or behind
MAX_SPLIT_K = 16
FULL = 0.9  # of the places of whole waves: a grid that fills as many needs no further split
GAIN = 0.05  # and a further split must fill so much more
# Strips of the tiles of a last wave; of x in 16 bits, where there are not many whole ones before it.
# Beside stream_k, 128 x 256, in alternation (H200): 28672 x 4096, m = 512: 193.0 us where stream_k
# takes 197.7; 10240 x 8192, m = 1024: 260.1 and 265.2, but m = 512, a wave and a fifth: 141.2 and
# 133.0. Of x in 8 bits, beside a block a tile, after 7, 10, 14 and 27 waves of 128 x 256: 0.94, 0.95,
# 0.96 and 0.89 times as long (results/notes/power-in-turn.md).
TAIL_WAVES = 8
# Columns of a tile of 8-bit x that stream_k shares. Kernels of more spill, but for one slab a warpgroup
# of one or two (five formats, six heights, compiled for sm_90a; not where groups are summed, or two
# blocks have an SM).
SHARED_INT8_M = 128
NARROW = 64  # rows of W of the narrowest tile
# A last tile may lack this part of n where the grid is so many waves: 10240 x 8192, m = 256, is one
# of 108 tiles of 192 x 128, 74.6 us in alternation, the best other 76.7 (H200).
WASTED, WASTED_WAVES = 16, 1
JOINED_M = 64  # from this m on nibbles of bytes are joined, too: below, a weight's bytes decide, which are as many
MANY_ROWS = 256  # from this m on it was never the fastest; from here on blocks that share x are tried
RASTER_M = 1024  # from this m on row tiles are visited in groups too
FEW_RASTER_M = 129  # and, of x in 8 bits, from this on all at once, where half of the cache does not hold the weight
RASTERS = (0, 4, 8)  # of row tiles; of 28672 x 4096, m = 4096, 8 bits: 853 us, 748 and 737, 16 743 (H200)


def tile_candidates(program: str, workload: Workload, target: Target, legal: Legal) -> list[Schedule]:
    """Legal schedules of ``program``, tile shapes in turn so that a cut of the list leaves some of
    each."""
    shapes: dict[tuple[int, ...], list[Schedule]] = {}
    large = workload.format.x and workload.n * workload.k * workload.format.bits // 8 > target.l2 // 2
    for base in _shapes(program, workload, target, legal):
        m_tiles = -(-workload.m // base.block_m)
        highest = next((raster for raster in RASTERS[1:] if raster >= m_tiles), RASTERS[-1]) if m_tiles > 1 else 0
        grids = [replace(base, split_k=split) for split in _splits(workload, base, target)]
        shares = program == "gemm_wgmma" and workload.m > BLOCK_M[program][0] and _may_share(workload, base)
        if shares:
            grids.insert(1, replace(base, stream_k=True))
        if program == "gemm_wgmma" and workload.m >= MANY_ROWS:
            grids += [replace(base, tail=tail) for tail in _tails(workload, base, target, shares)]
        group = shapes.setdefault((base.block_n, base.block_m, base.num_warps, base.min_blocks, base.joined), [])
        for grid, raster, cluster in product(grids, RASTERS, (1, 2)):
            at_once = large and workload.m >= FEW_RASTER_M and raster >= m_tiles and grid.split_k == cluster == 1
            wanted = workload.m >= (RASTER_M if raster else 0) and workload.m >= (MANY_ROWS if cluster > 1 else 0)
            if raster > highest or not (wanted or at_once):
                continue
            schedule = replace(grid, raster=raster, cluster=cluster)
            if not legal(workload, schedule, target):
                group.append(schedule)
    return in_turn(shapes.values())


def _may_share(workload: Workload, base: Schedule) -> bool:
    """Whether the kernel that shares a last wave's tiles has registers for it."""
    if not workload.format.x:
        return True
    warpgroups = base.num_warps // 4
    one_slab = warpgroups <= 2 and base.block_n == warpgroups * NARROW
    return base.min_blocks == 1 and (base.block_m <= SHARED_INT8_M or (one_slab and not workload.format.step_sums))


def _tails(workload: Workload, base: Schedule, target: Target, shares: bool) -> list[int]:
    """The cut into strips that leaves the shortest last wave, if there is one that is a good part
    of the time. Of x in 8 bits tiles of several waves, which are not shared either, are dealt out so
    where nothing is cut: blocks that take one after another load the next while they store."""
    tiles, places = n_blocks(workload, base) * -(-workload.m // base.block_m), target.units * base.min_blocks
    waves = {tail: -(-cut_places(tiles, places, tail) * tail // places) / tail for tail in TAILS}
    found = [tail for tail in TAILS if 0 < waves[tail] < 1]
    shortest = sorted(found, key=waves.__getitem__)[:1]
    if workload.format.x:
        return shortest or ([TAILS[0]] if tiles > places and not shares else [])
    return shortest if tiles < TAIL_WAVES * places else []


def _shapes(program: str, workload: Workload, target: Target, legal: Legal) -> Iterator[Schedule]:
    """Legal tiles and pipelines, without a split: as deep as shared memory allows and, for some
    rows, SHALLOWER too."""
    n_pad = -(-workload.n // NARROW) * NARROW
    sizes = product(_block_ms(program, workload.m), MIN_BLOCKS)
    joins = workload.nibbles and workload.m >= JOINED_M
    for (block_m, min_blocks), (block_n, num_warps) in product(sizes, TILES[program]):
        odd = n_pad % TILES[program][0][0] != 0  # the narrowest tile wastes nothing
        lacking, tiles = -n_pad % block_n, -(-n_pad // block_n) * -(-workload.m // block_m)
        wasteful = lacking and (lacking * WASTED > n_pad or tiles > WASTED_WAVES * target.units * min_blocks)
        if wasteful and not joins:
            continue
        pairs = program == "gemm_wgmma" and block_n == NARROW and target.units / 2 < 2 * tiles <= target.units
        if not odd and ((num_warps * min_blocks < FEWEST_WARPS and not pairs) or (block_n == NARROW and workload.m >= MANY_ROWS)):
            continue
        left = BLOCK_KS_INT8 if workload.format.x else BLOCK_KS[program]
        for block_k in BLOCK_K_INT8 if workload.format.x else BLOCK_K:
            shallowest = Schedule(program, block_n, block_m, block_k, STAGES[-1], num_warps, 1, min_blocks)
            if not left or legal(workload, shallowest, target):  # a deeper one needs more of all
                continue
            left -= 1
            for joined in (False,) * (not wasteful) + (True,) * joins:
                depths = (replace(shallowest, num_stages=depth, joined=joined) for depth in STAGES)
                deepest = next((s for s in depths if not legal(workload, s, target)), None)
                if deepest is None:  # a tile of bytes takes more shared memory, and not every tile can be one
                    continue
                yield deepest
                shallower = replace(deepest, num_stages=SHALLOWER)
                if workload.m in SHALLOWER_M and deepest.num_stages > SHALLOWER and not legal(workload, shallower, target):
                    yield shallower


def _block_ms(program: str, m: int) -> list[int]:
    """The smallest tile that covers m, and half of it from 128 rows up (twice the blocks, half the
    accumulators). A quarter never won (m = 256, H200: 4096 x 4096 19.1 us, of a half 16.2; 6144 x
    4096 28.7, of a half in two parts 21.9). Of gemm_wgmma, for more than 64 rows, also the lowest
    tiles that cover m by as many as there are then (5120 x 5120, m = 300, H200: 42.2 us by 256
    rows, 31.2 by 160)."""
    tiles = BLOCK_M[program]
    fitting = next((b for b in tiles if b >= m), tiles[-1])
    usual = [fitting, fitting // 2] if fitting >= 128 else [fitting]
    if program != "gemm_wgmma" or m < EXACT_M:
        return usual
    exact = [-(-m // (16 * count)) * 16 for count in range(1, MOST_ROW_TILES + 1)]
    return list(dict.fromkeys([*usual, *(b for b in exact if LEAST_EXACT <= b <= MOST_EXACT)]))


def _splits(workload: Workload, base: Schedule, target: Target) -> list[int]:
    """The fullest grids of ``base`` with the fewest parts, at most two of them, the fuller one
    first; then, one block an SM, no split."""
    tiles = n_blocks(workload, base) * -(-max(workload.m, 1) // base.block_m)
    steps = -(-workload.k // base.block_k)
    places = target.units * base.min_blocks
    found, best = [], 0.0
    for split in range(1, min(MAX_SPLIT_K, steps, max(2, 2 * -(-places // tiles))) + 1):
        if split > 1 and base.program == "gemm_mma" and steps % split:
            continue  # its pipeline needs parts of equal length
        blocks = tiles * split
        full = blocks / (-(-blocks // places) * places)
        if not found or full > best + GAIN:
            found, best = [split, *found[:1]], full
        if best >= FULL:
            break
    return found if base.min_blocks > 1 or 1 in found else [*found, 1]  # where k is short, parts are not worth their adding up
