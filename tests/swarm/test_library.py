"""Programs with `import swarmd` join, share and collect over real loopback sockets, together with a node."""

import asyncio
import gc
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

import swarmd
from p2p.types import Reason
from swarmd.config.config import NodeConfig, SwarmConfig
from swarmd.daemon.local_api import control
from swarmd.exchange import offers, wire
from swarmd.library.joined_swarm import Questions
from swarmd.types import Completion, Rollout, TaskRef
from testbed.hostile_answers import CODE, DEEP, SLOW
from tests.doubles import TIMEOUT_S, encoded
from tests.packaging.checkout import ROOT
from tests.processes import wait_until
from tests.swarm.test_join import COMMON
from tests.swarm.test_meeting import started

pytestmark = [pytest.mark.slow, pytest.mark.net]

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SWARMD_SWARM_MDNS", "off")
    monkeypatch.setenv("SWARMD_SWARM_ENGINE", "libp2p")
    yield
    gc.collect()  # only garbage collection closes py-libp2p's sockets of failed dials


def joined(folder: Path, *bootstrap: str, **more: object) -> swarmd.JoinedSwarm:
    return swarmd.join(
        curriculum="tiny-9",
        listen=LOOPBACK,
        bootstrap=bootstrap,
        folder=folder,
        **more,  # type: ignore[arg-type]
    )


def address(swarm: swarmd.JoinedSwarm) -> str:
    found: str = swarm.report()["addresses"][0]
    return found


def share(swarm: swarmd.JoinedSwarm, count: int, long: str = "") -> None:
    """Share groups of a right answer, which has further text, and a wrong one."""
    for task in swarm.tasks.draw(count):
        right = f"{long}<answer>{swarm.tasks.truth(task)}</answer>, as I said"
        swarm.share(task, [right, "<answer>no</answer>"])


def test_import_swarmd_loads_no_large_package() -> None:
    program = "import swarmd, sys; print(sys.modules.keys() & {'torch', 'trio', 'reasoning_gym', 'libp2p'})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    assert dir(swarmd) == swarmd.__all__
    assert all(getattr(swarmd, name) for name in swarmd.__all__)
    with pytest.raises(AttributeError, match="no attribute 'leave'"):
        swarmd.leave  # noqa: B018  # type: ignore[attr-defined]


def test_the_documentation_page_repeats_the_docstrings() -> None:
    rows = re.findall(
        r"^\| `([a-z_.]+)` \| (.+) \|$", (ROOT / "docs" / "library.md").read_text(), re.MULTILINE
    )
    places = {"swarmd.": swarmd, "tasks.": Questions, "": swarmd.JoinedSwarm}
    for name, said in (row for row in rows if row[0] != "beta"):
        prefix = next(prefix for prefix in places if name.startswith(prefix))
        document = getattr(places[prefix], name.removeprefix(prefix)).__doc__
        assert document.splitlines()[0] == said, name
    public = {name for name, item in vars(swarmd.JoinedSwarm).items() if name[0] != "_" and callable(item)}
    assert public - {name for name, _ in rows} == {
        "open",
        "judge",
        "share_judged",
    }  # these serve `swarmd answer`


def test_programs_and_a_node_share_and_collect(tmp_path: Path) -> None:
    """A swarm of three: a node that trains, and two programs."""
    with ExitStack() as stack:
        first = stack.enter_context(joined(tmp_path / "first", author="first"))
        words = ["join", *COMMON, "--state-dir", str(tmp_path / "node"), "--bootstrap", address(first)]
        started(stack, *words, "--curriculum", "tiny-9", "--pace", "0.2", SWARMD_GATE_MODE="off")
        assert len(first.collect(1, wait=TIMEOUT_S)) == 1
        second = stack.enter_context(joined(tmp_path / "second", address(first)))
        share(first, 2)
        (group,) = second.collect(1, wait=TIMEOUT_S)
        task = second.tasks.task(group.ref)
        assert task is not None and task.question == group.question
        assert second.score([(group.ref, group.completions)]) == [group.rewards]
        for one_text in (partial(second.share, task), lambda text: second.score([(group.ref, text)])):
            with pytest.raises(TypeError, match=r"\[text\]"):
                one_text("<answer>1</answer>")
        assert {0.0, 1.0} == set(group.rewards) and min(group.advantages) == 0.0 < max(group.advantages)
        assert all(completion.text.endswith("</answer>") for completion in group.completions)

        def used() -> bool:
            share(second, 1)
            trained = control.call(tmp_path / "node", "peers", dict, timeout=TIMEOUT_S)["peers"]
            mine = second.report()["peer_id"]
            return any(row["id"] == mine and row["frames"] >= 2 for row in trained)

        wait_until(used, every=0.6)


