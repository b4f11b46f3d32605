"""Fetches the files that a model needs, and no others, from a Hugging Face repo. Host only.

They go to the hub's own cache, which other tools share; `HF_HOME`, tokens and mirrors are the
business of `huggingface_hub`.
"""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path
from typing import Any

from huggingface_hub import (
    _CACHED_NO_EXIST,
    constants,
    get_session,
    hf_hub_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm

from jaxspec.weights.files import ModelFileError, Progress
from jaxspec.weights.folder import INDEX, SINGLE, shard_names

log = logging.getLogger(__name__)

TEXT_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_PROBE_SECONDS = 10


def is_repo_id(source: str) -> bool:
    """Whether a name has the form owner/name."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source) is not None


def fetch_repo(
    repo: str, *, revision: str | None, progress: Progress, text_files: bool = True
) -> Path:
    """Fetches config, weights and, for language models, what turns text into ids.

    Args:
        repo: owner/name.
        revision: branch, tag or commit; None: the default branch.
        progress: told the bytes of the file that is being fetched.
        text_files: whether `TEXT_FILES` are wanted, where the repo has them.

    Returns:
        The folder of one commit in the hub's cache.

    Raises:
        ModelFileError: no such repo, revision or file, no permission, or no network.
    """
    try:
        return _fetch_all(repo, revision, progress, text_files)
    except LocalEntryNotFoundError:
        raise ModelFileError(
            repo,
            f"is not in the cache {constants.HF_HUB_CACHE}, and the hub cannot be reached",
            "connect once, or pass a model folder or .gguf file",
        ) from None
    except GatedRepoError:
        raise ModelFileError(
            repo,
            "needs its licence accepted on huggingface.co",
            "accept it there and log in with `hf auth login`",
        ) from None
    except RepositoryNotFoundError:
        raise ModelFileError(
            repo, "no such repo on the hub, or a private one", "check its spelling or log in"
        ) from None
    except RevisionNotFoundError:
        raise ModelFileError(
            repo, f"has no revision {revision!r}", "name a branch, tag or commit of it"
        ) from None
    except EntryNotFoundError as error:
        raise ModelFileError(
            repo,
            f"lacks a file that a model needs ({_first_line(error)})",
            "name a repo with config.json and safetensors weights",
        ) from None
    except OSError as error:  # what the hub's HTTP errors are, and a full disk
        raise ModelFileError(
            repo, f"cannot be fetched ({_first_line(error)})", "check the network and the disk"
        ) from None


def _fetch_all(repo: str, revision: str | None, progress: Progress, text_files: bool) -> Path:
    commit = revision

    def fetch(filename: str) -> Path:
        what = f"fetching {repo} {filename}"
        progress(what, 0, 0)
        return Path(
            hf_hub_download(repo, filename, revision=commit, tqdm_class=_bar(what, progress))
        )

    def fetch_if_there(filename: str) -> Path | None:
        if try_to_load_from_cache(repo, filename, revision=commit) is _CACHED_NO_EXIST:
            return None  # known from before, and asking again takes long without a network
        try:
            return fetch(filename)
        except LocalEntryNotFoundError:
            log.warning("%s: the hub cannot be reached to see if there is a %s", repo, filename)
            return None
        except EntryNotFoundError:
            return None

    if try_to_load_from_cache(repo, "config.json", revision=revision) is None:
        _probe()
    # All files of one commit, though the branch may move meanwhile: .../snapshots/<commit>/.
    folder = fetch("config.json").parent
    commit = folder.name
    index = fetch_if_there(INDEX)
    for shard in shard_names(index) if index else [SINGLE]:
        fetch(shard)
    for filename in TEXT_FILES if text_files else ():
        fetch_if_there(filename)
    return folder


def _probe() -> None:
    """Sees at once whether there is a network; the hub's client would retry for 24 s.

    Raises:
        LocalEntryNotFoundError: there is none.
    """
    try:
        get_session().head(constants.ENDPOINT, timeout=_PROBE_SECONDS)
    except Exception as error:  # the HTTP library behind the client changed between versions
        raise LocalEntryNotFoundError(str(error)) from error


def _bar(what: str, progress: Progress) -> type[tqdm]:
    """The hub's progress bar, which tells `progress` and draws nothing."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            progress(what, int(self.n), int(self.total or 0))
            return shown

    return Bar


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
