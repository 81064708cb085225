"""Tasksets of verifiers v1 and tasks of lm-evaluation-harness work with the real packages.

Each package is tested separately.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarmd.config.curriculum_name import curriculum_name
from swarmd.errors import ConfigError
from swarmd.tasks.harness_task import HarnessScores
from swarmd.tasks.own_tasks import find_curriculum
from swarmd.tasks.sandbox.client import Verifier
from swarmd.tasks.source import open_tasks
from swarmd.types import Completion, TaskRef
from testbed.environments import PACKAGES, default_environment, holds

pytestmark = pytest.mark.slow

SUMS = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        import decimal  # not loaded before
        return float(f"= {self.data.answer}" in trace.last_reply)

    @vf.reward(weight=0.25)
    async def short(self, task: SumData, trace: vf.Trace) -> float:
        assert trace.num_turns == 1 and trace.task.data == task
        return float(0 < len(trace.last_reply) < 20)
    # MORE

class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for a in range(9):
            for b in range(9):
                data = SumData(prompt=f"{a} + {b}", system_prompt="Add.", answer=str(a + b))
                yield SumTask(data, self.config.task)

__all__ = ["Sums"]
"""
# Additions to a taskset that other nodes could not score, by the message that they cause.
REFUSED = {
    "a sandbox": "NEEDS_CONTAINER = True",
    "a sandbox, and": "async def setup(self, trace, runtime): pass",
    "tools": "toolsets = classmethod(lambda cls, config: [1])",
    "a judge model": "",
    "runtime for its reward graded": """
    @vf.reward
    async def graded(self, trace, runtime) -> float:
        return 1.0
""",
    "waits for something": """
    @vf.reward
    async def slow(self, trace) -> float:
        import asyncio
        await asyncio.sleep(0)
        return 1.0
""",
    "refused in the verifier": """
    @vf.reward
    async def reads(self, trace) -> float:
        return float(bool(open("/etc/hostname").read()))
""",
}
JUDGED = """
class Judged(vf.TaskConfig):
    judge: vf.JudgeConfig = vf.JudgeConfig(id="x")

class JudgedConfig(vf.TasksetConfig):
    task: Judged = Judged()
"""
Install = Callable[..., str]


def packages(name: str) -> str:
    environment = default_environment(name)
    if not holds(environment, name):
        pytest.skip(f"{PACKAGES[name][-1][-1]} is not here: `python -m testbed.environments {name}`")
    (found,) = environment.glob("lib/python3*/site-packages")
    return str(found)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a taskset as a package, next to verifiers."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), packages("verifiers")])

    def write(name: str, code: str = SUMS) -> str:
        module = name.replace("-", "_")
        for path, text in (
            (tmp_path / module / "__init__.py", code),
            (
                tmp_path / f"{module}-1.0.dist-info" / "METADATA",
                f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
            ),
        ):
            path.parent.mkdir()
            path.write_text(text)
        return f"verifiers:{name}@1.0"

    return write


def test_a_taskset_asks_and_scores_whole_texts_in_the_contained_process(install: Install) -> None:
    found = find_curriculum(install("tiny-sums"))
    assert (found.name, found.specialties) == ("tiny-sums", ("questions",))
    with Verifier(found) as verifier:
        task = open_tasks(found, verifier).task(TaskRef("questions", 7))
        assert task is not None and task.question.startswith("Add.\n\n")
        right = sum(map(int, task.question.split()[1::2]))
        texts = [f"it is = {right}", f"so {'x' * 2000} = {right}", "no", "", f"= {right}" + "x" * 17_000]
        rewards = verifier.score([(task.ref, [Completion(text, True) for text in texts])])
    assert rewards == [(1.0, 0.8, 0.2, 0.0, 0.0)]


def test_name_version_and_code_of_a_taskset_identify_the_swarm(install: Install) -> None:
    names = install("one"), install("two"), install("three", SUMS.replace("= {self", "is {self"))
    assert len({find_curriculum(name).questions for name in names}) == 3
    with pytest.raises(ConfigError, match=r"one 1\.0 is installed: install 2\.0, from"):
        find_curriculum("verifiers:one@2.0")
    with pytest.raises(ConfigError, match="or four is not installed: run"):
        find_curriculum("verifiers:four@1.0")


