"""`swarmd bootstrap` and `swarmd answer`: peers of a swarm that train no model."""

import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import structs

from swarmd.cli.options import AsJson, ConfigFile, SwarmName, print_json
from swarmd.cli.settings import configured
from swarmd.state.folder import LOG_FILE, StateFolder, default_state_dir
from swarmd.state.status import Status
from swarmd.terminal import ended_by_signals, tell
from swarmd.types import Completion, Task

if TYPE_CHECKING:
    from swarmd.library.joined_swarm import JoinedSwarm, Judged


def bootstrap(
    swarm: SwarmName = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            help="Address to listen on, /ip4/…/tcp/<port>. Repeatable.", show_default="port 4001, everywhere"
        ),
    ] = None,
    other: Annotated[
        list[str] | None,
        typer.Option("--bootstrap", help="Address of another node of the swarm to connect to. Repeatable."),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(help="URL of the judge that its invitations name.", show_default="none"),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            "--state-dir", envvar="SWARMD_STATE_DIR", help="Folder of its key.", show_default="a separate one"
        ),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Run a bootstrap node: nodes find each other through it, and it relays for nodes behind NAT."""
    from swarmd.daemon.bootstrap import PORT, run_bootstrap

    flags: dict[str, object] = {"swarm": swarm, "listen": listen, "bootstrap": other, "judge": judge}
    resolved = configured(config, flags)
    node_config = resolved.config
    if resolved.origins["swarm.listen"] == "default":
        port = (f"/ip4/0.0.0.0/tcp/{PORT}", f"/ip6/::/tcp/{PORT}")
        node_config = node_config.model_copy(
            update={"swarm": node_config.swarm.model_copy(update={"listen": port})}
        )
    with StateFolder.open(state_dir or default_state_dir().with_name("bootstrap")) as state:
        code = run_bootstrap(node_config, state, partial(_announce, as_json=as_json))
    if not as_json:
        print("Node stopped.", file=sys.stderr)
    raise typer.Exit(code)


def _announce(status: Status, as_json: bool) -> None:
    """Print the addresses to standard output, for copying, and everything else to standard error."""
    from swarmd.daemon.bootstrap import announcement
    from swarmd.daemon.inviting import place

    # The node continues if no one reads the output or the disk is full; `swarmd status` prints it again.
    with suppress(OSError):
        if as_json:
            places = [{"address": address, "from": place(address)} for address in status.addresses]
            print_json({**structs.asdict(status), "addresses": places})
        else:
            print("\n".join(announcement(status)), file=sys.stderr, flush=True)
            print("\n".join(status.addresses), flush=True)


HOW = """\
Type an answer and press Enter. <answer> and </answer> are added unless you write these tags.
End a line with \\ to continue on the next. /skip: another question. /quit or Ctrl-D: leave."""


def answer_by_hand(
    swarm: SwarmName = None,
    curriculum: Annotated[
        str | None,
        typer.Option(
            help="The swarm's questions, as on the nodes that you want to help.", show_default="tiny-9"
        ),
    ] = None,
    specialty: Annotated[
        list[str] | None,
        typer.Option(
            help="Ask only these, as `swarmd task list` names them. Repeatable.", show_default="all"
        ),
    ] = None,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(help="Address of a peer to connect to first, /ip4/…/tcp/…/p2p/<peer id>. Repeatable."),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            help="Address to listen on, /ip4/…/tcp/<port>. Repeatable.", show_default="the node's own port"
        ),
    ] = None,
    tries: Annotated[int, typer.Option(help="Answers that you may give to one question.", min=1, max=64)] = 2,
    seed: Annotated[int | None, typer.Option(help="Seed of the questions.", show_default="drawn")] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            "--state-dir", envvar="SWARMD_STATE_DIR", help="Folder of its key.", show_default="a separate one"
        ),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Answer questions yourself, as a peer: your answers are scored, signed and shared. No model is loaded.

    You are told at once whether an answer is right, and may try again. Groups with a right answer are shared.

    Nodes train most on questions that they cannot answer; some nodes need a wrong answer in the group, too.
    """
    from swarmd.library.joined_swarm import JoinedSwarm
    from swarmd.state.logs import set_up_logging

    flags: dict[str, object] = {
        "swarm": swarm,
        "curriculum": curriculum,
        "bootstrap": bootstrap,
        "listen": listen,
        "seed": seed,
        # The names are checked when the tasks are opened.
        "tasks.specialties": specialty,
    }
    resolved = configured(config, flags)
    share = "right" if resolved.origins["sharing.share"] == "default" else resolved.config.sharing.share
    with StateFolder.open(state_dir or default_state_dir().with_name("answer")) as state:
        set_up_logging(state.path / LOG_FILE, stderr=False)
        member = JoinedSwarm(resolved.config, state, "a person", share=share, talk=tell, stopped=_end)
        dialogue = Dialogue(member, tries)
        try:
            # On a signal, the swarm is left and the summary is printed.
            with ended_by_signals(), member.open():
                dialogue.run()
        finally:
            dialogue.say_totals()


