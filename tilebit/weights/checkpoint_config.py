"""What a checkpoint's quantization config says of each layer: AutoAWQ's, GPTQModel's,
compressed-tensors', gpt-oss's, QServe's and Hugging Face's blocks of fp8, brought to one form.

compressed-tensors configs are parsed by that library where it is installed (presets, defaults,
validation, target matching); without it, the JSON fields are read as they stand.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NoReturn, TypeGuard

from ..layouts.formats import BITS, GROUP_SIZES, PER_CHANNEL, STEP_K, GemmFormat, QuantFormat

FAMILIES = ("awq", "gptq", "compressed-tensors", "mxfp4", "qserve", "fp8")
GPTQ_FORMATS = ("gptq", "gptq_v2")
# Formats of compressed-tensors that hold 4-bit floats. Where they quantize activations too, that is
# left out: their weights are what they are, and products with 16-bit activations are what other
# libraries run on hardware without 4-bit ones.
_FLOATS = {"mxfp4-pack-quantized": "w4a16_mxfp4", "nvfp4-pack-quantized": "w4a16_nvfp4"}
_INT8, _FP8 = PLAIN = ("int-quantized", "float-quantized")  # formats of compressed-tensors whose weights are not packed
_PACKED = ("pack-quantized", *_FLOATS)
_ACCEPTED = (*_PACKED, *PLAIN)
_ACTIVATIONS = (
    "quantizes its activations too; accepted: weight-only schemes such as W4A16, W8A16, or W8A8 of int8 or fp8 (formats "
    "'int-quantized' and 'float-quantized', activations dynamic per token): quantize the model again with one of those"
)
# Of int8 weights and activations: what each field must be (None: left out says the same as the first).
_INT8_WEIGHTS = {"type": ("int",), "num_bits": (8,), "symmetric": (True,), "strategy": ("channel", "tensor"), "group_size": (None, -1)}
_INT8_ACTIVATIONS = {"type": ("int",), "num_bits": (8,), "symmetric": (True,), "strategy": ("token",), "dynamic": (True,)}
# Of e4m3 ones, for each channel or for blocks.
_FP8_WEIGHTS = {"type": ("float",), "num_bits": (8,), "symmetric": (True,), "strategy": ("channel", "tensor", "block")}
_FP8_ACTIVATIONS = {"type": ("float",), "num_bits": (8,), "symmetric": (True,), "strategy": ("token",), "dynamic": (True,)}
_FP8_BLOCK, _FP8_GROUPS = {"block_structure": ([STEP_K, STEP_K],)}, {"strategy": ("group",), "group_size": (STEP_K,)}
_DEFAULTS = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "tensor", "dynamic": False, "group_size": None}
QSERVE_METHODS = ("qserve", "qoq")  # as its own library and as sglang calls it
QSERVE_GROUPS = {PER_CHANNEL: "w4a8_channel_asym", 128: "w4a8_lqq_g128"}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or not be trusted: what was got, what is accepted, what to
    do."""


@dataclass(frozen=True, slots=True)
class LayerScheme:
    """How one layer is quantized: the ``storage`` of ``layouts.checkpoints``, one of ``PLAIN``, "fp8" or
    "qserve", the format, and whether its columns are in act-order (None: not declared).
    """

    storage: str
    format: GemmFormat
    desc_act: bool | None


Schemes = Callable[[str], LayerScheme]


