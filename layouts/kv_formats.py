"""What a stored key or value means: the number formats of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OPERANDS = {"float": 16, "int8": 8, "int4": 4, "int2": 2, "fp8": 8}  # name: bits of a code
KEY_SCALES = {
    "float": ("none",),
    "fp8": ("head",),
    "int8": ("channel", "token"),
    "int4": ("channel", "token"),
    "int2": ("channel", "token"),
}
_SHORT = {"float": "16", "int8": "8", "int4": "4", "int2": "2", "fp8": "fp8"}


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How a cache stores keys and values: "float" (the model's 16-bit type), "int8", "int4", "int2"
    (unsigned codes) or "fp8" (e4m3).

    ``key_scales`` says which numbers share a key's parameters. Codes ``q`` of ``int*`` mean

        x = q * scale + zero        scale, zero: fp16

    one pair per "channel" over a group of 128 tokens (the default; BitDecoding's KC) or per "token"
    (KT) over the head's channels; ``int*`` values always have theirs per token. Since these are
    fp16, ``int*`` keeps numbers within fp16's range: a bfloat16 beyond 65504 makes what shares its
    parameters infinite or NaN without a word. "fp8" means ``x = e4m3 * head_scale``, one fp32 per
    head ("head"); "float" is the number itself ("none"). Keys and values are independent of each
    other. Raises ``ValueError`` for anything else.
    """

    key: str = "float"
    value: str = "float"
    key_scales: str = ""

    def __post_init__(self) -> None:
        for what, operand in (("key", self.key), ("value", self.value)):
            if operand not in OPERANDS:
                raise ValueError(f"{what} is {operand!r}; accepted: {', '.join(OPERANDS)}")
        accepted = KEY_SCALES[self.key]
        if self.key_scales == "":
            object.__setattr__(self, "key_scales", accepted[0])
        if self.key_scales not in accepted:
            raise ValueError(f"key_scales is {self.key_scales!r}; {self.key} keys accept: {', '.join(accepted)}")

    @property
    def key_bits(self) -> int:
        """Bits of a key's code: 2, 4, 8 (fp8 too) or 16."""
        return OPERANDS[self.key]

    @property
    def value_bits(self) -> int:
        """Bits of a value's code: 2, 4, 8 (fp8 too) or 16."""
        return OPERANDS[self.value]

    @property
    def value_scales(self) -> str:
        """What shares a value's parameters: "token", "head" (fp8) or "none" (float)."""
        return {"float": "none", "fp8": "head"}.get(self.value, "token")

    @property
    def has_head_scales(self) -> bool:
        """Some operand is fp8, so the cache has ``head_scales``, fp32 [2, heads_kv]: row 0 keys,
        row 1 values."""
        return "fp8" in (self.key, self.value)

    @property
    def name(self) -> str:
        """``kv16``, ``kv4_channel``, ``kvfp8``; of different precisions ``k8_channel_v4``,
        ``k16_v4``, ``kfp8_v16``."""
        scales = f"_{self.key_scales}" if self.key_scales in ("channel", "token") else ""
        if self.key == self.value:
            return f"kv{_SHORT[self.key]}{scales}"
        return f"k{_SHORT[self.key]}{scales}_v{_SHORT[self.value]}"

    @classmethod
    def all(cls) -> tuple[KVFormat, ...]:
        """Every format there is, those of one precision first."""
        keys = [(key, scales) for key in OPERANDS for scales in KEY_SCALES[key]]
        formats = [cls(key, value, scales) for key, scales in keys for value in OPERANDS]
        return tuple(sorted(formats, key=lambda f: f.key != f.value))

    @classmethod
    def from_name(cls, name: str) -> KVFormat:
        """The inverse of ``name``; raises ``ValueError`` with examples for anything else."""
        for candidate in cls.all():
            if candidate.name == name:
                return candidate
        raise ValueError(
            f"unknown KV format {name!r}; accepted are names such as {', '.join(f.name for f in cls.all()[:8])}, 'k8_channel_v4'"
        )

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "value": self.value, "key_scales": self.key_scales}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> KVFormat:
        return cls(key=data["key"], value=data["value"], key_scales=data["key_scales"])
