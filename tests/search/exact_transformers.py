"""Families of transformers from tiny configurations, whose own losses split exactly."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.search.exact_jobs import ROWS, ExactJob, ignored, x

VOCABULARY = 37
LENGTH = 9
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
FLOAT32_LOSS = 1e-6  # these families compute their loss in float32, whatever the model


def ids(draws: torch.Generator) -> Tensor:
    return torch.randint(5, VOCABULARY, (ROWS, LENGTH), generator=draws)


def language(draws: torch.Generator) -> dict[str, Tensor]:
    tokens = ids(draws)
    return {"input_ids": tokens, "labels": ignored(draws, tokens.clone())}


def masked_language(draws: torch.Generator) -> dict[str, Tensor]:
    return {**language(draws), "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.int64)}


def translation(draws: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": ids(draws), "labels": ignored(draws, ids(draws))}


def tagged(draws: torch.Generator) -> dict[str, Tensor]:
    tags = torch.randint(3, (ROWS, LENGTH), generator=draws)
    return {"input_ids": ids(draws), "labels": ignored(draws, tags)}


def labelled(draws: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": ids(draws), "labels": torch.randint(3, (ROWS,), generator=draws)}


def many_labels(draws: torch.Generator) -> dict[str, Tensor]:
    bits = torch.randint(2, (ROWS, 3), generator=draws).double()
    return {"input_ids": ids(draws), "labels": bits}


def scored(draws: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": ids(draws), "labels": x(draws, ROWS)}


def pictures(draws: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(3, (ROWS,), generator=draws)
    return {"pixel_values": x(draws, ROWS, 3, 8, 8), "labels": labels}


def choices(draws: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(5, VOCABULARY, (ROWS, 2, LENGTH), generator=draws)
    return {"input_ids": tokens, "labels": torch.randint(2, (ROWS,), generator=draws)}


def speech(draws: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(5, VOCABULARY, (ROWS, 3), generator=draws)
    labels[ROWS // 2 :, 1:] = -100
    return {"input_values": x(draws, ROWS, 400), "labels": labels}


def series(draws: torch.Generator) -> dict[str, Tensor]:
    classes = torch.randint(3, (ROWS,), generator=draws)
    return {"past_values": x(draws, ROWS, 16, 2), "target_values": classes}


def _make(kind: str, config: str, **options: Any) -> Any:
    made = getattr(transformers, config)(**options)
    model = getattr(transformers, kind)(made).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def _family(
    kind: str, config: str, batch: Callable[[torch.Generator], Any], **options: Any
) -> ExactJob:
    return ExactJob(
        model=functools.partial(_make, kind, config, **options),
        batch=batch,
        tolerance=FLOAT32_LOSS,
    )


def _causal(name: str, **options: Any) -> ExactJob:
    return _family(f"{name}ForCausalLM", f"{name}Config", language, **{**TINY, **options})


def _bert(name: str, head: str, batch: Callable[[torch.Generator], Any], **more: Any) -> ExactJob:
    return _family(f"{name}For{head}", f"{name}Config", batch, **{**TINY, **more})


def _ctc(reduction: str) -> ExactJob:
    return _family(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        speech,
        **TINY,
        conv_dim=(8, 8),
        conv_kernel=(8, 5),
        conv_stride=(5, 4),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        layerdrop=0.0,
        ctc_loss_reduction=reduction,
        ctc_zero_infinity=True,
    )


TRANSFORMERS: dict[str, ExactJob] = {
    "GPT-2": _family(
        "GPT2LMHeadModel",
        "GPT2Config",
        language,
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        **ENDS,
    ),
    "GPT-2 classifier": _family(
        "GPT2ForSequenceClassification",
        "GPT2Config",
        labelled,
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        pad_token_id=0,
        num_labels=3,
        **ENDS,
    ),
    "Llama": _causal("Llama", num_key_value_heads=1),
    "Mistral": _causal("Mistral", num_key_value_heads=1),
    "Qwen2": _causal("Qwen2", num_key_value_heads=1),
    "Gemma": _causal("Gemma", num_key_value_heads=1, head_dim=8, **ENDS, pad_token_id=0),
    "Phi": _causal("Phi", **ENDS),
    "StableLm": _causal("StableLm", num_key_value_heads=1),
    "GPTNeoX": _causal("GPTNeoX", **ENDS),
    "Olmo": _causal("Olmo", **ENDS, pad_token_id=0),
    "OPT": _family(
        "OPTForCausalLM",
        "OPTConfig",
        masked_language,
        vocab_size=VOCABULARY,
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        word_embed_proj_dim=16,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=2,
    ),
    "Bloom": _family(
        "BloomForCausalLM",
        "BloomConfig",
        language,
        vocab_size=VOCABULARY,
        hidden_size=16,
        n_layer=1,
        n_head=2,
        **ENDS,
    ),
    "BERT masked": _bert("Bert", "MaskedLM", language),
    "BERT classes": _bert("Bert", "SequenceClassification", labelled, num_labels=3),
    "BERT several labels": _bert(
        "Bert",
        "SequenceClassification",
        many_labels,
        num_labels=3,
        problem_type="multi_label_classification",
    ),
    "BERT scores": _bert("Bert", "SequenceClassification", scored, num_labels=1),
    "BERT tags": _bert("Bert", "TokenClassification", tagged, num_labels=3),
    "BERT choices": _bert("Bert", "MultipleChoice", choices),
    "RoBERTa masked": _bert("Roberta", "MaskedLM", language, max_position_embeddings=40, **ENDS),
    "ELECTRA tags": _bert(
        "Electra", "TokenClassification", tagged, embedding_size=16, num_labels=3
    ),
    "ALBERT classes": _bert(
        "Albert", "SequenceClassification", labelled, embedding_size=8, num_labels=3, **ENDS
    ),
    "DistilBERT masked": _family(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        language,
        vocab_size=VOCABULARY,
        dim=16,
        hidden_dim=24,
        n_layers=1,
        n_heads=2,
        max_position_embeddings=32,
    ),
    "T5": _family(
        "T5ForConditionalGeneration",
        "T5Config",
        translation,
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    ),
    "BART": _family(
        "BartForConditionalGeneration",
        "BartConfig",
        translation,
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    ),
    "a decoder without a declared loss type": _family(
        "BertGenerationDecoder", "BertGenerationConfig", language, **TINY, is_decoder=True, **ENDS
    ),
    "PatchTST, whose classes are no labels": _family(
        "PatchTSTForClassification",
        "PatchTSTConfig",
        series,
        num_input_channels=2,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_attention_heads=2,
        num_hidden_layers=1,
        ffn_dim=24,
        norm_type="layernorm",
        num_targets=3,
    ),
    "Wav2Vec2, a sum": _ctc("sum"),
    "Wav2Vec2, a mean": _ctc("mean"),
    "Marian, whose name tells of no loss": _family(
        "MarianMTModel",
        "MarianConfig",
        translation,
        vocab_size=VOCABULARY,
        decoder_vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=2,
    ),
    "ViT": _family("ViTForImageClassification", "ViTConfig", pictures, **VISION, num_labels=3),
    "DeiT": _family("DeiTForImageClassification", "DeiTConfig", pictures, **VISION, num_labels=3),
}

# They declare a causal loss, or none, and take their labels as they are.
UNSHIFTED: dict[str, ExactJob] = {
    "BART's decoder": _family(
        "BartForCausalLM",
        "BartConfig",
        language,
        vocab_size=VOCABULARY,
        d_model=16,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    ),
    "XLM": _family(
        "XLMWithLMHeadModel",
        "XLMConfig",
        language,
        vocab_size=VOCABULARY,
        emb_dim=16,
        n_layers=1,
        n_heads=2,
        pad_index=0,
    ),
    "XLNet": _family(
        "XLNetLMHeadModel",
        "XLNetConfig",
        language,
        vocab_size=VOCABULARY,
        d_model=16,
        n_layer=1,
        n_head=2,
        d_inner=24,
    ),
}


def labels_that_count(batch: Any) -> Tensor:
    found: Tensor = (batch["labels"] != -100).sum()
    return found


TRANSFORMERS |= {
    f"{name}, declared": dataclasses.replace(job, options={"loss_average": labels_that_count})
    for name, job in UNSHIFTED.items()
}
