"""Validate `swarm.curriculum`: a built-in name, a file of tasks, or an installed plug-in. Runs no plug-in."""

import re
from importlib.metadata import entry_points
from pathlib import Path

from swarmd.config.messages import nearest

BUILT_IN = (
    "auto",
    "ladder-9",
    "sapo-9",
    "tiny-9",
    "ladder-9-strict",
    "sapo-9-strict",
    "tiny-9-strict",
    "tools-6",
)
FILES = (".py", ".jsonl", ".parquet", ".yaml")  # suffixes of files with own tasks
GROUP = "swarmd.tasks"  # entry points of packages that offer tasks (docs/own-tasks.md)
# By prefix: the full form of a name, as a pattern and in words.
_FORMS = {
    "hf:": (
        r"hf:[\w.-]+/[\w.-]+@[0-9a-f]{40}/(?!.*\.\.)[\w./-]+\.(parquet|jsonl)",
        "a data set of the hub has a commit and a file, as its page shows them under Files:"
        " hf:OWNER/NAME@COMMIT/FILE, 40 hexadecimal digits, a .parquet or .jsonl file",
    ),
    "verifiers:": (
        r"verifiers:[A-Za-z0-9][\w.-]*@[\w.+!-]+",
        "a taskset of verifiers has a name and a version: verifiers:NAME@VERSION",
    ),
}
EXPECTED = (
    f"{', '.join(BUILT_IN)}, a .py, .jsonl, .parquet or .yaml file, hf:OWNER/NAME@COMMIT/FILE,"
    " verifiers:NAME@VERSION, or the name of tasks that an installed package offers"
)


def reward_file(text: str) -> str:
    """Return a reward file's path, made absolute; "" stays empty. Raises ValueError for other file types."""
    if text and not text.endswith(".py"):
        raise ValueError("it is not a .py file")
    return text and absolute(text)


def absolute(text: str) -> str:
    """Return a file's path made absolute.

    Raises ValueError if it begins with "~" and an unknown user's name.
    """
    try:
        return str(Path(text).expanduser().absolute())
    except RuntimeError:
        raise ValueError(f"there is no user {text.partition('/')[0].removeprefix('~')!r}") from None


def curriculum_name(text: str) -> str:
    """Return a curriculum's name, with a file's path made absolute.

    Raises ValueError if the name is unknown. The existence of a file is checked when it is used.
    """
    if text in BUILT_IN:
        return text
    for prefix, (form, words) in _FORMS.items():
        if text.startswith(prefix):
            if not re.fullmatch(form, text):
                raise ValueError(words)
            return text
    if text.endswith(FILES):
        return absolute(text)
    offered = sorted(point.name for point in entry_points(group=GROUP))
    if text in offered:
        return text
    path = Path(absolute(text))
    if text and path.is_dir():
        files = sorted(file.name for file in path.iterdir() if file.suffix in FILES)
        raise ValueError(
            f"it is a folder: name a file in it, {path / (files[0] if files else 'questions.jsonl')}"
        )
    if path.is_file():
        raise ValueError(f"it is a file of another kind; own tasks are in {', '.join(FILES)} files")
    raise ValueError(f"no installed package offers tasks of this name{nearest(text, [*BUILT_IN, *offered])}")
