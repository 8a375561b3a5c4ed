"""Families of transformers, from tiny configurations, with the batches they train on."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tests.acceptance.families import Family
from tests.acceptance.rows import Batch, Draws

V, ROWS, LENGTH, IMAGE = 37, 8, 9, 8
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
TINY: dict[str, Any] = {**SMALL, "vocab_size": V, "max_position_embeddings": 64}
ENDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
GPT: dict[str, Any] = {
    "vocab_size": V,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    **ENDS,
}
SEQ2SEQ: dict[str, Any] = {
    **ENDS,
    "vocab_size": V,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 64,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 2,
}
T5: dict[str, Any] = {
    "vocab_size": V,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
VISION: dict[str, Any] = {**SMALL, "image_size": IMAGE, "patch_size": 4, "num_labels": 3}
TOWERS: dict[str, Any] = {
    "text_config": {**TINY, "max_position_embeddings": 16, "projection_dim": 8, "eos_token_id": 2},
    "vision_config": {**SMALL, "image_size": IMAGE, "patch_size": 4, "projection_dim": 8},
}
WAVES: dict[str, Any] = {
    **SMALL,
    "vocab_size": V,
    "conv_dim": (8, 8),
    "conv_kernel": (8, 5),
    "conv_stride": (5, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "ctc_zero_infinity": True,
    "num_feat_extract_layers": 2,
}
# One expert after another, because torch's grouped product supports only float32.
EAGER: dict[str, Any] = {
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}
MOE: dict[str, Any] = {**EAGER, "output_router_logits": True, "router_aux_loss_coef": 0.1}

# Batches


def ids(d: Draws, length: int = LENGTH) -> Tensor:
    return d.whole(5, V, ROWS, length)


def ignored(d: Draws, labels: Tensor) -> Tensor:
    """Return labels of which only the first few per row count, at least two."""
    keep = d.mask(*labels.shape)
    keep[:, :2] = True
    return labels.where(keep, -100)


def language(d: Draws) -> Any:
    drawn = ids(d)
    return {"input_ids": drawn, "labels": ignored(d, drawn.clone())}


def long(length: int) -> Batch:
    def batch(d: Draws) -> Any:
        drawn = ids(d, length)
        return {"input_ids": drawn, "labels": ignored(d, drawn.clone())}

    return batch


def masked(d: Draws) -> Any:
    return {**language(d), "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.int64)}


def translation(d: Draws) -> Any:
    return {"input_ids": ids(d), "labels": ignored(d, ids(d))}


def tags(d: Draws) -> Any:
    return {"input_ids": ids(d), "labels": ignored(d, d.whole(0, 3, ROWS, LENGTH))}


def labels(d: Draws) -> Any:
    return {"input_ids": ids(d), "labels": d.whole(0, 3, ROWS)}


def bits(d: Draws) -> Any:
    return {"input_ids": ids(d), "labels": d.whole(0, 2, ROWS, 3).to(d.real)}


def scores(d: Draws) -> Any:
    return {"input_ids": ids(d), "labels": d.normal(ROWS)}


def choices(d: Draws) -> Any:
    return {"input_ids": d.whole(5, V, ROWS, 2, LENGTH), "labels": d.whole(0, 2, ROWS)}


def spans(d: Draws) -> Any:
    places = {f"{end}_positions": d.whole(0, LENGTH, ROWS) for end in ("start", "end")}
    return {"input_ids": ids(d), **places}


def two_tasks(d: Draws) -> Any:
    return {**language(d), "next_sentence_label": d.whole(0, 2, ROWS)}


def pictures(size: int = IMAGE) -> Batch:
    return lambda d: {"pixel_values": d.normal(ROWS, 3, size, size), "labels": d.whole(0, 3, ROWS)}


def segments(d: Draws) -> Any:
    return {"pixel_values": d.normal(ROWS, 3, 32, 32), "labels": d.whole(0, 3, ROWS, 32, 32)}


def captions(d: Draws) -> Any:
    return {
        "input_ids": ids(d),
        "pixel_values": d.normal(ROWS, 3, IMAGE, IMAGE),
        "return_loss": True,
    }


def talks(d: Draws) -> Any:
    return {"input_values": d.normal(ROWS, 400), "labels": ignored(d, ids(d, 4))}


def spectra(d: Draws) -> Any:
    return {"input_features": d.normal(ROWS, 16, 40), "labels": ignored(d, ids(d))}


def classes_of_series(d: Draws) -> Any:
    return {"past_values": d.normal(ROWS, 16, 2), "target_values": d.whole(0, 3, ROWS)}


def forecasts(d: Draws) -> Any:
    return {"past_values": d.normal(ROWS, 16, 2), "future_values": d.normal(ROWS, 4, 2)}


def probable_forecasts(d: Draws) -> Any:
    past = {"past_values": d.normal(ROWS, 10), "past_time_features": d.normal(ROWS, 10, 1)}
    future = {"future_values": d.normal(ROWS, 4), "future_time_features": d.normal(ROWS, 4, 1)}
    return {**past, **future, "past_observed_mask": torch.ones(ROWS, 10)}


def boxes(d: Draws) -> Any:
    targets = [
        {"class_labels": d.whole(0, 3, n), "boxes": 0.2 + 0.3 * d.uniform(n, 4)}
        for n in map(int, d.whole(1, 4, ROWS))
    ]
    return {"pixel_values": d.normal(ROWS, 3, 32, 32), "labels": targets}


def pictures_in_text(d: Draws) -> Any:
    words = language(d)
    seen = torch.full((ROWS, 4), 3)
    return {
        "input_ids": torch.cat([seen, words["input_ids"]], 1),
        "labels": torch.cat([torch.full_like(seen, -100), words["labels"]], 1),
        "pixel_values": d.normal(ROWS, 3, IMAGE, IMAGE),
    }


def bytes_of_text(d: Draws) -> Any:
    words = long(16)(d)
    return {
        "inputs": words["input_ids"],
        "labels": words["labels"],
        "attention_mask": torch.ones(ROWS, 16),
    }


# Families


def family(kind: str, batch: Batch, config: str = "", **options: Any) -> Family:
    """Make a family; by default, the config is named like the model without its head."""
    base = kind.removesuffix("LMHeadModel").removesuffix("Model")
    config = config or (kind.rpartition("For")[0] if "For" in kind else base) + "Config"
    return Family(kind=kind, config=config, batch=batch, options=options)


def causal(name: str, **options: Any) -> Family:
    return family(f"{name}ForCausalLM", language, **{**TINY, **ENDS, **options})


def bert(name: str, head: str = "MaskedLM", batch: Batch = language, **options: Any) -> Family:
    return family(f"{name}For{head}", batch, **{**TINY, **ENDS, **options})


def dynamic(name: str) -> dict[str, Any]:
    return {"rope_type": name, "factor": 2.0, "rope_theta": 10000.0}


PLAIN = [
    "Llama",
    "Mistral",
    "Qwen2",
    "StableLm",
    "Starcoder2",
    "Granite",
    "Olmo",
    "Olmo2",
    "Cohere",
    "Phi3",
]
HEADED = ["Gemma", "Gemma2", "Qwen3", "Glm", "Helium", "Nemotron", "SmolLM3", "Ernie4_5"]
TRANSFORMERS: dict[str, Family] = {
    **{name: causal(name, num_key_value_heads=1) for name in PLAIN},
    **{name: causal(name, num_key_value_heads=1, head_dim=8) for name in HEADED},
    **{name: causal(name) for name in ("Phi", "GPTNeoX", "Persimmon")},
    "Gemma3": family("Gemma3ForCausalLM", language, "Gemma3TextConfig", **TINY, **ENDS, num_key_value_heads=1, head_dim=8, sliding_window=4),
    "Llama, dynamic rope": causal("Llama", num_key_value_heads=1, max_position_embeddings=4, rope_parameters=dynamic("dynamic")),
    "Mistral, sliding": causal("Mistral", num_key_value_heads=1, sliding_window=4),
    "GPT-2": family("GPT2LMHeadModel", language, **GPT),
    "GPT-2, classes": family("GPT2ForSequenceClassification", labels, **GPT, num_labels=3),
    "GPTJ": family("GPTJForCausalLM", language, **GPT, rotary_dim=4),
    "CodeGen": family("CodeGenForCausalLM", language, **{**GPT, "n_head": 4}, rotary_dim=4),
    "GPTBigCode": family("GPTBigCodeForCausalLM", language, **GPT),
    "GPTNeo": family("GPTNeoForCausalLM", language, **ENDS, vocab_size=V, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], max_position_embeddings=32),
    "OPT": family("OPTForCausalLM", masked, **{**TINY, **ENDS}, ffn_dim=24, word_embed_proj_dim=16),
    "Bloom": family("BloomForCausalLM", language, **ENDS, vocab_size=V, hidden_size=16, n_layer=1, n_head=2),
    "Falcon": family("FalconForCausalLM", language, **ENDS, vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, alibi=True),
    "MPT": family("MptForCausalLM", language, d_model=16, n_heads=2, n_layers=1, vocab_size=V, max_seq_len=32),
    "XGLM": family("XGLMForCausalLM", language, **ENDS, vocab_size=V, d_model=16, ffn_dim=24, num_layers=1, attention_heads=2),
    "BioGpt": causal("BioGpt"),
    "Mamba": family("MambaForCausalLM", language, vocab_size=V, hidden_size=16, num_hidden_layers=1, state_size=4),
    "Mamba2": family("Mamba2ForCausalLM", language, vocab_size=V, hidden_size=16, num_hidden_layers=1, state_size=4, num_heads=4, head_dim=8, n_groups=2, chunk_size=4),
    "RWKV": family("RwkvForCausalLM", language, vocab_size=V, hidden_size=16, num_hidden_layers=2, context_length=16),
    "RecurrentGemma": family("RecurrentGemmaForCausalLM", language, **TINY | {"num_hidden_layers": 3}, lru_width=16, attention_window_size=8),
    "Jamba": causal("Jamba", **EAGER, num_hidden_layers=2, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=2, output_router_logits=False),
    "Mixtral": causal("Mixtral", **MOE, num_local_experts=4),
    "Mixtral, no balance": causal("Mixtral", **EAGER, num_local_experts=4),
    "Qwen2-MoE": causal("Qwen2Moe", **MOE, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16),
    "Qwen3-MoE": causal("Qwen3Moe", **MOE, head_dim=8, num_experts=4, moe_intermediate_size=16),
    "OLMoE": causal("Olmoe", **MOE, num_experts=4),
    # Encoders
    "BERT": bert("Bert"),
    "BERT, classes": bert("Bert", "SequenceClassification", labels, num_labels=3),
    "BERT, several labels": bert("Bert", "SequenceClassification", bits, num_labels=3, problem_type="multi_label_classification"),
    "BERT, scores": bert("Bert", "SequenceClassification", scores, num_labels=1),
    "BERT, tags": bert("Bert", "TokenClassification", tags, num_labels=3),
    "BERT, choices": bert("Bert", "MultipleChoice", choices),
    "BERT, spans": bert("Bert", "QuestionAnswering", spans),
    "BERT, two tasks": bert("Bert", "PreTraining", two_tasks),
    "BERT, a decoder": family("BertGenerationDecoder", language, "BertGenerationConfig", **TINY, **ENDS, is_decoder=True),
    **{name: bert(name) for name in ("Roberta", "Camembert", "XLMRoberta", "MPNet", "RoFormer")},
    "SqueezeBERT": bert("SqueezeBert", embedding_size=16),
    "ELECTRA, tags": bert("Electra", "TokenClassification", tags, embedding_size=16, num_labels=3),
    "ALBERT, classes": bert("Albert", "SequenceClassification", labels, embedding_size=8, num_labels=3),
    "DistilBERT": family("DistilBertForMaskedLM", language, vocab_size=V, dim=16, hidden_dim=24, n_layers=1, n_heads=2, max_position_embeddings=32),
    "DeBERTa": bert("Deberta", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "DeBERTa-v2": bert("DebertaV2", relative_attention=True, position_buckets=8, max_relative_positions=16, pos_att_type=["p2c", "c2p"]),
    "ConvBERT": bert("ConvBert", embedding_size=16),
    "Nyströmformer": bert("Nystromformer", num_landmarks=3, segment_means_seq_len=9),
    "MobileBERT": bert("MobileBert", embedding_size=16, intra_bottleneck_size=16),
    "ModernBERT": bert("ModernBert", pad_token_id=1, local_attention=4, cls_token_id=0, sep_token_id=2),
    "Longformer": family("LongformerForMaskedLM", long(8), **{**TINY, **ENDS}, attention_window=[4]),
    "BigBird": family("BigBirdForMaskedLM", long(64), **{**TINY, **ENDS, "max_position_embeddings": 128}, attention_type="original_full"),
    "BigBird, sparse": family("BigBirdForMaskedLM", long(64), **{**TINY, **ENDS, "max_position_embeddings": 128}, attention_type="block_sparse", block_size=4, num_random_blocks=1),
    "XLNet": family("XLNetLMHeadModel", language, vocab_size=V, d_model=16, n_layer=1, n_head=2, d_inner=24),
    "XLM": family("XLMWithLMHeadModel", language, "XLMConfig", vocab_size=V, emb_dim=16, n_layers=1, n_heads=2, pad_index=0),
    "FlauBERT": family("FlaubertWithLMHeadModel", language, "FlaubertConfig", vocab_size=V, emb_dim=16, n_layers=1, n_heads=2, pad_index=0),
    "Reformer, local": family("ReformerModelWithLMHead", long(16), "ReformerConfig", vocab_size=V, is_decoder=True, attn_layers=["local"], num_attention_heads=2, attention_head_size=8, hidden_size=16, feed_forward_size=24, axial_pos_shape=(4, 4), axial_pos_embds_dim=(8, 8), local_attn_chunk_length=4, max_position_embeddings=16),
    "Perceiver": family("PerceiverForMaskedLM", bytes_of_text, d_model=16, num_latents=4, d_latents=16, num_blocks=1, num_self_attends_per_block=1, num_self_attention_heads=2, num_cross_attention_heads=2, vocab_size=V, max_position_embeddings=16, qk_channels=16, v_channels=16),
    # Encoders with decoders
    "T5": family("T5ForConditionalGeneration", translation, **T5),
    "mT5": family("MT5ForConditionalGeneration", translation, **T5),
    "LongT5": family("LongT5ForConditionalGeneration", translation, **T5, local_radius=4),
    "BART": family("BartForConditionalGeneration", translation, **SEQ2SEQ),
    "BART, its decoder": family("BartForCausalLM", language, "BartConfig", **SEQ2SEQ),
    "mBART": family("MBartForConditionalGeneration", translation, **SEQ2SEQ),
    "Pegasus": family("PegasusForConditionalGeneration", translation, **SEQ2SEQ),
    "Blenderbot": family("BlenderbotForConditionalGeneration", translation, **SEQ2SEQ),
    "M2M100": family("M2M100ForConditionalGeneration", translation, **SEQ2SEQ),
    "Marian": family("MarianMTModel", translation, "MarianConfig", **SEQ2SEQ, decoder_vocab_size=V, forced_eos_token_id=2),
    "LED": family("LEDForConditionalGeneration", translation, **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"}, attention_window=[4], max_encoder_position_embeddings=64, max_decoder_position_embeddings=64),
    "ProphetNet": family("ProphetNetForConditionalGeneration", translation, vocab_size=V, hidden_size=16, num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=2, num_decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, decoder_start_token_id=0),
    # Pictures
    "ViT": family("ViTForImageClassification", pictures(), **VISION),
    "DeiT": family("DeiTForImageClassification", pictures(), **VISION),
    "BEiT": family("BeitForImageClassification", pictures(), **VISION),
    "DINOv2": family("Dinov2ForImageClassification", pictures(), **VISION),
    "Swin": family("SwinForImageClassification", pictures(16), image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4, num_labels=3, drop_path_rate=0.0),
    "ConvNeXt": family("ConvNextForImageClassification", pictures(16), hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3),
    "ConvNeXt-v2": family("ConvNextV2ForImageClassification", pictures(16), hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3),
    "PoolFormer": family("PoolFormerForImageClassification", pictures(16), hidden_sizes=[8, 16], depths=[1, 1], num_encoder_blocks=2, patch_sizes=[3, 3], strides=[2, 2], padding=[1, 1], num_labels=3, drop_path_rate=0.0),
    "ResNet": family("ResNetForImageClassification", pictures(16), embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3),
    "RegNet": family("RegNetForImageClassification", pictures(16), embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4, num_labels=3),
    "EfficientNet": family("EfficientNetForImageClassification", pictures(32), image_size=32, width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320, num_labels=3, initializer_range=0.5),
    "MobileNet-v2": family("MobileNetV2ForImageClassification", pictures(32), image_size=32, depth_multiplier=0.25, num_labels=3),
    "SegFormer": family("SegformerForSemanticSegmentation", segments, hidden_sizes=[8, 16], depths=[1, 1], sr_ratios=[2, 1], num_attention_heads=[1, 2], num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=3, drop_path_rate=0.0),
    "YOLOS": family("YolosForObjectDetection", boxes, **SMALL, image_size=[32, 32], patch_size=16, num_labels=3, num_detection_tokens=5),
    # Pictures and words
    "CLIP": family("CLIPModel", captions, **TOWERS, projection_dim=8),
    "SigLIP": family("SiglipModel", captions, **TOWERS),
    "LLaVA": family("LlavaForConditionalGeneration", pictures_in_text, image_token_index=3, vision_feature_layer=-1, vision_feature_select_strategy="default",
                    vision_config={"model_type": "clip_vision_model", **SMALL, "image_size": IMAGE, "patch_size": 4},
                    text_config={"model_type": "llama", **TINY, "num_key_value_heads": 1}),
    # Sounds and series
    "Wav2Vec2, a sum": family("Wav2Vec2ForCTC", talks, **WAVES, ctc_loss_reduction="sum"),
    "Wav2Vec2, a mean": family("Wav2Vec2ForCTC", talks, **WAVES, ctc_loss_reduction="mean"),
    "HuBERT": family("HubertForCTC", talks, **WAVES, ctc_loss_reduction="sum"),
    "HuBERT, BatchNorm": family("HubertForCTC", talks, **WAVES, ctc_loss_reduction="sum", conv_pos_batch_norm=True),
    "UniSpeech": family("UniSpeechForCTC", talks, **WAVES, ctc_loss_reduction="sum"),
    "Whisper": family("WhisperForConditionalGeneration", spectra, **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"}, num_mel_bins=16, max_source_positions=20, max_target_positions=32),
    "PatchTST, classes": family("PatchTSTForClassification", classes_of_series, num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, d_model=16, num_attention_heads=2, num_hidden_layers=1, ffn_dim=24, norm_type="layernorm", num_targets=3),
    "PatchTST, forecasts": family("PatchTSTForPrediction", forecasts, num_input_channels=2, context_length=16, prediction_length=4, patch_length=4, patch_stride=4, d_model=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16),
    "Informer": family("InformerForPrediction", probable_forecasts, prediction_length=4, context_length=8, lags_sequence=[1, 2], input_size=1, num_time_features=1, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16),
    "time series": family("TimeSeriesTransformerForPrediction", probable_forecasts, prediction_length=4, context_length=8, lags_sequence=[1, 2], input_size=1, num_time_features=1, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16),
}  # fmt: skip


def labels_that_count(batch: Any) -> Any:
    return (batch["labels"] != -100).sum()


# These declare a causal loss or none, but do not shift their labels.
UNSHIFTED = ("BART, its decoder", "XLM", "FlauBERT", "XLNet")
for name in UNSHIFTED:
    TRANSFORMERS[f"{name}, declared"] = dataclasses.replace(
        TRANSFORMERS[name], declared={"loss_average": labels_that_count}
    )
