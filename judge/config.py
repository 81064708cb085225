"""The settings of a judge, and its fixed limits.

A key of judge.toml, an option of `swarmd-judge serve` and a variable SWARMD_JUDGE_<KEY> have one name.
"""

import re
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from platformdirs import user_state_path
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from judge.errors import JudgeError
from p2p import durable
from swarmd.config.addresses import web_origin
from swarmd.config.invitation import read_invitation, write_invitation
from swarmd.config.schema import Schema

MAX_ASK_BYTES = 4 * 1024

# All answers to a question. One of MAX_ANSWER_CHARACTERS, every one of them escaped, has 192 KiB.
MAX_ANSWERS_BYTES = 512 * 1024
# Answers to a question.
MAX_ANSWERS = 16
# Questions asked for at once.
MAX_QUESTIONS = 8
MAX_ANSWER_CHARACTERS = 16_384
MAX_MODEL_CHARACTERS = 100
# Open questions of all peers together.
OPEN_QUESTIONS = 5_000
# Open questions of the peers of one network that have no record, and of those that have one.
NEWCOMERS_QUESTIONS = 64
NETWORK_QUESTIONS = 1_000
# Answers waiting for the verifier.
SCORING_BACKLOG = 128
# Questions waiting to be made.
QUESTIONS_BACKLOG = 128
# A peer may ask for ASK_BURST questions at once, and then for one every ASK_S.
ASK_BURST = 10
ASK_S = 1.0
# The peers of one network that have no record may ask for NETWORK_ASK_BURST questions at once, and then for
# so many a second.
NETWORK_ASKS_PER_S = 50.0
NETWORK_ASK_BURST = 500.0
# Peers whose asking is remembered.
REMEMBERED_PEERS = 10_000
# Bytes of questions and answers that may be written in a day for one machine and for one network group, by
# whether the peer has a record. A peer needs ten answers for one: some 50 kB.
WRITTEN_A_DAY: Mapping[bool, tuple[float, float]] = MappingProxyType(
    {False: (16 * 2.0**20, 128 * 2.0**20), True: (512 * 2.0**20, 4 * 2.0**30)}
)
# The rows of a question with their indexes, but for its answer: at most so much, usually 1 kB.
QUESTION_BYTES = 2_048
# How often the name of the asker's model may be written for one question: in each bin that it closes.
MODEL_NAMES = 36
# Below so much free disk space peers without a record are refused: a million short evaluations take as much.
FREE_BYTES = 512 * 2**20
# A peer on the board that was silent while the judge ran for so long, or for keep_days if that is more, is
# forgotten.
FORGET_DAYS = 30.0
# How far ahead of the judge's clock a sequence number may be: else its peer could never be forgotten.
AHEAD_S = 3_600.0
# How often to look for rows that are no longer needed, and to dial the invitation.
PRUNE_S = 3_600.0
DIAL_S = 600.0
# The time for a body to arrive, and the bytes of all that arrive at once from one network.
BODY_S = 5.0
ARRIVING_BYTES = 16 * 2**20
CONNECTIONS = 4_096
# So long after its deadline an open question belongs to a judge that is gone.
ABANDONED_S = 60.0
# How often to look for questions that nobody answered.
EXPIRE_S = 1.0
# Pages of the leaderboard that are worked out for the readers of one network.
BOARDS_PER_S = 8.0
BOARDS_BURST = 200.0
# A page of the leaderboard is worked out once for all who look within this time.
LEADERBOARD_S = 2.0
# How long /healthz repeats what it found, and how long it tells of a write that failed.
PROBE_S = 2.0
FAILED_S = 30.0
# Like LEADERBOARD_S, for the comparison of swarm and solo of a model.
COMPARISON_S = 10.0
# Answers that are kept of each of these two.
ANSWERS_KEPT = 16

# Uploads of weights that arrive or wait, in all and of one network.
VERIFIED_WAITING = 8
VERIFIED_WAITING_OF_A_NETWORK = 2
# The peers of one network may upload VERIFIED_BURST times at once, and then once every VERIFIED_PAUSE_S.
VERIFIED_BURST = 8.0
VERIFIED_PAUSE_S = 120.0
# An upload may stand still for so long, or be so much later than one of VERIFIED_BYTES_PER_S.
VERIFIED_STALL_S = 3.0
VERIFIED_BYTES_PER_S = 32 * 1024
# An evaluation's time by the clock on the wall, and of processor time.
VERIFIED_S = 1_800.0
VERIFIED_CPU_S = 900
# Beyond the base model and three times the weights.
VERIFIED_MEMORY_BYTES = 512 * 2**20
# When an outcome that could not be written is written again.
VERIFIED_RETRY_S = 5.0