def test_the_example_training_loop_collects_rollouts_of_other_nodes(tmp_path: Path) -> None:
    with joined(tmp_path / "other") as other:
        example = str(ROOT / "docs" / "examples" / "own_loop.py")
        command = [sys.executable, example, str(tmp_path / "loop"), "1000", address(other)]
        quiet = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | quiet) as loop:
            try:
                assert loop.stdout is not None
                for line in loop.stdout:
                    share(other, 1)
                    if int(line.split()[-1]) >= 2:
                        break
            finally:
                loop.kill()
    assert int(line.split()[-1]) >= 2


def test_large_rollouts_are_offered_and_fetched_and_each_is_collected_once(tmp_path: Path) -> None:
    # Each call of collect counts as a round. By default, rollouts that are not collected within two rounds
    # are dropped.
    patient = tmp_path / "patient.toml"
    patient.write_text("[round]\nmax_age = 100\n")
    with joined(tmp_path / "a") as a, joined(tmp_path / "b", address(a), external=8, config=patient) as b:
        share(a, 5, long="x" * offers.WHOLE_BYTES)
        refs = []
        while len(refs) < 5:
            collected = b.collect(8, wait=TIMEOUT_S)
            assert collected, "the offered rollouts did not arrive"
            refs += [group.ref for group in collected]
        assert len(set(refs)) == len(refs) == 5 and b.collect(8) == []
        assert b.report()["exchange"]["fetched"] == 5
        b.collect(0)
        wait_until(lambda: a.report()["waiting"] == 0)


def test_useless_groups_are_not_sent_and_unfit_groups_are_not_collected(
    tmp_path: Path,
) -> None:
    with joined(tmp_path / "a") as a, joined(tmp_path / "b", address(a)) as b:
        for task in a.tasks.draw(3):
            a.share(task, ["<answer>no</answer>", "neither \ud800"])
        share(a, 2)
        wait_until(lambda: len(b._parts.pool) == 2)  # only the two useful groups have arrived
        wait_until(lambda: a.report()["shared"]["rollouts"] == 2)
        assert a.report()["waiting"] == 0
        seen = []
        assert b.collect(2, unfit=lambda group: seen.append(group) or "too long") == []  # type: ignore[func-returns-value]
        assert len(seen) == 2 and b.collect(2) == []


def test_a_text_is_judged_unchanged_if_the_tasks_score_whole_texts(tmp_path: Path) -> None:
    (tasks := tmp_path / "whole.py").write_text(
        'specialties, limits = ["a"], {"whole": True}\n'
        "def generate(specialty, seed):\n    return str(seed), 'yes'\n"
        "def score(right, answer):\n    return float(answer == right)\n"
    )
    settings = NodeConfig(swarm=SwarmConfig(curriculum=str(tasks)))
    swarm = swarmd.JoinedSwarm(settings, None, "a person")
    assert swarm.judge(*swarm.tasks.draw(), "yes").score.reward == 1
    swarm.close()


