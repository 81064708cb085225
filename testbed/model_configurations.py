"""Configurations of published models: the entries that determine the network."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

QWEN_05B: dict[str, Any] = {  # Qwen/Qwen2.5-0.5B-Instruct
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "max_window_layers": 21,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
CONFIGURATIONS: Final[Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "qwen2.5-0.5b": {"model_type": "qwen2", **QWEN_05B},
        "qwen2.5-1.5b": {
            "model_type": "qwen2",
            **QWEN_05B,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
        },
        "smollm2-135m": {
            "model_type": "llama",
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rope_theta": 100_000.0,
            "tie_word_embeddings": True,
        },
        "qwen3.5-0.8b": {
            "model_type": "qwen3_5_text",
            "vocab_size": 248_320,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "tie_word_embeddings": True,
        },
        # Smaller models: Qwen3.5-0.8B with half its width and layers, and Gemma 3 270M with half its layers.
        # Both have a smaller vocabulary.
        "qwen3.5-79m": {
            "model_type": "qwen3_5_text",
            "vocab_size": 32_768,
            "hidden_size": 512,
            "intermediate_size": 1792,
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 8,
            "tie_word_embeddings": True,
        },
        "gemma3-113m": {
            "model_type": "gemma3_text",
            "vocab_size": 98_304,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 9,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "tie_word_embeddings": True,
        },
    }
)
