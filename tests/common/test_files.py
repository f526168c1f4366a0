"""Files are whole or as they were, and no temporary name stays."""

from pathlib import Path

import pytest

from patchgen.common import files
from patchgen.common.files import replacing, working_folder, write_text


def test_a_file_takes_its_place_when_the_block_ends_well(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with replacing(target) as temporary, temporary.open("w") as handle:
        handle.write("new")
        assert target.read_text() == "old" and temporary.parent == tmp_path and temporary.name.startswith(".")
    assert target.read_text() == "new" and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_block_leaves_all_as_it_was(error: type[BaseException], tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(error), replacing(target) as temporary:
        temporary.write_text("half")
        raise error
    with pytest.raises(error), replacing(str(target)):  # before anything was written
        raise error
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as one, replacing(tmp_path / "a") as two:
        one.write_text("first")
        two.write_text("second")
    assert one != two and (tmp_path / "a").read_text() == "first"  # the outer block ended last


def test_text_is_utf8_as_given(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "\u00fc\r\n\n")
    assert (tmp_path / "a").read_bytes() == b"\xc3\xbc\r\n\n"
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "b", "\udcff")
    write_text(tmp_path / "c", "\udcff", "backslashreplace")
    assert (tmp_path / "c").read_text() == "\\udcff" and not (tmp_path / "b").exists()


def test_a_folder_that_another_process_cleans_away_before_its_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, taken = files.lock, list[Path]()

    def late(descriptor: int) -> bool:
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].rmdir()
        return lock(descriptor)

    monkeypatch.setattr(files, "lock", late)
    with working_folder(tmp_path / "target") as folder:
        assert folder.is_dir() and folder not in taken
    assert not list(tmp_path.iterdir())
