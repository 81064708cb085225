"""Train/test overlap: the share of judge questions whose text is not among training questions. Measured data; pure.

A judge draws from numbers that no node trains on, but where a specialty has few questions two numbers give one text. The share of the
questions whose text is not among TRAINING training questions of the specialty (what eight nodes ask in a thousand rounds) is measured by
`python -m benchmarks.overlap`, for each curriculum as it is: another digest has other questions, and no figures until they are measured.
"""

from collections.abc import Mapping

TRAINING = 4_000

_NEW_TEXTS: Mapping[str, Mapping[str, float]] = {
    "33297f0f8bde1cc8": {  # sapo-9
        "arc_1d": 1.0, "base_conversion": 0.98, "basic_arithmetic": 0.994, "bf": 0.439, "binary_matrix": 0.893,
        "calendar_arithmetic": 0.892, "decimal_arithmetic": 1.0, "fraction_simplification": 1.0, "propositional_logic": 0.899,
    },
    "eb080220bdeba630": {  # tiny-9
        "arc_1d": 0.998, "base_conversion": 0.0, "basic_arithmetic": 0.0, "bf": 0.439, "binary_matrix": 0.016,
        "calendar_arithmetic": 0.957, "decimal_arithmetic": 0.943, "fraction_simplification": 0.0, "propositional_logic": 0.097,
    },
}  # fmt: skip


def new_texts(digest: str) -> Mapping[str, float]:
    """The share by specialty; empty where it was not measured."""
    return _NEW_TEXTS.get(digest, {})
