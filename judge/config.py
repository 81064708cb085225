"""Settings of a judge, and its fixed limits.

A setting has the same name as a key of judge.toml, as an option of `swarmd-judge serve` and as a variable
SWARMD_JUDGE_<KEY>.
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

# Maximum bytes of all answers to a question. One answer of MAX_ANSWER_CHARACTERS, all escaped, has 192 KiB.
MAX_ANSWERS_BYTES = 512 * 1024
# Maximum number of answers to a question.
MAX_ANSWERS = 16
# Maximum number of questions in one request.
MAX_QUESTIONS = 8
MAX_ANSWER_CHARACTERS = 16_384
MAX_MODEL_CHARACTERS = 100
# Maximum number of open questions of all peers together.
OPEN_QUESTIONS = 5_000
# Maximum number of open questions per network: of peers without a record, and of peers with a record.
NEWCOMERS_QUESTIONS = 64
NETWORK_QUESTIONS = 1_000
# Maximum number of answers that wait for the verifier.
SCORING_BACKLOG = 128
# Maximum number of questions that wait to be generated.
QUESTIONS_BACKLOG = 128
# Rate limit of a peer: a burst of ASK_BURST questions, then one question every ASK_S.
ASK_BURST = 10
ASK_S = 1.0
# Rate limit of a network's peers without a record: a burst of NETWORK_ASK_BURST questions, then
# NETWORK_ASKS_PER_S a second.
NETWORK_ASKS_PER_S = 50.0
NETWORK_ASK_BURST = 500.0
# Number of peers whose rate limit is remembered.
REMEMBERED_PEERS = 10_000
# Bytes of questions and answers written per day, as (one machine, one network group), by whether the peer has
# a record. A peer needs ten answers, some 50 kB, to get a record.
WRITTEN_A_DAY: Mapping[bool, tuple[float, float]] = MappingProxyType(
    {False: (16 * 2.0**20, 128 * 2.0**20), True: (512 * 2.0**20, 4 * 2.0**30)}
)
# Upper bound for a question's rows with their indexes, without its answer; usually 1 kB.
QUESTION_BYTES = 2_048
# How often the asker's model name may be stored for one question: once for each bin that it closes.
MODEL_NAMES = 36
# Below this free disk space, peers without a record are refused. A million short evaluations take this much
# space.
FREE_BYTES = 512 * 2**20
# A listed peer is forgotten if it was silent for this long while the judge ran, or for keep_days if that is
# longer.
FORGET_DAYS = 30.0
# How far ahead of the judge's clock a sequence number may be. Without a limit, a peer could never be
# forgotten.
AHEAD_S = 3_600.0
# Seconds between two prunings, and between two dials of the invitation's addresses.
PRUNE_S = 3_600.0
DIAL_S = 600.0
# Seconds for a body to arrive, and maximum bytes that may be arriving from one network at the same time.
BODY_S = 5.0
ARRIVING_BYTES = 16 * 2**20
CONNECTIONS = 4_096
# An open question this long past its deadline belongs to a judge that no longer runs.
ABANDONED_S = 60.0
# Seconds between two searches for unanswered questions.
EXPIRE_S = 1.0
# Rate limit of leaderboard pages computed for the readers of one network: pages a second, and burst.
BOARDS_PER_S = 8.0
BOARDS_BURST = 200.0
# A page of the leaderboard is computed once for all readers within this time.
LEADERBOARD_S = 2.0
# How long /healthz reuses its last result, and how long it reports a failed write.
PROBE_S = 2.0
FAILED_S = 30.0
# Like LEADERBOARD_S, for the comparison of swarm and solo nodes of a model.
COMPARISON_S = 10.0
# Maximum number of cached answers of each of these two kinds.
ANSWERS_KEPT = 16

# Maximum number of uploads of weights that arrive or wait: in all, and from one network.
VERIFIED_WAITING = 8
VERIFIED_WAITING_OF_A_NETWORK = 2
# Rate limit of a network's uploads: a burst of VERIFIED_BURST, then one every VERIFIED_PAUSE_S.
VERIFIED_BURST = 8.0
VERIFIED_PAUSE_S = 120.0
# An upload may stall, or fall behind the rate VERIFIED_BYTES_PER_S, by at most VERIFIED_STALL_S.
VERIFIED_STALL_S = 3.0
VERIFIED_BYTES_PER_S = 32 * 1024
# Limits of one evaluation: wall-clock seconds, and seconds of processor time.
VERIFIED_S = 1_800.0
VERIFIED_CPU_S = 900
# Memory of an evaluation beyond the base model and three times the weights.
VERIFIED_MEMORY_BYTES = 512 * 2**20
# Seconds until a failed write of an outcome is retried.
VERIFIED_RETRY_S = 5.0


def _proxy(text: str) -> str:
    """Validate a proxy's address. Host names are rejected, because connections come from addresses."""
    if text != "*":
        ip_network(text)
    return text


def _not_empty(given: object) -> object:
    if given == "":
        raise ValueError("it is empty; leave it out for the default")
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
    # URLs under which nodes reach this judge; (): any.
    origin: Annotated[
        tuple[Annotated[str, AfterValidator(web_origin)], ...],
        Field(description="a list of addresses such as https://judge.example"),
    ] = ()
    # Addresses of reverse proxies whose X-Forwarded-For header is believed.
    proxy: Annotated[
        tuple[Annotated[str, AfterValidator(_proxy)], ...],
        Field(description="a list of addresses such as 127.0.0.1 or 10.0.0.0/8"),
    ] = ()
    key: _Place | None = None  # of the receipts' signatures; None: next to the database
    # Seconds from one set of questions to the next.
    window: Annotated[float, Field(ge=60, le=2_678_400)] = 86_400.0
    keep_days: Annotated[float, Field(ge=0, le=36_500)] = 7.0  # days that every evaluation is kept
    verified_bytes: Annotated[int, Field(ge=0)] = 0  # size of one upload of weights; 0: none is accepted
    verified_model: Annotated[
        tuple[_Name, ...], Field(description="a list of tiny, folders and repositories")
    ] = ("tiny",)  # the models whose weights are evaluated
    verified_questions: Annotated[int, Field(ge=1, le=100)] = 20  # questions of each specialty
    # The folder of uploads; None: next to the database.
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
    """Return the default file of a curriculum. One leaderboard compares answers to one curriculum only."""
    return user_state_path("swarmd") / f"judge-{curriculum}.sqlite3"


def _beside(database: str | Path, suffix: str, name: str) -> Path:
    """Return the path of a database's companion file: beside a SQLite file, else in the state folder."""
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
        raise JudgeError(f"{file} exists already and was left as it is. Name another folder.") from None
    except OSError as error:
        raise JudgeError(f"cannot write {file}: {error.strerror}. Name another folder.") from None
    return file