def _end() -> None:
    """End the dialogue, even while it waits for a line."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGTERM)


class Dialogue:
    """Shows one question after another, and reads the answers from standard input."""

    def __init__(self, swarm: "JoinedSwarm", tries: int) -> None:
        self._swarm, self._tries = swarm, tries
        self._asked, self._given, self._right = 0, 0, 0

    def run(self) -> None:
        """Ask questions until /quit or the end of the input."""
        from p2p.identity import nickname

        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")
        own = self._swarm.report()["peer_id"]
        tell(
            f"You are {nickname(own)} {own}, {self._swarm.curriculum.name}. Your answers are signed"
            f" with this key.\n{HOW}",
            sys.stdout,
        )
        try:
            while True:
                (task,) = self._swarm.tasks.draw()
                self._asked += 1
                tell(f"\nQuestion {self._asked}, {task.ref.specialty}\n\n{task.question}\n", sys.stdout)
                self._ask(task)
        except EOFError:
            print()

    def _ask(self, task: Task) -> None:
        answers: list[Judged] = []
        while len(answers) < self._tries and (given := self._played(task, len(answers))) is not None:
            answers.append(self._swarm.judge(task, given))
            if answers[-1].score.reward == 1:
                self._right += 1
                break
            why = answers[-1].score.reason.value
            print("Not right." if why == "wrong" else f"Not right: {why}.", flush=True)
        if not answers:
            return
        self._given += 1
        truth = self._swarm.tasks.truth(task)
        if answers[-1].score.reward == 1:
            print("Right." if truth is None else f"Right: {truth}")
        elif truth is not None:
            print(f"A right answer: {truth}")
        shared, found = self._swarm.share_judged(task, answers), self._swarm.report()
        result = "Shared." if found["present"] else "Kept until a peer is connected."
        if not shared:
            result = "Not shared: nodes do not learn from wrong answers alone."
        tell(
            f"{result} {self._given} answered, {self._right} right,"
            f" {found['shared']['rollouts'] + found['waiting']} shared.",
            sys.stdout,
        )

    def _played(self, task: Task, tried: int) -> "str | Completion | None":
        """Read an answer, turn by turn in an environment; return None if the person gives it up."""
        texts, observe = list[str](), self._swarm.tasks.source.observer([task.ref])
        while (text := self._read(tried)) is not None:
            texts.append(text)
            if observe is None:
                return text
            (reply,) = observe([(0, tuple(texts))])
            if reply is None:
                return Completion(text, True, tuple(texts[:-1]))
            print(f"  → {reply}", flush=True)
        return None

    def _read(self, tried: int) -> str | None:
        """Read an answer; return None if the person gives the question up.

        Raises EOFError at the end of input and for /quit.
        """
        while True:
            text = _line("answer> " if not tried else f"again, {self._tries - tried} left, Enter gives up> ")
            if text == "/quit":
                raise EOFError
            if text == "/skip" or (tried and not text):
                return None
            if text and text != "/help":
                return text
            tell(HOW, sys.stdout)

    def say_totals(self) -> None:
        found = self._swarm.report()
        tell(
            f"You left: {self._given} answered, {self._right} right,"
            f" {found['shared']['rollouts'] + found['waiting']} shared."
        )
        if found["waiting"]:
            tell(
                f"{found['waiting']} of them were not delivered: no peer was connected. Name one with"
                " --bootstrap; see `swarmd doctor network`."
            )


def _line(prompt: str) -> str:
    """Read one line, or several joined by a trailing backslash, without the spaces around it."""
    text = _typed(prompt)
    while text.endswith("\\"):
        text = text[:-1] + "\n" + _typed("> ")
    return text.encode(errors="replace").decode().strip()


def _typed(prompt: str) -> str:
    print(prompt, end="", flush=True)  # `input` itself would write it to standard error
    return input()
