"""GitHub's workflows and issue forms: they use only existing files, and have no unneeded rights.

actionlint checks their syntax in the workflow `checks`.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT

FOLDER = ROOT / ".github"
WORKFLOWS = sorted((FOLDER / "workflows").glob("*.yml"))
# Actions of other repositories are pinned to a commit; a comment names the version.
PINNED = re.compile(r"uses: [\w-]+/[\w.-]+@[0-9a-f]{40} # v\d+(\.\d+){2}$")
# The rights that the job `publish` of each workflow needs.
MORE = {"release": {"id-token": "write"}, "docs": {"id-token": "write", "pages": "write"}}
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def read(path: Path) -> dict[Any, Any]:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def jobs(workflow: Mapping[Any, Any]) -> Iterator[Mapping[str, Any]]:
    yield from workflow["jobs"].values()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.stem))
def test_a_workflow_runs_only_existing_files(path: Path) -> None:
    commands = [step["run"] for job in jobs(read(path)) for step in job["steps"] if "run" in step]
    for word in re.findall(r"(?<!\S)(?:\.ci|scripts|engines|packaging)/\S+", " ".join(commands)):
        assert (ROOT / word.rstrip(";")).exists(), word
    for target in re.findall(r"\bmake (\S+)", " ".join(commands)):
        assert target in TARGETS, target
    for options in re.findall(r"scripts/test (--\w+)", " ".join(commands)):
        assert f"#   {options} " in (ROOT / "scripts" / "test").read_text(encoding="utf-8"), options


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.stem))
def test_a_workflow_has_pinned_actions_timeouts_and_read_only_rights(path: Path) -> None:
    workflow, text = read(path), path.read_text(encoding="utf-8")
    for line in text.splitlines():
        assert "uses: " not in line or PINNED.search(line), line
    assert workflow["permissions"] == {"contents": "read"} and "secrets." not in text
    assert {"group", "cancel-in-progress"} == workflow["concurrency"].keys()
    for name, job in workflow["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 60, name
        assert job.get("permissions") == (MORE[path.stem] if name == "publish" else None), name
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_the_tests_run_on_each_supported_python_and_on_macos() -> None:
    checks = read(FOLDER / "workflows" / "checks.yml")
    matrix = checks["jobs"]["tests"]["strategy"]["matrix"]
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert matrix["python"] == classifiers
    assert [each["os"].partition("-")[0] for each in matrix["include"]] == ["macos"]


def test_an_issue_form_asks_for_the_output_of_an_existing_command() -> None:
    forms = {path.stem: read(path) for path in (FOLDER / "ISSUE_TEMPLATE").glob("*.yml")}
    assert forms.keys() == {"bug", "config", "proposal"}
    for name in ("bug", "proposal"):
        form = forms[name]
        assert form["name"] and form["description"]
        ids = [each["id"] for each in form["body"]]
        assert len(set(ids)) == len(ids)
    from swarmd.cli.app import COMMANDS

    known = {word for group in COMMANDS.values() for word in group}
    text = (FOLDER / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"`swarmd ([a-z][a-z-]+)", text))
    assert named and named <= known
