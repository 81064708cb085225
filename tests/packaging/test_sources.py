"""Every source is Python 3.11: nothing newer slips in from a newer interpreter."""

import ast
import tomllib

from setuptools import find_packages

from tests.packaging.checkout import ROOT

FOLDERS = ("swarmd", "p2p", "judge", "tests", "benchmarks", "packaging", "engines")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_every_source_is_python_3_11() -> None:
    assert len(SOURCES) > 50  # the folders are where this test looks for them
    newer = []
    for path in SOURCES:
        try:
            ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 11))
        except SyntaxError as error:
            newer.append(f"{path.relative_to(ROOT)}:{error.lineno}: {error.msg}")
    assert newer == []


def test_every_folder_of_code_is_a_package_that_is_shipped() -> None:
    include = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]["find"]["include"]
    listed = set(find_packages(str(ROOT), include=include))  # what has no __init__.py is not found
    folders = {path.parent.relative_to(ROOT).parts for path in SOURCES}
    assert {".".join(parts) for parts in folders if parts[0] in ("swarmd", "p2p", "judge")} == listed