def test_shared_results_change_the_level_of_the_questions(tmp_path: Path) -> None:
    with swarmd.join(curriculum="ladder-9", listen=LOOPBACK, folder=tmp_path) as swarm:
        asked = lambda: swarm.tasks.source.staircase.levels["fraction_simplification"]  # noqa: E731
        drawn = swarm.tasks.draw(100)
        task = next(task for task in drawn if task.ref.specialty == "fraction_simplification.1")
        right = f"<answer>{swarm.tasks.truth(task)}</answer>"
        swarm.share(task, [right, right])
        wait_until(lambda: asked() == 2)
        swarm.share_judged(task, [swarm.judge(task, "no")])
        assert asked() == 2, "an answer to a question of the previous level changed the level"
        assert len({task.ref.specialty for task in swarm.tasks.draw(400, all_levels=True)}) > 35


def test_a_stopped_network_is_reported_and_raises_no_error(tmp_path: Path) -> None:
    swarm = joined(tmp_path)
    assert control.call(tmp_path, "stop", dict, timeout=TIMEOUT_S)["stopping"]
    wait_until(lambda: not swarm.joined)
    share(swarm, 1)
    assert swarm.collect(1, wait=TIMEOUT_S) == []
    wait_until(lambda: swarm.report()["state"] == "left")
    wait_until(lambda: not control.in_use(tmp_path))
    swarm.close()
    joined(tmp_path).close()  # the folder is free again


