"""Export a checkpoint as a model that transformers or peft loads, with tokenizer and model card."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from peft import PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import nn
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from p2p import durable
from swarmd.errors import ConfigError, SwarmdError, Unreachable
from swarmd.policy.export.model_card import Figures, Origin, card, figures_of
from swarmd.policy.models import hub
from swarmd.policy.models.architecture import has_other_parts, read_config
from swarmd.policy.models.hub import first_line
from swarmd.policy.models.load import fingerprint_of, load_weights, lora_config
from swarmd.policy.models.lora import fold
from swarmd.policy.models.preflight import read_config_json
from swarmd.policy.training import policy_files
from swarmd.state.logs import installed_version

FILES: Final = ("policy.json", "weights.safetensors")  # of a checkpoint: all that an export needs


class CannotExport(SwarmdError):
    """The model cannot be written. Choose another folder with --out, or free some space."""


@dataclass(frozen=True, slots=True)
class Exported:
    folder: Path
    origin: Origin
    figures: Figures

    def document(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "model": asdict(self.origin), "run": asdict(self.figures)}


def base_of(files: Mapping[str, bytes]) -> str:
    """Return the model that a checkpoint was trained from.

    Raises CheckpointUnfit.
    """
    return policy_files.described(files["policy.json"]).source


def export(
    files: Mapping[str, bytes],
    metrics: Sequence[Mapping[str, Any]],
    curriculum: str,
    out: Path,
    *,
    adapter_only: bool = False,
) -> Exported:
    """Write the checkpoint's model into `out`, which must be new or empty; whole or not at all.

    Args:
        files: those of FILES.
        metrics: the lines of its rounds.
        curriculum: its name.

    Raises:
        ConfigError: it cannot be done as asked.
        NoModel, Unreachable: the base model is not to be had.
        CheckpointUnfit: the base model is another one.
        CannotExport: the disk will not take it.
    """
    transformers_logging.disable_progress_bar()
    identity = policy_files.described(files["policy.json"])
    if adapter_only and identity.lora_rank is None:
        raise ConfigError(
            "this run trains all weights of its model, so there is no adapter. Leave --adapter out."
        )
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} is there already, and not an empty folder. Choose another with --out.")
    place = hub.locate(identity.source, identity.revision)
    network = _trained(place, identity, files["weights.safetensors"])
    lost = None
    if isinstance(network, PeftModel) and not adapter_only:
        lost = fold(network)
        network = network.unload()
    origin = Origin(
        identity.source,
        place.repository is not None,
        identity.revision,
        identity.lora_rank,
        adapter_only,
        identity.dtype,
        curriculum,
        installed_version(),
        lost,
    )
    figures = figures_of(metrics)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _write(partial, network, place, adapter_only)
        (partial / "README.md").write_text(card(origin, figures), encoding="utf-8")
        # Use the mode of this user's files; safetensors makes its own readable by the owner alone.
        mode = (partial / "README.md").stat().st_mode
        for path in partial.iterdir():
            path.chmod(mode)
        durable.name_folder(partial, out)
    except (OSError, SafetensorError) as error:
        raise CannotExport(
            f"{out} cannot be written: {hub.first_line(error)}. Choose another folder with --out, or free"
            " some space."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(out, origin, figures)


def _trained(place: hub.Place, identity: policy_files.ModelIdentity, weights: bytes) -> nn.Module:
    """Load the base model with what was trained in it, as a peft model where that is an adapter.

    Raises CheckpointUnfit where the adapter was trained on other weights.
    """
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[identity.dtype]
    network = load_weights(hub.with_weights(place), read_config(place), dtype, place.source)
    if identity.lora_rank is not None:
        if fingerprint_of(network) != identity.fingerprint:
            raise policy_files.CheckpointUnfit(
                f"the adapter was trained on other weights than those of {place.source} now are. Put the base"
                " model back as it was: an adapter is worth nothing on another."
            )
        config = lora_config(identity.lora_rank)
        config.base_model_name_or_path = place.repository or str(place.folder.resolve())
        config.revision = place.revision
        network.name_or_path = config.base_model_name_or_path
        network = get_peft_model(network, config)
    inside: nn.Module = network.get_base_model() if isinstance(network, PeftModel) else network
    trained = {name: p for name, p in inside.named_parameters() if p.requires_grad}
    try:
        tensors = load_tensors(weights)
    except SafetensorError as error:
        raise policy_files.CheckpointUnfit(
            f"the checkpoint's weights cannot be read ({hub.first_line(error)}). Let the node save another."
        ) from error
    if {n: t.shape for n, t in tensors.items()} != {n: p.shape for n, p in trained.items()}:
        raise policy_files.CheckpointUnfit(
            f"the checkpoint's weights have other names or shapes than those of {place.source}."
        )
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(tensors.pop(name))
    return network.eval()


def _write(folder: Path, network: Any, place: hub.Place, adapter_only: bool) -> None:
    # Of a model with other parts the language model alone was loaded: its tensors keep the names that it has
    # alone.
    parts = has_other_parts(read_config_json(place.folder, place.source))
    network.save_pretrained(folder, **{} if adapter_only else {"save_original_format": not parts})
    AutoTokenizer.from_pretrained(place.folder, trust_remote_code=False).save_pretrained(folder)


class NotUploaded(SwarmdError):
    """The hub did not take the upload."""


def upload(folder: Path, repository: str) -> str:
    """Upload every file of the folder as one commit on the main branch; return the model's web address.

    A missing repository is created. Raises ConfigError, Unreachable or NotUploaded; the folder stays as it
    is.
    """
    kept = f"The export is whole in {folder}."
    try:
        api = HfApi()
        made = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Export of a swarmd run")
    except HFValidationError:
        raise ConfigError(f"{repository!r} is no name of a repository: owner/name is. {kept}") from None
    except (LocalTokenNotFoundError, HfHubHTTPError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 401
        if status in (401, 403):
            raise NotUploaded(
                f"the hub does not let you write to {repository} ({first_line(error)}). Log in with `hf auth"
                f" login` and a token that may write there, then push again. {kept}"
            ) from None
        raise NotUploaded(
            f"the hub did not take the upload to {repository} ({first_line(error)}). Try again later. {kept}"
        ) from None
    except (OfflineModeIsEnabled, httpx2.HTTPError, ConnectionError) as error:
        raise Unreachable(
            f"cannot reach the Hugging Face hub to upload {repository} ({first_line(error)}). "
            f"Check the connection and HF_HUB_OFFLINE, then push again. {kept}"
        ) from None
    return str(made)
