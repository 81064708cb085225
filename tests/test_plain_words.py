"""Every kind of text is within the limits of `scripts/plain-words`, and the script finds each pattern."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

SCRIPT = ROOT / "scripts" / "plain-words"
# For each pattern: a sentence with the pattern, and a sentence with the same words but without it.
PLANTED = {
    "noun-what": ("The store keeps what the peers send.", "What does the store keep of peers?"),
    "where-for-if": ("It stops where the disk is full.", "It says where to stop the disk."),
    "others": ("The others train on this rollout.", "The other nodes train on this rollout."),
    "of-its-own": ("The judge runs a process of its own.", "The judge runs its own separate process."),
    "odd-words": ("The node mends its own checkpoint.", "The node fixes its own checkpoint."),
    "that-of": ("The digest is that of the folder.", "The digest of the folder is that."),
}
FORMS = {
    "docstring": ("kept.py", '"""{}"""\n'),
    "comment": ("kept.py", "# {}\nkept = 1\n"),
    "message": ("kept.py", "kept = f'{{kept}} {}'\n"),
    "page": ("kept.html", "<p>{{{{ kept }}}} {}</p>\n"),
    "setting": ("kept.toml", "kept = 1  # {}\n"),
    "document": ("kept.md", "# Kept\n\n{}\n\n    what is in a block of code is code\n"),
}


def plain_words(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


def test_the_repository_is_within_the_limits() -> None:
    done = plain_words()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("form", FORMS)
def test_each_pattern_is_found_in_each_kind_of_text(tmp_path: Path, form: str) -> None:
    name, template = FORMS[form]
    planted, fine = tmp_path / name, tmp_path / f"fine-{name}"
    planted.write_text("\n".join(template.format(bad) for bad, _ in PLANTED.values()))
    if form == "docstring":
        planted.write_text('"""' + "\n\n".join(bad for bad, _ in PLANTED.values()) + '"""\n')
    fine.write_text("\n".join(template.format(good) for _, good in PLANTED.values()))
    for pattern, (bad, _) in PLANTED.items():
        listed = plain_words("--list", pattern, planted, fine).stdout.splitlines()
        assert len(listed) == 1 and bad in listed[0] and listed[0].startswith(str(planted)), listed
    assert plain_words("--list", "others", "--path", "fine-", planted, fine).stdout == ""


def test_patterns_are_found_in_test_names(tmp_path: Path) -> None:
    file = tmp_path / "test_kept.py"
    file.write_text("def test_what_it_keeps_is_kept() -> None: ...\n")
    assert "test name: test what it keeps is kept" in plain_words("--list", "noun-what", file).stdout


def test_a_single_sentence_with_a_pattern_is_no_failure(tmp_path: Path) -> None:
    """Otherwise a small folder could not have a single such sentence."""
    file = tmp_path / "kept.md"
    bad, _ = PLANTED["others"]
    file.write_text(bad)
    done = plain_words(file)
    assert done.returncode == 0 and re.search(r"document .* 100\.0 ", done.stdout)
    file.write_text(f"{bad}\n\n{bad}")
    assert plain_words(file).returncode == 1
