"""Encodes and decodes rollouts.

Pure, versioned, strict. docs/wire.md has the layout for other implementations.

    body = msgpack [version = 2, round, model, [[specialty, n, [[[text, …], ended], …]], …]]

A completion has one text for each turn of the model.

Questions, ground truth and rewards are not sent: the receiver regenerates the question and scores the
answers. `decode` returns a Reason for anything that `encode` would not have written.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from p2p.types import PeerId, Reason
from swarmd.types import Completion, Rollout, TaskRef

# The envelope's kind.
KIND = "rollouts"
VERSION: Final = 2
# Maximum number of rollouts in one body.
MAX_ROLLOUTS = 64
# Maximum number of completions of one rollout.
MAX_COMPLETIONS = 64
# Maximum number of characters of one completion, all its texts together: some 16,000 tokens of a reasoning
# model. A receiver's memory is bounded by the bytes of a frame or blob, not by this limit.
MAX_TEXT_CHARACTERS = 65_536
# Maximum number of texts of one completion.
MAX_TURNS = 64
# Maximum number of characters of a model's or a specialty's name.
MAX_NAME_CHARACTERS = 96


class _Completion(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    texts: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_TURNS)]
    ended: bool


class _Rollout(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    specialty: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)]
    n: Annotated[int, msgspec.Meta(ge=0)]
    completions: Annotated[tuple[_Completion, ...], msgspec.Meta(min_length=1, max_length=MAX_COMPLETIONS)]


class _Body(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    version: Literal[2]
    round: Annotated[int, msgspec.Meta(ge=0)]
    model: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)]
    rollouts: Annotated[tuple[_Rollout, ...], msgspec.Meta(min_length=1, max_length=MAX_ROLLOUTS)]


class RolloutSet(msgspec.Struct, frozen=True):
    """The rollouts that one author shared in one round."""

    round: int  # the author's own round
    model: str  # the name that the author gives its model; for people only
    rollouts: tuple[Rollout, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Body)
_list = msgspec.msgpack.Decoder(list[msgspec.Raw])


def model_for_others(name: str) -> str:
    """Return the model's name for other nodes: only the last part of a path, because a path is private."""
    is_path = name.startswith(("/", ".", "~")) or "\\" in name
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1] if is_path else name


def encode(rollouts: Sequence[Rollout], round_number: int, model: str) -> bytes:
    """Return one body. Receivers refuse a body with more than MAX_ROLLOUTS."""
    return _encoder.encode(
        _Body(
            VERSION,
            round_number,
            model[:MAX_NAME_CHARACTERS],
            tuple(
                _Rollout(
                    rollout.ref.specialty,
                    rollout.ref.n,
                    tuple(_Completion(_shortened(c.texts), c.ended) for c in rollout.completions),
                )
                for rollout in rollouts
            ),
        )
    )


def decode(body: bytes, author: PeerId) -> RolloutSet | Reason:
    """Return the rollout set, or the reason for rejecting the body.

    It never raises, whatever the bytes are.
    """
    try:
        parsed = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return newer(body, VERSION)
    if _encoder.encode(parsed) != body:
        return Reason.UNDECODABLE
    if any(sum(map(len, c.texts)) > MAX_TEXT_CHARACTERS for r in parsed.rollouts for c in r.completions):
        return Reason.TOO_LONG
    return RolloutSet(
        parsed.round,
        parsed.model,
        tuple(
            Rollout(
                TaskRef(r.specialty, r.n),
                tuple(Completion(c.texts[-1], c.ended, c.texts[:-1]) for c in r.completions),
                author,
            )
            for r in parsed.rollouts
        ),
    )


def _shortened(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the texts, with the last one cut if they are too long together."""
    return (*texts[:-1], texts[-1][: max(0, MAX_TEXT_CHARACTERS - sum(map(len, texts[:-1])))])


def newer(body: bytes, ours: int) -> Reason:
    """Return the reason why a body cannot be decoded: a newer version, or garbage.

    The author of a newer version is not at fault, and the operator should know about it.
    """
    try:
        version = msgspec.msgpack.decode(_list.decode(body)[0], type=int)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, IndexError):
        return Reason.UNDECODABLE
    return Reason.WRONG_VERSION if version > ours else Reason.UNDECODABLE