def parse_quantization(config: Mapping[str, Any], checkpoint_format: str | None = None) -> tuple[str, Schemes]:
    """(family, layer name -> ``LayerScheme``) of a quantization config with a ``quant_method``.

    ``checkpoint_format`` ("gptq", "gptq_v2") overrides what a GPTQ config says of its zero points.
    Raises ``CheckpointError`` for methods, versions, bits and group sizes that are not supported:
    for those of the whole checkpoint now, for those of one layer when its scheme is asked for.
    """
    method = config.get("quant_method")
    check_gptq_format(checkpoint_format)
    if checkpoint_format is not None and method != "gptq":
        raise CheckpointError(
            f"checkpoint_format {checkpoint_format!r} was given for a {method!r} checkpoint; only GPTQ has it: leave it out"
        )
    if method == "awq":
        return "awq", _awq(config)
    if method == "gptq":
        return "gptq", _gptq(config, checkpoint_format)
    if method == "compressed-tensors":
        return "compressed-tensors", _compressed_tensors(config)
    if method == "mxfp4":
        return "mxfp4", _gpt_oss(config)
    if method == "fp8":
        return "fp8", _fp8_blocks(config)
    if method in QSERVE_METHODS:
        return "qserve", _qserve(config)
    _refuse("quant_method", method, FAMILIES, "quantize the model with AutoAWQ, GPTQModel or llm-compressor")


def check_gptq_format(checkpoint_format: str | None) -> None:
    """Raise ``CheckpointError`` unless this override is None or one of ``GPTQ_FORMATS``."""
    if checkpoint_format is not None and checkpoint_format not in GPTQ_FORMATS:
        _refuse("checkpoint_format", checkpoint_format, GPTQ_FORMATS, "pass one of these, or nothing to trust the config")


def quant_format(what: str, bits: Any, group_size: Any, symmetric: Any) -> GemmFormat:
    """A ``QuantFormat`` from untrusted fields; raises ``CheckpointError`` naming ``what`` holds
    them."""
    if not _among(bits, BITS):
        _refuse(f"{what}: bits", bits, BITS, "requantize the model to one of these")
    if not _among(group_size, GROUP_SIZES):
        _refuse(f"{what}: group_size", group_size, GROUP_SIZES, "requantize the model with one of these (-1: one group per output channel)")
    if not isinstance(symmetric, bool):
        _refuse(f"{what}: symmetric", symmetric, (True, False), "repair the config")
    return QuantFormat(bits, group_size, symmetric)


def _awq(config: Mapping[str, Any]) -> Schemes:
    version = str(config.get("version", config.get("format", "gemm"))).lower()
    if version != "gemm":
        _refuse("AWQ version", version, ("gemm",), "its weights are laid out for another kernel; quantize again with version='GEMM'")
    bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    if bits != 4:
        _refuse("AWQ bits", bits, (4,), "the gemm version exists at 4 bits only; repair the config")
    scheme = LayerScheme("awq", quant_format("AWQ config", bits, group, not _flag(config, "zero_point", True)), False)
    return lambda name: scheme


def _gptq(config: Mapping[str, Any], override: str | None) -> Schemes:
    declared = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if config.get("is_marlin_format"):
        declared = "marlin"
    storage = override or declared
    if storage not in GPTQ_FORMATS:
        _refuse(
            "GPTQ checkpoint_format",
            storage,
            GPTQ_FORMATS,
            "its weights are laid out for one kernel; save the model again as 'gptq' or 'gptq_v2'",
        )
    if config.get("pack_dtype", "int32") not in ("int32", None):
        _refuse("GPTQ pack_dtype", config["pack_dtype"], ("int32",), "save the model again with pack_dtype='int32'")
    base = {
        "bits": config.get("bits"),
        "group_size": config.get("group_size"),
        "sym": _flag(config, "sym", True),
        "desc_act": _flag(config, "desc_act", False),
    }
    dynamic = _dynamic(config.get("dynamic") or {})

    def scheme(name: str) -> LayerScheme:
        fields = base
        for pattern, overrides in dynamic:
            if pattern.match(name):
                fields = base | {key: value for key, value in overrides.items() if key in base}
                break
        format = quant_format(f"GPTQ config for {name}", fields["bits"], fields["group_size"], fields["sym"])
        return LayerScheme(storage, format, _flag(fields, "desc_act", False))

    quant_format("GPTQ config", base["bits"], base["group_size"], base["sym"])
    return scheme


