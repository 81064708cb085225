"""HTTP routes of the verified tier; docs/judge-protocol.md describes them."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from judge.api.reading import PathName, host_of, service_of, signer_of
from judge.api.responses import REFUSED, fitting, readable
from judge.api.signing import signing_headers
from judge.errors import TOO_SLOW, Refusal, Refused
from judge.evaluation.service import JudgeService
from judge.figures.verification import found
from judge.store import verifications
from judge.verified.tier import UploadQuery, VerifiedTier
from judge.verified.weights_check import MAX_HEADER_BYTES

# Maximum bytes of JSON for the answers.
PAGE_BYTES = 192 * 1024


router = APIRouter(responses=REFUSED)


@readable(router, "/v1/verified")
async def models(request: Request) -> Response:
    """List the models whose weights this judge evaluates, and the largest size of an upload.

    404 if this judge evaluates no weights.
    """
    service = service_of(request)
    return JSONResponse(
        {
            "schema": 1,
            "judge": service.key,
            "models": {
                name: {"base": model.fingerprint, "tensors": len(model.whole)}
                for name, model in _tier(service).models.items()
            },
            "bytes": service.settings.verified_bytes,
            "header": MAX_HEADER_BYTES,
            "questions": service.settings.verified_questions,
        }
    )


@router.post(
    "/v1/verified",
    status_code=202,
    openapi_extra={
        **signing_headers(),
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        },
    },
)
async def upload(request: Request, declared: Annotated[UploadQuery, Query()]) -> Response:
    """Upload weights: the body is a safetensors file."""
    tier = _tier(service_of(request))
    signed = signer_of(request, declared.sha256)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(Refusal(415, "the weights are compressed", "Send them without compression."))
    if request.headers.get("content-length", f"{declared.bytes}") != f"{declared.bytes}":
        raise Refused(
            Refusal(
                422,
                "the request's length differs from the declared size",
                "Declare the size of the file that you send.",
            )
        )
    queued = await tier.receive(signed, host_of(request), declared, _parts(request))
    return JSONResponse({"verification": queued.id, "state": "queued", "place": tier.place(queued.id)}, 202)


@readable(router, "/v1/verified/{id}")
async def verification(
    request: Request, id: PathName, after: Annotated[int, Query(ge=0, lt=2**31)] = 0
) -> Response:
    """Return the state of an upload: its place in the queue, or its score and the answer to each question.

    `after`: the number of questions to skip.
    """
    service = service_of(request)
    if (kept := await service.read(verifications.find, id)) is None:
        raise Refused(
            Refusal(
                404,
                "no upload with this id is known",
                "The judge keeps a peer's last five uploads; upload the weights again.",
            )
        )
    row, answers = kept
    document: dict[str, Any] = {
        "schema": 1,
        **verifications.document(row),
        "place": service.verified.place(id) if service.verified else None,
    }
    if row.state == "done":
        figures, rest = found(row.answers, answers), answers[after:]
        count = fitting((len(answer.text.encode()) + 200 for answer in rest), PAGE_BYTES)
        document |= {
            "specialties": figures["specialties"],
            "pass_at": figures["pass_at"],
            "receipt": row.receipt,
            "signature": row.signature,
            "questions": [answer._asdict() for answer in rest[:count]],
            "more_after": after + count if count < len(rest) else None,
        }
    return JSONResponse(document)


def _tier(service: JudgeService) -> VerifiedTier:
    if service.verified is None:
        raise Refused(
            Refusal(
                404,
                "this judge evaluates no uploaded weights",
                "Use another judge; its operator can allow it with --verified-bytes.",
            )
        )
    return service.verified


async def _parts(request: Request) -> AsyncIterator[bytes]:
    try:
        async for part in request.stream():
            if part:
                yield part
    except ClientDisconnect:
        # The client is gone, so nobody reads this refusal.
        raise Refused(TOO_SLOW) from None
