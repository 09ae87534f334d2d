"""Reading files and the hub: types survive, places are named, failures say what to do."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from grpo_lab.config import ConfigError, TableConfig
from grpo_lab.prompts.rows import read_file, read_hub


def test_json_lines_keep_types_and_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"answer": "033"}\n\n{"answer": 33}\n{"answer": 0.10}\n{"answer": ["2", 5]}\n'
        '{"answer": 123456789012345678901234567890}\n'
    )
    rows = list(read_file(path, "dataset.path"))
    assert [row.values["answer"] for row in rows] == [
        "033",
        33,
        Decimal("0.10"),
        ["2", 5],
        123456789012345678901234567890,
    ]
    assert str(rows[2].values["answer"]) == "0.10"
    assert [row.place for row in rows] == [f"{path} line {number}" for number in (1, 3, 4, 5, 6)]


def test_line_separators_inside_text_end_no_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"q": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [row.values for row in read_file(path, "dataset.path")] == [{"q": "a\u2028b\x85c"}]


@pytest.mark.parametrize("line", [b"{not json", b'{"q": "\xff"}', b'"text"', b"7", b"[" * 100_000])
def test_a_bad_line_is_a_faulty_row_and_the_rest_is_read(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"q": 1}\n' + line + b'\n{"q": 3}\n')
    first, bad, last = read_file(path, "dataset.path")
    assert (first.fault, last.fault) == (None, None)
    assert bad.fault is not None
    assert bad.place.endswith("line 2")


def test_a_json_array_and_json_lines_share_a_suffix(tmp_path: Path) -> None:
    array, lines = tmp_path / "array.json", tmp_path / "lines.json"
    array.write_text('\n [{"q": 1},\n {"q": 0.5}]')
    lines.write_text('{"q": 1}\n{"q": 0.5}\n')
    expected = [{"q": 1}, {"q": Decimal("0.5")}]
    assert [row.values for row in read_file(array, "dataset.path")] == expected
    assert [row.values for row in read_file(lines, "dataset.path")] == expected


def test_a_row_that_is_a_list_has_positions_as_columns(tmp_path: Path) -> None:
    path = tmp_path / "orz.json"
    path.write_text('[[{"from": "human", "value": "Q"}, {"from": "assistant"}]]')
    (row,) = read_file(path, "dataset.path")
    assert row.values == {"0": {"from": "human", "value": "Q"}, "1": {"from": "assistant"}}


def test_parquet_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    path = tmp_path / "rows.parquet"
    write_table(pyarrow.Table.from_pylist([{"q": "a", "s": [0.25, 1.0]}, {"q": "b", "s": None}]), path)
    rows = list(read_file(path, "dataset.path"))
    assert [row.values for row in rows] == [{"q": "a", "s": [0.25, 1.0]}, {"q": "b", "s": None}]
    assert rows[1].place == f"{path} row 2"


def test_unreadable_files_name_the_key_and_the_file(tmp_path: Path) -> None:
    for name, content in (("a.parquet", b"nonsense"), ("b.json", b"[1, 2"), ("c.csv", b"q,a\n")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"dataset\.path=.*{name}"):
            list(read_file(tmp_path / name, "dataset.path"))
    with pytest.raises(ConfigError, match=r"dataset\.test_path=.*absent\.jsonl does not exist"):
        read_file(tmp_path / "absent.jsonl", "dataset.test_path")


def test_a_table_without_id_and_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dataset\.id is not set.*dataset\.path="):
        read_hub(TableConfig(kind="table", name="t"), "train", "dataset")


def test_hub_splits_are_read_by_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.jsonl").write_text('{"q": "a"}\n{"q": "b"}\n')
    (source / "test.jsonl").write_text('{"q": "c"}\n')
    config = TableConfig(kind="table", name="t", id=str(source))
    assert [row.values for row in read_hub(config, "train", "dataset")] == [{"q": "a"}, {"q": "b"}]
    (row,) = read_hub(config, "test", "dataset")
    assert (row.values, row.place) == ({"q": "c"}, f"{source} (test) row 1")
    with pytest.raises(ConfigError, match=r"dataset\.id=.*Unknown split.*dataset\.path="):
        read_hub(config, "validation", "dataset")


def test_one_file_of_the_hub_is_read_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the hub's own cache layout: `datasets` would give the mixed column one type."""
    from huggingface_hub import constants

    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "datasets--someone--problems" / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "test.jsonl").write_text('{"answer": "033"}\n{"answer": 33}\n')
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    config = TableConfig(kind="table", name="t", id="someone/problems", revision=revision, file="test.jsonl")
    assert [row.values["answer"] for row in read_hub(config, "train", "dataset")] == ["033", 33]


@pytest.mark.parametrize("file", [None, "train.jsonl"])
def test_an_unreachable_hub_names_the_key_the_id_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str | None
) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    config = TableConfig(kind="table", name="t", id="hendrycks/competition_math", file=file)
    with pytest.raises(ConfigError) as caught:
        read_hub(config, "train", "dataset.parts.0")
    message = str(caught.value)
    assert message.startswith("dataset.parts.0.id=hendrycks/competition_math cannot be loaded")
    assert "dataset.parts.0.path=" in message
    assert "\n" not in message
