"""Families with sparse latent attention (DSA): DeepSeek V3.2 and GLM-5. An indexer chooses the positions that a row
reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from penstock.generation.core.index_heads import IndexHeads
from penstock.generation.core.index_layers import read_index_layers
from penstock.generation.core.model_config import ConfigReader, ModelConfig
from penstock.generation.models.latent_families import LATENT_WIDTHS, V3_EXPERTS, finish_v3, like_v3


def _sparse(
    config: ConfigReader,
    model: ModelConfig,
    *,
    widths: Mapping[str, int],
    fields: Mapping[str, int],
    heads: int,
    is_interleaved: bool,
) -> ModelConfig:
    """Return the model with its indexer. `heads`: their number in the configuration class; `is_interleaved`: of the
    indexer's rotary embedding."""
    model = finish_v3(config, model, widths=widths, fields=fields, scale=2.5)
    latent = model.latent
    assert latent is not None
    if not latent.query_rank:
        raise config.error("q_lora_rank", "must be a whole number: the indexer reads the queries' narrow part")
    index = IndexHeads(
        count=config.integer("index_n_heads", heads),
        dim=config.integer("index_head_dim", 128),
        # Attention over one position is taken for that of a first token to itself.
        most=config.integer("index_topk", 2048, minimum=2),
        layers=read_index_layers(config, model.model_type, model.num_layers),
        is_interleaved=is_interleaved,
    )
    if index.dim < latent.turned_dim:
        raise config.error("index_head_dim", f"({index.dim}) is less than qk_rope_head_dim ({latent.turned_dim})")
    # transformers' modules do not read `rope_interleave`.
    return replace(model, index=index, rope=replace(model.rope, is_interleaved=True))


DEEPSEEK_V32 = replace(
    like_v3(
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "max_position_embeddings": 163840,
        },
    ),
    finish=partial(_sparse, widths=LATENT_WIDTHS, fields=V3_EXPERTS, heads=64, is_interleaved=False),
)
# GLM-5. Its layers may share a choice.
GLM_MOE_DSA = replace(
    like_v3(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        {
            "vocab_size": 154880,
            "hidden_size": 6144,
            "intermediate_size": 12288,
            "num_hidden_layers": 78,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "max_position_embeddings": 202752,
        },
        eps=1e-5,
    ),
    finish=partial(
        _sparse,
        widths={**LATENT_WIDTHS, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256},
        fields={**V3_EXPERTS, "n_group": 1, "topk_group": 1},
        heads=32,
        is_interleaved=True,
    ),
)
