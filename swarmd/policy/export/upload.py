"""Upload an exported folder to the Hugging Face hub. Imports no torch."""

from pathlib import Path

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)

from swarmd.errors import ConfigError, SwarmdError, Unreachable
from swarmd.policy.models.hub import first_line


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
