"""Text from a file or a peer made fit to print: it must not steer the terminal that shows it. Pure."""


def printable(text: str) -> str:
    """Without control and direction characters: what a file holds must not steer the terminal that shows it."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
