"""Invalid files: checkpoints, kernel directories, cache entries, packs, records. Each case damages a good one made on the spot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bad_tensor_cases import Bad
from safetensors.torch import load_file, save_file

from tilebit import packs
from tilebit.runtime import REQUIRED_FIELDS, CorruptArtifact, load_kernel
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.records import TuningRecord
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.weights.checkpoint import CheckpointError, load_checkpoint
from tilebit.weights.synthetic import write_checkpoint

LAYER = "model.layers.0.q"


def checkpoint(family: str, damage: Callable[[Path], None], **options: Any) -> Callable[[Path], Any]:
    """Write a checkpoint, damage it, read its layer."""

    def call(folder: Path) -> Any:
        write_checkpoint(folder / "c", family, {LAYER: (64, 256)}, **options)
        damage(folder / "c")
        return load_checkpoint(folder / "c").quantized(LAYER)

    return call


def tensors(**changes: Any) -> Callable[[Path], None]:
    """Replace tensors of the layer (a function gets the old one, None drops it)."""

    def damage(path: Path) -> None:
        stored = load_file(path / "model.safetensors")
        for part, change in changes.items():
            if change is None:
                del stored[f"{LAYER}.{part}"]
            else:
                stored[f"{LAYER}.{part}"] = change(stored[f"{LAYER}.{part}"]).contiguous()
        save_file(stored, path / "model.safetensors")

    return damage


def config(**changes: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = json.loads((path / "config.json").read_text())
        data["quantization_config"] |= changes
        (path / "config.json").write_text(json.dumps(data))

    return damage


def write(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).write_bytes(content)

    return damage


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[: int(len(data) * keep)])

    return damage


def checkpoints() -> Iterator[Bad]:
    def bad(name: str, call: Callable[[Path], Any], *says: str) -> Bad:
        return Bad(f"checkpoint: {name}", call, says, CheckpointError)

    yield bad("nowhere", lambda folder: load_checkpoint(folder / "none"), "does not exist", "a directory")
    yield bad("empty directory", lambda folder: load_checkpoint(folder), "no .safetensors", "safetensors")
    yield bad("truncated", checkpoint("awq", cut("model.safetensors", 0.7)), "not a whole safetensors file", "again")
    yield bad("a torn header", checkpoint("awq", cut("model.safetensors", 0.001)), "not a whole safetensors file", "again")
    yield bad("config is not JSON", checkpoint("awq", write("config.json", b"{")), "cannot read", "config.json")
    yield bad("config is a list", checkpoint("awq", write("config.json", b"[]")), "list", "JSON object")
    yield bad(
        "a pickle", checkpoint("awq", lambda p: (p / "model.safetensors").rename(p / "model.bin") and None), "model.bin", "safetensors"
    )
    for method in ("bitsandbytes", "aqlm"):
        yield bad(method, checkpoint("awq", config(quant_method=method)), repr(method), "awq")
    yield bad("fp8", checkpoint("awq", config(quant_method="fp8")), "weight_block_size is None", "[128, 128]")
    for bits in (2, 3, 5, "4"):
        yield bad(f"{bits!r} bits", checkpoint("gptq", config(bits=bits)), f"{bits!r}", "4")
    for group in (16, 1024, 0, "128"):
        yield bad(f"groups of {group!r}", checkpoint("gptq", config(group_size=group)), f"{group!r}", "128")
    yield bad("awq of another version", checkpoint("awq", config(version="gemv")), "'gemv'", "gemm")
    yield bad("awq of 8 bits", checkpoint("awq", config(bits=8)), "8", "4")
    yield bad("marlin", checkpoint("gptq", config(checkpoint_format="marlin")), "'marlin'", "gptq")
    yield bad("labelled awq", checkpoint("gptq", config(quant_method="awq", version="gemm", zero_point=True)), "awq", "again")
    yield bad("labelled compressed-tensors", checkpoint("gptq", config(quant_method="compressed-tensors")), "compressed-tensors")
    yield bad("4 bits labelled 8", checkpoint("gptq", config(bits=8)), "8", "bits")
    yield bad("groups of 128 labelled 64", checkpoint("gptq", config(group_size=64)), "group_size 64", "128")
    yield bad("labelled symmetric", checkpoint("gptq", config(sym=True), symmetric=False), "symmetric", "zero point")
    yield bad("v2 labelled v1", checkpoint("gptq_v2", config(checkpoint_format="gptq")), "gptq_v2", "checkpoint_format")
    yield bad("act-order not declared", checkpoint("gptq", config(desc_act=False), desc_act=True), "g_idx", "desc_act")
    yield bad("scales missing", checkpoint("awq", tensors(scales=None)), "scales", "again")
    yield bad("zero points missing", checkpoint("gptq", tensors(qzeros=None)), "qzeros", "again")
    yield bad("float weights", checkpoint("gptq", tensors(qweight=lambda t: t.float())), "float32", "int32")
    yield bad("integer scales", checkpoint("gptq", tensors(scales=lambda t: t.int())), "int32", "float16")
    yield bad("NaN scales", checkpoint("gptq", tensors(scales=lambda t: t * float("nan"))), "NaN", "finite")
    yield bad("half a weight", checkpoint("gptq", tensors(qweight=lambda t: t[:16])), "again")
    yield bad("narrow weight", checkpoint("awq", tensors(qweight=lambda t: t[:, :4])), "packed weight", "again")
    yield bad("scales of other channels", checkpoint("gptq", tensors(scales=lambda t: t[:, :32])), "32", "again")
    yield bad("g_idx out of range", checkpoint("gptq", tensors(g_idx=lambda t: t + 5), desc_act=True), "g_idx", "0 to 1")
    yield bad("uneven g_idx", checkpoint("gptq", tensors(g_idx=lambda t: t * 0), desc_act=True), "g_idx", "128")
    yield bad("weight_shape of nothing", checkpoint("compressed-tensors", tensors(weight_shape=lambda t: t * 0)), "weight_shape", "n and k")

    def other(call: Callable[[Any], Any]) -> Callable[[Path], Any]:
        def run(folder: Path) -> Any:
            write_checkpoint(folder / "c", "awq", {LAYER: (64, 256)}, bias=True)
            return call(load_checkpoint(folder / "c"))

        return run

    yield bad("an unknown layer", other(lambda c: c.quantized("model.layers.7")), "'model.layers.7'", "layers()")
    yield bad("an unknown tensor", other(lambda c: c.tensor("nothing")), "'nothing'", "names()")
    yield bad("the bias of no layer", other(lambda c: c.bias("lm_head")), "'lm_head'", "layers()")

    def short_bias(folder: Path) -> Any:
        write_checkpoint(folder / "c", "awq", {LAYER: (64, 256)}, bias=True)
        tensors(bias=lambda t: t[:5])(folder / "c")
        return load_checkpoint(folder / "c").bias(LAYER)

    yield bad("a short bias", short_bias, "[5]", "[64]")
    yield bad("an unknown override", lambda folder: load_checkpoint(folder_with(folder), checkpoint_format="v3"), "'v3'", "gptq_v2")


def folder_with(folder: Path) -> Path:
    write_checkpoint(folder / "c", "gptq", {LAYER: (64, 256)})
    return folder / "c"


def artifact(folder: Path, **changes: Any) -> Path:
    """A kernel directory with everything but a kernel; None drops a field of the manifest."""
    folder.mkdir(parents=True, mode=0o700)
    (folder / "kernel.so").write_bytes(b"\x7fELF not really")
    digest = hashlib.sha256((folder / "kernel.so").read_bytes()).hexdigest()
    manifest: dict[str, Any] = {name: kind() for name, kind in REQUIRED_FIELDS.items()} | {
        "schema": 1,
        "key": "0" * 64,
        "workload": Workload(1, 8, 8).to_json(),
        "target": {"arch": "cpu", "features": []},
        "files": {"kernel.so": {"sha256": digest, "bytes": 15}},
    }
    manifest = {name: value for name, value in {**manifest, **changes}.items() if value is not None}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def artifacts() -> Iterator[Bad]:
    def bad(name: str, call: Callable[[Path], Any], *says: str) -> Bad:
        return Bad(f"artifact: {name}", call, (*says, "accepted: a complete, unmodified kernel directory", "compile"), CorruptArtifact)

    def damaged(damage: Callable[[Path], None]) -> Callable[[Path], Any]:
        def call(folder: Path) -> Any:
            damage(artifact(folder / "k"))
            return load_kernel(folder / "k")

        return call

    yield bad("nowhere", lambda folder: load_kernel(folder / "none"), "no manifest.json")
    yield bad("no manifest", damaged(lambda p: (p / "manifest.json").unlink()), "no manifest.json")
    yield bad("a torn manifest", damaged(cut("manifest.json", 0.5)), "not readable JSON")
    yield bad("a manifest that is a list", damaged(write("manifest.json", b"[]")), "list")
    yield bad("an empty manifest", damaged(write("manifest.json", b"{}")), "lacks schema")
    for field in REQUIRED_FIELDS:
        yield bad(f"no {field}", lambda folder, f=field: load_kernel(artifact(folder / "k", **{f: None})), f"lacks {field}")
    yield bad("another schema", lambda folder: load_kernel(artifact(folder / "k", schema=99)), "schema 99", "reads 1")
    yield bad("an empty list of files", lambda folder: load_kernel(artifact(folder / "k", files={})), "kernel.so")
    yield bad("an entry without digest", lambda folder: load_kernel(artifact(folder / "k", files={"kernel.so": {"bytes": 15}})), "sha256")
    yield bad("a path outside", lambda folder: load_kernel(artifact(folder / "k", files={"kernel.so": {}, "../x": {}})), "kernel.so")
    yield bad("no library", damaged(lambda p: (p / "kernel.so").unlink()), "kernel.so cannot be read")
    yield bad("a truncated library", damaged(cut("kernel.so", 0.5)), "kernel.so has 7 bytes", "15")
    yield bad("a changed library", damaged(write("kernel.so", b"\x7fELF not realLy")), "the sha256 of kernel.so")
    yield bad("a library that is none", damaged(lambda p: None), "does not load here")
    for key in ("", "abc", "g" * 64, "A" * 64, "../" + "0" * 61):
        yield Bad(f"the cache key {key!r}", lambda folder, k=key: ArtifactCache(folder).lookup(k), (repr(key), "64 lower-case hexadecimal"))


def packed() -> Iterator[Bad]:
    def pack(folder: Path, **changes: Any) -> Path:
        root = folder / "p"
        kernel = artifact(root / "kernels" / ("0" * 64))
        said = json.loads((kernel / "manifest.json").read_text())
        same = {name: said[name] for name in ("key", "workload", "target", "program", "schedule", "versions")}
        rows = [{**same, "arch": "cpu", "path": f"kernels/{'0' * 64}"}]
        files = {
            f"kernels/{'0' * 64}/{f.name}": {"sha256": hashlib.sha256(f.read_bytes()).hexdigest(), "bytes": f.stat().st_size}
            for f in sorted(kernel.iterdir())
        }
        manifest = {"schema": packs.PACK_SCHEMA, "versions": {}, "kernels": rows, "files": files} | changes
        (root / "pack.json").write_text(json.dumps({name: value for name, value in manifest.items() if value is not None}))
        return root

    def bad(name: str, call: Callable[[Path], Any], *says: str) -> Bad:
        return Bad(f"pack: {name}", call, (*says, "copy the pack again or export it anew"), CorruptArtifact)

    def damaged(damage: Callable[[Path], None]) -> Callable[[Path], Any]:
        def call(folder: Path) -> Any:
            root = pack(folder)
            damage(root)
            return packs.load(root)

        return call

    inside = f"kernels/{'0' * 64}"
    yield Bad("pack: nowhere", lambda folder: packs.load(folder / "none"), ("no pack directory", "none"), FileNotFoundError)
    yield bad("no manifest", damaged(lambda p: (p / "pack.json").unlink()), "pack.json")
    yield bad("a torn manifest", damaged(cut("pack.json", 0.5)), "pack.json")
    yield bad("another schema", lambda folder: packs.load(pack(folder, schema=7)), "schema 7", "reads 2")
    yield bad("no kernels", lambda folder: packs.load(pack(folder, kernels=None)), "kernels")
    yield bad("a kernel without key", lambda folder: packs.load(pack(folder, kernels=[{}])), "no files for the kernel None")
    yield bad("no files", lambda folder: packs.load(pack(folder, files=None)), "files")
    yield bad("a missing library", damaged(lambda p: (p / inside / "kernel.so").unlink()), "kernel.so")
    yield bad("a truncated library", damaged(cut(f"{inside}/kernel.so", 0.5)), "kernel.so has 7 bytes")
    yield bad("a changed library", damaged(write(f"{inside}/kernel.so", b"\x7fELF not realLy")), "sha256")

    class Fake:
        def __init__(self, path: Path) -> None:
            self.path = path
            self.manifest: dict[str, Any] = {"workload": Workload(1, 8, 8).to_json()}

    yield Bad("pack: export nothing", lambda folder: packs.export(folder / "p", []), ("empty", "at least one"))
    yield Bad(
        "pack: export over a directory", lambda folder: packs.export(folder, [Fake(folder)]), ("exists", "new directory"), FileExistsError
    )

    def export_damaged(folder: Path) -> Any:
        root = artifact(folder / "k")
        cut("kernel.so", 0.5)(root)
        return packs.export(folder / "p", [Fake(root)])

    yield Bad("pack: export a damaged kernel", export_damaged, ("kernel.so has 7 bytes",), CorruptArtifact)


def records() -> Iterator[Bad]:
    schedule = {"program": "gemm_cpu", "block_n": 32, "block_m": 1, "block_k": 32}
    good: dict[str, Any] = {"workload": Workload(1, 8, 8).to_json(), "schedule": schedule, "gpu": "x", "arch": "cpu", "units": 1, "us": 1.0}

    def bad(name: str, data: Any, *says: str) -> Bad:
        return Bad(f"record: {name}", lambda _: TuningRecord.from_json(data), says)

    for value in ([], "text", 3, None):
        yield bad(f"{value!r}", value, type(value).__name__, "JSON object")
    for field in ("workload", "schedule", "gpu", "arch", "units"):
        yield bad(f"no {field}", {name: value for name, value in good.items() if name != field}, f"fields {field}", "missing")
    for us in (None, 0, -1.0, "fast", True, float("inf")):
        yield bad(f"us {us!r}", {**good, "us": us}, f"us is {us!r}", "above 0")
    yield bad("status", {**good, "status": "fine"}, "'fine'", "ok")
    yield bad("arch", {**good, "arch": "sm_10"}, "'sm_10'", "sm_80")
    yield bad("units", {**good, "units": "many"}, "'many'", "whole number")
    yield bad("half a schedule", {**good, "schedule": {"program": "gemm_cpu"}}, "block_n")
    yield bad("a schedule in words", {**good, "schedule": {**schedule, "block_n": "big"}}, "block_n is 'big'", "whole numbers")


CASES = [*checkpoints(), *artifacts(), *packed(), *records()]
