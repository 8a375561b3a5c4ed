"""Models that nobody here wrote: small, with random weights and dropout, and a batch for each."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WORDS = 4, 90

SMALL: dict[str, Any] = {
    "attention_window": 8,
    "block_sizes": [2, 2],
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "bos_token_id": 1,
    "d_ff": 48,
    "d_head": 8,
    "d_inner": 48,
    "d_kv": 8,
    "d_model": 32,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "decoder_layers": 2,
    "decoder_start_token_id": 2,
    "depths": [2, 2],
    "dim": 32,
    "embed_dim": 16,
    "embedding_size": 32,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "encoder_layers": 2,
    "eos_token_id": 2,
    "ffn_dim": 48,
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "hidden_dim": 48,
    "hidden_size": 32,
    "hidden_sizes": [16, 32],
    "image_size": 32,
    "intermediate_size": 48,
    "kv_lora_rank": 16,
    "mamba_d_state": 8,
    "mask_time_length": 2,
    "max_decoder_position_embeddings": 64,
    "max_encoder_position_embeddings": 64,
    "max_position_embeddings": 128,
    "max_source_positions": 64,
    "moe_intermediate_size": 24,
    "n_embd": 32,
    "n_group": 2,
    "n_head": 4,
    "n_heads": 4,
    "n_layer": 3,
    "n_layers": 3,
    "n_positions": 128,
    "n_routed_experts": 4,
    "num_attention_heads": 4,
    "num_conv_pos_embedding_groups": 4,
    "num_conv_pos_embeddings": 16,
    "num_decoder_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_feat_extract_layers": 2,
    "num_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_layers": 2,
    "num_local_experts": 4,
    "num_mel_bins": 16,
    "pad_token_id": 0,
    "patch_size": 8,
    "projection_dim": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
    "shared_expert_intermediate_size": 24,
    "state_size": 8,
    "topk_group": 1,
    "v_head_dim": 8,
    "vocab_size": 99,
    "window_size": 4,
    "word_embed_proj_dim": 32,
}


@dataclass(frozen=True)
class Family:
    """A model, and what it learns from."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    forward: Callable[[nn.Module, Any], Any] | None = None
    has_tail: bool = False
    refusal: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def words(length: int = 24) -> Tensor:
    return torch.randint(3, WORDS, (ROWS, length), generator=torch.Generator().manual_seed(3))


def mask(length: int = 24) -> Tensor:
    kept = torch.ones(ROWS, length, dtype=torch.long)
    kept[1, 16:] = 0
    kept[3, 10:] = 0
    return kept


def classes() -> Tensor:
    return torch.tensor([0, 1, 1, 0])


def text() -> dict[str, Tensor]:
    labels = words().masked_fill(mask() == 0, -100)
    return {"input_ids": words(), "attention_mask": mask(), "labels": labels}


def whole_text() -> dict[str, Tensor]:
    return {"input_ids": words(), "labels": words()}


def classified_text() -> dict[str, Tensor]:
    return {"input_ids": words(), "attention_mask": mask(), "labels": classes()}


def translated() -> dict[str, Tensor]:
    return {**text(), "labels": text()["labels"][:, :10].contiguous()}


def images(size: int = 32) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": drawn(ROWS, 3, size, size), "labels": classes()}


def waves() -> dict[str, Tensor]:
    return {"input_values": drawn(ROWS, 1600), "labels": words(6).remainder(20) + 1}


def spectra() -> dict[str, Tensor]:
    return {"input_features": drawn(ROWS, 16, 128), "labels": words(12)}


def captions() -> dict[str, Tensor]:
    return {"input_ids": words(), "attention_mask": mask(), "pixel_values": drawn(ROWS, 3, 32, 32)}


