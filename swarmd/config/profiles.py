"""Profiles: sets of settings that one line of the configuration selects.

A key that is set anywhere else overrides the profile. A profile sets every key it depends on, even if the
default is the same today, because defaults change with new measurements.
"""

from collections.abc import Mapping
from typing import Any, Final

DEFAULT: Final = "default"

# SAPO (arXiv 2509.08721), sections 4.2 and 5: 4 local and 4 external rollouts, the best of its table.
# docs/papers.md lists the details that the paper leaves open.
_SAPO: Mapping[str, Mapping[str, Any]] = {
    "model": {"lora": "off"},
    "swarm": {"curriculum": "sapo-9"},
    "tasks": {"specialties": (), "reward": ""},
    "round": {
        "local": 4,
        "external": 4,
        "completions": 8,
        "resample": 0,
        # Algorithm 1 uses the rollouts that were shared in the same round; nodes that are not in step receive
        # some of them in their next round.
        "max_age": 1,
        "train": "on",
    },
    # A fixed limit: the one that the node chooses is not the paper's.
    "generate": {"temperature": 1.0, "max_new_tokens": 256},
    "train": {
        "learning_rate": 1e-3,
        "optimizer": "adamw",
        "loss": "grpo",
        "loss_mean": "token",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "importance_cap": 0.0,
    },
    # The paper's receivers drop rollouts without an advantage, so not sending them changes no result.
    "sharing": {"share": "informative", "take": "uniform", "weigh": "paper", "caps": "off"},
    "replay": {"mode": "off"},
    "gate": {"mode": "off"},
}

PROFILES: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {DEFAULT: {}, "sapo-paper": _SAPO}