def _dynamic(given: Any) -> list[tuple[re.Pattern[str], Mapping[str, Any]]]:
    """What a GPTQ config's ``dynamic`` says of layers by a pattern of their names; those that it
    leaves out ("-:") hold nothing to be read."""
    if not isinstance(given, Mapping) or not all(isinstance(pattern, str) for pattern in given):
        _refuse("GPTQ dynamic", given, ("an object of patterns",), "repair the config")
    found = []
    for pattern, overrides in given.items():
        if pattern.startswith("-:"):
            continue
        if not isinstance(overrides, Mapping):
            _refuse(f"GPTQ dynamic {pattern!r}", overrides, ("an object of fields",), "repair the config")
        found.append((_pattern(f"GPTQ dynamic {pattern!r}", pattern.removeprefix("+:")), overrides))
    return found


def _compressed_tensors(config: Mapping[str, Any]) -> Schemes:
    groups, storage_format = _config_groups(config), config.get("format")
    if storage_format not in (*_ACCEPTED, "mixed-precision"):
        if any(group.get("input_activations") for group in groups):
            raise CheckpointError(f"compressed-tensors format is {storage_format!r}, which {_ACTIVATIONS}")
        _refuse(
            "compressed-tensors format",
            storage_format,
            _ACCEPTED,
            "save the model again with quantization_format='pack-quantized'",
        )
    if config.get("quantization_status", "compressed") != "compressed":
        _refuse(
            "compressed-tensors quantization_status",
            config["quantization_status"],
            ("compressed",),
            "save the model again with save_compressed=True",
        )
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping):
        _refuse("compressed-tensors sparsity_config", sparsity, ("an object",), "repair the config")
    sparsity = sparsity.get("format", "dense")
    if sparsity != "dense":
        _refuse("compressed-tensors sparsity format", sparsity, ("dense",), "save the model again without sparse compression")

    def scheme(name: str) -> LayerScheme:
        group = _group_of(name, groups)
        packing = group.get("format") or storage_format
        if packing not in _ACCEPTED:
            if group.get("input_activations"):
                raise CheckpointError(f"compressed-tensors format of {name} is {packing!r}, which {_ACTIVATIONS}")
            _refuse(f"compressed-tensors format of {name}", group.get("format"), _ACCEPTED, "save the model again in it")
        if packing == _INT8:
            _check_plain(name, group, _INT8, {"weights": _INT8_WEIGHTS, "input_activations": _INT8_ACTIVATIONS})
            return LayerScheme(_INT8, GemmFormat.parse("w8a8_channel"), None)
        if packing == _FP8:
            return _fp8_scheme(name, group)
        if packing in _FLOATS:
            return _float_scheme(name, GemmFormat.parse(_FLOATS[packing]), group.get("weights") or {})
        if group.get("input_activations"):
            raise CheckpointError(f"{name} {_ACTIVATIONS}")
        weights = group.get("weights") or {}
        if weights.get("type", "int") != "int":
            _refuse(f"{name}: type", weights["type"], ("int",), "use an integer scheme such as W4A16")
        size, strategy = weights.get("group_size"), weights.get("strategy")
        strategy = strategy or ("tensor" if size is None else "channel" if size == PER_CHANNEL else "group")
        if strategy not in ("group", "channel"):
            _refuse(f"{name}: strategy", strategy, ("group", "channel"), "use one of these")
        format = quant_format(name, weights.get("num_bits"), PER_CHANNEL if strategy == "channel" else size, weights.get("symmetric", True))
        return LayerScheme("compressed-tensors", format, weights.get("actorder") in ("group", "dynamic"))

    return scheme


def _check_plain(name: str, group: Mapping[str, Any], storage: str, expected: Mapping[str, Mapping[str, tuple[Any, ...]]]) -> None:
    """Raise ``CheckpointError`` for weights and activations of 8 bits that are not what is ``expected``
    of each: x is quantized at a call."""
    for part, fields in expected.items():
        given = group.get(part)
        if not given:
            raise CheckpointError(
                f"{name}: format is {storage!r} but its {part} are not quantized; accepted in that format: weights and activations of 8 "
                "bits; weights alone are read as 'pack-quantized': save the model again in it"
            )
        for field, accepted in fields.items():
            value = _DEFAULTS.get(field) if given.get(field) is None else given[field]
            if isinstance(value, bool) != isinstance(accepted[0], bool) or value not in accepted:
                _refuse(f"{name}: {field} of {part}", value, accepted, f"format {storage!r} has no other here; quantize the model again so")
    if group.get("output_activations"):
        raise CheckpointError(f"{name} quantizes its outputs; accepted: weights and input activations alone: quantize the model again so")


