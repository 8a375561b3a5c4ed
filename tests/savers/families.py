"""Small models of other libraries, with random weights and dropout, and a batch for each."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

ROWS, WORDS = 4, 90

_SIZES = {
    0: "pad_token_id",
    1: "bos_token_id first_k_dense_replace topk_group",
    2: """
        decoder_layers decoder_start_token_id encoder_layers eos_token_id mask_time_length
        n_group num_decoder_layers num_experts_per_tok num_feat_extract_layers
        num_key_value_heads num_layers
    """,
    3: "n_layer n_layers num_hidden_layers",
    4: """
        decoder_attention_heads encoder_attention_heads n_head n_heads n_routed_experts
        num_attention_heads num_conv_pos_embedding_groups num_experts num_heads
        num_local_experts window_size
    """,
    8: """
        attention_window d_head d_kv head_dim mamba_d_state patch_size qk_nope_head_dim
        qk_rope_head_dim rotary_dim state_size v_head_dim
    """,
    16: """
        embed_dim kv_lora_rank num_conv_pos_embeddings num_mel_bins projection_dim
        q_lora_rank
    """,
    24: "moe_intermediate_size shared_expert_intermediate_size",
    32: "d_model dim embedding_size hidden_size image_size n_embd word_embed_proj_dim",
    48: "d_ff d_inner decoder_ffn_dim encoder_ffn_dim ffn_dim hidden_dim intermediate_size",
    64: "max_decoder_position_embeddings max_encoder_position_embeddings max_source_positions",
    99: "vocab_size",
    128: "max_position_embeddings n_positions",
}
SMALL: dict[str, Any] = {
    **{name: size for size, names in _SIZES.items() for name in names.split()},
    "block_sizes": [2, 2],
    "depths": [2, 2],
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "hidden_sizes": [16, 32],
}


@dataclass(frozen=True)
class Family:
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    forward: Callable[[nn.Module, Any], Any] | None = None
    has_tail: bool = False
    refusal: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def words(length=24):
    return torch.randint(3, WORDS, (ROWS, length), generator=torch.Generator().manual_seed(3))


def mask(length=24):
    kept = torch.ones(ROWS, length, dtype=torch.long)
    kept[1, 16:] = 0
    kept[3, 10:] = 0
    return kept


def classes():
    return torch.tensor([0, 1, 1, 0])


def text():
    labels = words().masked_fill(mask() == 0, -100)
    return {"input_ids": words(), "attention_mask": mask(), "labels": labels}


def whole_text():
    return {"input_ids": words(), "labels": words()}


def classified_text():
    return {**text(), "labels": classes()}


def translated():
    return {**text(), "labels": text()["labels"][:, :10].contiguous()}


def images(size=32):
    return lambda: {"pixel_values": drawn(ROWS, 3, size, size), "labels": classes()}


def waves():
    return {"input_values": drawn(ROWS, 1600), "labels": words(6).remainder(20) + 1}


def spectra():
    return {"input_features": drawn(ROWS, 16, 128), "labels": words(12)}


def captions():
    return {"input_ids": words(), "attention_mask": mask(), "pixel_values": drawn(ROWS, 3, 32, 32)}


def small_config(config: Any, given: Mapping[str, Any]) -> Any:
    """Return a config of the same class for a small model with dropout."""
    import transformers

    options: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in name or "pdrop" in name):
            options[name] = 0.1
        elif name in SMALL and isinstance(value, list | tuple) == isinstance(SMALL[name], list):
            options[name] = SMALL[name]
    for name in type(config).sub_configs:
        part = getattr(config, name)
        if isinstance(part, transformers.PreTrainedConfig):
            options[name] = small_config(part, {}).to_dict()
    return type(config)(**{**options, **given})


def of_transformers(name: str, kind: str, **given: Any) -> Callable[[], Any]:
    """Return a maker of a transformers model; ``kind`` is the suffix of ``AutoModel``."""

    def make() -> Any:
        import transformers

        torch.manual_seed(0)
        config = small_config(transformers.CONFIG_MAPPING[name](), given)
        return getattr(transformers, f"AutoModel{kind}").from_config(config).train()

    return make


def _language(name: str, batch: Any = text, refusal: str = "", **given: Any) -> Family:
    make = of_transformers(name, "ForCausalLM", **given)
    return Family(make, batch, has_tail=True, refusal=refusal)


def _contrasted(model: nn.Module, batch: Any) -> Any:
    return model(**batch, return_loss=True).loss


_CAPPED = "changes its logits"

LANGUAGE = {
    **{
        name: _language(name)
        for name in (
            *("bloom", "cohere", "ctrl", "falcon", "gemma3_text", "gpt2", "gpt_neox", "gptj"),
            *("granite", "llama", "mistral", "olmo2", "opt", "phi", "qwen3", "xglm"),
            *("gpt_oss", "granitemoe", "mixtral", "qwen2_moe"),
        )
    },
    "deepseek_v3": _language("deepseek_v3", num_key_value_heads=4),
    "gemma2": _language("gemma2", refusal=_CAPPED),
    "gemma3n": _language(
        "gemma3n_text",
        refusal=_CAPPED,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 6,
        intermediate_size=[48] * 6,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=99,
    ),
    "jamba": _language("jamba", attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
    "falcon_mamba": _language("falcon_mamba", whole_text),
    "mamba": _language("mamba", whole_text),
    "mamba2": _language("mamba2", whole_text, head_dim=16, n_groups=1, chunk_size=8),
    "recurrent_gemma": _language("recurrent_gemma", whole_text, refusal=_CAPPED),
}

_STAGES: dict[str, Any] = {"depths": [2, 2, 2, 2], "hidden_sizes": [16, 16, 32, 32]}
_HEADS = {**_STAGES, "num_attention_heads": [1, 2, 2, 4]}
_DROPS = {"encoder_layerdrop": 0.1, "decoder_layerdrop": 0.1}
_START = {"decoder_start_token_id": 0}
_PATCHES = {"patch_size": 4, "num_heads": [2, 4]}
# The suffix of `AutoModel`, the batch, the options of configs, and names of families.
# fmt: off
_KINDS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("ForSequenceClassification", classified_text, {}, "bert big_bird convbert deberta-v2 funnel longformer modernbert"),  # noqa: E501
    ("ForSeq2SeqLM", translated, {}, "bart led m2m_100"),
    ("ForSeq2SeqLM", translated, _START, "switch_transformers t5"),
    ("ForImageClassification", images(32), {}, "beit vit"),
    ("ForImageClassification", images(64), _STAGES, "convnext"),
    ("ForImageClassification", images(64), {**_HEADS, "image_size": 64}, "pvt"),
    ("ForImageClassification", images(32), {"embedding_size": 16}, "regnet"),
    ("ForImageClassification", images(64), {**_STAGES, "embedding_size": 16}, "resnet"),
    ("ForImageClassification", images(64), _HEADS, "segformer"),
    ("ForImageClassification", images(32), _PATCHES, "swin"),
    ("ForCTC", waves, {"layerdrop": 0.1}, "wav2vec2 wav2vec2-conformer wavlm"),
    ("ForCTC", waves, {}, "sew"),
    ("ForSpeechSeq2Seq", spectra, _DROPS, "whisper"),
]
# fmt: on
OTHERS = {
    name: Family(of_transformers(name, kind, **given), batch)
    for kind, batch, given, names in _KINDS
    for name in names.split()
}
for _name in ("blip", "clip"):
    OTHERS[_name] = Family(of_transformers(_name, ""), captions, _contrasted)


class Translator(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Transformer(32, 4, 2, 2, 64, dropout=0.1, batch_first=True, **options)

    def forward(self, sources, targets, ignored):
        causal = nn.Transformer.generate_square_subsequent_mask(targets.shape[1])
        masks = {"src_key_padding_mask": ignored, "memory_key_padding_mask": ignored}
        found = self.inner(sources, targets, tgt_mask=causal, tgt_is_causal=True, **masks)
        return found.square().mean()


for _name, _options in (("", {}), (", norm first", {"norm_first": True, "activation": "gelu"})):
    OTHERS[f"torch.nn.Transformer{_name}"] = Family(
        functools.partial(Translator, **_options),
        lambda: (drawn(ROWS, 24, 32), drawn(ROWS, 12, 32), mask() == 0),
        lambda model, batch: model(*batch),
    )
