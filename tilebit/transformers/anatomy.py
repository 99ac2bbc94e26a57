"""What a decoder of a known kind is made of, in the terms of a decode step: norms, projections,
activations and scales, whatever the model's classes call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .unchanged import bypassed, says_otherwise

GATED = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}  # transformers' names, and ours
STEADY = ("default", "linear", "llama3", "yarn")  # rotary embeddings that do not change with a sequence's length
PLAIN, OWN_NORMS = ("llama", "mistral", "qwen2", "phi3"), ("qwen3",)  # without and with norms of q and k
SANDWICH = ("gemma2",)  # norms before and after attention and MLP, weights that are added to 1
TURNED = 32  # channels of a head are turned in multiples of it
KINDS = (*PLAIN, *OWN_NORMS, *SANDWICH)


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMSNorm: x / rms(x) * (weight + ``offset``)."""

    weight: Tensor
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One layer. ``qkv`` and ``gate_up`` are one layer each where the model has one, else several whose
    outputs lie side by side. ``after_attention`` and ``after_mlp`` norm what is added to the
    residual stream."""

    before_attention: Norm
    qkv: Sequence[nn.Module]
    q_norm: Norm | None
    k_norm: Norm | None
    heads: int
    heads_kv: int
    head_dim: int
    scale: float
    window: int
    soft_cap: float
    o: nn.Module
    after_attention: Norm | None
    before_mlp: Norm
    gate_up: Sequence[nn.Module]
    activation: str
    down: nn.Module
    after_mlp: Norm | None


@dataclass(frozen=True, slots=True, eq=False)
class Anatomy:
    """A causal language model. Logits are ``logit_cap`` * tanh(logits / ``logit_cap``) where that is not 0."""

    embed: nn.Module
    blocks: Sequence[Block]
    norm: Norm
    head: nn.Module
    logit_cap: float
    rotary: nn.Module


def anatomy(model: PreTrainedModel) -> Anatomy:
    """The parts of ``model``, a causal language model. Raises ``ValueError`` for one whose kind is not
    in ``KINDS``, or that does what is not known here, and says what."""
    config: Any = model.config
    kind = getattr(config, "model_type", None)
    body: Any = getattr(model, "model", None)
    if kind not in KINDS or body is None or getattr(model, "lm_head", None) is None:
        raise ValueError(f"its kind is {kind!r}; accepted: causal language models of {', '.join(KINDS)}")
    _expect_as_known(kind, model, body)
    rope = str(getattr(body.rotary_emb, "rope_type", "default"))
    if rope not in STEADY:
        raise ValueError(f"its rotary embedding is {rope!r}, which depends on a sequence's length; accepted: {', '.join(STEADY)}")
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in GATED:
        raise ValueError(f"its activation is {activation!r}; accepted: {', '.join(GATED)}")
    offset = 1.0 if kind in SANDWICH else 0.0
    return Anatomy(
        embed=body.embed_tokens,
        blocks=[_block(kind, config, layer, GATED[activation], offset) for layer in body.layers],
        norm=_norm(body.norm, offset),
        head=model.lm_head,
        logit_cap=getattr(config, "final_logit_softcapping", None) or 0.0,
        rotary=body.rotary_emb,
    )


def _expect_as_known(kind: str, model: PreTrainedModel, body: Any) -> None:
    """Raise ``ValueError`` where something else than transformers' classes of ``kind`` says what a
    part computes."""
    home = f"transformers.models.{kind}.modeling_{kind}"
    if type(model).forward.__module__ != home:
        raise ValueError(f"its forward is that of {type(model).__module__}; accepted: that of {home}")
    norms = [part for layer in body.layers for part in (layer, *layer.children()) for name, part in part.named_children() if "norm" in name]
    named = [part for layer in body.layers for part in (layer, getattr(layer, "self_attn", None), getattr(layer, "mlp", None))]
    for part in (body, body.norm, *named, *norms):
        if type(part).__module__ != home:
            raise ValueError(f"it has a {type(part).__module__}.{type(part).__qualname__}; accepted: the classes of {home}")
    names = {id(part): name for name, part in model.named_modules()}
    for part in bypassed(model):
        found = says_otherwise(part)
        if found is not None:
            raise ValueError(f"{names[id(part)]} has {found}, which a fused step would leave out; accepted: layers without: remove it")


def _block(kind: str, config: Any, layer: Any, activation: str, offset: float) -> Block:
    attention, mlp, sandwich = layer.self_attn, layer.mlp, kind in SANDWICH
    window = getattr(attention, "sliding_window", None) if kind not in ("mistral", "phi3") else getattr(config, "sliding_window", None)
    whole = hasattr(attention, "qkv_proj")
    return Block(
        before_attention=_norm(layer.input_layernorm, offset),
        qkv=(attention.qkv_proj,) if whole else (attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=_norm(attention.q_norm, offset) if kind in OWN_NORMS else None,
        k_norm=_norm(attention.k_norm, offset) if kind in OWN_NORMS else None,
        heads=config.num_attention_heads,
        heads_kv=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        window=window or 0,
        soft_cap=getattr(attention, "attn_logit_softcapping", None) or 0.0,
        o=attention.o_proj,
        after_attention=_norm(layer.post_attention_layernorm, offset) if sandwich else None,
        before_mlp=_norm(layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm, offset),
        gate_up=(mlp.gate_up_proj,) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj, mlp.up_proj),
        activation=activation,
        down=mlp.down_proj,
        after_mlp=_norm(layer.post_feedforward_layernorm, offset) if sandwich else None,
    )


def _norm(module: Any, offset: float) -> Norm:
    eps = getattr(module, "variance_epsilon", None)
    return Norm(module.weight, module.eps if eps is None else eps, offset)


def rotary_table(rotary: Any, positions: int, head_dim: int, device: torch.device) -> Tensor:
    """fp32 [positions, turned channels]: cosines, then sines, as a model's own rotary embedding computes
    them. Raises ``ValueError`` for one that turns a part of a head which no kernel does."""
    with torch.no_grad():
        places = torch.arange(positions, device=device)[None]
        cos, sin = rotary(torch.empty(0, dtype=torch.float32, device=device), places)
    if cos.shape[-1] % TURNED or cos.shape[-1] > head_dim:
        raise ValueError(
            f"its rotary embedding turns {cos.shape[-1]} of a head's {head_dim} channels; accepted: all of them, or a multiple of {TURNED}"
        )
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), -1).float().contiguous()
