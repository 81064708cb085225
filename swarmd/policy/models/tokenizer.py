"""Load and check a model's tokenizer: chat template, end token, and a round trip of typical texts."""

import json
import logging
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from swarmd.config.messages import shown
from swarmd.errors import NoModel
from swarmd.policy.models import hub
from swarmd.policy.models.chat import SYSTEM_PROMPT, ids_of
from swarmd.policy.models.files.model_folder import checked_folder

log = logging.getLogger(__name__)

# Samples of questions and answers. A character that does not survive the round trip can be neither asked
# about nor answered with.
PROBES: Final = (
    SYSTEM_PROMPT,
    (
        "the quick brown fox jumps over the lazy dog THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG 0123456789"
        " 1234567 3.14 2024-02-29"
    ),
    (
        "A line, and\nanother;\n\n  two spaces at its head:  - + * / = < > ( ) [ ] { } . , ; : ? ! ' \" & | ^"
        " ~ % $ # @ _ \\ `"
    ),
    "<answer>[[0, 1], [-2.5, 7]]</answer>",
    "<answer>Zoe is a knight, and Mia is a knave.</answer>",
)

# A tokenizer has at least one of these files.
VOCABULARIES: Final = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt")


def load_tokenizer(place: hub.Place, network: PreTrainedModel) -> Any:
    """Load a model's tokenizer.

    network: a skeleton is enough. Raises NoModel if the tokenizer is missing or damaged, does not match the
        network, or would lose text.
    """
    try:
        with checked_folder(place.folder, place.source) as folder:
            return _checked(folder, place.source, network)
    except (NoModel, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # The files are untrusted: the libraries may raise anything, and a panic in Rust is no Exception.
        raise NoModel(
            f"the tokenizer of {place.source} cannot be loaded ({hub.first_line(error)}). Choose another"
            " model, or repair its files."
        ) from error


def _checked(folder: Path, source: str, network: PreTrainedModel) -> Any:
    if not any(path for pattern in VOCABULARIES for path in folder.glob(pattern)):
        raise NoModel(
            f"{source} holds no tokenizer (tokenizer.json). Copy the tokenizer's files of the model that it"
            " was made from into a local copy."
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer = _as_its_file_says(tokenizer, folder, source)
    if tokenizer.chat_template is None:
        raise NoModel(
            f"the tokenizer of {source} has no chat template, so it cannot be asked questions. "
            "Choose an instruct model, or add a chat_template.jinja to a local copy."
        )
    rows = network.get_input_embeddings().num_embeddings
    _drop_beyond(tokenizer, rows, source)
    for text in PROBES:
        _check_round_trip(tokenizer, text, source)
    return tokenizer


def _drop_beyond(tokenizer: Any, rows: int, source: str) -> None:
    """Remove control tokens without an embedding in the network; their text is then ordinary text.

    Gemma 3 1B has such a token, for images. Raises NoModel if other tokens have no embedding.
    """
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= rows}
    if not beyond:
        return
    backend = getattr(tokenizer, "backend_tokenizer", None)
    needed = beyond if backend is None else backend.get_vocab(with_added_tokens=False)
    for number, token in sorted((number, token) for token, number in beyond.items()):
        if token in needed or token == tokenizer.eos_token:
            raise NoModel(
                f"the tokenizer of {source} has number {number:,} for {shown(token)}, and its network has"
                f" only {rows:,} tokens: they do not belong together. Take both from the same model."
            )
    document = json.loads(backend.to_str())  # type: ignore[union-attr]  # else all tokens were needed
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < rows]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(document))


def _as_its_file_says(tokenizer: Any, folder: Path, source: str) -> Any:
    """Return the tokenizer of tokenizer.json if transformers' own splits text differently.

    transformers picks a class by the model's type, and may build it from the vocabulary alone. The file is
    right, since the model was trained with it.
    """
    try:
        own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:
        # tokenizers raises only Exception itself for a missing or unreadable file. transformers could load
        # the tokenizer, so keep that one.
        return tokenizer
    if all(ids_of(tokenizer, text) == own.encode(text, add_special_tokens=False).ids for text in PROBES):
        return tokenizer
    exact = PreTrainedTokenizerFast.from_pretrained(folder)
    log.warning(
        "transformers reads the tokenizer.json of %s as a %s, which splits text differently than the file"
        " says: the file is used",
        source,
        type(tokenizer).__name__,
    )
    if exact.chat_template is None:
        exact.chat_template = tokenizer.chat_template
    if exact.eos_token is None and tokenizer.eos_token is not None:
        exact.eos_token = tokenizer.eos_token
    return exact


def _check_round_trip(tokenizer: Any, text: str, source: str) -> None:
    """Raise NoModel if a text changes when `Chat` encodes and decodes it."""
    ids = ids_of(tokenizer, text, split_special_tokens=True)
    back = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if back.lstrip() == text.lstrip():
        # Some tokenizers add a leading space.
        return
    lost = "".join(sorted(set(text) - set(back)))
    what = f"it has no token for {lost!r}" if lost else f"{text[:60]!r} comes back as {back[:60]!r}"
    raise NoModel(
        f"the tokenizer of {source} cannot represent ordinary questions and answers: {what}. "
        "Choose another model, or repair its tokenizer."
    )
