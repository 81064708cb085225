"""Settings of a judge, and its fixed limits."""

from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_state_path

MAX_ASK_BYTES = 4 * 1024
MAX_ANSWER_BYTES = 128 * 1024  # an answer of MAX_ANSWER_CHARACTERS, every one of them escaped
MAX_ANSWERS_BYTES = 512 * 1024  # several answers to a question together
MAX_ANSWERS = 16  # to a question
MAX_QUESTIONS = 8  # asked for at once
MAX_ANSWER_CHARACTERS = 16_384
MAX_MODEL_CHARACTERS = 100
OPEN_QUESTIONS = 5_000  # of all peers together
NEWCOMERS_QUESTIONS = 64  # open at once, of the peers of one network that have no record,
NETWORK_QUESTIONS = 1_000  # and of those that have one
SCORING_BACKLOG = 128  # answers waiting for the verifier
QUESTIONS_BACKLOG = 128  # questions waiting to be made
ASK_BURST = 10  # questions a peer may ask for at once,
ASK_SECONDS = 1.0  # and then one each so many seconds
NETWORK_ASKS_A_SECOND = 50.0  # questions that the peers of one network that have no record may ask for together,
NETWORK_ASK_BURST = 500.0  # after so many at once
REMEMBERED_PEERS = 10_000  # for that
ANSWER_BYTES_A_SECOND = 32 * 1024.0  # of answers, which are kept, that the peers of one network may send together,
ANSWER_BYTES_BURST = 32 * 2.0**20  # after so many at once
BODY_SECONDS = 5.0  # for a body to arrive
REQUEST_SECONDS = 10.0  # for a whole request to arrive, headers included
RESPONSE_SECONDS = 30.0  # for the answer to be worked out,
TAKE_SECONDS = 10.0  # and to be taken
SLOW_READERS = 256  # connections with an answer not yet taken; of one network:
SLOW_READERS_OF_A_NETWORK = 16
CONNECTIONS = 4_096
ABANDONED_SECONDS = 60.0  # after its deadline a question that is open belongs to a judge that is gone
EXPIRE_SECONDS = 1.0  # between looks for questions nobody answered
AHEAD_SECONDS = 0.02  # between questions that are made before somebody needs them
BOARDS_A_SECOND = 8.0  # pages of the leaderboard that are worked out for the readers of one network,
BOARDS_BURST = 200.0  # after so many at once
LEADERBOARD_SECONDS = 2.0  # a page of the leaderboard is worked out once for all who look within so many seconds
PROBE_SECONDS = 2.0  # for so long /healthz says what it found,
FAILED_SECONDS = 30.0  # and for so long that a write failed
COMPARISON_SECONDS = 10.0  # likewise, swarm against solo of a model
ANSWERS_KEPT = 16  # of each of these two

PATIENCE = "swarmd.patience"  # an extension of the ASGI scope: its `wait` takes the seconds that this request may take
VERIFIED_WAITING = 8  # uploads of weights that arrive or wait; of one network:
VERIFIED_WAITING_OF_A_NETWORK = 2
VERIFIED_BURST = 2  # uploads of a peer at once,
VERIFIED_PAUSE = 600.0  # and then one each so many seconds
VERIFIED_NETWORK_BURST = 8.0  # the same for all peers of one network
VERIFIED_NETWORK_PAUSE = 120.0
VERIFIED_STALL_SECONDS = 3.0  # an upload may stand still, or be later than one that has
VERIFIED_RATE = 32 * 1024  # bytes a second
VERIFIED_SECONDS = 1_800.0  # for an evaluation, by the clock on the wall,
VERIFIED_CPU = 900  # and of processor time
VERIFIED_MEMORY = 512 * 2**20  # bytes beyond the base model, and three times the weights
HUB_SECONDS = 20.0  # until the hub sends the first byte of a file,
FETCH_SECONDS = 900.0  # and the last
VERIFIED_RETRY = 5.0  # seconds until an outcome that could not be written is written again


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    database: Path | str  # a SQLite file, or the address of a PostgreSQL database
    curriculum: str = "sapo-9"
    deadline: float = 120.0  # seconds from question to answer
    host: str = "127.0.0.1"
    port: int = 8400  # 0: any free one
    origins: frozenset[str] = frozenset()  # names nodes reach this judge by; empty: any
    key: Path | None = None  # of the receipts' signatures; None: default_key
    window: float = 86_400.0  # seconds from one set of questions to the next
    proxies: tuple[str, ...] = ()  # addresses of reverse proxies, which say whom they speak for (X-Forwarded-For)
    verified_bytes: int = 0  # of one upload of weights; 0: none is taken
    verified_models: tuple[str, ...] = ("tiny",)  # whose weights are evaluated
    verified_questions: int = 20  # of each specialty
    verified_hub: str = ""  # address of a hub whose repositories may be named instead of an upload; empty: none
    verified_folder: Path | None = None  # of uploads; None: default_folder
    shared: bool = False  # other judges use this database too
    invitation: str = ""  # to the swarm, shown on the page "Join"


def default_database(curriculum: str) -> Path:
    """One file per curriculum, because a leaderboard compares answers to one."""
    return user_state_path("swarmd") / f"judge-{curriculum}.sqlite3"


def default_key(database: Path | str) -> Path:
    """Beside a database that is a file; else in the state folder."""
    if "://" in str(database):
        return user_state_path("swarmd") / "judge.key"
    return Path(f"{database}.key")


def default_folder(database: Path | str) -> Path:
    """Where uploads wait: beside the database, or in the state folder."""
    if "://" in str(database):
        return user_state_path("swarmd") / "judge-uploads"
    return Path(f"{database}.uploads")
