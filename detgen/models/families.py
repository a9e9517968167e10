"""Families of decoders, each a row of traits: names of parts, and their order."""

from __future__ import annotations

from contextlib import suppress
from functools import reduce
from typing import Any, NamedTuple


class Family(NamedTuple):
    """The traits of a family; names are names of modules.

    Attributes:
        inner: the decoder without its output layer; here and below, a dot leads into a module inside.
        embedding: embedding of the tokens.
        embedding_norm: norm of the embeddings.
        positions: a table that is added to the embeddings, and the offset of a position in it.
        layers: the layers.
        final: the norm after them.
        before_head: the module between them, which has `dense`, an activation and `norm`; "" for none.
        head: the output layer.
        logit_factor: the setting that logits are multiplied by, if a model has it.
        attention: a layer's attention.
        state: the module in its place, or parallel to it, in layers that keep a state, if a model has such layers.
        qkv: its query, key and value; one name if they are joined.
        gated: whether the query layer also gives gates of the attention's results, each head's after its query.
        own_gate: the separate layer that gives gates of the attention's results; "" for none.
        by_head: whether a joined query, key and value goes by key heads: each has its queries, its key and its value
            one after another.
        parts: number of parts of a joined one, each with queries, values and keys of its heads; 0 for none.
        out: the layer after the attention.
        head_norms: norms of queries and keys, if a model has them.
        rotated_first: whether these norms come after the rotation.
        scaled_queries: whether queries are multiplied by the attention's `scaling` before it.
        rotates: the setting of an attention that says whether it rotates queries and keys, if a model has one;
            any of several names.
        interleaved: which entries of a head are rotated together, see `Rotate`; a string names a setting for it.
        latent: whether queries, keys and values are made from short vectors; `qkv` is then ignored.
        mlp: a layer's feed-forward; "" if its parts are the layer's own; of several names, the first that a layer has.
        gate: the gate, if there is one; joined with `up` if `up` is empty.
        up: the first linear layer, which the gate multiplies.
        down: the last one.
        norms: before and after the attention, before and after the feed-forward; of several names the first that a
            layer has.
        state_norms: the same for layers that keep a state, if they differ.
        parallel: whether the feed-forward reads the attention's input instead of its output; a string names the
            setting for it.
    """

    inner: str = "model"
    embedding: str = "embed_tokens"
    embedding_norm: str = ""
    positions: tuple[str, int] | None = None
    layers: str = "layers"
    final: str = "norm"
    before_head: str = ""
    head: str = "lm_head"
    logit_factor: str = "logit_scale"
    attention: str = "self_attn"
    state: str = "linear_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gated: bool = False
    own_gate: str = ""
    by_head: bool = False
    parts: int = 0
    out: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    rotated_first: bool = False
    scaled_queries: bool = False
    rotates: str = "use_rope"
    interleaved: bool | str = False
    latent: bool = False
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
    )
    state_norms: tuple[str | None, str | None, str | None, str | None] | None = None
    parallel: bool | str = False