@pytest.mark.parametrize("why", REFUSED)
def test_a_taskset_that_other_nodes_cannot_score_is_rejected_before_loading(
    install: Install, why: str
) -> None:
    code = SUMS.replace("# MORE", REFUSED[why])
    if why == "a judge model":
        code = code.replace(
            "class Sums(vf.Taskset[SumTask, vf.TasksetConfig])",
            f"{JUDGED}\nclass Sums(vf.Taskset[SumTask, JudgedConfig])",
        )
    if "waits" not in why and "refused" not in why:
        code = code.replace("for a in range(9)", "raise RuntimeError('loaded')\n        for a in ()")
    with pytest.raises(ConfigError, match=why):
        find_curriculum(install(f"needy-{list(REFUSED).index(why)}", code))


def test_a_tasksets_name_needs_a_version() -> None:
    assert curriculum_name("verifiers:reverse-text@0.1.0") == "verifiers:reverse-text@0.1.0"
    for wrong in ("verifiers:reverse-text", "verifiers:@1.0", "verifiers:a/b@1.0"):
        with pytest.raises(ValueError, match="verifiers:NAME@VERSION"):
            curriculum_name(wrong)


HARNESS = r"""
task: gsm8k_here
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/gsm8k.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{question}}\nAnswer:"
doc_to_target: "{{answer.split('#### ')[-1]}}"
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
generation_kwargs: {until: ["Question:"]}
filter_list:
  - {name: strict, filter: [{function: regex, regex_pattern: "#### ([0-9]+)"}, {function: take_first}]}
  - name: last
    filter: [{function: regex, group_select: -1, regex_pattern: "([0-9]+)"}, {function: take_first}]
"""


def test_a_harness_task_asks_with_its_template_and_scores_with_its_filters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, packages("lm-eval")])
    rows = [f'{{"question": "What is {n}?", "answer": "It is\\n#### {n}"}}' for n in range(100, 140)]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(rows))
    file = tmp_path / "gsm8k.yaml"
    file.write_text(HARNESS.replace("FOLDER", str(tmp_path)))
    with Verifier(found := find_curriculum(str(file))) as verifier:
        task = open_tasks(found, verifier).task(TaskRef("questions", 7))
        assert task is not None and task.question.startswith("Question: What is 1")
        right = task.question.split()[3].rstrip("?")
        texts = [
            f"#### {right}, not 3",
            f"first 9, so {right}",
            "9",
            "",
            f"it is {right} Question: What is 9?",
        ]
        rewards = verifier.score([(task.ref, [Completion(text, True) for text in texts])])
    assert rewards == [(1.0, 1.0, 0.0, 0.0, 1.0)]
    # With examples before the question, and with the harness's default metric.
    shots = tmp_path / "shots.yaml"
    shots.write_text(
        "".join(line for line in file.read_text().splitlines(True) if "metric_list" not in line)
        + "num_fewshot: 2\n"
    )
    with Verifier(found := find_curriculum(str(shots))) as verifier:
        task = open_tasks(found, verifier).task(TaskRef("questions", 7))
        assert task is not None and task.question.count("Question: ") == 3
        right = task.question.split()[-2].rstrip("?")
        assert verifier.score([(task.ref, [Completion(right, True), Completion("9", True)])]) == [(1.0, 0.0)]
    other = tmp_path / "other.yaml"
    other.write_text(file.read_text().replace("generate_until", "loglikelihood"))
    with pytest.raises(ConfigError, match="Name one task with generate_until"):
        find_curriculum(str(other))


@pytest.mark.parametrize("until", ["Question:", ["Question:"], None])
def test_a_harness_task_may_give_one_text_or_a_list_as_the_end_of_an_answer(until: object) -> None:
    """The harness accepts both (`handle_stop_sequences`). The substitute task scores a text's length."""
    asked = SimpleNamespace()
    task = SimpleNamespace(
        eval_docs=[{}],
        doc_to_target=str,
        construct_requests=lambda **_: asked,
        config=SimpleNamespace(generation_kwargs={"until": until}),
        _metric_fn_list={"length": len},
        apply_filters=lambda: asked.filtered_resps.update(all=asked.resps[0]),
        process_results=lambda _doc, texts: {"length": len(texts[0])},
    )
    assert HarnessScores(task, [""])("0", "no end Question:") == (7 if until else 16)
