"""Names of what layers of any precision hold."""

from __future__ import annotations

import pytest

from tilebit.weights.any_kind import AnyKind


@pytest.mark.parametrize("least", range(2, 9))
def test_names_come_back(least: int) -> None:
    for most in range(least, 9):
        for bits in range(least, most + 1):
            kind = AnyKind(least, most, bits)
            assert AnyKind.parse(kind.name) == kind and AnyKind.parse(kind.store) == AnyKind.of(kind.widths)
    names = {AnyKind(least, most, bits).name for most in range(least, 9) for bits in range(least, most + 1)}
    assert len(names) == sum(most - least + 1 for most in range(least, 9))


def test_the_widest_is_not_said() -> None:
    assert [AnyKind(3, 8, 8).name, AnyKind(3, 8, 4).name, AnyKind(4, 4, 4).name] == ["w3-8a16_any", "w3-8a16_any@4", "w4a16_any"]
    assert AnyKind.parse("w4-4a16_any") == AnyKind.parse("w4a16_any") == AnyKind(4, 4, 4)


@pytest.mark.parametrize("name", ["", "any", "w4a16_g64", "w3-8a16", "w3-8a16_any@", "w3-8a8_any", "w3-8a16_any+w8a16_any", "w-8a16_any"])
def test_other_kinds_are_not_read(name: str) -> None:
    assert AnyKind.parse(name) is None


@pytest.mark.parametrize("name", ["w1a16_any", "w3-9a16_any", "w8-3a16_any", "w3-8a16_any@2", "w3-8a16_any@9", "w4a16_any@3"])
def test_widths_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"accepted: from 2 up to 8, set to one of them: 'w3-8a16_any'"):
        AnyKind.parse(name)
