"""Registered layouts read as the fact tables say: whitelists, spellings, merged classes, parts and patients."""

from pathlib import Path

import pytest

from patchgen.data.benchmarks import BENCHMARKS, get_benchmark, match_benchmark
from patchgen.data.table import read_table

K16 = ("01_TUMOR", "02_STROMA", "03_COMPLEX", "04_LYMPHO", "05_DEBRIS", "06_MUCOSA", "07_ADIPOSE", "08_EMPTY")
K19 = ("ADI", "BACK", "DEB", "LYM", "MUC", "MUS", "NORM", "STR", "TUM")
CRCTP = ("Benign", "Complex Stroma", "Debris", "Inflammatory", "Muscle", "Stroma", "Tumor")
# the ten-class merge, written out once more: class -> folder in (CRC-TP, K-16, K-19)
MERGE = {
    "ADI": ("", "07_ADIPOSE", "ADI"), "BACK": ("", "08_EMPTY", "BACK"), "DEB": ("Debris", "05_DEBRIS", "DEB"),
    "LYM": ("Inflammatory", "04_LYMPHO", "LYM"), "MUC": ("", "", "MUC"), "MUS": ("Muscle", "", "MUS"),
    "NORM": ("Benign", "06_MUCOSA", "NORM"), "STR": ("Stroma", "02_STROMA", "STR"), "TUM": ("Tumor", "01_TUMOR", "TUM"),
    "CSTR": ("Complex Stroma", "03_COMPLEX", ""),
}  # fmt: skip


def fill(root: Path, *files: str) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


def tiles(parent: str, classes: tuple[str, ...]) -> list[str]:
    return [f"{parent}/{name}/t.tif" for name in classes]


def histocolon(root: Path) -> Path:
    return fill(
        root / "HISTOCOLON",
        *tiles("CRC-TP/CRC-TP_data/Fold2/Training", CRCTP),
        *tiles("CRC-TP/CRC-TP_data/Fold2/Testing", CRCTP[:2]),
        *tiles("CRC-TP/CRC-TP_data/Fold1/Training", CRCTP[:3]),
        *tiles("K-16/Kather_texture_2016_image_tiles_5000", K16),
        *tiles("K-19/NCT-CRC-HE-100K", K19),
        *tiles("K-19/CRC-VAL-HE-7K", K19),
    )


def test_registry_totals() -> None:
    totals = {(b.name, v): sum(n.values()) for b in BENCHMARKS.values() for v, n in b.counts.items()}
    assert totals["pacs", "9991"] == 9991 and totals["vlcs", "10729"] == 10729
    assert totals["officehome", "15588"] == 15588
    assert totals["terraincognita", "24788"] == 24788 and totals["terraincognita", "24330"] == 24330
    assert totals["domainnet", "586575"] == 586575 and totals["domainnet", "raw"] - 586575 == 9431
    assert totals["histocolon", "100K+7K"] == 196000 + 5000 + 100000 + 7180


@pytest.mark.parametrize("name", BENCHMARKS)
def test_entries_are_consistent(name: str) -> None:
    entry = BENCHMARKS[name]
    assert entry.name == name and entry.metric in ("accuracy", "f1") and entry.citation and entry.source
    assert entry.classes is None or len(entry.classes) == len(set(entry.classes)) == entry.num_classes
    assert list(entry.domains) == sorted(entry.domains)  # DomainBed's env order
    assert all(set(known) <= set(entry.domains) for known in entry.counts.values())


def test_names_are_found_and_suggested() -> None:
    assert get_benchmark("Office-Home").name == "officehome" and get_benchmark("kfold").name == "pacs"
    with pytest.raises(ValueError, match="Unknown benchmark 'domanet'.*did you mean 'domainnet'"):
        get_benchmark("domanet")


def test_whitelist_and_class_list(tmp_path: Path) -> None:
    root = fill(tmp_path / "PACS", "photo/dog/1.jpg", "sketch/horse/1.png", "splits/x/1.jpg", "Cartoon/person/1.jpg")
    table = read_table(root)
    assert table.benchmark == "pacs" and table.domains == ("cartoon", "photo", "sketch")
    assert table.classes == BENCHMARKS["pacs"].classes  # all seven, although three have images
    assert [table.classes[i] for i in table.label] == ["person", "dog", "horse"]
    assert table.paths[0] == "Cartoon/person/1.jpg"


def test_same_name_other_data_is_no_benchmark(tmp_path: Path) -> None:
    root = fill(tmp_path / "PACS", "photo/dog/1.jpg", "site/dog/1.png", "site/cat/1.png")
    assert match_benchmark(root) is None
    assert read_table(root).classes == ("cat", "dog")
    with pytest.raises(ValueError, match="does not hold pacs"):
        read_table(root, benchmark="pacs")
    fill(tmp_path / "data" / "kfold", "photo/dog/1.jpg", "sketch/horse/1.png")
    assert read_table(tmp_path / "data", benchmark="PACS").root == tmp_path / "data" / "kfold"  # the parent


@pytest.mark.parametrize("spelling", ["Real World", "Real_World", "RealWorld"])
def test_officehome_spellings(tmp_path: Path, spelling: str) -> None:
    table = read_table(fill(tmp_path / "office_home", "Art/Bed/1.jpg", f"{spelling}/Alarm_Clock/1.jpg", "list.txt"))
    assert table.domains == ("Art", "Real World") and table.classes == ("Alarm_Clock", "Bed")
    assert table.file(1).is_file()


