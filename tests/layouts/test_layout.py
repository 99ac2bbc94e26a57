"""The layout algebra against its functional definition, over all small layouts: no wrong result, and no refusal without its reason."""

from functools import cache
from itertools import product as pairs

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilebit.layouts.layout import Layout, coalesce, complement, compose, divide, inverse, join, left_inverse, product, right_inverse


def small_layouts(sizes, strides, rank):
    modes = list(pairs(sizes, strides))
    yield from (Layout(*mode) for mode in modes)
    for several in pairs(modes, repeat=rank) if rank > 1 else ():
        yield Layout(tuple(s for s, _ in several), tuple(d for _, d in several))


SMALL = [
    *small_layouts((2, 3, 4), range(5), 2),
    *small_layouts((2,), (1, 2, 4), 3),
    *(Layout(1, 0), Layout(1, 3), Layout((3, 1), (1, 2)), Layout((1, 4), (9, 3))),
    *(Layout(((2, 2), 3), ((1, 6), 2)), Layout((2, (3, 2)), (6, (1, 3))), Layout((5, 2), (1, 6)), Layout(12, 1)),
    *(Layout((2, 2, 2), (1, 1, 3)), Layout((2, 2, 3), (1, 5, 2)), Layout((2, 2, 4), (1, 5, 2))),  # inverses longer than one mode, not whole
]
TABLE = {layout: tuple(layout.offsets().tolist()) for layout in SMALL}


