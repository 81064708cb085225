"""Train/test overlap: the share of judge questions whose text is not among training questions.

Measured data; pure.

A judge draws task numbers that no node trains on and, in specialties with enough texts, texts that no node
trains on. In the remaining specialties two numbers may give the same text. `python -m
benchmarks.judge.overlap` measures the share of questions whose text is not among TRAINING training questions
of the specialty (the number that eight nodes ask in a thousand rounds). The figures are stored by the digest
of the questions (`Curriculum.questions`). Other question sets have no figures until they are measured.
"""

from collections.abc import Mapping

TRAINING = 4_000

_NEW_TEXTS: Mapping[str, Mapping[str, float]] = {
    "3541b25d59826e8c": {  # sapo-9, strict or not
        "arc_1d": 1.0,
        "base_conversion": 1.0,
        "basic_arithmetic": 1.0,
        "bf": 1.0,
        "binary_matrix": 1.0,
        "calendar_arithmetic": 1.0,
        "decimal_arithmetic": 1.0,
        "fraction_simplification": 1.0,
        "propositional_logic": 1.0,
    },
    "da8ff5a97660a718": {  # tiny-9, strict or not
        "arc_1d": 1.0,
        "base_conversion": 0.0,
        "basic_arithmetic": 0.0,
        "bf": 1.0,
        "binary_matrix": 0.007,
        "calendar_arithmetic": 1.0,
        "decimal_arithmetic": 1.0,
        "fraction_simplification": 0.0,
        "propositional_logic": 0.093,
    },
}


def new_texts(questions: str) -> Mapping[str, float]:
    """Return the share by specialty; empty if it was not measured."""
    return _NEW_TEXTS.get(questions, {})