def small_config(config: Any, given: Mapping[str, Any]) -> Any:
    """One of the same class, with numbers of a small model and a chance of dropout."""
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
    """Makes a model of transformers'; ``kind`` is what comes behind ``AutoModel``."""

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
            *("bloom", "codegen", "cohere", "ctrl", "falcon", "gemma", "gemma3_text", "gpt2"),
            *("gpt_neox", "gptj", "granite", "llama", "mistral", "olmo2", "opt", "phi", "phi3"),
            *("qwen2", "qwen3", "stablelm", "starcoder2", "xglm"),
            *("gpt_oss", "granitemoe", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"),
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

_TEXTS = (
    *("bert", "big_bird", "convbert", "deberta", "deberta-v2", "distilbert", "electra", "fnet"),
    *("funnel", "longformer", "modernbert", "mpnet", "roberta", "roformer", "squeezebert"),
)
_STAGES: dict[str, Any] = {"depths": [2, 2, 2, 2], "hidden_sizes": [16, 16, 32, 32]}
_HEADS = {"num_attention_heads": [1, 2, 2, 4]}
_WINDOWS = {"patch_size": 4, "num_heads": [2, 4]}

OTHERS = {
    **{
        name: Family(of_transformers(name, "ForSequenceClassification"), classified_text)
        for name in _TEXTS
    },
    **{
        name: Family(of_transformers(name, "ForSeq2SeqLM"), translated)
        for name in ("bart", "blenderbot", "led", "m2m_100", "marian", "mbart", "pegasus")
    },
    **{
        name: Family(of_transformers(name, "ForSeq2SeqLM", decoder_start_token_id=0), translated)
        for name in ("switch_transformers", "t5", "umt5")
    },
    **{
        name: Family(of_transformers(name, "ForImageClassification", **given), images(size))
        for name, size, given in (
            ("beit", 32, {}),
            ("convnext", 64, _STAGES),
            ("convnextv2", 64, _STAGES),
            ("dinov2", 32, {}),
            ("poolformer", 64, _STAGES),
            ("pvt", 64, {**_STAGES, **_HEADS, "image_size": 64}),
            ("regnet", 32, {"embedding_size": 16}),
            ("resnet", 64, {**_STAGES, "embedding_size": 16}),
            ("segformer", 64, {**_STAGES, **_HEADS}),
            ("swin", 32, _WINDOWS),
            ("swinv2", 32, _WINDOWS),
            ("vit", 32, {}),
        )
    },
    **{
        name: Family(of_transformers(name, "ForCTC", layerdrop=0.1), waves)
        for name in ("hubert", "wav2vec2", "wav2vec2-conformer", "wavlm")
    },
    "sew": Family(of_transformers("sew", "ForCTC"), waves),
    "whisper": Family(
        of_transformers(
            "whisper", "ForSpeechSeq2Seq", encoder_layerdrop=0.1, decoder_layerdrop=0.1
        ),
        spectra,
    ),
    **{name: Family(of_transformers(name, ""), captions, _contrasted) for name in ("blip", "clip")},
}


class Translator(nn.Module):
    """torch's own transformer, with masks."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Transformer(32, 4, 2, 2, 64, dropout=0.1, batch_first=True, **options)

    def forward(self, sources: Tensor, targets: Tensor, ignored: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(targets.shape[1])
        found = self.inner(
            sources,
            targets,
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=ignored,
            memory_key_padding_mask=ignored,
        )
        loss: Tensor = found.square().mean()
        return loss


def _translator(**options: Any) -> Family:
    return Family(
        lambda: Translator(**options),
        lambda: (drawn(ROWS, 24, 32), drawn(ROWS, 12, 32), mask() == 0),
        lambda model, batch: model(*batch),
    )


OTHERS["torch.nn.Transformer"] = _translator()
OTHERS["torch.nn.Transformer, norm first"] = _translator(norm_first=True, activation="gelu")


def of_torchvision(name: str, size: int = 64, **given: Any) -> Family:
    def make() -> nn.Module:
        models = importlib.import_module("torchvision.models")
        torch.manual_seed(0)
        model: nn.Module = getattr(models, name)(weights=None, num_classes=5, **given)
        return model.train()

    def forward(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])

    return Family(make, images(size), forward)


# They are no part of the tests' own environment; where they are installed, they are tried.
OF_TORCHVISION = (
    {
        **{
            name: of_torchvision(name)
            for name in (
                *("convnext_tiny", "densenet121", "efficientnet_b0", "mnasnet0_5"),
                *("mobilenet_v3_small", "regnet_y_400mf", "resnet18", "resnet50"),
                *("resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "swin_t", "swin_v2_t"),
            )
        },
        "densenet121, memory efficient": of_torchvision(
            "densenet121", memory_efficient=True, drop_rate=0.1
        ),
        "efficientnet_v2_s": of_torchvision("efficientnet_v2_s"),
        "maxvit_t": of_torchvision("maxvit_t", 224, input_size=(224, 224)),
        "vit_b_32": of_torchvision("vit_b_32", 224, dropout=0.1, attention_dropout=0.1),
    }
    if importlib.util.find_spec("torchvision")
    else {}
)
