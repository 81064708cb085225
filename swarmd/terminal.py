"""Escapes text of files and peers before it is printed, so that it cannot control the terminal. Pure."""


def printable(text: str) -> str:
    """`text` with control and direction characters escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