def test_a_forked_child_is_no_member_and_takes_no_rollouts_from_its_parent(tmp_path: Path) -> None:
    with joined(tmp_path / "a") as a, joined(tmp_path / "b", address(a)) as b:
        assert a.score([]) == [] and b.joined
        if (child := os.fork()) == 0:
            try:
                (task,) = b.tasks.draw()
                right = b.score([(task.ref, [f"<answer>{b.tasks.truth(task)}</answer>"])])
                b.share(task, ["<answer>1</answer>"])
                ok = not b.joined and b.collect(1, wait=TIMEOUT_S) == [] and right == [(1.0,)]
                b.close()
                os._exit(0 if ok else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        share(a, 1)
        assert len(b.collect(1, wait=TIMEOUT_S)) == 1
    with pytest.raises(swarmd.errors.SwarmdError, match="Join in one"):
        pickle.dumps(b)


def test_collecting_with_asyncio_does_not_block_other_tasks(tmp_path: Path) -> None:
    async def main() -> int:
        async with joined(tmp_path / "a") as a, joined(tmp_path / "b", address(a)) as b:
            ticks = 0
            waiting = asyncio.create_task(b.collect_soon(1, TIMEOUT_S))
            while ticks < 3:
                await asyncio.sleep(0)
                ticks += 1
            assert not waiting.done()
            share(a, 1)
            return len(await waiting)

    assert asyncio.run(main()) == 1


def test_errors_about_invalid_arguments_are_raised_before_joining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for settings, cause in (
        ({"curriculum": "sapo-10"}, "sapo-10"),
        ({"bootstrap": ["example.org"]}, "swarm.bootstrap"),
        ({"invitation": "swarm:main,digest=0123456789abcdef"}, "check"),
        ({"completions": 1}, "round.completions"),
    ):
        with pytest.raises(swarmd.errors.ConfigError, match=cause):
            swarmd.join(folder=tmp_path, **settings)  # type: ignore[arg-type]
    assert not (tmp_path / "identity.key").exists()
    with joined(tmp_path), pytest.raises(swarmd.errors.StateFolderInUse, match="another folder"):
        joined(tmp_path)
    monkeypatch.setenv("SWARMD_SWARM_ENGINE", "none")
    with pytest.raises(swarmd.errors.ConfigError, match='Set it to "libp2p"'):
        joined(tmp_path)


def test_a_program_that_ends_leaves_the_swarm_and_loses_no_rollouts(tmp_path: Path) -> None:
    """A program may end without `close`, because waiting rollouts are sent at its exit."""
    with joined(tmp_path / "a", external=4) as a:
        program = (
            "import sys, swarmd\n"
            "swarm = swarmd.join(curriculum='tiny-9', listen=['/ip4/127.0.0.1/tcp/0'],"
            " bootstrap=[sys.argv[1]], folder=sys.argv[2])\n"
            "(task,) = swarm.tasks.draw()\n"
            "while not swarm.report()['present']: pass\n"
            "swarm.share(task, [f'<answer>{swarm.tasks.truth(task)}</answer>', 'no'])\n"
        )
        command = [sys.executable, "-c", program, address(a), str(tmp_path / "b")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert (done.returncode, done.stderr) == (0, "")
        assert len(a.collect(1, wait=TIMEOUT_S)) == 1


RANK = """
import json, os, sys, torch.distributed as distributed, swarmd
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meet", rank=rank, world_size=size)
swarm = swarmd.join(curriculum="tiny-9", listen=["/ip4/127.0.0.1/tcp/0"], bootstrap=[sys.argv[2]],
                    folder=sys.argv[1] + "/rank-0")
(task,) = swarm.tasks.draw()
swarm.share(task, ["<answer>1</answer>"])
right = swarm.score([(task.ref, [f"<answer>{swarm.tasks.truth(task)}</answer>"])])
groups = swarm.collect(2, wait=240.0)
print(json.dumps([swarm.joined, right, [[group.question, group.advantages] for group in groups]]))
swarm.close()
"""


def test_only_one_of_several_ranks_joins_and_all_get_the_collected_rollouts(tmp_path: Path) -> None:
    with joined(tmp_path / "other", seed=1) as other, ExitStack() as stack:
        ranks = []
        for rank in range(2):
            command = [sys.executable, "-c", RANK, str(tmp_path), address(other)]
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | place)
            stack.enter_context(process)
            stack.callback(process.kill)
            ranks.append(process)
        wait_until(lambda: other.report()["present"] or any(process.poll() for process in ranks))
        share(other, 1)
        first, second = (json.loads(process.communicate(timeout=TIMEOUT_S)[0]) for process in ranks)
        assert [process.returncode for process in ranks] == [0, 0]
        assert first == [True, [[1.0]], second[2]] and second[:2] == [False, [[1.0]]] and len(second[2]) == 1


def test_a_hostile_members_messages_neither_stop_collecting_nor_are_collected(tmp_path: Path) -> None:
    """It sends random bytes, attacks on the verifier, wrong labels, useless groups and an unknown kind."""
    with (
        joined(tmp_path / "own", external=8) as own,
        joined(tmp_path / "bad", address(own)) as bad,
        joined(tmp_path / "good", address(own)) as good,
    ):
        network = bad.network
        assert network is not None and own.network is not None
        publish = partial(network._soon, network._swarm.member.publish)
        wait_until(lambda: bad.report()["present"] and good.report()["present"])
        refs = [task.ref for task in bad.tasks.draw(6)]
        me, texts = network.peer_id, [*CODE, *SLOW[:2], *DEEP]
        for at, ref in enumerate(refs):
            answers = [Completion(f"<answer>{text}</answer>", True) for text in texts[at :: len(refs)]]
            publish(wire.KIND, wire.encode([Rollout(ref, tuple(answers), me)], at, "\x1b[31mbad"))
        publish(wire.KIND, os.urandom(500))
        publish(f"{wire.KIND}-image", os.urandom(500))
        publish(
            wire.KIND, wire.encode([Rollout(TaskRef("no_such", 1), (Completion("x", True),), me)], 1, "m")
        )
        bodies, _ = encoded(
            [Rollout(ref, (Completion("x" * 3000, True),), me) for ref in refs],
            1,
            "m",
            bad.curriculum.specialties,
        )
        for body in bodies:
            publish(offers.KIND, body)  # offers without blobs
        share(good, 2)
        found: list[swarmd.ScoredGroup] = []
        while sum(group.author == good.report()["peer_id"] for group in found) < 2:
            found += own.collect(8, wait=TIMEOUT_S)
        assert own.joined and all(group.author == good.report()["peer_id"] for group in found)
        why = {Reason.UNDECODABLE.value, Reason.UNKNOWN_TASK.value, Reason.UNKNOWN_KIND.value}
        wait_until(lambda: own.report()["rejected"].keys() >= why)