_BOTH_SIDES = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_JOINED: dict[str, Any] = {  # queries, keys and values, grouped by key head
    **{"inner": "transformer", "embedding": "word_embeddings", "layers": "h", "final": "ln_f"},
    **{"attention": "self_attention", "qkv": ("query_key_value",), "by_head": True, "out": "dense"},
    **{"gate": "", "up": "dense_h_to_4h", "down": "dense_4h_to_h"},
}
_LFM2: dict[str, Any] = {
    **{"final": "embedding_norm", "state": "conv", "out": "out_proj", "head_norms": ("q_layernorm", "k_layernorm")},
    **{"mlp": "feed_forward", "gate": "w1", "up": "w3", "down": "w2"},
    "norms": ("operator_norm", None, "ffn_norm", None),
}
_MAMBA: dict[str, Any] = {  # layers of one module each
    **{"embedding": "embeddings", "final": "norm_f", "attention": "mixer", "state": "mixer", "mlp": "mixer"},
    **{"gate": "", "norms": ("norm", None, "norm", None)},
}
_BAMBA: dict[str, Any] = {
    **{"final": "final_layernorm", "state": "mamba", "mlp": "feed_forward"},
    "norms": ("input_layernorm", None, "pre_ff_layernorm", None),
}
_GRANITE: dict[str, Any] = {
    **{"mlp": "block_sparse_moe shared_mlp", "gate": "input_linear", "up": "", "down": "output_linear"},
}
_GLM4: dict[str, Any] = {
    **{"interleaved": True, "gate": "gate_up_proj", "up": ""},
    "norms": ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
}
_COHERE: dict[str, Any] = {"interleaved": True, "norms": ("input_layernorm", None, None, None), "parallel": True}
_APERTUS: dict[str, Any] = {"gate": "", "norms": ("attention_layernorm", None, "feedforward_layernorm", None)}
_GPT_J: dict[str, Any] = {
    **{"inner": "transformer", "embedding": "wte", "layers": "h", "final": "ln_f", "attention": "attn"},
    **{"out": "out_proj", "interleaved": True, "gate": "", "up": "fc_in", "down": "fc_out"},
    **{"norms": ("ln_1", None, None, None), "parallel": True},
}
_GPT_2: dict[str, Any] = {
    **{"inner": "transformer", "embedding": "wte", "positions": ("wpe", 0), "layers": "h", "final": "ln_f"},
    **{"attention": "attn", "qkv": ("c_attn",), "out": "c_proj", "gate": "", "up": "c_fc", "down": "c_proj"},
    "norms": ("ln_1", None, "ln_2", None),
}
FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(),
    "Qwen3ForCausalLM": Family(),
    # Only inside wrappers: rotated by three positions, which are equal without images.
    "Qwen2VLTextModel": Family(),
    "Qwen2_5_VLTextModel": Family(),
    "Qwen3VLTextModel": Family(),
    "Qwen3VLMoeTextModel": Family(),
    "Glm4vMoeTextModel": Family(),
    "PaddleOCRTextModel": Family(),
    "HunYuanVLTextModel": Family(head_norms=("query_layernorm", "key_layernorm"), rotated_first=True),
    "DeepseekOcr2TextModel": Family(),
    "AriaTextModel": Family(),
    "GraniteDoclingTextModel": Family(),
    "Granite4VisionTextModel": Family(),
    "SmolLM3ForCausalLM": Family(),
    "MixtralForCausalLM": Family(),
    "PhimoeForCausalLM": Family(),
    "Qwen2MoeForCausalLM": Family(),
    "Qwen3MoeForCausalLM": Family(),
    "MellumForCausalLM": Family(),
    "FlintForCausalLM": Family(rotates="sliding_window"),
    "Qwen3NextForCausalLM": Family(gated=True),
    "Qwen3_5ForCausalLM": Family(gated=True),
    "Qwen3_5MoeForCausalLM": Family(gated=True),
    "Lfm2ForCausalLM": Family(**_LFM2),
    "Lfm2MoeForCausalLM": Family(**_LFM2),
    "Lfm3ForCausalLM": Family(
        **_LFM2
        | {"out": "o_proj", "head_norms": ("q_norm", "k_norm"), "own_gate": "g_proj"}
        | {"norms": ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")}
    ),
    "GraniteMoeSharedForCausalLM": Family(**_GRANITE),
    "GraniteMoeHybridForCausalLM": Family(**_GRANITE, state="mamba"),
    "NemotronHForCausalLM": Family(**_MAMBA),
    "FalconH1ForCausalLM": Family(**_BAMBA, logit_factor="lm_head_multiplier"),
    "BambaForCausalLM": Family(**_BAMBA),
    "Mamba2ForCausalLM": Family(**_MAMBA, inner="backbone"),
    "MambaForCausalLM": Family(**_MAMBA, inner="backbone"),
    "FalconMambaForCausalLM": Family(**_MAMBA, inner="backbone"),
    "JambaForCausalLM": Family(**_BAMBA),
    "GraniteForCausalLM": Family(),
    "Phi3ForCausalLM": Family(qkv=("qkv_proj",), gate="gate_up_proj", up=""),
    "GemmaForCausalLM": Family(),
    "Gemma2ForCausalLM": Family(norms=_BOTH_SIDES),
    "Gemma3ForCausalLM": Family(norms=_BOTH_SIDES),
    "VaultGemmaForCausalLM": Family(norms=("input_layernorm", None, "pre_feedforward_layernorm", None)),
    "Gemma3nForCausalLM": Family(norms=_BOTH_SIDES),
    "Gemma4ForCausalLM": Family(norms=_BOTH_SIDES),
    "Gemma4UnifiedForCausalLM": Family(norms=_BOTH_SIDES),
    "MinistralForCausalLM": Family(),
    "SeedOssForCausalLM": Family(),
    "CwmForCausalLM": Family(),
    "OlmoForCausalLM": Family(),
    "OlmoeForCausalLM": Family(),
    "FlexOlmoForCausalLM": Family(norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm")),
    "GraniteMoeForCausalLM": Family(mlp="block_sparse_moe"),
    "GraniteSWAForCausalLM": Family(),
    "GraniteMoeSWAForCausalLM": Family(mlp="block_sparse_moe"),
    "AriaTextForCausalLM": Family(),
    "MllamaForCausalLM": Family(),
    "Emu3ForCausalLM": Family(),
    "ExaoneMoeForCausalLM": Family(rotates="is_sliding"),
    "SolarOpenForCausalLM": Family(),
    "MiniMaxM2ForCausalLM": Family(),
    "HYV3ForCausalLM": Family(),
    "MiniCPM3ForCausalLM": Family(latent=True),
    "HyperCLOVAXForCausalLM": Family(
        logit_factor="logits_scaling", norms=("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    ),
    "Ministral3ForCausalLM": Family(),
    "Llama4ForCausalLM": Family(
        mlp="feed_forward", interleaved=True, head_norms=("qk_norm", "qk_norm"), rotated_first=True
    ),
    "HunYuanDenseV1ForCausalLM": Family(head_norms=("query_layernorm", "key_layernorm"), rotated_first=True),
    "HunYuanMoEV1ForCausalLM": Family(head_norms=("query_layernorm", "key_layernorm"), rotated_first=True),
    "GptOssForCausalLM": Family(),
    "Dots1ForCausalLM": Family(),
    "Glm4MoeForCausalLM": Family(),
    "DeepseekV2ForCausalLM": Family(latent=True, interleaved=True),
    "DeepseekV3ForCausalLM": Family(latent=True, interleaved="rope_interleave"),
    "Glm4MoeLiteForCausalLM": Family(latent=True, interleaved="rope_interleave"),
    "Mistral4ForCausalLM": Family(latent=True, interleaved="rope_interleave"),
    "AfmoeForCausalLM": Family(
        own_gate="gate_proj",
        rotates="is_local_attention",
        norms=("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
    ),
    "Ernie4_5ForCausalLM": Family(interleaved=True),
    "Ernie4_5_MoeForCausalLM": Family(interleaved=True),
    "HeliumForCausalLM": Family(interleaved=True),
    "GlmForCausalLM": Family(interleaved=True, gate="gate_up_proj", up=""),
    "Glm4ForCausalLM": Family(**_GLM4),
    "Glm4vTextModel": Family(**_GLM4),
    "GlmOcrTextModel": Family(**_GLM4),
    "Exaone4ForCausalLM": Family(
        rotates="is_sliding", norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    ),
    "Olmo3ForCausalLM": Family(norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm")),
    "OlmoHybridForCausalLM": Family(
        norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        state_norms=("input_layernorm", None, "post_attention_layernorm", None),
    ),
    "Cohere2ForCausalLM": Family(**_COHERE, rotates="sliding_window"),
    "Cohere2MoeForCausalLM": Family(**_COHERE, rotates="sliding_window force_rope"),
    "Olmo2ForCausalLM": Family(norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm")),
    "PhiForCausalLM": Family(
        final="final_layernorm",
        out="dense",
        head_norms=("q_layernorm", "k_layernorm"),
        gate="",
        up="fc1",
        down="fc2",
        norms=("input_layernorm", None, None, None),
        parallel=True,
    ),
    "NanoChatForCausalLM": Family(embedding_norm="norm", rotated_first=True, gate="", up="fc1", down="fc2"),
    "StableLmForCausalLM": Family(head_norms=("q_layernorm", "k_layernorm"), parallel="use_parallel_residual"),
    "CohereForCausalLM": Family(**_COHERE),
    "ApertusForCausalLM": Family(**_APERTUS),
    "Apertus1p5TextForCausalLM": Family(**_APERTUS),
    "ArceeForCausalLM": Family(gate=""),
    "Jais2ForCausalLM": Family(gate=""),
    "NemotronForCausalLM": Family(gate=""),
    "Starcoder2ForCausalLM": Family(gate="", up="c_fc", down="c_proj"),
    "GPTNeoXForCausalLM": Family(
        inner="gpt_neox",
        embedding="embed_in",
        final="final_layer_norm",
        head="embed_out",
        attention="attention",
        qkv=("query_key_value",),
        by_head=True,
        out="dense",
        gate="",
        up="dense_h_to_4h",
        down="dense_4h_to_h",
        parallel="use_parallel_residual",
    ),
    "FalconForCausalLM": Family(
        **_JOINED,
        norms=("ln_attn input_layernorm", None, "ln_mlp post_attention_layernorm", None),
        parallel="parallel_attn",
    ),
    "ModernBertDecoderForCausalLM": Family(
        embedding="embeddings.tok_embeddings",
        embedding_norm="embeddings.norm",
        final="final_norm",
        before_head="lm_head",
        head="decoder",
        attention="attn",
        out="Wo",
        gate="Wi",
        up="",
        down="Wo",
        norms=("attn_norm", None, "mlp_norm", None),
    ),
    "PersimmonForCausalLM": Family(
        final="final_layernorm",
        qkv=("query_key_value",),
        by_head=True,
        out="dense",
        head_norms=("q_layernorm", "k_layernorm"),
        gate="",
        up="dense_h_to_4h",
        down="dense_4h_to_h",
    ),
    "BloomForCausalLM": Family(**_JOINED, embedding_norm="word_embeddings_layernorm"),
    "MptForCausalLM": Family(
        inner="transformer",
        embedding="wte",
        layers="blocks",
        final="norm_f",
        attention="attn",
        qkv=("Wqkv",),
        out="out_proj",
        mlp="ffn",
        gate="",
        norms=("norm_1", None, "norm_2", None),
    ),
    "GPTJForCausalLM": Family(**_GPT_J),
    "CodeGenForCausalLM": Family(**_GPT_J, qkv=("qkv_proj",), parts=4),
    "GPT2LMHeadModel": Family(**_GPT_2),
    "GPTNeoForCausalLM": Family(
        **{**_GPT_2, "attention": "attn.attention", "qkv": ("q_proj", "k_proj", "v_proj"), "out": "out_proj"}
    ),
    "GPTBigCodeForCausalLM": Family(**_GPT_2),
    "OPTForCausalLM": Family(
        inner="model.decoder",
        positions=("embed_positions", 2),
        final="final_layer_norm",
        out="out_proj",
        scaled_queries=True,
        mlp="",
        gate="",
        up="fc1",
        down="fc2",
        norms=("self_attn_layer_norm", None, "final_layer_norm", None),
    ),
}


def module_of(module: Any, path: str) -> Any:
    """Return the module at a dotted path inside a module.

    Raises:
        AttributeError: if there is none.
    """
    return reduce(getattr, path.split("."), module)


def first_of(module: Any, names: str | None) -> Any:
    """Return the first module of these names that a module has; None if it has none."""
    for name in (names or "").split():
        with suppress(AttributeError):
            if (found := module_of(module, name)) is not None:
                return found
    return None