def factorizations(n):
    yield (n,)
    for first in range(2, n):
        if n % first == 0:
            yield from ((first, *rest) for rest in factorizations(n // first))


@cache
def is_layout(table):
    """Whether some flat layout has this table: tries every shape; the strides are then forced."""
    for shape in factorizations(len(table)):
        steps = np.cumprod((1, *shape))[:-1]
        strides = [table[step] if s > 1 else 0 for s, step in zip(shape, steps, strict=True)]
        if Layout(shape, tuple(map(int, strides))).offsets().tolist() == list(table):
            return True
    return False


def refines(shape, coarse):
    """Whether every coordinate of ``coarse`` is one of ``shape``: the same tree, leaves possibly split further."""
    if isinstance(coarse, tuple):
        return isinstance(shape, tuple) and len(shape) == len(coarse) and all(map(refines, shape, coarse))
    return Layout.compact(shape).size == coarse


def attempt(operation, *operands):
    try:
        return operation(*operands)
    except ValueError as error:
        assert all(str(operand) in str(error) for operand in operands if isinstance(operand, Layout))
        return None


def test_evaluation_is_the_colexicographic_inner_product():
    layout = Layout((4, (2, 3)), (5, (1, 100)))
    for index in range(layout.size):
        a, b, c = index % 4, index // 4 % 2, index // 8
        assert layout(index) == layout(a, index // 4) == layout(a, (b, c)) == 5 * a + b + 100 * c
    assert (layout(np.arange(24)) == layout.offsets()).all()
    assert (layout.size, layout.cosize, str(layout)) == (24, 217, "(4,(2,3)):(5,(1,100))")
    assert eval(repr(layout)) == layout
    assert (Layout.compact((2, (3, 4))).offsets() == np.arange(24)).all()


MALFORMED = [((2, 3), 1), (2, (1,)), ((), ()), (0, 1), (2, -1), ((2, (3,)), (1, 2)), (2.0, 1), ((2, 0), (1, 1))]


@pytest.mark.parametrize("shape, stride", MALFORMED)
def test_malformed_layouts_are_refused(shape, stride):
    with pytest.raises(ValueError, match="accepted are a shape"):
        Layout(shape, stride)


@pytest.mark.parametrize("coord", [(12,), (-1,), (4, 0), (0, 3), (0, 0, 0), (0, (0, 0)), (np.array([0, 12]),)])
def test_coordinates_outside_of_the_domain_are_refused(coord):
    with pytest.raises(ValueError, match="coordinate"):
        Layout((4, 3), (1, 4))(*coord)


def test_coalesce_is_the_same_function_in_unique_form():
    unique = {}
    for layout in SMALL:
        flat = coalesce(layout)
        assert tuple(flat.offsets()) == TABLE[layout]
        assert unique.setdefault(TABLE[layout], flat) == flat


@pytest.mark.slow
def test_compose_over_all_pairs():
    found = 0
    for a, b in pairs(SMALL, SMALL):
        if max(TABLE[b]) >= a.size:
            if a.size < 3:
                assert attempt(compose, a, b) is None
            continue
        expected = [TABLE[a][offset] for offset in TABLE[b]]
        result = attempt(compose, a, b)
        if result is not None:
            found += 1
            assert result.offsets().tolist() == expected, (a, b, result)
            assert refines(result.shape, b.shape), (a, b, result)
            continue
        # refused: then, with b's modes, no layout is that function
        sizes = [s for s, _ in b.modes]
        steps = np.cumprod([1, *sizes])[:-1]
        leaves = [tuple(expected[i * step] for i in range(s)) for s, step in zip(sizes, steps, strict=True)]
        summed = [sum(leaf[i // step % s] for leaf, s, step in zip(leaves, sizes, steps, strict=True)) for i in range(b.size)]
        assert not (summed == expected and all(is_layout(leaf) for leaf in leaves)), (a, b)
    assert found > 10_000


def test_compose_names_operands_and_reason():
    with pytest.raises(ValueError, match=r"compose 4:1 with 3:2: offsets of the second reach 4"):
        compose(Layout(4, 1), Layout(3, 2))
    with pytest.raises(ValueError, match=r"compose \(2,3\):\(1,10\) with 3:1: along mode 3:1"):
        compose(Layout((2, 3), (1, 10)), Layout(3, 1))
    with pytest.raises(ValueError, match=r"do not add up"):
        compose(Layout((2, 2), (1, 10)), Layout((2, 2), (1, 1)))


def test_right_inverse_is_the_longest_there_is():
    for layout in SMALL:
        table = TABLE[layout]
        result = right_inverse(layout)
        assert [table[i] for i in result.offsets()] == list(range(result.size))
        first = [table.index(offset) if offset in table else None for offset in range(max(table) + 1)]
        prefix = first[: first.index(None)] if None in first else first
        longest = max(length for length in range(1, len(prefix) + 1) if is_layout(tuple(prefix[:length])))
        assert result.size == longest, layout


def test_inverse_exists_for_permutations_only():
    permutations = 0
    for layout in SMALL:
        result = attempt(inverse, layout)
        assert (result is not None) == (sorted(TABLE[layout]) == list(range(layout.size)))
        if result is not None:
            permutations += 1
            assert [result(offset) for offset in TABLE[layout]] == list(range(layout.size))
            assert [layout(index) for index in result.offsets()] == list(range(layout.size))
    assert permutations > 30


def complements(extent, size):
    """All images (as bit masks) of layouts of ``size`` coordinates within 0 .. extent - 1."""
    masks = set()
    for shape in factorizations(size):
        for strides in pairs(range(1, extent), repeat=len(shape)):
            offsets = Layout(shape, strides).offsets()
            if offsets.max() < extent:
                masks.add(sum(1 << int(o) for o in set(offsets.tolist())))
    return masks


def test_complement_exists_exactly_if_some_layout_fills_the_rest():
    candidates = {(e, size): complements(e, size) for e in range(1, 13) for size in range(1, e + 1) if e % size == 0}
    found = 0
    for layout, extent in pairs(SMALL, range(1, 13)):
        table = TABLE[layout]
        result = attempt(complement, layout, extent)
        if result is not None:
            found += 1
            assert sorted(join(layout, result).offsets()) == list(range(extent))
            strides = [d for s, d in result.modes if s > 1]
            assert strides == sorted(strides) and coalesce(result) == result
        elif extent % layout.size == 0 and len(set(table)) == layout.size and max(table) < extent:
            full = (1 << extent) - 1
            for mask in candidates[extent, extent // layout.size]:
                shifted = [mask << offset for offset in table]
                assert sum(shifted) != full, (layout, extent)
    assert found > 100


def test_left_inverse_undoes_the_layout_where_a_complement_exists():
    found = 0
    for layout in SMALL:
        result = attempt(left_inverse, layout)
        if result is None:
            assert all(attempt(complement, layout, extent) is None for extent in range(1, 3 * layout.cosize))
            continue
        found += 1
        assert [result(offset) for offset in TABLE[layout]] == list(range(layout.size))
    assert found > 40


def test_divide_and_product_over_all_pairs():
    divided = multiplied = 0
    for a, b in pairs(SMALL, SMALL[::3]):
        quotient = attempt(divide, a, b)
        rest = attempt(complement, b, a.size)
        if quotient is not None:
            divided += 1
            assert rest is not None and sorted(quotient.offsets()) == sorted(TABLE[a])
            assert (quotient.offsets() == a((b.offsets()[None, :] + rest.offsets()[:, None]).ravel())).all()
        elif rest is not None:
            assert attempt(compose, a, join(b, rest)) is None
        if a.size > 8 or b.cosize > 8:
            continue
        copies = attempt(product, a, b)
        if copies is not None:
            multiplied += 1
            free = complement(a, a.size * b.cosize)
            assert (copies.offsets() == (a.offsets()[None, :] + free(b.offsets())[:, None]).ravel()).all()
            if len(set(TABLE[b])) == b.size:
                assert np.unique(copies.offsets()).size == copies.size
    assert divided > 1000 and multiplied > 1000


def test_divide_gives_tiles():
    assert divide(Layout((8, 6), (6, 1)), Layout(4, 1)) == Layout((4, (2, 6)), (6, (24, 1)))
    with pytest.raises(ValueError, match=r"5:1 has no complement in 0 .. 23"):
        divide(Layout.compact(24), Layout(5, 1))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_larger_permutations_invert_divide_and_compose(data):
    """Nested permutations of up to some hundred indices: always invertible, divisible by their own modes, and closed under composition."""
    shape = tuple(data.draw(st.lists(st.sampled_from((2, 3, 4)), min_size=2, max_size=5)))
    place = data.draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    step = 1
    for mode in place:
        strides[mode], step = step, step * shape[mode]
    cut = data.draw(st.integers(1, len(shape) - 1))
    layout = join(Layout(shape[:cut], tuple(strides[:cut])), Layout(shape[cut:], tuple(strides[cut:])))
    back = inverse(layout)
    assert coalesce(compose(back, layout)) == coalesce(compose(layout, back)) == coalesce(Layout.compact(layout.size))
    tile = Layout(layout.size // shape[-1], 1)
    tiles = divide(layout, tile)
    assert (tiles.offsets() == layout.offsets()).all() and tiles(0, 1) == strides[-1]
    other = Layout(tuple(reversed(shape)), tuple(reversed(strides)))
    assert (inverse(other).offsets()[other.offsets()] == np.arange(other.size)).all()
