"""`swarmd task`: show a curriculum's questions, and score answers with the contained verifier."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from swarmd.cli.options import AsJson, answer, print_json
from swarmd.errors import ConfigError, SwarmdError
from swarmd.types import Completion, TaskRef, transcript

if TYPE_CHECKING:
    from swarmd.tasks.curriculum import Curriculum

app = typer.Typer(help="Show questions of a curriculum, and score answers.", no_args_is_help=True)


CurriculumName = Annotated[
    str,
    typer.Option(
        "--curriculum",
        help=(
            "ladder-9, sapo-9 or tiny-9, also with -strict; tools-6; or own tasks: a file, of the hub too, or"
            " an installed package's."
        ),
    ),
]
Specialty = Annotated[str, typer.Argument(help="One that `swarmd task list` names.")]
Number = Annotated[
    int, typer.Argument(metavar="N", help="Which question: ReasoningGYM's seed plus index, 0 to 2147483647.")
]


@app.command("list", epilog="Example: swarmd task list --curriculum tiny-9")
def list_tasks(
    curriculum: Annotated[str | None, typer.Option(help="Only this curriculum.", show_default="all")] = None,
    as_json: AsJson = False,
) -> None:
    """List the curricula, their specialties and how each is configured."""
    from swarmd.tasks.curriculum import CURRICULA
    from swarmd.tasks.own_tasks import ENVIRONMENTS, find_curriculum

    chosen = [find_curriculum(name) for name in ([curriculum] if curriculum else [*CURRICULA, *ENVIRONMENTS])]
    answer(
        {
            "schema": 1,
            "curricula": [
                {
                    "name": one.name,
                    "digest": one.digest,
                    "specialties": {name: dict(config) for name, config in sorted(one.configs.items())},
                }
                for one in chosen
            ],
        },
        "\n".join(
            f"{one.name}  {name:<24} {json.dumps(dict(config)) if config else ''}".rstrip()
            for one in chosen
            for name, config in sorted(one.configs.items())
        ),
        as_json,
        indent=" " * 35,
    )


@app.command(epilog="Example: swarmd task show binary_matrix 7 --curriculum tiny-9")
def show(
    specialty: Specialty, n: Number, curriculum: CurriculumName = "sapo-9", as_json: AsJson = False
) -> None:
    """Show a question as every node regenerates it, and a right answer.

    For own tasks in a Python file, its function `solution` gives the answer; else try `swarmd task score`.
    """
    found = _check(specialty, n, curriculum)

    from swarmd.tasks.sandbox.client import Verifier
    from swarmd.tasks.scoring.grading import solution
    from swarmd.tasks.source import CurriculumTasks, open_tasks

    with Verifier(found) as maker:
        tasks = open_tasks(found, maker)
        if (task := tasks.task(TaskRef(specialty, n))) is None:
            raise ConfigError(
                f"{found.name} has no task {specialty} {n}:"
                f" {'; '.join(maker.faults) or 'it would take too long to make'}. Choose another number."
            )
        right = (solution(tasks, task),) if isinstance(tasks, CurriculumTasks) else tasks.solution(task.ref)
        replies = tasks.play([(task.ref, [Completion(right[-1], True, right[:-1])])])[0] if right else ()
    document = {
        "schema": 1,
        "curriculum": found.name,
        "specialty": specialty,
        "n": n,
        "question": task.question,
        "answer": right and (right[0] if found.turns == 1 else right),
    }
    said = task.question
    if right and found.turns == 1:
        said += f"\n\nA right answer: <answer>{right[0]}</answer>"
    elif right:
        said += f"\n\nA right answer:\n{transcript(right, replies[0])}"
    answer(document, said, as_json)


@app.command(epilog="Example: swarmd task score bf 3 --text 7")
def score(
    specialty: Specialty,
    n: Number,
    curriculum: CurriculumName = "sapo-9",
    text: Annotated[
        str | None, typer.Option(help="An answer to score; <answer> tags are added if they are missing.")
    ] = None,
) -> None:
    """Score an answer, or completions from standard input. Prints reward and reason of each.

    Standard input has one JSON object per line: {"text": "<answer>7</answer>", "ended": true}.

    In an environment "text" is a list of texts by turn, and the observations are printed.

    A contained process scores them: no code in them runs here. One that is too long earns 0.
    """
    from swarmd.tasks.sandbox.client import Verifier

    found = _check(specialty, n, curriculum)
    with Verifier(found) as verifier:
        for number, line in enumerate(sys.stdin if text is None else [text], 1):
            if text is not None or line.strip():
                given = (
                    _completion(line, number)
                    if text is None
                    else Completion(found.tagged(specialty, line), ended=True)
                )
                ((scored,),) = verifier.judge([(TaskRef(specialty, n), [given])])
                played = {"observations": scored.observations} if found.turns > 1 else {}
                print_json({"reward": scored.reward, "reason": scored.reason.value, **played})


class _Given(msgspec.Struct):
    text: str | tuple[str, ...]  # for tasks of several turns, the text of each
    ended: bool = True


def _completion(line: str, number: int) -> Completion:
    try:
        given = msgspec.json.decode(line, type=_Given)
    except (ValueError, RecursionError) as error:
        raise SwarmdError(
            f"standard input, line {number}: not a completion: {error}. Give one JSON object a line:"
            ' {"text": "…", "ended": true}.'
        ) from None
    *earlier, text = (given.text,) if isinstance(given.text, str) else given.text
    return Completion(text, given.ended, tuple(earlier))


def _check(specialty: str, n: int, curriculum: str) -> "Curriculum":
    from swarmd.config.messages import nearest
    from swarmd.tasks.curriculum import HELD_OUT_END
    from swarmd.tasks.own_tasks import find_curriculum

    found = find_curriculum(curriculum)
    if specialty not in found.specialties:
        choice = nearest(specialty, found.specialties) or f". Choose one of {', '.join(found.specialties)}."
        raise ConfigError(f"{curriculum} has no specialty {specialty!r}{choice}")
    if not 0 <= n < HELD_OUT_END:
        raise ConfigError(f"{n} is not a question's number. Give 0 to {HELD_OUT_END - 1:,}.")
    return found