def _fp8_scheme(name: str, group: Mapping[str, Any]) -> LayerScheme:
    """e4m3 weights with a scale for each output channel or for all and x quantized row by row; or for
    each 128 x 128 of them, and each 128 values of a row of x."""
    blocks = (group.get("weights") or {}).get("strategy") == "block"
    weights = _FP8_WEIGHTS | (_FP8_BLOCK if blocks else {})
    activations = _FP8_ACTIVATIONS | (_FP8_GROUPS if blocks else {})
    _check_plain(name, group, _FP8, {"weights": weights, "input_activations": activations})
    return LayerScheme(_FP8, GemmFormat.parse("w8a8_fp8_g128" if blocks else "w8a8_fp8"), None)


def _fp8_blocks(config: Mapping[str, Any]) -> Schemes:
    """DeepSeek's, as transformers' FineGrainedFP8Config has them."""
    block = config.get("weight_block_size")
    if not isinstance(block, list | tuple) or list(block) != [STEP_K, STEP_K]:
        _refuse("fp8 weight_block_size", block, ([STEP_K, STEP_K],), "quantize the model again so")
    if config.get("activation_scheme", "dynamic") != "dynamic":
        _refuse("fp8 activation_scheme", config["activation_scheme"], ("dynamic",), "quantize the model again so")
    if config.get("fmt", "e4m3") != "e4m3":
        _refuse("fp8 fmt", config["fmt"], ("e4m3",), "quantize the model again so")
    return _but_for_kept(config, LayerScheme("fp8", GemmFormat.parse("w8a8_fp8_g128"), None), "blocks of fp8")


def _qserve(config: Mapping[str, Any]) -> Schemes:
    bits = next((config[field] for field in ("wbits", "w_bit", "bits", "weight_bits") if field in config), None)
    if not _among(bits, (4,)):
        _refuse("QServe wbits", bits, (4,), "8-bit weights are read from compressed-tensors' 'int-quantized' W8A8")
    group = config.get("group_size")
    if not _among(group, tuple(QSERVE_GROUPS)):
        _refuse("QServe group_size", group, tuple(QSERVE_GROUPS), "quantize the model again with one of these (-1: per channel)")
    scheme = LayerScheme("qserve", GemmFormat.parse(QSERVE_GROUPS[group]), None)
    return lambda name: scheme


def _float_scheme(name: str, format: GemmFormat, weights: Mapping[str, Any]) -> LayerScheme:
    expected = {"type": "float", "num_bits": 4, "group_size": format.group_size, "symmetric": True}
    for field, value in expected.items():
        if weights.get(field, True if field == "symmetric" else None) != value:
            _refuse(f"{name}: {field}", weights.get(field), (value,), f"{format.name} has no other; repair the config")
    return LayerScheme("compressed-tensors", format, None)


def _gpt_oss(config: Mapping[str, Any]) -> Schemes:
    return _but_for_kept(config, LayerScheme("mxfp4", GemmFormat.parse("w4a16_mxfp4"), None), "blocks of mxfp4")


