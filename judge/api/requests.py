"""Request bodies, and the cleaning of text that peers send in them.

docs/judge-protocol.md and the judge's /openapi.json describe the bodies.
"""

import unicodedata
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from judge import config
from judge.api.signing import signing_headers
from judge.types import Attributes

# Maximum number of combining marks on one letter.
MAX_MARKS = 2
# Maximum number of characters of a cleaned text. NFKC can lengthen a text, so the limit applies after it.
MAX_CHARACTERS = 64


def plain(text: str) -> str | None:
    """Clean a peer's text for storing and showing; return None if nothing is left.

    The result is in NFKC, with single spaces and without control, direction and invisible characters. It is
    not escaped: the page that shows it has to do that. Letters that look like letters of another script stay,
    because anybody may take any name; the pages show the peer id, or a nickname computed from it, beside a
    name.
    """
    kept: list[str] = []
    marks = 0
    for letter in unicodedata.normalize("NFKC", text):
        kind = unicodedata.category(letter)
        marks = marks + 1 if kind.startswith("M") else 0
        if kind[0] == "Z" or letter in "\t\n\r":
            kept.append(" ")
        elif kind[0] != "C" and marks <= MAX_MARKS:
            kept.append(letter)
    text = unicodedata.normalize("NFKC", " ".join("".join(kept).split()))
    return text[:MAX_CHARACTERS].rstrip() or None


Word = Annotated[str, Field(min_length=1, max_length=64)]
Rollouts = Annotated[int, Field(ge=0, le=65_536)]


class Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class AnswerBody(Body):
    text: Annotated[str, Field(max_length=config.MAX_ANSWER_CHARACTERS)]
    ended: bool


class Asker(Body):
    """Attributes that the peer states about itself."""

    model: Annotated[str, Field(min_length=1, max_length=config.MAX_MODEL_CHARACTERS)]
    name: Annotated[str, Field(min_length=1, max_length=40)] | None = None
    sharing: Literal["swarm", "solo"] | None = None
    local: Rollouts | None = None
    external: Rollouts | None = None
    strategy: Word | None = None
    version: Word | None = None
    hardware: Literal["cpu", "cuda", "mps", "other"] | None = None


class QuestionsBody(Body):
    """A request for questions."""

    round: Annotated[int, Field(ge=0, lt=2**63)]
    curriculum: Word  # its digest
    asker: Asker
    questions: Annotated[int, Field(ge=1, le=config.MAX_QUESTIONS)] = 1  # questions asked for at once
    answers: Annotated[int, Field(ge=1, le=config.MAX_ANSWERS)] = 1  # answers to each question

    @property
    def attributes(self) -> Attributes:
        said = self.asker.model_dump()
        shown = {
            name: text and plain(text) for name in ("name", "strategy", "version") for text in (said[name],)
        }
        return Attributes(self.round, **{**said, **shown})


class AnswersBody(Body):
    """The answers to one question, as many as were asked for; only the first counts for the score."""

    answers: Annotated[list[AnswerBody], Field(min_length=1, max_length=config.MAX_ANSWERS)]


def described(body: type[Body]) -> dict[str, Any]:
    """Return the OpenAPI description of a signed request: its signing headers and its body."""
    content = {"application/json": {"schema": _inlined(body.model_json_schema())}}
    return {**signing_headers(), "requestBody": {"required": True, "content": content}}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its references resolved, because OpenAPI does not look in `$defs`."""
    parts = schema.pop("$defs", {})

    def put(node: Any) -> Any:
        if isinstance(node, dict):
            return (
                put(parts[node["$ref"].rsplit("/", 1)[1]])
                if "$ref" in node
                else {name: put(value) for name, value in node.items()}
            )
        return [put(item) for item in node] if isinstance(node, list) else node

    return dict(put(schema))
