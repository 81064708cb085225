"""`swarmd.trl` in separate programs, with the lowest and the latest TRL that it supports."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from testbed.environments import PACKAGES, default_environment, holds
from tests.doubles import TIMEOUT_S
from tests.packaging.checkout import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.net]

PROGRAM = ROOT / "tests" / "swarm" / "trl_program.py"
VERSIONS = {"trl-lowest": "1.0", "trl": "1.16"}


@pytest.mark.parametrize("name", VERSIONS)
def test_a_trainer_replaces_groups_without_a_gradient_with_received_groups(name: str, tmp_path: Path) -> None:
    found = json.loads(run(name, tmp_path).splitlines()[-1])
    why = ("beta=0.0", "a multiple of num_generations, 4", "tools: not supported", "no column n: other nodes")
    assert all(reason in said for reason, said in zip(why, found["refused"], strict=True))
    for batch in (found["once"], found["twice"], found["short"]):
        assert batch["replaced"] >= 1 and batch["items"] and batch["learned"] and batch["loss"]
        prompts, _, completions, _ = batch["shapes"]
        assert batch["shapes"] == [prompts] * 2 + [completions] * 2 and prompts[0] == completions[0] == 8
        # The two right answers come first and have ended; their advantage, over five answers, is (1 - 0.4) /
        # 0.49.
        assert batch["advantages"] == [1.224, 1.224, 0.0, 0.0]
        assert all(row.endswith("</answer><|endoftext|>") for row in batch["rows"][:2])
        assert batch["ends"] == [1, 1, 0, 0] and all(batch["shared"])
    assert found["once"]["shared"][1].startswith("x . y")
    # A control token that another node spelled out is ordinary text.
    assert any("one<|e" in row for row in found["once"]["rows"])
    # The answer is truncated here, so it is masked like this trainer's truncated answers.
    assert found["twice"]["rows"][2:] == found["short"]["rows"][2:] == ["", ""]
    assert found["once"]["old"] is None and found["twice"]["old"] == [found["twice"]["shapes"][2], True]
    assert found["rewards"] == [1.0, 0.0]
    # External answers end with the end token in the model's settings, like its own answers; the lowest
    # version uses only the tokenizer's end token.
    end = "<|endoftext|>" if name == "trl-lowest" else "</answer>"
    assert all(row.endswith("</answer>" + end) for row in found["turn"]["rows"][:2])
    assert any(found["turn"]["ended"]) and not any(found["short"]["ended"])


def test_each_of_two_ranks_trains_on_its_share_and_their_weights_stay_equal(tmp_path: Path) -> None:
    run("trl", tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert (first["joined"], second["joined"]) == (True, False) and first["weights"] == second["weights"]
    assert first["replaced"] >= 1 and second["replaced"] >= 1


def run(name: str, folder: Path, *launcher: str) -> str:
    """Run the program with that environment's TRL and this environment's packages; return its output."""
    environment = default_environment(name)
    if not holds(environment, name):
        pytest.skip(f"{PACKAGES[name][-1][-1]} is not here: `python -m testbed.environments {name}`")
    (theirs,) = environment.glob("lib/python3*/site-packages")
    path = os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"], str(theirs)])
    quiet = {"PYTHONPATH": path, "SWARMD_SWARM_MDNS": "off", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, str(PROGRAM), str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | quiet,
        cwd=folder,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_named_versions_match_the_extra() -> None:
    source = (ROOT / "swarmd" / "trl.py").read_text()
    lowest, newest = VERSIONS.values()
    assert f'LOWEST_TRL, NEWEST_TRL = "{lowest}", "{newest}"' in source
    assert 'trl = ["trl>=1.0,<1.17",' in (ROOT / "pyproject.toml").read_text()
    assert [PACKAGES[name][-1][-1] for name in VERSIONS] == [f"trl=={v}.0" for v in VERSIONS.values()]