@pytest.mark.parametrize(("folder", "files", "message"), [
    ("PACS", ("photo/dog", "sketch/hose"), "'hose' in domain 'sketch' is not a class of pacs.*mean '(house|horse)'"),
    ("office_home", ("Real World/Bed", "RealWorld/Bed", "Art/Bed"), "'Real World' and 'RealWorld' both name the"),
    ("HISTOPANTUM", ("colon/0", "colon/1", "uterus/0"), "'0' and '1' both mean class 'tumour'"),
    ("HISTOPANTUM", ("colon/tumour", "uterus/non/TCGA-A6-2671_1.jpg"), "1 of 2 file names hold no patient"),
])  # fmt: skip
def test_unclear_folders_and_names(tmp_path: Path, folder: str, files: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_table(fill(tmp_path / folder, *(f if f.endswith(".jpg") else f"{f}/1.jpg" for f in files)))


@pytest.mark.parametrize(
    "folders", [("non-tumour", "tumour"), ("non_tumor", "tumor"), ("NonTumor", "Tumor"), ("Normal", "cancer")]
)
def test_histopantum_classes_and_patients(tmp_path: Path, folders: tuple[str, str]) -> None:
    healthy, ill = folders
    name = "TCGA-A6-2671-01Z-00-DX1.13_{}_224.jpg"
    other = "TCGA-AA-3542-01Z-00-DX1_0_0.jpg"
    files = (f"colon/{ill}/{name.format(0)}", f"colon/{healthy}/{name.format(5)}", f"uterus/{ill}/{other}")
    root = fill(tmp_path / "HISTOPANTUM", *files)
    table = read_table(root)
    assert table.classes == ("non-tumour", "tumour")
    assert {p.split("/")[1]: int(c) for p, c in zip(table.paths, table.label, strict=True)} == {healthy: 0, ill: 1}
    assert table.group is not None and sorted(set(table.group)) == ["TCGA-A6-2671", "TCGA-AA-3542"]
    assert read_table(fill(tmp_path / "x" / "HISTOPANTUM", "colon/tumour/1.jpg", "uterus/non/2.jpg")).group is None


def test_histocolon_merge_is_the_published_table(tmp_path: Path) -> None:
    table = read_table(histocolon(tmp_path))
    assert table.domains == ("CRC-TP", "K-16", "K-19") and table.classes == tuple(MERGE)
    assert table.options == {"crctp_fold": "Fold2", "crctp_part": "Training", "k19_part": "NCT-CRC-HE-100K"}
    found = {
        (table.domains[d], table.classes[c]): Path(p).parent.name
        for p, d, c in zip(table.paths, table.domain, table.label, strict=True)
    }
    wanted = {(d, c): row[i] for c, row in MERGE.items() for i, d in enumerate(table.domains) if row[i]}
    assert found == wanted and len(table) == 7 + 8 + 9


def test_histocolon_parts(tmp_path: Path) -> None:
    root = histocolon(tmp_path)
    both = read_table(root, options={"k19_part": "NCT-CRC-HE-100K+CRC-VAL-HE-7K", "crctp_part": "Training+Testing"})
    assert [len(both.rows_of(d)) for d in both.domains] == [9, 8, 18]
    assert both.options["k19_part"] == "NCT-CRC-HE-100K+CRC-VAL-HE-7K"
    fold1 = read_table(root, options={"crctp_fold": "Fold1"})
    assert len(fold1.rows_of("CRC-TP")) == 3 and fold1.options["crctp_fold"] == "Fold1"
    with pytest.raises(ValueError, match="holds no 'Fold1/Testing'.*option crctp_fold / crctp_part"):
        read_table(root, options={"crctp_fold": "Fold1", "crctp_part": "Testing"})
    with pytest.raises(ValueError, match="no reading option 'k19_parts'.*did you mean 'k19_part'"):
        read_table(root, options={"k19_parts": "CRC-VAL-HE-7K"})


def test_histocolon_direct_folders_and_two_sources(tmp_path: Path) -> None:
    root = fill(tmp_path / "HISTOCOLON", *tiles("K16", K16), *tiles("K-19", K19))
    table = read_table(root)
    assert table.domains == ("K-16", "K-19") and len(table) == 17
    assert table.options == {"k19_part": "."}
    again = read_table(root, options=table.options)
    assert again.paths == table.paths and again.options == table.options
    with pytest.raises(ValueError, match="holds no 'CRC-VAL-HE-7K'"):
        read_table(root, options={"k19_part": "CRC-VAL-HE-7K"})


def test_manifest_keeps_benchmark_order_and_options(tmp_path: Path) -> None:
    table = read_table(histocolon(tmp_path), options={"k19_part": "CRC-VAL-HE-7K"})
    table.to_csv(table.root / "m.csv")
    back = read_table(table.root / "m.csv")
    assert (back.benchmark, back.options) == ("histocolon", table.options)
    assert (back.classes, back.domains) == (table.classes, table.domains)
    assert back.paths == table.paths and back.label.tolist() == table.label.tolist()


def test_manifest_read_as_a_benchmark(tmp_path: Path) -> None:
    fill(tmp_path, "1.jpg", "2.jpg")
    (tmp_path / "m.csv").write_text("path,domain,label\n1.jpg,K-16,08_EMPTY\n2.jpg,crc-tp,Tumor\n")
    table = read_table(tmp_path / "m.csv", benchmark="histocolon")
    assert table.domains == ("CRC-TP", "K-16") and [table.label_name(i) for i in (0, 1)] == ["BACK", "TUM"]
    (tmp_path / "m.csv").write_text("path,domain,label\n1.jpg,K-16,08_EMPTY\n2.jpg,K-20,Tumor\n")
    with pytest.raises(ValueError, match="line 3: 'K-20' is none of CRC-TP, K-16, K-19"):
        read_table(tmp_path / "m.csv", benchmark="histocolon")
