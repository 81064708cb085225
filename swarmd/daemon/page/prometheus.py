"""The status document as Prometheus metrics (text format 0.0.4). Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4"
STATES = ("starting", "training", "waiting", "paused", "stuck", "restarting", "stopping", "stopped")

_USED = (
    ("cpu_seconds", "cpu_seconds_total", "CPU time of all processes of the node"),
    ("energy_wh", "energy_wh_total", "energy, estimated"),
    ("bytes_up", "sent_bytes_total", "bytes to other nodes"),
    ("bytes_down", "received_bytes_total", "bytes from other nodes"),
    ("bytes_written", "written_bytes_total", "bytes written to disk"),
)

Sample = tuple[Mapping[str, str], float | None]


def exposition(document: Mapping[str, Any]) -> str:
    """Render the node's metrics in Prometheus' text format, without those not known yet."""
    lines = []
    for name, what, samples in _metrics(document):
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            lines += [
                f"# HELP swarmd_{name} {what}",
                f"# TYPE swarmd_{name} {'counter' if name.endswith('_total') else 'gauge'}",
            ]
            lines += [f"swarmd_{name}{_labels(labels)} {float(value):.15g}" for labels, value in known]
    return "\n".join(lines) + "\n"


def _metrics(document: Mapping[str, Any]) -> Sequence[tuple[str, str, list[Sample]]]:
    last, exchange, judge, trainer, model, given = (
        document.get(part) or {} for part in ("last", "exchange", "judge", "trainer", "model", "given")
    )
    state, answers = document.get("state"), last.get("answers") or {}

    def single(name: str, what: str, value: float | None) -> tuple[str, str, list[Sample]]:
        return name, what, [({}, value)]

    total = (document.get("usage") or {}).get("total") or {}
    return [
        (
            "node",
            "1; the labels say which node it is",
            [
                (
                    {
                        "name": str(document.get("name")),
                        "peer": str(document.get("peer_id")),
                        "model": str(model.get("model")),
                        "swarm": str((document.get("swarm") or {}).get("name")),
                    },
                    1,
                )
            ],
        ),
        (
            "state",
            "1 for the state the node is in",
            [({"state": name}, float(name == state)) for name in STATES],
        ),
        single("start_time_seconds", "when the node started, since the epoch", document.get("started_at")),
        single("round", "rounds trained", document.get("round")),
        single("reward_mean", "mean reward of the last round", last.get("reward_mean")),
        single("loss", "loss of the last update", last.get("loss")),
        (
            "answers_share",
            "share of the last round's own answers that were cut, or are in the asked form",
            [({"which": which}, answers.get(which)) for which in ("cut", "in_form")],
        ),
        single("answer_tokens", "mean length of the last round's own answers", answers.get("length")),
        (
            "round_seconds",
            "seconds of the last round, by stage",
            [({"stage": k}, v) for k, v in (last.get("seconds") or {}).items()],
        ),
        (
            "batch_rollouts",
            "rollouts in the last batch",
            [({"from": "own"}, last.get("local")), ({"from": "others"}, last.get("external"))],
        ),
        single("useful_rollouts", "rollouts of the last batch that taught something", last.get("useful")),
        single("peers_heard", "peers whose rollouts arrive", document.get("peers")),
        single("peers_connected", "peers connected", document.get("connected")),
        (
            "refused_total",
            "what was refused, by reason",
            [({"reason": k}, v) for k, v in (document.get("rejected") or {}).items()],
        ),
        single("rollouts_fetched_total", "rollouts of others that were fetched", exchange.get("fetched")),
        single("rollouts_missed_total", "rollouts that nobody had in time", exchange.get("missed")),
        (
            "exchange_bytes_total",
            "bytes of rollouts fetched and served",
            [
                ({"direction": "in"}, exchange.get("bytes_in")),
                ({"direction": "out"}, exchange.get("bytes_out")),
            ],
        ),
        single("rollouts_given_total", "rollouts shared", given.get("rollouts")),
        single("rollouts_used_total", "times that others said that they used one of them", given.get("used")),
        single("rollouts_users", "other nodes that said so", given.get("by")),
        *(single(name, what, total.get(key)) for key, name, what in _USED),
        (
            "pauses",
            "1 for each cause of a pause that holds",
            [({"kind": str(p.get("kind"))}, 1) for p in document.get("pauses") or ()],
        ),
        (
            "away",
            "1 for each cause for which the node has left the swarm",
            [({"kind": str(a.get("kind"))}, 1) for a in document.get("away") or ()],
        ),
        single("judge_score", "the judge's last score", judge.get("score")),
        single(
            "trainer_restarts_total",
            "times that the trainer died and was started again",
            trainer.get("restarts"),
        ),
    ]


def _labels(labels: Mapping[str, str]) -> str:
    quoted = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    pairs = ",".join(f'{name}="{value.translate(quoted)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if labels else ""
