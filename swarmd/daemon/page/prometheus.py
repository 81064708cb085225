"""The status as Prometheus metrics (text format 0.0.4). Pure."""

from collections.abc import Mapping, Sequence
from functools import partial

from swarmd.state.status import NodeState, Status

CONTENT_TYPE = "text/plain; version=0.0.4"

_USED = (
    ("cpu_seconds", "cpu_seconds_total", "CPU time of all processes of the node"),
    ("energy_wh", "energy_wh_total", "energy, estimated"),
    ("bytes_up", "sent_bytes_total", "bytes to other nodes"),
    ("bytes_down", "received_bytes_total", "bytes from other nodes"),
    ("bytes_written", "written_bytes_total", "bytes written to disk"),
)

Sample = tuple[Mapping[str, str], float | None]


def exposition(status: Status) -> str:
    """Render the node's metrics in Prometheus' text format, without those that are still unknown."""
    lines = []
    for name, what, samples in _metrics(status):
        if known := [(labels, value) for labels, value in samples if value is not None]:
            lines += [
                f"# HELP swarmd_{name} {what}",
                f"# TYPE swarmd_{name} {'counter' if name.endswith('_total') else 'gauge'}",
            ]
            lines += [f"swarmd_{name}{_labels(labels)} {float(value):.15g}" for labels, value in known]
    return "\n".join(lines) + "\n"


def _metrics(status: Status) -> Sequence[tuple[str, str, list[Sample]]]:
    exchange, shared, of = status.exchange, status.shared, partial(getattr, status.last)
    answers, total = of("answers", None), status.usage.total if status.usage else None

    def single(name: str, what: str, value: float | None) -> tuple[str, str, list[Sample]]:
        return name, what, [({}, value)]

    labels = {
        "name": status.name,
        "peer": status.peer_id,
        "model": status.model.model,
        "swarm": status.swarm.name,
    }
    return [
        ("node", "1; the labels say which node it is", [(labels, 1)]),
        (
            "state",
            "1 for the state the node is in",
            [({"state": state}, float(state == status.state)) for state in NodeState],
        ),
        single("start_time_seconds", "when the node started, since the epoch", status.started_at),
        single("round", "rounds trained", status.round),
        single("reward_mean", "mean reward of the last round", of("reward_mean", None)),
        single("loss", "loss of the last update", of("loss", None)),
        (
            "answers_share",
            "share of the last round's own answers that were cut, or are in the asked form",
            [({"which": which}, getattr(answers, which, None)) for which in ("cut", "in_form")],
        ),
        single(
            "answer_tokens", "mean length of the last round's own answers", getattr(answers, "length", None)
        ),
        (
            "round_seconds",
            "seconds of the last round, by stage",
            [({"stage": k}, v) for k, v in of("seconds", {}).items()],
        ),
        (
            "batch_rollouts",
            "rollouts in the last batch",
            [({"from": "own"}, of("local", None)), ({"from": "others"}, of("external", None))],
        ),
        single("useful_rollouts", "rollouts of the last batch that taught something", of("useful", None)),
        single("peers_heard", "peers whose rollouts arrive", status.peers),
        single("peers_connected", "peers connected", status.connected),
        (
            "refused_total",
            "what was refused, by reason",
            [({"reason": k}, v) for k, v in status.rejected.items()],
        ),
        single("rollouts_fetched_total", "rollouts of other nodes that were fetched", exchange.fetched),
        single("rollouts_missed_total", "rollouts that nobody had in time", exchange.missed),
        (
            "exchange_bytes_total",
            "bytes of rollouts fetched and served",
            [({"direction": "in"}, exchange.bytes_in), ({"direction": "out"}, exchange.bytes_out)],
        ),
        single("rollouts_shared_total", "rollouts shared", shared.rollouts),
        single("rollouts_used_total", "times that other nodes said that they used one of them", shared.used),
        single("rollouts_users", "other nodes that said so", shared.by),
        *(single(name, what, getattr(total, key, None)) for key, name, what in _USED),
        (
            "pauses",
            "1 for each cause of a pause that holds",
            [({"kind": each.kind}, 1) for each in status.pauses],
        ),
        (
            "away",
            "1 for each cause for which the node has left the swarm",
            [({"kind": each.kind}, 1) for each in status.away],
        ),
        single("judge_score", "the judge's last score", status.judge.score if status.judge else None),
        single(
            "trainer_restarts_total",
            "times that the trainer died and was started again",
            status.trainer.restarts,
        ),
    ]


def _labels(labels: Mapping[str, str]) -> str:
    quoted = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    pairs = ",".join(f'{name}="{value.translate(quoted)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if labels else ""