def _proxy(text: str) -> str:
    """Validate a proxy's address. A name is refused: no connection comes from one."""
    if text != "*":
        ip_network(text)
    return text


def _not_empty(given: object) -> object:
    if given == "":
        raise ValueError("it is empty; leave it out for the usual place")
    return given


_Place = Annotated[Path, BeforeValidator(_not_empty), Field(strict=False)]
_Name = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True, config=ConfigDict(strict=True, allow_inf_nan=False))
class JudgeSettings:
    # A SQLite file, or the address of a PostgreSQL database; "": default_database.
    database: str | Path = ""
    curriculum: str = "ladder-9"
    deadline: Annotated[float, Field(ge=1, le=86_400)] = 120.0  # seconds from question to answer
    host: _Name = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8400  # 0: any free one
    # URLs that nodes reach this judge by; (): any.
    origin: Annotated[
        tuple[Annotated[str, AfterValidator(web_origin)], ...],
        Field(description="a list of addresses such as https://judge.example"),
    ] = ()
    # Addresses of reverse proxies, which say whom they speak for (X-Forwarded-For).
    proxy: Annotated[
        tuple[Annotated[str, AfterValidator(_proxy)], ...],
        Field(description="a list of addresses such as 127.0.0.1 or 10.0.0.0/8"),
    ] = ()
    key: _Place | None = None  # of the receipts' signatures; None: beside the database
    # Seconds from one set of questions to the next.
    window: Annotated[float, Field(ge=60, le=2_678_400)] = 86_400.0
    keep_days: Annotated[float, Field(ge=0, le=36_500)] = 7.0  # days that every evaluation is kept
    verified_bytes: Annotated[int, Field(ge=0)] = 0  # size of one upload of weights; 0: none is accepted
    verified_model: Annotated[
        tuple[_Name, ...], Field(description="a list of tiny, folders and repositories")
    ] = ("tiny",)  # the models whose weights are evaluated
    verified_questions: Annotated[int, Field(ge=1, le=100)] = 20  # questions of each specialty
    # The folder of uploads; None: beside the database.
    verified_folder: _Place | None = None
    log_json: bool = False
    invitation: str = ""  # invitation to the swarm, shown on the page "Join"

    @property
    def key_file(self) -> Path:
        return self.key or _beside(self.database, ".key", "judge.key")

    @property
    def uploads_folder(self) -> Path:
        return self.verified_folder or _beside(self.database, ".uploads", "judge-uploads")


SCHEMA = Schema(
    JudgeSettings,
    "SWARMD_JUDGE_",
    r"SWARMD_JUDGE_(CONFIG|URL|EVERY|NAME)",  # all but the first are a node's in the same environment
    "`swarmd-judge init` writes one.",
)


def default_database(curriculum: str) -> Path:
    """Return the file of a curriculum. Each has its own, because a leaderboard compares answers to one."""
    return user_state_path("swarmd") / f"judge-{curriculum}.sqlite3"


def _beside(database: str | Path, suffix: str, name: str) -> Path:
    """Return the place of a file that belongs to a database: beside one that is a file, else in the state."""
    return user_state_path("swarmd") / name if "://" in str(database) else Path(f"{database}{suffix}")


EXAMPLE = Path(__file__).with_name("judge.example.toml")


def write_example(folder: Path, invitation: str = "") -> Path:
    """Write a commented judge.toml into this folder, for the swarm of an invitation.

    An existing file is left as it is. Raises JudgeError, and ConfigError for a malformed invitation.
    """
    file, text = folder / "judge.toml", EXAMPLE.read_text(encoding="utf-8")
    if invitation:
        invited = read_invitation(invitation)
        said = {"invitation": write_invitation(invited), "curriculum": invited.curriculum}
        for key, value in said.items():
            if value:
                text = re.sub(rf'^{key} = ".*?"', f'{key} = "{value}"', text, flags=re.MULTILINE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        durable.create(file, text.encode(), 0o666)
    except FileExistsError:
        raise JudgeError(f"{file} exists already and was left as it is; name another folder") from None
    except OSError as error:
        raise JudgeError(f"cannot write {file}: {error.strerror}; name another folder") from None
    return file