def _but_for_kept(config: Mapping[str, Any], scheme: LayerScheme, held: str) -> Schemes:
    """``scheme`` of all layers but those that the config names as not converted, which hold none."""
    kept = config.get("modules_to_not_convert") or []
    if not isinstance(kept, list) or not all(isinstance(pattern, str) for pattern in kept):
        _refuse("modules_to_not_convert", kept, ("a list of names",), "repair the config")

    def of(name: str) -> LayerScheme:
        pattern = next((p for p in kept if fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*")), None)
        if pattern is not None:
            raise CheckpointError(
                f"{name} holds {held} but the config keeps {pattern!r} from conversion (modules_to_not_convert); accepted: "
                "either: repair the config or copy the checkpoint again"
            )
        return scheme

    return of


def _config_groups(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The schemes, validated and completed by the compressed-tensors library if there is one."""
    raw = config.get("config_groups")
    if not isinstance(raw, Mapping) or not raw:
        raise CheckpointError(
            "the compressed-tensors config has no config_groups; accepted: at least one group with targets and weights: repair config.json"
        )
    for key, group in raw.items():
        _check_group(key, group)
    # Releases up to 0.19 wrote actorder "group" (the layer then has a weight_g_idx); later ones
    # refuse to parse it. The flag is kept aside.
    actorder = {key: (group.get("weights") or {}).get("actorder") for key, group in raw.items() if isinstance(group, Mapping)}
    if importlib.util.find_spec("compressed_tensors") is None:
        if any(isinstance(group, list) for group in raw.values()):
            raise CheckpointError(
                f"config_groups name presets ({', '.join(raw)}), which only the compressed-tensors library resolves: pip install "
                "compressed-tensors"
            )
        return [dict(group) for group in raw.values()]
    from compressed_tensors.quantization import QuantizationConfig

    plain = {}
    for key, group in raw.items():
        plain[key] = group
        if actorder.get(key) in ("group", "dynamic"):
            plain[key] = {**group, "weights": {**group["weights"], "actorder": None}}
    try:
        groups = QuantizationConfig.model_validate({**config, "config_groups": plain}).model_dump(mode="json")["config_groups"]
    except (ValueError, NotImplementedError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(
            f"the compressed-tensors library refuses the quantization config: {error}; repair config.json or update the library"
        ) from error
    for key, group in groups.items():
        if actorder.get(key) in ("group", "dynamic"):
            group["weights"]["actorder"] = "group"
    return list(groups.values())


def _check_group(key: str, group: Any) -> None:
    """Raise ``CheckpointError`` for a scheme, or the targets of a preset, that is not of the kind
    of such."""
    if not isinstance(group, Mapping | list):
        _refuse(f"config_groups {key}", group, ("an object", "a list of targets"), "repair config_groups in config.json")
    targets = group.get("targets", []) if isinstance(group, Mapping) else group
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        _refuse(f"targets of config_groups {key}", targets, ("a list of names",), "repair config_groups in config.json")
    for target in targets:
        if target.startswith("re:"):
            _pattern(f"target {target!r} of config_groups {key}", target[3:])
    if isinstance(group, Mapping):
        for part in ("weights", "input_activations", "output_activations"):
            if not isinstance(group.get(part) or {}, Mapping):
                _refuse(f"{part} of config_groups {key}", group[part], ("an object",), "repair config_groups in config.json")


def _group_of(name: str, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The scheme of a layer: by its name first, then by a pattern, then by the class "Linear"."""
    exact = [g for g in groups if any(not t.startswith("re:") and (t == name or name.endswith("." + t)) for t in g.get("targets", []))]
    pattern = [g for g in groups if any(t.startswith("re:") and re.match(t[3:], name) for t in g.get("targets", []))]
    by_class = [g for g in groups if "Linear" in g.get("targets", [])]
    found = exact or pattern or by_class
    if not found:
        targets = [target for group in groups for target in group.get("targets", [])]
        raise CheckpointError(
            f"{name} holds a packed weight but no config group targets it (targets: {targets}); repair config_groups in config.json"
        )
    return found[0]


def _among(value: Any, accepted: tuple[int, ...]) -> TypeGuard[int]:
    """Whether ``value`` is one of these whole numbers: neither 4.0 nor True is."""
    return type(value) is int and value in accepted


def _pattern(what: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise CheckpointError(
            f"{what} is no regular expression: {error}; accepted: one that Python's re reads; repair the config"
        ) from None


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        _refuse(f"the quantization config's {key}", value, (True, False), "repair the config")
    return value


def _refuse(what: str, got: Any, accepted: tuple[Any, ...], action: str) -> NoReturn:
    raise CheckpointError(f"{what} is {got!r}; accepted: {', '.join(map(repr, accepted))}; {action}")
