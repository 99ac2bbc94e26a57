"""The studies: what was measured, each registered once with its rows, its page and the commands
that write the rows.

A study is one entry of ``STUDIES`` and its files: ``results/rows/<name>/<device>.jsonl``, a
renderer in ``results/report`` and a program in ``results/measure`` or ``results/peers``. ``make
results`` writes ``results/pages/<name>.md`` from them and the line of the study in
``results/README.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report.ablation import (
    ABLATION_FIELDS,
    ANY_FIELDS,
    ATTENTION_FIELDS,
    ablation_section,
    any_ablation_section,
    attention_ablation_section,
    liquid_ablation_section,
    read_ablation,
    sums_ablation_section,
)
from .report.activations import FIELDS as ACTIVATIONS_FIELDS
from .report.activations import activations_section
from .report.any_drafts import FIELDS as ANY_DRAFTS_FIELDS
from .report.any_drafts import any_drafts_section
from .report.any_errors import FIELDS as ANY_ERRORS_FIELDS
from .report.any_errors import any_errors_section
from .report.any_m import any_m_section
from .report.any_precision import FIELDS as ANY_PRECISION_FIELDS
from .report.any_precision import any_precision_section
from .report.any_quality import FIELDS as ANY_QUALITY_FIELDS
from .report.any_quality import any_quality_section
from .report.attention import attention_section
from .report.attention_rows import AttentionRow, read_attention
from .report.chains import FIELDS as CHAIN_FIELDS
from .report.chains import chain_section, read_chains
from .report.cpu import FIELDS as CPU_FIELDS
from .report.cpu import cpu_section
from .report.foreign import FIELDS as FOREIGN_FIELDS
from .report.foreign import foreign_section
from .report.formats import FORMATS_FIELDS, floats_section, formats_section
from .report.gemm import gemm_section
from .report.int8 import int8_section
from .report.int8_alone import int8_alone_section
from .report.kv_cache import FIELDS as KV_CACHE_FIELDS
from .report.kv_cache import accuracy_section
from .report.liquid_model import liquid_model_section
from .report.liquid_variants import liquid_variants_section
from .report.loading import FIELDS as LOADING_FIELDS
from .report.loading import loading_section
from .report.markdown import joined
from .report.overheads import FIELDS as OVERHEADS_FIELDS
from .report.overheads import overheads_section
from .report.prompt import FIELDS as PROMPT_FIELDS
from .report.prompt import prompt_section
from .report.quality import FIELDS as QUALITY_FIELDS
from .report.quality import language_section
from .report.quality_formats import FIELDS as FORMATS_QUALITY_FIELDS
from .report.quality_formats import formats_quality_section
from .report.ranker import RANKER_FIELDS, ranker_section
from .report.rows import Row, json_rows, read_rows
from .report.selection import SELECTION_FIELDS, selection_section
from .report.static import FIELDS as STATIC_FIELDS
from .report.static import static_section
from .report.step import FIELDS as STEP_FIELDS
from .report.step import step_section
from .report.sweep import SWEEP_FIELDS, sweep_section
from .report.versions import VERSIONS_FIELDS, versions_section


@dataclass(frozen=True, slots=True)
class Study:
    """One thing that is measured.

    ``name`` is that of its folder of rows and of its page, ``question`` what it answers, in a line.
    ``row`` is the dataclass of a row, or the fields that every row must have. ``page`` takes the
    folder that holds all studies' rows and gives the page's text below the title, "" without rows;
    it raises ``ValueError`` for a row that cannot be read. ``commands`` write the rows.
    """

    name: str
    title: str
    question: str
    row: type[Row] | type[AttentionRow] | tuple[str, ...]
    page: Callable[[Path], str]
    commands: tuple[str, ...]

    def rows(self, folder: Path) -> Iterator[dict[str, Any]]:
        """Its rows under ``folder`` (that of all studies), in order. Raises ``ValueError`` for one
        that it cannot read."""
        required = self.row if isinstance(self.row, tuple) else ()
        for place, row in json_rows(folder / self.name, required):
            if not isinstance(self.row, tuple):
                try:
                    self.row.from_json(row)
                except ValueError as error:
                    raise ValueError(f"{place}: {error}") from None
            yield row


STUDIES = (
    Study(
        "gemm",
        "Products of low-bit weights",
        "How fast is a product, beside published kernels and the unquantized product?",
        Row,
        lambda rows: gemm_section(read_rows(rows / "gemm")),
        ("python -m results.measure.gemm", "python -m results.peers.import_peers FILE"),
    ),
    Study(
        "cpu",
        "Products on a CPU",
        "How fast are products of every kind of low-bit weight on a CPU, beside torch's bf16 and int8 linears?",
        CPU_FIELDS,
        lambda rows: cpu_section(rows / "cpu"),
        ("python -m results.measure.cpu",),
    ),
    Study(
        "chain",
        "A layer's linears in a row",
        "What do the four linears of a decoder layer take together, and what does dependent launch save?",
        CHAIN_FIELDS,
        lambda rows: chain_section(read_chains(rows / "chain"), read_rows(rows / "gemm")),
        ("python -m results.measure.chain",),
    ),
    Study(
        "step",
        "A whole decode step",
        "What does a token of an 8B model take, beside 16 bits and vLLM's kernels?",
        STEP_FIELDS,
        lambda rows: step_section(rows / "step"),
        ("python -m results.measure.step --peers FOLDER",),
    ),
    Study(
        "prompt",
        "A whole prompt",
        "What does a prompt of an 8B model take, beside 16 bits?",
        PROMPT_FIELDS,
        lambda rows: prompt_section(rows / "prompt"),
        ("python -m results.measure.prompt",),
    ),
    Study(
        "sweep",
        "Every m, and odd shapes",
        "Is any m, or any odd shape, much slower than its neighbours?",
        SWEEP_FIELDS,
        lambda rows: sweep_section(rows / "sweep"),
        ("python -m results.measure.sweep",),
    ),
    Study(
        "any_m",
        "Any number of rows",
        "Is the right kernel chosen between powers of two, on shapes without records?",
        Row,
        lambda rows: any_m_section(read_rows(rows / "any_m")),
        ("python -m results.peers.import_peers FILE --run untuned --out results/rows/any_m",),
    ),
    Study(
        "any_precision",
        "Every width from one store",
        "How fast are products of 3 to 8 bits that one store of bit planes serves, beside 16 bits?",
        ANY_PRECISION_FIELDS,
        lambda rows: any_precision_section(rows / "any_precision"),
        ("python -m results.measure.any_precision",),
    ),
    Study(
        "formats",
        "Formats beside one another",
        "What do 4-bit floats cost beside 4-bit integers?",
        FORMATS_FIELDS,
        lambda rows: formats_section(rows / "formats"),
        ("python -m results.measure.formats",),
    ),
    Study(
        "floats",
        "4-bit floats beside other kernels",
        "How fast are products of mxfp4 and nvfp4 beside Marlin's?",
        Row,
        lambda rows: floats_section(read_rows(rows / "floats")),
        ("python -m results.peers.import_peers FILE --out results/rows/floats",),
    ),
    Study(
        "int8",
        "Products of 8-bit activations beside other kernels",
        "How fast are W4A8 products beside other W4A8 kernels, and beside 16-bit activations?",
        Row,
        lambda rows: joined(int8_section(found := read_rows(rows / "int8")), liquid_model_section(found) if found else ""),
        ("python -m results.peers.import_peers FILE --classes w4a8,w8a8,w4.4a8,w4a16,w16a16 --out results/rows/int8",),
    ),
    Study(
        "int8_alone",
        "Products of 8-bit activations, each alone",
        "How fast is each where no other kernel runs in between?",
        Row,
        lambda rows: int8_alone_section(read_rows(rows / "int8_alone"), read_rows(rows / "int8")),
        ("python -m results.peers.import_peers FILE --alone --classes w4a8,w8a8,w4a16,w16a16 --out results/rows/int8_alone",),
    ),
    Study(
        "activations",
        "Quantization of activations",
        "How near to a copy's rate are activations quantized, with a norm and factors too?",
        ACTIVATIONS_FIELDS,
        lambda rows: activations_section(rows / "activations"),
        ("python -m results.measure.activations",),
    ),
    Study(
        "overheads",
        "Overheads",
        "What does a call cost beside the product itself?",
        OVERHEADS_FIELDS,
        lambda rows: overheads_section(rows / "overheads"),
        ("python -m results.measure.gemm",),
    ),
    Study(
        "attention",
        "Attention over a low-bit KV cache",
        "How fast are decode, prefill, append and gather, beside FA3 and other kernels?",
        AttentionRow,
        lambda rows: attention_section(read_attention(rows / "attention")),
        ("python -m results.measure.attention", "python -m results.peers.import_attention FILE"),
    ),
    Study(
        "kv_cache",
        "Quality of low-bit caches",
        "What does attention lose when keys and values are quantized?",
        KV_CACHE_FIELDS,
        lambda rows: accuracy_section(rows / "kv_cache"),
        ("python -m results.measure.kv_cache",),
    ),
    Study(
        "quality",
        "Quality of low-bit weights",
        "What does a language model lose when its weights and activations are quantized, and which channels need 8 bits?",
        QUALITY_FIELDS,
        lambda rows: language_section(rows / "quality"),
        ("python -m results.measure.quality --model FOLDER",),
    ),
    Study(
        "quality_formats",
        "Every format in a language model",
        "What does a language model lose with each format of weights and of caches, and with both?",
        FORMATS_QUALITY_FIELDS,
        lambda rows: formats_quality_section(rows / "quality_formats"),
        ("python -m results.measure.quality --study formats --model FOLDER",),
    ),
    Study(
        "any_quality",
        "Every width in a language model",
        "What does a language model lose at each width of one store, and what do squared gradients save?",
        ANY_QUALITY_FIELDS,
        lambda rows: any_quality_section(rows / "any_quality"),
        ("python -m results.measure.any_quality --model FOLDER",),
    ),
    Study(
        "any_errors",
        "The squared error of every width",
        "How much more error does each width of one store leave than exact clusters of that width alone?",
        ANY_ERRORS_FIELDS,
        lambda rows: any_errors_section(rows / "any_errors"),
        ("python -m results.measure.any_errors",),
    ),
    Study(
        "any_drafts",
        "A narrow view that drafts for a wide one",
        "How many tokens of a model's narrow view does its 8-bit view accept?",
        ANY_DRAFTS_FIELDS,
        lambda rows: any_drafts_section(rows / "any_drafts"),
        ("python -m results.measure.any_drafts --model FOLDER",),
    ),
    Study(
        "loading",
        "Memory and first tokens of a model",
        "What memory do loading and running a model take, and how long is it until the first token?",
        LOADING_FIELDS,
        lambda rows: loading_section(rows / "loading"),
        ("python -m results.measure.loading --model FOLDER",),
    ),
    Study(
        "foreign",
        "Directories that other quantizers write",
        "Does a directory that llm-compressor, GPTQModel or AutoAWQ wrote compute here what it computes there?",
        FOREIGN_FIELDS,
        lambda rows: foreign_section(rows / "foreign"),
        ("python -m results.measure.foreign --python PATH --tool TOOL",),
    ),
    Study(
        "ablation",
        "What each idea adds to a product",
        "How much faster does each idea make a product?",
        ABLATION_FIELDS,
        lambda rows: ablation_section(read_ablation(rows / "ablation")),
        ("python -m results.measure.ablation.gemm",),
    ),
    Study(
        "ablation_int8",
        "What LiquidGEMM's ideas are worth",
        "How much slower is a W4A8 product without each of LiquidGEMM's ideas?",
        ABLATION_FIELDS,
        lambda rows: joined(
            liquid_ablation_section(read_ablation(rows / "ablation_int8")),
            liquid_variants_section(rows / "ablation_int8", read_rows(rows / "int8")),
        ),
        ("python -m results.measure.ablation.liquid",),
    ),
    Study(
        "ablation_sums",
        "How sums of groups become fp32",
        "Which way from int32 sums of a group to fp32 is the fastest?",
        ABLATION_FIELDS,
        lambda rows: sums_ablation_section(read_ablation(rows / "ablation_sums")),
        ("python -m results.measure.ablation.sums",),
    ),
    Study(
        "ablation_any",
        "What each idea adds to a product of any precision",
        "How much faster does each idea of Any-Precision LLM make a product?",
        ANY_FIELDS,
        lambda rows: any_ablation_section(rows / "ablation_any"),
        ("python -m results.measure.ablation.any",),
    ),
    Study(
        "ablation_attention",
        "What each idea adds to decode",
        "How much faster does each idea make a decode step?",
        ATTENTION_FIELDS,
        lambda rows: attention_ablation_section(rows / "ablation_attention"),
        ("python -m results.measure.ablation.attention",),
    ),
    Study(
        "selection",
        "How well schedules are chosen",
        "How far are untuned choices from tuned ones, and tuned ones from the best there is?",
        SELECTION_FIELDS,
        lambda rows: selection_section(rows / "selection"),
        ("python -m results.measure.selection",),
    ),
    Study(
        "ranker",
        "Choosing without a record",
        "Which model chooses best for a workload whose records are left out?",
        RANKER_FIELDS,
        lambda rows: ranker_section(rows / "ranker"),
        ("python -m tilebit.autotune.regret --arch ARCH --rows FILE",),
    ),
    Study(
        "versions",
        "Beside an earlier commit",
        "Is any kernel, or any call, slower than it was?",
        VERSIONS_FIELDS,
        lambda rows: versions_section(rows / "versions"),
        ("python -m results.measure.versions --before TREE",),
    ),
    Study(
        "static",
        "What the code says",
        "What do compiled kernels say about their speed, on every GPU architecture?",
        STATIC_FIELDS,
        lambda rows: static_section(rows / "static"),
        ("make static",),
    ),
)
