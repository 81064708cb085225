"""Profiles: whole sets of settings that one line of the configuration names.

A key that is set anywhere else overrides its profile's. A profile names every key that it means, also where
the default is the same today: defaults change with what is measured.
"""

from collections.abc import Mapping
from typing import Any, Final

DEFAULT: Final = "default"

# SAPO (arXiv 2509.08721), sections 4.2 and 5: 4 local and 4 external rollouts, the best of its table. What it
# leaves open: docs/papers.md.
_SAPO: Mapping[str, Mapping[str, Any]] = {
    "model": {"lora": "off"},
    "swarm": {"curriculum": "sapo-9"},
    "tasks": {"specialties": (), "reward": ""},
    "round": {
        "local": 4,
        "external": 4,
        "completions": 8,
        "resample": 0,
        # Algorithm 1 uses what others shared in the round; nodes that are not in step hear part of it in
        # their next.
        "max_age": 1,
        "train": "on",
    },
    "generate": {"temperature": 1.0},
    "train": {
        "learning_rate": 1e-3,
        "optimizer": "adamw",
        "loss": "grpo",
        "loss_mean": "token",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "importance_cap": 0.0,
    },
    # What has no advantage is dropped by every receiver first, so nobody learns anything else where it is not
    # sent.
    "sharing": {"share": "informative", "take": "uniform", "weigh": "paper", "caps": "off"},
    "replay": {"mode": "off"},
    "gate": {"mode": "off"},
}

PROFILES: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {DEFAULT: {}, "sapo-paper": _SAPO}
