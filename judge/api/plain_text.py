"""A stranger's words as they are kept and shown."""

import unicodedata

MARKS = 2  # accents on one letter, at most
MOST_LETTERS = 64  # of a peer's words, whatever NFKC makes of them
MIXED = "(mixed scripts)"  # behind words that mix scripts: a Cyrillic а looks like a Latin a
# Scripts that are written together, and with Latin letters, in Japanese, Chinese and Korean (Unicode TS #39,
# "highly restrictive").
TOGETHER = [
    {"LATIN", "CJK", "HIRAGANA", "KATAKANA"},
    {"LATIN", "CJK", "BOPOMOFO"},
    {"LATIN", "CJK", "HANGUL"},
]


def plain(text: str) -> str | None:
    """Return a peer's words as they are kept and shown, or None where nothing is left.

    Whoever shows them still has to escape them.

    NFKC, spaces together, without control, direction and invisible characters; what mixes scripts ends with
    MIXED. A whole word in letters that look like those of another script is not told.
    """
    kept: list[str] = []
    marks = 0
    for letter in unicodedata.normalize("NFKC", text):
        kind = unicodedata.category(letter)
        marks = marks + 1 if kind.startswith("M") else 0
        if kind[0] == "Z" or letter in "\t\n\r":
            kept.append(" ")
        elif kind[0] != "C" and marks <= MARKS:
            kept.append(letter)
    text = unicodedata.normalize("NFKC", " ".join("".join(kept).split()))
    text = text[:MOST_LETTERS].rstrip()
    if mixes_scripts(text) and not text.endswith(MIXED):
        text = f"{text[: MOST_LETTERS - len(MIXED) - 1].rstrip()} {MIXED}"
    return text or None


def mixes_scripts(text: str) -> bool:
    """Whether its letters are of scripts that nobody writes together."""
    scripts = {
        unicodedata.name(letter, "").split(" ")[0]
        for letter in text
        if unicodedata.category(letter) in ("Lu", "Ll", "Lt", "Lo")
    }
    return len(scripts) > 1 and not any(scripts <= usual for usual in TOGETHER)
